"""The CUDA op: the property tests of the CPU's, and what only many features and another device bring.

Runs on a GPU where torch finds one. Without, test_cuda_host.py runs this file with the kernels in an emulator (the
device is then "cpu"). Borrowed tests make their inputs on the CPU; `moved` takes each call to the device and back.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import test_contrast
import test_contrast_torch
import test_corners
import test_losses
import test_pairwise
import torch
from conftest import assert_contrast, leaves, outputs_and_gradients
from hypothesis import example, given
from problems import BF16, F16, F32, F64, Problem, problems
from test_cuda_kernels import check_softplus
from test_models import OPTIONS, histories, items
from torch import Tensor
from torch.utils._pytree import tree_map

import fastcl
from fastcl import fallback, library, ops, ops_autograd, ops_pairwise, rows
from fastcl.recsys import CLRec, SASRec

EMULATED = "FASTCL_EMULATED_OP" in os.environ
DEVICE = "cpu" if EMULATED else "cuda"
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not (EMULATED or torch.cuda.is_available()), reason="torch finds no CUDA device here"),
]
TAKEN = ("contrast", "softplus_sum", *test_losses.LOSSES)


def moved(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` on DEVICE, for arguments and results on the CPU; gradients find their way back."""

    def there(x: Any) -> Any:
        return x.to(DEVICE) if isinstance(x, Tensor) else copy.deepcopy(x).to(DEVICE) if hasattr(x, "push") else x

    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*tree_map(there, args), **tree_map(there, kwargs))
        return tree_map(lambda x: x.cpu() if isinstance(x, Tensor) else x, result)

    return call


@pytest.fixture(autouse=True)
def _on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TAKEN:
        monkeypatch.setattr(fastcl, name, moved(getattr(fastcl, name)))
    if EMULATED:  # as on a CUDA device, which a tensor's device does not tell here
        monkeypatch.setattr(rows, "takes_frozen", lambda query: False)


@pytest.fixture
def isa() -> str:
    """In the place of conftest's: instruction sets of the CPU do not matter here."""
    return "none"


# Borrowed as they are.
test_values_and_gradients = test_contrast.test_values_and_gradients
test_any_subset_of_inputs_may_need_gradients = test_contrast.test_any_subset_of_inputs_may_need_gradients
test_mixed_dtypes = test_contrast.test_mixed_dtypes
test_empty_rows = test_contrast.test_empty_rows_have_lse_minus_infinity_and_no_gradient
test_nan_gradient_of_an_empty_row = test_contrast.test_nan_gradient_of_an_empty_row_does_not_spread
test_gradcheck = test_contrast.test_gradcheck
test_opcheck = test_contrast_torch.test_opcheck
test_without_grad = test_contrast_torch.test_without_grad
test_autocast = test_contrast_torch.test_autocast
test_backward_twice = test_contrast_torch.test_backward_twice_gives_the_same_gradients
test_func_grad_and_vmap_of_grad = test_contrast_torch.test_func_grad_and_vmap_of_grad
test_layout_changes_no_bit = test_corners.test_layout_changes_no_bit
test_any_storage_offset = test_corners.test_any_storage_offset
test_losses_equal_the_textbook = test_losses.test_equals_the_textbook_on_every_isa
test_softplus_sums_of_shapes = test_pairwise.test_every_isa
test_softplus_sums_of_extreme_logits = test_pairwise.test_extreme_logits_neither_overflow_nor_vanish
test_gradcheck_of_softplus_sums = test_pairwise.test_gradcheck_and_gradgradcheck


@given(problem=problems())
@example(problem=Problem(33, 31, 1, BF16, BF16, layout="expanded", with_positive=False, ids="few", seed=2))
def test_softplus_sums(problem: Problem) -> None:
    check_softplus(fastcl, problem)


def test_it_is_the_cuda_op_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fallback, "chunks", lambda n, m: pytest.fail("the chunked path ran"))
    tensors, rest = Problem(5, 7, 3, F32, F32).build()
    for x in fastcl.contrast(**leaves(tensors, frozenset(tensors)), **rest):
        x.sum().backward(retain_graph=True)
    fastcl.softplus_sum(**leaves({k: tensors[k] for k in ("query", "key")}, frozenset({"key"}))).sum().backward()
    if not EMULATED:
        assert fastcl.config()["cuda"].startswith("compiled kernels")


@pytest.mark.parametrize("dtype", [F32, BF16, F16, F64], ids=str)
@pytest.mark.parametrize(
    "problem",
    [
        Problem(33, 130, 257, scale="tensor"),
        Problem(130, 33, 300, scale="rows", bias="some_inf", ids="few"),
        Problem(3, 0, 300, scale="tensor", bias="finite", ids="few"),
        Problem(9, 11, 513, bias="finite", with_positive=False, needs=frozenset({"bias"})),
        Problem(9, 11, 513, scale="mixed_rows", needs=frozenset({"key"})),
    ],
    ids=lambda p: f"{p.n}x{p.m}x{p.d} scale={p.scale} bias={p.bias}",
)
def test_more_features_than_one_kernel_holds(dtype: torch.dtype, problem: Problem) -> None:
    facts = {**problem.__dict__, "query_dtype": dtype, "key_dtype": dtype}
    assert_contrast(fastcl.contrast, Problem(**facts))


@pytest.mark.parametrize("d", [4, 300])
def test_many_features_in_mixed_dtypes(d: int) -> None:
    for query_dtype, key_dtype in ((F32, BF16), (F16, F32), (BF16, F16)):
        test_pairwise.check(Problem(33, 20, d, query_dtype, key_dtype, scale="rows", bias="finite", ids="many"))
        assert_contrast(fastcl.contrast, Problem(33, 20, d, query_dtype, key_dtype, scale="tensor", bias="finite"))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("d", [67, 300])
def test_results_repeat_bit_for_bit(d: int, dtype: torch.dtype) -> None:
    problem = Problem(70, 211, d, dtype, dtype, scale="rows", bias="finite", ids="many")
    first, second = (outputs_and_gradients(fastcl.contrast, problem) for _ in range(2))
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


@pytest.mark.parametrize("d", [5, 300])
def test_no_rows(d: int) -> None:
    query, key = torch.empty(0, d, device=DEVICE), torch.randn(4, d, device=DEVICE)
    bias = torch.zeros(4, device=DEVICE)
    inputs = [x.requires_grad_() for x in (query, key, bias)]
    pos, lse = ops.contrast(query, key, query, bias=bias)
    assert pos is not None
    assert pos.shape == lse.shape == (0,)
    for x, grad in zip(inputs, torch.autograd.grad(lse.sum() + pos.sum(), inputs), strict=True):
        assert torch.equal(grad, torch.zeros_like(x))
    total = ops_pairwise.softplus_sum(query, key, bias=bias)
    assert total.shape == (0,)
    for x, grad in zip(inputs, torch.autograd.grad(total.sum(), inputs), strict=True):
        assert torch.equal(grad, torch.zeros_like(x))


@pytest.mark.parametrize("d", [17, 300])
def test_a_queue_may_be_overwritten_before_backward(d: int) -> None:
    g = torch.Generator().manual_seed(0)
    query, key = (torch.randn(9, d, generator=g).to(DEVICE).requires_grad_() for _ in range(2))
    rows = torch.randn(20, d, generator=g).to(DEVICE)
    found = []
    for overwrite in (False, True):
        queue = fastcl.NegativeQueue(20, d).to(DEVICE)
        queue.push(rows)
        loss = fastcl.losses.infonce(query, key, queue=queue)
        if overwrite:
            queue.push(torch.full((20, d), torch.nan, device=DEVICE))
        found.append(torch.autograd.grad(loss, [query, key]))
    for before, after in zip(*found, strict=True):
        assert before.isfinite().all()
        assert torch.equal(before, after)


@pytest.mark.parametrize("model_class", [CLRec, SASRec])
def test_models_train_as_on_the_chunked_path(model_class: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = []
    for chunked in (False, True):
        if chunked:
            monkeypatch.setattr(ops_autograd, "forward_op", fallback.forward)
            monkeypatch.setattr(ops_autograd, "backward_op", fallback.backward)
        options = {"negatives": 40} if model_class is CLRec else {}
        model = model_class(items(), seed=1, dropout=0.0, batch=16, **options, **OPTIONS).to(DEVICE)
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for batch, _ in zip(model.batches(histories(), np.random.default_rng(0)), range(3), strict=False):
            loss = model.loss(batch)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            model.after_step(batch)
            losses.append(loss.item())
        trained.append((losses, model.state_dict()))
    (ours, weights), (theirs, expected) = trained
    assert len(ours) == 3
    assert ours == pytest.approx(theirs, rel=1e-5)
    for name, value in expected.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5, msg=name)


@pytest.fixture
def tf32(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    monkeypatch.setenv("FASTCL_EMULATED_TF32", "1")  # the emulated host code does not ask torch
    yield
    torch.set_float32_matmul_precision(before)


def test_tf32_where_torch_allows_it(tf32: None) -> None:
    problem = Problem(65, 64, 64, F32, F32)
    found = outputs_and_gradients(fastcl.contrast, problem)
    exact = outputs_and_gradients(fastcl.contrast, problem, F64)
    error = (found["lse"] - exact["lse"]).abs().max().item() / problem.largest_logit()
    assert 2.0**-16 < error < 2.0**-9  # what 10 bits of mantissa leave, and float32 would not


def test_sums_on_the_way_are_declined() -> None:
    g = torch.Generator().manual_seed(0)
    query, key = torch.randn(5, 4, generator=g).to(DEVICE), torch.randn(6, 4, generator=g).to(DEVICE)
    none = [library.NONE] * 6
    *_, expected, key_sum, bias_sum = ops.forward_op(query, key, *none, 1.0, True, True, True, *ops.PLAIN[2:])
    assert expected.isnan().all()
    assert [list(t.shape) for t in (expected, key_sum, bias_sum)] == [[5], [6, 4], [6]]


def test_calls_past_the_checks_in_python_are_refused() -> None:
    query, key = torch.randn(5, 4, device=DEVICE), torch.randn(6, 4, device=DEVICE)
    none = [library.NONE] * 5

    def call(**changes: Tensor) -> None:
        given = {"query": query, "key": key, "row_id": none[0], "col_id": none[0]} | changes
        args = (given["query"], given["key"], *none[:3], given["row_id"], given["col_id"], none[0])
        ops.forward_op(*args, 1.0, False, *ops.PLAIN)

    for change, message in (
        ({"key": key[:, :3].contiguous()}, r"key: expected shape \[6, 4\], got \[6, 3\]"),
        ({"key": key.T}, r"key: expected shape"),
        ({"query": query.int()}, "query: expected float64, float32, bfloat16 or float16"),
        ({"col_id": torch.zeros(6, dtype=torch.int64, device=DEVICE)}, "row_id: expected both"),
        ({"key": torch.randn(4, 6, device=DEVICE).T}, "key: expected a contiguous tensor"),
    ):
        with pytest.raises(RuntimeError, match=message):
            call(**change)


def launches(run: Callable[[], object]) -> int:
    """How many of our kernels `run` launches."""
    if EMULATED:
        import on_emulator

        before = on_emulator.op.launches()
        run()
        return int(on_emulator.op.launches()) - before
    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    return sum(event.count for event in profile.key_averages() if "fastcl::cuda" in event.key)


def test_a_small_problem_takes_at_most_four_launches() -> None:
    g = torch.Generator().manual_seed(0)
    query, key, positive = (torch.randn(n, 64, generator=g).to(DEVICE).requires_grad_() for n in (256, 2560, 256))

    def run() -> None:
        pos, lse = ops.contrast(query, key, positive, scale=0.3)
        (torch.logaddexp(pos, lse) - pos).sum().backward()

    assert 1 <= launches(run) <= 4


def test_a_temperature_may_stay_on_the_cpu() -> None:
    query, key = torch.randn(5, 4, device=DEVICE), torch.randn(6, 4, device=DEVICE)
    scale = torch.tensor(2.0, requires_grad=True)
    _, lse = ops.contrast(query, key, scale=scale)
    torch.testing.assert_close(lse, ops.contrast(query, key, scale=2.0)[1])
    lse.sum().backward()
    assert scale.grad is not None
    assert scale.grad.isfinite()
