"""How much a model's ranking suffers from noisy histories: random items of each history are deleted or replaced, as in
ContrastVAE's section on robustness (Wang et al. 2022). Neither the model nor the targets change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np

from fastcl.recsys.data import Cases, Histories, Scorer
from fastcl.recsys.data.padded import Padded
from fastcl.recsys.data.scoring import frozen
from fastcl.recsys.evaluation.cutoffs import Cutoffs
from fastcl.recsys.evaluation.measures import measure
from fastcl.recsys.evaluation.ranking import MEMORY, SEEN, rank_cases, train_counts
from fastcl.recsys.options import one_of

RATIOS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
METRICS = ("recall", "ndcg")


def delete(histories: Histories, ratio: float, n_items: int, rng: np.random.Generator) -> Histories:
    """The histories without floor(ratio * n) random items of each history of length n; at least one item stays."""
    lengths = histories.lengths
    gone = _chosen(histories, np.minimum(_share(ratio, lengths), np.maximum(lengths - 1, 0)), rng)
    row = np.repeat(np.arange(len(histories)), lengths)
    offsets = np.cumsum(np.append(0, np.bincount(row[~gone], minlength=len(histories))), dtype=np.int64)
    time = None if histories.time is None else histories.time[~gone]
    return Histories(offsets, histories.item[~gone], time, histories.items, histories.users)


def replace(histories: Histories, ratio: float, n_items: int, rng: np.random.Generator) -> Histories:
    """The histories with floor(ratio * n) random items of each history of length n replaced by random other items."""
    chosen = _chosen(histories, _share(ratio, histories.lengths), rng)
    other = rng.integers(1, max(n_items, 2), len(histories.item))
    other += other >= histories.item
    item = np.where(chosen & (n_items > 1), other, histories.item)
    return Histories(histories.offsets, item, histories.time, histories.items, histories.users)


CORRUPTIONS: dict[str, Callable[[Histories, float, int, np.random.Generator], Histories]] = {
    "delete": delete,
    "replace": replace,
}


def robustness(
    scorer: Scorer,
    cases: Cases,
    *,
    ratios: Sequence[float] = RATIOS,
    kinds: Sequence[str] = tuple(CORRUPTIONS),
    k: Cutoffs = 10,
    seen: str = "mask",
    seed: int = 0,
    memory: int = MEMORY,
) -> list[dict[str, Any]]:
    """Recall and NDCG by full ranking, for each kind of corruption and each ratio of corrupted items.

    The scorer reads the corrupted histories; the true histories mask seen items, so that the candidates are the same at
    every ratio. Within a kind, a higher ratio corrupts the items that a lower ratio corrupts, and further ones (same
    `seed`).

    ratios: numbers from 0 to 1. floor(ratio * n) items of a history of length n are corrupted; "delete" leaves at least
    one item. Other arguments: as in `ranking.evaluate`.

    Returns one dict per kind and ratio: "kind", "ratio", and the metrics.

    >>> from fastcl.recsys import CoOccurrence, bundled
    >>> split = bundled("purchases").split()
    >>> rows = robustness(CoOccurrence(split.train, len(split.items)), split.test, ratios=(0.0, 0.5), kinds=("delete",))
    >>> [(row["kind"], row["ratio"]) for row in rows]
    [('delete', 0.0), ('delete', 0.5)]
    """
    one_of(SEEN, "seen", seen)
    for kind in kinds:
        one_of(CORRUPTIONS, "kinds", kind)
    check_ratios(ratios)
    counts = train_counts(cases)
    found = []
    history, items = cases.history, len(counts) - 1
    if isinstance(scorer, Padded):  # a history in which it knows no item has no scores
        history, items = scorer.readable(history), scorer.known
    with frozen(scorer):
        for kind, ratio in product(kinds, ratios):
            inputs = CORRUPTIONS[kind](history, ratio, items, np.random.default_rng(seed))
            ranking = rank_cases(scorer, cases, counts=counts, k=k, seen=seen, memory=memory, inputs=inputs)
            values = {name: value for name, value in measure(ranking, METRICS).items() if "@" in name}
            found.append({"kind": kind, "ratio": ratio, **values})
    return found


def check_ratios(ratios: Sequence[float]) -> None:
    if not ratios or not all(0.0 <= ratio <= 1.0 for ratio in ratios):
        raise ValueError(f"ratios: expected numbers from 0 to 1, got {tuple(ratios)}")


def _share(ratio: float, lengths: np.ndarray) -> np.ndarray:
    # Without the small term 0.29 * 100, which is just below 29 in floating point, would give 28.
    return np.floor(ratio * lengths + 1e-9)


def _chosen(histories: Histories, how_many: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """bool [P], how_many[b] random items of row b. With an equal `rng`, fewer items are a subset of more items."""
    row = np.repeat(np.arange(len(histories)), histories.lengths)
    order = np.lexsort((rng.random(len(row)), row))
    nth = np.empty(len(row), np.int64)
    nth[order] = np.arange(len(row)) - histories.offsets[row]  # `order` keeps the items of each row together
    return nth < how_many[row]
