"""From a batch to logits, all of them stored: what the textbook twins of the losses over rows share.

The rules are those of reference.py, of which this is a part: nothing validated, none of the package's own code.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor

NEVER = -math.inf


def over_batch(
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
        query, positive_key = normalized(query), normalized(positive_key)
        negative_keys = None if negative_keys is None else normalized(negative_keys)

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

    dtype = result_dtype(query, positive_key, temperature, log_q, *(keys for keys, *_ in segments))
    pos = dot(query, positive_key, dtype)
    limit = cap(pos.detach()) if callable(cap) and not isinstance(cap, Tensor) else cap
    pos = (pos if margin is None else margin(pos)) / temperature
    if log_q is not None:
        pos = pos - log_q.to(dtype)
    logits, keep = [pos.new_empty(len(query), 0)], [torch.empty(len(query), 0, dtype=torch.bool, device=query.device)]
    for keys, row_id, col_id, column_log_q, source in segments:
        similarity = similarity_of(query, keys, dtype)
        block = similarity / column(temperature)
        beta = hardness.get(source, 0.0) if isinstance(hardness, dict) else hardness
        if beta:
            block = block + beta * similarity.detach()
        if column_log_q is not None:
            block = block - column_log_q.to(dtype)
        kept = torch.ones_like(block, dtype=torch.bool)
        if row_id is not None and col_id is not None:
            kept = row_id[:, None] != col_id
        if limit is not None:
            kept = kept & (similarity.detach() <= column(limit))
        logits.append(block.masked_fill(~kept, NEVER))
        keep.append(kept)
    neg, count = torch.cat(logits, 1), torch.cat(keep, 1).sum(1)

    empty = (neg == NEVER).all(1)
    return head(pos, neg, count).masked_fill(empty, 0.0)


def finite_or_nan(scale: float | Tensor) -> float | Tensor:
    if isinstance(scale, Tensor):
        return scale + torch.zeros_like(scale).masked_fill(~scale.isfinite(), math.nan)
    return scale if math.isfinite(scale) else math.nan


def logsumexp(logits: Tensor) -> Tensor:
    """logsumexp over dim 1 that is -inf with zero gradient, where torch's gradient is NaN, for a row of -inf only."""
    empty = (logits == NEVER).all(1)
    return torch.logsumexp(logits.masked_fill(empty[:, None], 0.0), 1).masked_fill(empty, NEVER)


def normalized(x: Tensor) -> Tensor:
    """x / |x| in at least float32, back in the dtype of x; a zero row stays zero and gets zero gradient."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    zero = (wide == 0).all(-1, keepdim=True)
    norm = torch.linalg.vector_norm(wide.masked_fill(zero, 1.0), dim=-1, keepdim=True)
    return (wide / norm).masked_fill(zero, 0.0).to(x.dtype)


def similarity_of(query: Tensor, key: Tensor, dtype: torch.dtype) -> Tensor:
    """<q_i, k_j> [N, M], or <q_i, k_ij> for per-query keys [N, M, D]: product in the inputs' type, then `dtype`."""
    product_type = torch.promote_types(query.dtype, key.dtype)
    query, key = query.to(product_type), key.to(product_type)
    product = torch.einsum("nd,nkd->nk", query, key) if key.ndim == 3 else query @ key.T
    return product.to(dtype)


def dot(query: Tensor, positive: Tensor, dtype: torch.dtype) -> Tensor:
    return (query.to(dtype) * positive.to(dtype)).sum(-1)


def column(scale: float | Tensor) -> float | Tensor:
    return scale[:, None] if isinstance(scale, Tensor) and scale.ndim == 1 else scale


def result_dtype(*inputs: Any) -> torch.dtype:
    """float64 if any tensor is float64, else float32 (16-bit sums are kept in float32)."""
    dtypes = [x.dtype for x in inputs if isinstance(x, Tensor)]
    return reduce(torch.promote_types, dtypes, torch.float32)
