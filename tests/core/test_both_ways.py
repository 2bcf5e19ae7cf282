"""Symmetric losses: one product serves both directions up to a bound, and two calls of the op beyond it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from calls import FAMILY
from conftest import gradients, leaves
from problems import DTYPES, F32, F64
from torch import Tensor

import fastcl
import fastcl.rows
from fastcl import both_ways, reference

INF, NAN = torch.inf, torch.nan
LARGEST = 2048
LOSSES = list(FAMILY)


def pairs(n: int, d: int, dtype: torch.dtype = F32, seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    query = torch.randn(n, d, generator=g, dtype=F64)
    key = query + 0.7 * torch.randn(n, d, generator=g, dtype=F64)
    temperature = torch.tensor(0.3, dtype=F64 if dtype == F64 else F32)
    return {"query": query.to(dtype), "positive_key": key.to(dtype), "temperature": temperature}


def results(loss: Callable[..., Tensor], tensors: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    inputs = leaves(tensors, frozenset(tensors))
    rows = loss(**inputs, symmetric=True, reduction="none", **options)
    return {"rows": rows.detach(), **gradients([rows], [torch.ones_like(rows)], inputs)}


def two_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fastcl.rows, "from_one_product", lambda query, key: False)


def calls_of(loss: Callable[[], Tensor]) -> dict[str, int]:
    """How often the op's forward and torch's products run in a forward and backward pass."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        loss().backward()
    counts = {event.key: event.count for event in profile.key_averages()}
    return {
        "products": counts.get("aten::mm", 0) + counts.get("aten::addmm", 0),
        "op": sum(n for name, n in counts.items() if name.startswith("fastcl::contrast")),
    }


@pytest.mark.parametrize("loss", LOSSES)
def test_three_products_serve_both_directions(loss: str) -> None:
    x = {name: t.requires_grad_() for name, t in pairs(40, 8).items()}
    found = calls_of(lambda: getattr(fastcl, loss)(**x, symmetric=True))
    assert found == {"products": 3, "op": 0}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("loss", LOSSES)
def test_one_product_equals_two_calls(loss: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    problems = [
        (pairs(n, d, dtype, seed), {"normalize": normalize, "ids": ids})
        for seed, (n, d) in enumerate([(1, 3), (2, 1), (9, 6), (65, 17)])
        for normalize in (True, False)
        for ids in (None, torch.arange(n) % 3, torch.zeros(n, dtype=torch.int32))
    ]
    one = [results(getattr(fastcl, loss), tensors, **options) for tensors, options in problems]
    two_calls(monkeypatch)
    rtol = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    for (tensors, options), found in zip(problems, one, strict=True):
        expected = results(getattr(fastcl, loss), tensors, **options)
        for name, truth in expected.items():
            size = 1 + truth.abs().amax().item()
            torch.testing.assert_close(found[name], truth, rtol=rtol, atol=rtol * size)


@pytest.mark.parametrize("dtype", [F64, F32], ids=str)
def test_every_isa_has_the_textbook(isa: str, dtype: torch.dtype) -> None:
    """Sizes around the widths of vectors and of the pieces in which columns are summed; any strides, any upstream."""
    for seed, n in enumerate((1, 2, 7, 16, 33, 64, 255, 257, 300)):
        tensors = pairs(n, 1 + seed % 5, dtype, seed)
        tensors["query"] = tensors["query"].T.contiguous().T
        for ids in (None, torch.arange(n).flip(0) % max(1, n // 3)):
            ours = results(fastcl.infonce, tensors, normalize=False, ids=ids)
            truth = results(reference.infonce, {k: t.double() for k, t in tensors.items()}, normalize=False, ids=ids)
            for name, expected in truth.items():
                limit = (1e-12 if dtype == F64 else 2e-5) * (1 + expected.abs().amax().item())
                torch.testing.assert_close(ours[name].double(), expected, rtol=limit, atol=limit)


@pytest.mark.parametrize("n", [LARGEST - 1, LARGEST, LARGEST + 1])
def test_around_the_bound(n: int) -> None:
    """The textbook's values and gradients on both sides; N x N numbers are held up to the bound, and none beyond."""
    tensors = pairs(n, 4)
    held: list[int] = []

    def note(t: Tensor) -> Tensor:
        held.append(t.numel())
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        ours = results(fastcl.infonce, tensors)
    truth = results(reference.infonce, {name: t.double() for name, t in tensors.items()})
    for name, expected in truth.items():
        size = 1e-5 * (1 + expected.abs().amax().item())
        torch.testing.assert_close(ours[name].double(), expected, rtol=1e-4, atol=size)
    large = [count for count in held if count > 4 * 4 * n]
    assert large == ([n * n] if n <= LARGEST else [])


def test_infinite_and_nan_inputs_touch_no_more_than_with_two_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    def planted(seed: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        g = torch.Generator().manual_seed(seed)

        def any_of(*values: Any) -> Any:
            return values[int(torch.randint(len(values), (), generator=g))]

        n, d = any_of(1, 2, 5, 33), any_of(1, 3, 16)
        tensors = {
            name: torch.randint(2, 5, (n, d), generator=g).float() * any_of(1, -1) for name in ("query", "positive_key")
        }
        x = tensors[any_of("query", "positive_key")]
        x.view(-1)[int(torch.randint(n * d, (), generator=g))] = any_of(NAN, INF, -INF)
        ids = torch.randint(4, (n,), generator=g) if any_of(True, False) else None
        return tensors, {"temperature": 1.0, "normalize": False, "ids": ids}

    seeds = range(150)
    one = [results(fastcl.infonce, tensors, **options) for tensors, options in map(planted, seeds)]
    two_calls(monkeypatch)
    for seed, found in zip(seeds, one, strict=True):
        tensors, options = planted(seed)
        expected = results(fastcl.infonce, tensors, **options)
        torch.testing.assert_close(found["rows"], expected["rows"], rtol=1e-4, atol=1e-3, equal_nan=True)
        for name in tensors:
            finite = expected[name].isfinite()
            torch.testing.assert_close(found[name][finite], expected[name][finite], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("ids", [None, torch.tensor([0, 1, 1, 2])], ids=["own", "ids"])
def test_gradients_of_gradients(ids: Tensor | None) -> None:
    query, key, temperature = (t.requires_grad_() for t in pairs(4, 3, F64).values())

    def call(*args: Tensor) -> Tensor:
        return fastcl.infonce(args[0], args[1], temperature=args[2], ids=ids, symmetric=True, reduction="none")

    assert torch.autograd.gradcheck(call, (query, key, temperature))
    assert torch.autograd.gradgradcheck(call, (query, key, temperature))


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("key_of", [lambda q: q, lambda q: q.view_as(q), lambda q: q.exp()], ids=["it", "view", "made"])
def test_a_key_that_is_made_of_the_query_counts_once(key_of: Callable[[Tensor], Tensor], normalize: bool) -> None:
    """Whether or not the gradient is to be differentiated again. gradgradcheck would not tell: it differentiates the
    gradient as it came.
    """
    for query in (pairs(4, 3, F64)["query"].requires_grad_(), pairs(4, 3, F64, 1)["query"].requires_grad_() * 2):

        def total(loss: Callable[..., Tensor], x: Tensor = query) -> Tensor:
            return loss(x, key_of(x), temperature=0.3, normalize=normalize, symmetric=True)

        (first,) = torch.autograd.grad(total(fastcl.infonce), query, retain_graph=True)
        (again,) = torch.autograd.grad(total(fastcl.infonce), query, create_graph=True)
        torch.testing.assert_close(again, first)
        (truth,) = torch.autograd.grad(total(reference.infonce), query, create_graph=True)
        torch.testing.assert_close(again, truth)
        second, expected = (torch.autograd.grad(x.square().sum(), query)[0] for x in (again, truth))
        torch.testing.assert_close(second, expected)


def test_autocast_and_the_precision_of_products_change_nothing() -> None:
    tensors = pairs(256, 64)
    expected = results(fastcl.infonce, tensors)
    before = torch.get_float32_matmul_precision()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = results(fastcl.infonce, tensors)
    try:
        torch.set_float32_matmul_precision("medium")
        assert not both_ways.from_one_product(tensors["query"], tensors["positive_key"])
        coarse = results(fastcl.infonce, tensors)
    finally:
        torch.set_float32_matmul_precision(before)
    for name, truth in expected.items():
        assert torch.equal(inside[name], truth)
        torch.testing.assert_close(coarse[name], truth, rtol=1e-4, atol=1e-5)


def test_backward_twice_and_frozen_sides() -> None:
    x = pairs(12, 5)
    query = x["query"].requires_grad_()
    loss = fastcl.infonce(query, x["positive_key"], symmetric=True)
    first = torch.autograd.grad(loss, query, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(loss, query)[0])
    with torch.no_grad():
        assert torch.equal(fastcl.infonce(query, x["positive_key"], symmetric=True), loss)
    key = x["positive_key"].requires_grad_()
    assert calls_of(lambda: fastcl.infonce(query.detach(), key, normalize=False, symmetric=True)) == {
        "products": 2,
        "op": 0,
    }
    both = torch.autograd.grad(fastcl.infonce(query, key, symmetric=True), (query, key))
    assert torch.equal(first, both[0])
