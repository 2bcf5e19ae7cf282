"""Reads interactions from a table in memory: a mapping of columns, or a data frame (pandas, polars, pyarrow, ...) by
its column names and `[name]`.

Values become texts as a file would hold them, so that 1, 1.0 and "1" are one item; no frame library is imported. A
column with missing values is never taken through floats, which would merge large ids.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import date, datetime
from decimal import Decimal
from functools import partial
from typing import Any

import numpy as np

from fastcl.recsys.data.reading.collector import Collector, Fault, Reader
from fastcl.recsys.data.reading.formats import Form, Options, refuse_unused
from fastcl.recsys.data.reading.header import column_of
from fastcl.recsys.data.reading.names import recognised
from fastcl.recsys.data.reading.times import EXACT

PIECE = 1 << 16  # rows
_NAME = "table"
_NARROW = ("float16", "float32", "halffloat", "float", "bfloat16")  # "float" is pyarrow's name of float32


def reader(table: Any, options: Options) -> Reader:
    """The reader of a table. This function looks up the columns and reads no rows."""
    of_files = {name: (getattr(options, name), field.default) for name, field in Form.__dataclass_fields__.items()}
    del of_files["missing"]
    refuse_unused(of_files, "a table in memory has none")
    named = {"user": options.user, "item": options.item, **({"time": options.time} if options.time else {})}
    wanted, named = named, recognised(_NAME, [str(each) for each in names(table)], named)
    table = collected(table, list(named.values()))
    arrays = {option: column(table, option, name) for option, name in named.items()}
    lengths = [len(array) for array in arrays.values()]
    if len(set(lengths)) > 1:
        raise ValueError(f"source: expected columns of one length, got {', '.join(map(str, lengths))}")
    for option, array in arrays.items():
        refuse_narrow(array, option)
    if options.time_format is not None and arrays["time"].dtype != object:
        raise ValueError(f"time_format: expected a column of texts, got one of {arrays['time'].dtype}")
    found = {option: name for option, name in named.items() if name != wanted[option]}
    return Reader("time" in arrays, partial(_read, arrays, found))


def refuse_narrow(array: np.ndarray, option: str) -> None:
    if array.dtype.kind == "f" and array.dtype != np.float64:
        merged = f"merges neighbouring {'Unix seconds' if option == 'time' else 'ids'}"
        raise ValueError(f"{option}: expected int64 or float64, got {array.dtype}, which {merged}")


def names(table: Any) -> list[Any]:
    """The column names of a table, of whatever type; an empty list where `table` is no table."""
    fields = getattr(getattr(table, "dtype", None), "names", None)  # a structured array of NumPy
    if fields is not None:
        return [*fields]
    if isinstance(table, Mapping):
        return [*table]
    if type(table).__name__ == "LazyFrame":
        return [*table.collect_schema().names()]
    # `column_names` comes first: the `columns` of pyarrow are the columns themselves, not their names.
    return list(getattr(table, "column_names", getattr(table, "columns", ())))


def collected(table: Any, wanted: list[str] | None = None) -> Any:
    """A lazy frame of polars, computed (only its columns `wanted` where it has them all); any other table as it is."""
    if type(table).__name__ != "LazyFrame":
        return table
    known = table.collect_schema().names()
    if wanted is not None and not set(wanted) <= set(known):
        return table.head(0).collect()  # a column is missing; the names suffice to say which
    return table.select(known if wanted is None else wanted).collect()


def column(table: Any, option: str, name: str) -> np.ndarray:
    """One column as an array: numbers and dates in their own type, everything else as objects."""
    known = names(table)
    if not known:
        rows = isinstance(table, list | tuple) and len(table) > 0 and isinstance(table[0], list | tuple)
        hint = "; of a list of rows: dict(zip(('user', 'item', 'time'), zip(*rows)))" if rows else ""
        kind = type(table).__name__
        raise TypeError(f"source: expected a path, a data frame or a mapping of columns, got {kind}{hint}")
    return array_of(table[known[column_of(_NAME, [str(each) for each in known], option, name)]], option)


def array_of(values: Any, option: str) -> np.ndarray:
    """A column of any library as an array: numbers and dates in their own type, everything else as objects."""
    if isinstance(values, list | tuple):  # np.asarray would turn [1, None] or [2**60, 0.5] into other values
        return _objects(values)
    kind = str(getattr(values, "dtype", getattr(values, "type", ""))).lower()
    if getattr(getattr(values, "dtype", None), "tz", None) is not None:  # pandas; NumPy takes the moments in UTC
        return np.asarray(values, f"datetime64[{values.dtype.unit}]")
    if kind.endswith("int128"):  # a type of polars that NumPy lacks
        return _objects(values.to_list())
    try:
        array = np.asarray(values)
    except Exception as error:  # each library raises errors of its own types
        got = f"{type(values).__name__} ({error})"
        raise TypeError(f"{option}: expected a column of texts, numbers or dates, got {got}") from error
    if array.ndim != 1:
        got = f"one of shape {list(array.shape)}" if array.ndim else type(values).__name__
        raise TypeError(f"{option}: expected a column of one value per row, got {got}")
    if any(kind.partition("[")[0] == narrow for narrow in _NARROW):
        return array.astype(np.float16 if "16" in kind or "half" in kind else np.float32)
    floats = array.dtype.kind == "f" and ("float" in kind or "double" in kind)
    if not isinstance(values, np.ma.MaskedArray) and (array.dtype.kind in "iuM" or floats):
        return array
    # np.asarray turns integers with missing values into floats and loses a mask; the column's own list does neither.
    to_list = next(
        getattr(values, name) for name in ("to_pylist", "to_list", "tolist", "__iter__") if hasattr(values, name)
    )
    return _objects(list(to_list()))


def _objects(values: list[Any] | tuple[Any, ...]) -> np.ndarray:
    return np.fromiter(values, object, len(values))


def _read(arrays: dict[str, np.ndarray], taken: dict[str, str], collector: Collector) -> None:
    collector.start(_NAME, "columns", "no encoding", lambda row: f"{_NAME}, row {row} (from 0)")
    collector.tally.columns |= taken
    rows = len(arrays["user"])
    for begin in range(0, rows, PIECE):
        add_rows({option: array[begin : begin + PIECE] for option, array in arrays.items()}, begin, collector)


def add_rows(arrays: Mapping[str, np.ndarray], begin: int, collector: Collector) -> None:
    """Gives the collector one piece of the columns; `begin` is the place of its first row."""
    faults: dict[int, Fault] = {}
    found = []
    for option in ("user", "item"):
        texts = _texts(arrays[option])
        for k, text in enumerate(texts) if None in texts else ():
            if text is None:
                faults.setdefault(begin + k, Fault(begin + k, *_no_id(option, arrays[option][k])))
        found.append(texts)
    good: Sequence[int] = range(len(arrays["user"]))
    clock = arrays.get("time")
    if faults:
        good = [k for k in good if begin + k not in faults]
        found = [[texts[k] for k in good] for texts in found]
        clock = None if clock is None else clock[good]
    users, items = found
    times = None if clock is None else _times(clock)
    collector.add([begin + k for k in good], users, items, times, list(faults.values()))


def _texts(values: np.ndarray) -> list[Any]:
    """`text_of` each value. Columns of texts alone or of whole numbers alone are converted in one call."""
    listed = values.tolist()
    if values.dtype.kind in "iu":
        return list(map(str, listed))
    return listed if set(map(type, listed)) == {str} else list(map(text_of, listed))


def text_of(value: Any) -> str | None:
    """An id as text: whole numbers without a point, "" for a missing value, None where the value cannot be an id.

    A float of 2**53 or more cannot be an id, since it stands for several whole numbers; nor can a float of fewer than
    64 bits.

    >>> [text_of(value) for value in (1, 1.0, "1", float("nan"), None, -7, b"x", 2.0**53)]
    ['1', '1', '1', '', '', '-7', None, None]
    """
    if isinstance(value, str):
        return str(value)
    if _missing(value):
        return ""
    if isinstance(value, bool | np.bool_):
        return None
    if isinstance(value, int | np.integer):
        return str(int(value))
    if isinstance(value, float):  # np.float64 is a subclass
        if abs(value) >= EXACT:
            return None
        return str(int(value)) if value.is_integer() else repr(float(value))
    if isinstance(value, Decimal) and value.is_finite():
        return str(int(value)) if value == value.to_integral_value() else str(value.normalize())
    return None


def _no_id(option: str, value: Any) -> tuple[str, str]:
    if isinstance(value, float):
        fault = f"{option} id {value!r} is a float of 2**53 or more, which merges whole numbers"
        return f"{option} id beyond a float", fault
    kind = type(value).__name__
    return f"{option} id of another type", f"{option} id of type {kind}, expected text or a whole number"


def ids(array: np.ndarray, option: str) -> list[str]:
    """The texts of a whole column of ids; ValueError where a value cannot be an id."""
    refuse_narrow(array, option)
    texts = []
    for value in array.tolist():
        text = text_of(value)
        if text is None:
            raise ValueError(f"{option}: {_no_id('item', value)[1]}")
        texts.append(text)
    return texts


def cell_of(value: Any) -> str | list[str]:
    """A feature's cell as text, or as a list of texts where it holds several values; "" where it is missing."""
    if isinstance(value, list | tuple | set | frozenset | np.ndarray):
        parts = [cell_of(part) for part in value]
        return [part for part in parts if isinstance(part, str)]
    if isinstance(value, bytes):
        raise TypeError(f"item_features: expected texts, numbers or lists of them, got {value!r}")
    text = text_of(value)
    return str(value) if text is None else text


def _missing(value: Any) -> bool:
    """Whether a value is None, NaN, NaT or pandas' NA, whose comparisons have no truth value."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    if isinstance(value, np.datetime64):
        return bool(np.isnat(value))
    if isinstance(value, Decimal):
        return value.is_nan()  # math.isnan raises for a signalling NaN
    return isinstance(value, float | np.floating) and math.isnan(value)


def _times(column: np.ndarray) -> np.ndarray | list[str]:
    if column.dtype.kind in "iu" and not (len(column) and column.max() >= 2**63):
        return column.astype(np.int64)
    if column.dtype.kind in "fM":
        return column
    return [_time_text(value) for value in column.tolist()]


def _time_text(value: Any) -> str:
    if _missing(value):
        return ""
    if isinstance(value, datetime | date):
        return value.isoformat()
    if isinstance(value, np.datetime64):
        return str(value.astype("datetime64[ns]"))
    # str() of a float of fewer than 64 bits reads as another number; repr() shows its type and is refused as a time.
    return repr(value) if isinstance(value, bool | np.bool_) or type(value).__name__ in _NARROW else str(value)
