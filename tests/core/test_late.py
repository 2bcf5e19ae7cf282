"""Adam done late and row-wise Adagrad move rows as their textbook forms move whole tables."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fastcl import fallback, late, reference_rows
from fastcl.late import Betas, LateAdam, RowAdagrad

F64 = torch.float64
Steps = list[tuple[Tensor, Tensor, float]]


def _steps(count: int, rows: int, dim: int, seed: int = 0) -> Steps:
    """Ids, gradients and rates: row 0 is in every step, the last row in none, others by a steep popularity. The rates
    begin and end at 0."""
    g = torch.Generator().manual_seed(seed)
    popularity = 1 / torch.arange(1, rows, dtype=F64) ** 1.3
    found = []
    for step in range(count):
        others = torch.multinomial(popularity[1:], 6, generator=g) + 1
        ids = torch.cat([torch.zeros(1, dtype=torch.int64), others.unique()])
        found.append((ids, torch.randn(len(ids), dim, generator=g, dtype=F64) * 1e-3, 3e-3 * min(step / 20, 1.0)))
    return [*found, (*found[-1][:2], 0.0)]


def _dense(steps: Steps, rows: int) -> list[tuple[Tensor, float]]:
    return [(torch.zeros(rows, g.shape[1], dtype=F64).index_copy_(0, ids, g), lr) for ids, g, lr in steps]


def _moved(rule: LateAdam | RowAdagrad, steps: Steps) -> Tensor:
    for ids, grad, lr in steps:
        assert torch.equal(rule.read(ids), rule.weight[ids])
        rule.step(ids, grad.to(rule.weight.dtype) * 2, lr, scale=0.5)
    rule.settle()
    return rule.weight


@pytest.mark.parametrize(
    ("dtype", "eps", "tolerance"),
    [(F64, 1e-12, 1e-8), (F64, 1e-8, 4e-5), (torch.float32, 1e-12, 3e-7)],
    ids=str,
)
@pytest.mark.parametrize("dim", [1, 8, 19])
def test_late_adam_is_adam(isa: str, dim: int, dtype: torch.dtype, eps: float, tolerance: float) -> None:
    steps, start = _steps(250, 60, dim), torch.randn(60, dim, generator=torch.Generator().manual_seed(1), dtype=F64)
    start *= 0.02
    betas = Betas(0.9, 0.98, eps)
    found = _moved(LateAdam(start.to(dtype, copy=True), betas), steps)
    truth = reference_rows.adam(start.to(dtype), _dense(steps, 60), *betas)
    assert (found.double() - truth).abs().max() < tolerance
    assert (truth - start).norm(dim=1).median() > 0.01
    assert torch.equal(found[-1].double(), start[-1].to(dtype).double())


@pytest.mark.parametrize(("dtype", "tolerance"), [(F64, 1e-13), (torch.float32, 3e-7)], ids=str)
@pytest.mark.parametrize("dim", [1, 8, 19])
def test_row_adagrad_is_its_textbook_form(isa: str, dim: int, dtype: torch.dtype, tolerance: float) -> None:
    steps, start = _steps(60, 30, dim), torch.randn(30, dim, generator=torch.Generator().manual_seed(1), dtype=F64)
    start *= 0.02
    found = _moved(RowAdagrad(start.to(dtype, copy=True)), steps)
    truth = reference_rows.rowwise_adagrad(start.to(dtype), _dense(steps, 30), 1e-8)
    assert (found.double() - truth).abs().max() < tolerance


@settings(max_examples=30)
@given(gaps=st.lists(st.integers(1, 120), min_size=1, max_size=8), settle=st.integers(0, 200))
def test_a_row_may_be_away_for_any_time(gaps: list[int], settle: int) -> None:
    """Row 0 has a gradient in every step, row 1 after each gap; at one step all rows are read in between."""
    betas, start = Betas(0.9, 0.98, 1e-12), torch.tensor([[0.3, -0.1], [0.2, 0.5]], dtype=F64)
    returns = {sum(gaps[: n + 1]) for n in range(len(gaps))}
    adam, dense = LateAdam(start.clone(), betas), []
    for step in range(sum(gaps) + 1):
        ids = torch.tensor([0, 1] if step in returns else [0])
        grad = torch.tensor([[0.1, -0.2], [0.05, 0.3]], dtype=F64)[: len(ids)] * (1 + step % 3)
        adam.read(ids)
        adam.step(ids, grad, 1e-2)
        dense.append((torch.zeros(2, 2, dtype=F64).index_copy_(0, ids, grad), 1e-2))
        if step == settle:
            adam.settle()
    adam.settle()
    truth = reference_rows.adam(start, dense, *betas)
    assert (adam.weight - truth).abs().max() < 1e-8


def test_compiled_passes_agree_with_the_fallback() -> None:
    steps = _steps(80, 40, 11)
    found = []
    for read, adam, adagrad in (
        (late.read_late_rows, late.step_adam_rows, late.step_adagrad_rows),
        (late._read_late_rows, late._step_adam_rows, late._step_adagrad_rows),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(late, "read_late_rows", read)
            patch.setattr(late, "step_adam_rows", adam)
            patch.setattr(late, "step_adagrad_rows", adagrad)
            start = torch.linspace(-1, 1, 440, dtype=F64).view(40, 11)
            rules = LateAdam(start.clone()), RowAdagrad(start.clone())
            found.append([_moved(rule, steps) for rule in rules])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-13)


@pytest.mark.parametrize("rule", [LateAdam, RowAdagrad])
def test_a_default_device_changes_nothing(rule: type[LateAdam | RowAdagrad]) -> None:
    steps, start = _steps(20, 30, 4), torch.linspace(-1, 1, 120, dtype=F64).view(30, 4)
    expected = _moved(rule(start.clone()), steps)
    with torch.device("meta"):
        assert torch.equal(_moved(rule(start.clone()), steps), expected)


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="betas: expected 0 < beta1 < beta2, got 0.99 and 0.9"):
        LateAdam(torch.zeros(2, 2), Betas(0.99, 0.9))


@pytest.mark.skipif(fallback.FORCED, reason="the compiled kernels alone read raw memory")
def test_rows_that_are_not_in_the_table_are_never_read() -> None:
    adam = LateAdam(torch.zeros(5, 3))
    one, grad = torch.tensor([1]), torch.zeros(1, 3)
    for ids in (torch.tensor([5]), torch.tensor([-1]), torch.tensor([1], dtype=torch.int32), torch.tensor([[1]])):
        with pytest.raises(RuntimeError, match="ids: expected"):
            adam.read(ids)
        with pytest.raises(RuntimeError, match="ids: expected"):
            late.step_adagrad_rows(ids, grad, adam.weight, torch.zeros(5), 0.1, 1e-8, 1.0)
    with pytest.raises(RuntimeError, match="grad: expected shape"):
        adam.step(one, torch.zeros(2, 3), 0.1)
    adam.at[1] = 9
    with pytest.raises(RuntimeError, match="at: expected steps 0 to 0, got 9"):
        adam.read(one)
    adam.at = torch.zeros(5, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="at: expected a contiguous int32"):
        adam.read(one)
    with pytest.raises(RuntimeError, match="sum: expected"):
        late.step_adagrad_rows(one, grad, adam.weight, torch.zeros(4), 0.1, 1e-8, 1.0)
