"""Numbers that broke other implementations: tiny temperatures, convergence, offsets, fp16 with many negatives, NaN.

Each test fails for an implementation with the named mistake. Ordinary sizes and values are tested elsewhere.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import TOLERANCE, assert_budget
from problems import BF16, DTYPES, F16, F32, F64
from torch import Tensor

import fastcl
from fastcl import reference

pytestmark = pytest.mark.usefixtures("one_thread")

TEMPERATURES = (0.07, 0.02, 0.01, 0.001)
LOSSES = ("infonce", "dcl", "infonce_plus", "mine", "mine_plus")


def _at_init(n: int, d: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    return tuple(F.normalize(torch.randn(n, d, generator=g, dtype=F64), dim=1) for _ in range(2))


def _converged(n: int, d: int, temperature: float, nats: float = 15.0) -> tuple[Tensor, Tensor]:
    """Unit rows whose positive logit stands about `nats` above every negative one: the loss is about n e^-nats."""
    gap = min(nats * temperature, 0.99)
    side = math.sqrt(gap / (1 - gap))
    rows = torch.zeros(n, d, dtype=F64)
    rows[:, 0] = 1.0
    rows[torch.arange(n), 1 + torch.arange(n)] = side
    g = torch.Generator().manual_seed(0)
    rows = F.normalize(rows + 0.02 * side * torch.randn(n, d, generator=g, dtype=F64), dim=1)
    return rows, rows.clone()


def _run(function: Any, query: Tensor, key: Tensor, temperature: float, normalize: bool) -> list[Tensor]:
    q, k = query.clone().requires_grad_(), key.clone().requires_grad_()
    t = torch.tensor(temperature, dtype=F64 if q.dtype == F64 else F32, requires_grad=True)
    rows = function(q, k, temperature=t, reduction="none", normalize=normalize)
    return [rows, *torch.autograd.grad(rows.mean(), [q, k, t])]


def _exact_infonce(query: Tensor, key: Tensor, temperature: Tensor, reduction: str, normalize: bool) -> Tensor:
    """In float64 the textbook form, too, loses digits near a loss of 0; log1p of the sum does not."""
    if normalize:
        query, key = F.normalize(query, dim=1), F.normalize(key, dim=1)
    logits = query @ key.T / temperature
    gap = logits - logits.diagonal()[:, None]
    return torch.log1p(gap.masked_fill(torch.eye(len(gap), dtype=torch.bool), -torch.inf).exp().sum(1))


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("stage", ["init", "converged"])
@pytest.mark.parametrize("normalize", [True, False])
def test_small_temperatures(isa: str, temperature: float, dtype: torch.dtype, stage: str, normalize: bool) -> None:
    # No plain-torch allowance: products of 16-bit numbers are exact in float32, and 16-bit rows are normalised in
    # float32, so only float32's rounding of logits of size 1/T and the rounding of the gradients themselves remain.
    n = 33
    query, key = _at_init(n, 64) if stage == "init" else _converged(n, 64, temperature)
    lengths = (3.0, 0.5) if normalize else (1.0, 1.0)
    query, key = (lengths[0] * query).to(dtype), (lengths[1] * key).to(dtype)
    in_logits = 8 * (1 + 1 / temperature) * (2.0**-53 if dtype == F64 else 2.0**-24)
    for loss in LOSSES:
        ours = _run(getattr(fastcl, loss), query, key, temperature, normalize)
        textbook = _exact_infonce if loss == "infonce" else getattr(reference, loss)
        truth = _run(textbook, query.double(), key.double(), temperature, normalize)
        error = (ours[0].double() - truth[0]).abs()
        if loss == "infonce":
            assert stage == "init" or 1e-7 < truth[0].mean() < 1e-2
            error /= truth[0].clamp(max=1.0)
        assert error.max() <= in_logits, f"{loss}: error {error.max():.2e}, limit {in_logits:.1e}"
        # The two parts of a row's gradient, attraction and repulsion, have this length and cancel in part.
        part = ((1 - torch.exp(-truth[0].detach())) if loss == "infonce" else torch.tensor(1.1)).max() / n / temperature
        limit = (TOLERANCE[dtype] + in_logits) * part
        for name, a, b, length in zip(("query", "key"), ours[1:], truth[1:], lengths, strict=False):
            error = (a.double() - b).abs().max()
            subnormal = 6e-8 if dtype == F16 else 0.0
            assert error <= limit / length + subnormal, f"{loss}: gradient of {name} off by {error:.2e} > {limit:.1e}"
        error = (ours[3].double() - truth[3]).abs()
        limit = (TOLERANCE[F64 if dtype == F64 else F32] + in_logits) * part * n / temperature
        assert error <= limit, f"{loss}: gradient of temperature off by {error:.2e}, limit {limit:.1e}"


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_a_gap_of_seventeen_is_not_a_loss_of_zero(isa: str, dtype: torch.dtype) -> None:
    # Cross entropy in float32 answers 0 with gradient 0 here; in fp16, from a gap of 12 on.
    query = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=dtype, requires_grad=True)
    key = query.detach().clone().requires_grad_()
    loss = fastcl.infonce(query, key, temperature=1 / 17, normalize=False)
    assert loss.item() == pytest.approx(math.log1p(math.exp(-17)), rel=1e-5)
    query_grad, key_grad = torch.autograd.grad(loss, [query, key])
    push = 17 * math.exp(-17) / (1 + math.exp(-17)) / 2
    expected = torch.tensor([[-push, push], [push, -push]], dtype=F64)
    for g in (query_grad, key_grad):
        # 3.5e-7 is among fp16's subnormal numbers, 6e-8 apart.
        torch.testing.assert_close(g.double(), expected, rtol={F32: 1e-5, F16: 1e-3, BF16: 5e-3}[dtype],
                                   atol=3.1e-8 if dtype == F16 else 0.0)  # fmt: skip


@pytest.mark.parametrize("gap", [5.0, 17.0, 30.0, 50.0, 80.0])
def test_relative_accuracy_of_the_loss_at_any_gap(gap: float) -> None:
    query = torch.eye(2, requires_grad=True)
    for loss in (
        fastcl.infonce(query, torch.eye(2), temperature=1 / gap),
        fastcl.infonce_plus(query, torch.eye(2), temperature=1 / gap, epsilon=1.0, lam=1.0),
    ):
        assert loss.item() == pytest.approx(math.log1p(math.exp(-gap)), rel=2e-5)


def test_a_large_gap_the_other_way_is_linear() -> None:
    query, key = torch.eye(2), torch.eye(2).flip(0)
    for gap in (10.0, 100.0, 1000.0):
        assert fastcl.infonce(query, key, temperature=1 / gap).item() == pytest.approx(gap + math.log1p(math.exp(-gap)))


@pytest.mark.parametrize("dtype", [F64, F32], ids=str)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_common_offset_changes_nothing(isa: str, dtype: torch.dtype, sign: float) -> None:
    g = torch.Generator().manual_seed(0)
    q, k, p = (torch.randn(n, 8, generator=g, dtype=F64) for n in (33, 65, 33))
    for x, offset in ((q, sign * 100.0), (k, 100.0), (p, 100.0)):
        x[:, 0] = offset
    inputs = [x.to(dtype).requires_grad_() for x in (q, k, p)]
    pos, lse = fastcl.contrast(*inputs)
    expected_pos, expected = reference.contrast(q[:, 1:], k[:, 1:], p[:, 1:])
    # float32 numbers near 1e4 are 1e-3 apart.
    atol = 1e-11 if dtype == F64 else 2e-3
    torch.testing.assert_close(lse.double() - sign * 1e4, expected, rtol=0, atol=atol)
    torch.testing.assert_close(pos.double() - sign * 1e4, expected_pos, rtol=0, atol=atol)
    grads = torch.autograd.grad(lse.sum(), inputs[:2])
    wide = [x.clone().requires_grad_() for x in (q, k)]
    truth = torch.autograd.grad(reference.contrast(*wide)[1].sum(), wide)
    tol = 1e-10 if dtype == F64 else 5e-3
    for a, b in zip(grads, truth, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=tol, atol=tol)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("temperature", [0.07, 0.01])
def test_sixteen_bits_with_many_negatives(isa: str, dtype: torch.dtype, temperature: float) -> None:
    # Weights 1/16384 and gradients scaled by 1/(T N) must not be flushed to zero, nor the sum stop growing.
    g = torch.Generator().manual_seed(0)
    query, positive, keys = (F.normalize(torch.randn(n, 64, generator=g), dim=1) for n in (8, 8, 16384))
    inputs = [x.to(dtype).requires_grad_() for x in (query, positive, keys)]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    ours = fastcl.infonce(*inputs, temperature=temperature, normalize=False)
    truth = reference.infonce(*wide, temperature=temperature, normalize=False)
    assert ours.item() == pytest.approx(truth.item(), rel=2e-6)
    ours_grad, truth_grad = torch.autograd.grad(ours, inputs), torch.autograd.grad(truth, wide)
    assert (truth_grad[1].norm(dim=1) > 0.1).all()
    for name, a, b in zip(("query", "positive", "keys"), ours_grad[:2], truth_grad[:2], strict=False):
        assert_budget(name, a, a, b, TOLERANCE[dtype], factor=0.0)
    # A key's own gradient is near the smallest numbers of fp16; held to the largest entry of all, plus one such number.
    error = (ours_grad[2].double() - truth_grad[2]).abs().max()
    assert error <= TOLERANCE[dtype] * truth_grad[2].abs().max() + (6e-8 if dtype == F16 else 0.0)


def test_flat_sixteen_bit_sum_over_many_columns(isa: str) -> None:
    # All weights equal: any sum kept in 16 bits stops at 256 (bf16) or 2048 (fp16).
    for dtype in (BF16, F16):
        query = torch.zeros(2, 8, dtype=dtype, requires_grad=True)
        key = torch.ones(16384, 8, dtype=dtype)
        _, lse = fastcl.contrast(query, key)
        assert lse.tolist() == pytest.approx([math.log(16384)] * 2, rel=1e-6)
        (grad,) = torch.autograd.grad(lse.sum(), query)
        torch.testing.assert_close(grad.float(), torch.ones(2, 8), rtol=TOLERANCE[dtype], atol=0.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_is_not_hidden(isa: str, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    query, key, positive = (torch.randn(n, 17, generator=g).to(dtype) for n in (33, 47, 33))

    def spoiled(x: Tensor, row: int) -> Tensor:
        x = x.clone()
        x[row, 3] = torch.nan
        return x

    only = [i == 5 for i in range(33)]
    pos, lse = fastcl.contrast(spoiled(query, 5), key, positive)
    assert pos.isnan().tolist() == only
    assert lse.isnan().tolist() == only
    pos, lse = fastcl.contrast(query, spoiled(key, 40), positive)
    assert lse.isnan().all()
    assert not pos.isnan().any()
    pos, lse = fastcl.contrast(query, key, spoiled(positive, 5))
    assert pos.isnan().tolist() == only
    assert not lse.isnan().any()
    bias = torch.zeros(47, dtype=F64 if dtype == F64 else F32)
    bias[46] = torch.nan
    assert fastcl.contrast(query, key, bias=bias)[1].isnan().all()
    for normalize in (True, False):
        for loss in LOSSES:
            rows = getattr(fastcl, loss)(spoiled(query, 5), positive, key, reduction="none", normalize=normalize)
            assert rows.isnan().tolist() == only, loss


@pytest.mark.parametrize("dtype", [F64, F32], ids=str)
def test_nan_gradients_are_not_hidden(isa: str, dtype: torch.dtype) -> None:
    query, key = torch.ones(3, 4, dtype=dtype), torch.ones(5, 4, dtype=dtype)
    query[1, 2] = torch.nan
    query.requires_grad_()
    key.requires_grad_()
    query_grad, key_grad = torch.autograd.grad(fastcl.contrast(query, key)[1].sum(), [query, key])
    assert query_grad.isnan().any(1).tolist() == [False, True, False]
    assert key_grad.isnan().any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("loss", LOSSES)
def test_zero_vectors_have_zero_gradient_under_normalisation(loss: str, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    inputs = [torch.randn(n, 6, generator=g).to(dtype) for n in (4, 4, 5)]
    for x in inputs:
        x[1] = 0.0
        x.requires_grad_()
    value = getattr(fastcl, loss)(*inputs, in_batch=True, temperature=0.1)
    assert value.isfinite()
    truth = getattr(reference, loss)(*(x.detach().double() for x in inputs), in_batch=True, temperature=0.1)
    assert value.item() == pytest.approx(truth.item(), rel=2e-2 if dtype in (F16, BF16) else 1e-5)
    for grad in torch.autograd.grad(value, inputs):
        assert grad.isfinite().all()
        assert (grad == 0).all(1).tolist() == [i == 1 for i in range(len(grad))]


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_normalisation_survives_short_and_long_vectors(dtype: torch.dtype) -> None:
    # fp16 overflows at 65504 and loses 1e-4 squared; lengths are taken in float32.
    g = torch.Generator().manual_seed(0)
    query, key = (torch.randn(5, 16, generator=g).to(dtype) for _ in range(2))
    expected = reference.infonce(query.double(), key.double())
    for factor in (2.0**-8, 2.0**8):
        q = (query * factor).requires_grad_()
        ours = fastcl.infonce(q, key * factor)
        assert ours.item() == pytest.approx(expected.item(), rel=5e-3 if dtype != F32 else 1e-5)
        assert torch.autograd.grad(ours, q)[0].isfinite().all()


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("mask", ["ids", "log_q"])
def test_fully_masked_rows(loss: str, mask: str) -> None:
    g = torch.Generator().manual_seed(0)
    query, positive, keys = (torch.randn(n, 6, generator=g).requires_grad_() for n in (4, 4, 5))
    if mask == "ids":
        options = {"ids": torch.full((4,), 3), "negative_ids": torch.full((5,), 3)}
    else:
        options = {"log_q": torch.zeros(4), "negative_log_q": torch.full((5,), torch.inf)}
    value = getattr(fastcl, loss)(query, positive, keys, reduction="sum", **options)
    assert value.item() == 0.0
    for grad in torch.autograd.grad(value, [query, positive, keys]):
        assert torch.equal(grad, torch.zeros_like(grad))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_excluded_columns_add_exactly_nothing(isa: str, dtype: torch.dtype) -> None:
    # Excluded logits far above the rest: a mask by subtraction, or one that enters the maximum, leaks or underflows.
    query = torch.ones(3, 1, dtype=dtype)
    key = torch.tensor([[0.0], [1.0], [200.0], [300.0]], dtype=dtype)
    bias = torch.tensor([0.0, 0.0, 0.0, -torch.inf], dtype=F64 if dtype == F64 else F32).requires_grad_()
    row_id, col_id = torch.tensor([7, 8, 9]), torch.tensor([1, 2, 7, 3])
    key.requires_grad_()
    _, lse = fastcl.contrast(query, key, bias=bias, row_id=row_id, col_id=col_id)
    assert lse[0].item() == pytest.approx(math.log(1 + math.e), rel=1e-6)
    assert lse[1:].tolist() == pytest.approx([200.0, 200.0])
    key_grad, bias_grad = torch.autograd.grad(lse[0], [key, bias])
    assert key_grad[2:].tolist() == [[0.0], [0.0]]
    assert bias_grad[2:].tolist() == [0.0, 0.0]


def test_ids_are_compared_as_64_bits(isa: str) -> None:
    # Equal in the low 32 bits, or as float64, is not equal.
    big = 2**53
    row_id = torch.tensor([5, big, -1, torch.iinfo(torch.int64).max])
    col_id = torch.tensor([5 + 2**32, big + 1, -1 + 2**32, torch.iinfo(torch.int64).min])
    _, lse = fastcl.contrast(torch.zeros(4, 3), torch.zeros(4, 3), row_id=row_id, col_id=col_id)
    assert lse.tolist() == pytest.approx([math.log(4)] * 4)
    _, lse = fastcl.contrast(torch.zeros(4, 3), torch.zeros(4, 3), row_id=row_id, col_id=row_id)
    assert lse.tolist() == pytest.approx([math.log(3)] * 4)


# Losses that read a row of a table for many rows of the batch, by what of theirs learns.
OFTEN: dict[str, Any] = {
    "class": lambda x, table, bias, target: (fastcl.linear_cross_entropy(x, table, target, linear_bias=bias), table),
    "bias": lambda x, table, bias, target: (fastcl.linear_cross_entropy(x, table, target, linear_bias=bias), bias),
    "soft target": lambda x, table, bias, target: (
        fastcl.soft_cross_entropy(x, table, torch.ones(len(x), 1), index=target[:, None]),
        table,
    ),
    "buckets": lambda x, table, bias, target: (fastcl.sce(x, table, target, buckets=x[:50].detach()), table),
    "owner": lambda x, table, bias, target: (fastcl.multi_positive(table, x, target, normalize=False), table),
    "ids": lambda x, table, bias, target: (
        fastcl.siglip(table, x, ids=torch.arange(len(table)), key_ids=target),
        table,
    ),
}


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("name", OFTEN)
def test_the_gradient_of_what_is_read_often_is_no_sum_in_16_bits(name: str, dtype: torch.dtype) -> None:
    """Half of 4,096 rows read one row of the table: in 16 bits such a sum stands still long before its end."""
    g = torch.Generator().manual_seed(0)
    x, table = torch.randn(4096, 16, generator=g).abs() / 4, 0.2 * torch.randn(40, 16, generator=g)
    target = torch.randint(40, (4096,), generator=g)
    target[torch.rand(4096, generator=g) < 0.5] = 3
    grads = []
    for kind in (dtype, F64):
        inputs = [t.to(dtype).to(kind).requires_grad_() for t in (x, table, torch.zeros(40))]
        loss, learns = OFTEN[name](*inputs, target)
        grads.append(torch.autograd.grad(loss, learns)[0].double())
    error = (grads[0] - grads[1])[3].norm() / grads[1][3].norm()
    assert error < 2 * torch.finfo(dtype).eps, error  # of two sums, each rounded once
