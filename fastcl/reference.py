"""Textbook twins of `fastcl.contrast` and the losses: the full logit matrix in plain differentiable torch operations.

For tests (in float64 they are the truth) and benchmarks (they are what one writes without fastcl) only: memory is
N x M, and arguments are not validated here. Signatures and meaning equal those of the functions of the same name in
`fastcl`; nothing in here may use the package's own kernels or loss code, or it would no longer be independent of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fastcl.reference_batch import NEVER as _NEVER
from fastcl.reference_batch import column as _column
from fastcl.reference_batch import dot as _dot
from fastcl.reference_batch import finite_or_nan as _finite_or_nan
from fastcl.reference_batch import logsumexp as _logsumexp
from fastcl.reference_batch import normalized as _normalize
from fastcl.reference_batch import over_batch as _loss
from fastcl.reference_batch import result_dtype as _result_dtype
from fastcl.reference_batch import similarity_of as _similarity
from fastcl.reference_pairwise import bpr, jensen_shannon, maxsim, negative_sampling, siglip, softplus_sum, triplet
from fastcl.reference_recommend import bsl, ccl, directau, gbce, psl, sce, sl_at_k, sogclr
from fastcl.reference_soft import directional_infonce, distill_kl, margin_mse, multi_positive, soft_cross_entropy
from fastcl.reference_views import alignment, linear_cross_entropy, nt_xent, supcon, uniformity

__all__ = [
    "alignment",
    "bpr",
    "bsl",
    "ccl",
    "contrast",
    "dcl",
    "dclw",
    "debiased_infonce",
    "directau",
    "directional_infonce",
    "distill_kl",
    "gbce",
    "infonce",
    "infonce_plus",
    "jensen_shannon",
    "linear_cross_entropy",
    "margin_mse",
    "maxsim",
    "mine",
    "mine_plus",
    "multi_positive",
    "negative_sampling",
    "nt_xent",
    "psl",
    "sampled_softmax",
    "sce",
    "siglip",
    "sl_at_k",
    "soft_cross_entropy",
    "softplus_sum",
    "sogclr",
    "supcon",
    "triplet",
    "uniformity",
]


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
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    **options: Any,
) -> Tensor:
    """-log(e^pos / (e^pos + sum_j e^neg_j)): van den Oord et al. 2018, equation 4; `options` as in `fastcl.infonce`.

    NaN wherever a logit is +inf, as torch's cross_entropy has it; `fastcl.infonce` has the limit where there is one.
    """

    def head(pos: Tensor, neg: Tensor, count: Tensor) -> Tensor:
        logits = torch.cat([pos[:, None], neg], 1)
        first = torch.zeros(len(logits), dtype=torch.long, device=pos.device)
        loss = F.cross_entropy(logits, first, reduction="none")
        if label_smoothing:
            log_p = F.log_softmax(logits, 1).masked_fill(logits == _NEVER, 0.0)
            loss = (1 - label_smoothing) * loss - label_smoothing * log_p.sum(1) / (count + 1)
        return loss + z_loss * torch.logsumexp(logits, 1) ** 2 if z_loss else loss

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
