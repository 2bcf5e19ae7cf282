"""The dtypes of all computations, and sums of exponentials that stay finite, for ops, losses and the chunked PyTorch of
fallback.py.

Plain functions of tensors: no op is declared here, no argument is checked, and no loss formula is here.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastcl.checks import functorch_active, learns


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """The dtype of an op's computation and results: float64 if any input is float64, else float32."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def no_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with autocast off, so that its matrix products are in `compute_dtype`, as those of the kernels are."""

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        device = args[0].device.type
        # Checked first, since switching off autocast that is off already takes 16 us.
        on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        with torch.autocast(device, enabled=False) if on else contextlib.nullcontext():
            return function(*args)

    return run


def finite_or_nan(x: Tensor) -> Tensor:
    """x with NaN in place of infinities, for scales: an infinite scale has no meaning for logits of 0 or both signs."""
    return x + (x - x).detach()


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Inner products of rows, in `compute_dtype`. Autocast has no effect, since this is no matrix product to it."""
    dtype = compute_dtype(a, b)
    return (a.to(dtype) * b.to(dtype)).sum(-1)


def picked(table: Tensor, index: Tensor) -> Tensor:
    """table[index] for a table of rows or of numbers. The gradient of what is read often is a sum in `compute_dtype`:
    a sum in 16 bits loses what is small against it, which is most of it after some hundred terms.
    """
    wide = table
    # A functional transform hides whether the table learns.
    if learns(table) or (not torch.compiler.is_compiling() and functorch_active()):
        wide = table.to(compute_dtype(table))
    found = F.embedding(index, wide) if wide.dim() == 2 else wide[index]
    return found.to(table.dtype)


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x), to full precision in every type."""
    # torch returns x above its default threshold of 20, where the difference shows in float64; above 40 it does not.
    return F.softplus(x, threshold=40.0)


def logaddexp(a: Tensor, b: Tensor) -> Tensor:
    """torch.logaddexp with zero gradient, not NaN, where both are -inf, and with second derivatives, which are NaN in
    torch where the two lie far apart.
    """
    above = a > b
    high, low = torch.where(above, a, b), torch.where(above, b, a)
    apart = (low - high).masked_fill((low == high) & high.isinf(), -torch.inf)
    return high.masked_fill(high == -torch.inf, -torch.inf) + softplus(apart)


def logsumexp(x: Tensor) -> Tensor:
    """torch.logsumexp over dim 1, with zero gradient, not NaN, in a row whose sum is empty (all entries -inf)."""
    if x.shape[1] == 0:
        return x.new_full((x.shape[0],), -torch.inf)
    top = x.detach().amax(1)
    top = top.masked_fill(top.isinf(), 0.0)
    total = torch.exp(x - top[:, None]).sum(1)
    empty = total == 0
    return (total.masked_fill(empty, 1.0).log() + top).masked_fill(empty, -torch.inf)


def softmax_weights(x: Tensor, lse: Tensor) -> Tensor:
    """exp(x - lse); zero, not NaN, in a row whose sum is empty (lse = -inf)."""
    return torch.exp(x - lse.masked_fill(lse == -torch.inf, torch.inf)[:, None])
