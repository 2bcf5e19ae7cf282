"""The CUDA kernels, run on the CPU by the emulator (cuda_emulator/): the same checks as for the CPU's kernels.

No test here needs a GPU or nvcc, and none says anything about speed. Sanitizers, planted faults: test_cuda_faults.py.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import TOLERANCE, assert_budget, assert_contrast, gradients, leaves, outputs_and_gradients
from emulated import Kernels
from hypothesis import example, given, settings
from hypothesis import strategies as st
from problems import BF16, DTYPES, F16, F32, F64, INPUTS, WITH_EMPTY_ROWS, Problem, problems
from torch import Tensor

from fastcl import reference


@pytest.fixture(scope="module")
def library(emulated_kernels: Path) -> Kernels:
    return Kernels(emulated_kernels)


@pytest.fixture
def kernels(library: Kernels) -> Kernels:
    library.reset()
    return library


@settings(max_examples=40)
@given(problem=problems(), multiprocessors=st.sampled_from([1, 2, 100]))
@example(problem=Problem(m=0, query_dtype=F32, key_dtype=F32), multiprocessors=1)
@example(
    problem=Problem(n=33, m=65, d=200, query_dtype=BF16, key_dtype=F32, scale="zero_tensor", bias="some_inf"),
    multiprocessors=1,
)
@example(
    problem=Problem(n=33, m=65, d=17, query_dtype=F32, key_dtype=F16, ids="few", scale="mixed_rows"),
    multiprocessors=2,
)
def test_values_and_gradients(kernels: Kernels, problem: Problem, multiprocessors: int) -> None:
    kernels.multiprocessors = multiprocessors
    assert_contrast(kernels.contrast, problem)


@pytest.mark.slow
@settings(max_examples=400)
@given(problem=problems(), multiprocessors=st.sampled_from([1, 2, 100]), seed=st.integers(0, 5))
def test_values_and_gradients_of_more(kernels: Kernels, problem: Problem, multiprocessors: int, seed: int) -> None:
    kernels.multiprocessors = multiprocessors
    kernels.schedule(seed)
    assert_contrast(kernels.contrast, problem)


@pytest.mark.parametrize("needs", [*INPUTS, "key,scale", "positive,bias", "query,key,positive,bias,scale"])
@pytest.mark.parametrize("dtype", [F64, F32, BF16], ids=str)
def test_any_subset_of_inputs_may_need_gradients(kernels: Kernels, needs: str, dtype: torch.dtype) -> None:
    for scale in ("tensor", "mixed_rows"):
        assert_contrast(kernels.contrast, Problem(33, 47, 19, dtype, dtype, scale=scale, bias="some_inf", ids="many",
                                                  needs=frozenset(needs.split(","))))  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("d", [1, 8, 50, 64, 65, 128, 129, 256, 257])
def test_numbers_of_features(kernels: Kernels, dtype: torch.dtype, d: int) -> None:
    assert_contrast(kernels.contrast, Problem(65, 33, d, dtype, dtype, scale="rows", bias="finite", ids="few"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 200), (129, 1), (63, 64), (64, 63), (65, 129), (300, 70)])
def test_tails(kernels: Kernels, dtype: torch.dtype, n: int, m: int) -> None:
    assert_contrast(kernels.contrast, Problem(n, m, 24, dtype, dtype, scale="tensor"))


@pytest.mark.parametrize(
    "problem",
    [*WITH_EMPTY_ROWS, Problem(4, 6, 300, F16, F16, ids="all_equal", scale="tensor")],
    ids=lambda p: f"M={p.m} D={p.d} bias={p.bias} ids={p.ids}",
)
def test_empty_rows_have_lse_minus_infinity_and_no_gradient(kernels: Kernels, problem: Problem) -> None:
    assert_contrast(kernels.contrast, problem)
    truth = outputs_and_gradients(reference.contrast, problem, F64)
    empty = truth["lse"] == -torch.inf
    assert empty.any()
    assert torch.equal(outputs_and_gradients(kernels.contrast, problem)["lse"] == -torch.inf, empty)


@pytest.mark.parametrize("dtype", [F64, F32, BF16, F16], ids=str)
def test_no_rows(kernels: Kernels, dtype: torch.dtype) -> None:
    inputs = {"query": torch.empty(0, 5, dtype=dtype), "key": torch.ones(7, 5, dtype=dtype)}
    inputs = leaves(inputs, frozenset(inputs))
    _, lse = kernels.contrast(**inputs)
    found = gradients([lse], [torch.empty_like(lse)], inputs)
    assert lse.shape == (0,)
    assert torch.equal(found["key"], torch.zeros(7, 5, dtype=dtype))


@pytest.mark.parametrize("d", [5, 300])
@pytest.mark.parametrize("dtype", [F64, F32], ids=str)
def test_nan_gradient_of_an_empty_row_does_not_spread(kernels: Kernels, d: int, dtype: torch.dtype) -> None:
    tensors, rest = Problem(3, 4, d, dtype, dtype).build()
    ids = {"row_id": torch.tensor([7, 8, 9]), "col_id": torch.tensor([7, 7, 7, 7])}
    inputs = leaves(tensors, frozenset({"query", "key"}))
    _, lse = kernels.contrast(**inputs, **rest, **ids)
    assert lse.isneginf().tolist() == [True, False, False]
    upstream = torch.tensor([torch.nan, 1.0, 1.0], dtype=dtype)
    query_grad, key_grad = torch.autograd.grad(lse, list(inputs.values())[:2], upstream)
    assert torch.equal(query_grad[0], torch.zeros(d, dtype=dtype))
    assert key_grad.isfinite().all()


@pytest.mark.parametrize("dtype", [F32, BF16, F16, "tf32"], ids=str)
def test_any_schedule_gives_the_same_bits(kernels: Kernels, dtype: Any) -> None:
    kernels.tf32 = dtype == "tf32"
    dtype = F32 if kernels.tf32 else dtype
    problem = Problem(70, 330, 40, dtype, dtype, scale="rows", bias="some_inf", ids="few")
    expected = outputs_and_gradients(kernels.contrast, problem)
    for seed in (1, 2, 3):
        kernels.schedule(seed)
        found = outputs_and_gradients(kernels.contrast, problem)
        for name in expected:
            assert torch.equal(found[name], expected[name]), name


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("d", [16, 17, 64, 300])
def test_layout_changes_no_bit(kernels: Kernels, dtype: torch.dtype, d: int) -> None:
    found, expected = (
        outputs_and_gradients(kernels.contrast, Problem(33, 65, d, dtype, dtype, kind, scale="tensor"))
        for kind in ("offset", "contiguous")
    )
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("offset", [1, 3, 7])
def test_vectors_at_any_offset(kernels: Kernels, dtype: torch.dtype, offset: int) -> None:
    g = torch.Generator().manual_seed(0)
    inputs = [torch.randn(*shape, generator=g).to(dtype) for shape in ((33, 24), (65, 24), (33, 24))]
    inputs += [torch.randn(n, generator=g) for n in (65, 33)]
    moved = [x.new_full((x.numel() + offset,), 77.0)[offset:].view_as(x).copy_(x) for x in inputs]
    expected, found = (kernels.contrast(*x[:3], bias=x[3], scale=x[4]) for x in (inputs, moved))
    assert torch.equal(torch.stack(found), torch.stack(expected))


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("multiprocessors", [1, 3, 1000])
def test_few_rows_are_split_over_columns(kernels: Kernels, dtype: torch.dtype, multiprocessors: int) -> None:
    kernels.multiprocessors = multiprocessors
    assert_contrast(kernels.contrast, Problem(5, 700, 20, dtype, dtype, scale="rows", bias="some_inf", ids="many"))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_a_small_problem_takes_four_launches(kernels: Kernels, dtype: torch.dtype) -> None:
    kernels.multiprocessors = 132
    problem = Problem(256, 2560, 64, dtype, dtype, scale="tensor")
    before = kernels.launches()
    assert_contrast(kernels.contrast, problem)
    assert kernels.launches() - before == 4


def test_frozen_keys_cost_no_walk_in_backward(kernels: Kernels) -> None:
    problem = Problem(33, 65, 17, F32, F32, scale="rows", needs=frozenset({"query", "positive", "scale"}))
    tensors, rest = problem.build()
    inputs = leaves(tensors, problem.needs)
    pos, lse = kernels.contrast(**inputs, **rest)
    before = kernels.launches()
    found = gradients([pos, lse], list(problem.upstream(F32)), inputs)
    assert kernels.launches() - before == 1
    expected = outputs_and_gradients(kernels.contrast, problem)
    for name, g in found.items():
        assert torch.equal(g, expected[f"grad {name}"])


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("d", [64, 128, 256])
def test_no_two_rows_of_a_read_share_a_bank(kernels: Kernels, dtype: torch.dtype, d: int) -> None:
    before = kernels.bank_conflicts()
    assert_contrast(kernels.contrast, Problem(65, 70, d, dtype, dtype))
    assert kernels.bank_conflicts() == before


@pytest.mark.parametrize("weights", [F32, BF16], ids=str)
@pytest.mark.parametrize("chunk_rows", [1, 7, 1000])
def test_many_features_in_chunks(kernels: Kernels, weights: torch.dtype, chunk_rows: int) -> None:
    kernels.chunk_rows, kernels.chunk_dtype = chunk_rows, weights
    dtype = BF16 if weights == BF16 else F32
    for bias in ("none", "some_inf"):
        assert_contrast(kernels.contrast, Problem(37, 150, 300, dtype, dtype, scale="rows", bias=bias, ids="few"))


def test_too_many_features_are_refused(kernels: Kernels) -> None:
    kernels.most_features = lambda dtype: 1000
    with pytest.raises(RuntimeError, match="invalid argument"):
        kernels.contrast(torch.zeros(2, 129), torch.zeros(3, 129))


def test_tf32_is_one_product_of_ten_bits(kernels: Kernels) -> None:
    g = torch.Generator().manual_seed(0)
    query, key = (torch.randn(n, 64, generator=g) for n in (70, 130))
    errors = {}
    for tf32 in (False, True):
        kernels.tf32 = tf32
        inputs = [x.clone().requires_grad_() for x in (query, key)]
        _, lse = kernels.contrast(*inputs, scale=0.2)
        wide = [x.double().requires_grad_() for x in (query, key)]
        _, truth = reference.contrast(*wide, scale=0.2)
        found, expected = (torch.autograd.grad(x.sum(), i) for x, i in ((lse, inputs), (truth, wide)))
        errors[tf32] = [(lse - truth).abs().max().item()]
        errors[tf32] += [((a - b).norm() / b.norm()).item() for a, b in zip(found, expected, strict=True)]
    assert all(e < 3e-6 for e in errors[False])
    assert all(1e-5 < e < 5e-3 for e in errors[True])


@pytest.mark.parametrize(
    ("dtype", "temperature"),
    [
        *((F16, temperature) for temperature in (0.07, 0.01)),
        *(
            pytest.param(dtype, temperature, marks=pytest.mark.slow)
            for dtype in (F32, BF16)
            for temperature in (0.07, 0.01)
        ),
    ],
    ids=str,
)
def test_sixteen_bits_with_many_negatives(kernels: Kernels, dtype: torch.dtype, temperature: float) -> None:
    # Weights near 1/16384, divided by T times a batch of 16,384 besides: below the smallest numbers of float16.
    g = torch.Generator().manual_seed(0)
    query, keys = (F.normalize(torch.randn(n, 64, generator=g) + 0.3, dim=1) for n in (8, 16_384))
    inputs = [x.to(dtype).requires_grad_() for x in (query, keys)]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    _, lse = kernels.contrast(*inputs, scale=1 / temperature)
    _, truth = reference.contrast(*wide, scale=1 / temperature)
    torch.testing.assert_close(lse.double(), truth, rtol=2e-6, atol=2e-6)
    found, expected = (torch.autograd.grad(x.sum() / 64, i) for x, i in ((lse, inputs), (truth, wide)))
    for a, b in zip(found, expected, strict=True):
        error = (a.double() - b).norm(dim=1)
        subnormal = 8 * 6e-8 if dtype == F16 else 0.0
        assert (error <= TOLERANCE[dtype] * (b.norm(dim=1) + 0.01 * b.norm(dim=1).max()) + subnormal).all()


@pytest.mark.parametrize("dtype", [F64, F32], ids=str)
def test_a_common_offset_changes_nothing(kernels: Kernels, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    q, k, p = (torch.randn(n, 8, generator=g, dtype=F64) for n in (33, 65, 33))
    for x in (q, k, p):
        x[:, 0] = 100.0
    pos, lse = kernels.contrast(*(x.to(dtype) for x in (q, k, p)))
    expected_pos, expected = reference.contrast(q[:, 1:], k[:, 1:], p[:, 1:])
    atol = 1e-11 if dtype == F64 else 4e-3  # float32 numbers near 1e4 are 1e-3 apart
    torch.testing.assert_close(lse.double() - 1e4, expected, rtol=0, atol=atol)
    torch.testing.assert_close(pos.double() - 1e4, expected_pos, rtol=0, atol=atol)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("d", [17, 300])
def test_nan_is_not_hidden(kernels: Kernels, dtype: torch.dtype, d: int) -> None:
    g = torch.Generator().manual_seed(0)
    query, key, positive = (torch.randn(n, d, generator=g).to(dtype) for n in (33, 47, 33))

    def spoiled(x: Tensor, row: int) -> Tensor:
        x = x.clone()
        x[row, 3] = torch.nan
        return x

    only = [i == 5 for i in range(33)]
    pos, lse = kernels.contrast(spoiled(query, 5), key, positive)
    assert pos.isnan().tolist() == only
    assert lse.isnan().tolist() == only
    pos, lse = kernels.contrast(query, spoiled(key, 40), positive)
    assert lse.isnan().all()
    assert not pos.isnan().any()
    pos, lse = kernels.contrast(query, key, spoiled(positive, 5))
    assert pos.isnan().tolist() == only
    assert not lse.isnan().any()
    bias = torch.zeros(47)
    bias[46] = torch.nan
    assert kernels.contrast(query, key, bias=bias)[1].isnan().all()
    learning = [spoiled(query, 5).requires_grad_(), key.clone().requires_grad_()]
    query_grad, key_grad = torch.autograd.grad(kernels.contrast(*learning)[1].sum(), learning)
    assert query_grad.isnan().any(1).tolist() == only
    assert key_grad.isnan().any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("d", [1, 300])
def test_excluded_columns_add_exactly_nothing(kernels: Kernels, dtype: torch.dtype, d: int) -> None:
    query, key = torch.zeros(3, d, dtype=dtype), torch.zeros(4, d, dtype=dtype)
    query[:, 0] = 1.0
    key[:, 0] = torch.tensor([0.0, 1.0, 200.0, 300.0])
    bias = torch.tensor([0.0, 0.0, 0.0, -torch.inf]).requires_grad_()
    key.requires_grad_()
    _, lse = kernels.contrast(query, key, bias=bias, row_id=torch.tensor([7, 8, 9]), col_id=torch.tensor([1, 2, 7, 3]))
    assert lse[0].item() == pytest.approx(math.log(1 + math.e), rel=1e-6)
    assert lse[1:].tolist() == pytest.approx([200.0, 200.0])
    key_grad, bias_grad = torch.autograd.grad(lse[0], [key, bias])
    assert (key_grad[2:] == 0).all()
    assert bias_grad[2:].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("d", [3, 300])
def test_ids_are_compared_as_64_bits(kernels: Kernels, d: int) -> None:
    # Equal in the low 32 bits, as float64, or in the 32 bits that are compared first, is not equal.
    big = 2**53
    row_id = torch.tensor([5, big, -1, torch.iinfo(torch.int64).max, 3])
    col_id = torch.tensor([5 + 2**32, big + 1, -1 + 2**32, torch.iinfo(torch.int64).min, 3 << 32])
    zeros = torch.zeros(5, d)
    _, lse = kernels.contrast(zeros, zeros, row_id=row_id, col_id=col_id)
    assert lse.tolist() == pytest.approx([math.log(5)] * 5)
    _, lse = kernels.contrast(zeros, zeros, row_id=row_id, col_id=row_id)
    assert lse.tolist() == pytest.approx([math.log(4)] * 5)


def check_softplus(kernels: Any, problem: Problem) -> None:
    """kernels: whatever has a `softplus_sum`."""
    tensors, rest = problem.build()
    tensors.pop("positive", None)
    rest.pop("cap", None)  # sums over pairs have none
    wide = F64 if F64 in (problem.query_dtype, problem.key_dtype) else F32
    tensors["offset"] = torch.randn(problem.n, generator=torch.Generator().manual_seed(1), dtype=F64).to(wide)
    upstream, _ = problem.upstream(F64)
    # Weights may be kept in 16 bits, and the total over M columns is as good as float32.
    narrow = max(TOLERANCE[problem.query_dtype], TOLERANCE[problem.key_dtype])
    eps = 8 * problem.largest_logit() * torch.finfo(wide).eps * max(problem.n, problem.m, 1)
    found = {}
    for function, dtype in (
        (kernels.softplus_sum, None),
        (reference.softplus_sum, None),
        (reference.softplus_sum, F64),
    ):
        inputs = leaves(tensors, frozenset(tensors), dtype)
        total = function(**inputs, **rest)
        grads = torch.autograd.grad(total, list(inputs.values()), upstream.to(total.dtype))
        found[function, dtype] = {"total": total, **dict(zip(inputs, grads, strict=True))}
    ours, plain, truth = found.values()
    assert ours["total"].dtype == wide
    # The weights of a key have the signs of the upstream gradients, so that their sum may be far smaller than they are.
    weighed = leaves({"bias": torch.zeros(problem.m)} | tensors, frozenset({"bias"}), F64)
    (sizes,) = torch.autograd.grad(reference.softplus_sum(**weighed, **rest), weighed["bias"], upstream.abs())
    lost = max(torch.finfo(dtype).eps / 2 for dtype in (problem.query_dtype, problem.key_dtype))
    cancelled = lost * sizes * tensors["query"].double().abs().max()
    for name, value in truth.items():
        tolerance = TOLERANCE[wide] if name in ("total", "offset") else narrow
        floor = eps / tolerance + (1.0 if name in ("scale", "bias") else 0.0)
        floors = floor + cancelled / tolerance if name == "key" else floor
        assert_budget(name, ours[name], plain[name], value, tolerance, floors)


@settings(max_examples=40)
@given(problem=problems(), multiprocessors=st.sampled_from([1, 2, 100]))
def test_softplus_sums(kernels: Kernels, problem: Problem, multiprocessors: int) -> None:
    kernels.multiprocessors = multiprocessors
    check_softplus(kernels, problem)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("d", [64, 100, 300])
@pytest.mark.parametrize("ids", ["none", "few", "all_equal"])
def test_softplus_sums_with_and_without_columns(kernels: Kernels, dtype: torch.dtype, d: int, ids: str) -> None:
    kernels.multiprocessors = 3
    check_softplus(kernels, Problem(33, 200, d, dtype, dtype, scale="rows", bias="some_inf", ids=ids))


@pytest.mark.parametrize("d", [1, 300])
@pytest.mark.parametrize("dtype", [F64, F32], ids=str)
def test_extreme_logits_neither_overflow_nor_vanish(kernels: Kernels, dtype: torch.dtype, d: int) -> None:
    values = [-1e4, -50.0, -20.0, 0.0, 20.0, 50.0, 1e4, math.nan]
    x, one = torch.zeros(8, d, dtype=dtype), torch.zeros(1, d, dtype=dtype)
    x[:, 0], one[:, 0] = torch.tensor(values), 1.0
    x.requires_grad_()
    total = kernels.softplus_sum(x, one)
    truth = [0.0, math.exp(-50), math.log1p(math.exp(-20)), math.log(2), 20 + math.log1p(math.exp(-20)), 50.0, 1e4]
    for ours, value in zip(total.tolist(), truth, strict=False):
        # float32: 50 in units of log 2 is rounded by 2e-6, which is relative to what comes of it
        assert ours == pytest.approx(value, rel=1e-5 if dtype == F32 else 4e-15)
    assert total[-1].isnan()
    (grad,) = torch.autograd.grad(total.sum(), x)
    sigmoid = [1 / (1 + math.exp(-v)) if v > -700 else 0.0 for v in values[:-1]]
    assert grad[:-1, 0].tolist() == pytest.approx(sigmoid, rel=1e-5)
