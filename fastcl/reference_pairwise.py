"""Textbook twins of ops_pairwise.py, pairwise.py and tokens.py, with every logit stored; part of `fastcl.reference`.

The rules of reference.py hold: it serves tests and benchmarks only, validates nothing, and uses no code of the package.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def softplus_sum(
    query: Tensor,
    key: Tensor,
    *,
    scale: float | Tensor = 1.0,
    offset: Tensor | None = None,
    bias: Tensor | None = None,
    row_id: Tensor | None = None,
    col_id: Tensor | None = None,
) -> Tensor:
    """sum over {j: row_id_i != col_id_j} of log(1 + exp(s_i <q_i, k_j> + o_i + b_j))."""
    dtype = torch.float64 if torch.float64 in (query.dtype, key.dtype) else torch.float32
    # An infinite scale counts as NaN.
    scale = torch.as_tensor(scale, dtype=dtype)
    scale = scale + torch.zeros_like(scale).masked_fill(~scale.isfinite(), math.nan)
    logits = (query.to(dtype) @ key.to(dtype).T) * (scale[:, None] if scale.dim() else scale)
    if offset is not None:
        logits = logits + offset[:, None]
    if bias is not None:
        logits = logits + bias
    if row_id is not None and col_id is not None:
        logits = logits.masked_fill(row_id[:, None] == col_id, -math.inf)
    return torch.logaddexp(logits, torch.zeros_like(logits)).sum(1).to(dtype)


def maxsim(
    query_tokens: Tensor,
    document_tokens: Tensor,
    lengths: Tensor | None = None,
    query_lengths: Tensor | None = None,
) -> Tensor:
    """sum over t < T_i of max over u < U_j of <q_it, d_ju>; with no u at all the maximum is -inf."""
    dtype = torch.float64 if torch.float64 in (query_tokens.dtype, document_tokens.dtype) else torch.float32
    similarity = torch.einsum("itd,jud->ijtu", query_tokens.to(dtype), document_tokens.to(dtype))
    if lengths is not None:
        padding = torch.arange(similarity.shape[3], device=lengths.device) >= lengths[:, None]
        similarity = similarity.masked_fill(padding[:, None], -math.inf)
    if similarity.shape[3] == 0:
        similarity = F.pad(similarity, (0, 1), value=-math.inf)
    best = similarity.max(3).values
    if query_lengths is not None:
        padding = torch.arange(best.shape[2], device=query_lengths.device) >= query_lengths[:, None]
        best = best.masked_fill(padding[:, None], 0.0)
    return best.sum(2)


def _pairs(query: Tensor, positive_key: Tensor, negative_keys: Tensor) -> tuple[Tensor, Tensor]:
    """The logits of the positives [N] and of the negatives [N, M], in the dtype of the computation."""
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    q, p, k = query.to(dtype), positive_key.to(dtype), negative_keys.to(dtype)
    return (q * p).sum(1), q @ k.T if k.dim() == 2 else (q[:, None] * k).sum(2)


def _reduced(rows: Tensor, reduction: str, weight: Tensor | None) -> Tensor:
    rows = rows if weight is None else rows * weight
    return {"mean": rows.mean(), "sum": rows.sum(), "none": rows}[reduction]


def bpr(
    query: Tensor,
    positive_key: Tensor,
    negative_keys: Tensor,
    reduction: str = "mean",
    weight: Tensor | None = None,
) -> Tensor:
    """-sum_j log sigmoid(pos - neg_j): Rendle et al. 2009."""
    pos, neg = _pairs(query, positive_key, negative_keys)
    return _reduced(-F.logsigmoid(pos[:, None] - neg).sum(1), reduction, weight)


def negative_sampling(
    query: Tensor,
    positive_key: Tensor,
    negative_keys: Tensor,
    reduction: str = "mean",
    weight: Tensor | None = None,
) -> Tensor:
    """-log sigmoid(pos) - sum_j log sigmoid(-neg_j): Mikolov et al. 2013, equation 4."""
    pos, neg = _pairs(query, positive_key, negative_keys)
    return _reduced(-F.logsigmoid(pos) - F.logsigmoid(-neg).sum(1), reduction, weight)


def jensen_shannon(
    query: Tensor,
    positive_key: Tensor,
    negative_keys: Tensor,
    reduction: str = "mean",
    weight: Tensor | None = None,
) -> Tensor:
    """-log sigmoid(pos) - mean_j log sigmoid(-neg_j): Hjelm et al. 2019, equation 4."""
    pos, neg = _pairs(query, positive_key, negative_keys)
    return _reduced(-F.logsigmoid(pos) - F.logsigmoid(-neg).mean(1), reduction, weight)


def siglip(
    query: Tensor,
    key: Tensor,
    logit_scale: float | Tensor,
    logit_bias: float | Tensor,
    reduction: str = "mean",
    weight: Tensor | None = None,
    *,
    ids: Tensor | None = None,
    key_ids: Tensor | None = None,
) -> Tensor:
    """-sum_j w_ij log sigmoid(z_ij (scale <q_i, k_j> + bias)): Zhai et al. 2023.

    z is 1 on the diagonal, or where ids are equal, and -1 elsewhere; w is 1 / k for the k positives of a row, else 1.
    """
    logits = query @ key.T * logit_scale + logit_bias
    same = torch.eye(len(query), dtype=torch.bool) if ids is None or key_ids is None else ids[:, None] == key_ids
    label = 2 * same.to(logits) - 1
    share = torch.where(same, 1 / same.sum(1, keepdim=True).clamp(min=1).to(logits), 1.0)
    return _reduced(-(share * F.logsigmoid(label * logits)).sum(1), reduction, weight)


def triplet(
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor,
    margin: float = 1.0,
    reduction: str = "mean",
    weight: Tensor | None = None,
) -> Tensor:
    """max(0, <a, n> - <a, p> + margin)."""
    rows = ((anchor * negative).sum(1) - (anchor * positive).sum(1) + margin).clamp(min=0)
    return _reduced(rows, reduction, weight)
