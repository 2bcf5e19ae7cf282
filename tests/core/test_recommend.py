"""The recommenders' losses: against their twins, with their gradients, and what they come down to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import DTYPES, F64
from torch import Tensor
from twins import assert_equals_twin

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


GRADCHECKED: dict[str, tuple[dict[str, Tensor], dict[str, Any]]] = {
    "gbce": (
        _pairs(4, 3, 2, private=False) | {"positive_bias": _randn(6, 4), "negative_bias": _randn(7, 3)},
        {"catalogue": 9, "ids": _ids(1, 4), "negative_ids": _ids(2, 3)},
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
        return getattr(fastcl, name)(**dict(zip(names, args, strict=True)), **rest, reduction="none")

    assert torch.autograd.gradcheck(call, values)
    assert torch.autograd.gradgradcheck(call, values)


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("gbce", {"catalogue": 1}, "catalogue: expected at least 2, got 1"),
        ("gbce", {"catalogue": 2.0}, "catalogue: expected an int, got float"),
        ("gbce", {"calibration": 1.5}, "calibration: expected a finite number from 0 to 1, got 1.5"),
        ("gbce", {"negative_ids": None}, "negative_ids: expected both ids and negative_ids or neither"),
        ("sce", {"target": torch.full((5,), 6)}, r"target: expected values in \[0, 6\)"),
        ("sce", {"bucket_rows": 0}, "bucket_rows: expected at least 1, got 0"),
        ("sce", {"bucket_classes": 2.0}, "bucket_classes: expected an int, got float"),
        ("sce", {"buckets": torch.randn(2, 4)}, r"buckets: expected shape \[B, 3\], got \[2, 4\]"),
    ],
)
def test_errors_name_the_argument(name: str, wrong: dict[str, Any], message: str) -> None:
    learn, rest = GRADCHECKED[name]
    with pytest.raises((TypeError, ValueError), match=message):
        getattr(fastcl, name)(**(learn | rest | wrong))
