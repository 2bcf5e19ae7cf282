"""Recommendations: external ids in, external ids out. Ranking and the mask of seen items are metrics.top_k; nothing
trains here.
"""

from collections.abc import Sequence

import numpy as np
import torch

from fastcl.recsys.data import PAD, Histories, Scorer
from fastcl.recsys.metrics import top_k
from fastcl.recsys.models import Model


def recommend(
    model: Model, histories: Sequence[Sequence[str]], k: int = 10, seen: str = "mask"
) -> list[list[tuple[str, float]]]:
    """The k best items for each history (external ids, oldest first), as (external id, score), best first.

    A history is all it takes: no user id. Ids that the model never saw are skipped; a history without a known one
    raises ValueError. seen="mask" recommends nothing from the history itself, "keep" may. Clicks carry no times here,
    so CLRec takes them as made at one moment. Fewer than k come back where fewer items are left. The model must be in
    eval mode, as `fit` and `load` leave it.

    >>> from fastcl.recsys import Items, SASRec
    >>> model = SASRec(Items(ids=("a", "b", "c")), dim=8, seed=0).eval()
    >>> sorted(item for item, score in recommend(model, [["a"]], k=5)[0])
    ['b', 'c']
    """
    known = []
    for row, history in enumerate(histories):
        if isinstance(history, str):
            raise TypeError(f"histories: expected sequences of ids, got the string {history!r} in row {row}")
        numbers = model.items.encode(history)
        known.append(numbers[numbers != PAD])
        if not len(known[-1]):
            raise ValueError(f"histories: expected an item that the model knows in row {row}, got {list(history)[:5]}")
    if not known:
        return []
    packed = Histories(np.cumsum([0, *map(len, known)], dtype=np.int64), np.concatenate(known))
    items, scores = rank(model, packed, k, seen)
    return [
        [(model.items.ids[item - 1], score) for item, score in zip(*row, strict=True) if item != PAD]
        for row in zip(items.tolist(), scores.tolist(), strict=True)
    ]


def rank(
    scorer: Scorer, histories: Histories, k: int, seen: str, chunk: int = 256
) -> tuple[torch.Tensor, torch.Tensor]:
    """`top_k` of a scorer over any number of histories: (items int64 [B, K], scores [B, K]), memory O(chunk * I)."""
    parts = []
    with torch.inference_mode():
        for start in range(0, len(histories), chunk):
            rows = histories.take(np.arange(start, min(start + chunk, len(histories))))
            parts.append(top_k(scorer.scores(rows), rows, k, seen))
    return torch.cat([items for items, _ in parts]), torch.cat([scores for _, scores in parts])
