"""Validation after an epoch: all cases or the sample of them that the settings name, shared out among the processes.

Where tables are cut by rows, each process scores the rows that it has: queries, the targets' scores and counts travel,
and no process holds a whole table. Nothing here trains or touches files.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fastcl.recsys.data import Cases, Histories, Split
from fastcl.recsys.data.scoring import frozen
from fastcl.recsys.evaluation.cutoffs import cutoffs_in
from fastcl.recsys.evaluation.measures import Ranking, measure
from fastcl.recsys.evaluation.ranking import NotNumbers, evaluate, how_many, mask_seen, placed, rows_at_once
from fastcl.recsys.models import Model
from fastcl.recsys.models.base import inner_products
from fastcl.recsys.training import processes
from fastcl.recsys.training.loop import Run, check_metric
from fastcl.recsys.training.rowadam import RowAdam
from fastcl.recsys.training.state import Settings

# Cases times items that an epoch ranks at most, unless valid_cases asks for more. A score takes about 30 ns of one core
# (benchmarks/bench_scale.py), so that this is five minutes of it.
SCORES = 10**10
FEWEST = 1_000  # cases; the standard error of a recall of 0.1 is then 0.0095


def with_sample(settings: Settings, split: Split) -> Settings:
    """The settings with the number of cases that validation measures; None where these are all cases of the split.

    ValueError where a number is asked for and there are no cases, and for a metric that the cases do not have.
    """
    check_metric(split, settings.metric)
    asked, cases = settings.valid_cases, len(split.valid)
    if asked is not None and not cases:
        raise ValueError(f"valid_cases: expected none for a split without validation cases, got {asked}")
    wanted = max(FEWEST, SCORES // len(split.items)) if asked is None else asked
    return replace(settings, valid_cases=None if wanted >= cases else wanted)


def note(settings: Settings, cases: int) -> str | None:
    """A sentence for readers of the figures; None where they are of all cases."""
    if settings.valid_cases is None:
        return None
    return f"validation is on a random sample of {settings.valid_cases:,} of {cases:,} cases, the same at each epoch"


def sampled(cases: Cases, count: int | None) -> Cases:
    """`count` of the cases, or all for None. The same cases for every seed of a training, so that runs compare.

    >>> from fastcl.recsys import bundled
    >>> len(sampled(bundled("purchases").split().valid, 100))
    100
    """
    if count is None or count >= len(cases):
        return cases
    return cases.take(np.sort(np.random.default_rng(0).choice(len(cases), count, replace=False)))


def validate(run: Run) -> dict[str, float]:
    """The metrics as means over the cases, the same in all processes; {} without cases."""
    if not len(run.split.valid):
        return {}
    cases = sampled(run.split.valid, run.settings.valid_cases)
    names = run.settings.metrics
    if processes.count() == 1:
        with _finite(run.settings.lr):
            return _evaluated(run, cases)
    if run.optimizer.tables and run.model.reads_of(cases.history) is not None:
        found = rank_shared(run.model, run.optimizer, cases, run.split.counts, run.settings)
        scores = measure(found, names)
        return {name: scores[name] for name in names}
    with run.optimizer.whole():
        return _cases_shared(run, cases)


def _evaluated(run: Run, cases: Cases) -> dict[str, float]:
    names = run.settings.metrics
    scores = evaluate(run.model.eval(), cases, counts=run.split.counts, seen=run.settings.seen, metrics=names)
    return {name: scores[name] for name in names}


def _cases_shared(run: Run, cases: Cases) -> dict[str, float]:
    """Each process scores some of the cases with the whole model."""
    rows = np.arange(processes.rank(), len(cases), processes.count())
    names = run.settings.metrics
    sums = torch.zeros(len(names) + 1, device="cpu", dtype=torch.float64)
    with processes.together(), _finite(run.settings.lr):
        if len(rows):
            means = [1.0, *_evaluated(run, cases.take(rows)).values()]
            sums = len(rows) * torch.tensor(means, device="cpu", dtype=torch.float64)
    total = processes.add(sums.to(run.model.device)).tolist()
    return {name: value / total[0] for name, value in zip(names, total[1:], strict=True)}


@contextmanager
def _finite(lr: float) -> Iterator[None]:
    """The last step of an epoch may make weights NaN, which no loss has shown yet."""
    try:
        yield
    except NotNumbers as error:
        raise FloatingPointError(f"{error}, in validation; try a lower lr than {lr}") from error


def rank_shared(model: Model, optimizer: RowAdam, cases: Cases, counts: np.ndarray, settings: Settings) -> Ranking:
    """What `rank_cases` finds of a model whose tables are cut by rows: all processes get the ranks of all cases.

    The ranks are those of the whole table wherever the products that make the scores are exact; else scores that differ
    by rounding may change places, as they may with another size of batch.
    """
    ranks, candidates = [], []
    with torch.inference_mode(), frozen(model), optimizer.own_rows():
        table = _Shard(model)
        # Processes may differ by an item, and must not differ in this.
        size = rows_at_once(1 + -(-len(model.items) // processes.count()))
        for begin in range(0, len(cases), size):
            part = cases.take(np.arange(begin, min(begin + size, len(cases))))
            query = _queries(model, optimizer, part.history, settings.lr)
            with processes.together(), _finite(settings.lr):
                scores = table.scores(query, part.history, settings.seen)
            found = table.ranks(scores, part)
            ranks.append(found[0].cpu())
            candidates.append(found[1].cpu())
    return Ranking(
        cutoffs_in(settings.metrics),
        torch.cat(ranks).numpy(),
        torch.cat(candidates).numpy(),
        cases.target,
        counts,
        None,
        None,
        cases.repeated,
        cases.offsets,
    )


def _queries(model: Model, optimizer: RowAdam, histories: Histories, lr: float) -> Tensor:
    """encode(histories), of which each process encodes an equal number, some twice where they do not divide."""
    rank, count = processes.rank(), processes.count()
    each = -(-len(histories) // count)
    own = histories.take(np.arange(rank, each * count, count) % len(histories))
    optimizer.look(model.reads_of(own) or ())
    with processes.together(), _finite(lr):
        query = model.encode(own).contiguous()
    if count == 1:
        return query
    of_all = [torch.empty_like(query) for _ in range(count)]
    dist.all_gather(of_all, query)
    return torch.stack(of_all, 1).flatten(0, 1)[: len(histories)]


class _Shard:
    """The vectors of this process's items, in columns from 1 on; column 0 is padding in every process."""

    def __init__(self, model: Model) -> None:
        self.rank, self.count, self.device = processes.rank(), processes.count(), model.device
        self.first = self.rank or self.count  # item 0, the padding, is in no column
        item = torch.arange(self.first, len(model.items) + 1, self.count, device=self.device)
        vectors = model.vectors_of(item)
        self.vectors = torch.cat([vectors.new_zeros(1, vectors.shape[1]), vectors])

    def scores(self, query: Tensor, history: Histories, seen: str) -> Tensor:
        """[B, columns], with padding and seen items at -inf."""
        row = np.repeat(np.arange(len(history)), history.lengths)
        here = self._here(history.item)
        offsets = np.append(0, np.bincount(row[here], minlength=len(history)).cumsum())
        return mask_seen(
            inner_products(query, self.vectors), Histories(offsets, self._column(history.item[here])), seen
        )

    def ranks(self, scores: Tensor, cases: Cases) -> tuple[Tensor, Tensor]:
        """(rank of each target [T], candidates of each case [B]), from the scores of all processes."""
        here = self._here(cases.target)
        case, own = (torch.from_numpy(part).to(self.device) for part in (cases.case, np.flatnonzero(here)))
        column = torch.from_numpy(self._column(cases.target[here])).to(self.device)
        value = scores.new_zeros(len(case))  # of one process that is not 0 for each target, so that the sum is exact
        value[own] = scores[case[own], column]
        value = processes.add(value)
        numbers: list[list[Tensor]] = [[], []]
        for some in torch.arange(len(case), device=self.device).split(len(scores)):
            of_case = scores if cases.offsets is None else scores[case[some]]
            for found, compared in zip(numbers, (torch.gt, torch.eq), strict=True):
                found.append(how_many(compared, of_case, value[some, None]))
        candidates = how_many(torch.gt, scores, -torch.inf)
        higher, equal, candidates = processes.add(torch.cat([*numbers[0], *numbers[1], candidates])).split(
            [len(case), len(case), len(scores)]
        )
        return placed(value, higher, equal - 1), candidates

    def _here(self, item: np.ndarray) -> np.ndarray:
        return item % self.count == self.rank

    def _column(self, item: np.ndarray) -> np.ndarray:
        return (item - self.first) // self.count + 1
