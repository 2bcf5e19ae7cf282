"""The recommenders' losses: against their twins, with their gradients, and what they come down to."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import DTYPES, F64, Batch, batches
from torch import Tensor
from twins import assert_equals_twin, assert_family_equals_twin

import fastcl

pytestmark = pytest.mark.usefixtures("one_thread")


def _randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def _ids(seed: int, *shape: int, below: int = 3) -> Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(seed))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return F64 if dtype == F64 else torch.float32


def _longest(*rows: Tensor) -> float:
    """The largest inner product that rows of two matrices may have."""
    return rows[0].norm(dim=-1).max().item() * max(x.norm(dim=-1).max().item() for x in rows[1:])


def _pairs(n: int, k: int, d: int, private: bool) -> dict[str, Tensor]:
    negative = _randn(3, n, k, d) if private else _randn(3, k, d)
    return {"query": _randn(1, n, d) / d**0.5, "positive_key": _randn(2, n, d), "negative_keys": negative}


@given(
    n=st.sampled_from([1, 9, 33]),
    k=st.sampled_from([1, 7, 65]),
    d=st.sampled_from([1, 17, 64]),
    private=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    ids=st.booleans(),
    biased=st.booleans(),
    weighted=st.booleans(),
    reduction=st.sampled_from(["mean", "sum", "none"]),
)
def test_gbce_equals_its_twin(
    n: int, k: int, d: int, private: bool, dtype: torch.dtype, ids: bool, biased: bool, weighted: bool, reduction: str
) -> None:
    pairs = _pairs(n, k, d, private)
    learn = {name: x.to(dtype) for name, x in pairs.items()}
    rest: dict[str, Any] = {"reduction": reduction, "catalogue": 40, "calibration": 0.6}
    shape = (n, k) if private else (k,)
    if ids:
        rest |= {"ids": _ids(4, n), "negative_ids": _ids(5, *shape).to(torch.int32)}
    if biased:
        learn |= {"positive_bias": _randn(6, n).to(_wide(dtype)), "negative_bias": _randn(7, *shape).to(_wide(dtype))}
    if weighted:
        learn["weight"] = _randn(8, n).abs().to(_wide(dtype))
    longest = _longest(*pairs.values())
    assert_equals_twin("gbce", learn, rest, longest, floor=max(4.0, longest * k))


def test_gbce_is_between_binary_cross_entropy_and_the_calibrated_one() -> None:
    x = _pairs(6, 4, 5, private=True)
    plain = fastcl.negative_sampling(**x) / 5
    assert torch.allclose(fastcl.gbce(**x, catalogue=101, calibration=0.0), plain)
    assert torch.allclose(fastcl.gbce(**x, catalogue=5, calibration=1.0), plain)  # all negatives there are
    up = torch.nn.functional.softplus(-(x["query"] * x["positive_key"]).sum(1)).mean()
    assert torch.allclose(fastcl.gbce(**x, catalogue=101, calibration=1.0), plain - up * (1 - 0.04) / 5)


def _distinct(seed: int, n: int, d: int) -> Tensor:
    """Rows of which no two have a feature in common, not even rounded to 16 bits."""
    return _randn(seed, n, d).argsort(0) / 16 - n / 32


@given(
    n=st.sampled_from([1, 9, 33]),
    c=st.sampled_from([1, 31, 65]),
    d=st.sampled_from([1, 17, 64]),
    b=st.sampled_from([1, 3, 8]),
    dtype=st.sampled_from(DTYPES),
    temperature=st.sampled_from(["float", "tensor", "rows"]),
    biased=st.booleans(),
    weighted=st.booleans(),
    reduction=st.sampled_from(["mean", "sum", "none"]),
)
def test_sce_equals_its_twin(
    n: int, c: int, d: int, b: int, dtype: torch.dtype, temperature: str, biased: bool, weighted: bool, reduction: str
) -> None:
    table, rows = _distinct(1, c, d) / d**0.5, _distinct(2, n, d)
    learn = {"input": rows.to(dtype), "linear_weight": table.to(dtype)}
    target = _ids(4, n, below=c)
    target[::4] = -100
    rest: dict[str, Any] = {"target": target, "reduction": reduction, "bucket_rows": 7, "bucket_classes": 12}
    # Directions of one feature each, in which no two rows are equal: their order is then that of the twin.
    rest["buckets"] = torch.eye(d, dtype=_wide(dtype))[_ids(5, b, below=d)]
    if temperature != "float":
        cold = (0.3 + _randn(9, n).abs()).to(_wide(dtype))
        learn["temperature"] = cold if temperature == "rows" else cold[0]
    if biased:
        learn["linear_bias"] = _randn(6, c).to(_wide(dtype))
    if weighted:
        learn["row_weight"] = _randn(7, n).abs().to(_wide(dtype))
    longest = _longest(rows, table) / 0.3
    assert_equals_twin("sce", learn, rest, longest, floor=max(4.0, longest))


def test_sce_of_one_bucket_with_everything_is_the_full_softmax() -> None:
    rows, table, target = _randn(1, 8, 5), _randn(2, 11, 5), _ids(3, 8, below=11)
    target[2] = -100
    whole = fastcl.linear_cross_entropy(rows, table, target)
    assert torch.allclose(fastcl.sce(rows, table, target, buckets=1, bucket_rows=8, bucket_classes=11), whole)


def test_sce_draws_from_the_generator_and_approaches_the_full_softmax() -> None:
    rows, table, target = _randn(1, 40, 8), _randn(2, 300, 8), _ids(3, 40, below=300)

    def found(seed: int, **options: int) -> Tensor:
        torch.manual_seed(seed)
        return fastcl.sce(rows, table, target, **options)

    whole = fastcl.linear_cross_entropy(rows, table, target)
    few, many = (found(0, buckets=30, bucket_rows=20, bucket_classes=size) for size in (10, 150))
    assert few < many < whole  # a bucket holds some of the classes
    assert whole - many < 0.1 * (whole - found(0, buckets=1, bucket_rows=40, bucket_classes=1))
    assert torch.equal(found(0), found(0))
    assert not torch.equal(found(0, bucket_classes=10), found(1, bucket_classes=10))


def test_sce_leaves_rows_in_no_bucket_out_of_the_mean() -> None:
    rows, table, target = _randn(1, 9, 4).requires_grad_(), _randn(2, 7, 4), _ids(3, 9, below=7)
    options: dict[str, Any] = {"buckets": _randn(4, 2, 4), "bucket_rows": 3, "bucket_classes": 4}
    each = fastcl.sce(rows, table, target, reduction="none", **options)
    assert 3 <= (each != 0).sum() <= 6
    total = fastcl.sce(rows, table, target, **options)
    assert torch.allclose(total, each.sum() / (each != 0).sum())
    (grad,) = torch.autograd.grad(total, rows)
    assert torch.equal(grad.abs().sum(1) != 0, each != 0)


@given(
    loss=st.sampled_from(["ccl", "psl"]),
    n=st.sampled_from([1, 9, 33]),
    k=st.sampled_from([1, 7, 65]),
    d=st.sampled_from([1, 17, 64]),
    private=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    ids=st.booleans(),
    weighted=st.booleans(),
    reduction=st.sampled_from(["mean", "sum", "none"]),
)
def test_losses_of_stored_similarities_equal_their_twins(
    loss: str, n: int, k: int, d: int, private: bool, dtype: torch.dtype, ids: bool, weighted: bool, reduction: str
) -> None:
    pairs = _pairs(n, k, d, private)
    learn = {name: x.to(dtype) for name, x in pairs.items()}
    rest: dict[str, Any] = {"reduction": reduction}
    if loss == "ccl":  # whose margin is at none of the similarities, also if rounded to 16 bits
        rest |= {"margin": 0.123456, "negative_weight": 3.0}
    else:
        learn["temperature"] = (0.3 + _randn(9, n).abs()).to(_wide(dtype))
    if ids:
        rest |= {"ids": _ids(4, n), "negative_ids": _ids(5, *((n, k) if private else (k,))).to(torch.int32)}
    if weighted:
        learn["weight"] = _randn(8, n).abs().to(_wide(dtype))
    longest = _longest(*pairs.values()) if loss == "ccl" else 1 / 0.3
    assert_equals_twin(loss, learn, rest, longest, floor=max(4.0, 4 * longest))


@pytest.mark.parametrize("n", [1, 2, 33])
@pytest.mark.parametrize("dtype", DTYPES)
def test_directau_equals_its_twin(n: int, dtype: torch.dtype) -> None:
    rows = [torch.nn.functional.normalize(_randn(seed, n, 17), dim=1) for seed in (1, 2)]
    learn = {"query": rows[0].to(dtype), "positive_key": rows[1].to(dtype)}
    assert_equals_twin("directau", learn, {"gamma": 0.7, "t": 1.5}, 8.0, floor=4.0)


@given(batch=batches())
def test_bsl_with_users_that_come_twice_equals_its_twin(batch: Batch) -> None:
    assert_family_equals_twin("bsl", batch, {"group": _ids(7, batch.n), "positive_temperature": 0.4})


@given(batch=batches())
def test_sl_at_k_with_a_threshold_a_row_equals_its_twin(batch: Batch) -> None:
    threshold = _randn(7, batch.n).to(torch.float32)
    assert_family_equals_twin("sl_at_k", batch, {"threshold": threshold, "weight_temperature": 0.6})


def test_bsl_is_mine_where_no_user_comes_twice() -> None:
    x = _pairs(6, 4, 5, private=False)
    for group in (None, torch.arange(6)):
        assert torch.allclose(fastcl.bsl(**x, group=group, positive_temperature=0.7), fastcl.mine(**x))


def test_bsl_is_the_mean_over_its_users() -> None:
    """The sum over a user's rows is the user's own loss times the number of rows, divided by T."""
    x, user = _pairs(4, 5, 3, private=False), torch.tensor([1, 1, 1, 9])
    found = fastcl.bsl(**x, temperature=0.5, group=user, positive_temperature=0.8, normalize=False, reduction="none")
    up = (x["query"] * x["positive_key"]).sum(1) / 0.8
    down = torch.logsumexp(x["query"] @ x["negative_keys"].T / 0.5, 1) - torch.tensor(5.0).log()
    first = 0.5 * down[:3].sum() - 3 * 0.8 * (torch.logsumexp(up[:3], 0) - torch.tensor(3.0).log())
    assert torch.allclose(0.5 * found[:3].sum(), first)


def test_sl_at_k_with_a_distant_threshold_is_dcl_or_nothing() -> None:
    x = _pairs(6, 4, 5, private=False)
    assert torch.allclose(fastcl.sl_at_k(**x, threshold=-100.0), fastcl.dcl(**x))
    assert fastcl.sl_at_k(**x, threshold=100.0).abs() < 1e-30


def test_psl_with_the_identity_is_dcl_and_its_surrogates_are_bounds() -> None:
    x = _pairs(6, 4, 5, private=False)
    assert torch.allclose(fastcl.psl(**x, temperature=0.2, surrogate=lambda d: d), fastcl.dcl(**x, temperature=0.4))
    d = torch.linspace(-1, 1, 41, dtype=F64)
    for surrogate in (fastcl.psl_tanh, fastcl.psl_atan, fastcl.psl_relu):
        assert ((d >= 0).double() <= surrogate(d).exp() + 1e-12).all()
        assert (surrogate(d) <= d + 1e-12).all()


def test_surrogates_send_no_gradient_where_they_are_zero() -> None:
    x = {name: v.requires_grad_() for name, v in _pairs(6, 4, 5, private=False).items()}
    for surrogate in (fastcl.psl_atan, fastcl.psl_relu):
        each = surrogate(torch.tensor([-5.0, 0.0], requires_grad=True))
        assert each.tolist() == [-torch.inf, 0.0]
        far = fastcl.psl(**{n: 20 * v for n, v in x.items()}, normalize=False, surrogate=surrogate)
        assert all(g.isfinite().all() for g in torch.autograd.grad(far, list(x.values())))


def test_sogclr_averages_the_denominators_of_a_sample() -> None:
    """Three steps by hand, of samples that come again with other negatives."""
    seen, held = fastcl.Denominators(6, gamma=0.3), {}
    for step, index in enumerate([[0, 4], [4, 1], [0, 1]]):
        q, p = (torch.nn.functional.normalize(_randn(seed + 10 * step, 2, 3), dim=1) for seed in (1, 2))
        q.requires_grad_()
        loss = fastcl.sogclr(q, p, torch.tensor(index), seen, temperature=0.5, reduction="none", normalize=False)
        other = (q * p.flip(0)).sum(1) / 0.5  # the only negative of each row
        for row, sample in enumerate(index):
            mean = other[row].exp().item()
            held[sample] = 0.7 * held[sample] + 0.3 * mean if sample in held else mean
        u = torch.tensor([held[sample] for sample in index])
        assert torch.allclose(loss, other.exp() / u - (q * p).sum(1) / 0.5, rtol=1e-5)
        (found,) = torch.autograd.grad(loss.sum(), q)
        (expected,) = torch.autograd.grad((other.exp() / u - (q * p).sum(1) / 0.5).sum(), q)
        assert torch.allclose(found, expected, rtol=1e-5)
        for sample, value in held.items():
            assert seen.log_average[sample].exp().item() == pytest.approx(value, rel=1e-5)
    assert seen.log_average.isinf().sum() == 3


def test_denominators_copy_save_and_load_and_only_read_in_eval() -> None:
    x, index = {"query": _randn(1, 4, 3), "positive_key": _randn(2, 4, 3)}, torch.arange(4)
    seen = fastcl.Denominators(5)
    fastcl.sogclr(**x, index=index, denominators=seen)
    copied, loaded = copy.deepcopy(seen), fastcl.Denominators(5)
    file = io.BytesIO()
    torch.save(seen.state_dict(), file)
    file.seek(0)
    loaded.load_state_dict(torch.load(file))
    again = {"query": x["query"].flip(1), "positive_key": x["positive_key"]}
    values = [fastcl.sogclr(**again, index=index, denominators=each) for each in (seen, copied, loaded)]
    assert values[0] == values[1] == values[2]
    assert torch.equal(seen.log_average, copied.log_average)
    assert torch.equal(seen.log_average, loaded.log_average)
    module = fastcl.nn.SogCLR(seen)
    assert list(module.state_dict()) == ["denominators.log_average"]
    before = seen.log_average.clone()
    module.eval()(**x, index=index)
    assert torch.equal(seen.log_average, before)
    module.train()(**x, index=index)
    assert not torch.equal(seen.log_average, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, F64], ids=str)
def test_denominators_stay_float32_in_a_model_of_another_dtype(dtype: torch.dtype) -> None:
    seen, other = (fastcl.Denominators(4, gamma=0.01) for _ in range(2))
    for step in range(3):
        x = {"query": _randn(step, 4, 3), "positive_key": _randn(step + 9, 4, 3)}
        for each in (seen, other):
            fastcl.sogclr(**x, index=torch.arange(4), denominators=each)
        assert torch.equal(seen.log_average, other.log_average)
        fastcl.nn.SogCLR(seen).to(dtype)


def test_sogclr_with_gamma_1_has_the_gradient_of_mine_and_keeps_averages_of_rows_without_negatives() -> None:
    x = {name: v.requires_grad_() for name, v in _pairs(6, 4, 5, private=False).items()}
    index = torch.arange(6)
    seen = fastcl.Denominators(6, gamma=1.0)
    found = torch.autograd.grad(fastcl.sogclr(**x, index=index, denominators=seen), list(x.values()))
    expected = torch.autograd.grad(fastcl.mine(**x), list(x.values()))
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other)
    before = seen.log_average.clone()
    alone = {"query": x["query"], "positive_key": x["positive_key"], "ids": torch.zeros(6, dtype=torch.int64)}
    loss = fastcl.sogclr(**alone, index=index, denominators=seen)
    assert loss == 0
    assert torch.equal(torch.autograd.grad(loss, x["query"])[0], torch.zeros(6, 5, dtype=F64))
    assert torch.equal(seen.log_average, before)


def _averages() -> fastcl.Denominators:
    seen = fastcl.Denominators(6)
    seen.log_average = _randn(3, 6)
    return seen.eval()


GRADCHECKED: dict[str, tuple[dict[str, Tensor], dict[str, Any]]] = {
    "gbce": (
        _pairs(4, 3, 2, private=False) | {"positive_bias": _randn(6, 4), "negative_bias": _randn(7, 3)},
        {"catalogue": 9, "ids": _ids(1, 4), "negative_ids": _ids(2, 3)},
    ),
    "ccl": (_pairs(4, 3, 2, private=True), {"margin": 0.123456, "negative_weight": 2.0}),
    "psl": (_pairs(4, 3, 2, private=False) | {"temperature": 0.5 + _randn(9, 4).abs()}, {}),
    "directau": ({"query": _randn(1, 4, 3), "positive_key": _randn(2, 4, 3)}, {"gamma": 0.7}),
    "bsl": (
        _pairs(4, 3, 2, private=False) | {"temperature": torch.tensor(0.5, dtype=F64)},
        {"group": torch.tensor([3, 1, 3, 3]), "positive_temperature": 0.4, "in_batch": True},
    ),
    "sl_at_k": (_pairs(4, 3, 2, private=False), {"threshold": 0.3, "temperature": 0.5}),
    "sogclr": (
        _pairs(4, 3, 2, private=False),
        {"index": torch.tensor([1, 4, 4, 0]), "denominators": _averages(), "temperature": 0.5},
    ),
    "sce": (
        {"input": _randn(1, 5, 3), "linear_weight": _randn(2, 6, 3), "linear_bias": _randn(3, 6),
         "temperature": 0.5 + _randn(9, 5).abs()},
        {"target": _ids(4, 5, below=6), "buckets": _randn(5, 2, 3), "bucket_rows": 3, "bucket_classes": 4},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GRADCHECKED)
def test_gradients_of_any_order(name: str) -> None:
    learn, rest = GRADCHECKED[name]
    names, values = list(learn), [x.clone().requires_grad_() for x in learn.values()]

    def call(*args: Tensor) -> Tensor:
        reduction = {} if name == "directau" else {"reduction": "none"}
        return getattr(fastcl, name)(**dict(zip(names, args, strict=True)), **rest, **reduction)

    assert torch.autograd.gradcheck(call, values)
    assert torch.autograd.gradgradcheck(call, values)


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("gbce", {"catalogue": 1}, "catalogue: expected at least 2, got 1"),
        ("gbce", {"catalogue": 2.0}, "catalogue: expected an int, got float"),
        ("gbce", {"calibration": 1.5}, "calibration: expected a finite number from 0 to 1, got 1.5"),
        ("gbce", {"negative_ids": None}, "negative_ids: expected both ids and negative_ids or neither"),
        ("ccl", {"margin": "a"}, "margin: expected a number, got str"),
        ("ccl", {"negative_weight": -1.0}, "negative_weight: expected a finite number at least 0, got -1.0"),
        ("psl", {"surrogate": "tanh"}, "surrogate: expected a function of differences, got str"),
        ("psl", {"surrogate": torch.sum}, "surrogate: expected shape"),
        ("directau", {"gamma": -1.0}, "gamma: expected a finite number at least 0, got -1.0"),
        ("bsl", {"group": torch.arange(3)}, r"group: expected shape \[4\], got \[3\]"),
        ("bsl", {"positive_temperature": 0.0}, "positive_temperature: expected a finite number above 0, got 0.0"),
        ("sl_at_k", {"threshold": torch.ones(3)}, r"threshold: expected a number or a tensor of shape \[\] or \[4\]"),
        ("sogclr", {"index": torch.full((4,), 6)}, r"index: expected values in \[0, 6\), got 6"),
        ("sogclr", {"denominators": 0.5}, "denominators: expected a fastcl.Denominators, got float"),
        ("sce", {"target": torch.full((5,), 6)}, r"target: expected values in \[0, 6\)"),
        ("sce", {"bucket_rows": 0}, "bucket_rows: expected at least 1, got 0"),
        ("sce", {"bucket_classes": 2.0}, "bucket_classes: expected an int, got float"),
        ("sce", {"bucket_classes": None}, "bucket_classes: expected an int, got NoneType"),
        ("sce", {"bucket_rows": torch.tensor([3, 4])}, "bucket_rows: expected an int, got Tensor"),
        ("sce", {"buckets": torch.randn(2, 4)}, r"buckets: expected shape \[B, 3\], got \[2, 4\]"),
    ],
)
def test_errors_name_the_argument(name: str, wrong: dict[str, Any], message: str) -> None:
    learn, rest = GRADCHECKED[name]
    with pytest.raises((TypeError, ValueError), match=message):
        getattr(fastcl, name)(**(learn | rest | wrong))
