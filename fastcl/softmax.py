"""Softmax over items: sampled, with log q corrections, and full, over a whole table.

Both are InfoNCE with other names for the same things, on inputs as they are (never normalised); rows.py and losses.py
do the work.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fastcl.arithmetic import softplus
from fastcl.checks import as_ids, check_reduction, check_temperature, check_tensor, check_weight, readable
from fastcl.losses import infonce
from fastcl.ops import Expected, contrast_expecting
from fastcl.registry import registered
from fastcl.rows import Queue, inverse, reduced


@registered("SampledSoftmax", inputs=3)
def sampled_softmax(
    query: Tensor,  # [N, D]
    positive_key: Tensor,  # [N, D]
    negative_keys: Tensor | None = None,  # [M, D] or [N, K, D]
    temperature: float | Tensor = 1.0,  # a number, [] or [N]
    reduction: str = "mean",
    *,
    in_batch: bool | None = None,
    queue: Queue | None = None,
    ids: Tensor | None = None,  # [N]
    negative_ids: Tensor | None = None,  # [M] or [N, K]
    log_q: Tensor | None = None,  # [N]
    negative_log_q: Tensor | None = None,  # [M] or [N, K]
    weight: Tensor | None = None,  # [N]
) -> Tensor:
    """Sampled softmax (Bengio & Senecal 2008; Zhou et al. 2021, CLRec, Eq. 2): full softmax estimated from samples.

        loss_i = -log(exp(z_i) / (exp(z_i) + sum_j exp(z_ij)))
        z_i = <q_i, p_i> / T - log q(p_i),    z_ij = <q_i, k_j> / T - log q(k_j)

    The sign: pass log q itself, a number below 0, and it is SUBTRACTED, so that a key that is often sampled counts for
    less. q is the probability (or the expected count: a constant factor in all of them cancels) with which a key comes
    up as a negative; frequencies in the training data where negatives are the batch or a queue. Without log q, popular
    items are pushed down as often as they are sampled: the contrastive loss (CLRec, Eq. 3), see `infonce`.

    Args: as for `infonce`, which see for shapes, dtypes and ids; inputs are used as they are, not normalised, and T is
        1 by default. log_q and negative_log_q are given for every source of negatives or for none; a queue keeps its
        own.

    Returns: float32 (float64 for float64 inputs), [] or [N]. Gradients and errors: `infonce`.

    >>> import torch, fastcl
    >>> table = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> query, target, sampled = torch.tensor([[0.3, 0.2]]), torch.tensor([2]), torch.tensor([0, 1, 2])
    >>> log_q = torch.full((3,), 1 / 3).log()
    >>> loss = fastcl.sampled_softmax(
    ...     query, table[target], table[sampled], ids=target, negative_ids=sampled,
    ...     log_q=log_q[target], negative_log_q=log_q[sampled],
    ... )
    >>> round(loss.item(), 4), round(fastcl.linear_cross_entropy(query, table, target).item(), 4)  # all were sampled
    (0.9398, 0.9398)
    """
    return infonce(
        query,
        positive_key,
        negative_keys,
        temperature,
        reduction,
        normalize=False,
        in_batch=in_batch,
        queue=queue,
        ids=ids,
        negative_ids=negative_ids,
        log_q=log_q,
        negative_log_q=negative_log_q,
        weight=weight,
    )


@registered("LinearCrossEntropy", inputs=4)
def linear_cross_entropy(
    query: Tensor,  # [N, D]
    table: Tensor,  # [V, D]
    target: Tensor,  # [N]
    bias: Tensor | None = None,  # [V]
    temperature: float | Tensor = 1.0,  # a number, [] or [N]
    ignore_index: int = -100,
    reduction: str = "mean",
    weight: Tensor | None = None,  # [N]
) -> Tensor:
    """Full softmax over a table of V classes or items, without storing the N x V logits.

        loss_i = logsumexp_v z_iv - z_i,target_i,    z_iv = <q_i, t_v> / T + bias_v

    Equals `F.cross_entropy(query @ table.T / T + bias, target)`.

    Args:
        query: [N, D], float64, float32, bfloat16 or float16.
        table: [V, D], the same; V >= 1.
        target: [N], any integer dtype, in [0, V) or ignore_index.
        bias: [V], floating, added after the division by T; None: 0. -inf takes a class out.
        temperature: T > 0: a number, a 0-d tensor (may learn) or one value a row [N] (may learn).
        ignore_index: rows with this target have loss 0, zero gradient and no part in a mean.
        reduction: "mean" over the rows that are not ignored (0 where all are, and F.cross_entropy gives NaN), "sum" or
            "none" ([N]).
        weight: [N], any floating dtype, one a row (not one a class, as in F.cross_entropy): mean = sum(weight * loss)
            / the number of rows not ignored.

    Returns: float32 (float64 for float64 inputs), [] or [N].

    Gradients: query, table, bias, temperature and weight; that of table is dense.

    Errors: TypeError for types and dtypes, ValueError for shapes and values, each naming the argument. A target out of
    range is a ValueError on the CPU; on other devices, in compiled code and under torch.func the gather fails instead.

    >>> import torch, fastcl
    >>> table = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> round(fastcl.linear_cross_entropy(torch.tensor([[2.0, 0.0]]), table, torch.tensor([2])).item(), 4)
    0.7586

    Inverse propensity weighting (CLRec, Eq. 4): each row counts 1 / q(y|x), the inverse of how often it was shown.

    >>> query, target = torch.tensor([[2.0, 0.0], [2.0, 0.0]]), torch.tensor([2, 1])
    >>> shown = torch.tensor([0.9, 0.1])
    >>> round(fastcl.linear_cross_entropy(query, table, target, weight=1 / shown).item(), 4)
    14.2146
    """
    check_tensor("query", query, ("N", "D"))
    n, d = query.shape
    check_tensor("table", table, ("V", d), query.device, least=1)
    v = table.shape[0]
    target = as_ids("target", target, (n,), query.device)
    if bias is not None:
        check_tensor("bias", bias, (v,), query.device)
    check_temperature(temperature, n, query.device)
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise TypeError(f"ignore_index: expected an int, got {type(ignore_index).__name__}")
    check_reduction(reduction)
    check_weight(weight, n, query.device)
    ignored = target == ignore_index
    _check_range(target, ignored, v)

    target = target.masked_fill(ignored, 0)
    classes = torch.arange(v, device=query.device)
    # The target stays out of the sum and is added outside, where it does not cancel.
    positive = F.embedding(target, table)
    scale = inverse(temperature, query, table)
    at_target = None if bias is None else bias[target]
    counted = (~ignored).to(scale if isinstance(scale, Tensor) else positive)
    expected = Expected(0.0, at_target, weight=counted if weight is None else weight * counted)
    pos, lse = contrast_expecting(
        None if reduction == "none" else expected,
        query,
        table,
        positive,
        scale=scale,
        bias=bias,
        row_id=target,
        col_id=classes,
    )
    assert pos is not None
    if at_target is not None:
        pos = pos + at_target.to(pos)
    per_row = softplus((lse - pos).masked_fill(ignored, -torch.inf))
    if reduction == "mean":
        return reduced(per_row, "sum", weight) / (~ignored).sum().clamp(min=1)
    return reduced(per_row, reduction, weight)


def _check_range(target: Tensor, ignored: Tensor, v: int) -> None:
    if not readable(target):
        return
    wrong = ((target < 0) | (target >= v)) & ~ignored
    if wrong.any():
        raise ValueError(f"target: expected values in [0, {v}) or ignore_index, got {target[wrong][0].item()}")
