"""The rows of all ranks on every rank, with a gradient: the op behind `distributed.gather`, and what ranks tell each
other of rows before they send them.

It knows process groups and rows; losses and their scale are elsewhere.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import Function

from fastcl.arithmetic import compute_dtype
from fastcl.checks import FLOATS, learns
from fastcl.ring import Group, padded


class Gather(Function):
    """[N_r, ...] of each rank -> [sum of N_r, ...], and the other way the sum of the ranks' gradients, times `factor`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: list[int], group: Group, factor: float = 1.0) -> Tensor:
        ctx.sizes, ctx.group, ctx.dtype, ctx.factor = sizes, group, x.dtype, factor
        # As bytes, since no backend has every dtype.
        own = padded(_bytes(x.resolve_conj().resolve_neg().contiguous()), max(sizes))
        blocks = [torch.empty_like(own) for _ in sizes]
        dist.all_gather(blocks, own, group=group)
        whole = x.new_empty(sum(sizes), *x.shape[1:])
        torch.cat([block[:size] for block, size in zip(blocks, sizes, strict=True)], out=_bytes(whole))
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """This rank's rows of the gradient summed over ranks, in float32 or wider."""
        if torch.is_grad_enabled():
            # Not once_differentiable: second derivatives then came out wrong without a word.
            raise RuntimeError("fastcl.distributed.gather: double backward (create_graph=True) is not supported")
        longest, own = max(ctx.sizes), ctx.sizes[dist.get_rank(ctx.group)]
        blocks = [padded(block, longest) for block in grad.to(compute_dtype(grad)).split(ctx.sizes)]
        total = torch.empty_like(blocks[0])
        dist.reduce_scatter(total, blocks, group=ctx.group)
        return (total[:own] * ctx.factor).to(ctx.dtype), None, None, None


def _bytes(x: Tensor) -> Tensor:
    """The memory of a contiguous tensor [N, ...], uint8 [N, ..., bytes of an element]."""
    return x.unsqueeze(-1).view(torch.uint8)


def rows_and_facts(name: str, x: Any) -> tuple[int, object]:
    """The number of rows, and the facts that must be equal on all ranks for the rows to be gathered."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
    if x.dim() == 0:
        raise ValueError(f"{name}: expected rows, shape [N, ...], got shape []")
    if x.layout != torch.strided:
        raise TypeError(f"{name}: expected a dense tensor, got layout {x.layout}")
    if x.is_meta:
        raise ValueError(f"{name}: expected a device with content, got meta")
    if learns(x) and x.dtype not in FLOATS:
        wanted = "float64, float32, bfloat16 or float16 where it has a gradient"
        raise TypeError(f"{name}: expected dtype {wanted}, got {x.dtype}")
    return x.shape[0], (name, list(x.shape[1:]), x.dtype, x.device.type, learns(x))
