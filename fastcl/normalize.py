"""Normalisation of rows to unit length, in one step for all inputs of a loss: op schemas, autograd, and a plain form
for where the op does not serve. No loss belongs here.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from fastcl import fallback
from fastcl.arithmetic import compute_dtype
from fastcl.checks import functorch_active, in_memory, packed
from fastcl.library import LIBRARY, fake, take_zeros

LIBRARY.define("normalize_forward(Tensor x) -> (Tensor unit, Tensor inverse)")
LIBRARY.define("normalize_backward(Tensor grad, Tensor unit, Tensor inverse, Tensor x) -> Tensor")


@fake("normalize_forward")
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    dtype = compute_dtype(x)
    return torch.empty_like(x, dtype=dtype), x.new_empty(len(x), dtype=dtype)


@fake("normalize_backward")
def _(grad: Tensor, unit: Tensor, inverse: Tensor, x: Tensor) -> Tensor:
    return torch.empty_like(x)


unit_forward = torch.ops.fastcl.normalize_forward.default
unit_backward = torch.ops.fastcl.normalize_backward.default
take_zeros("normalize_forward")
take_zeros("normalize_backward")


def in_one_step(*inputs: Tensor) -> bool:
    """Whether the op serves these inputs: on the CPU, outside compiled code, which fuses the plain form, and of
    transforms."""
    return (
        all([x.is_cpu for x in inputs])
        and not fallback.FORCED
        and not torch.compiler.is_compiling()
        and not functorch_active()
        and forward_ad._current_level < 0
    )


def normalized(x: Tensor) -> Tensor:
    """x / |x| over the last dimension, in float32 for 16-bit inputs. Zero vectors stay zero and have zero gradient."""
    return normalized_together(x)[0]


def normalized_together(*inputs: Tensor) -> tuple[Tensor, ...]:
    """Each input `normalized`, in one step of autograd."""
    if not in_one_step(*inputs):
        for x in inputs:
            in_memory("query or key", x)
        return tuple([plain(x)[0] for x in inputs])
    rows = [x if x.dim() == 2 and x.is_contiguous() else packed("query or key", x.flatten(0, -2)) for x in inputs]
    if torch.is_grad_enabled() and any([x.requires_grad for x in rows]):
        units = _Normalize.apply(*rows)
    else:
        units = [unit_forward(x)[0] for x in rows]
    return tuple([unit if x.dim() == 2 else unit.view(x.shape) for unit, x in zip(units, inputs, strict=True)])


def plain(x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.to(compute_dtype(x))
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    # Division by infinity keeps zero vectors zero and makes their gradient zero.
    norm = norm.masked_fill(norm == 0, math.inf)
    return x / norm, norm


class _Normalize(Function):
    """All inputs in one Function, whose overhead is larger than the work for small inputs."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
        made = [unit_forward(x) for x in inputs]
        units = tuple([unit for unit, _ in made])
        ctx.set_materialize_grads(False)
        # What is frozen stays so, or the loss would compute a gradient for it that nobody asked for.
        ctx.mark_non_differentiable(*[u for u, need in zip(units, ctx.needs_input_grad, strict=True) if not need])
        saved = (*inputs, *units, *[inverse for _, inverse in made])
        ctx.save_for_backward(*[x if need else None for x, need in zip(saved, ctx.needs_input_grad * 3, strict=True)])
        return units

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        saved, n = ctx.saved_tensors, len(grads)  # unpacked once; checkpointing refuses to do so twice
        # Grad mode is on in a backward pass with create_graph=True, whose results may be differentiated.
        run = differentiable if torch.is_grad_enabled() else unit_backward
        return tuple(
            [
                run(grad.contiguous(), saved[n + i], saved[2 * n + i], saved[i])
                if grad is not None and ctx.needs_input_grad[i]
                else None
                for i, grad in enumerate(grads)
            ]
        )


def differentiable(grad: Tensor, unit: Tensor, inverse: Tensor, x: Tensor) -> Tensor:
    """The backward op in operations that autograd can differentiate, computed from x alone."""
    unit, norm = plain(x)
    return ((grad - (grad * unit).sum(-1, keepdim=True) * unit) / norm).to(x.dtype)
