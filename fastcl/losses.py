"""The losses: each is a line of arithmetic over `pos` and `lse`, the two numbers per row of `fastcl.contrast`.

Formulas and their documentation only: how a batch becomes `Rows` is rows.py, the textbook twin of each loss is in
reference.py.
"""

import functools
import inspect
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fastcl.rows import (
    REDUCTIONS,
    Negatives,
    Queue,
    Rows,
    check_batch,
    check_constant,
    check_symmetric,
    normalized,
    positive_number,
    rows_of,
)


def _loss(formula: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Makes a formula over `Rows` a public loss: the shared arguments in front, the formula's own keywords behind."""

    @functools.wraps(formula, assigned=("__module__", "__name__", "__qualname__", "__doc__"))
    def loss(
        query: Tensor,  # [N, D]
        positive_key: Tensor,  # [N, D]
        negative_keys: Tensor | None = None,  # [M, D] or [N, K, D]
        temperature: float | Tensor = 0.1,  # a number, [] or [N]
        reduction: str = "mean",
        negative_mode: str | None = None,
        *,
        normalize: bool = True,
        in_batch: bool | None = None,
        queue: Queue | None = None,
        ids: Tensor | None = None,  # [N]
        negative_ids: Tensor | None = None,  # [M] or [N, K]
        log_q: Tensor | None = None,  # [N]
        negative_log_q: Tensor | None = None,  # [M] or [N, K]
        symmetric: bool = False,
        **constants: float,
    ) -> Tensor:
        check_batch(query, positive_key, negative_keys, temperature, reduction, negative_mode)
        if normalize:
            query, positive_key = normalized(query), normalized(positive_key)
            negative_keys = None if negative_keys is None else normalized(negative_keys)
        negatives = Negatives(negative_keys, in_batch, queue, ids, negative_ids, log_q, negative_log_q)
        if symmetric:
            check_symmetric(negatives, temperature)
            rows = (
                rows_of(query, positive_key, temperature, negatives),
                rows_of(positive_key, query, temperature, negatives),
            )
            per_row = 0.5 * (formula(rows[0], **constants) + formula(rows[1], **constants))
        else:
            per_row = formula(rows_of(query, positive_key, temperature, negatives), **constants)
        return REDUCTIONS[reduction](per_row)

    shared = [p for p in inspect.signature(loss, follow_wrapped=False).parameters.values() if p.name != "constants"]
    own = list(inspect.signature(formula).parameters.values())[1:]
    loss.__signature__ = inspect.Signature([*shared, *own], return_annotation=Tensor)  # type: ignore[attr-defined]
    return loss


@_loss
def infonce(rows: Rows) -> Tensor:
    """InfoNCE (van den Oord et al. 2018, Eq. 4): -log of the positive's share in the softmax over it and the negatives.

        loss_i = logaddexp(pos_i, lse_i) - pos_i,    pos_i = <q_i, p_i> / T,    lse_i = log sum_j exp(<q_i, k_j> / T)

    Replacing the import is enough for code that calls the info-nce-pytorch package: the first six arguments behave as
    there.

    Args:
        query: [N, D], float64, float32, bfloat16 or float16.
        positive_key: [N, D], row i belongs to query i.
        negative_keys: [M, D], shared by all queries, or [N, K, D], private to each. Turns in-batch negatives off unless
            in_batch=True.
        temperature: T > 0: a number, a 0-d tensor (may learn) or one value a row [N] (may learn).
        reduction: "mean" over the N rows, "sum" or "none" ([N]).
        negative_mode: None (told by the dimensions of negative_keys), "unpaired" ([M, D]) or "paired" ([N, K, D]).
        normalize: divide query, positive_key and negative_keys by their length (16-bit inputs in float32). A zero
            vector stays zero and gets zero gradient. Queue rows are used as stored.
        in_batch: use the other rows' positive_key as negatives; None: if negative_keys is None, with or without a
            queue.
        queue: a `NegativeQueue`, used without gradient; never pushed to. An empty one adds nothing.
        ids: [N], int64, the ids of the positives. In the batch, and in every segment that has ids, columns whose id
            equals the row's are left out of its sum. Without ids only the row's own positive is left out of the
            in-batch sum; duplicates stay.
        negative_ids: [M] or [N, K], int64, the ids of negative_keys.
        log_q: [N], log probability with which each positive is sampled as a negative: subtracted from its logit,
            wherever it stands (sampled softmax). Given for every segment or for none; the queue keeps its own.
        negative_log_q: [M] or [N, K], the same for negative_keys.
        symmetric: half the sum of both directions (CLIP); not with negative_keys, queue, log_q or a temperature per
            row.

    Returns: float32 (float64 for float64 inputs), [] or [N]. A row without negatives has loss 0 and zero gradient, and
    counts in the mean.

    Gradients: query, positive_key, negative_keys, temperature, log_q and negative_log_q; the true ones, for any
    upstream gradient.

    Errors: TypeError for types and dtypes, ValueError for shapes and values, each naming the argument.

    >>> import torch, fastcl
    >>> query = torch.eye(2, requires_grad=True)
    >>> loss = fastcl.infonce(query, torch.eye(2), temperature=0.5)
    >>> loss.backward()
    >>> round(loss.item(), 4)  # log(1 + e^-2)
    0.1269
    """
    # softplus, not logaddexp(pos, lse) - pos, which cancels to 0 at convergence.
    return _softplus(rows.lse - rows.pos)


@_loss
def dcl(rows: Rows) -> Tensor:
    """Decoupled contrastive loss (Yeh et al. 2022): InfoNCE without the positive in the denominator.

        loss_i = lse_i - pos_i

    Arguments, gradients and errors: `infonce`. The loss may be negative.

    >>> import torch, fastcl
    >>> round(fastcl.dcl(torch.eye(2), torch.eye(2), temperature=0.5).item(), 4)  # 0 - 2
    -2.0
    """
    return _unless_empty(rows, rows.lse - rows.pos)


@_loss
def infonce_plus(rows: Rows, *, epsilon: float = 0.0, lam: float = 1.1) -> Tensor:
    """InfoNCE+ (Li et al. 2023, arXiv 2312.08520): `epsilon` weighs the positive in the denominator, `lam` repulsion.

        loss_i = lam * log(epsilon * exp(pos_i) + exp(lse_i)) - pos_i

    epsilon=1, lam=1 is InfoNCE; epsilon=0, lam=1 is DCL. epsilon >= 0, lam > 0; the paper favours epsilon=0, lam=1.1.
    Arguments, gradients and errors: `infonce`. The loss may be negative.

    >>> import torch, fastcl
    >>> round(fastcl.infonce_plus(torch.eye(2), torch.eye(2), temperature=0.5, epsilon=1.0, lam=1.0).item(), 4)
    0.1269
    """
    check_constant("epsilon", epsilon, lambda x: x >= 0, "at least 0")
    positive_number("lam", lam)
    if epsilon == 0:
        return _unless_empty(rows, lam * rows.lse - rows.pos)
    z = rows.pos + math.log(epsilon)
    # lam * logaddexp(z, lse) - pos, regrouped so that what cancels for lam = 1 does so before anything small is added
    # to it.
    return _unless_empty(rows, lam * _softplus(rows.lse - z) + ((lam - 1) * rows.pos + lam * math.log(epsilon)))


@_loss
def mine(rows: Rows) -> Tensor:
    """MINE (Belghazi et al. 2018; for recommendation Li et al. 2023): the negative terms are averaged, not summed.

        loss_i = lse_i - log(count_i) - pos_i,    count_i: columns in row i's sum, over all segments, exclusions left
        out

    Arguments, gradients and errors: `infonce`. The loss may be negative.

    >>> import torch, fastcl
    >>> round(fastcl.mine(torch.eye(3), torch.eye(3), temperature=0.5).item(), 4)  # log(2) - log(2) - 2
    -2.0
    """
    return _unless_empty(rows, _log_mean(rows) - rows.pos)


@_loss
def mine_plus(rows: Rows, *, lam: float = 1.1) -> Tensor:
    """MINE+ (Li et al. 2023, arXiv 2312.08520): MINE with a weight `lam` > 0 on repulsion (paper: 1.1 to 1.2).

        loss_i = lam * (lse_i - log(count_i)) - pos_i

    Arguments, gradients and errors: `infonce`. The loss may be negative.

    >>> import torch, fastcl
    >>> round(fastcl.mine_plus(torch.eye(3), torch.eye(3), temperature=0.5, lam=1.2).item(), 4)
    -2.0
    """
    positive_number("lam", lam)
    return _unless_empty(rows, lam * _log_mean(rows) - rows.pos)


def _softplus(x: Tensor) -> Tensor:
    # torch turns linear at its default threshold of 20, where the difference still shows in float64; at 40 it does not.
    return F.softplus(x, threshold=40.0)


def _log_mean(rows: Rows) -> Tensor:
    return rows.lse - rows.count().clamp(min=1).to(rows.lse).log()


def _unless_empty(rows: Rows, loss: Tensor) -> Tensor:
    """The loss, or a constant 0 in rows that have nothing to contrast with."""
    return torch.where(rows.lse == -torch.inf, 0.0, loss)
