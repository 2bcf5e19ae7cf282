"""Losses against targets that are shares of several columns: class probabilities, a teacher's scores, its margins.

The cross-entropy of shares is linear in the logits but for one log-sum-exp a row, so it needs the shares' mean key and
the op: no N x C matrix of logits is stored. Sparse shares, of the K best columns of each row, need no such matrix at
all; dense ones are such a matrix, given by the caller.
"""

import torch
from torch import Tensor

from fastcl.arithmetic import compute_dtype, dot, picked
from fastcl.checks import (
    as_ids,
    check_reduction,
    check_temperature,
    check_tensor,
    check_weight,
    positive_number,
    readable,
)
from fastcl.ops import Expected, contrast_expecting
from fastcl.private import private_similarity, product
from fastcl.registry import registered
from fastcl.rows import inverse, reduced


@registered("SoftCrossEntropy", inputs=4)
def soft_cross_entropy(
    input: Tensor,  # [N, D]
    linear_weight: Tensor,  # [C, D]
    target: Tensor,  # [N, C], or [N, K] with index
    index: Tensor | None = None,  # [N, K]
    temperature: float | Tensor = 1.0,  # a number, [] or [N]
    reduction: str = "mean",
    row_weight: Tensor | None = None,  # [N]
) -> Tensor:
    """Cross-entropy with targets that are shares of several classes (Hinton et al. 2015, section 2), without logits.

        loss_i = sum_c t_ic (logsumexp_j z_ij - z_ic),    z_ij = <input_i, linear_weight_j> / T

    Args:
        input: [N, D], float64, float32, bfloat16 or float16, used as it is.
        linear_weight: [C, D], the same; C >= 1. Keys of a batch as well as a table.
        target: the shares, floating, of any sum: [N, C], one for each class, or [N, K] for the classes in `index`, the
            others having none. The logits are never stored; a dense target is an N x C matrix itself.
        index: [N, K], any integer dtype, classes in [0, C); those that occur twice in a row add up.
        temperature: T > 0: a number, a 0-d tensor (may learn) or one value a row [N] (may learn).
        reduction: "mean" over the N rows, "sum" or "none" ([N]).
        row_weight: [N], any floating dtype, multiplies a row's loss: mean = sum(row_weight * loss) / N.

    Returns: float32 (float64 for float64 inputs), [] or [N].

    Gradients: input, linear_weight, temperature, row_weight and target.

    Errors: TypeError for types and dtypes, ValueError for shapes and values, each naming the argument. An index out of
    range is a ValueError on the CPU; elsewhere the gather fails instead.

    >>> import torch, fastcl
    >>> table, query = torch.eye(3), torch.tensor([[2.0, 0.0, 0.0]])
    >>> round(fastcl.soft_cross_entropy(query, table, torch.tensor([[0.5, 0.5, 0.0]])).item(), 4)
    1.2395
    >>> half = torch.tensor([[0.5, 0.5]])
    >>> round(fastcl.soft_cross_entropy(query, table, half, index=torch.tensor([[0, 1]])).item(), 4)  # the same
    1.2395
    """
    index = _checked(input, linear_weight, "target", target, index, temperature, reduction, row_weight)
    per_row = _cross_entropy(input, linear_weight, target, index, temperature, reduction, row_weight)
    return reduced(per_row, reduction, row_weight)


@registered("DistillKL", inputs=4)
def distill_kl(
    input: Tensor,  # [N, D]
    linear_weight: Tensor,  # [C, D]
    teacher: Tensor,  # [N, C], or [N, K] with index
    index: Tensor | None = None,  # [N, K]
    temperature: float | Tensor = 1.0,  # a number, [] or [N]
    reduction: str = "mean",
    row_weight: Tensor | None = None,  # [N]
    *,
    teacher_temperature: float = 1.0,
) -> Tensor:
    """Kullback-Leibler divergence of student from teacher (Hinton et al. 2015), each a softmax at its own temperature.

        loss_i = sum_c t_ic (log t_ic - log p_ic)
        t_i = softmax(teacher_i / teacher_temperature),    p_i = softmax over all C of <input_i, linear_weight_c> / T

    `teacher` holds scores, [N, C] or those of the K classes in `index` [N, K], among which its softmax is then taken;
    the student's is one over all C. The factor T^2 of some implementations is left out. The teacher has no gradient.
    All else: `soft_cross_entropy`.

    >>> import torch, fastcl
    >>> table, query = torch.eye(2), torch.tensor([[1.0, 0.0]])
    >>> loss = fastcl.distill_kl(query, table, torch.tensor([[3.0, 1.0]]), teacher_temperature=2.0)
    >>> loss.abs().item() < 1e-6  # it is the same softmax
    True
    """
    index = _checked(input, linear_weight, "teacher", teacher, index, temperature, reduction, row_weight)
    positive_number("teacher_temperature", teacher_temperature)
    wide = compute_dtype(input, linear_weight)
    log_target = torch.log_softmax(teacher.detach().to(wide) / teacher_temperature, 1)
    target = log_target.exp()
    per_row = _cross_entropy(input, linear_weight, target, index, temperature, reduction, row_weight)
    entropy = -(target * log_target.masked_fill(target == 0, 0.0)).sum(1)
    return reduced(per_row - entropy, reduction, row_weight)


@registered("MarginMSE", inputs=4)
def margin_mse(
    query: Tensor,  # [N, D]
    positive: Tensor,  # [N, D]
    negative: Tensor,  # [N, K, D]
    teacher_margin: Tensor,  # [N, K]
    reduction: str = "mean",
    weight: Tensor | None = None,  # [N]
) -> Tensor:
    """Margin-MSE (Hofstaetter et al. 2020, Eq. 5): the student's margin between positive and negative is the teacher's.

        loss_i = mean_k (<q_i, p_i> - <q_i, n_ik> - teacher_margin_ik)^2

    Args:
        query, positive: [N, D], float64, float32, bfloat16 or float16, used as they are.
        negative: [N, K, D], of each row's own; the mean over none is 0.
        teacher_margin: [N, K], floating: the teacher's score of the positive less that of the negative; no gradient.
        reduction: "mean" over the N rows, "sum" or "none" ([N]).
        weight: [N], any floating dtype: mean = sum(weight * loss) / N.

    Returns: float32 (float64 for float64 inputs), [] or [N]. Gradients: query, positive, negative and weight.

    Errors: TypeError for types and dtypes, ValueError for shapes, each naming the argument.

    >>> import torch, fastcl
    >>> query = torch.tensor([[1.0, 0.0]])
    >>> fastcl.margin_mse(query, 3 * query, 2 * query[:, None], torch.tensor([[0.5]]))  # (3 - 2 - 0.5)^2
    tensor(0.2500)
    """
    check_tensor("query", query, ("N", "D"))
    n, d = query.shape
    check_tensor("positive", positive, (n, d), query.device)
    check_tensor("negative", negative, (n, "K", d), query.device)
    check_tensor("teacher_margin", teacher_margin, tuple(negative.shape[:2]), query.device)
    check_reduction(reduction)
    check_weight(weight, n, query.device)
    margin = dot(query, positive)[:, None] - private_similarity(query, negative)
    square = (margin - teacher_margin.detach().to(margin)).square().sum(1)
    return reduced(square / max(1, negative.shape[1]), reduction, weight)


def _checked(
    input: Tensor,
    linear_weight: Tensor,
    name: str,
    target: Tensor,
    index: Tensor | None,
    temperature: float | Tensor,
    reduction: str,
    row_weight: Tensor | None,
) -> Tensor | None:
    """`index` as int64."""
    check_tensor("input", input, ("N", "D"))
    n, d = input.shape
    check_tensor("linear_weight", linear_weight, ("C", d), input.device, least=1)
    c = linear_weight.shape[0]
    check_tensor(name, target, (n, c if index is None else "K"), input.device)
    check_temperature(temperature, n, input.device)
    check_reduction(reduction)
    if row_weight is not None:
        check_tensor("row_weight", row_weight, (n,), input.device)
    if index is None:
        return None
    index = as_ids("index", index, tuple(target.shape), input.device).resolve_neg()  # indexing reads through it
    if readable(index) and index.numel():
        low, high = (x.item() for x in torch.aminmax(index))
        if low < 0 or high >= c:
            raise ValueError(f"index: expected values in [0, {c}), got {low if low < 0 else high}")
    return index


def _cross_entropy(
    input: Tensor,
    table: Tensor,
    target: Tensor,
    index: Tensor | None,
    temperature: float | Tensor,
    reduction: str,
    row_weight: Tensor | None,
) -> Tensor:
    wide = compute_dtype(input, table)
    target = target.to(wide)
    scale = inverse(temperature, input, table)
    # The weighted mean key of each row, of which the weighted mean logit is one product.
    if index is None:
        mean = product(target, table.to(wide))
    else:
        mean = (target[..., None] * picked(table, index).to(wide)).sum(1)
    total = target.sum(1)
    # What comes back to lse is the row's total: that of weight * log(exp(lse)).
    weight = total.detach() if row_weight is None else total.detach() * row_weight.detach().to(wide)
    expected = None if reduction == "none" else Expected(-torch.inf, weight=weight)
    _, lse = contrast_expecting(expected, input, table, scale=scale)
    return total * lse - dot(input, mean) * scale
