"""The log-sum-exp over the rows and over the columns of one product: what a symmetric loss needs of a small batch.

Two calls of `fastcl.contrast` compute every similarity twice, which is worth it only where all of them would take too
much memory. No loss formula belongs here.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from fastcl import fallback
from fastcl.arithmetic import compute_dtype, logsumexp, no_autocast
from fastcl.checks import in_memory, readable

# N x N similarities held at once, as the fallback holds: in float32 three matrices of at most 16 MiB each, two of them
# until the backward pass.
_LARGEST = 1 << 22


def from_one_product(query: Tensor, key: Tensor) -> bool:
    """Whether `both_ways` takes them: up to 2,048 rows on the CPU, in plain eager mode.

    Compiled code, transforms and modes go without, and so does whoever asked torch for less exact products.
    """
    n = query.shape[0]
    return (
        readable(query)
        and readable(key)
        and 0 < n * n <= _LARGEST
        and not fallback.FORCED
        and forward_ad._current_level < 0
        and torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
        in ("none", "ieee")
    )


def both_ways(
    query: Tensor,  # [N, D]
    key: Tensor,  # [N, D]
    scale: float | Tensor,  # a number or []
    ids: Tensor | None,  # [N]
) -> tuple[Tensor, Tensor, Tensor]:
    """pos [N], and lse [N] of query against key and of key against query, each over the columns of other ids.

    Without ids row i is kept from column i alone. All else is as in `fastcl.contrast`.
    """
    in_memory("query", query)
    in_memory("positive_key", key)
    pos, lse = _BothWays.apply(query, key, scale, ids)
    there, back = lse.unbind()
    return pos, there, back


def _leave_out(x: Tensor, ids: Tensor | None, value: float) -> None:
    if ids is None:
        x.fill_diagonal_(value)
    else:
        x.masked_fill_(ids[:, None] == ids, value)


@no_autocast
def _forward(q: Tensor, k: Tensor, scale: float, ids: Tensor | None) -> tuple[Tensor, ...]:
    x = torch.addmm(q.new_empty(1), q, k.T, beta=0, alpha=scale)
    pos = x.diagonal().clone()
    _leave_out(x, ids, -math.inf)
    # Finite, so that a row of -inf alone has weights of 0, and one with +inf a sum of +inf, neither of them NaN.
    top = torch.stack((x.amax(1), x.amax(0))).clamp_(*_finite(x.dtype))
    by_row = torch.sub(x, top[0, :, None]).exp_()
    by_column = x.sub_(top[1]).exp_()
    sums = torch.stack((by_row.sum(1), by_column.sum(0)))
    return pos, sums.log().add_(top), by_row, by_column, sums


def _finite(dtype: torch.dtype) -> tuple[float, float]:
    info = torch.finfo(dtype)
    return info.min, info.max


@no_autocast
def _backward(grad_pos: Tensor, grad_lse: Tensor, q: Tensor, k: Tensor, by_row: Tensor, by_column: Tensor,
              sums: Tensor, scale: float, ids: Tensor | None, query_grad: bool, key_grad: bool, scale_grad: bool,
              ) -> tuple[Tensor | None, ...]:  # fmt: skip
    # A row with nothing in its sum passes nothing on, whatever a loss on top sends into it.
    there, back = (grad_lse / sums).masked_fill_(sums == 0, 0.0).mul_(scale)
    x = (by_row * there[:, None]).addcmul_(by_column, back)
    if ids is not None:
        _leave_out(x, ids, 0.0)  # where NaN met a weight of 0
    x.diagonal().copy_(grad_pos * scale)
    d_query = d_key = d_scale = None
    if query_grad or scale_grad:
        d_query = x @ k
        d_scale = (q * d_query).sum() / scale if scale_grad else None
    if key_grad:
        d_key = x.T @ q
    return d_query, d_key, d_scale


def _differentiable(q: Tensor, k: Tensor, scale: float | Tensor, ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """The same in operations that autograd can differentiate any number of times."""
    x = (q * scale) @ k.T
    pos = x.diagonal()
    meet = torch.eye(len(x), dtype=torch.bool, device=x.device) if ids is None else ids[:, None] == ids
    x = x.masked_fill(meet, -math.inf)
    return pos, torch.stack((logsumexp(x), logsumexp(x.T)))


class _BothWays(Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, scale: float | Tensor, ids: Tensor | None) -> Any:
        dtype = compute_dtype(query, key)
        number = scale.item() if isinstance(scale, Tensor) else scale
        ctx.number = number if math.isfinite(number) else math.nan  # see arithmetic.finite_or_nan
        pos, lse, *weights = _forward(query.to(dtype), key.to(dtype), ctx.number, ids)
        ctx.scale = None if isinstance(scale, Tensor) else scale
        ctx.save_for_backward(query, key, scale if isinstance(scale, Tensor) else None, ids, *weights)
        return pos, lse

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        query, key, scale, ids, *weights = ctx.saved_tensors  # unpacked once: checkpointing refuses a second time
        needs = ctx.needs_input_grad
        dtype = grads[0].dtype
        # Grad mode in here means that someone may want to differentiate what comes out.
        if torch.is_grad_enabled():
            inputs = [t for t, needed in zip((query, key, scale), needs, strict=False) if needed]
            q, k = query.to(dtype), key.to(dtype)
            results = no_autocast(_differentiable)(q, k, ctx.scale if scale is None else scale.to(dtype), ids)
            found = iter(torch.autograd.grad(results, inputs, grads, create_graph=True))
            return *(next(found) if needed else None for needed in needs[:3]), None
        d_query, d_key, d_scale = _backward(
            *grads, query.to(dtype), key.to(dtype), *weights, ctx.number, ids, *needs[:3]
        )
        return (
            d_query.to(query.dtype) if d_query is not None and needs[0] else None,
            None if d_key is None else d_key.to(key.dtype),
            None if d_scale is None or scale is None else d_scale.to(scale.dtype),
            None,
        )
