"""Textbook twins of views.py and of full softmax, with every logit or distance stored; part of `fastcl.reference`.

The rules are those of reference.py: for tests and benchmarks only, nothing validated, none of the package's own code.
"""

from __future__ import annotations

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
    query: Tensor,
    table: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    weight: Tensor | None = None,
) -> Tensor:
    """Cross-entropy of target over query table^T / T + bias."""
    temperature = temperature[:, None] if isinstance(temperature, Tensor) and temperature.ndim else temperature
    logits = _wide(query) @ _wide(table).T / temperature
    logits = logits if bias is None else logits + bias.to(logits.dtype)
    rows = F.cross_entropy(logits, target, reduction="none", ignore_index=ignore_index)
    return _reduce(rows, target != ignore_index, reduction, weight)


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
    """In float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
