"""Exact ranks of the targets of cases, among all items or among 100 drawn negatives, a chunk of cases at a time.

No other module masks seen items. Nothing here trains or loops over users in Python.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from fastcl.recsys.data import PAD, Cases, Histories, Scorer
from fastcl.recsys.data.scoring import check_items, frozen
from fastcl.recsys.evaluation.cutoffs import Cutoffs, Metrics, at_cutoffs, cutoff, cutoffs, cutoffs_in, listed, parted
from fastcl.recsys.evaluation.distance import MeanDistance
from fastcl.recsys.evaluation.measures import DEFAULT, DISTANCE, WITHOUT_K, Ranking, check_metrics, measure

NEGATIVES = 100
SEEN = ("mask", "keep")
MEMORY = 2**28
# protocol -> the weights in proportion to which its negatives are drawn; None: it draws none.
PROTOCOLS: dict[str, Callable[[np.ndarray], np.ndarray] | None] = {
    "full": None,
    "uniform100": np.ones_like,
    "pop100": lambda counts: counts,
}
# Bytes per score at the peak: the score, its masked copy, comparisons and top-k; and the bytes that a draw adds.
_SCORE_BYTES, _DRAW_BYTES = 16, 32
# `rows_at_once`: rows, and scores of so many rows.
MANY_ROWS, MANY_SCORES, FEW_ROWS, MOST_SCORES = 256, 3 * 2**20, 16, 2**25


class NotNumbers(ValueError):
    """A scorer's scores are NaN."""


def evaluate(
    scorer: Scorer,
    cases: Cases,
    *,
    counts: np.ndarray | None = None,
    k: Cutoffs = 10,
    seen: str = "mask",
    protocol: str = "full",
    metrics: Metrics | None = None,
    vectors: torch.Tensor | None = None,
    seed: int = 0,
    chunk: int | None = None,
    memory: int = MEMORY,
) -> dict[str, float]:
    """The metrics as means over all cases, and three counts: "cases", "unseen_targets" (targets without a train click,
    which are ranked like any other item) and "repeated_targets" (targets in the history of their own case).

    scorer:   has `scores(histories)`, float [B, I+1]; a model is in eval mode during the call.
    counts:   int64 [I+1], clicks of each item in train; None: the counts that the cases carry, as those of a split do.
    k:        cut-offs: 10, (10, 50) or "10,50".
    seen:     "mask" puts the items of a case's history at -inf, so that a repeated target is a miss for every scorer;
              "keep" ranks them.
    protocol: "full" ranks all items. "uniform100" and "pop100" rank the target among 100 negatives, drawn by
              `draw_negatives` uniformly among all items, or in proportion to the train clicks. Figures of a sampled
              protocol can be compared with figures of the same protocol only.
    metrics:  names from measures.METRICS, as a sequence or one text with commas: "recall" (also named "hr"), "ndcg",
              "mrr", "map" and "auc"; with full ranking also "diversity", "coverage", "popularity", "gini", "novelty"
              and "distance". "recall@50" has its own cut-off; "recall" is taken at every cut-off of k. None: recall,
              ndcg, diversity and popularity; for a sampled protocol hr and ndcg.
    vectors:  float [I+1, D], read by "distance" alone, the intra-list distance: a list's mean of 1 - cosine over its
              pairs of items, averaged over the lists that have a pair. `distance.feature_vectors` makes such vectors
              from item features.
    seed:     seed of the negatives; calls with the same seed draw the same negatives.
    chunk:    the most cases that are scored at once; None: `rows_at_once`. memory: about the bytes that their scores
              may take; at least one case is scored at once.

    With one target, recall@k = HR@k = 1 and NDCG@k = 1 / log2(rank + 1) where rank <= k, else 0. With several targets
    (`Interactions.presplit(targets="all")`), recall@k is the share of targets with rank <= k, and NDCG@k is the sum of
    1 / log2(rank + 1) over these targets, divided by that sum for the best list of k, as in LightGCN's evaluation. Such
    a case counts once, however many targets it has; its protocol must be "full", and there is no auc.

    Ties count half: rank = 1 + #higher + 0.5 * #equal others, so that a constant scorer gains nothing from the order of
    the ids. A target with score -inf is never recommended; it is a miss at every k, even under ties.

    Raises ValueError for a bad option, no cases, scores of a wrong shape, a NaN score, or a model with another item
    table than the cases.

    >>> from fastcl.recsys.data import bundled
    >>> from fastcl.recsys import Popularity
    >>> split = bundled("purchases").split()
    >>> round(evaluate(Popularity(split.counts), split.test, seen="keep")["recall@10"], 4)
    0.2085
    """
    names = metric_names(metrics, k, protocol, vectors is not None)
    k, vectors = cutoffs_in(names) or k, wanted_vectors(vectors, names)
    found = rank_cases(
        scorer, cases, counts=counts, k=k, seen=seen, protocol=protocol, vectors=vectors, seed=seed, chunk=chunk,
        memory=memory,
    )  # fmt: skip
    return measure(found, names)


def metric_names(metrics: Metrics | None, k: Cutoffs, protocol: str, vectors: bool) -> tuple[str, ...]:
    """`metrics`, or for None the protocol's default, each with its cut-off. ValueError for a metric that is undefined
    under the protocol or without item vectors.

    >>> metric_names(None, (5, 10), "pop100", vectors=False)
    ('hr@5', 'hr@10', 'ndcg@5', 'ndcg@10')
    """
    _check_protocol(protocol)
    metrics = DEFAULT[protocol] if metrics is None else metrics
    check_metrics(metrics, protocol, vectors)
    return at_cutoffs(metrics, k, tuple(WITHOUT_K))


def wanted_vectors(vectors: torch.Tensor | None, metrics: Metrics) -> torch.Tensor | None:
    """The item vectors where one of the metrics reads them, else None."""
    return vectors if DISTANCE in (parted(metric)[0] for metric in listed(metrics)) else None


def rows_at_once(items: int) -> int:
    """How many rows of scores of so many items are computed and ranked together, as measured on processors.

    Large matrices leave the processor's cache, and the C library fetches each of them anew from the system, which takes
    as long as the product. Fewer rows read the item table more often.

    >>> [rows_at_once(items) for items in (1_000, 40_000, 1_000_000, 10_000_000)]
    [256, 78, 16, 3]
    """
    return max(1, min(MANY_ROWS, MANY_SCORES // items), min(FEW_ROWS, MOST_SCORES // items))


def rank_cases(
    scorer: Scorer,
    cases: Cases,
    *,
    counts: np.ndarray | None = None,
    k: Cutoffs = 10,
    seen: str = "mask",
    protocol: str = "full",
    vectors: torch.Tensor | None = None,
    inputs: Histories | None = None,
    on_lists: Callable[[torch.Tensor], None] | None = None,
    seed: int = 0,
    chunk: int | None = None,
    memory: int = MEMORY,
) -> Ranking:
    """Ranks the targets of every case once, for any number of metrics; arguments, ties and errors as in `evaluate`.

    inputs: one history per case, which the scorer reads instead of the case's own; the own one still masks seen items.
    on_lists: a function that gets the lists of the next cases, int64 [B, max(k)], best first, 0 for an empty place;
        called for all cases in their order where the protocol is "full".

    >>> from fastcl.recsys.data import bundled
    >>> from fastcl.recsys import Popularity
    >>> split = bundled("purchases").split()
    >>> found = rank_cases(Popularity(split.counts), split.test, k=(10,))
    >>> len(found.rank), int(found.shown.sum())
    (2345, 23450)
    """
    k = cutoffs(k)
    _check_options(seen, chunk)
    _check_protocol(protocol)
    if memory < 1:
        raise ValueError(f"memory: expected at least 1 byte, got {memory}")
    counts = train_counts(cases, counts)
    inputs = cases.history if inputs is None else inputs
    if cases.offsets is not None and protocol != "full":
        raise ValueError(f"protocol: expected 'full' where cases have several targets, got {protocol!r}")
    if not len(cases):
        raise ValueError('cases: expected at least one, got none (the split "none" holds nothing out)')
    for histories in (cases.history, inputs):
        check_items(scorer, histories, "cases")
    top = max(part.max(initial=0) for part in (cases.target, cases.history.item, inputs.item))
    if top >= len(counts):
        raise ValueError(f"cases: expected items 1..{len(counts) - 1} (counts has {len(counts)}), got {top}")
    if len(inputs) != len(cases):
        raise ValueError(f"inputs: expected one history per case ({len(cases)}), got {len(inputs)}")
    distances = None if vectors is None else [MeanDistance(vectors, len(counts)) for _ in k]
    drawn_by = PROTOCOLS[protocol]
    weights = None if drawn_by is None else drawn_by(counts)
    bytes_a_case = len(counts) * (_SCORE_BYTES + (0 if weights is None else _DRAW_BYTES))
    chunk = rows_at_once(len(counts)) if chunk is None else chunk
    rng = np.random.default_rng(seed)
    rank = torch.empty(len(cases.target), device="cpu", dtype=torch.float64)
    candidates = torch.empty(len(cases), device="cpu", dtype=torch.int64)
    shown = torch.zeros(len(k), len(counts), device="cpu", dtype=torch.int64)
    with torch.inference_mode(), frozen(scorer):
        for rows in _chunks(len(cases), min(chunk, max(memory // bytes_a_case, 1))):
            history = cases.history.take(rows)
            scores = scorer.scores(inputs.take(rows))
            if scores.shape != (len(rows), len(counts)):
                expected = f"[{len(rows)}, {len(counts)}] (counts has {len(counts)})"
                raise ValueError(f"scores: expected {expected}, got {list(scores.shape)}")
            scores = mask_seen(scores, history, seen)
            if weights is not None:
                target = torch.from_numpy(cases.target[rows]).to(scores.device)
                # Empty places of the draw hold the padding item, whose score is -inf.
                drawn = torch.from_numpy(draw_negatives(history, cases.target[rows], weights, rng, seen))
                others = scores.gather(1, drawn.to(scores.device))
                rank[rows] = _rank(scores.gather(1, target[:, None]), others, others=0).cpu()
                candidates[rows] = 1 + how_many(torch.gt, others, -torch.inf).cpu()
                continue
            best, best_scores = _best(scores, max(k))
            if cases.offsets is None:
                target = torch.from_numpy(cases.target[rows]).to(scores.device)
                rank[rows] = _rank(scores.gather(1, target[:, None]), scores, others=-1).cpu()
            else:
                several = cases.offsets[rows[0] : rows[-1] + 2]
                span = slice(several[0], several[-1])
                row = torch.from_numpy(np.repeat(rows - rows[0], np.diff(several))).to(scores.device)
                target = torch.from_numpy(cases.target[span]).to(scores.device)
                rank[span] = _rank_above(scores, row, target, best_scores).cpu()
            candidates[rows] = how_many(torch.gt, scores, -torch.inf).cpu()
            items = best.cpu()
            if on_lists is not None:
                on_lists(items)
            for nth, length in enumerate(k):
                shown[nth] += torch.bincount(items[:, :length].flatten(), minlength=len(counts))
                if distances is not None:
                    distances[nth].add(items[:, :length])
    shown[:, PAD] = 0  # empty places of lists hold the padding item
    return Ranking(
        k,
        rank.numpy(),
        candidates.numpy(),
        cases.target,
        counts,
        shown.numpy() if weights is None else None,
        None if distances is None else np.array([distance.value for distance in distances]),
        cases.repeated,
        cases.offsets,
    )


def train_counts(cases: Cases, counts: np.ndarray | None = None) -> np.ndarray:
    """`counts` if given, else the counts that the cases carry; int64 [I+1], checked."""
    counts = cases.counts if counts is None else np.asarray(counts)
    if counts is None:
        raise ValueError("counts: expected the train clicks of each item, got none, and the cases carry none")
    if counts.ndim != 1 or counts.dtype.kind not in "iu":
        raise ValueError(f"counts: expected an integer vector [I+1], got {counts.dtype} {list(counts.shape)}")
    return counts


def top_k(
    scores: torch.Tensor, history: Histories, k: Cutoffs, seen: str = "mask", allowed: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k best items of each row: (items int64 [B, K], scores [B, K]), best first, K = min(k, I).

    scores: [B, I+1]. seen: "mask" leaves out the items of the row's history. allowed: bool [I+1], the items that rows
    may hold; None: all items. Where fewer than K items remain, the rest of the row is item 0 with score -inf. The
    order of equal scores is unspecified.

    >>> top_k(torch.tensor([[-torch.inf, 3.0, 2.0, 1.0]]), Histories.from_lists([[1]]), k=2)[0].tolist()
    [[2, 3]]
    """
    k = cutoff(k)
    _check_options(seen)
    masked = mask_seen(scores, history, seen)
    if allowed is not None:
        masked[:, ~allowed.to(masked.device)] = -torch.inf
    return _best(masked, k)


def mask_seen(scores: torch.Tensor, history: Histories, seen: str) -> torch.Tensor:
    """A copy of scores [B, I+1] with padding, and under seen="mask" the items of each row's history, at -inf."""
    if scores.ndim != 2 or len(scores) != len(history):
        raise ValueError(f"scores: expected [{len(history)}, I+1], one row per history, got {list(scores.shape)}")
    if not scores.is_floating_point():
        raise ValueError(f"scores: expected floating-point numbers, got {scores.dtype}")
    if torch.isnan(scores.amax(1)).any():  # the maximum of a row with a NaN is NaN; isnan of all scores takes longer
        raise NotNumbers("scores: expected numbers, got NaN")
    masked = scores.clone(memory_format=torch.contiguous_format)
    masked[:, PAD] = -torch.inf
    if seen == "mask":
        masked[_rows(history).to(scores.device), torch.from_numpy(history.item).to(scores.device)] = -torch.inf
    return masked


def draw_negatives(
    history: Histories, target: np.ndarray, counts: np.ndarray, rng: np.random.Generator, seen: str = "mask"
) -> np.ndarray:
    """100 negatives per row: int64 [B, 100], drawn without replacement in proportion to counts [I+1].

    The target and items of count 0 are never drawn, nor under seen="mask" the items of the row's history. Under "keep"
    these items may be drawn, since they compete with the target in full ranking too. A row with fewer than 100 such
    items holds all of them, followed by 0.

    The draw is exact: the 100 smallest of independent exponentials with rates counts[i] are distributed as 100
    successive draws without replacement in proportion to counts (Gumbel-top-k on another scale).
    """
    pool = np.flatnonzero(counts[1:]) + 1
    place = np.full(len(counts), len(pool))  # items without a click share an extra last column, which is cut off
    place[pool] = np.arange(len(pool))
    arrival = np.full((len(target), len(pool) + 1), np.inf)
    arrival[:, :-1] = rng.standard_exponential((len(target), len(pool)))
    arrival[:, :-1] /= counts[pool]
    arrival[np.arange(len(target)), place[target]] = np.inf
    if seen == "mask":
        arrival[_rows(history).numpy(), place[history.item]] = np.inf
    n = min(NEGATIVES, len(pool))
    first = np.argpartition(arrival, n, axis=1)[:, :n]
    drawn = np.isfinite(np.take_along_axis(arrival, first, axis=1))
    negatives = np.zeros((len(target), NEGATIVES), np.int64)
    negatives[:, :n] = np.where(drawn, np.append(pool, PAD)[first], PAD)
    return negatives


def _rank(target: torch.Tensor, candidates: torch.Tensor, others: int) -> torch.Tensor:
    """Rank of target [B, 1] among candidates [B, M]. others: -1 where the candidates hold the target itself, else 0."""
    higher, equal = how_many(torch.gt, candidates, target), how_many(torch.eq, candidates, target) + others
    return placed(target[:, 0], higher, equal)


def how_many(compared: Callable[..., torch.Tensor], scores: torch.Tensor, value: torch.Tensor | float) -> torch.Tensor:
    """How many scores of each row [B, M] compare so (`torch.gt`, ...) with value [B, 1] or a number: int64 [B].

    >>> how_many(torch.gt, torch.tensor([[1.0, 2.0, 3.0]]), 1.5).tolist()
    [2]
    """
    # The flags are floats, of which torch adds four times as many in a second as of bool. Sums of floats are exact to
    # 2^24 in float32, but not in the 16-bit types.
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    flags = compared(scores, value, out=torch.empty_like(scores))
    return torch.stack([part.sum(1).long() for part in flags.split(2**24, 1)]).sum(0)


def placed(score: torch.Tensor, higher: torch.Tensor, equal: torch.Tensor) -> torch.Tensor:
    """The rank of a target with this score [T], of which so many items have higher and so many others equal scores."""
    rank = 1.0 + higher.double() + 0.5 * equal.double()
    return torch.where(score == -torch.inf, torch.inf, rank)


def _rank_above(scores: torch.Tensor, row: torch.Tensor, target: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    """Rank of each target [T] in its row [T] of scores [B, I+1]; inf for a target below the row's `best` [B, K]."""
    of_target = scores[row, target][:, None]
    rank = _rank(of_target, best[row], others=-1)
    # `best` may lack items whose score equals its last one, so ranks of such targets come from all scores.
    for edge in torch.nonzero(of_target[:, 0] == best[row, -1])[:, 0].split(len(scores)):
        rank[edge] = _rank(of_target[edge], scores[row[edge]], others=-1)
    return rank.masked_fill(of_target[:, 0] < best[row, -1], torch.inf)


def _best(masked: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    scores, items = masked.topk(min(k, masked.shape[1] - 1), dim=1)
    return torch.where(scores == -torch.inf, PAD, items), scores


def _rows(history: Histories) -> torch.Tensor:
    return torch.repeat_interleave(torch.arange(len(history), device="cpu"), torch.from_numpy(history.lengths))


def _chunks(count: int, chunk: int) -> list[np.ndarray]:
    return [np.arange(start, min(start + chunk, count)) for start in range(0, count, chunk)]


def _check_options(seen: str, chunk: int | None = None) -> None:
    if seen not in SEEN:
        raise ValueError(f"seen: expected one of {', '.join(map(repr, SEEN))}, got {seen!r}")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk: expected at least 1, got {chunk}")


def _check_protocol(protocol: str) -> None:
    if protocol not in PROTOCOLS:
        raise ValueError(f"protocol: expected one of {', '.join(map(repr, PROTOCOLS))}, got {protocol!r}")
