"""Adam that moves only the rows of a `RowTable` that a step has read, to where Adam over the whole table moves them.

The rule is Adam's own (Kingma & Ba 2015), done late: a row that was not read for k steps gets, before it is read again,
the k moves that its momentum would have made in between. With a gradient of zero these are m / (sqrt(v) + eps) times a
number that is the same for all rows last moved at one step, so that one number a step is enough to make up for them.
How eps stands beside a sqrt(v) that fades is kept to first order.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fastcl import row_adam
from fastcl.recsys.models.rowtable import RowTable

SETTLE = 512  # steps between two moments at which no row is late


class _Late:
    """Which rows of a parameter are behind. step: Adam's, of the parameter. at [rows]: the step each row is as of.

    owed [n, 2], float64: since step `settled` + a, at place a: the sum of the learning rates, bias corrections
    included, each times how much m / sqrt(v) had faded by then; and the same times what eps counts for beside it.
    fade [n, 2], float64: by how much m and v fade in a steps, at place a.
    """

    def __init__(self, weight: Tensor, step: int, betas: tuple[float, float]) -> None:
        self.step = self.settled = step
        self.at = torch.full((len(weight),), step, device=weight.device, dtype=torch.int64)
        self.owed = torch.zeros(SETTLE + 1, 2, device=weight.device, dtype=torch.float64)
        ages = torch.arange(SETTLE + 1, device=weight.device, dtype=torch.float64)
        self.fade = torch.tensor(betas, device=weight.device, dtype=torch.float64) ** ages[:, None]


class RowAdam(torch.optim.Adam):
    """torch.optim.Adam, and in a block of `reading` also for tables whose gradients are sparse. The state is Adam's."""

    def __init__(self, parameters: Any, lr: float, betas: tuple[float, float]) -> None:
        super().__init__(parameters, lr=lr, betas=betas, fused=True)
        self._late: dict[nn.Parameter, _Late] = {}

    @contextmanager
    def reading(self, model: nn.Module) -> Iterator[None]:
        """A block in which lookups in the model's row tables find rows that are up to date. At its end all rows are.

        ValueError for beta1 >= sqrt(beta2), with which a row at rest would not come to a stop.
        """
        tables = [module for module in model.modules() if isinstance(module, RowTable)]
        beta1, beta2, _ = self._settings()
        if tables and beta1 >= beta2**0.5:
            raise ValueError(f"betas: expected the first below the root of the second, got {beta1}, {beta2}")
        for table in tables:
            state = self._state(table.weight)
            self._late[table.weight] = self._all_settled(table.weight, int(state["step"].item()))
            table.before = functools.partial(self._catch_up, table.weight)
        try:
            yield
        finally:
            self.settle()
            self._late = {}
            for table in tables:
                table.before = None

    @property
    def settled(self) -> bool:
        """Whether no row is late: weights and state are then what Adam over the whole tables would have."""
        return all(late.step == late.settled for late in self._late.values())

    @torch.no_grad()
    def settle(self) -> None:
        """Brings all rows up to date, whether they are about to be read or not."""
        for weight, late in self._late.items():
            if late.step > late.settled:
                for rows in torch.arange(len(weight), device=weight.device).split(1 << 14):
                    self._catch_up(weight, rows)
                self._late[weight] = self._all_settled(weight, late.step)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step: row tables with a sparse gradient by their rows, all else as Adam does."""
        whole = []
        for group in self.param_groups:
            for weight in group["params"]:
                if weight not in self._late or weight.grad is None:
                    continue
                if weight.grad.is_sparse:
                    self._move(weight, weight.grad.coalesce(), group["lr"])
                    weight.grad = None
                else:
                    whole.append(weight)
        if whole:
            self.settle()
        super().step(closure)
        for weight in whole:
            self._late[weight] = self._all_settled(weight, self._late[weight].step + 1)
        if any(late.step - late.settled >= SETTLE for late in self._late.values()):
            self.settle()

    def _state(self, weight: nn.Parameter) -> dict[str, Tensor]:
        """As torch's own Adam begins it, in the form for `fused`."""
        state: dict[str, Tensor] = self.state[weight]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=weight.device)
            state["exp_avg"] = torch.zeros_like(weight, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(weight, memory_format=torch.preserve_format)
        return state

    def _settings(self) -> tuple[float, float, float]:
        first = self.param_groups[0]
        return *first["betas"], first["eps"]

    def _all_settled(self, weight: Tensor, step: int) -> _Late:
        return _Late(weight, step, self._settings()[:2])

    @torch.no_grad()
    def _catch_up(self, weight: nn.Parameter, rows: Tensor) -> None:
        late, state, eps = self._late[weight], self._state(weight), self._settings()[2]
        moments = state["exp_avg"], state["exp_avg_sq"]
        row_adam.catch_up(weight, *moments, late.at, rows, late.owed, late.fade, late.step, late.settled, eps)

    @torch.no_grad()
    def _move(self, weight: nn.Parameter, grad: Tensor, lr: float) -> None:
        """Rows with a gradient take the step; the others come to owe its rate."""
        late, state, (beta1, beta2, eps) = self._late[weight], self._state(weight), self._settings()
        rows = grad.indices()[0]
        late.step += 1
        state["step"] += 1
        rate, root = lr / (1 - beta1**late.step), (1 - beta2**late.step) ** 0.5
        moments = state["exp_avg"], state["exp_avg_sq"]
        row_adam.move(weight, *moments, rows, grad.values(), beta1, beta2, rate, root, eps)
        late.at[rows] = late.step
        ages = torch.arange(late.step - late.settled, 0, -1, device=weight.device, dtype=torch.float64)
        late.owed[: len(ages), 0] += rate * root * (beta1 / beta2**0.5) ** ages
        late.owed[: len(ages), 1] += rate * root * root * (beta1 / beta2) ** ages
