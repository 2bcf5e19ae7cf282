"""Reads interactions from a table in memory: a mapping of columns, or a data frame (pandas, polars, ...) by its
`columns` and `[name]`.

Values become texts as a file would hold them, so that 1, 1.0 and "1" are one item; no frame library is imported.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import date, datetime
from functools import partial
from typing import Any

import numpy as np

from fastcl.recsys.collector import Collector, Fault, Options, Reader
from fastcl.recsys.header import column_of

_PIECE = 1 << 16  # rows
_NAME = "table"


def reader(table: Any, options: Options) -> Reader:
    """The reader of a table; its columns are looked up here, its rows are not read."""
    if options.format is not None:
        raise ValueError(f"format: a table in memory has none, got {options.format!r}")
    arrays = {
        option: column(table, option, name)
        for option, name in (("user", options.user), ("item", options.item), ("time", options.time))
        if name
    }
    lengths = [len(array) for array in arrays.values()]
    if len(set(lengths)) > 1:
        raise ValueError(f"source: expected columns of one length, got {', '.join(map(str, lengths))}")
    time = arrays.get("time")
    if time is not None and time.dtype.kind == "f" and time.dtype != np.float64:
        raise ValueError(f"time: expected int64 or float64, got {time.dtype}, which merges neighbouring Unix seconds")
    if time is not None and time.dtype.kind not in "iufMO":
        raise TypeError(f"time: expected numbers, dates or texts, got {time.dtype}")
    return Reader(time is not None, partial(_read, arrays))


def column(table: Any, option: str, name: str) -> np.ndarray:
    """One column as an array: numbers and dates in their own type, everything else as objects."""
    names = list(table) if isinstance(table, Mapping) else list(getattr(table, "columns", ()))
    if not names:
        raise TypeError(f"source: expected a path, a data frame or a mapping of columns, got {type(table).__name__}")
    column_of(_NAME, [str(known) for known in names], option, name)
    values = table[name]
    if isinstance(values, list | tuple):  # np.asarray would turn [1, None] or [2**60, 0.5] into other values
        return np.fromiter(values, object, len(values))
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"{option}: expected a column of one value a row, got {list(array.shape)}")
    return array if array.dtype.kind in "iufM" else array.astype(object)


def _read(arrays: dict[str, np.ndarray], collector: Collector) -> None:
    collector.start(_NAME, "columns", "no encoding", lambda row: f"{_NAME}, row {row} (from 0)")
    rows = len(arrays["user"])
    for begin in range(0, rows, _PIECE):
        part = slice(begin, min(begin + _PIECE, rows))
        faults: dict[int, Fault] = {}
        names = []
        for option in ("user", "item"):
            texts = [text_of(value) for value in arrays[option][part].tolist()]
            for k, text in enumerate(texts):
                if text is None:
                    kind = type(arrays[option][begin + k]).__name__
                    message = f"{option} id of type {kind}, expected text or a whole number"
                    faults.setdefault(begin + k, Fault(begin + k, f"{option} id of another type", message))
            names.append(texts)
        good = [row for row in range(part.start, part.stop) if row not in faults]
        users, items = ([text for row in good if (text := texts[row - begin]) is not None] for texts in names)
        clock = _times(arrays["time"][good]) if "time" in arrays else None
        collector.add(good, users, items, clock, list(faults.values()))


def text_of(value: Any) -> str | None:
    """An id as text: whole numbers without a point, "" where it is missing, None where its type makes no id.

    >>> [text_of(value) for value in (1, 1.0, "1", float("nan"), None, -7, b"x")]
    ['1', '1', '1', '', '', '-7', None]
    """
    if isinstance(value, str):
        return str(value)
    if _missing(value):
        return ""
    if isinstance(value, bool | np.bool_):
        return None
    if isinstance(value, int | np.integer):
        return str(int(value))
    if isinstance(value, float | np.floating):
        return str(int(value)) if float(value).is_integer() else repr(float(value))
    return None


def _missing(value: Any) -> bool:
    """None, NaN, NaT and pandas' NA, which answers no comparison."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    return isinstance(value, float | np.floating) and math.isnan(value)


def _times(column: np.ndarray) -> np.ndarray | list[str]:
    if column.dtype.kind in "iu":
        return column.astype(np.int64 if not len(column) or column.max() < 2**63 else np.float64)
    if column.dtype.kind != "O":
        return column
    return [_time_text(value) for value in column.tolist()]


def _time_text(value: Any) -> str:
    if _missing(value):
        return ""
    if isinstance(value, datetime | date):
        return value.isoformat()
    if isinstance(value, np.datetime64):
        return str(value.astype("datetime64[us]"))
    return repr(value) if isinstance(value, bool) else str(value)
