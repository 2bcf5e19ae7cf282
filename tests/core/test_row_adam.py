"""The ops that move rows of a table: the compiled part against the plain one, and what it refuses to read or write."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastcl import fallback, row_adam

R, D, STEP, SETTLED = 50, 7, 9, 4


def state(dtype: torch.dtype) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """[weight, exp_avg, exp_avg_sq], at, owed, fade."""
    g = torch.Generator().manual_seed(0)
    tables = [torch.randn(R, D, generator=g, dtype=dtype) for _ in range(2)]
    square = torch.rand(R, D, generator=g, dtype=dtype)
    square[3], tables[1][3] = 0.0, 0.0  # a row that was never moved
    at = torch.randint(SETTLED, STEP + 1, (R,), generator=g)
    owed = torch.rand(8, 2, generator=g, dtype=torch.float64)
    owed[STEP - SETTLED] = 0.0  # nothing is owed since the last step
    fade = torch.tensor([0.9, 0.98], dtype=torch.float64) ** torch.arange(8)[:, None]
    return [*tables, square], at, owed, fade


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_catching_up_is_that_of_the_plain_form(dtype: torch.dtype) -> None:
    rows = torch.tensor([3, 7, 7, 49, 0, 12, 7])  # one comes three times
    found = []
    for run in (row_adam.catch_up, row_adam._catch_up):
        tables, at, owed, fade = state(dtype)
        run(*tables, at, rows, owed, fade, STEP, SETTLED, 1e-8)
        assert (at[rows] == STEP).all()
        found.append([*tables, at])
    for ours, theirs, before in zip(*found, [*state(dtype)[0], state(dtype)[1]], strict=True):
        torch.testing.assert_close(ours, theirs)
        others = [n for n in range(R) if n not in rows.tolist()]
        assert torch.equal(ours[others], before[others])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_step_is_that_of_the_plain_form_and_of_adam(dtype: torch.dtype) -> None:
    rows, grad = torch.tensor([3, 7, 49]), torch.randn(3, D, dtype=dtype)
    found = []
    for run in (row_adam.move, row_adam._move):
        tables, *_ = state(dtype)
        run(*tables, rows, grad, 0.9, 0.98, 1e-2, 0.3, 1e-8)
        found.append(tables)
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)
    whole = torch.nn.Parameter(torch.randn(R, D, dtype=dtype))
    ours = [whole.detach().clone(), torch.zeros(R, D, dtype=dtype), torch.zeros(R, D, dtype=dtype)]
    whole.grad = torch.zeros(R, D, dtype=dtype).index_copy(0, rows, grad)
    torch.optim.Adam([whole], lr=1e-2, betas=(0.9, 0.98)).step()
    row_adam.move(*ours, rows, grad, 0.9, 0.98, 1e-2 / (1 - 0.9), (1 - 0.98) ** 0.5, 1e-8)
    torch.testing.assert_close(ours[0], whole.detach())


def test_no_rows_and_no_features() -> None:
    tables, at, owed, fade = state(torch.float32)
    none = torch.zeros(0, dtype=torch.int64)
    row_adam.catch_up(*tables, at, none, owed, fade, STEP, SETTLED, 1e-8)
    row_adam.move(*tables, none, torch.zeros(0, D), 0.9, 0.98, 1e-2, 0.3, 1e-8)
    assert torch.equal(tables[0], state(torch.float32)[0][0])
    thin = [torch.zeros(R, 0) for _ in range(3)]
    row_adam.move(*thin, torch.tensor([1]), torch.zeros(1, 0), 0.9, 0.98, 1e-2, 0.3, 1e-8)


@pytest.mark.skipif(fallback.FORCED, reason="the compiled kernels alone read raw memory")
def test_what_would_be_read_or_written_elsewhere_is_refused() -> None:
    tables, at, owed, fade = state(torch.float32)
    rows, grad = torch.tensor([1, 2]), torch.zeros(2, D)
    numbers = (0.9, 0.98, 1e-2, 0.3, 1e-8)
    w, m, v = tables
    steps = {
        "rows: expected ids below 50, got 50": (w, m, v, torch.tensor([1, 50]), grad),
        "rows: expected ids below 50, got -1": (w, m, v, torch.tensor([-1, 2]), grad),
        "rows: expected a contiguous int64": (w, m, v, rows.int(), grad),
        r"grad: expected shape \[2, 7\]": (w, m, v, rows, torch.zeros(3, D)),
        "grad: expected the dtype of weight": (w, m, v, rows, grad.double()),
        r"exp_avg: expected shape \[50, 7\]": (w, m[:49], v, rows, grad),
        "exp_avg, exp_avg_sq: expected the dtype": (w, m, v.double(), rows, grad),
        "weight: expected a contiguous tensor": (w.T.contiguous().T, m, v, rows, grad),
        "weight: expected float32 or float64": (w.bfloat16(), m, v, rows, grad.bfloat16()),
    }
    for message, arguments in steps.items():
        with pytest.raises(RuntimeError, match=message):
            row_adam.move(*arguments, *numbers)
    late = {
        "at: expected a contiguous int64 tensor": (at[:49], rows, owed, fade, STEP, SETTLED),
        "at: expected no step before 6": (torch.full((R,), 5), rows, owed, fade, STEP, 6),
        "settled: expected a step from 0 to 9, got 10": (at, rows, owed, fade, STEP, 10),
        "owed, fade: expected a row for each of 6 ages": (at, rows, owed[:5], fade, STEP, SETTLED),
        "owed, fade: expected float64": (at, rows, owed.float(), fade, STEP, SETTLED),
        "rows: expected ids below 50, got 60": (at, torch.tensor([60]), owed, fade, STEP, SETTLED),
    }
    for message, arguments in late.items():
        with pytest.raises(RuntimeError, match=message):
            row_adam.catch_up(w, m, v, *arguments, 1e-8)
    assert torch.equal(w, state(torch.float32)[0][0])
