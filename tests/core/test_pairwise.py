"""`softplus_sum` and the losses over pairs against their textbook twins, on every instruction set and on the chunked
path.
"""

import math
from typing import Any

import pytest
import torch
from conftest import TOLERANCE, assert_budget
from hypothesis import given
from problems import F32, F64, Problem, problems
from torch import Tensor

import fastcl
import fastcl.nn
from fastcl import fallback, ops_pairwise, reference

LOSSES = ["bpr", "negative_sampling", "jensen_shannon"]


def run(function: Any, tensors: dict[str, Tensor], rest: dict[str, Any], upstream: Tensor) -> dict[str, Tensor]:
    """The total and the gradient of every tensor input that a dtype can carry."""
    inputs = {name: t.detach().requires_grad_() for name, t in tensors.items()}
    total = function(
        inputs["query"], inputs["key"], **{k: v for k, v in inputs.items() if k not in ("query", "key")}, **rest
    )
    grads = torch.autograd.grad(total, list(inputs.values()), upstream.to(total.dtype), allow_unused=True)
    return {"total": total, **{f"grad {name}": g for name, g in zip(inputs, grads, strict=True) if g is not None}}


def leaves(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.clone().requires_grad_() for name, t in values.items()}


def check(problem: Problem) -> None:
    tensors, rest = problem.build()
    tensors.pop("positive", None)
    rest.pop("cap", None)  # sums over pairs have none
    g = torch.Generator().manual_seed(problem.seed)
    wide = F64 if F64 in (problem.query_dtype, problem.key_dtype) else F32
    tensors["offset"] = torch.randn(problem.n, generator=g, dtype=F64).to(wide)
    upstream, _ = problem.upstream(F64)
    ours = run(fastcl.softplus_sum, tensors, rest, upstream)
    plain = run(reference.softplus_sum, tensors, rest, upstream)
    truth = run(reference.softplus_sum, {k: v.double() for k, v in tensors.items()}, rest, upstream)
    floor = 8 * problem.largest_logit() * torch.finfo(wide).eps * max(problem.n, problem.m, 1)
    for name, value in ours.items():
        tolerance = max(TOLERANCE[value.dtype], TOLERANCE[F64] if wide == F64 else TOLERANCE[F32])
        assert_budget(name, value, plain[name], truth[name], tolerance, floor=floor / tolerance if tolerance else 0.0)


@given(problem=problems())
def test_agrees_with_the_truth(problem: Problem) -> None:
    check(problem)


@pytest.mark.parametrize("shape", [(1, 1, 1), (33, 65, 17), (12, 600, 128), (100, 3, 300)])
@pytest.mark.parametrize("ids", ["none", "few", "all_equal"])
def test_every_isa(isa: str, shape: tuple[int, int, int], ids: str) -> None:
    for dtype in (F64, F32):
        check(Problem(*shape, dtype, dtype, scale="rows", bias="some_inf", ids=ids, with_positive=False))


def test_extreme_logits_neither_overflow_nor_vanish(isa: str) -> None:
    for dtype in (F32, F64):
        x = torch.tensor([[-1e4], [-50.0], [-20.0], [0.0], [20.0], [50.0], [1e4], [torch.nan]], dtype=dtype)
        total = fastcl.softplus_sum(x, torch.ones(1, 1, dtype=dtype))
        truth = [0.0, math.exp(-50), math.log1p(math.exp(-20)), math.log(2), 20 + math.log1p(math.exp(-20)), 50.0, 1e4]
        for ours, value in zip(total.tolist(), truth, strict=False):
            assert ours == pytest.approx(value, rel=4e-7 if dtype == F32 else 4e-15)
        assert total[-1].isnan()


def test_frozen_keys_may_be_overwritten() -> None:
    query, key = torch.randn(5, 3, requires_grad=True), torch.randn(7, 3)
    expected = torch.autograd.grad(fastcl.softplus_sum(query, key).sum(), query)[0]
    total = fastcl.softplus_sum(query, key).sum()
    key.zero_()
    assert torch.equal(torch.autograd.grad(total, query)[0], expected)


@pytest.mark.parametrize("needs", ["query", "key", "scale", "offset", "bias"])
def test_gradcheck_and_gradgradcheck(needs: str) -> None:
    g = torch.Generator().manual_seed(0)
    shapes = {"query": (4, 3), "key": (5, 3), "scale": (4,), "offset": (4,), "bias": (5,)}
    tensors = {name: torch.randn(shape, generator=g, dtype=F64) for name, shape in shapes.items()}
    ids = {"row_id": torch.arange(4), "col_id": torch.arange(5)}
    tensors = {name: t.requires_grad_(name in (needs, "key")) for name, t in tensors.items()}

    def function(*values: Tensor) -> Tensor:
        named = dict(zip(shapes, values, strict=True))
        return fastcl.softplus_sum(named.pop("query"), named.pop("key"), **named, **ids)

    assert torch.autograd.gradcheck(function, tuple(tensors.values()))
    assert torch.autograd.gradgradcheck(function, tuple(tensors.values()))


def test_double_backward_with_frozen_keys_is_refused() -> None:
    query, key = torch.randn(3, 2, requires_grad=True), torch.randn(4, 2)
    first = torch.autograd.grad(fastcl.softplus_sum(query, key).sum(), query, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="pass a key that requires grad"):
        torch.autograd.grad(first.sum(), query)


def test_an_offset_made_from_the_query_is_counted_once() -> None:
    # As in bpr: with create_graph the gradient must be the same as without.
    query, key = torch.randn(3, 2, dtype=F64, requires_grad=True), torch.randn(4, 2, dtype=F64, requires_grad=True)

    def loss() -> Tensor:
        return fastcl.bpr(query, key[:3], key)

    plain = torch.autograd.grad(loss(), [query, key])
    torch.testing.assert_close(torch.autograd.grad(loss(), [query, key], create_graph=True), plain)
    torch.testing.assert_close(torch.autograd.grad(reference.bpr(query, key[:3], key), [query, key]), plain)
    assert torch.autograd.gradgradcheck(lambda q, k: fastcl.bpr(q, k[:3], k), (query, key))


def test_opcheck_compile_and_the_chunked_path() -> None:
    query, key = torch.randn(6, 5, requires_grad=True), torch.randn(9, 5, requires_grad=True)
    ids, none = (torch.arange(6) % 3, torch.arange(9) % 3), torch.empty(0)
    args = (query.detach(), key.detach(), none, torch.randn(6), torch.randn(9), *ids, 0.5)
    plain, no_sums = ops_pairwise.PLAIN, ops_pairwise.NO_SUMS
    torch.library.opcheck(ops_pairwise.forward_op, (*args, True, *plain))
    torch.library.opcheck(ops_pairwise.backward_op, (torch.randn(6), *args, True, True, *no_sums))
    if not fallback.FORCED:  # the compiled kernels alone sum over columns, and only over many
        many = (args[0], torch.randn(70, 5), *args[2:4], torch.randn(70), args[5], torch.arange(70), 0.5)
        torch.library.opcheck(ops_pairwise.forward_op, (*many, True, True, True, torch.rand(6)))
        sums = ops_pairwise.forward_op(*many, True, True, True, torch.rand(6))[3:]
        torch.library.opcheck(ops_pairwise.backward_op, (torch.randn(6), *many, True, True, *sums))
    fallback._announced.add("cpu")
    results = ops_pairwise._chunked_forward(*args, True), ops_pairwise.forward_op(*args, True, *plain)
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)
    upstream = torch.randn(6)
    for ours, theirs in zip(
        ops_pairwise._chunked_backward(upstream, *args, True, True),
        ops_pairwise.backward_op(upstream, *args, True, True, *no_sums),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)
    compiled = torch.compile(lambda q, k: fastcl.bpr(q, k[:6], k), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        torch.autograd.grad(compiled(query, key), [query, key]),
        torch.autograd.grad(fastcl.bpr(query, key[:6], key), [query, key]),
    )


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("dtype", [F64, F32, torch.bfloat16])
def test_losses_agree_with_their_twins(loss: str, private: bool, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(1)
    shapes = {"query": (9, 5), "positive_key": (9, 5), "negative_keys": (9, 4, 5) if private else (33, 5)}
    values = {name: torch.randn(shape, generator=g, dtype=F64).to(dtype) for name, shape in shapes.items()}
    for reduction in ("mean", "sum", "none"):
        ours_in, truth_in = leaves(values), leaves({k: v.double() for k, v in values.items()})
        ours = getattr(fastcl, loss)(**ours_in, reduction=reduction)
        truth = getattr(reference, loss)(**truth_in, reduction=reduction)
        torch.testing.assert_close(
            ours.double(), truth, rtol=1e-12 if dtype == F64 else 2e-6, atol=1e-12 if dtype == F64 else 1e-5
        )
        weight = torch.linspace(0.5, 1.5, 9, dtype=F64) if reduction == "none" else torch.tensor(1.0, dtype=F64)
        for a, b in zip(
            torch.autograd.grad((ours.double() * weight).sum(), list(ours_in.values())),
            torch.autograd.grad((truth * weight).sum(), list(truth_in.values())),
            strict=True,
        ):
            torch.testing.assert_close(
                a.double(), b, rtol=1e-11 if dtype == F64 else 1e-2, atol=1e-11 if dtype == F64 else 2e-2
            )


@pytest.mark.parametrize("loss", [*LOSSES, "triplet"])
@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("argument", [0, 1, 2, 3])
def test_gradcheck_of_each_input(loss: str, private: bool, argument: int) -> None:
    g = torch.Generator().manual_seed(4)
    negatives = (3, 4) if loss == "triplet" else (3, 2, 4) if private else (5, 4)
    values = [torch.randn(shape, generator=g, dtype=F64) for shape in ((3, 4), (3, 4), negatives)]
    values = [*values, torch.rand(3, generator=g, dtype=F64)]
    inputs = tuple(v.requires_grad_(i == argument) for i, v in enumerate(values))
    assert torch.autograd.gradcheck(lambda q, p, k, w: getattr(fastcl, loss)(q, p, k, weight=w), inputs)


@pytest.mark.parametrize("learn", [True, False])
def test_siglip_agrees_with_its_twin(learn: bool) -> None:
    g = torch.Generator().manual_seed(2)
    query, key = (torch.randn(33, 7, generator=g, dtype=F64).requires_grad_() for _ in range(2))
    scale, bias = (torch.tensor(v, dtype=F64).requires_grad_() if learn else v for v in (3.0, -2.0))
    inputs = [query, key] + ([scale, bias] if learn else [])
    ours, truth = fastcl.siglip(query, key, scale, bias), reference.siglip(query, key, scale, bias)
    torch.testing.assert_close(ours, truth)
    torch.testing.assert_close(torch.autograd.grad(ours, inputs), torch.autograd.grad(truth, inputs))
    if learn:
        small = [t.detach()[:4].requires_grad_() if t.dim() else t for t in inputs]
        assert torch.autograd.gradcheck(fastcl.siglip, tuple(small))


def test_weights_and_modules() -> None:
    g = torch.Generator().manual_seed(3)
    x, y, z = (torch.randn(6, 4, generator=g, dtype=F64) for _ in range(3))
    weight = torch.rand(6, generator=g, dtype=F64)
    calls = {
        "bpr": (fastcl.nn.BPR, (x, y, z), {}),
        "negative_sampling": (fastcl.nn.NegativeSampling, (x, y, z), {}),
        "jensen_shannon": (fastcl.nn.JensenShannon, (x, y, z), {}),
        "triplet": (fastcl.nn.Triplet, (x, y, z), {"margin": 0.7}),
        "siglip": (fastcl.nn.SigLIP, (x, y), {"logit_scale": 2.0, "logit_bias": -1.0}),
    }
    for name, (module, args, fixed) in calls.items():
        for reduction in ("mean", "sum", "none"):
            truth = getattr(reference, name)(*args, **fixed, reduction=reduction, weight=weight)
            torch.testing.assert_close(getattr(fastcl, name)(*args, **fixed, reduction=reduction, weight=weight), truth)
            torch.testing.assert_close(module(**fixed, reduction=reduction)(*args, weight=weight), truth)
        with pytest.raises(ValueError, match=r"weight: expected shape \[6\]"):
            getattr(fastcl, name)(*args, **fixed, weight=weight[:2])


def test_hand_computed() -> None:
    query, positive = torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0, 0.0]])
    negatives = torch.tensor([[0.0, 1.0], [3.0, 0.0]])  # logits: positive 2, negatives 2 and 3

    def soft(x: float) -> float:
        return math.log1p(math.exp(x))

    assert fastcl.bpr(query, positive, negatives).item() == pytest.approx(soft(0) + soft(1), rel=1e-6)
    assert fastcl.negative_sampling(query, positive, negatives).item() == pytest.approx(
        soft(-2) + soft(2) + soft(3), rel=1e-6
    )
    js = soft(-2) + (soft(2) + soft(3)) / 2
    assert fastcl.jensen_shannon(query, positive, negatives).item() == pytest.approx(js, rel=1e-6)
    assert fastcl.triplet(query, positive, negatives[1:], margin=0.5).item() == pytest.approx(3 - 2 + 0.5)
    assert fastcl.triplet(query, positive, negatives[:1] * 0, margin=0.5).item() == 0.0


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: fastcl.bpr(x, x[:1], x), ValueError, r"positive_key: expected shape \[3, 2\].*got \[1, 2\]"),
        (lambda x: fastcl.bpr(x, x, x[:, :1]), ValueError, r"negative_keys: expected shape .*got \[3, 1\]"),
        (lambda x: fastcl.negative_sampling(x, x, x.long()), TypeError, "negative_keys: expected dtype float64"),
        (lambda x: fastcl.bpr(x, x, x, reduction="max"), ValueError, "reduction: expected"),
        (lambda x: fastcl.bpr(x, x, None), TypeError, "negative_keys: expected a tensor, got NoneType"),
        (lambda x: fastcl.negative_sampling(x, x, None), TypeError, "negative_keys: expected a tensor, got NoneType"),
        (lambda x: fastcl.jensen_shannon(x, x, None), TypeError, "negative_keys: expected a tensor, got NoneType"),
        (lambda x: fastcl.siglip(x, x[:1], 1.0, 0.0), ValueError, r"^key: expected shape .*of query.*\[1, 2\]"),
        (lambda x: fastcl.siglip(x, x.long(), 1.0, 0.0), TypeError, "^key: expected dtype float64"),
        (lambda x: fastcl.softplus_sum(x, x, scale=torch.tensor(2)), TypeError, "^scale: expected dtype float64"),
        (lambda x: fastcl.softplus_sum(x, x, scale=x.new_ones((), device="meta")), ValueError, "^scale: .*meta"),
        (lambda x: fastcl.siglip(x, x, x.new_ones((), device="meta"), 0.0), ValueError, "^logit_scale: .*meta"),
        (lambda x: fastcl.triplet(x, x.to(torch.float8_e4m3fn), x), TypeError, "^positive: expected dtype float64"),
        (lambda x: fastcl.triplet(x[0], x, x), ValueError, r"^anchor: expected shape \[N, D\]"),
        (lambda x: fastcl.siglip(x, x, "1", 0.0), TypeError, "logit_scale: expected a number or a tensor, got str"),
        (
            lambda x: fastcl.siglip(x, x, 1.0, x),
            ValueError,
            r"logit_bias: expected a number or a 0-d tensor, got shape \[3, 2\]",
        ),
        (
            lambda x: fastcl.triplet(x, x, x, margin=0.0),
            ValueError,
            "margin: expected a finite number above 0, got 0.0",
        ),
        (lambda x: fastcl.triplet(x, x, x[:2]), ValueError, r"negative: expected shape \[3, 2\], got \[2, 2\]"),
        (lambda x: fastcl.softplus_sum(x, x, offset=x[0]), ValueError, r"offset: expected shape \[3\], got \[2\]"),
        (lambda x: fastcl.softplus_sum(x, x, row_id=torch.arange(3)), ValueError, "col_id: expected both"),
        (lambda x: fastcl.softplus_sum(x, x, scale="2"), TypeError, "scale: expected a number or a tensor, got str"),
    ],
)
def test_refused(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(torch.ones(3, 2))


@pytest.mark.parametrize(("n", "m", "groups"), [(6, 6, 3), (5, 9, 4), (9, 4, 2), (4, 7, 50), (1, 1, 1)])
@pytest.mark.parametrize("dtype", [F64, F32])
def test_siglip_of_groups_agrees_with_its_twin(n: int, m: int, groups: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(n)
    query, key = (torch.randn(size, 5, generator=g, dtype=F64).to(dtype) for size in (n, m))
    scale, bias = torch.tensor(1.7, dtype=dtype), torch.tensor(-2.0, dtype=dtype)
    weight = torch.rand(n, generator=g, dtype=F64).to(dtype)
    ids, key_ids = (torch.randint(groups, (size,), generator=g) for size in (n, m))
    inputs = leaves({"query": query, "key": key, "logit_scale": scale, "logit_bias": bias, "weight": weight})
    ours = fastcl.siglip(**inputs, ids=ids.int(), key_ids=key_ids, reduction="none")
    truth = reference.siglip(**inputs, ids=ids, key_ids=key_ids, reduction="none")
    within = 1e-12 if dtype == F64 else 2e-5
    torch.testing.assert_close(ours, truth, rtol=within, atol=within)
    grads = [torch.autograd.grad(loss.sum(), list(inputs.values())) for loss in (ours, truth)]
    torch.testing.assert_close(grads[0], grads[1], rtol=10 * within, atol=10 * within)
    if dtype == F64:

        def call(*args: Tensor) -> Tensor:
            return fastcl.siglip(*args[:4], weight=args[4], ids=ids, key_ids=key_ids)

        assert torch.autograd.gradcheck(call, tuple(inputs.values()))


def test_siglip_with_an_id_of_its_own_for_each_row_is_siglip() -> None:
    query, key = torch.randn(7, 3), torch.randn(7, 3)
    own, mixed = torch.arange(7), torch.randperm(7)
    plain = fastcl.siglip(query, key, 2.0, -1.0)
    torch.testing.assert_close(fastcl.siglip(query, key[mixed], 2.0, -1.0, ids=own, key_ids=mixed), plain)
    with pytest.raises(ValueError, match="key_ids: expected both ids and key_ids or neither"):
        fastcl.siglip(query, key, ids=own)
    with pytest.raises(ValueError, match=r"key: expected shape \[M, 3\], got \[7, 2\]"):
        fastcl.siglip(query, key[:, :2], ids=own, key_ids=own)
