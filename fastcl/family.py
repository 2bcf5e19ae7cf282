"""How a formula over `Rows` becomes a loss: the arguments that all losses of the family share, around the formula.

How a batch becomes `Rows` is rows.py; the formulas of fastcl itself are in losses.py. No formula is written here.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from fastcl.adjust import NOTHING, Adjustments, Cap, Hardness, Margin
from fastcl.checks import check_weight
from fastcl.ops import Expected
from fastcl.registry import registered
from fastcl.rows import check_batch, reduced, rows_both_ways, rows_of
from fastcl.segments import Negatives, Queue


def over_rows(
    module: str = "", *, beside: Callable[..., float | None] | None = None
) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Makes a loss of the family of a formula over `fastcl.rows.Rows`, and enters it into the registry by its name.

    The loss takes the arguments of `infonce`, then the formula's own, which are given by name. So it has every kind of
    negatives, ids, log q, `symmetric`, `weight` and the rest; `fastcl.distributed.gathered` and `ring` take it, and
    ContrastVAE as the setting `contrast`. fastcl's own losses are written in this way.

    The formula is a function of the rows and of its own arguments that returns one loss for each row, [N]. Of `rows` it
    reads `pos` [N], the positive's logit, and `lse` [N], the log-sum-exp over the negatives, both differentiable;
    `count()` [N] is the number of negatives, `mean()` [N] the mean of the logits of positive and negatives,
    `lse_at(factor)` [N] the log-sum-exp with logits times a factor. A row without negatives has an lse of -inf and
    should get a constant 0: `torch.where(rows.lse == -torch.inf, 0.0, loss)`.

    Args:
        module: the name of the loss's class in `fastcl.nn`, for the losses of fastcl itself; "": it has none.
        beside: for a formula in which lse occurs only as log(a exp(pos) + exp(lse)), times a constant: a function that
            maps the formula's keywords to log a, or to None where they make another formula of it. None for any other
            formula, and where in doubt. Only speed depends on it.

    Raises TypeError for a formula of another form, ValueError for the name of another loss; a loss whose formula
    returns another shape than [N] raises ValueError. Defining the loss again, as in a notebook cell, replaces it.

    >>> import torch, fastcl
    >>> import torch.nn.functional as F
    >>> @fastcl.over_rows()
    ... def poly_infonce(rows, *, epsilon: float = 1.0):  # PolyLoss, Leng et al. 2022
    ...     above = rows.lse - rows.pos
    ...     return F.softplus(above) + epsilon * torch.sigmoid(above)
    >>> round(poly_infonce(torch.eye(2), torch.eye(2), temperature=0.5).item(), 4)  # 0.1269 + 0.1192
    0.2461
    >>> queue = fastcl.NegativeQueue(8, 2)
    >>> _ = queue.push(torch.eye(2))
    >>> round(poly_infonce(torch.eye(2), torch.eye(2), temperature=0.5, queue=queue, epsilon=0.5).item(), 4)
    1.0999
    """

    if not isinstance(module, str):
        raise TypeError(f"module: expected a name, got {module!r}; the decorator has brackets: @fastcl.over_rows()")

    def publish(formula: Callable[..., Tensor]) -> Callable[..., Tensor]:
        loss = _public(formula, beside)
        return registered(module, 3, formula)(loss)

    return publish


def _public(formula: Callable[..., Tensor], beside: Callable[..., float | None] | None) -> Callable[..., Tensor]:
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
        weight: Tensor | None = None,  # [N]
        hardness: Hardness | None = None,
        margin: Margin | None = None,
        cap: Cap | None = None,
        **constants: Any,
    ) -> Tensor:
        check_batch(query, positive_key, negative_keys, temperature, reduction, negative_mode)
        check_weight(weight, query.shape[0], query.device)
        negatives = Negatives(negative_keys, in_batch, queue, ids, negative_ids, log_q, negative_log_q)
        adjust = NOTHING
        if hardness is not None or margin is not None or cap is not None:
            adjust = Adjustments(hardness, margin, cap)
            adjust.check(query.shape[0], query.device)
        # With reduction="none" the gradient that comes back to a row is not known beforehand.
        expected = None
        if beside is not None and reduction != "none":
            other = beside(**constants)
            expected = None if other is None else Expected(other, weight=weight)
        both = rows_both_ways if symmetric else rows_of
        rows = both(query, positive_key, temperature, negatives, expected, adjust, normalize)
        per_row = formula(rows, **constants)
        if not isinstance(per_row, Tensor):
            raise TypeError(f"{formula.__name__}: expected a loss for each row, got {type(per_row).__name__}")
        if per_row.shape != rows.pos.shape:
            what = f"a loss for each row, {list(rows.pos.shape)}, got {list(per_row.shape)}"
            raise ValueError(f"{formula.__name__}: expected {what}")
        if symmetric and (reduction != "mean" or weight is not None):
            per_row = per_row.view(2, -1).mean(0)  # the mean over both directions is that of half their sums
        return reduced(per_row, reduction, weight)

    shared = [p for p in inspect.signature(loss, follow_wrapped=False).parameters.values() if p.name != "constants"]
    own = _own_arguments(formula, [parameter.name for parameter in shared])
    loss.__signature__ = inspect.Signature([*shared, *own], return_annotation=Tensor)  # type: ignore[attr-defined]
    del loss.__dict__["__wrapped__"]  # the formula is no function of the same arguments; it is in the registry
    return loss


def _own_arguments(formula: Callable[..., Tensor], taken: list[str]) -> list[inspect.Parameter]:
    """The arguments of a formula behind its rows."""
    if not callable(formula):
        raise TypeError(f"formula: expected a function of rows, got {formula!r}; write @fastcl.over_rows() above one")
    every = list(inspect.signature(formula).parameters.values())
    if not every or every[0].kind not in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD):
        raise TypeError(f"formula: expected a function of rows, got {formula.__name__} without a first argument")
    for one in every[1:]:
        if one.kind is not one.KEYWORD_ONLY or one.name in taken:
            what = "arguments behind `*` with names of its own"
            raise TypeError(f"formula: expected {what}, got {one.name} in {formula.__name__}")
    return every[1:]
