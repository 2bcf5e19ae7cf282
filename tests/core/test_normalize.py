"""`normalized`, the op in front of the losses: values, first and second gradients, types, layouts, and where it gives
way to plain torch. What losses make of short, long and zero vectors is tested in test_numerics.py.
"""

from __future__ import annotations

import pytest
import torch
from conftest import TOLERANCE
from problems import BF16, DTYPES, F16, F64, lay_out
from torch import Tensor

from fastcl import reference
from fastcl.normalize import normalized, normalized_together


def _rows(n: int, d: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    x = torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=F64)
    return (x * torch.logspace(-1, 1, n, dtype=F64)[:, None]).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("d", [1, 3, 16, 31, 300])
def test_agrees_with_the_truth(isa: str, d: int, dtype: torch.dtype) -> None:
    x = _rows(37, d, dtype).requires_grad_()
    upstream = torch.randn(37, d, generator=torch.Generator().manual_seed(1), dtype=F64)
    exact = x.detach().double().requires_grad_()
    unit = normalized(x)
    truth = reference._normalize(exact)
    computed = torch.float64 if dtype == F64 else torch.float32
    assert unit.dtype == computed
    assert (unit - truth).abs().max() <= TOLERANCE[computed]
    (grad,) = torch.autograd.grad(unit, x, upstream.to(computed))
    (exact_grad,) = torch.autograd.grad(truth, exact, upstream)
    assert grad.dtype == dtype
    error = (grad.double() - exact_grad).norm(dim=1) * exact.norm(dim=1) / upstream.norm(dim=1)
    assert error.max() <= TOLERANCE[dtype]


@pytest.mark.parametrize("layout", ["transposed", "sliced", "offset", "expanded"])
def test_any_layout_and_any_number_of_dimensions(layout: str) -> None:
    x = lay_out(_rows(6, 20, torch.float32), layout)
    cube = x.reshape(2, 3, 20).requires_grad_()
    flat, (same, stacked) = reference._normalize(x), normalized_together(x, cube)
    torch.testing.assert_close(same, flat)
    torch.testing.assert_close(stacked, flat.reshape(2, 3, 20))
    (grad,) = torch.autograd.grad(stacked[0].sum(), cube)
    assert grad.shape == cube.shape
    assert grad[0].abs().max() > 0
    assert (grad[1] == 0).all()


def test_nothing_in_and_nothing_out() -> None:
    for shape in ((0, 4), (3, 0), (2, 0, 5)):
        x = torch.empty(shape, requires_grad=True)
        unit = normalized(x)
        assert unit.shape == shape
        unit.sum().backward()
        assert x.grad is not None
        assert x.grad.shape == shape


def test_a_zero_vector_stays_zero_and_gets_zero_gradients_of_both_orders() -> None:
    x = torch.tensor([[0.0, 0.0], [3.0, 4.0]], dtype=F64, requires_grad=True)
    unit = normalized(x)
    assert unit.tolist() == [[0.0, 0.0], [pytest.approx(0.6), pytest.approx(0.8)]]
    (grad,) = torch.autograd.grad(unit[:, 0].sum(), x, create_graph=True)
    assert grad.tolist() == [[0.0, 0.0], [pytest.approx(0.128), pytest.approx(-0.096)]]
    (second,) = torch.autograd.grad(grad.square().sum(), x)
    assert (second[0] == 0).all()
    assert second[1].abs().min() > 0


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_shows(isa: str, bad: float) -> None:
    x = _rows(3, 40, torch.float32)
    x[1, 7] = bad
    unit = normalized(x)
    assert unit[1, 7].isnan()
    assert unit[::2].isfinite().all()


def test_gradients_of_all_inputs_of_one_call_to_second_order() -> None:
    rows = tuple(_rows(n, 3, F64, n).requires_grad_() for n in (2, 3, 4))
    assert torch.autograd.gradcheck(normalized_together, rows)
    assert torch.autograd.gradgradcheck(normalized_together, rows)


def test_only_what_is_needed_gets_a_gradient() -> None:
    x, fixed, unused = (_rows(3, 4, torch.float32, seed).requires_grad_(seed != 1) for seed in range(3))
    units = normalized_together(x, fixed, unused)
    assert not normalized(fixed).requires_grad
    # Else a loss would compute a gradient for frozen keys, one more product, and keep the keys for it.
    assert [unit.requires_grad for unit in units] == [True, False, True]
    (units[0] * units[1]).sum().backward()
    (alone,) = torch.autograd.grad((normalized(x) * units[1]).sum(), x)
    assert torch.equal(x.grad, alone)
    assert fixed.grad is None
    assert unused.grad is None


def test_transforms_see_the_same_function() -> None:
    x = _rows(4, 5, F64)
    plain = torch.autograd.functional.jacobian(lambda x: reference._normalize(x), x)
    torch.testing.assert_close(torch.func.jacrev(normalized)(x), plain)
    torch.testing.assert_close(torch.func.jacfwd(normalized)(x), plain)
    torch.testing.assert_close(torch.func.vmap(normalized)(x[:, None])[:, 0], reference._normalize(x))


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_sixteen_bit_rows_that_overflow_when_squared(dtype: torch.dtype) -> None:
    unit = normalized(torch.full((1, 4), 60000.0, dtype=dtype))
    torch.testing.assert_close(unit, torch.full((1, 4), 0.5))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [((3, 4, 5), r"x: expected shape \[N, D\], got \[3, 4, 5\]"), ((4,), r"x: expected shape \[N, D\], got \[4\]")],
)
def test_a_call_that_goes_around_python_is_checked(sizes: tuple[int, ...], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        torch.ops.fastcl.normalize_forward(torch.ones(sizes))
    with pytest.raises(RuntimeError, match=r"grad: expected shape \[2, 3\], got \[2, 4\]"):
        torch.ops.fastcl.normalize_backward(torch.ones(2, 4), torch.ones(2, 3), torch.ones(2), torch.ones(2, 3))
