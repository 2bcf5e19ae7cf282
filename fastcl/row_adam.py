"""Adam on some rows of a table, in place, as two ops: the moves that resting rows have missed, and a step by gradients.

Ops and their plain form alone, for tables of float32 or float64. The caller, fastcl.recsys.training.rowadam, knows
which rows are late, and what they owe. Nothing here checks more than the compiled part does.
"""

import warnings

import torch
from torch import Tensor

from fastcl import fallback
from fastcl.library import LIBRARY

LIBRARY.define(
    "rows_catch_up(Tensor(a!) weight, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor(d!) at, Tensor rows, "
    "Tensor owed, Tensor fade, int step, int settled, float eps) -> ()"
)
LIBRARY.define(
    "rows_move(Tensor(a!) weight, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor rows, Tensor grad, "
    "float beta1, float beta2, float rate, float root, float eps) -> ()"
)


def _catch_up(
    weight: Tensor,  # [R, D]
    exp_avg: Tensor,  # [R, D]
    exp_avg_sq: Tensor,  # [R, D]
    at: Tensor,  # int64 [R], the step that each row is as of
    rows: Tensor,  # int64 [n], ids, which may come twice
    owed: Tensor,  # float64 [.., 2], by steps since `settled`: the sum of rates, and that times what eps counts for
    fade: Tensor,  # float64 [.., 2], by age: the powers of beta1 and beta2
    step: int,
    settled: int,
    eps: float,
) -> None:
    """Brings rows to the state of `step`: w -= rate m / (sqrt(v) + eps'), m and v fade."""
    since = at[rows]
    late = since < step
    rows, since = rows[late], since[late]
    debt, faded = owed[since - settled], fade[step - since].to(weight.dtype)
    near = eps * torch.where(debt[:, :1] > 0, debt[:, 1:] / debt[:, :1], 1.0).to(weight.dtype)
    m, v = exp_avg.index_select(0, rows), exp_avg_sq.index_select(0, rows)
    moved = m.div(v.sqrt().add_(near)).mul_(debt[:, :1].to(weight.dtype))
    weight.index_copy_(0, rows, weight.index_select(0, rows).sub_(moved))
    exp_avg.index_copy_(0, rows, m.mul_(faded[:, :1]))
    exp_avg_sq.index_copy_(0, rows, v.mul_(faded[:, 1:]))
    at[rows] = step


def _move(
    weight: Tensor,  # [R, D]
    exp_avg: Tensor,  # [R, D]
    exp_avg_sq: Tensor,  # [R, D]
    rows: Tensor,  # int64 [n], distinct
    grad: Tensor,  # [n, D]
    beta1: float,
    beta2: float,
    rate: float,
    root: float,
    eps: float,
) -> None:
    """A step of Adam: w -= rate m / (sqrt(v) / root + eps), with the moments of this step."""
    m = exp_avg.index_select(0, rows).mul_(beta1).add_(grad, alpha=1 - beta1)
    v = exp_avg_sq.index_select(0, rows).mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    exp_avg.index_copy_(0, rows, m)
    exp_avg_sq.index_copy_(0, rows, v)
    moved = m.div_(v.sqrt_().div_(root).add_(eps))
    weight.index_copy_(0, rows, weight.index_select(0, rows).sub_(moved, alpha=rate))


PLAIN = {"rows_catch_up": _catch_up, "rows_move": _move}
for _name, _function in PLAIN.items():
    LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
    if fallback.FORCED:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch remarks that a kernel is replaced
            LIBRARY.impl(_name, _function, "CPU")

catch_up = torch.ops.fastcl.rows_catch_up.default
move = torch.ops.fastcl.rows_move.default
