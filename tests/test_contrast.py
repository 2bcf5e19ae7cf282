"""Property tests of the op: values and gradients of `fastcl.contrast` against the float64 truth, and its life in torch.

Every comparison is with `fastcl.reference`; formulas of losses are not tested here.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from conftest import (
    BF16,
    F16,
    F32,
    F64,
    INPUTS,
    TOLERANCE,
    Problem,
    assert_budget,
    assert_peaked,
    gradients,
    leaves,
    problems,
    tolerance,
)
from hypothesis import example, given
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fastcl
from fastcl import reference

pytestmark = pytest.mark.usefixtures("one_thread")


def _run(function: Any, problem: Problem, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    tensors, rest = problem.build()
    inputs = leaves(tensors, problem.needs, dtype)
    pos, lse = function(**inputs, **rest)
    assert (pos is None) == ("positive" not in inputs)
    outputs = [lse] if pos is None else [pos, lse]
    grads = gradients(outputs, list(problem.upstream(lse.dtype))[-len(outputs) :], inputs)
    assert set(grads) == problem.needs & set(inputs)
    for name, g in grads.items():
        assert g.dtype == inputs[name].dtype
    return {"lse": lse} | ({} if pos is None else {"pos": pos}) | {f"grad {n}": g for n, g in grads.items()}


def _check(problem: Problem) -> None:
    ours, plain = _run(fastcl.contrast, problem), _run(reference.contrast, problem)
    truth = _run(reference.contrast, problem, F64)
    wide = F64 if problem.query_dtype == F64 else F32
    # With 16-bit inputs an implementation may keep the weights in 16 bits, so this also holds for float32 gradients.
    narrow = max((problem.query_dtype, problem.key_dtype), key=TOLERANCE.__getitem__)
    largest = problem.largest_logit()
    for name in truth:
        if name in ("pos", "lse"):
            assert ours[name].dtype == wide
            assert_budget(name, ours[name], plain[name], truth[name], tolerance(wide, largest), floor=1.0, factor=0.0)
        else:
            # The gradients of scale and bias are sums over features and rows that may cancel.
            floor = 1.0 if name in ("grad scale", "grad bias") else 0.0
            assert_budget(name, ours[name], plain[name], truth[name], tolerance(narrow, largest), floor)


def test_the_usual_problem_is_peaked() -> None:
    tensors, _ = Problem(n=65, m=64, d=32).build()
    assert_peaked(tensors["query"], tensors["key"], 1.3)


@given(problem=problems())
@example(problem=Problem(m=0, query_dtype=F32, key_dtype=F32))
@example(problem=Problem(n=33, m=65, d=200, query_dtype=BF16, key_dtype=F32, scale="zero_tensor", bias="some_inf"))
@example(problem=Problem(n=33, m=65, d=17, query_dtype=F32, key_dtype=F16, ids="few", scale="mixed_rows"))
def test_values_and_gradients(isa: str, problem: Problem) -> None:
    _check(problem)


@pytest.mark.parametrize("needs", [*INPUTS, "query,key", "key,scale", "positive,bias", "query,key,positive,bias,scale"])
@pytest.mark.parametrize("dtype", [F64, F32, BF16], ids=str)
def test_any_subset_of_inputs_may_need_gradients(isa: str, needs: str, dtype: torch.dtype) -> None:
    for scale in ("tensor", "rows", "zero_tensor", "mixed_rows"):
        _check(Problem(33, 47, 19, dtype, dtype, scale=scale, bias="some_inf", ids="many",
                       needs=frozenset(needs.split(","))))  # fmt: skip


@pytest.mark.parametrize("query_dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("key_dtype", [F32, BF16, F16], ids=str)
def test_mixed_dtypes(isa: str, query_dtype: torch.dtype, key_dtype: torch.dtype) -> None:
    _check(Problem(65, 33, 41, query_dtype, key_dtype, scale="tensor"))


@pytest.mark.parametrize(
    "problem",
    [
        Problem(3, 0, 4, scale="tensor"),
        Problem(3, 0, 4, F32, F32, bias="finite", ids="few"),
        Problem(4, 6, 5, F32, F32, bias="all_inf", scale="rows"),
        Problem(4, 6, 5, BF16, BF16, ids="all_equal", scale="tensor"),
        Problem(40, 2, 5, F32, F32, ids="few", bias="some_inf", scale="mixed_rows"),
        Problem(1, 1, 1, F32, F32, ids="all_equal"),
    ],
    ids=lambda p: f"M={p.m} bias={p.bias} ids={p.ids}",
)
def test_empty_rows_have_lse_minus_infinity_and_no_gradient(isa: str, problem: Problem) -> None:
    _check(problem)
    truth = _run(reference.contrast, problem, F64)
    empty = truth["lse"] == -torch.inf
    assert empty.any()
    assert torch.equal(_run(fastcl.contrast, problem)["lse"] == -torch.inf, empty)


def test_nan_gradient_of_an_empty_row_does_not_spread(isa: str) -> None:
    # Losses on top may send anything into an empty row's lse; the row contributes nothing all the same.
    tensors, rest = Problem(3, 4, 5, F32, F32).build()
    ids = {"row_id": torch.tensor([7, 8, 9]), "col_id": torch.tensor([7, 7, 7, 7])}
    inputs = leaves(tensors, frozenset({"query", "key"}))
    pos, lse = fastcl.contrast(**inputs, **rest, **ids)
    assert lse.isneginf().tolist() == [True, False, False]
    query_grad, key_grad = torch.autograd.grad(lse, list(inputs.values())[:2], torch.tensor([torch.inf, 1.0, 1.0]))
    assert torch.equal(query_grad[0], torch.zeros(5))
    assert key_grad.isfinite().all()


@pytest.mark.parametrize("scale", ["tensor", "rows", "zero_tensor", "mixed_rows"])
@pytest.mark.parametrize("extra", [{}, {"bias": "finite", "ids": "many"}, {"ids": "few"}], ids=str)
def test_gradcheck(isa: str, scale: str, extra: dict[str, Any]) -> None:
    tensors, rest = Problem(4, 6, 3, scale=scale, **extra).build()
    names = list(tensors)
    inputs = leaves(tensors, frozenset(names))

    def outputs(*args: Tensor) -> Tensor:
        pos, lse = fastcl.contrast(**dict(zip(names, args, strict=True)), **rest)
        keep = lse.isfinite()
        assert pos is not None
        assert keep.any()
        return torch.cat([pos, lse[keep]])

    assert torch.autograd.gradcheck(outputs, list(inputs.values()))


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
def test_opcheck(problem: Problem) -> None:
    with _Recorder() as recorder:
        _run(fastcl.contrast, problem)
    assert {str(op) for op, _ in recorder.calls} == {
        "fastcl.contrast_forward.default",
        "fastcl.contrast_backward.default",
    }
    for op, args in recorder.calls:
        torch.library.opcheck(op, args)


def _value_and_gradients(function: Any, inputs: dict[str, Tensor], **rest: Any) -> list[Tensor]:
    pos, lse = function(**inputs, **rest)
    grads = torch.autograd.grad((pos.sin() + lse.cos()).sum(), list(inputs.values()))
    return [pos, lse, *grads]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
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
    truth = _run(reference.contrast, problem, F64)
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


@pytest.mark.parametrize("name", ["query", "key", "positive", "scale", "bias"])
def test_double_backward_is_refused(name: str) -> None:
    tensors, rest = Problem(5, 7, 3, scale="tensor", bias="finite").build()
    inputs = leaves(tensors, frozenset({name}))
    pos, lse = fastcl.contrast(**inputs, **rest)

    def twice() -> None:
        (grad,) = torch.autograd.grad((pos**2).sum() + (lse**2).sum(), inputs[name], create_graph=True)
        grad.sum().backward()

    with pytest.raises(RuntimeError, match="double backward is not supported"):
        twice()


@pytest.mark.parametrize("dtype", [F32, BF16, F64], ids=str)
def test_frozen_keys_are_not_saved(isa: str, dtype: torch.dtype) -> None:
    problem = Problem(33, 65, 17, dtype, dtype, scale="rows", needs=frozenset({"query", "positive", "scale"}))
    expected = _run(fastcl.contrast, problem)
    tensors, rest = problem.build()
    inputs = leaves(tensors, problem.needs)
    pos, lse = fastcl.contrast(**inputs, **rest)
    inputs["key"].fill_(torch.nan)  # the ring buffer moves on
    grads = gradients([pos, lse], list(problem.upstream(lse.dtype)), inputs)
    for name, g in grads.items():
        assert torch.equal(g, expected[f"grad {name}"])


def test_learning_keys_overwritten_in_place_are_refused_not_used() -> None:
    problem = Problem(5, 7, 3, F32, F32)
    tensors, rest = problem.build()
    inputs = leaves(tensors, problem.needs)
    key = inputs["key"] * 1.0
    _, lse = fastcl.contrast(inputs["query"], key, **rest)
    with torch.no_grad():
        key.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        lse.sum().backward()


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_results_repeat_bit_for_bit(isa: str, dtype: torch.dtype) -> None:
    problem = Problem(300, 511, 67, dtype, dtype, scale="rows", bias="finite", ids="many")
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        first, second = _run(fastcl.contrast, problem), _run(fastcl.contrast, problem)
        torch.set_num_threads(1)
        single, again = _run(fastcl.contrast, problem), _run(fastcl.contrast, problem)
    finally:
        torch.set_num_threads(threads)
    for name in first:
        assert torch.equal(first[name], second[name]), f"{name} differs between two runs on two threads"
        assert torch.equal(single[name], again[name]), f"{name} differs between two runs on one thread"
        assert_budget(name, first[name], first[name], single[name], TOLERANCE[dtype], 1.0, 0.0)


_PEAK = """
import re, sys, torch, fastcl
from fastcl import reference
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1000
torch.set_num_threads(2)
def step(function, n):
    q, k, p = (torch.randn(n, 32, requires_grad=True) for _ in range(3))
    pos, lse = function(q, k, p, scale=0.3)
    (lse - pos).sum().backward()
step(fastcl.contrast, 64), step(reference.contrast, 64)
start = peak(); step(fastcl.contrast, 6000); ours = peak() - start
start = peak(); step(reference.contrast, 6000); print(ours, peak() - start)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads peak memory from /proc")
def test_logits_are_never_stored() -> None:
    done = subprocess.run([sys.executable, "-c", _PEAK], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    ours, plain = (float(x) for x in done.stdout.split())
    one_logit_matrix = 6000 * 6000 * 4 / 1e6
    assert plain > one_logit_matrix, "the measurement misses a matrix that is there"
    assert ours < 40.0, f"peak memory grew by {ours:.0f} MB; one logit matrix is {one_logit_matrix:.0f} MB"


def _valid() -> dict[str, Any]:
    return {"query": torch.ones(3, 4), "key": torch.ones(5, 4)}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"query": torch.ones(4)}, ValueError, r"query.*\[4\]"),
        ({"query": torch.ones(2, 3, 4)}, ValueError, r"query.*\[2, 3, 4\]"),
        ({"query": [[1.0] * 4]}, TypeError, "query.*tensor.*list"),
        ({"query": torch.ones(3, 4).long()}, TypeError, "query.*int64"),
        ({"key": torch.ones(5, 3)}, ValueError, r"key.*4.*\[5, 3\]"),
        ({"key": torch.ones(5)}, ValueError, r"key.*\[5\]"),
        ({"key": torch.ones(5, 4).int()}, TypeError, "key.*int32"),
        ({"key": torch.ones(5, 4, device="meta")}, ValueError, "key.*cpu.*meta"),
        ({"positive": torch.ones(2, 4)}, ValueError, r"positive.*3.*\[2, 4\]"),
        ({"positive": torch.ones(3, 5)}, ValueError, r"positive.*4.*\[3, 5\]"),
        ({"positive": torch.ones(3, 4, dtype=torch.complex64)}, TypeError, "positive.*complex64"),
        ({"scale": torch.ones(2)}, ValueError, r"scale.*3.*\[2\]"),
        ({"scale": torch.ones(3, 1)}, ValueError, r"scale.*\[3, 1\]"),
        ({"scale": torch.ones(3).long()}, TypeError, "scale.*int64"),
        ({"scale": "1"}, TypeError, "scale.*str"),
        ({"bias": torch.ones(3)}, ValueError, r"bias.*5.*\[3\]"),
        ({"bias": torch.ones(5).long()}, TypeError, "bias.*int64"),
        ({"bias": 1.0}, TypeError, "bias.*float"),
        ({"row_id": torch.ones(3).long()}, ValueError, "col_id.*row_id|row_id.*col_id"),
        ({"col_id": torch.ones(5).long()}, ValueError, "col_id.*row_id|row_id.*col_id"),
        ({"row_id": torch.ones(3).int(), "col_id": torch.ones(5).long()}, TypeError, "row_id.*int64.*int32"),
        ({"row_id": torch.ones(3).long(), "col_id": torch.ones(5)}, TypeError, "col_id.*int64.*float32"),
        ({"row_id": torch.ones(4).long(), "col_id": torch.ones(5).long()}, ValueError, r"row_id.*3.*\[4\]"),
        ({"row_id": torch.ones(3).long(), "col_id": torch.ones(4).long()}, ValueError, r"col_id.*5.*\[4\]"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_refused_inputs(change: dict[str, Any], error: type[Exception], message: str) -> None:
    fastcl.contrast(**_valid())
    with pytest.raises(error, match=message):
        fastcl.contrast(**{**_valid(), **change})
