"""Tables in memory: every library's columns mean what a file would, to the last digit of an id."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch

from fastcl.recsys.data import Interactions

pandas, polars, pyarrow = (pytest.importorskip(name) for name in ("pandas", "polars", "pyarrow"))

LARGE = [2**53 + 1, 2**53 + 2, None, 2**63 - 1]
MOMENTS = [
    *(dt.datetime(2017, 10, 1, hour, tzinfo=dt.timezone.utc) for hour in (12, 11)),
    None,
    dt.datetime(2017, 10, 2, tzinfo=dt.timezone(dt.timedelta(hours=2))),
]
USERS = ["a", "b", "c", "d"]


def _pandas(columns: dict[str, list[Any]], **types: str) -> Any:
    typed = {name: pandas.array(columns[name], dtype=kind) for name, kind in types.items()}
    return pandas.DataFrame({**columns, **typed})


FRAMES: dict[str, Callable[[dict[str, list[Any]]], Any]] = {
    "mapping": dict,
    "pandas": lambda columns: _pandas(columns, item="Int64"),
    "pandas of arrow": lambda columns: _pandas(columns, item="int64[pyarrow]"),
    "polars": polars.DataFrame,
    "polars, lazy": polars.LazyFrame,
    "pyarrow": pyarrow.table,
    "pyarrow, batch": lambda columns: pyarrow.table(columns).to_batches()[0],
}


@pytest.mark.parametrize("form", FRAMES)
def test_integers_beside_missing_values_are_exact_in_every_library(form: str) -> None:
    make = FRAMES[form]
    data = Interactions.read(make({"user": USERS, "item": LARGE, "more": LARGE}), time=None, on_error="skip")
    assert data.items.ids == tuple(str(item) for item in LARGE if item is not None)
    assert data.report is not None
    assert data.report.dropped == {"missing item id": 1}
    turned = make({"user": USERS, "item": LARGE})
    assert Interactions.read(turned, user="item", item="user", time=None, on_error="skip").users == data.items.ids
    titled = data.with_features(make({"user": USERS, "item": LARGE}))
    assert titled.items.features["user"].values == ("a", "b", "d")


@pytest.mark.parametrize("form", FRAMES)
def test_moments_with_a_zone_and_missing_ones(form: str) -> None:
    log = FRAMES[form]({"user": ["u"] * 4, "item": [1, 2, 3, 4], "time": MOMENTS})
    data = Interactions.read(log, on_error="skip")
    assert data.log.time is not None
    assert data.log.time.tolist() == [1_506_855_600, 1_506_859_200, 1_506_895_200]
    assert [data.items.ids[i - 1] for i in data.log.item] == ["2", "1", "4"]
    assert data.report is not None
    assert data.report.dropped == {"missing time": 1}


HALF = np.array([1, 2, 3], np.float16)
NARROW = {
    "float16": HALF,
    "float32": HALF.astype(np.float32),
    "torch": torch.tensor([1.0, 2.0, 3.0]),
    "pandas": pandas.array([1, 2, None], dtype="Float32"),
    "pandas of arrow": pandas.array([1, 2, None], dtype="float[pyarrow]"),
    "polars": polars.Series([1, 2, None], dtype=polars.Float32),
    "pyarrow": pyarrow.array([1, 2, None], pyarrow.float32()),
    "pyarrow, half": pyarrow.array(HALF),
}


@pytest.mark.parametrize("kind", NARROW)
@pytest.mark.parametrize("option", ["user", "item", "time", "features"])
def test_floats_that_merge_ids_are_refused(kind: str, option: str) -> None:
    log = {"user": ["u"] * 3, "item": [1, 2, 3], "time": [1, 2, 3]}
    features = {"item": NARROW[kind], "kind": ["a", "b", "c"]} if option == "features" else None
    column = {} if option == "features" else {option: NARROW[kind]}
    with pytest.raises(ValueError, match=r"expected int64 or float64, got float(16|32), which merges neighbouring"):
        Interactions.read({**log, **column}, item_features=features)


@pytest.mark.parametrize("item", [2.0**53, -(2.0**53), 1e300, float("inf"), np.float64(2**60), np.float32(1)])
def test_single_floats_that_are_no_ids(item: float) -> None:
    for column in ([1.5, item], np.array([1.5, item]) if not isinstance(item, np.float32) else [1.5, item]):
        log = {"user": ["u", "v"], "item": column}
        assert Interactions.read(log, time=None, on_error="skip").items.ids == ("1.5",)
        with pytest.raises(ValueError, match=r"row 1 \(from 0\): item id .*(2\*\*53 or more|of type float32)"):
            Interactions.read(log, time=None)
        with pytest.raises(ValueError, match=r"item_features: item id .*(2\*\*53 or more|of type float32)"):
            Interactions.read({"user": ["u"], "item": ["x"]}, time=None, item_features={"item": column, "k": [1, 2]})


COLUMNS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "categories of pandas": (pandas.Categorical(["x", None, "y"]), ("x", "y")),
    "categories of numbers": (pandas.Categorical([7, None, 8]), ("7", "8")),
    "categories of polars": (polars.Series(["x", None, "y"], dtype=polars.Categorical), ("x", "y")),
    "dictionary of pyarrow": (pyarrow.array(["x", None, "y"]).dictionary_encode(), ("x", "y")),
    "arrow strings of pandas": (pandas.array(["x", None, "y"], dtype="string[pyarrow]"), ("x", "y")),
    "large strings": (pyarrow.array(["x", None, "y"], pyarrow.large_string()), ("x", "y")),
    "chunks": (pyarrow.chunked_array([[2**53 + 1, None], [3]]), (str(2**53 + 1), "3")),
    "unsigned": (polars.Series([2**64 - 1, None, 1], dtype=polars.UInt64), (str(2**64 - 1), "1")),
    "decimals": ([Decimal("1.0"), None, Decimal("2.50")], ("1", "2.5")),
    "float64 with a hole": (pyarrow.array([1.0, None, 2.5]), ("1", "2.5")),
    "masked": (np.ma.MaskedArray([1, 2, 3], [0, 1, 0]), ("1", "3")),
    "index": (pandas.Index([1, None, 3], dtype="Int64"), ("1", "3")),
    "tensor": (torch.tensor([1, 2**60 + 1, 3]), ("1", str(2**60 + 1), "3")),
    "numbers": (range(3), ("0", "1", "2")),
    "128 bits": (polars.Series([2**100, None, 1], dtype=polars.Int128), (str(2**100), "1")),
    "decimals that signal": ([Decimal("1"), Decimal("sNaN"), Decimal("2")], ("1", "2")),
}


@pytest.mark.parametrize("kind", COLUMNS)
def test_columns_of_every_kind(kind: str) -> None:
    column, expected = COLUMNS[kind]
    data = Interactions.read({"user": ["u"] * 3, "item": column}, time=None, on_error="skip")
    assert data.items.ids == expected


def test_tables_of_other_kinds() -> None:
    record = np.array([("u", 1, 2.5)], dtype=[("user", "U5"), ("item", "i8"), ("time", "f8")])
    assert Interactions.read(record).items.ids == ("1",)
    numbered = pandas.DataFrame([["u", "i"]])
    assert Interactions.read(numbered, user="0", item="1", time=None).users == ("u",)
    with pytest.raises(ValueError, match=r"no user column 'uid'; the file has 'user', 'item'"):
        Interactions.read(pyarrow.table({"user": ["u"], "item": [1]}), user="uid", time=None)
    with pytest.raises(ValueError, match=r"no user column 'uid'; the file has 'user', 'item'"):
        Interactions.read(polars.LazyFrame({"user": ["u"], "item": [1]}), user="uid", time=None)
    with pytest.raises(TypeError, match=r"item: expected a column of one value per row, got one of shape \[1, 2\]"):
        Interactions.read({"user": ["u"], "item": np.zeros((1, 2))}, time=None)
    for column in ("u", 1, None, iter(["u"]), {"u": 1}.keys()):
        got = type(column).__name__
        with pytest.raises(TypeError, match=f"user: expected a column of one value per row, got {got}"):
            Interactions.read({"user": column, "item": [1]}, time=None)
    with pytest.raises(TypeError, match="item: expected a column of texts, numbers or dates, got Tensor"):
        Interactions.read({"user": ["u"], "item": torch.zeros(1, dtype=torch.bfloat16)}, time=None)
    with pytest.raises(TypeError, match=r"got list; of a list of rows: dict\(zip\("):
        Interactions.read([("u", "i", 1)])
    with pytest.raises(ValueError, match=r"row 0 \(from 0\): time '1j' is not a number"):
        Interactions.read({"user": ["u"], "item": [1], "time": np.array([1j])})


def test_years_that_microseconds_do_not_reach_are_refused() -> None:
    years = np.array(["2017", "300000"], "datetime64[Y]")
    for unit in ("Y", "D", "s", "ms"):
        log = {"user": ["u", "v"], "item": ["x", "y"], "time": years.astype(f"datetime64[{unit}]")}
        with pytest.raises(ValueError, match=r"row 1 \(from 0\): time 300000.* is out of range"):
            Interactions.read(log)
        assert Interactions.read(log, on_error="skip").users == ("u",)


def test_cells_of_features_that_are_no_texts() -> None:
    log = {"user": ["u"] * 3, "item": [1, 2, 3]}
    table = {
        "item": [3, 1, 2],
        "new": np.array([True, False, True]),
        "tags": [["red", "big"], None, ["red"]],
        "since": np.array(["2017-01-01", "NaT", "2018-01-01"], "datetime64[D]"),
        "price": [1.5, float("nan"), 2],
    }
    for source in (table, pandas.DataFrame(table)):
        features = Interactions.read(log, time=None, item_features=source).items.features
        assert features["new"].values == ("False", "True")
        assert [features["new"].values[code - 1] for code in features["new"].codes[1:, 0]] == ["False", "True", "True"]
        assert (features["tags"].values, features["tags"].codes.tolist()) == (
            ("big", "red"), [[0, 0], [0, 0], [2, 0], [2, 1]]
        )  # fmt: skip
        assert [value[:10] for value in features["since"].values] == ["2017-01-01", "2018-01-01"]
        assert features["price"].values == ("1.5", "2")
    with pytest.raises(TypeError, match="item_features: expected texts, numbers or lists of them, got b'x'"):
        Interactions.read(log, time=None, item_features={"item": [1], "kind": [b"x"]})
