"""Property tests of the op: values and gradients of `fastcl.contrast` against the float64 truth, and its life in torch.

Every comparison is with `fastcl.reference`; formulas of losses are not tested here.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from conftest import TOLERANCE, assert_budget, assert_contrast, assert_peaked, gradients, leaves, outputs_and_gradients
from hypothesis import example, given
from problems import BF16, F16, F32, F64, INPUTS, WITH_EMPTY_ROWS, Problem, problems
from torch import Tensor

import fastcl
from fastcl import reference

pytestmark = pytest.mark.usefixtures("one_thread")


def _check(problem: Problem) -> None:
    assert_contrast(fastcl.contrast, problem)


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
    WITH_EMPTY_ROWS,
    ids=lambda p: f"M={p.m} bias={p.bias} ids={p.ids}",
)
def test_empty_rows_have_lse_minus_infinity_and_no_gradient(isa: str, problem: Problem) -> None:
    _check(problem)
    truth = outputs_and_gradients(reference.contrast, problem, F64)
    empty = truth["lse"] == -torch.inf
    assert empty.any()
    assert torch.equal(outputs_and_gradients(fastcl.contrast, problem)["lse"] == -torch.inf, empty)


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


@pytest.mark.parametrize("dtype", [F32, BF16, F64], ids=str)
def test_frozen_keys_are_not_saved(isa: str, dtype: torch.dtype) -> None:
    problem = Problem(33, 65, 17, dtype, dtype, scale="rows", needs=frozenset({"query", "positive", "scale"}))
    expected = outputs_and_gradients(fastcl.contrast, problem)
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
        first, second = outputs_and_gradients(fastcl.contrast, problem), outputs_and_gradients(fastcl.contrast, problem)
        torch.set_num_threads(1)
        single, again = outputs_and_gradients(fastcl.contrast, problem), outputs_and_gradients(fastcl.contrast, problem)
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
