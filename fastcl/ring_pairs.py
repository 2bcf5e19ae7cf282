"""SigLIP over the batches of all processes, whose keys travel from rank to rank (ring.py says how), and the op below
it, which is the counterpart of `ring.RingLse` with a sum of softplus.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import Function

from fastcl import ops_pairwise
from fastcl.arithmetic import compute_dtype, softplus
from fastcl.checks import both_ids, check_reduction, check_scale, check_tensor, check_weight, in_memory
from fastcl.library import NONE, scale_and_factor
from fastcl.pairwise import meeting
from fastcl.ring import Group, agree, block_of, cut, own_ids, pass_on, visits_of
from fastcl.rows import check_batch, reduced


class _Met(NamedTuple):
    """The P pairs of a row and a key of a block that have one id."""

    row: Tensor  # int64 [P]
    place: Tensor  # int64 [P], in the block
    pairs: Tensor  # [N], how many of them a row has
    query: Tensor  # [P, D], the rows of query that are in the pairs, in the compute dtype
    key: Tensor  # [P, D]
    logit: Tensor  # [P]


class RingSum(Function):
    """Of x_ij = scale <q_i, k_j> + offset_i, over the keys of all ranks: for each row the sum of softplus(x_ij) over
    those of another id than the row's, that of softplus(-x_ij) over those of its id, and how many these are; [N] each.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,  # [N, D]
        key: Tensor,  # [M, D], this rank's
        scale: Tensor,  # [], or [0]
        offset: Tensor,  # [N]
        ids: Tensor,  # [N]
        key_ids: Tensor,  # [M]
        factor: float,
        sizes: list[int],  # M of each rank
        group: Group,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.factor, ctx.sizes, ctx.group = factor, sizes, group
        query, offset, ids = query.contiguous(), offset.contiguous(), ids.contiguous()
        needs = ctx.needs_input_grad
        row_grad = needs[0] or needs[2] or needs[3]
        block, sums = block_of(key, key_ids, None, sizes), None
        for step, size in enumerate(visits_of(sizes, group)):
            if step:
                block = pass_on(block, group)
            keys, of_keys, _ = cut(block, size)
            given = (query, keys, scale, offset, NONE, ids, of_keys, factor)
            found = [*ops_pairwise.forward_op(*given, row_grad, *ops_pairwise.PLAIN)[:3]]
            met = _met(query, keys, scale, offset, ids, of_keys, factor)
            found += [met.pairs, offset.new_zeros(offset.shape).index_add(0, met.row, softplus(-met.logit))]
            if row_grad:
                pull = -torch.sigmoid(-met.logit)
                found += [
                    offset.new_zeros(query.shape).index_add(0, met.row, pull[:, None] * met.key),
                    offset.new_zeros(offset.shape).index_add(0, met.row, pull),
                ]
            sums = found if sums is None else [a + b for a, b in zip(sums, found, strict=True)]
        assert sums is not None
        total, sum_key, sum_weight, count, near, *near_sums = sums
        ctx.mark_non_differentiable(count)
        ctx.save_for_backward(query, key, scale, offset, ids, key_ids, sum_key, sum_weight, *near_sums)
        return total, near, count

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_near: Tensor, _: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError("fastcl.distributed.ring_siglip: double backward (create_graph=True) is not supported")
        query, key, scale, offset, ids, key_ids, sum_key, sum_weight, *near_sums = ctx.saved_tensors
        need_query, need_key, need_scale, need_offset = ctx.needs_input_grad[:4]
        grad, grad_near = grad.contiguous(), grad_near.contiguous()
        row: Any = None
        pull: Any = None
        if near_sums:
            near_key, near_weight = near_sums
            row = grad[:, None] * sum_key + grad_near[:, None] * near_key
            pull = grad * sum_weight + grad_near * near_weight
        at = scale if scale.dim() == 0 else ctx.factor
        d_key = None
        if need_key:
            block = block_of(key, key_ids, None, ctx.sizes)
            total = torch.zeros_like(block[0], dtype=grad.dtype)  # it travels with its keys, and is back after a round
            for size in visits_of(ctx.sizes, ctx.group):
                keys, of_keys, _ = cut(block, size)
                given = (query, keys, scale, offset, NONE, ids, of_keys, ctx.factor)
                part, _ = ops_pairwise.backward_op(grad, *given, True, False, *ops_pairwise.NO_SUMS)
                met = _met(*given[:4], *given[5:])
                weight = -torch.sigmoid(-met.logit) * grad_near[met.row] * at
                total[:size] += part
                total.index_add_(0, met.place, weight[:, None] * met.query)
                *block, total = pass_on([*block, total], ctx.group)
            d_key = total[: len(key)].to(key.dtype)
        return (
            (row * at).to(query.dtype) if need_query else None,
            d_key,
            (query.to(row) * row).sum().to(scale.dtype) if need_scale else None,
            pull.to(offset.dtype) if need_offset else None,
            *(None,) * 5,
        )


def _met(
    query: Tensor, keys: Tensor, scale: Tensor, offset: Tensor, ids: Tensor, of_keys: Tensor, factor: float
) -> _Met:
    row, place, count = meeting(ids, of_keys)
    rows, columns = (x.to(offset.dtype) for x in (query[row], keys[place]))
    logit = (rows * columns).sum(1) * (scale.to(offset.dtype) if scale.dim() == 0 else factor) + offset[row]
    return _Met(row, place, count, rows, columns, logit)


def ring_siglip(
    query: Tensor,  # [N_r, D]
    key: Tensor,  # [M_r, D]
    logit_scale: float | Tensor = 10.0,
    logit_bias: float | Tensor = -10.0,
    reduction: str = "mean",
    weight: Tensor | None = None,  # [N_r]
    group: Group = None,
    *,
    ids: Tensor | None = None,  # [N_r]
    key_ids: Tensor | None = None,  # [M_r]
) -> Tensor:
    """`fastcl.siglip` of this rank's rows against the keys of all ranks, which travel from rank to rank.

    Each rank holds the keys of one other rank at a time, as in the authors' own form (Zhai et al. 2023, section 3.3),
    and adds up its sums. In the backward pass the keys travel once more, together with their gradients.

    Without ids M_r is N_r, and row i of key is the one positive of row i of query. With ids (on all ranks or on none)
    the positives of a row are the keys of its id on all ranks, any number of them, also none, and each of the k counts
    1 / k; a rank may have any number of rows and of keys.

    Arguments and errors are those of `fastcl.siglip`. The mean over the ranks of a reduced loss, and of its gradients,
    is that of the one big batch. Double backward is not supported.

    >>> import torch, torch.distributed as dist, fastcl.distributed
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> round(fastcl.distributed.ring_siglip(torch.eye(2), torch.eye(2), 1.0, 0.0).item(), 4)
    1.0064
    >>> dist.destroy_process_group()
    """
    grouped = ids is not None or key_ids is not None

    def checked() -> tuple[int, object]:
        nonlocal ids, key_ids
        if grouped:
            check_tensor("query", query, ("N", "D"))
            check_tensor("key", key, ("M", query.shape[1]), query.device)
            check_reduction(reduction)
            ids, key_ids = both_ids(query, key, ids, key_ids, ("ids", "key_ids"))
        else:
            check_batch(query, key, None, 1.0, reduction, None, ("query", "key"))
        check_weight(weight, query.shape[0], query.device)
        for name, value in (("logit_scale", logit_scale), ("logit_bias", logit_bias)):
            check_scale(name, value, None, query.device)
        for name, t in (("query", query), ("key", key), ("logit_scale", logit_scale), ("logit_bias", logit_bias)):
            if isinstance(t, Tensor):
                in_memory(name, t)
        # A rank whose keys had no gradient would not wait for the others in the backward pass, and gradients travel in
        # the compute dtype.
        facts = (query.shape[1], key.dtype, compute_dtype(query, key), key.requires_grad, reduction, grouped)
        return query.shape[0], facts

    sizes = agree(checked, group)
    n, wide = query.shape[0], compute_dtype(query, key)
    key_sizes = agree(lambda: (key.shape[0], "keys"), group) if grouped else sizes
    if ids is None or key_ids is None:
        ids = key_ids = own_ids(sizes, query.device, group)
    bias = torch.as_tensor(logit_bias, dtype=wide, device=query.device)
    scale, factor = scale_and_factor(logit_scale, NONE)
    others, near, count = RingSum.apply(query, key, scale, bias.expand(n), ids, key_ids, factor, key_sizes, group)
    value = reduced(near / count.clamp(min=1) + others, "sum" if reduction == "mean" else reduction, weight)
    if reduction == "none":
        return value
    return value * (len(sizes) / ((sum(sizes) or 1) if reduction == "mean" else 1))
