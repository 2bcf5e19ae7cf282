"""Textbook twins of the recommenders' losses, with every logit stored; part of `fastcl.reference`.

The rules are those of reference.py: for tests and benchmarks only, nothing validated, none of the package's own code.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def gbce(
    query: Tensor,
    positive_key: Tensor,
    negative_keys: Tensor,
    reduction: str = "mean",
    weight: Tensor | None = None,
    *,
    catalogue: int,
    calibration: float = 0.75,
    ids: Tensor | None = None,
    negative_ids: Tensor | None = None,
    positive_bias: Tensor | None = None,
    negative_bias: Tensor | None = None,
) -> Tensor:
    """-(log sigmoid(pos)^beta + sum_j log(1 - sigmoid(neg_j))) / (K + 1): Petrov & Macdonald 2023, equations 11, 13."""
    positive, negative, drop = _similarities(query, positive_key, negative_keys, ids, negative_ids)
    k = negative.shape[1]
    alpha = min(k / (catalogue - 1), 1.0)
    beta = alpha * (calibration * (1 - 1 / alpha) + 1 / alpha) if k else 1 - calibration
    if positive_bias is not None:
        positive = positive + positive_bias
    if negative_bias is not None:
        negative = negative + negative_bias
    down = F.logsigmoid(-negative).masked_fill(drop, 0.0).sum(1)
    return _reduce(-(beta * F.logsigmoid(positive) + down) / (k + 1), reduction, weight)


def sce(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    ignore_index: int | None = None,
    reduction: str = "mean",
    row_weight: Tensor | None = None,
    *,
    buckets: Tensor,
    bucket_rows: int | None = None,
    bucket_classes: int = 256,
) -> Tensor:
    """The largest cross-entropy of a row over its buckets: Mezentsev et al. 2024, Algorithm 1. One loop over all."""
    rows, table = _wide(input), _wide(linear_weight)
    temperature = temperature[:, None] if isinstance(temperature, Tensor) and temperature.ndim else temperature
    logits = rows @ table.T / temperature
    logits = logits if linear_bias is None else logits + linear_bias
    loss = [logits.new_tensor(-math.inf)] * len(rows)
    kept = (target != (-100 if ignore_index is None else ignore_index)).nonzero()[:, 0].tolist()
    for direction in buckets.detach().to(logits.dtype):
        of_row, of_class = rows.detach() @ direction, table.detach() @ direction
        by_row = sorted(kept, key=of_row.tolist().__getitem__, reverse=True)
        by_class = sorted(range(len(table)), key=of_class.tolist().__getitem__, reverse=True)
        for i in by_row[: bucket_rows or len(buckets)]:
            t = int(target[i])
            columns = [t] + [c for c in by_class[:bucket_classes] if c != t]
            loss[i] = torch.maximum(loss[i], F.cross_entropy(logits[i, columns], torch.tensor(0)))
    seen = sum(x.item() > -math.inf for x in loss)
    total = torch.stack([x if x.item() > -math.inf else 0.0 * logits.sum() for x in loss]) if loss else logits.sum(1)
    if reduction == "mean":
        return _reduce(total, "sum", row_weight) / max(seen, 1)
    return _reduce(total, reduction, row_weight)


def _similarities(
    query: Tensor, positive: Tensor, negative: Tensor, ids: Tensor | None, negative_ids: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Of the positives [N] and the negatives [N, K], and which of the negatives are left out."""
    q, p, k = _wide(query), _wide(positive), _wide(negative)
    down = torch.einsum("nd,kd->nk" if k.ndim == 2 else "nd,nkd->nk", q, k)
    drop = torch.zeros_like(down, dtype=torch.bool)
    if ids is not None and negative_ids is not None:
        drop = ids[:, None] == (negative_ids if negative_ids.ndim == 2 else negative_ids[None])
    return (q * p).sum(1), down, drop


def _reduce(rows: Tensor, reduction: str, weight: Tensor | None) -> Tensor:
    if weight is not None:
        rows = rows * weight.to(rows.dtype)
    return {"mean": rows.sum() / max(len(rows), 1), "sum": rows.sum(), "none": rows}[reduction]


def _wide(x: Tensor) -> Tensor:
    """x in float32, or as it is where its dtype is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
