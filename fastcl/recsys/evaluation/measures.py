"""Formulas of the ranking metrics, which turn what `ranking.rank_cases` found into numbers.

There is one table of metrics for each thing that a formula reads: the rank of a case's one target, the ranks of its
several targets, the recommended lists, or ranks without a cut-off. Nothing here scores or ranks. Where every case has
one target, recall@k equals the hit rate and MAP@k equals MRR@k.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fastcl.recsys.evaluation.cutoffs import Metrics, at_cutoffs, listed, parted
from fastcl.recsys.showing import summary


@dataclass(frozen=True, eq=False)
class Ranking:
    """The ranks of C cases with T targets.

    k:          the cut-offs of `shown` and `distance`.
    rank:       float64 [T], the rank of each target, from 1; ties give halves. inf: the target is never recommended
                or, where cases have several targets, its rank is beyond the largest cut-off.
    candidates: int64 [C], the number of items among which the targets were ranked, the targets included.
    target:     int64 [T]. counts: int64 [I+1], clicks of each item in train.
    shown:      int64 [len(k), I+1], how many top-k lists hold each item; None where only some items were ranked.
    distance:   float64 [len(k)], mean intra-list distance; None where no item vectors were given.
    repeated:   bool [T], whether the target is in its case's own history; None where that is unknown.
    offsets:    int64 [C+1], where each case's targets begin; None: one target per case, T = C.
    """

    k: tuple[int, ...]
    rank: np.ndarray
    candidates: np.ndarray
    target: np.ndarray
    counts: np.ndarray
    shown: np.ndarray | None = None
    distance: np.ndarray | None = None
    repeated: np.ndarray | None = None
    offsets: np.ndarray | None = None

    def gains(self, name: str, k: int) -> np.ndarray:
        """float64 [C], for each case the metric `name` of OF_RANKS at k."""
        if self.offsets is None:
            return OF_RANKS[name](self.rank, k)
        if k > max(self.k):
            raise ValueError(f"metrics: expected cut-offs up to that of the ranking, {max(self.k)}, got '{name}@{k}'")
        return OF_SEVERAL[name](self.rank, self.offsets, k)

    __repr__ = summary


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


def recall_of_several(rank: np.ndarray, offsets: np.ndarray, k: int) -> np.ndarray:
    """The share of a case's targets that have rank <= k.

    >>> recall_of_several(np.array([1.0, 11.0, 12.0]), np.array([0, 2, 3]), 10).tolist()
    [0.5, 0.0]
    """
    return np.add.reduceat(recall(rank, k), offsets[:-1]) / np.diff(offsets)


def hit_of_several(rank: np.ndarray, offsets: np.ndarray, k: int) -> np.ndarray:
    """1 where any target of the case has rank <= k, else 0."""
    return np.maximum.reduceat(recall(rank, k), offsets[:-1])


def ndcg_of_several(rank: np.ndarray, offsets: np.ndarray, k: int) -> np.ndarray:
    """DCG@k divided by the DCG@k of the best list, which has min(k, number of targets) targets at its top. DCG@k is the
    sum of 1 / log2(rank + 1) over a case's targets with rank <= k.

    >>> ndcg_of_several(np.array([2.0, 1.0, 11.0]), np.array([0, 2, 3]), 10).tolist()
    [1.0, 0.0]
    """
    targets = np.minimum(np.diff(offsets), k)
    best = np.cumsum(ndcg(np.arange(1.0, targets.max() + 1), k))
    return np.add.reduceat(ndcg(rank, k), offsets[:-1]) / best[targets - 1]


def mrr_of_several(rank: np.ndarray, offsets: np.ndarray, k: int) -> np.ndarray:
    """1 / rank of the case's best-ranked target where that rank is <= k, else 0."""
    return np.maximum.reduceat(mrr(rank, k), offsets[:-1])


def map_of_several(rank: np.ndarray, offsets: np.ndarray, k: int) -> np.ndarray:
    """Average precision at k: the sum over a case's targets with rank <= k of (targets up to this rank / this rank),
    divided by the number of the case's targets.

    >>> map_of_several(np.array([4.0, 1.0]), np.array([0, 2]), 10).tolist()
    [0.75]
    """
    case = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    order = np.lexsort((rank, case))  # the targets of a case stay together
    above = np.arange(1, len(rank) + 1) - offsets[case]
    return np.add.reduceat(above * mrr(rank[order], k), offsets[:-1]) / np.diff(offsets)


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
    """Gini index of how often each of the I items is shown: 0 where all are shown equally often, 1 - 1/I where one item
    fills every place.

    G = sum_i (2i - I - 1) x_i / (I sum_i x_i) over x in rising order.

    >>> gini(np.array([0, 0, 0, 0, 8]), np.zeros(5))
    0.75
    """
    x = np.sort(shown[1:])
    n = len(x)
    return float(((2 * np.arange(1, n + 1) - n - 1) * x).sum() / max(n * x.sum(), 1))


def novelty(shown: np.ndarray, counts: np.ndarray) -> float:
    """Mean self-information of a recommended item (Zhou et al. 2010), in bits: -log2 of its share of the train clicks.
    An item without a train click counts as having one click.

    >>> round(novelty(np.array([0, 1, 1]), np.array([0, 6, 2])), 4)  # (0.415 + 2) / 2
    1.2075
    """
    bits = -np.log2(np.maximum(counts, 1) / max(counts.sum(), 1))
    return float((shown * bits).sum() / max(shown.sum(), 1))


def auc(found: Ranking) -> np.ndarray:
    """float64 [C], the share of the other candidates below each target, ties counting half; 0 for a target that is
    never recommended. ValueError where cases have several targets.
    """
    if found.offsets is not None:
        raise ValueError("metrics: expected none without a cut-off where cases have several targets, got 'auc'")
    share = 1.0 - (found.rank - 1.0) / np.maximum(found.candidates - 1, 1)
    return np.where(np.isinf(found.rank), 0.0, share)


OF_RANKS: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "recall": recall,
    "hr": recall,
    "ndcg": ndcg,
    "mrr": mrr,
    "map": mrr,
}
OF_SEVERAL: dict[str, Callable[[np.ndarray, np.ndarray, int], np.ndarray]] = {
    "recall": recall_of_several,
    "hr": hit_of_several,
    "ndcg": ndcg_of_several,
    "mrr": mrr_of_several,
    "map": map_of_several,
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
COUNTS = ("cases", "unseen_targets", "repeated_targets")  # they describe the cases: equal for every scorer
METRICS = (*OF_RANKS, *OF_LISTS, DISTANCE, *WITHOUT_K)
DEFAULT = {
    "full": ("recall", "ndcg", "diversity", "popularity"),
    "uniform100": ("hr", "ndcg"),
    "pop100": ("hr", "ndcg"),
}


def measure(found: Ranking, metrics: Metrics) -> dict[str, float]:
    """The named metrics and the COUNTS.

    "recall@10" is one metric, "recall" stands for recall at each cut-off, and "auc" has no cut-off. COUNTS: "cases",
    "unseen_targets" (targets without a train click) and, where known, "repeated_targets" (targets in the history of
    their own case).

    >>> found = Ranking((1,), np.array([1.0, 2.0]), np.array([5, 5]), np.array([1, 2]), np.array([0, 3, 0]))
    >>> measure(found, ("recall", "auc"))
    {'recall@1': 0.5, 'auc': 0.875, 'cases': 2, 'unseen_targets': 1}
    """
    result: dict[str, float] = {}
    for metric in at_cutoffs(metrics, found.k, tuple(WITHOUT_K)):
        name, cutoff = parted(metric)
        result[metric] = float(WITHOUT_K[name](found).mean()) if cutoff is None else _at_k(found, name, cutoff)
    unseen = int((found.counts[found.target] == 0).sum())
    result |= {"cases": len(found.candidates), "unseen_targets": unseen}
    return result if found.repeated is None else result | {"repeated_targets": int(found.repeated.sum())}


def users_gains(found: Ranking, metrics: Metrics) -> dict[str, np.ndarray]:
    """float64 [C] for each named metric that is a mean over the cases; the names are those of `measure`."""
    gains = {}
    for metric in at_cutoffs(metrics, found.k, tuple(WITHOUT_K)):
        name, cutoff = parted(metric)
        if cutoff is None:
            gains[metric] = WITHOUT_K[name](found)
        elif name in OF_RANKS:
            gains[metric] = found.gains(name, cutoff)
    return gains


def _at_k(found: Ranking, name: str, cutoff: int) -> float:
    if name in OF_RANKS:
        return float(found.gains(name, cutoff).mean())
    if cutoff not in found.k:
        raise ValueError(f"metrics: expected cut-offs of the ranking, {found.k}, got '{name}@{cutoff}'")
    nth = found.k.index(cutoff)
    if name in OF_LISTS and found.shown is not None:
        return OF_LISTS[name](found.shown[nth], found.counts)
    if name == DISTANCE and found.distance is not None:
        return float(found.distance[nth])
    raise ValueError(f"metrics: expected a metric of what this ranking holds, got {name!r}")


def check_metrics(metrics: Metrics, protocol: str, vectors: bool) -> None:
    """ValueError for an unknown metric, and for one that is undefined under the protocol or without item vectors."""
    for metric in listed(metrics):
        name, _ = parted(metric)
        if name not in METRICS:
            raise ValueError(f"metrics: expected names among {', '.join(METRICS)}, got {metric!r}")
        if protocol != "full" and (name in OF_LISTS or name == DISTANCE):
            raise ValueError(f"metrics: {name!r} needs whole lists; expected protocol 'full', got {protocol!r}")
        if name == DISTANCE and not vectors:
            raise ValueError(f"metrics: {DISTANCE!r} needs vectors, float [I+1, D], got none")
