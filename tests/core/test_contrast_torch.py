"""The op as a citizen of torch: opcheck, compile, no_grad, autocast, backward twice, checkpoint, torch.func.

Values over many shapes and types are tested in test_contrast.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo.testing
from conftest import TOLERANCE, assert_budget, leaves, outputs_and_gradients
from problems import BF16, F32, F64, Problem
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fastcl
from fastcl import fallback, ops, reference

pytestmark = pytest.mark.usefixtures("one_thread")


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func.namespace == "fastcl":
            self.calls.append((func, tuple(a.detach().clone() if isinstance(a, Tensor) else a for a in args)))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "problem",
    [
        Problem(5, 7, 3, F32, F32, scale="tensor", bias="finite", ids="many"),
        Problem(5, 7, 3, BF16, BF16, with_positive=False, needs=frozenset({"query"})),
        Problem(5, 7, 3, F64, F64, scale="rows", needs=frozenset({"key"})),
    ],
    ids=["everything", "query only", "key only"],
)
@pytest.mark.parametrize("packed", [True, False])
def test_opcheck(problem: Problem, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if packed and fallback.FORCED:
        pytest.skip("the op has compiled kernels alone")
    monkeypatch.setattr(ops, "packs", lambda query: packed)
    with _Recorder() as recorder:
        outputs_and_gradients(fastcl.contrast, problem)
    assert {str(op) for op, _ in recorder.calls} == {
        f"fastcl.contrast_{'packed_' * packed}forward.default",
        f"fastcl.contrast_{'packed_' * packed}backward.default",
    }
    for op, args in recorder.calls:
        torch.library.opcheck(op, args)


def _value_and_gradients(function: Any, inputs: dict[str, Tensor], **rest: Any) -> list[Tensor]:
    pos, lse = function(**inputs, **rest)
    grads = torch.autograd.grad((pos.sin() + lse.cos()).sum(), list(inputs.values()))
    return [pos, lse, *grads]


@pytest.mark.parametrize("backend", [pytest.param("aot_eager", marks=pytest.mark.slow), "inductor"])
def test_compile_fullgraph_with_dynamic_shapes(backend: str) -> None:
    torch._dynamo.reset()
    graphs = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(fastcl.contrast, fullgraph=True, dynamic=True, backend=graphs)
    for n, m, d in [(5, 7, 3), (6, 9, 4), (13, 8, 5)]:
        tensors, rest = Problem(n, m, d, F32, F32, scale="tensor", bias="finite", ids="many").build()
        inputs = leaves(tensors, frozenset(tensors))
        for a, b in zip(
            _value_and_gradients(compiled, inputs, **rest),
            _value_and_gradients(fastcl.contrast, inputs, **rest),
            strict=True,
        ):
            torch.testing.assert_close(a, b)
    assert graphs.frame_count == 1


def test_compile_without_gradients_and_without_positive() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k: fastcl.contrast(q, k, scale=2.0)[1], fullgraph=True, backend="aot_eager")
    tensors, _ = Problem(5, 7, 3, F32, F32).build()
    q, k = tensors["query"], tensors["key"]
    torch.testing.assert_close(compiled(q, k), fastcl.contrast(q, k, scale=2.0)[1])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_grad(isa: str, mode: Any) -> None:
    problem = Problem(33, 40, 9, F32, F32, scale="tensor")
    tensors, rest = problem.build()
    with mode():
        pos, lse = fastcl.contrast(**leaves(tensors, problem.needs), **rest)
    assert not pos.requires_grad
    assert not lse.requires_grad
    truth = outputs_and_gradients(reference.contrast, problem, F64)
    assert_budget("pos", pos, pos, truth["pos"], TOLERANCE[F32], 1.0, 0.0)
    assert_budget("lse", lse, lse, truth["lse"], TOLERANCE[F32], 1.0, 0.0)


def test_autocast() -> None:
    # The op takes the 16-bit rows autocast produces together with float32 rows, and returns float32 either way.
    problem = Problem(33, 40, 16, F32, F32, with_positive=False)
    tensors, _ = problem.build()
    weight = torch.eye(16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        encoded = tensors["query"] @ weight
        assert encoded.dtype == BF16
        _, lse = fastcl.contrast(encoded, tensors["key"])
        _, both_wide = fastcl.contrast(tensors["query"], tensors["key"])
    assert lse.dtype == both_wide.dtype == F32
    _, expected = reference.contrast(encoded.detach().double(), tensors["key"].double())
    assert_budget("lse", lse, lse, expected, TOLERANCE[BF16], 1.0, 0.0)
    (grad,) = torch.autograd.grad(lse.sum(), weight)
    w = torch.eye(16, dtype=F64, requires_grad=True)
    _, lse64 = reference.contrast(tensors["query"].double() @ w, tensors["key"].double())
    (truth,) = torch.autograd.grad(lse64.sum(), w)
    assert grad.dtype == F32
    assert_budget("grad weight", grad, grad, truth, 2 * TOLERANCE[BF16], floor=1.0, factor=0.0)


def test_backward_twice_gives_the_same_gradients(isa: str) -> None:
    problem = Problem(33, 40, 9, F32, F32, scale="tensor", bias="finite")
    tensors, rest = problem.build()
    inputs = leaves(tensors, problem.needs)
    pos, lse = fastcl.contrast(**inputs, **rest)
    upstream = problem.upstream(F32)
    first = torch.autograd.grad([pos, lse], list(inputs.values()), upstream, retain_graph=True)
    torch.autograd.grad([pos, lse], list(inputs.values()), [2 * u for u in upstream], retain_graph=True)
    third = torch.autograd.grad([pos, lse], list(inputs.values()), upstream)
    for a, b in zip(first, third, strict=True):
        assert torch.equal(a, b)


def test_non_reentrant_checkpoint() -> None:
    tensors, rest = Problem(33, 40, 9, F32, F32, scale="tensor").build()
    inputs = leaves(tensors, frozenset(tensors))

    def checkpointed(**kwargs: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(fastcl.contrast, use_reentrant=False, **kwargs)

    for a, b in zip(
        _value_and_gradients(checkpointed, inputs, **rest),
        _value_and_gradients(fastcl.contrast, inputs, **rest),
        strict=True,
    ):
        assert torch.equal(a, b)


def test_func_grad_and_vmap_of_grad() -> None:
    tensors, _ = Problem(5, 7, 3, scale="tensor").build()
    key, positive, scale = tensors["key"], tensors["positive"], tensors["scale"]

    def total(function: Any) -> Any:
        def inner(query: Tensor, scale: Tensor) -> Tensor:
            pos, lse = function(query, key, positive, scale=scale)
            return (lse - pos).sum()

        return inner

    ours, truth = (torch.func.grad(total(f.contrast), argnums=(0, 1)) for f in (fastcl, reference))
    for a, b in zip(ours(tensors["query"], scale), truth(tensors["query"], scale), strict=True):
        torch.testing.assert_close(a, b)
    queries = torch.stack([tensors["query"], tensors["query"].flip(0), 2 * tensors["query"]])
    scales = torch.stack([scale, 2 * scale, -scale])
    for a, b in zip(torch.func.vmap(ours)(queries, scales), torch.func.vmap(truth)(queries, scales), strict=True):
        torch.testing.assert_close(a, b)
