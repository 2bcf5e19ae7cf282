"""CLRec, its relatives and the floors as scorers of rows: what they train on, and three ways to make one score that
compares the rows of all users.

A candidate generator ranks items for one user. The scores of two users have no common scale, unless the loss fixes one:
- "score": the score as it is, cosine / temperature.
- "share": the score less the row's log-partition over all items, the log of the softmax over the items. Two users'
  shares are comparable, since each user's add up to one.
- "popular share": the same of the score plus the log of the item's share of the train clicks. If a loss without log q
  has divided that share out, this is the log probability of the click, which the best score of rows with uniform
  negatives is.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import fastcl
from benchmarks.clicks.rows import Data, Rows
from benchmarks.clicks.training import Scored
from fastcl.recsys import CLRec, MultiCLRec
from fastcl.recsys.data import Items, Scorer
from fastcl.recsys.models import Model
from fastcl.recsys.models.batching import log_shares
from fastcl.recsys.models.clrec.model import Batch
from fastcl.recsys.training import loop
from fastcl.recsys.training.state import Progress, Settings


class WeightedMultiCLRec(MultiCLRec):
    """Inverse propensity weighting with Multi-CLRec's encoder: the full softmax over the items, each pair weighted by 1
    / its item's share of the clicks as in CLRec's objective "ipw", takes the place of the queues.
    """

    log_share: Tensor

    def __init__(self, items: Items, *, weight_limit: float = 10.0, **options: Any) -> None:
        super().__init__(items, **options)
        self.weight_limit = weight_limit
        self.register_buffer("log_share", torch.zeros(len(items)), persistent=False)

    def batches(self, train: Any, rng: np.random.Generator) -> Iterator[Batch]:
        self.log_share.copy_(log_shares(train, len(self.items)))
        return super().batches(train, rng)

    def contrast(self, user: Tensor, positive: Tensor, target: Tensor, *queued: Any) -> Tensor:
        weight = torch.exp(-self.log_share[target - 1]) / len(self.items)
        table = F.normalize(self.item(torch.arange(1, len(self.items) + 1))[0], dim=-1)
        return fastcl.linear_cross_entropy(
            user,
            table,
            target - 1,
            temperature=self.config.temperature,
            row_weight=weight.clamp(max=self.weight_limit),
        )


MODELS: dict[str, Callable[..., Model]] = {
    "clrec": CLRec,
    "ipw multi_clrec": WeightedMultiCLRec,
    "multi_clrec": MultiCLRec,
    "own clicks": partial(MultiCLRec, clicks="own"),
    "ipw own clicks": partial(WeightedMultiCLRec, clicks="own"),
}


def trained(name: str, data: Data, options: Mapping[str, Any], epochs: int, seed: int) -> Iterator[Scored]:
    """What scores rows after each epoch of training on the histories and clicked targets of the rows that train."""
    model = MODELS[name](data.items, seed=seed, **options)
    run = loop.new_run(model, data.split, Settings(epochs, model.config.lr, seed=seed))
    with torch.random.fork_rng(devices=[]):
        for epoch in range(epochs):
            loss = sum(loop.epoch(run).values())
            run.progress = Progress([*run.progress.history, {"epoch": epoch + 1, "loss": loss}])
            yield scorer(model, data)


def scorer(found: Scorer, data: Data) -> Scored:
    """Of a model or a floor."""
    log_share = log_shares(data.split.train, len(data.items))

    @torch.inference_mode()
    def scored(rows: Rows) -> dict[str, np.ndarray]:
        parts: dict[str, list[Tensor]] = {"score": [], "share": [], "popular share": []}
        for begin in range(0, len(rows.target), 1024):
            part = rows.take(np.arange(begin, min(begin + 1024, len(rows.target))))
            scores = found.scores(part.history)[:, 1:]
            target = torch.from_numpy(part.target - 1)[:, None]
            more = scores + log_share
            parts["score"].append(scores.gather(1, target)[:, 0])
            parts["share"].append(scores.log_softmax(1).gather(1, target)[:, 0])
            parts["popular share"].append(more.log_softmax(1).gather(1, target)[:, 0])
        return {name: torch.cat(values).double().numpy() for name, values in parts.items()}

    return scored
