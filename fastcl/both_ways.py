"""The log-sum-exp over the rows and over the columns of one matrix product, for symmetric losses of small batches.

Two calls of `fastcl.contrast` compute every similarity twice, which pays only where storing all of them would take too
much memory. No loss formula belongs here.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from fastcl import fallback
from fastcl.arithmetic import compute_dtype, logsumexp, no_autocast
from fastcl.checks import packed, readable
from fastcl.library import LIBRARY, NONE, fake, take_zeros
from fastcl.normalize import plain, unit_backward, unit_forward

# The results are in the dtype of query, which is that of key.
LIBRARY.define(
    "both_ways_forward(Tensor query, Tensor key, Tensor ids, float scale) "
    "-> (Tensor pos, Tensor lse, Tensor logits, Tensor sums)"
)
LIBRARY.define(
    "both_ways_backward(Tensor grad_pos, Tensor grad_lse, Tensor query, Tensor key, Tensor ids, Tensor logits, "
    "Tensor sums, float scale, bool query_grad, bool key_grad) -> (Tensor grad_query, Tensor grad_key)"
)


@fake("both_ways_forward")
def _(query: Tensor, key: Tensor, ids: Tensor, scale: float) -> tuple[Tensor, ...]:
    n = query.shape[0]
    return query.new_empty(2 * n), query.new_empty(2 * n), query.new_empty((n, n)), query.new_empty((4, n))


@fake("both_ways_backward")
def _(grad_pos: Tensor, grad_lse: Tensor, query: Tensor, key: Tensor, ids: Tensor, logits: Tensor, sums: Tensor,
      scale: float, query_grad: bool, key_grad: bool) -> tuple[Tensor, Tensor]:  # fmt: skip
    return query.new_empty(query.shape if query_grad else 0), key.new_empty(key.shape if key_grad else 0)


_forward = torch.ops.fastcl.both_ways_forward.default
_backward = torch.ops.fastcl.both_ways_backward.default
take_zeros("both_ways_forward")
take_zeros("both_ways_backward")

# The most similarities that are held, as many as in the fallback: 16 MiB in float32 until the backward pass, which
# needs the same amount once more.
_LARGEST = 1 << 22


def from_one_product(query: Tensor, key: Tensor) -> bool:
    """Whether `both_ways` serves these inputs: up to 2,048 rows on the CPU, in plain eager mode.

    It does not serve compiled code, transforms and modes, nor programs that allow torch less exact products.
    """
    n = query.shape[0]
    return (
        readable(query)
        and readable(key)
        and 0 < n * n <= _LARGEST
        and not fallback.FORCED
        and forward_ad._current_level < 0
        # torch's own types lack this attribute.
        and torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
        in ("none", "ieee")
    )


def both_ways(
    query: Tensor,  # [N, D]
    key: Tensor,  # [N, D]
    scale: float | Tensor,  # a number or []
    ids: Tensor | None,  # [N]
    unit: bool = False,
) -> tuple[Tensor, Tensor]:
    """pos and lse [2N]: first those of query against key, then those of key against query, over columns of other ids.

    Without ids row i leaves out column i alone. unit: divide the rows of query and key by their length first.
    Everything else is as in `fastcl.contrast`.
    """
    return _BothWays.apply(query, key, scale, ids, unit)


def _differentiable(q: Tensor, k: Tensor, scale: float | Tensor, ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """`both_ways` in operations that autograd can differentiate any number of times."""
    x = (q * scale) @ k.T
    pos = x.diagonal().repeat(2)
    meet = torch.eye(len(x), dtype=torch.bool, device=x.device) if ids is None else ids[:, None] == ids
    x = x.masked_fill(meet, -math.inf)
    return pos, torch.cat((logsumexp(x), logsumexp(x.T)))


def _given(query: Tensor, key: Tensor, dtype: torch.dtype, unit: bool) -> list[Tensor]:
    """Query and key as the op takes them; if `unit`, with rows of length 1, and behind them the inverse lengths."""
    rows = [t if t.is_contiguous() else packed(name, t) for name, t in (("query", query), ("positive_key", key))]
    if not unit:
        return [t if t.dtype == dtype else t.to(dtype) for t in rows]
    (q, by_query), (k, by_key) = (unit_forward(t) for t in rows)
    return [q.to(dtype), k.to(dtype), by_query, by_key]


class _BothWays(Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, scale: float | Tensor, ids: Tensor | None, unit: bool
    ) -> tuple[Tensor, Tensor]:
        dtype = compute_dtype(query, key)
        ctx.number = scale.item() if isinstance(scale, Tensor) else scale
        learned = scale if isinstance(scale, Tensor) else None
        q, k, *lengths = _given(query, key, dtype, unit)
        pos, lse, *logits = _forward(q, k, NONE if ids is None else ids, ctx.number)
        ctx.unit = unit
        ctx.save_for_backward(query, key, learned, ids, *logits, *((q, k, *lengths) if unit else ()))
        return pos, lse

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        query, key, scale, ids, logits, sums, *units = ctx.saved_tensors  # unpacked once; checkpointing refuses twice
        needs = ctx.needs_input_grad
        dtype = grads[0].dtype
        # Grad mode is on in a backward pass with create_graph=True, whose results may be differentiated.
        if torch.is_grad_enabled():
            # Views, so that what is found here ends at these inputs. Where the key is the query, or is made of it, its
            # graph leads on to the query, and autograd goes that way by itself: the key's share would count twice.
            query, key = query.view_as(query), key.view_as(key)
            inputs = [t for t, needed in zip((query, key, scale), needs, strict=False) if needed]
            q, k = (plain(t)[0] if ctx.unit else t for t in (query, key))
            number = ctx.number if scale is None else scale.to(dtype)
            results = no_autocast(_differentiable)(q.to(dtype), k.to(dtype), number, ids)
            found = iter(torch.autograd.grad(results, inputs, grads, create_graph=True))
            return *(next(found) if needed else None for needed in needs[:3]), None, None
        q, k, *lengths = units if ctx.unit else _given(query, key, dtype, False)
        grad_pos, grad_lse = (grad.contiguous() for grad in grads)
        d_query, d_key = _backward(
            grad_pos, grad_lse, q, k, NONE if ids is None else ids, logits, sums, ctx.number, needs[0] or needs[2],
            needs[1],
        )  # fmt: skip
        d_scale = (torch.dot(q.view(-1), d_query.view(-1)) / ctx.number).to(scale.dtype) if needs[2] else None
        if ctx.unit:
            if needs[0]:
                d_query = unit_backward(d_query, q, lengths[0], query.contiguous())
            if needs[1]:
                d_key = unit_backward(d_key, k, lengths[1], key.contiguous())
        return (
            d_query.to(query.dtype) if needs[0] else None,
            d_key.to(key.dtype) if needs[1] else None,
            d_scale,
            None,
            None,
        )
