"""SigLIP over the batches of all processes, whose keys travel from rank to rank. The op is in ring.py."""

import torch
from torch import Tensor

from fastcl.arithmetic import compute_dtype, dot, softplus
from fastcl.checks import check_scale, check_weight, in_memory
from fastcl.library import NONE, scale_and_factor
from fastcl.ring import Group, RingSum, agree, own_ids
from fastcl.rows import check_batch, reduced


def ring_siglip(
    query: Tensor,  # [N_r, D]
    key: Tensor,  # [N_r, D]
    logit_scale: float | Tensor = 10.0,
    logit_bias: float | Tensor = -10.0,
    reduction: str = "mean",
    weight: Tensor | None = None,  # [N_r]
    group: Group = None,
) -> Tensor:
    """`fastcl.siglip` of this rank's rows against the keys of all ranks, which travel from rank to rank.

    Each rank holds the keys of one other rank at a time, as in the authors' own form (Zhai et al. 2023, section 3.3),
    and adds up its sums. In the backward pass the keys travel once more, together with their gradients. Row i of key is
    the one positive of row i of query; arguments and errors are those of `fastcl.siglip` without ids. The mean over the
    ranks of a reduced loss, and of its gradients, is that of the one big batch. Double backward is not supported.

    >>> import torch, torch.distributed as dist, fastcl.distributed
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> round(fastcl.distributed.ring_siglip(torch.eye(2), torch.eye(2), 1.0, 0.0).item(), 4)
    1.0064
    >>> dist.destroy_process_group()
    """

    def checked() -> tuple[int, object]:
        check_batch(query, key, None, 1.0, reduction, None, ("query", "key"))
        check_weight(weight, query.shape[0], query.device)
        for name, value in (("logit_scale", logit_scale), ("logit_bias", logit_bias)):
            check_scale(name, value, None, query.device)
        for name, t in (("query", query), ("key", key), ("logit_scale", logit_scale), ("logit_bias", logit_bias)):
            if isinstance(t, Tensor):
                in_memory(name, t)
        # A rank whose keys had no gradient would not wait for the others in the backward pass.
        return query.shape[0], (query.shape[1], key.dtype, key.requires_grad, reduction)

    sizes = agree(checked, group)
    n, wide = query.shape[0], compute_dtype(query, key)
    bias = torch.as_tensor(logit_bias, dtype=wide, device=query.device)
    ids = own_ids(sizes, query.device, group)
    scale, factor = scale_and_factor(logit_scale, NONE)
    others = RingSum.apply(query, key, scale, bias.expand(n), ids, factor, sizes, group)
    rows = others + softplus(-(dot(query, key) * logit_scale + bias))
    value = reduced(rows, "sum" if reduction == "mean" else reduction, weight)
    if reduction == "none":
        return value
    return value * (len(sizes) / ((sum(sizes) or 1) if reduction == "mean" else 1))
