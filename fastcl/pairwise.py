"""Losses that compare every query with every negative on its own: formulas over `softplus_sum`.

Formulas only. Negatives that each row has of its own are computed in plain PyTorch. Inputs are not normalised: these
losses are functions of the inner product, not of the cosine.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fastcl.arithmetic import compute_dtype, dot, picked, softplus
from fastcl.checks import (
    both_ids,
    check_constant,
    check_reduction,
    check_scale,
    check_tensor,
    check_weight,
    in_memory,
)
from fastcl.ops_pairwise import softplus_sum_expecting
from fastcl.private import private_similarity
from fastcl.registry import registered
from fastcl.rows import check_batch, check_negatives, reduced


def _check(query: Tensor, positive_key: Tensor, negative_keys: Tensor, reduction: str, weight: Tensor | None) -> None:
    check_batch(query, positive_key, None, 1.0, reduction, None)
    check_negatives(negative_keys, query)
    check_weight(weight, query.shape[0], query.device)
    for name, t in (("query", query), ("positive_key", positive_key), ("negative_keys", negative_keys)):
        in_memory(name, t)


def _expected(reduction: str, weight: Tensor | None) -> float | Tensor | None:
    """The gradient that `reduced` sends to the rows, up to one factor common to all; None if it is not known."""
    return None if reduction == "none" else 1.0 if weight is None else weight


@registered("BPR", inputs=3)
def bpr(
    query: Tensor, positive_key: Tensor, negative_keys: Tensor, reduction: str = "mean", weight: Tensor | None = None
) -> Tensor:
    """Bayesian personalised ranking (Rendle et al. 2009): -log sigma(positive - negative), summed over negatives.

        loss_i = sum_j softplus(<q_i, k_j> - <q_i, p_i>)

    Args:
        query: [N, D], float64, float32, bfloat16 or float16.
        positive_key: [N, D].
        negative_keys: [M, D], shared by all rows (fused; the N x M logits are never stored), or [N, K, D], private to
            each.
        reduction: "mean" over the N rows, "sum" or "none" ([N]).
        weight: [N], multiplies a row's loss; a mean still divides by N.

    Returns float32 (float64 for float64 inputs), [] or [N]; a row without negatives has loss 0. Gradients: all three
    inputs. Errors: TypeError for types and dtypes, ValueError for shapes and values, naming the argument.

    >>> import torch, fastcl
    >>> x = torch.eye(2)
    >>> round(fastcl.bpr(x, x, torch.zeros(1, 2)).item(), 4)  # log(1 + e^-1)
    0.3133
    """
    _check(query, positive_key, negative_keys, reduction, weight)
    pos = dot(query, positive_key)
    if negative_keys.dim() == 2:
        rows = softplus_sum_expecting(_expected(reduction, weight), query, negative_keys, offset=-pos)
        return reduced(rows, reduction, weight)
    return reduced(softplus(private_similarity(query, negative_keys) - pos[:, None]).sum(1), reduction, weight)


@registered("NegativeSampling", inputs=3)
def negative_sampling(
    query: Tensor, positive_key: Tensor, negative_keys: Tensor, reduction: str = "mean", weight: Tensor | None = None
) -> Tensor:
    """Negative sampling (Mikolov et al. 2013, Eq. 4; CLRec, Zhou et al. 2021, B.3): a binary decision per pair.

        loss_i = softplus(-<q_i, p_i>) + sum_j softplus(<q_i, k_j>)

    Negatives [M, D] shared by the batch are fused ("shared negative sampling"); [N, K, D] are private to each row.
    Arguments, gradients and errors: `bpr`.

    >>> import torch, fastcl
    >>> x = torch.eye(2)
    >>> round(fastcl.negative_sampling(x, x, torch.zeros(3, 2)).item(), 4)  # log(1 + e^-1) + 3 log 2
    2.3927
    """
    _check(query, positive_key, negative_keys, reduction, weight)
    positive = softplus(-dot(query, positive_key))
    if negative_keys.dim() == 2:
        negative = softplus_sum_expecting(_expected(reduction, weight), query, negative_keys)
        return reduced(positive + negative, reduction, weight)
    return reduced(positive + softplus(private_similarity(query, negative_keys)).sum(1), reduction, weight)


@registered("GBCE", inputs=3)
def gbce(
    query: Tensor,  # [N, D]
    positive_key: Tensor,  # [N, D]
    negative_keys: Tensor,  # [M, D] or [N, K, D]
    reduction: str = "mean",
    weight: Tensor | None = None,  # [N]
    *,
    catalogue: int,
    calibration: float = 0.75,
    ids: Tensor | None = None,  # [N]
    negative_ids: Tensor | None = None,  # [M] or [N, K]
    positive_bias: Tensor | None = None,  # [N]
    negative_bias: Tensor | None = None,  # [M] or [N, K]
) -> Tensor:
    """Generalised binary cross-entropy, gBCE (Petrov & Macdonald 2023, gSASRec, Eqs. 11 to 13).

        loss_i = (beta softplus(-z_i) + sum_j softplus(z_ij)) / (K + 1),    z_i = <q_i, p_i>,    z_ij = <q_i, k_j>
        beta = 1 - calibration (1 - alpha),    alpha = K / (catalogue - 1)

    Negatives that are few beside the catalogue make a binary cross-entropy overconfident: with the power beta of the
    positive's probability it learns the true one (calibration 1) or one between (0 is binary cross-entropy).

    Args:
        query, positive_key, negative_keys, reduction, weight: those of `bpr`; K is the number of negatives of a row.
        catalogue: >= 2, the number of items that negatives are drawn from, the positive among them.
        calibration: from 0 to 1, the paper's t.
        ids, negative_ids: [N] and [M] or [N, K], any integer dtype, both or neither: negatives with the id of the row's
            positive are left out. K counts them.
        positive_bias, negative_bias: [N] and [M] or [N, K], floating, added to z_i and z_ij.

    Returns float32 (float64 for float64 inputs), [] or [N]. Gradients: query, keys, biases and weight. Negatives [M, D]
    are fused. Errors: as `bpr`.

    >>> import torch, fastcl
    >>> x = torch.eye(2)
    >>> round(fastcl.gbce(x, x, torch.zeros(1, 2), catalogue=11).item(), 4)  # (0.325 log(1 + e^-1) + log 2) / 2
    0.3975
    """
    _check(query, positive_key, negative_keys, reduction, weight)
    if isinstance(catalogue, bool) or not isinstance(catalogue, int):
        raise TypeError(f"catalogue: expected an int, got {type(catalogue).__name__}")
    if catalogue < 2:
        raise ValueError(f"catalogue: expected at least 2, got {catalogue}")
    check_constant("calibration", calibration, lambda x: 0 <= x <= 1, "from 0 to 1")
    ids, negative_ids = both_ids(query, negative_keys, ids, negative_ids)
    if positive_bias is not None:
        check_tensor("positive_bias", positive_bias, (query.shape[0],), query.device)
    if negative_bias is not None:
        check_tensor("negative_bias", negative_bias, tuple(negative_keys.shape[:-1]), query.device)
    count = negative_keys.shape[-2]
    beta = 1.0 - calibration * (1.0 - min(1.0, count / (catalogue - 1)))
    positive = dot(query, positive_key)
    if positive_bias is not None:
        positive = positive + positive_bias.to(positive)
    if negative_keys.dim() == 2:
        negative = softplus_sum_expecting(
            _expected(reduction, weight), query, negative_keys, bias=negative_bias, row_id=ids, col_id=negative_ids
        )
    else:
        logits = private_similarity(query, negative_keys)
        if negative_bias is not None:
            logits = logits + negative_bias.to(logits)
        if ids is not None and negative_ids is not None:
            logits = logits.masked_fill(ids[:, None] == negative_ids, -torch.inf)
        negative = softplus(logits).sum(1)
    return reduced((beta * softplus(-positive) + negative) / (count + 1), reduction, weight)


@registered("SigLIP", inputs=2)
def siglip(
    query: Tensor,  # [N, D]
    key: Tensor,  # [M, D]
    logit_scale: float | Tensor = 10.0,
    logit_bias: float | Tensor = -10.0,
    reduction: str = "mean",
    weight: Tensor | None = None,  # [N]
    *,
    ids: Tensor | None = None,  # [N]
    key_ids: Tensor | None = None,  # [M]
) -> Tensor:
    """The sigmoid loss of SigLIP (Zhai et al. 2023, Algorithm 1), with one positive for each row or several.

        loss_i = 1 / k_i sum_{j in P_i} softplus(-z_ij) + sum_{j not in P_i} softplus(z_ij)
        z_ij = logit_scale <q_i, k_j> + logit_bias,    k_i = |P_i|

    P_i is the key of the row itself, or the keys with the row's id.

    Args:
        query, key: [N, D] and [M, D]; normalise them beforehand, as the paper does. Without ids M is N.
        logit_scale, logit_bias: numbers or 0-d tensors (may learn). 10 and -10 are where the paper starts; it learns
            the logarithm of the scale, so pass `log_scale.exp()`.
        reduction: "mean" over the N rows, "sum" or "none" ([N]).
        weight: [N], multiplies a row's loss; a mean still divides by N.
        ids, key_ids: [N] and [M], any integer dtype, both or neither: the groups of rows and keys, for instance the
            image that a text tells of. A row may have any number of positives, also none. How many pairs are positive
            is read from the device, so that this form is not for torch.func.

    Returns float32 (float64 for float64 inputs). Gradients: query, key, logit_scale, logit_bias and weight. Fused; the
    logits of positive pairs are composed. Errors: as `bpr`.

    >>> import torch, fastcl
    >>> x = torch.eye(2)
    >>> round(fastcl.siglip(x, x, 1.0, 0.0).item(), 4)  # log(1 + e^-1) + log 2
    1.0064
    >>> texts, of_image = torch.cat([x, x]), torch.tensor([0, 1, 0, 1])  # two texts for each of two images
    >>> round(fastcl.siglip(x, texts, 1.0, 0.0, ids=torch.arange(2), key_ids=of_image).item(), 4)  # 0.3133 + 2 log 2
    1.6996
    """
    if ids is None and key_ids is None:
        check_batch(query, key, None, 1.0, reduction, None, ("query", "key"))
    else:
        check_tensor("query", query, ("N", "D"))
        check_tensor("key", key, ("M", query.shape[1]), query.device)
        check_reduction(reduction)
    (n, _), device = query.shape, query.device
    check_weight(weight, n, device)
    for name, value in (("logit_scale", logit_scale), ("logit_bias", logit_bias)):
        check_scale(name, value, None, device)
    for name, t in (("query", query), ("key", key), ("logit_scale", logit_scale), ("logit_bias", logit_bias)):
        if isinstance(t, Tensor):
            in_memory(name, t)
    dtype = compute_dtype(query, key)
    bias = torch.as_tensor(logit_bias, dtype=dtype, device=device)
    if ids is None and key_ids is None:
        ids = key_ids = torch.arange(n, device=device)
        positive = softplus(-(dot(query, key) * logit_scale + bias))
    else:
        ids, key_ids = both_ids(query, key, ids, key_ids, ("ids", "key_ids"))
        assert ids is not None
        assert key_ids is not None
        owner, place, count = meeting(ids, key_ids)
        each = softplus(-(dot(picked(query, owner), picked(key, place)) * logit_scale + bias))
        positive = each.new_zeros(n).index_add(0, owner, each) / count.clamp(min=1)
    each_row = _expected(reduction, weight)
    negative = softplus_sum_expecting(each_row, query, key, logit_scale, bias.expand(n), row_id=ids, col_id=key_ids)
    return reduced(positive + negative, reduction, weight)


def meeting(ids: Tensor, key_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows and columns of the P pairs with one id, int64 [P] each, and how many of them a row has, [N]."""
    ordered, order = key_ids.sort()
    first = torch.searchsorted(ordered, ids)
    count = torch.searchsorted(ordered, ids, right=True) - first
    owner = torch.repeat_interleave(count)
    nth = torch.arange(owner.shape[0], device=ids.device) - (count.cumsum(0) - count)[owner]
    return owner, order[first[owner] + nth], count


@registered("Triplet", inputs=3)
def triplet(
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor,
    margin: float = 1.0,
    reduction: str = "mean",
    weight: Tensor | None = None,
) -> Tensor:
    """Triplet loss on similarity (Weinberger & Saul 2009 in its inner-product form): max(0, <a, n> - <a, p> + margin).

    Args:
        anchor, positive, negative: [N, D], row by row.
        margin: > 0.
        reduction: "mean" over the N rows, "sum" or "none" ([N]).
        weight: [N], multiplies a row's loss; a mean still divides by N.

    Returns float32 (float64 for float64 inputs). Composed in PyTorch: there is one negative per row. Gradients: all
    three inputs. Errors: as `bpr`.

    >>> import torch, fastcl
    >>> x = torch.eye(2)
    >>> fastcl.triplet(x, x, torch.zeros(2, 2), margin=1.5).item()  # 0 - 1 + 1.5
    0.5
    """
    check_tensor("anchor", anchor, ("N", "D"))
    for name, t in (("positive", positive), ("negative", negative)):
        check_tensor(name, t, tuple(anchor.shape), anchor.device)
    check_reduction(reduction)
    check_weight(weight, anchor.shape[0], anchor.device)
    check_constant("margin", margin, lambda x: x > 0, "above 0")
    return reduced(F.relu(dot(anchor, negative) - dot(anchor, positive) + margin), reduction, weight)


@registered("JensenShannon", inputs=3)
def jensen_shannon(
    query: Tensor, positive_key: Tensor, negative_keys: Tensor, reduction: str = "mean", weight: Tensor | None = None
) -> Tensor:
    """The Jensen-Shannon form of Deep InfoMax (Hjelm et al. 2019, Eq. 4) and Deep Graph Infomax (Velickovic et al.
    2019).

        loss_i = softplus(-<q_i, p_i>) + mean_j softplus(<q_i, k_j>)

    A mean over each side, so that the number of negatives does not weigh. Arguments, gradients and errors: `bpr`.

    >>> import torch, fastcl
    >>> x = torch.eye(2)
    >>> round(fastcl.jensen_shannon(x, x, torch.zeros(5, 2)).item(), 4)  # log(1 + e^-1) + log 2
    1.0064
    """
    _check(query, positive_key, negative_keys, reduction, weight)
    positive = softplus(-dot(query, positive_key))
    count = max(1, negative_keys.shape[-2])
    if negative_keys.dim() == 2:
        negative = softplus_sum_expecting(_expected(reduction, weight), query, negative_keys) / count
        return reduced(positive + negative, reduction, weight)
    return reduced(positive + softplus(private_similarity(query, negative_keys)).sum(1) / count, reduction, weight)
