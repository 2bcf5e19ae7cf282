"""Gradients of gradients of the op: exact for every input, and refused where the keys are gone.

First-order gradients are tested in test_contrast.py, second-order ones of every loss in test_citizenship.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import TOLERANCE, assert_budget, leaves
from problems import BF16, F32, F64, INPUTS, Problem
from torch import Tensor

import fastcl
from fastcl import fallback, reference

pytestmark = pytest.mark.usefixtures("one_thread")


def _finite_outputs(function: Any, names: list[str], rest: dict[str, Any]) -> Any:
    """The outputs that are finite as one vector: finite differences of lse = -inf are NaN."""

    def outputs(*args: Tensor) -> Tensor:
        pos, lse = function(**dict(zip(names, args, strict=True)), **rest)
        return torch.cat([lse[lse.isfinite()], *([] if pos is None else [pos])])

    return outputs


def _gradgradcheck(problem: Problem, names: frozenset[str]) -> bool:
    tensors, rest = problem.build()
    outputs = _finite_outputs(fastcl.contrast, list(tensors), rest)
    return torch.autograd.gradgradcheck(outputs, list(leaves(tensors, names & set(tensors)).values()))


ALL = frozenset(INPUTS)


@pytest.mark.parametrize(
    "problem",
    [
        Problem(3, 4, 2, scale="tensor"),
        Problem(3, 4, 2, scale="rows", bias="finite", ids="many"),
        Problem(4, 3, 2, scale="mixed_rows", bias="some_inf", ids="few"),
        Problem(3, 4, 2, scale="tensor", bias="finite", with_positive=False),
        Problem(3, 4, 2),
    ],
    ids=lambda p: f"scale={p.scale} bias={p.bias} ids={p.ids} positive={p.with_positive}",
)
def test_gradgradcheck(problem: Problem) -> None:
    assert _gradgradcheck(problem, ALL)


@pytest.mark.parametrize("needs", ["key", "positive", "bias", "query,key", "key,scale", "positive,bias"])
def test_gradgradcheck_where_some_inputs_are_constant(needs: str) -> None:
    assert _gradgradcheck(Problem(3, 4, 2, scale="tensor", bias="finite", ids="many"), frozenset(needs.split(",")))


def _second_order(function: Any, problem: Problem, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Gradient of the squared length of the gradient, by input."""
    tensors, rest = problem.build()
    inputs = leaves(tensors, problem.needs, dtype)
    pos, lse = function(**inputs, **rest)
    finite = lse.isfinite()
    total = (lse[finite] ** 2).sum() + (0.0 if pos is None else (pos**2).sum())
    first = torch.autograd.grad(total, list(inputs.values()), create_graph=True)
    second = torch.autograd.grad(sum(g.to(lse.dtype).square().sum() for g in first), list(inputs.values()))
    return dict(zip(inputs, second, strict=True))


@pytest.mark.parametrize("dtype", [F64, F32, BF16], ids=str)
@pytest.mark.parametrize("chunk", [1, 1 << 22])
def test_agrees_with_the_truth(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, chunk: int) -> None:
    monkeypatch.setattr(fallback, "_CHUNK_ELEMENTS", chunk)
    problem = Problem(9, 33, 7, dtype, dtype, scale="rows", bias="some_inf", ids="few")
    ours, truth = _second_order(fastcl.contrast, problem), _second_order(reference.contrast, problem, F64)
    assert ours.keys() == truth.keys()
    for name in truth:
        # Gradients were rounded to 16 bits before they were differentiated again.
        tol = 4 * TOLERANCE[dtype] if dtype == BF16 else 10 * TOLERANCE[dtype]
        assert_budget(name, ours[name], ours[name], truth[name], tol, floor=truth[name].abs().max().item(), factor=0.0)


@pytest.mark.parametrize(
    "problem",
    [
        Problem(3, 0, 4, scale="tensor"),
        Problem(4, 6, 5, bias="all_inf", scale="rows"),
        Problem(4, 6, 5, ids="all_equal", scale="tensor"),
        Problem(9, 1, 5, ids="few", bias="finite", scale="mixed_rows"),
    ],
    ids=lambda p: f"M={p.m} bias={p.bias} ids={p.ids}",
)
def test_empty_rows_give_zero_not_nan(problem: Problem) -> None:
    tensors, rest = problem.build()
    inputs = leaves(tensors, problem.needs)
    pos, lse = fastcl.contrast(**inputs, **rest)
    empty = lse.isneginf()
    assert empty.any()
    upstream = torch.ones_like(lse).requires_grad_()
    wanted = [x for x in inputs.values() if x.requires_grad]
    first = torch.autograd.grad(lse, wanted, upstream, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), [upstream, *wanted], allow_unused=True)
    assert torch.equal(second[0][empty], torch.zeros(int(empty.sum()), dtype=lse.dtype))
    assert torch.equal(second[1][empty], torch.zeros(int(empty.sum()), problem.d, dtype=lse.dtype))
    assert all(g is None or g.isfinite().all() for g in second)


@pytest.mark.parametrize("name", ["query", "scale"])
def test_frozen_keys_are_refused(name: str) -> None:
    tensors, rest = Problem(5, 7, 3, scale="tensor").build()
    inputs = leaves(tensors, frozenset({name}))
    _, lse = fastcl.contrast(**inputs, **rest)
    (grad,) = torch.autograd.grad(lse.square().sum(), inputs[name], create_graph=True)
    with pytest.raises(RuntimeError, match=r"double backward needs the key.*pass a key that requires grad"):
        grad.sum().backward()


def test_create_graph_alone_changes_no_gradient(isa: str) -> None:
    tensors, rest = Problem(33, 40, 9, F32, F32, scale="tensor", bias="finite").build()
    inputs = leaves(tensors, frozenset(tensors))
    pos, lse = fastcl.contrast(**inputs, **rest)
    total = (lse - pos).sum()
    plain = torch.autograd.grad(total, list(inputs.values()), retain_graph=True)
    for a, b in zip(plain, torch.autograd.grad(total, list(inputs.values()), create_graph=True), strict=True):
        assert torch.equal(a, b)


def test_third_order() -> None:
    tensors, rest = Problem(3, 4, 2, scale="tensor", bias="finite").build()
    names = list(tensors)

    def gradients(*args: Tensor) -> tuple[Tensor, ...]:
        total = _finite_outputs(fastcl.contrast, names, rest)(*args).sin().sum()
        return torch.autograd.grad(total, args, create_graph=True)

    assert torch.autograd.gradgradcheck(gradients, list(leaves(tensors, ALL).values()))


def test_functorch_twice() -> None:
    tensors, _ = Problem(4, 6, 3).build()
    key, positive = tensors["key"], tensors["positive"]

    def total(function: Any) -> Any:
        def inner(query: Tensor, key: Tensor) -> Tensor:
            pos, lse = function(query, key, positive, scale=1.3)
            return (lse - pos).square().sum()

        return inner

    func = torch.func
    ours, truth = (
        func.jacrev(func.grad(total(f.contrast), argnums=(0, 1)), argnums=(0, 1)) for f in (fastcl, reference)
    )
    for a, b in zip(ours(tensors["query"], key), truth(tensors["query"], key), strict=True):
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(x, y)


def test_loss_with_a_learning_temperature() -> None:
    tensors, _ = Problem(4, 4, 3).build()

    def value(query: Tensor, positive_key: Tensor, temperature: Tensor) -> Tensor:
        return fastcl.infonce(query, positive_key, temperature=temperature)

    inputs = leaves({**tensors, "t": torch.tensor(0.7, dtype=F64)}, frozenset({"query", "positive", "t"}))
    assert torch.autograd.gradgradcheck(value, [inputs["query"], inputs["positive"], inputs["t"]])


def _second(loss: Any, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    (grad,) = torch.autograd.grad(loss(x), x, create_graph=True)
    return torch.autograd.grad(grad.square().sum(), x)[0]


LEARNS: dict[str, Any] = {"requires_grad": True, "dtype": F64}
SECOND: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "far apart": lambda f, x: f.infonce(x, KEY, temperature=0.01, z_loss=1e-4),
    "one row": lambda f, x: f.infonce(x[:1], KEY[:1], KEY[1:], in_batch=True),
    "none in the batch": lambda f, x: f.infonce(x, KEY, KEY[:, None], in_batch=True, ids=torch.zeros(4).long()),
    "equal": lambda f, x: f.infonce(x, KEY[:1].expand(4, 8), z_loss=0.1, temperature=1.0),
}
KEY = torch.randn(4, 8, generator=torch.Generator().manual_seed(1), **LEARNS)


@pytest.mark.parametrize("name", SECOND)
def test_sums_of_two_have_second_derivatives(name: str) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(2), dtype=F64)
    ours, truth = (_second(lambda x, f=f: SECOND[name](f, x), x) for f in (fastcl, reference))
    torch.testing.assert_close(ours, truth, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("negatives", [None, KEY[:3], KEY[:, None]], ids=["batch", "shared", "private"])
def test_hardness_refuses_second_derivatives(negatives: Tensor | None) -> None:
    for reverse in (_second, lambda loss, x: torch.func.grad(lambda y: torch.func.grad(loss)(y).square().sum())(x)):
        with pytest.raises(RuntimeError, match="hardness: expected no second derivative"):
            reverse(lambda x: fastcl.infonce(x, KEY, negatives, hardness=2.0), KEY)
