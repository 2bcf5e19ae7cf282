"""Adam that moves only the rows of a `RowTable` that a step has read, to where Adam over the whole table moves them.

How rows that were away catch up is `fastcl.late`'s; here is the optimiser of a model around it: which tables there are,
a state that is Adam's, and gradients that are dense after all.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fastcl.late import Betas, LateAdam
from fastcl.recsys.models.rowtable import RowTable

SETTLE = 512  # after so many steps all rows are brought up to date


class RowAdam(torch.optim.Adam):
    """torch.optim.Adam that, inside a block of `reading`, also takes sparse gradients of row tables. Its state has the
    form of Adam's.
    """

    def __init__(self, parameters: Any, lr: float, betas: tuple[float, float]) -> None:
        super().__init__(parameters, lr=lr, betas=betas, fused=True)
        self._late: dict[nn.Parameter, LateAdam] = {}

    @contextmanager
    def reading(self, model: nn.Module) -> Iterator[None]:
        """A block in which lookups in the model's row tables find rows that are up to date. At its end all rows are.

        ValueError for betas with which a row at rest would not come to a stop.
        """
        tables = [module for module in model.modules() if isinstance(module, RowTable)]
        try:
            for table in tables:
                self._late[table.weight] = self._begun(table.weight)
                table.before = functools.partial(self._catch_up, table.weight)
            yield
        finally:
            self.settle()
            self._late = {}
            for table in tables:
                table.before = None

    @property
    def settled(self) -> bool:
        """Whether no row is late, so that weights and state are those of Adam over the whole tables."""
        return all(late.count == late.settled for late in self._late.values())

    def settle(self) -> None:
        """Brings all rows up to date, whether they are about to be read or not."""
        for late in self._late.values():
            late.settle()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step. Row tables with a sparse gradient move by rows; all other parameters move as in Adam."""
        whole = []
        for group in self.param_groups:
            for weight in group["params"]:
                late = self._late.get(weight)
                if late is None or weight.grad is None:
                    continue
                if weight.grad.is_sparse:
                    grad = weight.grad.coalesce()
                    late.step(grad.indices()[0], grad.values(), group["lr"])
                    self.state[weight]["step"] += 1
                    weight.grad = None
                else:
                    late.settle()
                    whole.append(late)
        super().step(closure)
        for late in whole:
            _stand(late, late.count + 1)
        if any(late.count - late.settled >= SETTLE for late in self._late.values()):
            self.settle()

    def _begun(self, weight: nn.Parameter) -> LateAdam:
        """On the state of the parameter; where it has none, as torch's own Adam begins it, in the form for `fused`."""
        first = self.param_groups[0]
        late = LateAdam(weight, Betas(first["betas"][0], first["betas"][1], first["eps"]))
        state = self.state[weight]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=weight.device)
            state["exp_avg"], state["exp_avg_sq"] = late.first, late.second
        late.first, late.second = state["exp_avg"], state["exp_avg_sq"]
        _stand(late, int(state["step"].item()))
        return late

    def _catch_up(self, weight: nn.Parameter, rows: Tensor) -> None:
        self._late[weight].read(torch.unique(rows))


def _stand(late: LateAdam, step: int) -> None:
    """All rows are as of `step`."""
    late.count = late.settled = step
    late.at.fill_(step)
