"""Full softmax over a table of classes of which each rank holds a part: every rank scores the rows of all ranks against
its own classes, and the log-sum-exps are merged.

The loss is that of `fastcl.linear_cross_entropy` and is documented as one of fastcl.distributed. Of the table nothing
travels: queries do, and two numbers a row and rank.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import Function

from fastcl import ops
from fastcl.arithmetic import dot, logsumexp, picked, softplus
from fastcl.checks import as_ids, as_ignored, check_reduction, check_temperature, check_tensor, learns
from fastcl.gathering import Gather
from fastcl.ring import Group, agree
from fastcl.rows import inverse


class _Exchange(Function):
    """[sum of N_r, K], what this rank knows of the rows of all ranks -> [ranks, N_r, K], what all know of its own rows.

    The gradient is divided by the number of ranks: the table's is the mean over the ranks.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: list[int], group: Group) -> Tensor:
        ctx.sizes, ctx.group = sizes, group
        own = [sizes[dist.get_rank(group)]] * len(sizes)
        found = x.new_empty(sum(own), x.shape[1])
        dist.all_to_all_single(found, x.contiguous(), own, sizes, group=group)
        return found.view(len(sizes), own[0], x.shape[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if torch.is_grad_enabled():
            # Not once_differentiable: second derivatives then came out wrong without a word.
            name = "fastcl.distributed.sharded_cross_entropy"
            raise RuntimeError(f"{name}: double backward (create_graph=True) is not supported")
        found = grad.new_empty(sum(ctx.sizes), grad.shape[2])
        own = [grad.shape[1]] * len(ctx.sizes)
        dist.all_to_all_single(found, grad.flatten(0, 1).contiguous(), ctx.sizes, own, group=ctx.group)
        return found / len(ctx.sizes), None, None


def sharded_cross_entropy(
    query: Tensor,  # [N_r, D]
    shard: Tensor,  # [C_r, D]
    target: Tensor,  # [N_r]
    *,
    ids: Tensor | None = None,  # [C_r]
    bias: Tensor | None = None,  # [C_r]
    temperature: float | Tensor = 1.0,  # a number, [] or [N_r]
    ignore_index: int | None = None,
    reduction: str = "mean",
    row_weight: Tensor | None = None,  # [N_r]
    group: Group = None,
) -> Tensor:
    """Full softmax over a table of classes or items whose rows are shared out among the ranks (vocabulary-parallel):
    the value and gradients of `fastcl.linear_cross_entropy` over the whole table, of which no rank holds more than its
    part, nor that part's gradient anywhere else.

        loss_i = logsumexp_j z_ij - z_i,target_i,    z_ij = <query_i, row_j> / T + bias_j,    j over all ranks' rows

    Queries are gathered, each rank computes the log-sum-exp over its own rows (`fastcl.contrast`), and these are merged
    where the query comes from. Per rank and step N (D + 2) numbers travel forward and as many back, for N queries of
    all ranks, whatever the number of classes.

    Args:
        query: [N_r, D], this rank's; float64, float32, bfloat16 or float16. N_r may differ between ranks and be 0.
        shard: [C_r, D], this rank's rows of the table, the same. C_r may differ between ranks and be 0.
        target: [N_r], any integer dtype: an id of any rank's, or ignore_index.
        ids: [C_r], any integer dtype, rising: the numbers of this rank's rows, of which no two ranks have the same one.
            None: row r of the table is on rank r % ranks, in rising order: table[rank::ranks].
        bias: [C_r], floating, added after the division by T; -inf takes a class out. None: 0.
        temperature: T > 0: a number, a 0-d tensor (may learn) or one value a row [N_r] (may learn).
        ignore_index: rows with this target have loss 0, zero gradient and no part in a mean; None: -100.
        reduction: "mean": (number of ranks / rows of all ranks that are not ignored) times the sum of this rank's rows;
            "sum": the number of ranks times their sum; "none": this rank's rows [N_r]. The mean over the ranks of a
            reduced loss is the loss of the one big batch.
        row_weight: [N_r], any floating dtype, multiplies a row's loss; a mean divides by the same as without.
        group: a process group; None: the default group. Every rank of it makes the call, and the backward pass.

    Returns: float32 (float64 for float64 inputs), [] or [N_r].

    Gradients: query, shard, bias, temperature and row_weight. A rank's query, temperature and row_weight have those of
        its own loss, of which DistributedDataParallel takes the mean for the encoder's weights. shard and bias have the
        mean over the ranks already, which is the gradient of the big batch's loss: an optimiser of this rank's rows
        takes it as it is, and DistributedDataParallel must leave the shard alone. Double backward is not supported.

    Errors: TypeError for types and dtypes, ValueError for shapes and values, each naming the argument; the other ranks
        raise a RuntimeError. A target that no rank has, or several, is a ValueError on all ranks.

    >>> import torch, torch.distributed as dist, fastcl, fastcl.distributed
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> table, query, target = torch.randn(100, 8), torch.randn(4, 8), torch.tensor([7, 0, 99, 7])
    >>> shard = table[dist.get_rank() :: dist.get_world_size()]
    >>> loss = fastcl.distributed.sharded_cross_entropy(query, shard, target)
    >>> torch.allclose(loss, fastcl.linear_cross_entropy(query, table, target))
    True
    >>> dist.destroy_process_group()
    """

    def checked() -> tuple[int, object]:
        check_tensor("query", query, ("N", "D"))
        n, d = query.shape
        check_tensor("shard", shard, ("C", d), query.device)
        as_ids("target", target, (n,), query.device)
        if ids is not None:
            own = as_ids("ids", ids, (shard.shape[0],), query.device)
            if not bool((own[1:] > own[:-1]).all()):
                raise ValueError("ids: expected distinct numbers in rising order, got others")
        if bias is not None:
            check_tensor("bias", bias, (shard.shape[0],), query.device)
        check_temperature(temperature, n, query.device)
        check_reduction(reduction)
        if row_weight is not None:
            check_tensor("row_weight", row_weight, (n,), query.device)
        of_tensor = isinstance(temperature, Tensor)
        alike = (as_ignored(ignore_index), reduction, ids is None, of_tensor or temperature)
        # Whether there is a gradient is among the facts, since the backward pass is a collective.
        gradients = [learns(x) for x in (query, shard, bias, temperature)]
        return n, ("sharded_cross_entropy", d, query.dtype, shard.dtype, query.device.type, gradients, alike)

    sizes = agree(checked, group)
    rank, ranks = dist.get_rank(group), len(sizes)
    columns = _numbers(shard, group) if ids is None else as_ids("ids", ids, ("C",))
    every = Gather.apply(query, sizes, group, float(ranks))
    sought = Gather.apply(as_ids("target", target, ("N",)), sizes, group)
    ignored = sought == as_ignored(ignore_index)
    place = torch.searchsorted(columns, sought).clamp(max=max(len(columns) - 1, 0))
    here = (columns[place] == sought) & ~ignored if len(columns) else torch.zeros_like(ignored)
    _check_found(sought, here, ignored, group)

    scale = inverse(temperature, query, shard)
    at: float | Tensor = scale
    if isinstance(scale, Tensor):
        at = Gather.apply(scale.to(query.device).expand(query.shape[0]), sizes, group, float(ranks))
    _, lse = ops.contrast(every, shard, scale=at, bias=bias, row_id=sought, col_id=columns)
    own = here.nonzero()[:, 0]
    found = dot(every[own], picked(shard, place[own])) * (at[own] if isinstance(at, Tensor) else at)
    if bias is not None:
        found = found + picked(bias, place[own]).to(found)
    positive = torch.zeros_like(lse).index_add(0, own, found.to(lse))
    parts = _Exchange.apply(torch.stack([lse, positive], 1), sizes, group)

    total, pos = logsumexp(parts[..., 0].T), parts[..., 1].sum(0)
    start = sum(sizes[:rank])
    per_row = softplus((total - pos).masked_fill(ignored[start : start + sizes[rank]], -torch.inf))
    if row_weight is not None:
        per_row = row_weight.to(per_row) * per_row
    if reduction == "none":
        return per_row
    rows = int((~ignored).sum()) or 1
    return per_row.sum() * (ranks / (rows if reduction == "mean" else 1))


def _numbers(shard: Tensor, group: Group) -> Tensor:
    """The ids of this rank's rows where the table is cut by remainder. ValueError on all ranks where it is not."""
    shares = agree(lambda: (shard.shape[0], "shard"), group)
    ranks, total = len(shares), sum(shares)
    for rank, share in enumerate(shares):
        wanted = len(range(rank, total, ranks))
        if share != wanted:
            expected = f"expected the rows r, r + {ranks}, ... of {total} on each rank r without ids"
            raise ValueError(f"shard: {expected}, {wanted} on rank {rank}, got {share}")
    return torch.arange(shard.shape[0], device=shard.device) * ranks + dist.get_rank(group)


def _check_found(sought: Tensor, here: Tensor, ignored: Tensor, group: Group) -> None:
    """ValueError on all ranks unless one rank has the row of each target."""
    having = here.to(torch.int32)
    dist.all_reduce(having, group=group)
    wrong = (having != 1) & ~ignored
    if bool(wrong.any()):
        number, times = int(sought[wrong][0]), int(having[wrong][0])
        expected = "expected ignore_index or the id of a row that one rank has"
        raise ValueError(f"target: {expected}, got {number}, which {times or 'no'} ranks have")
