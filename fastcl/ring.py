"""lse over the keys of all ranks, where a rank holds its own keys and those of one other rank at a time: the op behind
`distributed.ring`; and how blocks travel, which ring_pairs.py shares.

It knows process groups and blocks of keys; losses and their scale are in distributed.py.
"""

import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import Function

from fastcl import ops
from fastcl.arithmetic import softmax_weights
from fastcl.library import NONE

Group = dist.ProcessGroup | None


def agree(call: Callable[[], tuple[int, object]], group: Group) -> list[int]:
    """The number of rows of each rank. It is the first collective of a call, and the last one if a rank raises.

    call: this rank's checks; returns its number of rows and the facts that must be equal on all ranks. An error of
    `call` is raised here, and all other ranks raise a RuntimeError that names this rank; without it they would wait for
    a rank that has left. Ranks with different facts raise a RuntimeError too. With a GPU, the host waits for it.
    """
    error: Exception | None = None
    count, alike = -1, ""
    try:
        count, what = call()
        alike = repr(what)
    except Exception as raised:
        error = raised
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else "cpu"
    own = torch.tensor([count, zlib.crc32(alike.encode())], device=device)
    found = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, own, group=group)
    said = torch.stack(found).tolist()
    if error is not None:
        raise error
    refused = [rank for rank, (size, _) in enumerate(said) if size < 0]
    if refused:
        raise RuntimeError(f"rank {refused[0]} refused its arguments; nothing was computed (its own error says why)")
    other = [rank for rank, (_, checksum) in enumerate(said) if checksum != said[0][1]]
    if other:
        raise RuntimeError(f"rank {other[0]}: expected arguments of the kinds that rank 0 has; here {alike}")
    return [size for size, _ in said]


def padded(x: Tensor, rows: int) -> Tensor:
    """x [n, ...] lengthened to `rows` rows; rows after the first n hold arbitrary values."""
    return x.contiguous() if x.shape[0] == rows else torch.cat([x, x.new_zeros(rows - x.shape[0], *x.shape[1:])])


def own_ids(sizes: list[int], device: torch.device, group: Group) -> Tensor:
    rank = dist.get_rank(group)
    return torch.arange(sizes[rank], device=device) + sum(sizes[:rank])


def pass_on(block: list[Tensor], group: Group) -> list[Tensor]:
    """Sends the block to the next rank and returns the block of the previous one."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if size == 1:
        return block
    found = [torch.empty_like(t) for t in block]
    moves = []
    for tag, (mine, theirs) in enumerate(zip(block, found, strict=True)):
        moves.append(dist.P2POp(dist.isend, mine, group=group, tag=tag, group_peer=(rank + 1) % size))
        moves.append(dist.P2POp(dist.irecv, theirs, group=group, tag=tag, group_peer=(rank - 1) % size))
    for work in dist.batch_isend_irecv(moves):
        work.wait()
    return found


def visits_of(sizes: list[int], group: Group) -> list[int]:
    """The number of rows of the block in each step: of this rank's own block, then of the block of the rank before."""
    rank = dist.get_rank(group)
    return [sizes[(rank - step) % len(sizes)] for step in range(len(sizes))]


class RingLse(Function):
    """lse [N] of this rank's rows over all ranks' keys whose id differs from the row's."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,  # [N, D]
        key: Tensor,  # [N, D], this rank's
        scale: Tensor,  # [], [N], or [0]
        bias: Tensor | None,  # [N] of key, or None; [0] is the bias of a rank without rows, which travels too
        ids: Tensor,  # [N] of query and of key
        cap: Tensor,  # [N], or [0] for none
        factor: float,
        sizes: list[int],
        group: Group,
    ) -> Tensor:
        ctx.factor, ctx.sizes, ctx.group = factor, sizes, group
        query, scale, ids = query.contiguous(), scale.contiguous(), ids.contiguous()
        row_grad = ctx.needs_input_grad[0] or ctx.needs_input_grad[2]
        lse = mean_key = None
        block = block_of(key, ids, bias, sizes)
        for step, size in enumerate(visits_of(sizes, group)):
            if step:
                block = pass_on(block, group)
            columns = cut(block, size)
            _, part, mean, *_ = ops.forward_op(
                query, columns[0], NONE, scale, columns[2], ids, columns[1], cap, factor, row_grad, *ops.PLAIN
            )
            if lse is None or mean_key is None:
                lse, mean_key = part, mean
                continue
            total = torch.logaddexp(lse, part)
            if row_grad:
                before, now = (softmax_weights(x[:, None], total) for x in (lse, part))
                mean_key = before * mean_key + now * mean
            lse = total
        ctx.save_for_backward(query, key, scale, bias, ids, cap, lse, mean_key)
        assert lse is not None
        return lse

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if torch.is_grad_enabled():
            # Not once_differentiable: second derivatives then came out wrong without a word.
            raise RuntimeError("fastcl.distributed.ring: double backward (create_graph=True) is not supported")
        query, key, scale, bias, ids, cap, lse, mean_key = ctx.saved_tensors
        need_query, need_key, need_scale, need_bias = ctx.needs_input_grad[:4]
        grad = grad.contiguous()
        block = block_of(key, ids, bias, ctx.sizes)
        # Gradients travel with their keys and are back at their rank after a whole round.
        sums = [torch.zeros_like(block[0], dtype=lse.dtype)] if need_key else []
        sums += [torch.zeros_like(block[2], dtype=lse.dtype)] if need_bias else []
        visits = visits_of(ctx.sizes, ctx.group)
        d_query = d_scale = None
        for step, size in enumerate(visits if sums else visits[:1]):
            columns = cut(block, size)
            rows = step == 0  # mean_key gives the gradients of the rows in the first step
            found = ops.backward_op(
                lse.new_empty(0), grad, query, columns[0], NONE, scale, columns[2], ids, columns[1], cap, lse, mean_key,
                *ops.NO_SUMS, ctx.factor, need_query and rows, need_key, False, need_scale and rows, need_bias,
            )  # fmt: skip
            if rows:
                d_query, d_scale = found[0], found[3]
            parts = ([found[1]] if need_key else []) + ([found[4]] if need_bias else [])
            for total, part in zip(sums, parts, strict=True):
                total[:size] += part
            if sums:
                moved = pass_on([*block, *sums], ctx.group)
                block, sums = moved[: len(block)], moved[len(block) :]
        if need_scale:
            assert d_scale is not None
            d_scale = (d_scale.sum() if scale.dim() == 0 else d_scale).to(scale.dtype)
        return (
            d_query if need_query else None,
            sums[0][: len(key)].to(key.dtype) if need_key else None,
            d_scale if need_scale else None,
            sums[-1][: len(key)].to(bias.dtype) if bias is not None and need_bias else None,
            *(None,) * 5,
        )


def block_of(key: Tensor, ids: Tensor, bias: Tensor | None, sizes: list[int]) -> list[Tensor]:
    """The block that travels: keys, ids and, if given, the bias, filled up to the size of the largest rank."""
    return [padded(t, max(sizes)) for t in (key, ids, *([] if bias is None else [bias]))]


def cut(block: list[Tensor], size: int) -> list[Tensor]:
    """Key, id and bias of a block without the rows that fill it up."""
    return [t[:size] for t in (*block, *([] if len(block) == 3 else [NONE]))]
