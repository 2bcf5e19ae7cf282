"""Textbook twins of views.py and of full softmax, with every logit or distance stored; part of `fastcl.reference`.

The rules of reference.py hold: it serves tests and benchmarks only, validates nothing, and uses no code of the package.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F


def nt_xent(
    view1: Tensor,
    view2: Tensor,
    temperature: float | Tensor = 0.5,
    reduction: str = "mean",
    weight: Tensor | None = None,
) -> Tensor:
    """Cross-entropy of an anchor's other view among all views but itself: Chen et al. 2020, Eq. 1."""
    z = F.normalize(torch.cat([_wide(view1), _wide(view2)]), dim=1)
    n = len(z)
    temperature = temperature[:, None] if isinstance(temperature, Tensor) and temperature.ndim else temperature
    logits = (z @ z.T / temperature).masked_fill(torch.eye(n, dtype=torch.bool), float("-inf"))
    rows = F.cross_entropy(logits, (torch.arange(n) + n // 2) % n, reduction="none")
    return _reduce(rows, torch.ones(n, dtype=torch.bool), reduction, weight)


def supcon(
    features: Tensor,
    labels: Tensor,
    temperature: float | Tensor = 0.07,
    reduction: str = "mean",
    weight: Tensor | None = None,
) -> Tensor:
    """The mean over positives of log-probabilities, outside the log: Khosla et al. 2020, Eq. 2."""
    z = F.normalize(_wide(features), dim=1)
    myself = torch.eye(len(z), dtype=torch.bool)
    temperature = temperature[:, None] if isinstance(temperature, Tensor) and temperature.ndim else temperature
    log_probability = F.log_softmax((z @ z.T / temperature).masked_fill(myself, float("-inf")), dim=1)
    positive = (labels[:, None] == labels) & ~myself
    total = log_probability.masked_fill(~positive, 0.0).sum(1)
    return _reduce(-total / positive.sum(1).clamp(min=1), positive.any(1), reduction, weight)


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    ignore_index: int | None = None,
    reduction: str = "mean",
    row_weight: Tensor | None = None,
    *,
    weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    margin: Callable[[Tensor], Tensor] | None = None,
    z_loss: float = 0.0,
) -> Tensor:
    """-sum_c t_ic w_c log p_ic for p = softmax(input linear_weight^T / T + linear_bias) and the smoothed targets t.

    z_loss times the square of the log of the softmax's denominator comes on top; `margin` changes the target's logit.
    """
    temperature = temperature[:, None] if isinstance(temperature, Tensor) and temperature.ndim else temperature
    similarity = _wide(input) @ _wide(linear_weight).T
    counted = target != (-100 if ignore_index is None else ignore_index)
    one_hot = F.one_hot(target.where(counted, 0).long(), similarity.shape[1]).to(similarity.dtype)
    if margin is not None:
        moved = torch.stack([margin(column) for column in similarity.T], 1)
        similarity = torch.where(one_hot == 1, moved, similarity)
    logits = similarity / temperature
    logits = logits if linear_bias is None else logits + linear_bias.to(logits.dtype)
    smooth = (1 - label_smoothing) * one_hot + label_smoothing / logits.shape[1]
    class_weight = torch.ones_like(logits[0]) if weight is None else weight.to(logits.dtype)
    wanted = smooth * class_weight
    # A class with target 0 contributes nothing, even where its log p is -inf.
    log_p = F.log_softmax(logits, dim=1).masked_fill((wanted == 0) | ~counted[:, None], 0.0)
    rows = -(wanted * log_p).sum(1)
    if z_loss:
        rows = rows + z_loss * torch.logsumexp(logits, 1).masked_fill(~counted, 0.0) ** 2
    if row_weight is not None:
        rows = rows * row_weight.to(rows.dtype)
    if reduction == "none":
        return rows
    total = ((one_hot * class_weight).sum(1) * counted).sum()
    return rows.sum() if reduction == "sum" else rows.sum() / (total if total else 1.0)


def alignment(
    x: Tensor, y: Tensor, alpha: float = 2.0, reduction: str = "mean", weight: Tensor | None = None
) -> Tensor:
    """|x - y|^alpha: Wang & Isola 2020, section 4.1.1."""
    rows = torch.linalg.vector_norm(_wide(x) - _wide(y), dim=1) ** alpha
    return _reduce(rows, torch.ones(len(x), dtype=torch.bool), reduction, weight)


def uniformity(x: Tensor, t: float = 2.0) -> Tensor:
    """log of the mean of exp(-t |x - y|^2) over all pairs: Wang & Isola 2020, section 4.1.2."""
    return F.pdist(_wide(x)).square().mul(-t).exp().mean().log()


def _reduce(rows: Tensor, counted: Tensor, reduction: str, weight: Tensor | None) -> Tensor:
    if weight is not None:
        rows = rows * weight.to(rows.dtype)
    if reduction == "none":
        return rows
    return rows.sum() if reduction == "sum" else rows.sum() / counted.sum().clamp(min=1)


def _wide(x: Tensor) -> Tensor:
    """x in float32, or as it is where its dtype is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
