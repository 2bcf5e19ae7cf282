"""Losses over views and classes of one set of embeddings: NT-Xent, supervised contrastive, alignment and uniformity.

NT-Xent, the supervised loss and uniformity are one call of the op over the set against itself, in which ids take each
row out of its own sum. The N x N similarities are never stored.
"""

import torch
from torch import Tensor

from fastcl.arithmetic import compute_dtype, softplus
from fastcl.checks import (
    as_ids,
    check_constant,
    check_reduction,
    check_temperature,
    check_tensor,
    check_weight,
    positive_number,
)
from fastcl.losses import infonce
from fastcl.normalize import normalized
from fastcl.ops import contrast
from fastcl.registry import registered
from fastcl.rows import inverse, reduced


@registered("NTXent", inputs=2)
def nt_xent(
    view1: Tensor,  # [B, D]
    view2: Tensor,  # [B, D]
    temperature: float | Tensor = 0.5,  # a number, [] or [2B]
    reduction: str = "mean",
    weight: Tensor | None = None,  # [2B]
) -> Tensor:
    """NT-Xent, the loss of SimCLR (Chen et al. 2020, Eq. 1): InfoNCE over both views of a batch.

        loss_i = -log(exp(z_i,i' / T) / sum_{j != i} exp(z_ij / T)),    z = cosines of the 2B stacked views

    with i' the other view of i. Each of the 2B anchors has one positive and the 2B - 2 views of other samples as
    negatives.

    Args:
        view1, view2: [B, D], float64, float32, bfloat16 or float16, normalised here; row i of either is a view of
            sample i.
        temperature: T > 0: a number, a 0-d tensor (may learn) or one value per anchor [2B] (may learn).
        reduction: "mean" over the 2B anchors, "sum" or "none" ([2B], the anchors of view1 first).
        weight: [2B], any floating dtype, one per anchor: mean = sum(weight * loss) / 2B.

    Returns: float32 (float64 for float64 inputs), [] or [2B]. With one sample there are no negatives: loss 0.

    Gradients: view1, view2, temperature and weight.

    Errors: TypeError for types and dtypes, ValueError for shapes and values, each naming the argument.

    >>> import torch, fastcl
    >>> round(fastcl.nt_xent(torch.eye(2), torch.eye(2)).item(), 4)  # log(1 + 2 e^-2)
    0.2395
    """
    check_tensor("view1", view1, ("B", "D"))
    check_tensor("view2", view2, tuple(view1.shape), view1.device)
    both = torch.cat([view1, view2])
    partner = torch.cat([view2, view1])
    # One id per sample takes the anchor and its partner out of the sum; the partner enters it again as the positive.
    ids = torch.arange(both.shape[0], device=both.device).remainder_(view1.shape[0])
    return infonce(both, partner, both, temperature, reduction, ids=ids, negative_ids=ids, weight=weight)


@registered("SupCon", inputs=2)
def supcon(
    features: Tensor,  # [N, D]
    labels: Tensor,  # [N]
    temperature: float | Tensor = 0.07,  # a number, [] or [N]
    reduction: str = "mean",
    weight: Tensor | None = None,  # [N]
) -> Tensor:
    """Supervised contrastive loss (Khosla et al. 2020, Eq. 2, L_out): all samples of an anchor's class are positives.

        loss_i = -1/|P(i)| sum_{p in P(i)} log(exp(z_ip / T) / sum_{a != i} exp(z_ia / T)),    z = cosines

    with P(i) the other samples with i's label. The sum over a includes the positives. The numerator is linear in z, so
    it is computed from the mean positive of the anchor. Several views of a sample are rows with the same label.

    Args:
        features: [N, D], float64, float32, bfloat16 or float16, normalised here.
        labels: [N], any integer dtype, any values.
        temperature: T > 0: a number, a 0-d tensor (may learn) or one value per anchor [N] (may learn). The factor
            temperature / base_temperature of the authors' code, which is 1 by default, is left out here.
        reduction: "mean" over the anchors that have a positive, "sum" or "none" ([N]).
        weight: [N], any floating dtype, one per anchor: mean = sum(weight * loss) / the number of anchors that have a
            positive.

    Returns: float32 (float64 for float64 inputs), [] or [N]. An anchor without positives has loss 0 and no gradient as
    an anchor, but is a negative of other anchors. Where no anchor has a positive, the mean is 0.

    Gradients: features, temperature and weight.

    Errors: TypeError for types and dtypes, ValueError for shapes and values, each naming the argument.

    >>> import torch, fastcl
    >>> features = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    >>> fastcl.supcon(features, torch.tensor([5, 5, 8]), temperature=0.5, reduction="none")  # log(1 + e^-2), twice
    tensor([0.1269, 0.1269, 0.0000])
    """
    check_tensor("features", features, ("N", "D"))
    n, device = features.shape[0], features.device
    labels = as_ids("labels", labels, (n,), device)
    check_temperature(temperature, n, device)
    check_reduction(reduction)
    check_weight(weight, n, device)
    features = normalized(features)
    # A class is numbered by the first place of its label among the sorted labels, so that every shape stays [N].
    ordered = labels.sort().values
    first = torch.searchsorted(ordered, labels)
    others = torch.searchsorted(ordered, labels, right=True) - first - 1
    of_class = torch.zeros_like(features).index_add(0, first, features)
    mean_positive = (of_class[first] - features) / others.clamp(min=1)[:, None]
    # Only the loss of an anchor with a single positive can approach 0, where lse - pos, with the positive in lse, would
    # be rounding error. The two members of such a class share an id, which leaves the positive out of lse; the loss is
    # log(1 + exp(lse - pos)) then.
    single, alone = others == 1, others == 0
    ids = torch.where(single, first, torch.arange(n, 2 * n, device=device))
    pos, lse = contrast(features, features, mean_positive, scale=inverse(temperature, features), row_id=ids, col_id=ids)
    assert pos is not None
    above = lse - pos
    per_row = torch.where(single, softplus(above), above).masked_fill(alone, 0.0)
    if reduction == "mean":
        return reduced(per_row, "sum", weight) / (~alone).sum().clamp(min=1)
    return reduced(per_row, reduction, weight)


@registered("Alignment", inputs=2)
def alignment(
    x: Tensor,  # [N, D]
    y: Tensor,  # [N, D]
    alpha: float = 2.0,
    reduction: str = "mean",
    weight: Tensor | None = None,  # [N]
) -> Tensor:
    """Alignment (Wang & Isola 2020, section 4.1.1): how far the two embeddings of a positive pair lie apart.

        loss_i = |x_i - y_i|^alpha

    Args:
        x, y: [N, D], floating, used as they are; those of the paper are normalised.
        alpha: > 0.
        reduction: "mean" over the N pairs, "sum" or "none" ([N]).
        weight: [N], any floating dtype, one per pair: mean = sum(weight * loss) / N.

    Returns: float32 (float64 for float64 inputs), [] or [N].

    Gradients: x, y and weight; 0, not NaN, where x_i = y_i and alpha < 2.

    Errors: TypeError for types and dtypes, ValueError for shapes and values, each naming the argument.

    >>> import torch, fastcl
    >>> fastcl.alignment(torch.tensor([[3.0, 0.0], [1.0, 1.0]]), torch.tensor([[0.0, 4.0], [1.0, 1.0]]))  # (25 + 0) / 2
    tensor(12.5000)
    """
    check_tensor("x", x, ("N", "D"))
    check_tensor("y", y, tuple(x.shape), x.device)
    positive_number("alpha", alpha)
    check_reduction(reduction)
    check_weight(weight, x.shape[0], x.device)
    dtype = compute_dtype(x, y)
    square = (x.to(dtype) - y.to(dtype)).square().sum(1)
    meet = (square == 0) & (alpha < 2)  # square^(alpha / 2) has infinite slope at 0
    return reduced(square.masked_fill(meet, 1.0).pow(alpha / 2).masked_fill(meet, 0.0), reduction, weight)


@registered("Uniformity", inputs=1)
def uniformity(x: Tensor, t: float = 2.0) -> Tensor:
    """Uniformity (Wang & Isola 2020, section 4.1.2): how evenly embeddings are spread; lower is more even.

        loss = log mean_{i != j} exp(-t |x_i - x_j|^2)

    The log of the mean is one number for the batch, so that there are no reduction and no row weights.

    Args:
        x: [N, D], float64, float32, bfloat16 or float16, N >= 2, used as it is; that of the paper is normalised.
        t: > 0.

    Returns: float32 (float64 for float64 inputs), [], at most 0.

    Gradients: x.

    Errors: TypeError for types and dtypes, ValueError for shapes and values, each naming the argument.

    >>> import torch, fastcl
    >>> round(fastcl.uniformity(torch.tensor([[1.0, 0.0], [0.0, 1.0]])).item(), 4)  # one distance, of sqrt 2
    -4.0
    """
    check_tensor("x", x, ("N", "D"), least=2)
    positive_number("t", t)
    x = x.to(compute_dtype(x))
    # Distances do not depend on the origin. With the origin at the mean, 2<x, y> - |x|^2 - |y|^2 cancels least.
    x = x - x.detach().mean(0)
    n = x.shape[0]
    row = torch.arange(n, device=x.device)
    bias = -t * x.square().sum(1)
    _, lse = contrast(x, x, scale=2.0 * t, bias=bias, row_id=row, col_id=row)
    # The logarithm is that of a tensor, since that of a number would tie a compiled graph to the size of the batch.
    return torch.logsumexp(lse + bias, 0) - torch.full_like(lse[0], n * (n - 1)).log()


@registered("DirectAU", inputs=2)
def directau(query: Tensor, positive_key: Tensor, gamma: float = 1.0, t: float = 2.0) -> Tensor:
    """DirectAU (Wang et al. 2022, Eq. 7): alignment of users with their items, and uniformity of both; no negatives.

        loss = alignment(query, positive_key) + gamma / 2 (uniformity(query, t) + uniformity(positive_key, t))

    Args:
        query, positive_key: [N, D], float64, float32, bfloat16 or float16, used as they are; the paper's are
            normalised. Row i of each is a user and an item of the user.
        gamma: >= 0, the weight of the uniformity.
        t: > 0, that of `uniformity`.

    Returns: float32 (float64 for float64 inputs), []. With fewer than two rows there is no uniformity.

    Gradients: query, positive_key.

    Errors: TypeError for types and dtypes, ValueError for shapes and values, each naming the argument.

    >>> import torch, fastcl
    >>> round(fastcl.directau(torch.eye(2), torch.eye(2), gamma=0.5).item(), 4)  # 0 + 0.5 (-4)
    -2.0
    """
    check_constant("gamma", gamma, lambda x: x >= 0, "at least 0")
    positive_number("t", t)
    check_tensor("query", query, ("N", "D"))
    check_tensor("positive_key", positive_key, tuple(query.shape), query.device)
    together = alignment(query, positive_key)
    if query.shape[0] < 2:
        return together
    return together + 0.5 * gamma * (uniformity(query, t) + uniformity(positive_key, t))
