"""Softmax over items: sampled, with log q corrections, and full, over a whole table.

Both are InfoNCE with other names for the same things, on inputs as they are (never normalised); rows.py, losses.py and
the op do the work.
"""

import functools
import warnings
from typing import Any, cast

import torch
from torch import Tensor

from fastcl.adjust import NOTHING, Adjustments, Margin
from fastcl.arithmetic import compute_dtype, dot, logaddexp, picked, softplus
from fastcl.checks import (
    as_ids,
    as_ignored,
    check_constant,
    check_reduction,
    check_temperature,
    check_tensor,
    is_tensor,
    readable,
)
from fastcl.losses import infonce
from fastcl.ops import Expected, contrast_expecting
from fastcl.registry import Function, registered
from fastcl.rows import inverse, reduced
from fastcl.segments import Queue


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


# What the arguments of linear_cross_entropy were called before they had the names that torch gives them.
_OLD_NAMES = {"query": "input", "table": "linear_weight", "bias": "linear_bias"}


def _taking_old_names(function: Function) -> Function:
    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Tensor:
        for old in _OLD_NAMES:
            if old in named:
                return function(*args, **_renamed(named))
        return function(*args, **named)

    return cast(Function, call)


def _renamed(named: dict[str, Any]) -> dict[str, Any]:
    """Arguments by their present names. Whoever uses an old one means weights of rows by `weight`."""
    now = _OLD_NAMES | {"weight": "row_weight"}
    used = ", ".join(f"{now[name]} (not {name})" for name in named if name in now)
    warnings.warn(
        f"linear_cross_entropy: expected {used}, as torch calls them; the old names go with the next version",
        DeprecationWarning,
        stacklevel=3,
    )
    return {now.get(name, name): value for name, value in named.items()}


@registered("LinearCrossEntropy", inputs=4)
@_taking_old_names
def linear_cross_entropy(
    input: Tensor,  # [N, D]
    linear_weight: Tensor,  # [C, D]
    target: Tensor,  # [N]
    linear_bias: Tensor | None = None,  # [C]
    temperature: float | Tensor = 1.0,  # a number, [] or [N]
    ignore_index: int | None = None,
    reduction: str = "mean",
    row_weight: Tensor | None = None,  # [N]
    *,
    weight: Tensor | None = None,  # [C]
    label_smoothing: float = 0.0,
    margin: Margin | None = None,
    z_loss: float = 0.0,
) -> Tensor:
    """Full softmax over a table of C classes or items, without storing the N x C logits.

        loss_i = (1 - e) w_target_i l_i,target_i + e / C sum_c w_c l_ic + z_loss (logsumexp_j z_ij)^2
        l_ic = logsumexp_j z_ij - z_ic,    z_ij = <input_i, linear_weight_j> / T + linear_bias_j

    with w = `weight` and e = `label_smoothing`. Arguments have the names and meanings of
    `torch.nn.functional.linear_cross_entropy` (torch 2.13), and a call without temperature and row_weight gives the
    same value. Classes are given by index; class probabilities and inputs of more dimensions are not taken.

    Args:
        input: [N, D], float64, float32, bfloat16 or float16.
        linear_weight: [C, D], the same; C >= 1.
        target: [N], any integer dtype, in [0, C) or ignore_index.
        linear_bias: [C], floating, added after the division by T; None: 0. -inf takes a class out, and with
            label_smoothing makes the loss infinite, as in torch.
        temperature: T > 0: a number, a 0-d tensor (may learn) or one value a row [N] (may learn).
        ignore_index: rows with this target have loss 0, zero gradient and no part in a mean; None: -100.
        reduction: "mean": the sum over rows, divided by the number of rows that are not ignored, or with `weight` by
            the sum of the weights of their targets; 0, where torch has NaN, if that is 0. "sum" or "none" ([N]).
        row_weight: [N], any floating dtype, multiplies a row's loss; a mean divides by the same as without.
        weight: [C], any floating dtype, the weight of each class; None: 1.
        label_smoothing: from 0 to 1, the share of the target that is spread evenly over all classes (Szegedy et al.
            2016). The sum over classes is computed from the mean of linear_weight: two more passes over [N, D] and
            [C, D], and no N x C matrix.
        margin: a function of the targets' similarities <input_i, linear_weight_target_i> [N] that returns those which
            the loss takes in their place, before the division by T (`fastcl.cosface`, `fastcl.arcface`: of rows that
            are normalised). Not with label_smoothing.
        z_loss: >= 0, how much the square of the logarithm of the softmax's denominator adds to a row's loss, which
            keeps logits from drifting (Chowdhery et al. 2022, PaLM, section 5: 1e-4). Class weights do not touch it.

    Returns: float32 (float64 for float64 inputs), [] or [N].

    Gradients: input, linear_weight, linear_bias, temperature and row_weight; that of linear_weight is dense. The
    classes' `weight` is a constant.

    Errors: TypeError for types and dtypes, ValueError for shapes and values, each naming the argument. A target out of
    range is a ValueError on the CPU; on other devices, in compiled code and under torch.func the gather fails instead.

    The names query, table and bias are still taken, with a DeprecationWarning; `weight` beside them means row_weight.

    >>> import torch, fastcl
    >>> table = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> query, target = torch.tensor([[2.0, 0.0], [2.0, 0.0]]), torch.tensor([2, 1])
    >>> round(fastcl.linear_cross_entropy(query, table, target).item(), 4)
    1.7586
    >>> round(fastcl.linear_cross_entropy(query, table, target, label_smoothing=0.1).item(), 4)
    1.7253

    Inverse propensity weighting (CLRec, Eq. 4): each row counts 1 / q(y|x), the inverse of how often it was shown.

    >>> shown = torch.tensor([0.9, 0.1])
    >>> round(fastcl.linear_cross_entropy(query, table, target, row_weight=1 / shown).item(), 4)
    14.2146
    """
    check_tensor("input", input, ("N", "D"))
    n, d = input.shape
    check_tensor("linear_weight", linear_weight, ("C", d), input.device, least=1)
    c = linear_weight.shape[0]
    target = as_ids("target", target, (n,), input.device)
    if linear_bias is not None:
        check_tensor("linear_bias", linear_bias, (c,), input.device)
    check_temperature(temperature, n, input.device)
    ignore_index = as_ignored(ignore_index)
    check_reduction(reduction)
    if row_weight is not None:
        check_tensor("row_weight", row_weight, (n,), input.device)
    if weight is not None:
        _check_class_weight(weight, c, n, input.device)
    check_constant("label_smoothing", label_smoothing, lambda x: 0 <= x <= 1, "from 0 to 1")
    check_constant("z_loss", z_loss, lambda x: x >= 0, "at least 0")
    adjust = NOTHING if margin is None else Adjustments(margin=margin)
    adjust.check(n, input.device)
    if margin is not None and label_smoothing:
        raise ValueError("margin: expected none with label_smoothing, got one")
    ignored = target == ignore_index
    check_range(target, ignored, c)

    target = target.masked_fill(ignored, 0)
    classes = torch.arange(c, device=input.device)
    # The target stays out of the sum and is added outside, where it does not cancel.
    positive = picked(linear_weight, target)
    scale = inverse(temperature, input, linear_weight)
    at_target = None if linear_bias is None else picked(linear_bias, target)
    counted = (~ignored).to(compute_dtype(input, linear_weight))  # how often the row's log-sum-exp counts
    divisor = counted
    if weight is not None:
        weight = weight.detach().to(counted)
        divisor = counted * weight[target]
        counted = counted * ((1 - label_smoothing) * weight[target] + label_smoothing * weight.mean())
    expected = Expected(0.0, at_target, weight=counted if row_weight is None else row_weight * counted)
    moved: Tensor | None = None
    if margin is not None:
        moved = adjust.moved(dot(input, positive)) * scale
        expected = expected.with_positive(moved if at_target is None else moved + at_target.to(moved))
    pos, lse = contrast_expecting(
        None if reduction == "none" or z_loss else expected,
        input,
        linear_weight,
        positive if moved is None else None,
        scale=scale,
        bias=linear_bias,
        row_id=target,
        col_id=classes,
    )
    pos = pos if moved is None else moved
    assert pos is not None
    if at_target is not None:
        pos = pos + at_target.to(pos)
    per_row = softplus((lse - pos).masked_fill(ignored, -torch.inf))
    if weight is not None:
        per_row = per_row * counted
    if label_smoothing:
        share = 1.0 if weight is None else weight.mean()
        above = share * pos - _mean_logit(input, linear_weight, linear_bias, scale, weight)
        per_row = per_row + label_smoothing * above.masked_fill(ignored, 0.0)
    if z_loss:
        per_row = per_row + z_loss * logaddexp(pos, lse).masked_fill(ignored, 0.0).square()
    if reduction == "mean":
        total = divisor.sum()
        return reduced(per_row, "sum", row_weight) / total.masked_fill(total == 0, 1.0)
    return reduced(per_row, reduction, row_weight)


def _mean_logit(
    input: Tensor, table: Tensor, bias: Tensor | None, scale: float | Tensor, weight: Tensor | None
) -> Tensor:
    """[N], the mean over classes of weight times logit: logits are linear in the table, so its mean row will do."""
    dtype = compute_dtype(input, table)
    row = table.mean(0, dtype=dtype) if weight is None else (weight[:, None] * table).mean(0)
    mean = dot(input, row) * scale
    if bias is None:
        return mean
    return mean + (bias.to(dtype) if weight is None else weight * bias.to(dtype)).mean()


def _check_class_weight(weight: Tensor, c: int, n: int, device: torch.device) -> None:
    is_tensor("weight", weight)
    if weight.shape != (c,) and weight.shape == (n,):
        raise ValueError(f"weight: expected shape [{c}], one a class as in torch, got [{n}]; one a row is row_weight")
    check_tensor("weight", weight, (c,), device)


def check_range(target: Tensor, ignored: Tensor, c: int) -> None:
    if not readable(target):
        return
    wrong = ((target < 0) | (target >= c)) & ~ignored
    if wrong.any():
        raise ValueError(f"target: expected values in [0, {c}) or ignore_index, got {target[wrong][0].item()}")
