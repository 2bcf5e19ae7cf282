"""Textbook twins of `fastcl.contrast` and the losses: the full logit matrix in plain differentiable torch operations.

For tests (in float64 they are the truth) and benchmarks (they are what one writes without fastcl) only: memory is
N x M, and arguments are not validated here. Signatures and meaning equal those of the functions of the same name in
`fastcl`; nothing in here may use the package's own kernels or loss code, or it would no longer be independent of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fastcl.reference_pairwise import bpr, jensen_shannon, negative_sampling, siglip, softplus_sum, triplet
from fastcl.reference_recommend import gbce, sce
from fastcl.reference_soft import directional_infonce, distill_kl, margin_mse, multi_positive, soft_cross_entropy
from fastcl.reference_views import alignment, linear_cross_entropy, nt_xent, supcon, uniformity

__all__ = [
    "alignment",
    "bpr",
    "contrast",
    "dcl",
    "dclw",
    "debiased_infonce",
    "directional_infonce",
    "distill_kl",
    "gbce",
    "infonce",
    "infonce_plus",
    "jensen_shannon",
    "linear_cross_entropy",
    "margin_mse",
    "mine",
    "mine_plus",
    "multi_positive",
    "negative_sampling",
    "nt_xent",
    "sampled_softmax",
    "sce",
    "siglip",
    "soft_cross_entropy",
    "softplus_sum",
    "supcon",
    "triplet",
    "uniformity",
]

_NEVER = -math.inf


def contrast(
    query: Tensor,
    key: Tensor,
    positive: Tensor | None = None,
    *,
    scale: float | Tensor = 1.0,
    bias: Tensor | None = None,
    row_id: Tensor | None = None,
    col_id: Tensor | None = None,
    cap: Tensor | None = None,
) -> tuple[Tensor | None, Tensor]:
    """pos_i = s_i <q_i, p_i> and lse_i = log sum over {j: row_id_i != col_id_j, x_ij <= cap_i} of exp(x_ij + b_j)."""
    dtype = _result_dtype(query, key, positive, scale, bias)
    scale = _finite_or_nan(scale)
    logits = _similarity(query, key, dtype) * _column(scale)
    above = None if cap is None else logits > cap[:, None]
    if bias is not None:
        logits = logits + bias.to(dtype)
    if above is not None:
        logits = logits.masked_fill(above, _NEVER)
    if row_id is not None and col_id is not None:
        logits = logits.masked_fill(row_id[:, None] == col_id, _NEVER)
    maskable = bias is not None or row_id is not None or cap is not None
    lse = _logsumexp(logits) if maskable else torch.logsumexp(logits, 1)
    if positive is None:
        return None, lse.to(dtype)
    pos = _dot(query, positive, dtype) * scale
    return pos.to(dtype), lse.to(dtype)


def infonce(
    query: Tensor,
    positive_key: Tensor,
    negative_keys: Tensor | None = None,
    temperature: float | Tensor = 0.1,
    reduction: str = "mean",
    negative_mode: str | None = None,
    **options: Any,
) -> Tensor:
    """-log(e^pos / (e^pos + sum_j e^neg_j)): van den Oord et al. 2018, equation 4; `options` as in `fastcl.infonce`.

    NaN wherever a logit is +inf, as torch's cross_entropy has it; `fastcl.infonce` has the limit where there is one.
    """

    def head(pos: Tensor, neg: Tensor, count: Tensor) -> Tensor:
        logits = torch.cat([pos[:, None], neg], 1)
        return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long, device=pos.device), reduction="none")

    return _loss(head, query, positive_key, negative_keys, temperature, reduction, **options)


def dcl(
    query: Tensor,
    positive_key: Tensor,
    negative_keys: Tensor | None = None,
    temperature: float | Tensor = 0.1,
    reduction: str = "mean",
    negative_mode: str | None = None,
    **options: Any,
) -> Tensor:
    """-log(e^pos / sum_j e^neg_j): the decoupled loss, Yeh et al. 2022, equation 6; `options` as in `fastcl.dcl`."""

    def head(pos: Tensor, neg: Tensor, count: Tensor) -> Tensor:
        return _logsumexp(neg) - pos

    return _loss(head, query, positive_key, negative_keys, temperature, reduction, **options)


def mises_fisher_weights(query: Tensor, positive_key: Tensor, sigma: float = 0.5) -> Tensor:
    """2 - exp(<q_i, p_i>/sigma) / mean_k exp(<q_k, p_k>/sigma), no gradient: Yeh et al. 2022, DCLW."""
    e = torch.exp(_dot(query, positive_key, _result_dtype(query, positive_key)) / sigma).detach()
    return 2 - e / e.mean()


def dclw(
    query: Tensor,
    positive_key: Tensor,
    negative_keys: Tensor | None = None,
    temperature: float | Tensor = 0.1,
    reduction: str = "mean",
    negative_mode: str | None = None,
    *,
    weight_fn: Callable[[Tensor, Tensor], Tensor] = mises_fisher_weights,
    normalize: bool = True,
    **options: Any,
) -> Tensor:
    """log sum_j e^neg_j - w pos: Yeh et al. 2022; `options` as in `fastcl.dclw`."""
    pair = (_normalize(query), _normalize(positive_key)) if normalize else (query, positive_key)
    w = weight_fn(*pair)

    def head(pos: Tensor, neg: Tensor, count: Tensor) -> Tensor:
        return _logsumexp(neg) - w * pos

    return _loss(head, query, positive_key, negative_keys, temperature, reduction, normalize=normalize, **options)


def debiased_infonce(
    query: Tensor,
    positive_key: Tensor,
    negative_keys: Tensor | None = None,
    temperature: float | Tensor = 0.1,
    reduction: str = "mean",
    negative_mode: str | None = None,
    *,
    tau_plus: float = 0.1,
    beta: float = 0.0,
    **options: Any,
) -> Tensor:
    """-log(e^pos / (e^pos + N g)): Chuang et al. 2020, Eqs. 7 and 8; beta > 0: Robinson et al. 2021."""

    def head(pos: Tensor, neg: Tensor, count: Tensor) -> Tensor:
        e = torch.exp(neg)
        importance = torch.exp(beta * neg.masked_fill(neg == _NEVER, 0.0)).masked_fill(neg == _NEVER, 0.0)
        mean = (importance * e).sum(1) / importance.sum(1).masked_fill(count == 0, 1.0)
        g = (mean - tau_plus * torch.exp(pos)) / (1 - tau_plus)
        floor = torch.exp(-torch.ones_like(pos) / temperature)
        return -torch.log(torch.exp(pos) / (torch.exp(pos) + count * torch.maximum(g, floor)))

    return _loss(head, query, positive_key, negative_keys, temperature, reduction, **options)


def infonce_plus(
    query: Tensor,
    positive_key: Tensor,
    negative_keys: Tensor | None = None,
    temperature: float | Tensor = 0.1,
    reduction: str = "mean",
    negative_mode: str | None = None,
    *,
    epsilon: float = 0.0,
    lam: float = 1.1,
    **options: Any,
) -> Tensor:
    """-(pos - lam log(epsilon e^pos + sum_j e^neg_j)): Li et al. 2023, arXiv 2312.08520, InfoNCE+."""

    def head(pos: Tensor, neg: Tensor, count: Tensor) -> Tensor:
        parts = [pos[:, None] + math.log(epsilon), neg] if epsilon > 0 else [neg]
        return lam * _logsumexp(torch.cat(parts, 1)) - pos

    return _loss(head, query, positive_key, negative_keys, temperature, reduction, **options)


def mine(
    query: Tensor,
    positive_key: Tensor,
    negative_keys: Tensor | None = None,
    temperature: float | Tensor = 0.1,
    reduction: str = "mean",
    negative_mode: str | None = None,
    **options: Any,
) -> Tensor:
    """-(pos - log mean_j e^neg_j), the mean over the columns that are not excluded; `options` as in `fastcl.mine`."""
    return mine_plus(query, positive_key, negative_keys, temperature, reduction, negative_mode, lam=1.0, **options)


def mine_plus(
    query: Tensor,
    positive_key: Tensor,
    negative_keys: Tensor | None = None,
    temperature: float | Tensor = 0.1,
    reduction: str = "mean",
    negative_mode: str | None = None,
    *,
    lam: float = 1.1,
    **options: Any,
) -> Tensor:
    """-(pos - lam log mean_j e^neg_j): Li et al. 2023, arXiv 2312.08520, MINE+."""

    def head(pos: Tensor, neg: Tensor, count: Tensor) -> Tensor:
        return lam * (_logsumexp(neg) - count.clamp(min=1).to(neg.dtype).log()) - pos

    return _loss(head, query, positive_key, negative_keys, temperature, reduction, **options)


def sampled_softmax(
    query: Tensor,
    positive_key: Tensor,
    negative_keys: Tensor | None = None,
    *,
    temperature: float | Tensor = 1.0,
    reduction: str = "mean",
    **options: Any,
) -> Tensor:
    """Cross-entropy over <q, k>/T - log q of the positive and the samples: Zhou et al. 2021, CLRec, Eq. 2."""
    return infonce(query, positive_key, negative_keys, temperature, reduction, normalize=False, **options)


def _loss(
    head: Callable[[Tensor, Tensor, Tensor], Tensor],
    query: Tensor,
    positive_key: Tensor,
    negative_keys: Tensor | None,
    temperature: float | Tensor,
    reduction: str,
    *,
    symmetric: bool = False,
    weight: Tensor | None = None,
    **options: Any,
) -> Tensor:
    rows = _rows(head, query, positive_key, negative_keys, temperature, **options)
    if symmetric:
        rows = (rows + _rows(head, positive_key, query, negative_keys, temperature, **options)) / 2
    if weight is not None:
        rows = rows * weight.to(rows.dtype)
    if reduction == "none":
        return rows
    return rows.sum() if reduction == "sum" else rows.sum() / len(rows)


def _rows(
    head: Callable[[Tensor, Tensor, Tensor], Tensor],
    query: Tensor,
    positive_key: Tensor,
    negative_keys: Tensor | None,
    temperature: float | Tensor,
    *,
    normalize: bool = True,
    in_batch: bool | None = None,
    queue: Any = None,
    ids: Tensor | None = None,
    negative_ids: Tensor | None = None,
    log_q: Tensor | None = None,
    negative_log_q: Tensor | None = None,
    hardness: Any = None,
    margin: Callable[[Tensor], Tensor] | None = None,
    cap: Any = None,
) -> Tensor:
    """One loss per row: `head(pos [N], negative logits [N, C] with -inf where excluded, columns not excluded [N])`."""
    if normalize:
        query, positive_key = _normalize(query), _normalize(positive_key)
        negative_keys = None if negative_keys is None else _normalize(negative_keys)

    # A segment is (keys, row ids, column ids, log q); a column is excluded where its id equals the row's. Row numbers
    # as ids exclude the diagonal.
    row_number = torch.arange(len(query), device=query.device)
    segments: list[tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, str]] = []
    if in_batch or (in_batch is None and negative_keys is None):
        in_batch_ids = row_number if ids is None else ids
        segments.append((positive_key, in_batch_ids, in_batch_ids, log_q, "in_batch"))
    if negative_keys is not None:
        segments.append((negative_keys, ids, negative_ids, negative_log_q, "negative_keys"))
    if queue is not None:
        segments.append((queue.keys, ids, queue.ids, queue.log_q, "queue"))

    dtype = _result_dtype(query, positive_key, temperature, log_q, *(keys for keys, *_ in segments))
    pos = _dot(query, positive_key, dtype)
    limit = cap(pos.detach()) if callable(cap) and not isinstance(cap, Tensor) else cap
    pos = (pos if margin is None else margin(pos)) / temperature
    if log_q is not None:
        pos = pos - log_q.to(dtype)
    logits, keep = [pos.new_empty(len(query), 0)], [torch.empty(len(query), 0, dtype=torch.bool, device=query.device)]
    for keys, row_id, col_id, column_log_q, source in segments:
        similarity = _similarity(query, keys, dtype)
        block = similarity / _column(temperature)
        beta = hardness.get(source, 0.0) if isinstance(hardness, dict) else hardness
        if beta:
            block = block + beta * similarity.detach()
        if column_log_q is not None:
            block = block - column_log_q.to(dtype)
        kept = torch.ones_like(block, dtype=torch.bool)
        if row_id is not None and col_id is not None:
            kept = row_id[:, None] != col_id
        if limit is not None:
            kept = kept & (similarity.detach() <= _column(limit))
        logits.append(block.masked_fill(~kept, _NEVER))
        keep.append(kept)
    neg, count = torch.cat(logits, 1), torch.cat(keep, 1).sum(1)

    empty = (neg == _NEVER).all(1)
    return head(pos, neg, count).masked_fill(empty, 0.0)


def _finite_or_nan(scale: float | Tensor) -> float | Tensor:
    if isinstance(scale, Tensor):
        return scale + torch.zeros_like(scale).masked_fill(~scale.isfinite(), math.nan)
    return scale if math.isfinite(scale) else math.nan


def _logsumexp(logits: Tensor) -> Tensor:
    """logsumexp over dim 1 that is -inf with zero gradient, where torch's gradient is NaN, for a row of -inf only."""
    empty = (logits == _NEVER).all(1)
    return torch.logsumexp(logits.masked_fill(empty[:, None], 0.0), 1).masked_fill(empty, _NEVER)


def _normalize(x: Tensor) -> Tensor:
    """x / |x| in at least float32, back in the dtype of x; a zero row stays zero and gets zero gradient."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    zero = (wide == 0).all(-1, keepdim=True)
    norm = torch.linalg.vector_norm(wide.masked_fill(zero, 1.0), dim=-1, keepdim=True)
    return (wide / norm).masked_fill(zero, 0.0).to(x.dtype)


def _similarity(query: Tensor, key: Tensor, dtype: torch.dtype) -> Tensor:
    """<q_i, k_j> [N, M], or <q_i, k_ij> for per-query keys [N, M, D]: product in the inputs' type, then `dtype`."""
    product_type = torch.promote_types(query.dtype, key.dtype)
    query, key = query.to(product_type), key.to(product_type)
    product = torch.einsum("nd,nkd->nk", query, key) if key.ndim == 3 else query @ key.T
    return product.to(dtype)


def _dot(query: Tensor, positive: Tensor, dtype: torch.dtype) -> Tensor:
    return (query.to(dtype) * positive.to(dtype)).sum(-1)


def _column(scale: float | Tensor) -> float | Tensor:
    return scale[:, None] if isinstance(scale, Tensor) and scale.ndim == 1 else scale


def _result_dtype(*inputs: Any) -> torch.dtype:
    """float64 if any tensor is float64, else float32 (16-bit sums are kept in float32)."""
    dtypes = [x.dtype for x in inputs if isinstance(x, Tensor)]
    return reduce(torch.promote_types, dtypes, torch.float32)
