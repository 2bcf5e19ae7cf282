"""Textbook twins of the recommenders' losses, with every logit stored; part of `fastcl.reference`.

The rules are those of reference.py: for tests and benchmarks only, nothing validated, none of the package's own code.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fastcl.reference_batch import logsumexp, normalized, over_batch


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


def ccl(
    query: Tensor,
    positive_key: Tensor,
    negative_keys: Tensor,
    reduction: str = "mean",
    weight: Tensor | None = None,
    *,
    margin: float = 0.8,
    negative_weight: float = 150.0,
    ids: Tensor | None = None,
    negative_ids: Tensor | None = None,
) -> Tensor:
    """1 - pos + w mean_j max(0, neg_j - margin): Mao et al. 2021, equation 1."""
    positive, negative, drop = _similarities(query, positive_key, negative_keys, ids, negative_ids)
    kept = (~drop).to(negative.dtype)
    down = (torch.maximum(negative - margin, torch.zeros_like(negative)) * kept).sum(1) / kept.sum(1).clamp(min=1)
    return _reduce(1 - positive + negative_weight * down, reduction, weight)


def psl_tanh(d: Tensor) -> Tensor:
    return torch.log(1 + torch.tanh(d))


def psl(
    query: Tensor,
    positive_key: Tensor,
    negative_keys: Tensor,
    temperature: float | Tensor = 0.1,
    reduction: str = "mean",
    weight: Tensor | None = None,
    *,
    surrogate: Callable[[Tensor], Tensor] = psl_tanh,
    normalize: bool = True,
    ids: Tensor | None = None,
    negative_ids: Tensor | None = None,
) -> Tensor:
    """log sum_j sigma((neg_j - pos) / 2)^(1 / T): Yang et al. 2024; `surrogate` is log sigma."""
    q, p, k = (normalized(_wide(x)) if normalize else x for x in (query, positive_key, negative_keys))
    positive, negative, drop = _similarities(q, p, k, ids, negative_ids)
    temperature = temperature[:, None] if isinstance(temperature, Tensor) and temperature.ndim else temperature
    terms = surrogate((negative - positive[:, None]) / 2) / temperature
    each = logsumexp(terms.masked_fill(drop, -math.inf)) if terms.shape[1] else terms.sum(1)
    return _reduce(each.masked_fill(drop.all(1), 0.0), reduction, weight)


def directau(query: Tensor, positive_key: Tensor, gamma: float = 1.0, t: float = 2.0) -> Tensor:
    """Alignment plus gamma times the mean uniformity of both sides: Wang et al. 2022, equations 5 to 7."""
    together = (_wide(query) - _wide(positive_key)).square().sum(1)
    if len(query) < 2:
        return together.sum()
    spread = [torch.exp(-t * F.pdist(_wide(x)).square()).mean().log() for x in (query, positive_key)]
    return together.mean() + gamma * (spread[0] + spread[1]) / 2


def bsl(
    query: Tensor,
    positive_key: Tensor,
    negative_keys: Tensor | None = None,
    temperature: float | Tensor = 0.1,
    reduction: str = "mean",
    negative_mode: str | None = None,
    *,
    positive_temperature: float | None = None,
    group: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """-T+ log mean_p exp(s_p / T+) + T log mean_j exp(s_j / T), over T: Wu et al. 2024, equation 15."""

    def head(pos: Tensor, neg: Tensor, count: Tensor) -> Tensor:
        warm = torch.as_tensor(temperature if positive_temperature is None else positive_temperature, dtype=pos.dtype)
        ratio = warm / temperature * torch.ones_like(pos)
        same = torch.eye(len(pos), dtype=torch.bool) if group is None else group[:, None] == group
        up = (pos / ratio).expand(len(pos), -1).masked_fill(~same, -math.inf)
        together = ratio * (torch.logsumexp(up, 1) - same.sum(1).to(pos.dtype).log()) if len(pos) else pos
        return logsumexp(neg) - count.clamp(min=1).to(neg.dtype).log() - together

    return over_batch(head, query, positive_key, negative_keys, temperature, reduction, **options)


def sl_at_k(
    query: Tensor,
    positive_key: Tensor,
    negative_keys: Tensor | None = None,
    temperature: float | Tensor = 0.1,
    reduction: str = "mean",
    negative_mode: str | None = None,
    *,
    threshold: float | Tensor = 0.0,
    weight_temperature: float = 1.0,
    **options: Any,
) -> Tensor:
    """sigmoid((s - threshold) / Tw) (log sum_j exp(s_j / T) - s / T): Yang et al. 2025, SL@K."""
    q, p = (normalized(x) if options.get("normalize", True) else x for x in (query, positive_key))
    similarity = (q.to(torch.promote_types(_wide(q).dtype, _wide(p).dtype)) * p).sum(1)

    def head(pos: Tensor, neg: Tensor, count: Tensor) -> Tensor:
        above = (similarity - threshold) / weight_temperature
        lse = logsumexp(neg)
        return torch.sigmoid(above).to(pos.dtype) * (lse.masked_fill(lse == -math.inf, 0.0) - pos)

    return over_batch(head, query, positive_key, negative_keys, temperature, reduction, **options)


def sogclr(
    query: Tensor,
    positive_key: Tensor,
    index: Tensor,
    denominators: Any,
    negative_keys: Tensor | None = None,
    temperature: float | Tensor = 0.1,
    reduction: str = "mean",
    **options: Any,
) -> Tensor:
    """mean_j exp(neg_j) / u_i - pos, for the moving averages u that `denominators` holds: Yuan et al. 2022."""
    held = denominators.log_average[index.long()].detach()

    def head(pos: Tensor, neg: Tensor, count: Tensor) -> Tensor:
        log_mean = logsumexp(neg) - count.clamp(min=1).to(neg.dtype).log()
        log_u = held.to(log_mean)
        return torch.exp(log_mean - torch.where(log_u == -math.inf, log_mean.detach(), log_u)) - pos

    return over_batch(head, query, positive_key, negative_keys, temperature, reduction, **options)


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
