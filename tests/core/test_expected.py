"""Gradients of the keys that the forward pass sums: they are used only where the expected gradient comes back, and
equal those computed from the similarities again. Also the parts of a product that AMX leaves to AVX-512."""

import math
from collections.abc import Callable

import pytest
import torch
from conftest import assert_budget
from torch import Tensor

import fastcl
from fastcl import fallback, ops, ops_pairwise

pytestmark = pytest.mark.skipif(fallback.FORCED, reason="the compiled kernels alone sum over columns on the way")
NONE = torch.empty(0)


def problem(n: int, m: int, d: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    torch.manual_seed(n * m + d)
    query, key, positive = (torch.randn(rows, d).to(dtype) for rows in (n, m, n))
    bias = torch.randn(m)
    row_id, col_id = torch.randint(9, (n,)), torch.randint(9, (m,))
    cap = torch.rand(n) * 2 * d**0.5
    return query, key, positive, torch.rand(n) + 0.5, bias, row_id, col_id, cap


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 65, 3), (50, 200, 33), (400, 97, 16), (130, 700, 40)])
def test_expected_gradients_are_those_of_the_general_path(
    isa: str, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    inputs = (*problem(*shape, dtype), 0.7)
    n, m, d = shape
    weight, rest, row_shift = torch.rand(n), torch.randn(n), torch.randn(n)
    pos, lse, mean_key, expected, key_sum, bias_sum = ops.forward_op(
        *inputs, True, True, True, math.log(0.3), row_shift, rest, weight, *ops.NO_FROZEN
    )
    other = torch.logaddexp(pos + math.log(0.3) + row_shift, rest.to(pos))
    torch.testing.assert_close(expected, weight.to(pos) * torch.sigmoid(lse - other), rtol=1e-5, atol=1e-7)
    wanted = (False, True, False, False, True)
    saved = (*inputs[:8], lse, mean_key)
    upstream = (torch.zeros_like(lse), 3.0 * expected)
    _, key, _, _, bias = ops.backward_op(*upstream, *saved, expected, key_sum, bias_sum, 0.7, *wanted)
    _, again, _, _, bias_again = ops.backward_op(*upstream, *saved, *ops.NO_SUMS, 0.7, *wanted)
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-5}.get(dtype, 2e-2)
    assert key.dtype == dtype
    torch.testing.assert_close(key, again, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(bias, bias_again, rtol=max(tolerance, 1e-12), atol=tolerance)


def test_the_sums_are_used_if_and_only_if_the_gradient_is_as_expected(isa: str) -> None:
    inputs = (*problem(20, 100, 8, torch.float32), 1.0)
    plain = (NONE, NONE, NONE, *ops.NO_FROZEN)
    _, lse, mean_key, expected, key_sum, bias_sum = ops.forward_op(*inputs, True, True, True, 0.0, *plain)
    wanted = (False, True, False, False, False)
    marked = torch.full_like(key_sum, 7.0)

    def key_gradient(upstream: Tensor, key_sum: Tensor) -> Tensor:
        saved = (*inputs[:8], lse, mean_key, expected, key_sum, bias_sum)
        return ops.backward_op(torch.zeros_like(lse), upstream.contiguous(), *saved, 1.0, *wanted)[1]

    assert torch.equal(key_gradient(expected, marked), marked)
    assert torch.equal(key_gradient(-2.0 * expected, marked), -2.0 * marked)
    assert torch.equal(key_gradient(0.0 * expected, marked), 0.0 * marked)
    for row in range(20):
        for change in (1e-4, float("nan"), float("inf")):
            upstream = expected.clone()
            upstream[row] += change * upstream.abs().max()
            assert not (key_gradient(upstream, marked) == marked).any(), (row, change)


def test_nothing_is_kept_where_it_would_be_too_much() -> None:
    query, key = torch.randn(3, 2, requires_grad=True), torch.randn(300_000, 2, requires_grad=True)
    inputs = (query.detach(), key.detach(), *(NONE,) * 6, 1.0)
    expected = ops.forward_op(*inputs, True, True, False, -math.inf, NONE, NONE, NONE, *ops.NO_FROZEN)[3]
    assert expected.isnan().all()
    fastcl.dcl(query, query.detach(), key, normalize=False, temperature=1.0).backward()
    weights = torch.softmax(query.detach() @ key.detach().T, 1)
    torch.testing.assert_close(key.grad, weights.T @ query.detach() / 3, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("loss", ["infonce", "dcl", "infonce_plus", "mine", "mine_plus", "dclw", "debiased_infonce"])
def test_a_mean_has_the_gradients_of_the_mean_of_the_rows(loss: str, isa: str) -> None:
    """The two go different ways; where two segments learn and frozen ones stand beside them, too."""
    torch.manual_seed(0)
    function = getattr(fastcl, loss)
    options = {"in_batch": True, "queue": fastcl.NegativeQueue(32, 12), "weight": torch.rand(40)}
    options["queue"].push(torch.nn.functional.normalize(torch.randn(20, 12), dim=1))
    leaves = [torch.randn(rows, 12, requires_grad=True) for rows in (40, 40, 90)]
    mean = torch.autograd.grad(2 * function(*leaves, **options), leaves)
    rows = torch.autograd.grad(2 * function(*leaves, reduction="none", **options).mean(), leaves)
    double = [t.detach().double().requires_grad_() for t in leaves]
    truth = torch.autograd.grad(2 * function(*double, **options), double)
    for a, b, t in zip(mean, rows, truth, strict=True):
        assert_budget(loss, a, b, t, 1e-6)


def pair_problem(n: int, m: int, d: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    query, key, _, scale, bias, row_id, col_id, _ = problem(n, m, d, dtype)
    return query, key, scale, torch.randn(n), bias, row_id, col_id


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 65, 3), (50, 200, 33), (400, 97, 16), (130, 700, 40)])
@pytest.mark.parametrize("weighted", [True, False])
def test_expected_gradients_of_pairs_are_those_of_the_general_path(
    isa: str, shape: tuple[int, int, int], dtype: torch.dtype, weighted: bool
) -> None:
    inputs = (*pair_problem(*shape, dtype), 0.7)
    weight = torch.rand(shape[0]) if weighted else NONE
    *rows, expected, key_sum, bias_sum = ops_pairwise.forward_op(*inputs, True, True, True, weight)
    for ours, plain in zip(rows, ops_pairwise.forward_op(*inputs, True, *ops_pairwise.PLAIN), strict=False):
        torch.testing.assert_close(ours, plain)
    assert torch.equal(expected, weight.to(expected) if weighted else torch.ones_like(expected))
    upstream = 3.0 * expected
    key, bias = ops_pairwise.backward_op(upstream, *inputs, True, True, expected, key_sum, bias_sum)
    key_again, bias_again = ops_pairwise.backward_op(upstream, *inputs, True, True, *ops_pairwise.NO_SUMS)
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-5}.get(dtype, 2e-2)
    size = float(key_again.abs().max())
    assert key.dtype == dtype
    torch.testing.assert_close(key, key_again, rtol=tolerance, atol=tolerance * size)
    torch.testing.assert_close(bias, bias_again, rtol=max(tolerance, 1e-12), atol=tolerance * size)
    # No gradient of the rows, and no gradient of the bias: the sums are the same without them.
    *_, alone, none = ops_pairwise.forward_op(*inputs, False, True, False, weight)
    torch.testing.assert_close(alone, key_sum)
    assert none.shape == (0,)


def test_the_sums_of_pairs_are_used_if_and_only_if_the_gradient_is_as_expected(isa: str) -> None:
    inputs = (*pair_problem(20, 100, 8, torch.float32), 1.0)
    *_, expected, key_sum, bias_sum = ops_pairwise.forward_op(*inputs, True, True, False, torch.rand(20))
    marked = torch.full_like(key_sum, 7.0)

    def key_gradient(upstream: Tensor) -> Tensor:
        return ops_pairwise.backward_op(upstream, *inputs, True, False, expected, marked, bias_sum)[0]

    for factor in (1.0, -2.0, 0.0):
        assert torch.equal(key_gradient(factor * expected), factor * marked)
    for row in range(20):
        for change in (1e-4, float("nan"), float("inf")):
            upstream = expected.clone()
            upstream[row] += change * upstream.abs().max()
            assert not (key_gradient(upstream) == marked).any(), (row, change)


def pair_losses() -> dict[str, Callable[..., Tensor]]:
    n, m = 40, 90
    g = torch.Generator().manual_seed(0)
    ids, key_ids = (torch.randint(9, (count,), generator=g) for count in (n, m))
    bias = torch.randn(m, generator=g)
    return {
        "bpr": fastcl.bpr,
        "negative_sampling": fastcl.negative_sampling,
        "jensen_shannon": fastcl.jensen_shannon,
        "gbce": lambda q, p, k, **o: fastcl.gbce(
            q, p, k, catalogue=500, ids=ids, negative_ids=key_ids, negative_bias=bias.to(q.dtype), **o
        ),
        "siglip": lambda q, p, _, **o: fastcl.siglip(q, p, q.mean().exp(), p.sum() / 9, **o),
        "siglip of groups": lambda q, _, k, **o: fastcl.siglip(
            q, k, q.mean().exp(), k.sum() / 9, ids=ids, key_ids=key_ids, **o
        ),
    }


@pytest.mark.parametrize("loss", pair_losses())
@pytest.mark.parametrize("weighted", [True, False])
def test_a_mean_over_pairs_computes_no_similarity_in_backward(
    loss: str, weighted: bool, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And has the gradients of the mean of the rows, for which the similarities are computed again."""
    torch.manual_seed(0)
    function = pair_losses()[loss]
    options = {"weight": torch.rand(40)} if weighted else {}
    leaves = [torch.randn(rows, 12, requires_grad=True) for rows in (40, 40, 90)]
    used = []

    def spied(grad: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
        key, bias = backward_op(grad, *rest)
        expected, key_sum, _ = rest[-3:]
        factor = 0 if not len(expected) or expected.isnan().any() else float(grad.sum() / expected.sum())
        used.append(key_sum.shape == key.shape and torch.allclose(factor * key_sum, key, rtol=1e-6, atol=0))
        return key, bias

    backward_op = ops_pairwise.backward_op
    monkeypatch.setattr(ops_pairwise, "backward_op", spied)
    mean, rows, truth = (
        torch.autograd.grad(2 * function(*inputs, reduction=reduction, **options).mean(), inputs, allow_unused=True)
        for inputs, reduction in (
            (leaves, "mean"), (leaves, "none"), ([t.detach().double().requires_grad_() for t in leaves], "none")
        )
    )  # fmt: skip
    assert used == [True, False, False]
    for a, b, t in zip(mean, rows, truth, strict=True):
        assert (a is None) == (b is None) == (t is None)
        if t is not None:
            assert_budget(loss, a, b, t, 1e-6)


@pytest.mark.parametrize(
    ("shift", "error", "message"),
    [(0.0, ValueError, "-inf.*0.0"), (math.nan, ValueError, "-inf.*nan"), ("0", TypeError, "number.*str")],
    ids=str,
)
def test_a_wrong_shift_is_refused(shift: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"expected.shift.*{message}"):
        ops.contrast_expecting(ops.Expected(shift), torch.randn(4, 3), torch.randn(9, 3))


@pytest.mark.parametrize("name", ["row_shift", "rest", "weight"])
def test_a_wrong_expectation_is_refused(name: str) -> None:
    query, key, positive = (torch.randn(rows, 3, requires_grad=True) for rows in (4, 9, 4))
    with pytest.raises(ValueError, match=rf"expected.{name}: expected shape \[4\], got \[5\]"):
        ops.contrast_expecting(ops.Expected(0.0, **{name: torch.zeros(5)}), query, key, positive)
    with pytest.raises(TypeError, match=rf"expected.{name}: expected dtype float64, .*got torch.int64"):
        ops.contrast_expecting(ops.Expected(0.0, **{name: torch.zeros(4).long()}), query, key, positive)


AMX = pytest.mark.skipif("amx" not in fastcl.config()["isas"], reason="no AMX here")
WILD = {
    "infinite": float("inf"),
    "nan": float("nan"),
    "huge": 1e25,
    "tiny": None,  # all of them
}


@AMX
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("kind", WILD)
def test_what_amx_cannot_hold_goes_to_avx512(kind: str, side: int) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(40, 24), torch.randn(300, 24)]
    if WILD[kind] is None:
        tensors[side] *= 1e-25
    else:
        tensors[side][7, 3] = WILD[kind]
    found = []
    for isa in ("avx512", "amx"):
        before = fastcl._build.set_isa(isa)
        try:
            query, key = (t.clone().requires_grad_() for t in tensors)
            loss = fastcl.dcl(query, torch.ones(40, 24), key, normalize=False, temperature=1.0)
            found.append([loss, *torch.autograd.grad(loss, (query, key))])
        finally:
            fastcl._build.set_isa(before)
    for a, b in zip(*found, strict=True):
        assert torch.equal(a.isnan(), b.isnan())
        assert torch.equal(a.nan_to_num(), b.nan_to_num())


@AMX
def test_amx_is_as_exact_as_float32() -> None:
    """Rows with entries of very different size: parts of bfloat16 that were lost would show in the small ones."""
    torch.manual_seed(0)
    scale = 10.0 ** torch.linspace(-6, 1, 96)
    query, key = torch.randn(50, 96) * scale, torch.randn(400, 96) / scale.sqrt()
    errors = {}
    truth = torch.logsumexp(query.double() @ key.double().T / 30, 1)
    for isa in ("avx512", "amx"):
        before = fastcl._build.set_isa(isa)
        errors[isa] = float((fastcl.contrast(query, key, scale=1 / 30)[1] - truth).abs().max())
        fastcl._build.set_isa(before)
    assert errors["amx"] <= 2 * errors["avx512"] + 1e-6
