"""How autograd sees the op `contrast`: its Functions, for eager code and for torch.func, and gradients of gradients.

A Function costs more than the work of a small batch. All that is done to the rows of a loss is therefore one Function:
it may also divide rows by their length, and sum over a second set of columns that no gradient reaches. No loss formula
is here, and no argument is checked.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from fastcl import fallback
from fastcl.library import NONE, none_for
from fastcl.normalize import differentiable, plain, unit_backward, unit_forward

forward_op = torch.ops.fastcl.contrast_forward.default
backward_op = torch.ops.fastcl.contrast_backward.default

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
    unit_rows: bool  # whether rows of query and positive are divided by their length first
    unit_key: bool  # the same for those of key


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
    ctx: Any, grad_pos: Tensor, grad_lse: Tensor, saved: Sequence[Tensor], needs: Sequence[bool], frozen: bool
) -> list[Any]:
    """The gradients of query, key, positive, scale and bias; None for those that are not needed."""
    args = (grad_pos.contiguous(), grad_lse.contiguous(), *saved, ctx.factor, *needs)
    # Grad mode is on in a backward pass with create_graph=True, whose results may be differentiated.
    found = _Backward.apply(frozen, *args) if torch.is_grad_enabled() else backward_op(*args)
    grads: list[Any] = [g if wanted else None for g, wanted in zip(found, needs, strict=True)]
    if needs[3]:
        scale = saved[3]
        grads[3] = (grads[3].sum() if scale.dim() == 0 else grads[3]).to(scale.dtype)
    if needs[4]:
        grads[4] = grads[4].to(saved[4].dtype)
    return grads


def run(
    query: Tensor, key: Tensor, positive: Tensor, scale: Tensor, bias: Tensor, given: Given, needs: Sequence[bool]
) -> tuple[Tensor, ...]:
    """The forward op, with the sums for those of the first five arguments that need a gradient."""
    row_id, col_id, cap, factor, column_sums, shift, vectors, frozen, _, _ = given
    return forward_op(
        query, key, positive, scale, bias, row_id, col_id, cap, factor, needs[0] or needs[3],
        column_sums and needs[1], column_sums and needs[4], shift, *vectors, *frozen,
    )  # fmt: skip


def units(query: Tensor, key: Tensor, positive: Tensor, given: Given) -> list[tuple[Tensor, Tensor]]:
    """For each of the three its rows divided by their length, where `given` asks for it, and the inverse lengths."""
    found = [unit_forward(query), (key, NONE), unit_forward(positive)]
    if given.unit_key:
        owner = _owner(query, key, positive)
        found[1] = unit_forward(key) if owner == 1 else found[owner]
    return found


def _owner(query: Tensor, key: Tensor, positive: Tensor) -> int:
    """Which of the three the keys are, by place: often the positives (in-batch negatives) or the queries."""
    return 2 if key is positive else 0 if key is query else 1


class Eager(Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, positive: Tensor, scale: Tensor, bias: Tensor, given: Given
    ) -> Any:
        needs = ctx.needs_input_grad
        learns = needs[1] or needs[4]
        ctx.factor, ctx.frozen, ctx.unit_rows = given.factor, given.frozen[0].dim() == 2, given.unit_rows
        lengths: tuple[Tensor, ...] = ()
        if given.unit_rows:
            raw = query, key, positive
            # Where the keys are other rows as well, one gradient serves both.
            ctx.owner = _owner(*raw) if given.unit_key else 1
            (query, by_query), (key, by_key), (positive, by_positive) = units(*raw, given)
            lengths = raw[0], by_query, raw[2], by_positive
            lengths += (raw[1], by_key) if learns and given.unit_key and ctx.owner == 1 else (NONE, NONE)
        pos, lse, *rows = run(query, key, positive, scale, bias, given, needs)
        row_id, col_id, cap = given[:3]
        if not learns:
            # Frozen columns take no part in the backward pass. They are not saved, so that a queue may be overwritten
            # between forward and backward.
            key = bias = col_id = cap = none_for(query)
        ctx.save_for_backward(query, key, positive, scale, bias, row_id, col_id, cap, lse, *rows, *lengths)
        return pos, lse

    @staticmethod
    def backward(ctx: Any, grad_pos: Tensor, grad_lse: Tensor) -> Any:
        saved = ctx.saved_tensors  # unpacked once; checkpointing refuses to do so twice
        needs = ctx.needs_input_grad[:5]
        if not ctx.unit_rows:
            return *_grads(ctx, grad_pos, grad_lse, saved, needs, ctx.frozen), None
        *units, query, by_query, positive, by_positive, key, by_key = saved
        owner = ctx.owner
        back: Callable[..., Tensor] = unit_backward
        if torch.is_grad_enabled():
            back = differentiable
            units[0], units[2] = plain(query)[0], plain(positive)[0]
            if needs[1] and (owner != 1 or key.dim() == 2):
                units[1] = plain(key)[0] if owner == 1 else units[owner]
        grads = _grads(ctx, grad_pos, grad_lse, units, needs, ctx.frozen)
        if grads[1] is not None and owner != 1:
            grads[owner], grads[1] = grads[owner] + grads[1], None
        for place, rows, by in ((0, query, by_query), (1, key, by_key), (2, positive, by_positive)):
            if grads[place] is not None and rows.dim() == 2:
                grads[place] = back(grads[place], units[place], by, rows)
        return *grads, None


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
        return *_grads(ctx, grad_pos, grad_lse, ctx.saved_tensors, ctx.needs_input_grad[:5], False), *(None,) * 4
