"""Optimiser steps for a few rows of a large table, as ops: Adam done late, and row-wise Adagrad. They read and write
the rows they are given and no others; which rows those are, and where a table is kept, is the caller's.

Adam done late is Adam's own rule (Kingma & Ba 2015). A row with a gradient of zero moves too, by m / (sqrt(v) + eps')
times the learning rate, while m and v fade by powers of the betas. All rows that were last touched at one step move
by the same multiples of their own m / sqrt(v), so that two numbers a step are enough to make up for all these moves
when a row is read next. eps' is what eps is beside the fading sqrt(v): its mean over the moves, which is exact to the
first order in eps.

Row-wise Adagrad keeps one sum of squares a row: of the mean over the row's elements of the squared gradient (the rule
of FBGEMM's exact_rowwise_adagrad).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fastcl import fallback, pages
from fastcl.library import LIBRARY

LIBRARY.define(
    "read_late_rows(Tensor ids, Tensor(a!) weight, Tensor(b!) first, Tensor(c!) second, Tensor(d!) at, Tensor owed, "
    "int settled, int step, float beta1, float beta2, float eps) -> Tensor"
)
LIBRARY.define(
    "step_adam_rows(Tensor ids, Tensor grad, Tensor(a!) weight, Tensor(b!) first, Tensor(c!) second, Tensor(d!) at, "
    "int step, float beta1, float beta2, float eps, float rate, float root, float scale) -> ()"
)
LIBRARY.define(
    "step_adagrad_rows(Tensor ids, Tensor grad, Tensor(a!) weight, Tensor(b!) sum, float rate, float eps, float scale) "
    "-> ()"
)


def _read_late_rows(
    ids: Tensor, weight: Tensor, first: Tensor, second: Tensor, at: Tensor, owed: Tensor, settled: int, step: int,
    beta1: float, beta2: float, eps: float,
) -> Tensor:  # fmt: skip
    since = at.index_select(0, ids).long()
    late = since < step
    rows, since = ids[late], since[late]
    age = (step - since).double()[:, None]
    rates, shares = owed.to(weight.device)[since - settled].unsqueeze(1).unbind(2)
    near = eps * torch.where(rates > 0, shares / rates, 1.0)
    moves, near, fade1, fade2 = (x.to(weight.dtype) for x in (rates, near, beta1**age, beta2**age))
    m, v = first.index_select(0, rows), second.index_select(0, rows)
    weight.index_copy_(0, rows, weight.index_select(0, rows).sub_(m.div(v.sqrt().add_(near)).mul_(moves)))
    first.index_copy_(0, rows, m.mul_(fade1))
    second.index_copy_(0, rows, v.mul_(fade2))
    at.index_fill_(0, rows, step)
    return weight.index_select(0, ids)


def _step_adam_rows(
    ids: Tensor, grad: Tensor, weight: Tensor, first: Tensor, second: Tensor, at: Tensor, step: int,
    beta1: float, beta2: float, eps: float, rate: float, root: float, scale: float,
) -> None:  # fmt: skip
    grad = grad * scale
    m = first.index_select(0, ids).mul_(beta1).add_(grad, alpha=1 - beta1)
    v = second.index_select(0, ids).mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    first.index_copy_(0, ids, m)
    second.index_copy_(0, ids, v)
    moved = m.div_(v.sqrt_().div_(root).add_(eps))
    weight.index_copy_(0, ids, weight.index_select(0, ids).sub_(moved, alpha=rate))
    at.index_fill_(0, ids, step)


def _step_adagrad_rows(
    ids: Tensor, grad: Tensor, weight: Tensor, sum: Tensor, rate: float, eps: float, scale: float
) -> None:
    grad = grad * scale
    squares = sum.index_select(0, ids).add_(grad.square().mean(1))
    sum.index_copy_(0, ids, squares)
    moved = grad.div_(squares.sqrt_().add_(eps)[:, None])
    weight.index_copy_(0, ids, weight.index_select(0, ids).sub_(moved, alpha=rate))


for _function in (_read_late_rows, _step_adam_rows, _step_adagrad_rows):
    _name = _function.__name__.removeprefix("_")
    LIBRARY.impl(_name, fallback.kernel(_function), "CompositeExplicitAutograd")
    if fallback.FORCED:
        LIBRARY.impl(_name, fallback.kernel(_function), "CPU", allow_override=True)

read_late_rows = torch.ops.fastcl.read_late_rows.default
step_adam_rows = torch.ops.fastcl.step_adam_rows.default
step_adagrad_rows = torch.ops.fastcl.step_adagrad_rows.default


class Betas(NamedTuple):
    """Adam's constants. beta1 < beta2, or a row at rest would not come to a stop."""

    first: float = 0.9
    second: float = 0.98
    eps: float = 1e-8


BETAS = Betas()


class LateAdam:
    """Adam over a table [rows, D], of which a step moves some rows: `read` them, then `step` with their gradient.

    State, all of it needed to go on: `first` and `second` [rows, D], Adam's moments; `at` int32 [rows], the step that
    each row is as of (these three are PER_ROW); `count`, the steps done; `settled`, the step at which no row was late;
    `owed` float64 [steps, 2] (these three are in `standing`).

    ValueError for beta1 >= beta2.

    >>> table = torch.ones(4, 2)
    >>> adam = LateAdam(table)
    >>> rows = adam.read(torch.tensor([1, 3]))
    >>> adam.step(torch.tensor([1, 3]), torch.ones(2, 2), lr=0.5)
    >>> adam.settle()  # before all rows are read
    >>> [round(value, 4) for value in table[:, 0].tolist()]
    [1.0, 0.5, 1.0, 0.5]
    """

    PER_ROW = ("first", "second", "at")

    def __init__(self, weight: Tensor, betas: Betas = BETAS) -> None:
        ratios = betas.first / betas.second**0.5, betas.first / betas.second
        ratio = max(ratios)
        if not 0 < ratio < 1:
            raise ValueError(f"betas: expected 0 < beta1 < beta2, got {betas.first} and {betas.second}")
        self.weight, self.betas, self.count, self.settled = weight, betas, 0, 0
        shape, device = tuple(weight.shape), weight.device
        self.first, self.second = (pages.zeros(shape, weight.dtype, device) for _ in range(2))
        self.at = pages.zeros(shape[:1], torch.int32, device)
        self.owed = torch.zeros(0, 2, dtype=torch.float64, device="cpu")
        # How far m / sqrt(v) and m / v have faded after so many steps. What is older moves less than 1e-9 of its first
        # move.
        ages = torch.arange(1, math.ceil(math.log(1e-9) / math.log(ratio)) + 1, dtype=torch.float64, device="cpu")
        self._fade = (torch.tensor(ratios, dtype=torch.float64, device="cpu") ** ages[:, None]).flip(0)

    @property
    def standing(self) -> dict[str, Tensor]:
        """What is not of single rows: `owed`, and int64 [count, settled]. To be set from what it gave."""
        counts = torch.tensor([self.count, self.settled], device="cpu")
        return {"owed": self.owed[: self.count - self.settled], "counts": counts}

    @standing.setter
    def standing(self, found: dict[str, Tensor]) -> None:
        self.count, self.settled = map(int, found["counts"].tolist())
        self.owed = found["owed"].clone()

    @torch.no_grad()
    def read(self, ids: Tensor) -> Tensor:
        """The rows ids [n], distinct, as dense Adam would have them now: [n, D]."""
        table = self.weight, self.first, self.second, self.at
        return read_late_rows(ids, *table, self.owed, self.settled, self.count, *self.betas)

    @torch.no_grad()
    def step(self, ids: Tensor, grad: Tensor, lr: float, scale: float = 1.0) -> None:
        """A step with the gradient `grad` [n, D] times `scale` of rows ids [n], which `read` has read, and zero for all
        others. lr: of this step, >= 0.
        """
        count = self.count + 1
        rate, root = lr / (1 - self.betas.first**count), (1 - self.betas.second**count) ** 0.5
        table = self.weight, self.first, self.second, self.at
        step_adam_rows(ids, grad, *table, count, *self.betas, rate, root, scale)
        self.count = count
        self._owe(rate * root, root)

    def _owe(self, rate: float, root: float) -> None:
        """What this step adds to what rows owe that were not in it."""
        steps = self.count - self.settled
        if len(self.owed) < steps:
            self.owed = torch.cat([self.owed, self.owed.new_zeros(max(1024, steps), 2)])
        recent = min(steps, len(self._fade))
        self.owed[steps - recent : steps] += self._fade[-recent:] * self._fade.new_tensor([rate, rate * root])

    @torch.no_grad()
    def settle(self) -> None:
        """Brings all rows up to date."""
        if self.count > self.settled:
            for ids in torch.arange(len(self.weight), device=self.weight.device).split(1 << 14):
                self.read(ids)
        self.settled, self.owed = self.count, self.owed[:0]


class RowAdagrad:
    """Adagrad over a table [rows, D] with one sum of squares a row, `sum` [rows]. Used as `LateAdam` is."""

    PER_ROW = ("sum",)

    def __init__(self, weight: Tensor, eps: float = 1e-8) -> None:
        self.weight, self.eps = weight, eps
        self.sum = pages.zeros(tuple(weight.shape[:1]), weight.dtype, weight.device)

    @torch.no_grad()
    def read(self, ids: Tensor) -> Tensor:
        return self.weight.index_select(0, ids)

    @torch.no_grad()
    def step(self, ids: Tensor, grad: Tensor, lr: float, scale: float = 1.0) -> None:
        step_adagrad_rows(ids, grad, self.weight, self.sum, lr, self.eps, scale)

    @property
    def standing(self) -> dict[str, Tensor]:
        """Nothing beside the rows."""
        return {}

    @standing.setter
    def standing(self, found: dict[str, Tensor]) -> None:
        pass

    def settle(self) -> None:
        """No row is ever late."""
