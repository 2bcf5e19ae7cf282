"""Formulas of the ranking metrics: what `metrics.rank_cases` found, to numbers. Three tables by what a formula reads:
the ranks of the targets, the recommended lists, or both without a cut-off. Nothing here scores or ranks.

One target a case, so that recall@k is also the hit rate, and MAP@k is MRR@k.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fastcl.recsys.evaluation.cutoffs import Metrics, at_cutoffs, listed, parted


@dataclass(frozen=True, eq=False)
class Ranking:
    """What ranking the cases found.

    k:          the cut-offs of `shown` and `distance`.
    rank:       float64 [C], of each target, from 1; ties give halves, inf is a target that is never recommended.
    candidates: int64 [C], the items that the target was ranked among, itself included.
    target:     int64 [C]. counts: int64 [I+1], clicks of each item in train.
    shown:      int64 [len(k), I+1], how many top-k lists hold each item; None where only some items were ranked.
    distance:   float64 [len(k)], mean intra-list distance; None where no item vectors were given.
    repeated:   bool [C], whether the target is in the case's own history; None where it is not known.
    """

    k: tuple[int, ...]
    rank: np.ndarray
    candidates: np.ndarray
    target: np.ndarray
    counts: np.ndarray
    shown: np.ndarray | None = None
    distance: np.ndarray | None = None
    repeated: np.ndarray | None = None


def recall(rank: np.ndarray, k: int) -> np.ndarray:
    """1 where rank <= k, else 0.

    >>> recall(np.array([1.0, 11.0]), 10).tolist()
    [1.0, 0.0]
    """
    return (rank <= k).astype(np.float64)


def ndcg(rank: np.ndarray, k: int) -> np.ndarray:
    """1 / log2(rank + 1) where rank <= k, else 0: the ideal list has its one target at rank 1, so its DCG is 1.

    >>> ndcg(np.array([1.0, 3.0, 11.0]), 10).tolist()
    [1.0, 0.5, 0.0]
    """
    return np.where(rank <= k, 1.0 / np.log2(rank + 1.0), 0.0)


def mrr(rank: np.ndarray, k: int) -> np.ndarray:
    """1 / rank where rank <= k, else 0.

    >>> mrr(np.array([2.0, 11.0]), 10).tolist()
    [0.5, 0.0]
    """
    return np.where(rank <= k, 1.0 / rank, 0.0)


def diversity(shown: np.ndarray, counts: np.ndarray) -> float:
    """Aggregate diversity (Adomavicius and Kwon 2012): distinct items in all lists."""
    return float((shown > 0).sum())


def coverage(shown: np.ndarray, counts: np.ndarray) -> float:
    """Share of the item table that is in any list."""
    return float((shown > 0).sum() / max(len(shown) - 1, 1))


def popularity(shown: np.ndarray, counts: np.ndarray) -> float:
    """Mean train clicks of a recommended item."""
    return float((shown * counts).sum() / max(shown.sum(), 1))


def gini(shown: np.ndarray, counts: np.ndarray) -> float:
    """Gini index of the times that each of the I items is shown: 0 all alike, 1 - 1/I one item takes everything.

    G = sum_i (2i - I - 1) x_i / (I sum_i x_i) over x in rising order.

    >>> gini(np.array([0, 0, 0, 0, 8]), np.zeros(5))
    0.75
    """
    x = np.sort(shown[1:])
    n = len(x)
    return float(((2 * np.arange(1, n + 1) - n - 1) * x).sum() / max(n * x.sum(), 1))


def novelty(shown: np.ndarray, counts: np.ndarray) -> float:
    """Mean self-information of a recommended item (Zhou et al. 2010), in bits: -log2 of its share of the train clicks.
    An item without a train click counts as one with a single click.

    >>> round(novelty(np.array([0, 1, 1]), np.array([0, 6, 2])), 4)  # (0.415 + 2) / 2
    1.2075
    """
    bits = -np.log2(np.maximum(counts, 1) / max(counts.sum(), 1))
    return float((shown * bits).sum() / max(shown.sum(), 1))


def auc(found: Ranking) -> np.ndarray:
    """float64 [C], the share of the other candidates that each target is ranked above, ties for half; 0 where it is
    never recommended.
    """
    share = 1.0 - (found.rank - 1.0) / np.maximum(found.candidates - 1, 1)
    return np.where(np.isinf(found.rank), 0.0, share)


OF_RANKS: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "recall": recall,
    "hr": recall,
    "ndcg": ndcg,
    "mrr": mrr,
    "map": mrr,
}
OF_LISTS: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "diversity": diversity,
    "coverage": coverage,
    "popularity": popularity,
    "gini": gini,
    "novelty": novelty,
}
WITHOUT_K: dict[str, Callable[[Ranking], np.ndarray]] = {"auc": auc}
DISTANCE = "distance"
COUNTS = ("cases", "unseen_targets", "repeated_targets")  # of the cases, the same for every scorer
METRICS = (*OF_RANKS, *OF_LISTS, DISTANCE, *WITHOUT_K)
DEFAULT = {
    "full": ("recall", "ndcg", "diversity", "popularity"),
    "uniform100": ("hr", "ndcg"),
    "pop100": ("hr", "ndcg"),
}


def measure(found: Ranking, metrics: Metrics) -> dict[str, float]:
    """The named metrics, "recall@10" or "recall", which is that at each cut-off ("auc" has none), and COUNTS: "cases",
    "unseen_targets", the cases whose target has no train click, and "repeated_targets", those whose target is in their
    own history, where known.

    >>> found = Ranking((1,), np.array([1.0, 2.0]), np.array([5, 5]), np.array([1, 2]), np.array([0, 3, 0]))
    >>> measure(found, ("recall", "auc"))
    {'recall@1': 0.5, 'auc': 0.875, 'cases': 2, 'unseen_targets': 1}
    """
    result: dict[str, float] = {}
    for metric in at_cutoffs(metrics, found.k, tuple(WITHOUT_K)):
        name, cutoff = parted(metric)
        result[metric] = float(WITHOUT_K[name](found).mean()) if cutoff is None else _at_k(found, name, cutoff)
    unseen = int((found.counts[found.target] == 0).sum())
    result |= {"cases": len(found.rank), "unseen_targets": unseen}
    return result if found.repeated is None else result | {"repeated_targets": int(found.repeated.sum())}


def users_gains(found: Ranking, metrics: Metrics) -> dict[str, np.ndarray]:
    """Those of the named metrics that are means over the cases, float64 [C] each, named as in `measure`."""
    gains = {}
    for metric in at_cutoffs(metrics, found.k, tuple(WITHOUT_K)):
        name, cutoff = parted(metric)
        if cutoff is None:
            gains[metric] = WITHOUT_K[name](found)
        elif name in OF_RANKS:
            gains[metric] = OF_RANKS[name](found.rank, cutoff)
    return gains


def _at_k(found: Ranking, name: str, cutoff: int) -> float:
    if name in OF_RANKS:
        return float(OF_RANKS[name](found.rank, cutoff).mean())
    if cutoff not in found.k:
        raise ValueError(f"metrics: expected cut-offs of the ranking, {found.k}, got '{name}@{cutoff}'")
    nth = found.k.index(cutoff)
    if name in OF_LISTS and found.shown is not None:
        return OF_LISTS[name](found.shown[nth], found.counts)
    if name == DISTANCE and found.distance is not None:
        return float(found.distance[nth])
    raise ValueError(f"metrics: expected what this ranking holds, got {name!r}")


def check_metrics(metrics: Metrics, protocol: str, vectors: bool) -> None:
    """Raises ValueError for an unknown metric, or one that the protocol or missing item vectors leave undefined."""
    for metric in listed(metrics):
        name, _ = parted(metric)
        if name not in METRICS:
            raise ValueError(f"metrics: expected names among {', '.join(METRICS)}, got {metric!r}")
        if protocol != "full" and (name in OF_LISTS or name == DISTANCE):
            raise ValueError(f"metrics: {name!r} is of whole lists; expected protocol 'full', got {protocol!r}")
        if name == DISTANCE and not vectors:
            raise ValueError(f"metrics: {DISTANCE!r} needs vectors, float [I+1, D], got none")
