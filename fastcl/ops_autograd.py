"""How autograd sees the op `contrast`: its Functions, for plain eager code on the CPU, for compiled code and other
devices, and for torch.func; and gradients of gradients.

A Function costs more than the work of a small batch, and so does each op that it calls. All that is done to the rows of
a loss is therefore one Function with one op for each pass (`Packed`): it may also divide rows by their length, and sum
over a second set of columns that no gradient reaches. No loss formula is here, and no argument is checked.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from fastcl import fallback
from fastcl.library import NONE, none_for
from fastcl.normalize import differentiable, plain

forward_op = torch.ops.fastcl.contrast_forward.default
backward_op = torch.ops.fastcl.contrast_backward.default
packed_forward_op = torch.ops.fastcl.contrast_packed_forward.default
packed_backward_op = torch.ops.fastcl.contrast_packed_backward.default

NO_VECTORS = NO_FROZEN = NO_SUMS = (NONE, NONE, NONE)


def in_json(shift: float) -> float:
    """`shift`, with the lowest double in place of -inf, which the op treats alike: AOTInductor writes an op's arguments
    as JSON, which has no infinity.
    """
    # The number is a literal, since under torch.compile(dynamic=True) a variable would be an input of the graph.
    return max(shift, -1.7976931348623157e308)


class Given(NamedTuple):
    """What the op takes beside the inputs that may have gradients: one argument, since each costs a Function time."""

    row_id: Tensor
    col_id: Tensor
    cap: Tensor
    factor: float
    column_sums: bool  # whether the forward pass sums the expected gradients of key and bias
    shift: float
    vectors: tuple[Tensor, ...]  # row_shift, rest, row_weight of `Expected`
    frozen: tuple[Tensor, ...]  # key, bias, id of `Frozen`
    unit: int = 0  # of `Packed` alone: whose rows are divided by their length first, see `unit_of`


def unit_of(unit_rows: bool, unit_key: bool, query: Tensor, key: Tensor, positive: Tensor) -> int:
    """0: nobody's rows; 1: those of query and positive; 2: those of key too. 3: key is query (NT-Xent), 4: key is
    positive (in-batch negatives); one gradient then serves both.
    """
    if not unit_rows:
        return 0
    return (4 if key is positive else 3 if key is query else 2) if unit_key else 1


class _Backward(Function):
    """The backward op as a Function, which makes gradients differentiable, by plain torch with N x M numbers in memory.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(frozen: bool, *args: Any) -> tuple[Tensor, ...]:
        return backward_op(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.frozen, *rest = inputs
        ctx.save_for_backward(*rest[:12])
        ctx.factor, *ctx.wanted = rest[15:]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        row_id, col_id, cap, lse, mean_key = ctx.saved_tensors[7:]
        inputs = ctx.saved_tensors[:7]
        query_grad, key_grad, positive_grad, scale_grad, bias_grad = ctx.wanted
        sums = query_grad or key_grad or scale_grad or bias_grad
        if sums and (ctx.frozen or inputs[3].dim() != 2):
            raise RuntimeError(
                "fastcl.contrast: double backward needs the key, which is not saved unless it requires grad (a queue "
                "may overwrite it); pass a key that requires grad"
            )

        def first_order(grad_pos: Tensor, grad_lse: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
            again = fallback.forward(*inputs, row_id, col_id, cap, ctx.factor, True)[1:3] if sums else (lse, mean_key)
            saved = (row_id, col_id, cap, *again, *NO_SUMS)
            return fallback.backward(grad_pos, grad_lse, *inputs, *saved, ctx.factor, *ctx.wanted)

        pull_back = torch.func.vjp(first_order, *inputs)[1]
        found = (None, *pull_back(grads), *(None,) * 14)
        return tuple(g if needed else None for g, needed in zip(found, ctx.needs_input_grad, strict=True))


def _grads(
    factor: float, grad_pos: Tensor, grad_lse: Tensor, saved: Sequence[Tensor], needs: Sequence[bool], frozen: bool
) -> list[Any]:
    """The gradients of query, key, positive, scale and bias; None for those that are not needed."""
    args = (grad_pos.contiguous(), grad_lse.contiguous(), *saved, factor, *needs)
    # Grad mode is on in a backward pass with create_graph=True, whose results may be differentiated.
    found = _Backward.apply(frozen, *args) if torch.is_grad_enabled() else backward_op(*args)
    return _as_inputs(found, saved, needs)


def _as_inputs(found: Sequence[Tensor], inputs: Sequence[Tensor], needs: Sequence[bool]) -> list[Any]:
    """The gradients that the op found, those of scale and bias in the shape and dtype of these."""
    grads: list[Any] = [g if wanted else None for g, wanted in zip(found, needs, strict=True)]
    if needs[3]:
        scale = inputs[3]
        grads[3] = (grads[3].sum() if scale.dim() == 0 else grads[3]).to(scale.dtype)
    if needs[4]:
        grads[4] = grads[4].to(inputs[4].dtype)
    return grads


def run(
    query: Tensor, key: Tensor, positive: Tensor, scale: Tensor, bias: Tensor, given: Given, needs: Sequence[bool]
) -> tuple[Tensor, ...]:
    """The forward op, with the sums for those of the first five arguments that need a gradient."""
    row_id, col_id, cap, factor, column_sums, shift, vectors, frozen, _ = given
    return forward_op(
        query, key, positive, scale, bias, row_id, col_id, cap, factor, needs[0] or needs[3],
        column_sums and needs[1], column_sums and needs[4], shift, *vectors, *frozen,
    )  # fmt: skip


def run_packed(
    query: Tensor, key: Tensor, positive: Tensor, scale: Tensor, bias: Tensor, given: Given, needs: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """pos, lse and what the backward pass reads, with the sums for those of the first five that need a gradient."""
    row_id, col_id, cap, factor, column_sums, shift, vectors, frozen, unit = given
    kept = 2 if needs[1] or needs[4] else 1 if needs[0] or needs[2] or needs[3] else 0
    return packed_forward_op(
        query, key, positive, scale, bias, row_id, col_id, cap, factor, needs[0] or needs[3],
        column_sums and needs[1], column_sums and needs[4], shift, *vectors, *frozen, unit, kept,
    )  # fmt: skip


class Packed(Function):
    """For plain eager code on the CPU."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, positive: Tensor, scale: Tensor, bias: Tensor, given: Given
    ) -> Any:
        needs, none = ctx.needs_input_grad, none_for(query)
        pos, lse, saved = run_packed(query, key, positive, scale, bias, given, needs)
        row_id, col_id, cap, ctx.factor, ctx.column_sums, _, _, frozen, ctx.unit = given
        ctx.frozen = frozen[0].dim() == 2
        if not (needs[1] or needs[4]):
            # Frozen columns take no part in the backward pass. They are not saved, so that a queue may be overwritten
            # between forward and backward.
            key = bias = col_id = cap = none
        inputs = (query, key, positive, scale, bias, row_id, col_id, cap)
        ctx.save_for_backward(*[None if t is none else t for t in inputs], lse, saved)
        return pos, lse

    @staticmethod
    def backward(ctx: Any, grad_pos: Tensor, grad_lse: Tensor) -> Any:
        *inputs, lse, saved = ctx.saved_tensors  # unpacked once; checkpointing refuses to do so twice
        none, needs = none_for(inputs[0]), ctx.needs_input_grad[:5]
        inputs = [none if t is None else t for t in inputs]
        if torch.is_grad_enabled():
            return *_packed_twice(ctx, grad_pos, grad_lse, inputs, lse, saved, needs), None
        found = packed_backward_op(
            grad_pos.contiguous(), grad_lse.contiguous(), *inputs, lse, saved, ctx.factor, *needs, ctx.unit,
            ctx.column_sums,
        )  # fmt: skip
        grads = _as_inputs(found, inputs, needs)
        if ctx.unit > 2:  # the gradient of the other one
            grads[1] = None
        return *grads, None


def _packed_twice(
    ctx: Any, grad_pos: Tensor, grad_lse: Tensor, inputs: list[Tensor], lse: Tensor, saved: Tensor,
    needs: Sequence[bool],
) -> list[Any]:  # fmt: skip
    """The gradients of `Packed` in operations that autograd can differentiate, computed from the inputs alone."""
    unit, raw, rows = ctx.unit, inputs[:3], list(inputs)
    if unit:
        for place in (0, 2):
            if raw[place].dim() == 2:
                rows[place] = plain(raw[place])[0]
        if unit > 1 and raw[1].dim() == 2:
            rows[1] = plain(raw[1])[0] if unit == 2 else rows[0 if unit == 3 else 2]
    n, d = raw[0].shape
    mean_key = saved[: n * d].view(n, d) if needs[0] or needs[3] else NONE
    grads = _grads(ctx.factor, grad_pos, grad_lse, (*rows, lse, mean_key, *NO_SUMS), needs, ctx.frozen)
    if unit > 2 and needs[1]:
        owner = 0 if unit == 3 else 2
        grads[owner], grads[1] = grads[owner] + grads[1], None
    for place, divided in enumerate((unit > 0, unit > 1, unit > 0)):
        if divided and grads[place] is not None:
            grads[place] = differentiable(grads[place], rows[place], NONE, raw[place])
    return grads


class Eager(Function):
    """For compiled code, and for other devices than the CPU."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, positive: Tensor, scale: Tensor, bias: Tensor, given: Given
    ) -> Any:
        needs = ctx.needs_input_grad
        ctx.factor, ctx.frozen = given.factor, given.frozen[0].dim() == 2
        pos, lse, *rows = run(query, key, positive, scale, bias, given, needs)
        row_id, col_id, cap = given[:3]
        if not (needs[1] or needs[4]):
            key = bias = col_id = cap = none_for(query)  # as in `Packed`
        ctx.save_for_backward(query, key, positive, scale, bias, row_id, col_id, cap, lse, *rows)
        return pos, lse

    @staticmethod
    def backward(ctx: Any, grad_pos: Tensor, grad_lse: Tensor) -> Any:
        saved = ctx.saved_tensors  # unpacked once; checkpointing refuses to do so twice
        return *_grads(ctx.factor, grad_pos, grad_lse, saved, ctx.needs_input_grad[:5], ctx.frozen), None


class Functorch(Function):
    """`Eager` for torch.func, which needs `setup_context`. That costs 16 us per call, which plain autograd avoids."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Any) -> Any:
        return forward_op(*inputs, True, False, False, in_json(-math.inf), *NO_VECTORS, *NO_FROZEN)[:3]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, lse, mean_key = output
        ctx.mark_non_differentiable(mean_key)
        *tensors, ctx.factor = inputs
        # Frozen keys are saved too: torch.func often takes second derivatives, and its functions overwrite no tensors.
        ctx.save_for_backward(*tensors, lse, mean_key, *NO_SUMS)

    @staticmethod
    def backward(ctx: Any, grad_pos: Tensor, grad_lse: Tensor, _: Any) -> Any:
        needs = ctx.needs_input_grad[:5]
        return *_grads(ctx.factor, grad_pos, grad_lse, ctx.saved_tensors, needs, False), *(None,) * 4
