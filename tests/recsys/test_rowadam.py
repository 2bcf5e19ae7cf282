"""Adam by rows against torch's Adam over the whole table: the same weights, whatever rows a step reads."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fastcl.recsys.models.rowtable import RowTable
from fastcl.recsys.training import rowadam
from fastcl.recsys.training.rowadam import RowAdam

pytestmark = pytest.mark.usefixtures("one_thread")
BETAS = (0.9, 0.98)


class Both(nn.Module):
    """A row table and a dense parameter."""

    def __init__(self, rows: int, dim: int, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = RowTable(rows, dim, std=0.02).to(dtype)
        self.scale = nn.Parameter(torch.ones(dim, dtype=dtype))


def trained(steps: int, dtype: torch.dtype, *, rows: int = 300, sparse: bool, stop: int | None = None) -> Both:
    """On rows of very different popularity, some never read, with a rate that rises from 0 and falls to 0.

    sparse: by RowAdam; else torch's Adam on dense gradients. stop: after so many steps, go on with a new optimiser that
    has the state of the first one.
    """
    model = Both(rows, 6, dtype)
    parameters = list(model.parameters())
    made = RowAdam if sparse else lambda p, lr, betas: torch.optim.Adam(p, lr=lr, betas=betas)
    optimizer = made(parameters, lr=1.0, betas=BETAS)
    popularity = 1 / torch.arange(1, rows, dtype=torch.float64) ** 1.3  # the last row is never read

    def some(first: int, last: int) -> None:
        for step in range(first, last):
            optimizer.param_groups[0]["lr"] = 3e-3 * min(step / 20, 1 - step / steps)
            ids = torch.multinomial(popularity, 12, replacement=True)
            target = torch.randn(12, 6, dtype=dtype) * 0.1
            found = model.table(ids) if sparse else model.table.weight[ids]
            ((found * model.scale - target) ** 2).sum().mul(1e-2).backward()
            optimizer.step()
            optimizer.zero_grad()

    if not sparse:
        some(0, steps)
        return model
    with optimizer.reading(model):
        some(0, stop or steps)
    if stop:
        before = optimizer.state_dict()
        optimizer = made(parameters, lr=1.0, betas=BETAS)
        optimizer.load_state_dict(before)
        with optimizer.reading(model):
            some(stop, steps)
    return model


def test_the_weights_are_those_of_adam_over_the_whole_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rowadam, "SETTLE", 70)  # of the 160 steps, so that rows are late beyond it
    start = Both(300, 6, torch.float64).table.weight
    dense = trained(160, torch.float64, sparse=False)
    moved = float((dense.table.weight - start).detach().norm(dim=1).mean())
    # What is left is eps beside a sqrt(v) that fades, in second order.
    for dtype, near in ((torch.float64, 1e-3), (torch.float32, 2e-3)):
        dense, ours = trained(160, dtype, sparse=False), trained(160, dtype, sparse=True)
        assert float((dense.table.weight - ours.table.weight).detach().abs().max()) < near * moved
        torch.testing.assert_close(ours.scale, dense.scale, rtol=1e-3, atol=1e-4)
    assert torch.equal(ours.table.weight[-1], start[-1].float())
    assert moved > 0.01


def test_going_on_with_the_state_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all rows are up to date at both: between two blocks, and where SETTLE steps have passed."""
    monkeypatch.setattr(rowadam, "SETTLE", 40)
    whole, stopped = trained(100, torch.float32, sparse=True), trained(100, torch.float32, sparse=True, stop=80)
    assert torch.equal(whole.table.weight, stopped.table.weight)


def test_a_dense_gradient_is_a_step_of_adam(monkeypatch: pytest.MonkeyPatch) -> None:
    """As several processes give it, after sparse ones."""
    tables = [RowTable(20, 3, std=0.1) for _ in range(2)]
    tables[1].load_state_dict(tables[0].state_dict())
    ours, theirs = RowAdam(tables[0].parameters(), 1e-2, BETAS), torch.optim.Adam(tables[1].parameters(), 1e-2, BETAS)
    with ours.reading(tables[0]):
        for step in range(8):
            ids = torch.arange(step, step + 5)
            for table, optimizer in zip(tables, (ours, theirs), strict=True):
                found = table(ids) if table is tables[0] else table.weight[ids]
                (found - 1).square().sum().backward()
                if table is tables[0] and step % 2:
                    table.weight.grad = table.weight.grad.to_dense()
                optimizer.step()
                optimizer.zero_grad()
            assert ours.settled == bool(step % 2)
    torch.testing.assert_close(tables[0].weight, tables[1].weight, rtol=1e-4, atol=1e-6)


def test_a_row_at_rest_must_come_to_a_stop() -> None:
    table = RowTable(3, 2, std=0.1)
    with (
        pytest.raises(ValueError, match=r"betas: expected 0 < beta1 < beta2, got 0\.9 and 0\.5"),
        RowAdam(table.parameters(), 1e-2, (0.9, 0.5)).reading(table),
    ):
        pass
    assert table.before is None
