"""Scalable cross-entropy: the softmax of a large catalogue over those classes alone that lie in a bucket with the row.

What is in a bucket is found without gradient from projections; the sum over a bucket is a call of the op, so that no
similarity of a row and a class is computed here.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastcl.arithmetic import compute_dtype, dot, no_autocast, softplus
from fastcl.checks import as_ids, as_ignored, check_reduction, check_temperature, check_tensor
from fastcl.ops import contrast
from fastcl.registry import registered
from fastcl.rows import inverse, reduced
from fastcl.softmax import check_range


@registered("SCE", inputs=4)
def sce(
    input: Tensor,  # [N, D]
    linear_weight: Tensor,  # [C, D]
    target: Tensor,  # [N]
    linear_bias: Tensor | None = None,  # [C]
    temperature: float | Tensor = 1.0,  # a number, [] or [N]
    ignore_index: int | None = None,
    reduction: str = "mean",
    row_weight: Tensor | None = None,  # [N]
    *,
    buckets: int | Tensor | None = None,  # a number or [B, D]
    bucket_rows: int | None = None,
    bucket_classes: int = 256,
) -> Tensor:
    """Scalable cross-entropy, SCE (Mezentsev et al. 2024, Algorithm 1): a full softmax, estimated from hard classes.

        loss_i = max_b log(sum_{c in b or c = y_i} exp(z_ic)) - z_iy_i,    b: the buckets of row i, y: target
        z_ic = <input_i, linear_weight_c> / T + linear_bias_c

    A bucket is a random direction. In it are the `bucket_rows` rows and the `bucket_classes` classes with the largest
    inner products with that direction, so that classes which compete with a row tend to be in a bucket with it. B
    buckets cost B * bucket_rows * bucket_classes logits in place of N * C, and the (N + C) * B projections.

    Args:
        input: [N, D], float64, float32, bfloat16 or float16, used as it is: the states of a model at its positions.
        linear_weight: [C, D], the same; C >= 1.
        target: [N], any integer dtype, in [0, C) or ignore_index.
        linear_bias: [C], floating, added after the division by T. The buckets do not depend on it.
        temperature: T > 0: a number, a 0-d tensor (may learn) or one value a row [N] (may learn).
        ignore_index: rows with this target are in no bucket; None: -100.
        reduction: "mean" over the rows that are in a bucket, "sum" or "none" ([N]).
        row_weight: [N], any floating dtype, multiplies a row's loss; a mean divides by the same as without.
        buckets: B, of which each direction is a mixture of the rows with random normal weights (the paper's "Mix"),
            drawn from torch's generator of the device; or the directions themselves [B, D], without gradient, such as
            torch.randn(B, D), which is the paper's form without "Mix". None: 2 sqrt(N), as in the authors' code.
        bucket_rows: rows of a bucket; None: as many as buckets. At most N are taken.
        bucket_classes: classes of a bucket. At most C are taken; the target counts once, in a bucket or not.

    Returns: float32 (float64 for float64 inputs), [] or [N]. A row in no bucket has loss 0 and zero gradient, and no
    part in a mean. No N x C matrix is stored; the projections are B x N and B x C numbers, without gradient.

    Gradients: input, linear_weight, linear_bias, temperature and row_weight. Where two buckets of a row tie, their
    gradients are averaged.

    Errors: TypeError for types and dtypes, ValueError for shapes and values, each naming the argument.

    >>> import torch, fastcl
    >>> table = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> query, target = torch.tensor([[2.0, 0.0], [0.0, 2.0]]), torch.tensor([2, 1])
    >>> all_in_one = dict(buckets=torch.ones(1, 2), bucket_rows=2, bucket_classes=3)
    >>> round(fastcl.sce(query, table, target, **all_in_one).item(), 4)
    0.7586
    >>> round(fastcl.linear_cross_entropy(query, table, target).item(), 4)  # one bucket with everything
    0.7586
    """
    check_tensor("input", input, ("N", "D"))
    (n, d), device = input.shape, input.device
    check_tensor("linear_weight", linear_weight, ("C", d), device, least=1)
    c = linear_weight.shape[0]
    target = as_ids("target", target, (n,), device)
    if linear_bias is not None:
        check_tensor("linear_bias", linear_bias, (c,), device)
    check_temperature(temperature, n, device)
    check_reduction(reduction)
    if row_weight is not None:
        check_tensor("row_weight", row_weight, (n,), device)
    if isinstance(buckets, Tensor):
        check_tensor("buckets", buckets, ("B", d), device)
    elif buckets is not None:
        _check_size("buckets", buckets)
    if bucket_rows is not None:
        _check_size("bucket_rows", bucket_rows)
    _check_size("bucket_classes", bucket_classes)
    ignored = target == as_ignored(ignore_index)
    check_range(target, ignored, c)

    target = target.masked_fill(ignored, 0).resolve_neg()
    with torch.no_grad():
        if isinstance(buckets, Tensor):
            directions = buckets
        else:
            drawn = max(1, int(2 * math.sqrt(n))) if buckets is None else buckets
            mixture = torch.randn(drawn, n, dtype=compute_dtype(input, linear_weight), device=device)
            directions = _product(mixture.masked_fill(ignored, 0.0), input)
        most_rows = directions.shape[0] if bucket_rows is None else bucket_rows
        inside = _members(directions, input, linear_weight, ignored, most_rows, bucket_classes)
    scale = inverse(temperature, input, linear_weight)
    # Wide, so that the gradients of rows in many buckets are not summed in 16 bits.
    wide = compute_dtype(input, linear_weight)
    rows, table = input.to(wide), linear_weight.to(wide)
    bias = None if linear_bias is None else linear_bias.to(wide)
    pos = dot(rows, F.embedding(target, table)) * scale
    if bias is not None:
        pos = pos + bias[target]
    found = [pos.detach()[:0]]
    for row, column in zip(inside.rows.unbind(), inside.classes.unbind(), strict=True):
        _, lse = contrast(
            rows[row].to(input.dtype),
            table[column].to(linear_weight.dtype),
            scale=scale[row] if isinstance(scale, Tensor) and scale.dim() else scale,
            bias=None if bias is None else bias[column],
            row_id=target[row],
            col_id=column,
        )
        found.append(lse)
    member = inside.rows.flatten()
    lse = pos.new_full((n,), -torch.inf).scatter_reduce(0, member, torch.cat(found), "amax")
    absent = torch.ones_like(ignored).index_fill(0, member, False) | ignored
    per_row = softplus((lse - pos).masked_fill(absent, -torch.inf))
    if reduction == "mean":
        return reduced(per_row, "sum", row_weight) / (~absent).sum().clamp(min=1)
    return reduced(per_row, reduction, row_weight)


class _Members(NamedTuple):
    rows: Tensor  # int64 [B, R]
    classes: Tensor  # int64 [B, K]


def _members(
    direction: Tensor, input: Tensor, table: Tensor, ignored: Tensor, most_rows: int, most_classes: int
) -> _Members:
    of_rows = _product(direction, input.T).masked_fill(ignored, -torch.inf)
    rows = of_rows.topk(min(most_rows, input.shape[0]), dim=1, sorted=False).indices
    classes = _product(direction, table.T).topk(min(most_classes, table.shape[0]), dim=1, sorted=False).indices
    return _Members(rows, classes)


@no_autocast
def _product(a: Tensor, b: Tensor) -> Tensor:
    wide = compute_dtype(a, b)
    return a.to(wide) @ b.to(wide)


def _check_size(name: str, size: object) -> None:
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(f"{name}: expected an int, got {type(size).__name__}")
    if size < 1:
        raise ValueError(f"{name}: expected at least 1, got {size}")
