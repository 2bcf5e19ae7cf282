"""The op `softplus_sum`, of which losses over pairs are made: schemas, fake kernels, autograd, and chunked PyTorch for
devices without compiled kernels. It is the counterpart of ops.py with a sum of softplus. No loss formula belongs here.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from fastcl import fallback
from fastcl.arithmetic import compute_dtype, finite_or_nan, no_autocast, softplus
from fastcl.checks import check_columns, check_scale, functorch_active, matrix, vector
from fastcl.library import LIBRARY, NONE, fake, handed_over, implement, none_for, scale_and_factor

# An absent tensor is passed to an op as an empty tensor (see library.py).
LIBRARY.define(
    "softplus_sum_forward(Tensor query, Tensor key, Tensor scale, Tensor offset, Tensor bias, "
    "Tensor row_id, Tensor col_id, float factor, bool row_grad, bool key_grad, bool bias_grad, Tensor row_weight) "
    "-> (Tensor total, Tensor sum_key, Tensor sum_weight, Tensor expected, Tensor key_sum, Tensor bias_sum)"
)
LIBRARY.define(
    "softplus_sum_backward(Tensor grad, Tensor query, Tensor key, Tensor scale, Tensor offset, Tensor bias, "
    "Tensor row_id, Tensor col_id, float factor, bool key_grad, bool bias_grad, Tensor expected, Tensor key_sum, "
    "Tensor bias_sum) -> (Tensor grad_key, Tensor grad_bias)"
)


def _logits(query: Tensor, key: Tensor, scale: Tensor, offset: Tensor, bias: Tensor, row_id: Tensor, col_id: Tensor,
            factor: float, dtype: torch.dtype, rows: slice) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Logits of some rows [n, M], -inf where excluded, and the rows of query times their scale [n, D]."""
    scaled = query[rows].to(dtype) * (
        finite_or_nan(scale.to(dtype)) if scale.dim() == 0 else _some(scale, rows, dtype, factor)
    )
    x = scaled @ key.to(dtype).T
    if offset.numel():
        x = x + offset[rows, None].to(dtype)
    if bias.numel():
        x = x + bias.to(dtype)
    if row_id.numel():
        x = x.masked_fill(row_id[rows, None] == col_id, -torch.inf)
    return x, scaled


def _some(scale: Tensor, rows: slice, dtype: torch.dtype, factor: float) -> Tensor | float:
    if scale.numel():
        return finite_or_nan(scale[rows, None].to(dtype))
    return factor if math.isfinite(factor) else math.nan


@no_autocast
def _chunked_forward(query: Tensor, key: Tensor, scale: Tensor, offset: Tensor, bias: Tensor, row_id: Tensor,
                     col_id: Tensor, factor: float, row_grad: bool, *unused: Any) -> tuple[Tensor, ...]:  # fmt: skip
    dtype = compute_dtype(query, key)
    total, sum_key, sum_weight = [], [], []
    for rows in fallback.chunks(query.shape[0], key.shape[0]):
        x, _ = _logits(query, key, scale, offset, bias, row_id, col_id, factor, dtype, rows)
        total.append(softplus(x).sum(1))
        if row_grad:
            weight = torch.sigmoid(x)
            sum_key.append(weight @ key.to(dtype))
            sum_weight.append(weight.sum(1))
    # Tensors of their own, since the results of an op must not share memory. Only compiled kernels sum over columns.
    none = [query.new_empty(0, dtype=dtype) for _ in range(5)]
    if not row_grad:
        return torch.cat(total), *none
    return torch.cat(total), torch.cat(sum_key), torch.cat(sum_weight), *none[:3]


@no_autocast
def _chunked_backward(grad: Tensor, query: Tensor, key: Tensor, scale: Tensor, offset: Tensor, bias: Tensor,
                      row_id: Tensor, col_id: Tensor, factor: float, key_grad: bool, bias_grad: bool,
                      *unused: Any) -> tuple[Tensor, Tensor]:  # fmt: skip
    d_key = torch.zeros_like(key, dtype=grad.dtype) if key_grad else grad.new_empty(0)
    d_bias = grad.new_zeros(key.shape[0]) if bias_grad else grad.new_empty(0)
    for rows in fallback.chunks(query.shape[0], key.shape[0]):
        x, scaled = _logits(query, key, scale, offset, bias, row_id, col_id, factor, grad.dtype, rows)
        weight = torch.sigmoid(x) * grad[rows, None]
        if key_grad:
            d_key = torch.addmm(d_key, weight.T, scaled)
        if bias_grad:
            d_bias = d_bias + weight.sum(0)
    return d_key.to(key.dtype) if key_grad else d_key, d_bias


implement("softplus_sum_forward", _chunked_forward)
implement("softplus_sum_backward", _chunked_backward)


@fake("softplus_sum_forward")
def _(query: Tensor, key: Tensor, scale: Tensor, offset: Tensor, bias: Tensor, row_id: Tensor, col_id: Tensor,
      factor: float, row_grad: bool, key_grad: bool, bias_grad: bool,
      row_weight: Tensor) -> tuple[Tensor, ...]:  # fmt: skip
    dtype, (n, d), m = compute_dtype(query, key), query.shape, key.shape[0]
    columns = key_grad or bias_grad
    of_rows: tuple[Any, ...] = ((n,), (n, d) if row_grad else (0,), (n if row_grad else 0,))
    of_columns: tuple[Any, ...] = (n if columns else 0,), (m, d) if columns else (0,), (m if bias_grad else 0,)
    return tuple(query.new_empty(shape, dtype=dtype) for shape in (*of_rows, *of_columns))


@fake("softplus_sum_backward")
def _(grad: Tensor, query: Tensor, key: Tensor, scale: Tensor, offset: Tensor, bias: Tensor, row_id: Tensor,
      col_id: Tensor, factor: float, key_grad: bool, bias_grad: bool, expected: Tensor, key_sum: Tensor,
      bias_sum: Tensor) -> tuple[Tensor, Tensor]:  # fmt: skip
    d_key = torch.empty_like(key) if key_grad else grad.new_empty(0)
    return d_key, grad.new_empty(key.shape[0] if bias_grad else 0)


forward_op = torch.ops.fastcl.softplus_sum_forward.default
backward_op = torch.ops.fastcl.softplus_sum_backward.default


def _gradients(columns: Callable[..., Any], needs: tuple[bool, ...], factor: float, grad: Tensor, query: Tensor,
               key: Tensor, scale: Tensor, offset: Tensor, bias: Tensor, row_id: Tensor, col_id: Tensor,
               sum_key: Tensor, sum_weight: Tensor, *summed: Tensor) -> tuple[Tensor, ...]:  # fmt: skip
    """The gradients of query, key, scale, offset and bias; [0] for those not needed. columns: the backward op."""
    d_query, d_key, d_scale, d_offset, d_bias = (grad.new_empty(0) for _ in range(5))
    if needs[0] or needs[2]:
        row = grad[:, None] * sum_key
        if needs[0]:
            s = scale if scale.dim() == 0 else scale[:, None] if scale.numel() else factor
            d_query = (row * s).to(query.dtype)
        if needs[2]:
            per_row = (query.to(row) * row).sum(1)
            d_scale = (per_row.sum() if scale.dim() == 0 else per_row).to(scale.dtype)
    if needs[3]:
        d_offset = (grad * sum_weight).to(offset.dtype)
    if needs[1] or needs[4]:
        given = grad, query, key, scale, offset, bias, row_id, col_id, factor
        d_key, d_bias = columns(*given, needs[1], needs[4], *summed)
        d_bias = d_bias.to(bias.dtype) if needs[4] else d_bias
    return d_query, d_key, d_scale, d_offset, d_bias


class _Gradients(Function):
    """`_gradients` as a Function, which makes gradients differentiable (see ops._Backward)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(needs: tuple[bool, ...], factor: float, *tensors: Tensor) -> tuple[Tensor, ...]:
        return _gradients(backward_op, needs, factor, *tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.needs, ctx.factor, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ids = ctx.saved_tensors[6:8]
        differentiable = ctx.saved_tensors[:6]
        if differentiable[2].dim() != 2:
            raise RuntimeError(
                "fastcl.softplus_sum: double backward needs the key, which is not saved unless it requires grad (a "
                "queue may overwrite it); pass a key that requires grad"
            )

        def first_order(grad: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
            sums = _chunked_forward(*inputs, *ids, ctx.factor, True)[1:]
            return _gradients(_chunked_backward, ctx.needs, ctx.factor, grad, *inputs, *ids, *sums)

        pull_back = torch.func.vjp(first_order, *differentiable)[1]
        found = (None, None, *pull_back(grads), *(None,) * 7)
        return tuple(g if needed else None for g, needed in zip(found, ctx.needs_input_grad, strict=True))


def _save(ctx: Any, keys: bool, query: Tensor, key: Tensor, scale: Tensor, offset: Tensor, bias: Tensor,
          row_id: Tensor, col_id: Tensor, *sums: Tensor) -> None:  # fmt: skip
    if not keys:
        key = bias = col_id = none_for(query)  # frozen columns: see ops.py
    ctx.save_for_backward(query, key, scale, offset, bias, row_id, col_id, *sums)


def _pull_back(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of the first five inputs, None for those that need none."""
    needs = tuple(ctx.needs_input_grad[:5])
    args = (needs, ctx.factor, grad.contiguous(), *ctx.saved_tensors)
    found = _Gradients.apply(*args) if torch.is_grad_enabled() else _gradients(backward_op, *args)
    return tuple(g if needed else None for g, needed in zip(found, needs, strict=True))


class _Eager(Function):
    """For plain autograd and compiled code."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, scale: Tensor, offset: Tensor, bias: Tensor, given: Any) -> Any:
        row_id, col_id, ctx.factor, *_ = given
        total, *sums = forward_op(query, key, scale, offset, bias, *given)
        needs = ctx.needs_input_grad
        _save(ctx, needs[1] or needs[4], query, key, scale, offset, bias, row_id, col_id, *sums)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return *_pull_back(ctx, grad), None


class _Functorch(Function):
    """`_Eager` for torch.func, which needs `setup_context`: that and the sums as outputs cost 20 us per call."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:
        return forward_op(*inputs, True, *PLAIN)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.factor = inputs
        sums = output[1:]
        ctx.mark_non_differentiable(*sums)
        # Frozen keys are saved too: torch.func often takes second derivatives, and its functions overwrite no tensors.
        _save(ctx, True, *tensors, *sums)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Any:
        return *_pull_back(ctx, grad), *(None,) * 3


_NAMES = ("query", "key", "scale", "offset", "bias", "row_id", "col_id", "weight")
# For callers of the ops: what they take after `row_grad` where no gradient is expected at the rows, and last where no
# sums are given.
PLAIN, NO_SUMS = (False, False, NONE), (NONE, NONE, NONE)


def softplus_sum(
    query: Tensor,  # [N, D]
    key: Tensor,  # [M, D]
    *,
    scale: float | Tensor = 1.0,  # a number, [] or [N]
    offset: Tensor | None = None,  # [N]
    bias: Tensor | None = None,  # [M]
    row_id: Tensor | None = None,  # [N]
    col_id: Tensor | None = None,  # [M]
) -> Tensor:
    """One number per row, of which losses over pairs are made, without storing the N x M logits.

        total_i = sum over { j : row_id_i != col_id_j } of softplus(scale_i <q_i, k_j> + offset_i + bias_j)

    Arguments, dtypes and errors are those of `fastcl.contrast`; `offset` [N] is added to the logits of a row. Returns
    [N], float32, or float64 if query or key is; 0 for a row with an empty sum. Gradients: query, key, scale, offset and
    bias; keys without requires_grad cost no product in the backward pass and are not saved. Gradients of gradients need
    keys that require grad and go through plain PyTorch, which stores N x M numbers.

    >>> import torch
    >>> total = softplus_sum(torch.eye(2), torch.zeros(3, 2))
    >>> [round(v, 4) for v in total.tolist()]  # 3 log 2
    [2.0794, 2.0794]
    """
    return softplus_sum_expecting(None, query, key, scale, offset, bias, row_id, col_id)


def softplus_sum_expecting(
    expected: float | Tensor | None,
    query: Tensor,
    key: Tensor,
    scale: float | Tensor = 1.0,
    offset: Tensor | None = None,
    bias: Tensor | None = None,
    row_id: Tensor | None = None,
    col_id: Tensor | None = None,
) -> Tensor:
    """`softplus_sum` for losses that know the gradient that they will send back, up to one factor common to all rows.

    expected: that gradient, [N], a number if it is the same for all rows, or None if it is not known. With it the
    forward pass sums the gradient of the keys while it has the weights. Only speed depends on it, as with
    `ops.Expected`.
    """
    matrix("query", query)
    n, d = query.shape
    matrix("key", key, None, d, query.device)
    check_scale("scale", scale, n, query.device)
    if offset is not None:
        vector("offset", offset, n, query.device)
    row_id, col_id = check_columns(n, key.shape[0], query.device, bias, row_id, col_id)
    none = none_for(query)
    scale_t, factor = scale_and_factor(scale, none)
    row_weight = expected.detach() if isinstance(expected, Tensor) else None
    given = (query, key, scale_t, offset, bias, row_id, col_id, row_weight)
    *tensors, weight = handed_over(_NAMES, given, none)
    transformed = functorch_active() or forward_ad._current_level >= 0
    learns = torch.is_grad_enabled()
    if not transformed and not (learns and any([t.requires_grad for t in tensors[:5]])):
        return forward_op(*tensors, factor, False, False, False, weight)[0]
    if transformed:
        return _Functorch.apply(*tensors, factor)[0]
    row_grad = any([t.requires_grad for t in (query, scale_t, tensors[3])])
    # Only the kernels for the CPU sum over columns in the forward pass.
    expecting = expected is not None and query.is_cpu and not fallback.FORCED
    sums = expecting and key.requires_grad, expecting and tensors[4].requires_grad
    return _Eager.apply(*tensors[:5], (*tensors[5:], factor, row_grad, *sums, weight))
