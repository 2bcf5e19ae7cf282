"""Several positives for a row: their number differs from row to row, and they may have weights.

Each positive has one logit; the negatives of all rows have one log-sum-exp each, by the op. How both become a loss is a
formula that the caller passes: `log_out`, `log_in`, `supcon_out` and `supcon_in` are those of the papers.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fastcl.arithmetic import dot, logaddexp, picked, softplus
from fastcl.checks import as_ids, check_reduction, check_temperature, check_tensor, check_weight, readable
from fastcl.normalize import normalized_together
from fastcl.ops import contrast
from fastcl.registry import registered
from fastcl.rows import check_negatives, inverse, reduced


class Positives(NamedTuple):
    """What a form sees of the batch."""

    logit: Tensor  # [P], of each positive
    lse: Tensor  # [N], of each row's negatives; -inf where there are none
    owner: Tensor  # [P], the row of each positive
    weight: Tensor  # [P]

    @property
    def share(self) -> Tensor:
        """[P], the weight of a positive among those of its row: they sum to 1."""
        total = self.sum(self.weight)[self.owner]
        return self.weight / total.masked_fill(total == 0, 1.0)

    def sum(self, each: Tensor) -> Tensor:
        """[P] -> [N], over the positives of each row; 0 over none."""
        return torch.zeros_like(self.lse).index_add(0, self.owner, each)

    def logsumexp(self, weight: Tensor | None = None) -> Tensor:
        """[N], log sum weight exp(logit) over the positives of each row; -inf over none."""
        top = torch.full_like(self.lse, -torch.inf).scatter_reduce(0, self.owner, self.logit.detach(), "amax")
        top = top.masked_fill(top.isinf(), 0.0)
        each = torch.exp(self.logit - top[self.owner])
        total = self.sum(each if weight is None else weight * each)
        nothing = total == 0
        return (total.masked_fill(nothing, 1.0).log() + top).masked_fill(nothing, -torch.inf)


Form = Callable[[Positives], Tensor]


def log_out(rows: Positives) -> Tensor:
    """[N]: the mean over a row's positives of InfoNCE of each against the negatives alone (RePlay's LogOutCE).

        loss_i = sum_p share_p log(1 + exp(lse_i - z_p))

    >>> import torch, fastcl
    >>> x = torch.eye(2)
    >>> round(fastcl.multi_positive(x, x, torch.arange(2), temperature=0.5, form=fastcl.log_out).item(), 4)
    0.1269
    """
    return rows.sum(rows.share * softplus(rows.lse[rows.owner] - rows.logit))


def log_in(rows: Positives) -> Tensor:
    """[N]: InfoNCE of a row's positives as one (RePlay's LogInCE): one of them is enough.

        loss_i = -log(sum_p w_p exp(z_p) / (sum_p w_p exp(z_p) + exp(lse_i)))

    >>> import torch, fastcl
    >>> x = torch.eye(2)
    >>> round(fastcl.multi_positive(x, x, torch.arange(2), temperature=0.5, form=fastcl.log_in).item(), 4)
    0.1269
    """
    return softplus(rows.lse - rows.logsumexp(rows.weight))


def supcon_out(rows: Positives) -> Tensor:
    """[N]: the mean of -log of each positive's share in the softmax over all columns (Khosla et al. 2020, Eq. 2).

        loss_i = log(sum_p exp(z_p) + exp(lse_i)) - sum_p share_p z_p

    >>> import torch, fastcl
    >>> x = torch.eye(2)
    >>> round(fastcl.multi_positive(x, x, torch.arange(2), temperature=0.5, form=fastcl.supcon_out).item(), 4)
    0.1269
    """
    return logaddexp(rows.lse, rows.logsumexp()) - rows.sum(rows.share * rows.logit)


def supcon_in(rows: Positives) -> Tensor:
    """[N]: -log of the mean share of a row's positives in the softmax over all columns (Khosla et al. 2020, Eq. 3).

        loss_i = log(sum_p exp(z_p) + exp(lse_i)) - log(sum_p share_p exp(z_p))

    >>> import torch, fastcl
    >>> x = torch.eye(2)
    >>> round(fastcl.multi_positive(x, x, torch.arange(2), temperature=0.5, form=fastcl.supcon_in).item(), 4)
    0.1269
    """
    return logaddexp(rows.lse, rows.logsumexp()) - rows.logsumexp(rows.share)


@registered("MultiPositive", inputs=4)
def multi_positive(
    query: Tensor,  # [N, D]
    positives: Tensor,  # [P, D]
    owner: Tensor,  # [P]
    negative_keys: Tensor | None = None,  # [M, D]
    temperature: float | Tensor = 0.1,  # a number, [] or [N]
    reduction: str = "mean",
    *,
    form: Form = log_out,
    normalize: bool = True,
    in_batch: bool | None = None,
    positive_weight: Tensor | None = None,  # [P]
    weight: Tensor | None = None,  # [N]
) -> Tensor:
    """InfoNCE with several positives for a row, one after the other in one matrix.

        z_p = <q_owner(p), positive_p> / T,    lse_i = log sum_j exp(<q_i, k_j> / T) over the negatives of row i

    Args:
        query: [N, D], float64, float32, bfloat16 or float16.
        positives: [P, D], those of all rows, in any order.
        owner: [P], any integer dtype, the row in [0, N) that each belongs to. From row pointers [N + 1]:
            `torch.repeat_interleave(torch.arange(n), pointers.diff())`.
        negative_keys: [M, D], negatives of all rows. Turns in-batch negatives off unless in_batch=True.
        temperature: T > 0: a number, a 0-d tensor or one value a row [N] (both may learn).
        reduction: "mean" over the N rows, "sum" or "none" ([N]).
        form: a function of `Positives` that returns [N]: `fastcl.log_out`, `log_in`, `supcon_out`, `supcon_in`, or one
            of your own.
        normalize: divide each row of query, positives and negative_keys by its length.
        in_batch: whether the positives of the other rows are negatives. None: True without negative_keys.
        positive_weight: [P], floating, >= 0, the weight of each positive among those of its row; None: 1, so that k
            positives count 1/k each where the form averages.
        weight: [N], any floating dtype, multiplies a row's loss: mean = sum(weight * loss) / N.

    Returns: float32 (float64 for float64 inputs), [] or [N]. A row without positives has loss 0 and sends no gradient,
    and counts in the mean. The N x P and N x M logits are never stored.

    Gradients: query, positives, negative_keys, temperature, positive_weight and weight.

    Errors: TypeError for types and dtypes, ValueError for shapes and values, each naming the argument. An owner out of
    range is a ValueError on the CPU; elsewhere the gather fails instead.

    >>> import torch, fastcl
    >>> query = torch.eye(2)
    >>> positives, owner = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0, 1])
    >>> fastcl.multi_positive(query, positives, owner, temperature=0.5, reduction="none")
    tensor([0.1269, 0.2395])
    """
    check_tensor("query", query, ("N", "D"))
    (n, d), device = query.shape, query.device
    check_tensor("positives", positives, ("P", d), device)
    owner = as_ids("owner", owner, (positives.shape[0],), device).resolve_neg()  # indexing reads through it
    if negative_keys is not None:
        check_negatives(negative_keys, query, "unpaired")
    check_temperature(temperature, n, device)
    check_reduction(reduction)
    check_weight(weight, n, device)
    if positive_weight is not None:
        check_tensor("positive_weight", positive_weight, tuple(owner.shape), device)
        if readable(positive_weight) and (positive_weight < 0).any():
            raise ValueError(f"positive_weight: expected values >= 0, got {positive_weight.min().item()}")
    if not callable(form):
        raise TypeError(f"form: expected a function of Positives, got {type(form).__name__}")
    if readable(owner) and owner.numel():
        low, high = (x.item() for x in torch.aminmax(owner))
        if low < 0 or high >= n:
            raise ValueError(f"owner: expected values in [0, {n}), got {low if low < 0 else high}")
    if normalize:
        if negative_keys is None:
            query, positives = normalized_together(query, positives)
        else:
            query, positives, negative_keys = normalized_together(query, positives, negative_keys)

    scale = inverse(temperature, query, positives)
    of_owner = scale[owner] if isinstance(scale, Tensor) and scale.dim() else scale
    logit = dot(picked(query, owner), positives) * of_owner
    lse: Tensor | None = None
    if negative_keys is not None:
        _, lse = contrast(query, negative_keys, scale=scale)
    if negative_keys is None if in_batch is None else in_batch:
        # A row's own positives are the columns that carry its number.
        _, others = contrast(query, positives, scale=scale, row_id=torch.arange(n, device=device), col_id=owner)
        lse = others if lse is None else logaddexp(lse, others)
    if lse is None:
        raise ValueError("in_batch: expected True or negative_keys, got no source of negatives")
    logit = logit.to(lse)
    each = torch.ones_like(logit) if positive_weight is None else positive_weight.to(logit)
    per_row = form(Positives(logit, lse, owner, each))
    check_tensor("form", per_row, (n,), device)
    alone = torch.zeros(n, dtype=torch.bool, device=device).index_fill(0, owner, True).logical_not()
    return reduced(torch.where(alone, 0.0, per_row), reduction, weight)
