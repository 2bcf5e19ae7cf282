"""The optimiser of a model: Adam over its weights, and of its `RowTable`s the rows that a step reads.

A step fetches the rows that a batch reads, which are then an ordinary leaf of autograd; after the backward pass their
gradient moves these rows (`fastcl.late`), each in the process that has it (rowshare.py). No loop and no files here.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fastcl.late import Betas, LateAdam, RowAdagrad
from fastcl.recsys.models.rowtable import Held, RowTable
from fastcl.recsys.training import rowshare

Rule = LateAdam | RowAdagrad
Wanted = Iterable[tuple[nn.Embedding, Tensor | None]]  # None: all rows
RULES: dict[str, Callable[[Tensor, Betas], Rule]] = {
    "adam": LateAdam,
    "rowwise-adagrad": lambda weight, betas: RowAdagrad(weight, betas.eps),
}


class _Read(NamedTuple):
    rows: Tensor
    route: rowshare.Route


class RowAdam(torch.optim.Adam):
    """torch.optim.Adam over the parameters of `model`, and over the rows of its row tables.

    A step of training is `read`, then loss and backward pass, `step` and `step_rows`, in a block of `reading`. Several
    processes call all of them the same number of times.
    """

    def __init__(self, model: nn.Module, lr: float, betas: tuple[float, float], eps: float = 1e-8) -> None:
        super().__init__(model.parameters(), lr=lr, betas=betas, eps=eps, fused=True)
        self.tables = {name: module for name, module in model.named_modules() if isinstance(module, RowTable)}
        self.rules: dict[str, Rule] = {}
        self._betas = Betas(*betas, eps)
        self._reads: dict[str, list[_Read]] = {name: [] for name in self.tables}

    def share_out(self) -> None:
        """From here on each process has its own rows of each table, and the state of these."""
        for name, table in self.tables.items():
            if name in self.rules:
                continue
            if rowshare.processes.count() > 1:
                table.weight.data = rowshare.own(table.weight.data)
            self.rules[name] = RULES[table.rule](table.weight.data, self._betas)

    @property
    def cut_weights(self) -> set[str]:
        """The names of the weights of which each process has its own rows."""
        return {f"{name}.weight" for name in self.rules}

    @property
    def cut_state(self) -> set[str]:
        """The names of what `row_state` gives of this process's rows alone; the rest is alike in all processes."""
        return {f"{name}/{key}" for name, rule in self.rules.items() for key in rule.PER_ROW}

    @contextmanager
    def reading(self) -> Iterator[None]:
        """A block in which lookups find the rows that `read` has fetched. At its end no row is late."""
        self.share_out()
        for name in self.tables:
            self._hold_nothing(name)
        try:
            yield
        finally:
            for name, table in self.tables.items():
                self.rules[name].settle()
                table.held, table.own, self._reads[name] = None, None, []

    def forget(self) -> None:
        """Lets the next step be the first of its moments, in a block of `reading`."""
        self.state.clear()
        for name, rule in self.rules.items():
            rule.settle()
            table = self.tables[name]
            self.rules[name] = RULES[table.rule](table.weight.data, self._betas)

    @property
    def shared(self) -> bool:
        """Whether the next loss is one that all processes compute together, since it is over rows of all of them."""
        return rowshare.processes.count() > 1 and any(table.own is not None for table in self.tables.values())

    def read(self, wanted: Wanted) -> None:
        """Fetches rows (ids in any order, repeated or not) for the next loss."""
        wanted = list(wanted)
        for name, (held, route) in self._fetched(wanted).items():
            held.rows.requires_grad_()
            self._reads[name].append(_Read(held.rows, route))
        for name, table in self.tables.items():
            if table.own is None and any(own is table and ids is None for own, ids in wanted):
                self.rules[name].settle()
                rank, count = rowshare.processes.rank(), rowshare.processes.count()
                weight = table.weight.data
                ids = torch.arange(len(weight), device=weight.device) * count + rank
                table.own = Held(ids, weight.detach().requires_grad_())

    def look(self, wanted: Wanted) -> None:
        """Fetches rows for lookups that no gradient comes of."""
        self._fetched(wanted)

    def _fetched(self, wanted: Wanted) -> dict[str, tuple[Held, rowshare.Route]]:
        asked: dict[str, list[Tensor]] = {name: [] for name in self.tables}
        for table, ids in wanted:
            for name, own in self.tables.items():
                if own is table and ids is not None:
                    asked[name].append(ids.flatten())
        fetched = {}
        for name, parts in asked.items():
            table = self.tables[name]
            ids = torch.cat(parts).unique() if parts else torch.zeros(0, dtype=torch.int64, device=table.weight.device)
            rows, route = rowshare.fetch(ids, table.num_embeddings, self.rules[name].read)
            table.held = Held(ids, rows)
            fetched[name] = table.held, route
        return fetched

    def step_rows(self, scale: float = 1.0) -> None:
        """Moves the rows that were read since the last step by their gradients times `scale`."""
        for name, table in self.tables.items():
            parts = [
                (read.route.places, rowshare.give_back(read.route, _gradient(read.rows))) for read in self._reads[name]
            ]
            ids, grad = parts[0]
            if len(parts) > 1:
                ids, place = torch.cat([ids for ids, _ in parts]).unique(return_inverse=True)
                grad = grad.new_zeros(len(ids), grad.shape[1]).index_add_(0, place, torch.cat([g for _, g in parts]))
            factor = scale
            if table.own is not None and table.own.rows.grad is not None:
                # The gradient of a loss over all rows is the mean over the processes, that of lookups their sum.
                count = rowshare.processes.count()
                grad = table.own.rows.grad.index_add_(0, ids, grad, alpha=1 / count)
                ids, factor = torch.arange(len(grad), device=grad.device), scale * count
            self.rules[name].step(ids, grad, self.param_groups[0]["lr"] * table.rate, factor)
            self._hold_nothing(name)

    def _hold_nothing(self, name: str) -> None:
        """A lookup of rows that nobody has fetched is an error: they may be late, or elsewhere."""
        weight = self.tables[name].weight.data
        ids = torch.zeros(0, dtype=torch.int64, device=weight.device)
        table = self.tables[name]
        table.held, table.own, self._reads[name] = Held(ids, weight[:0]), None, []

    @contextmanager
    def own_rows(self) -> Iterator[None]:
        """A block, outside of `reading`, in which lookups find this process's rows or, after `look`, those fetched."""
        rank, count = rowshare.processes.rank(), rowshare.processes.count()
        for table in self.tables.values():
            ids = torch.arange(rank, table.num_embeddings, count, device=table.weight.device)
            table.held = Held(ids, table.weight.data)
        try:
            yield
        finally:
            for table in self.tables.values():
                table.held = None

    @contextmanager
    def whole(self) -> Iterator[None]:
        """A block in which each process has all rows of the tables, outside of `reading`."""
        cut = {name: table for name, table in self.tables.items() if len(table.weight) < table.num_embeddings}
        for table in cut.values():
            table.weight.data = rowshare.whole(table.weight.data, table.num_embeddings)
        try:
            yield
        finally:
            for name, table in cut.items():
                table.weight.data = self.rules[name].weight

    def join(self) -> None:
        """Gives each process all rows for good; there are no steps after it."""
        for table in self.tables.values():
            if len(table.weight) < table.num_embeddings:
                table.weight.data = rowshare.whole(table.weight.data, table.num_embeddings)
        self.rules = {}

    def row_state(self) -> dict[str, Tensor]:
        """The state of this process's rows of the tables, as `load_rows` takes it; empty before `share_out`."""
        found: dict[str, Tensor] = {}
        for name, rule in self.rules.items():
            found |= {f"{name}/{key}": getattr(rule, key) for key in rule.PER_ROW}
            found |= {f"{name}/{key}": value for key, value in rule.standing.items()}
        return found

    def load_rows(self, state: Mapping[str, Tensor], where: str = "rows") -> None:
        """Takes over what `row_state` gave, after `share_out`. ValueError, which begins with `where`, for what does not
        fit this process's rows of the tables.
        """
        names = {key.rpartition("/")[0] for key in state}
        like = {key: tensor for key, tensor in self.row_state().items() if key.rpartition("/")[0] in names}
        odd = sorted(state.keys() ^ like.keys())
        if odd:
            raise ValueError(f"{where}: expected the state of the model's row tables, differs in {odd[0]}")
        for key, tensor in state.items():
            name, _, last = key.rpartition("/")
            shape = tensor.shape if last == "owed" else like[key].shape
            if tensor.dtype != like[key].dtype or tensor.shape != shape or not tensor.isfinite().all():
                wanted, got = f"finite {like[key].dtype} {list(shape)}", f"{tensor.dtype} {list(tensor.shape)}"
                raise ValueError(f"{where}: {key}: expected {wanted}, got {got}")
        for name in names:
            counts, owed, at = (state.get(f"{name}/{key}") for key in ("counts", "owed", "at"))
            if counts is None or owed is None or at is None:
                continue
            done, settled = counts.tolist()
            oldest, newest = (int(at.min()), int(at.max())) if len(at) else (settled, done)
            if not 0 <= settled <= oldest <= newest <= done or owed.shape != (done - settled, 2):
                raise ValueError(f"{where}: {name}/counts: expected steps that fit the other tensors, got others")
        for name in names:
            rule = self.rules[name]
            for key in rule.PER_ROW:
                getattr(rule, key).copy_(state[f"{name}/{key}"])
            rule.standing = {key: state[f"{name}/{key}"] for key in rule.standing}


def _gradient(rows: Tensor) -> Tensor:
    return torch.zeros_like(rows) if rows.grad is None else rows.grad
