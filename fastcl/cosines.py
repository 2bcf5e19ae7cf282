"""Losses of recommenders that change each similarity before they add it up: formulas over stored similarities, [N, M].

Formulas only. The kernels know exponentials and softplus of a similarity alone, so these losses are plain PyTorch.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fastcl.arithmetic import dot, logsumexp, softplus
from fastcl.checks import both_ids, check_constant, check_tensor, check_weight, in_memory
from fastcl.normalize import normalized_together
from fastcl.private import stored_similarity
from fastcl.registry import registered
from fastcl.rows import check_batch, check_negatives, inverse, reduced


@registered("CCL", inputs=3)
def ccl(
    query: Tensor,  # [N, D]
    positive_key: Tensor,  # [N, D]
    negative_keys: Tensor,  # [M, D] or [N, K, D]
    reduction: str = "mean",
    weight: Tensor | None = None,  # [N]
    *,
    margin: float = 0.8,
    negative_weight: float = 150.0,
    ids: Tensor | None = None,  # [N]
    negative_ids: Tensor | None = None,  # [M] or [N, K]
) -> Tensor:
    """Cosine contrastive loss, CCL: the loss of SimpleX (Mao et al. 2021, Eq. 1).

        loss_i = 1 - <q_i, p_i> + negative_weight mean_j max(0, <q_i, k_j> - margin)

    Args:
        query: [N, D], float64, float32, bfloat16 or float16, used as it is; the paper's are normalised.
        positive_key: [N, D].
        negative_keys: [M, D], shared by all rows, or [N, K, D], private to each.
        reduction: "mean" over the N rows, "sum" or "none" ([N]).
        weight: [N], any floating dtype, multiplies a row's loss; a mean still divides by N.
        margin: the similarity above which a negative is pushed away.
        negative_weight: >= 0.
        ids, negative_ids: [N] and [M] or [N, K], any integer dtype, both or neither: negatives with the id of the row's
            positive are left out of the mean.

    Returns: float32 (float64 for float64 inputs), [] or [N]. Composed in PyTorch: the similarities are stored.

    Gradients: query, positive_key, negative_keys and weight.

    Errors: TypeError for types and dtypes, ValueError for shapes and values, each naming the argument.

    >>> import torch, fastcl
    >>> x = torch.eye(2)
    >>> fastcl.ccl(x, x, x, margin=0.5, negative_weight=3.0)  # 0 + 3 (0.5 + 0) / 2
    tensor(0.7500)
    >>> fastcl.ccl(x, x, x, ids=torch.arange(2), negative_ids=torch.arange(2))  # none is left above the margin
    tensor(0.)
    """
    _check(query, positive_key, negative_keys, reduction, weight)
    check_constant("margin", margin, lambda _: True, "of any sign")
    check_constant("negative_weight", negative_weight, lambda x: x >= 0, "at least 0")
    ids, negative_ids = both_ids(query, negative_keys, ids, negative_ids)
    above = F.relu(stored_similarity(query, negative_keys) - margin)
    count: float | Tensor = max(1, above.shape[1])
    if ids is not None and negative_ids is not None:
        own = ids[:, None] == negative_ids
        above = above.masked_fill(own, 0.0)
        count = (~own).sum(1).clamp(min=1)
    return reduced(1.0 - dot(query, positive_key) + negative_weight * above.sum(1) / count, reduction, weight)


Surrogate = Callable[[Tensor], Tensor]


def psl_tanh(difference: Tensor) -> Tensor:
    """log(1 + tanh(d)), the surrogate of `fastcl.psl` that its authors favour.

    >>> import torch, fastcl
    >>> fastcl.psl_tanh(torch.tensor([0.0, 0.5]))
    tensor([0.0000, 0.3799])
    """
    return math.log(2.0) - softplus(-2.0 * difference)


def psl_atan(difference: Tensor) -> Tensor:
    """log(1 + arctan(d)), a surrogate for `fastcl.psl`; -inf without gradient for d <= -tan(1).

    >>> import torch, fastcl
    >>> fastcl.psl_atan(torch.tensor([0.0, 0.5]))
    tensor([0.0000, 0.3809])
    """
    return _log_above_0(1.0 + torch.atan(difference))


def psl_relu(difference: Tensor) -> Tensor:
    """log(max(0, 1 + d)), a surrogate for `fastcl.psl`; -inf without gradient for d <= -1.

    >>> import torch, fastcl
    >>> fastcl.psl_relu(torch.tensor([0.0, 0.5]))
    tensor([0.0000, 0.4055])
    """
    return _log_above_0(1.0 + difference)


def _log_above_0(x: Tensor) -> Tensor:
    below = x <= 0
    return x.masked_fill(below, 1.0).log().masked_fill(below, -torch.inf)


@registered("PSL", inputs=3)
def psl(
    query: Tensor,  # [N, D]
    positive_key: Tensor,  # [N, D]
    negative_keys: Tensor,  # [M, D] or [N, K, D]
    temperature: float | Tensor = 0.1,  # a number, [] or [N]
    reduction: str = "mean",
    weight: Tensor | None = None,  # [N]
    *,
    surrogate: Surrogate = psl_tanh,
    normalize: bool = True,
    ids: Tensor | None = None,  # [N]
    negative_ids: Tensor | None = None,  # [M] or [N, K]
) -> Tensor:
    """Pairwise softmax loss, PSL (Yang et al. 2024): a softmax over a bounded surrogate of each difference.

        loss_i = log sum_j sigma(d_ij)^(1 / T),    d_ij = (<q_i, k_j> - <q_i, p_i>) / 2, from -1 to 1

    Args:
        query, positive_key, negative_keys, reduction, weight, ids, negative_ids: those of `ccl`.
        temperature: T > 0: a number, a 0-d tensor or one value a row [N] (both may learn).
        surrogate: a function of d, element by element, that returns log sigma(d): `fastcl.psl_tanh`, `fastcl.psl_atan`,
            `fastcl.psl_relu` or one of your own. With the identity the loss is DCL at the temperature 2 T.
        normalize: divide each row of query, positive_key and negative_keys by its length.

    Returns: float32 (float64 for float64 inputs), [] or [N]. A row without negatives has loss 0. The loss may be
    negative. Composed in PyTorch: the similarities are stored.

    Gradients: query, positive_key, negative_keys, temperature and weight.

    Errors: as `ccl`.

    >>> import torch, fastcl
    >>> x = torch.eye(2)
    >>> round(fastcl.psl(x, x, x, 0.5).item(), 4)  # log(1 + (1 - tanh(0.5))^2)
    0.2541
    """
    _check(query, positive_key, negative_keys, reduction, weight, temperature)
    if not callable(surrogate):
        raise TypeError(f"surrogate: expected a function of differences, got {type(surrogate).__name__}")
    ids, negative_ids = both_ids(query, negative_keys, ids, negative_ids)
    if normalize:
        query, positive_key, negative_keys = normalized_together(query, positive_key, negative_keys)
    difference = (stored_similarity(query, negative_keys) - dot(query, positive_key)[:, None]) / 2
    each = surrogate(difference)
    check_tensor("surrogate", each, tuple(difference.shape), difference.device)
    scale = inverse(temperature, query)
    each = each * (scale[:, None] if isinstance(scale, Tensor) and scale.dim() else scale)
    if ids is not None and negative_ids is not None:
        each = each.masked_fill(ids[:, None] == negative_ids, -torch.inf)
    per_row = logsumexp(each)
    return reduced(per_row.masked_fill(per_row == -torch.inf, 0.0), reduction, weight)


def _check(
    query: Tensor,
    positive_key: Tensor,
    negative_keys: Tensor,
    reduction: str,
    weight: Tensor | None,
    temperature: float | Tensor = 1.0,
) -> None:
    check_batch(query, positive_key, None, temperature, reduction, None)
    check_negatives(negative_keys, query)
    check_weight(weight, query.shape[0], query.device)
    for name, t in (("query", query), ("positive_key", positive_key), ("negative_keys", negative_keys)):
        in_memory(name, t)
