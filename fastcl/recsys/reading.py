"""Parsers of interaction files: tables and sequence files, plain or compressed. Every fault becomes one ValueError that
names file, line and what is wrong; nothing here guesses, repairs, drops or numbers ids."""

from __future__ import annotations

import csv
import difflib
import gzip
import io
import lzma
import zlib
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

_DELIMITER = {"csv": ",", "tsv": "\t"}
_FORMATS = (*_DELIMITER, "sequence")
_SUFFIX_FORMAT = {".csv": "csv", ".tsv": "tsv", ".txt": "sequence"}
_OPENERS: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open}
_DEFAULT_COLUMNS = {"user": "user", "item": "item", "time": "time"}


def read_log(
    path: Path, *, user: str, item: str, time: str | None, format: str | None
) -> tuple[list[str], list[str], np.ndarray | None]:
    """Users, items and times (None where there are none) of a file's interactions, in file order.

    Options as in `Interactions.read`. A user may have several lines in a sequence file: they follow each other.
    """
    kind = _format(path, format)
    columns = {"user": user, "item": item, "time": time}
    if kind == "sequence":
        for option, name in columns.items():
            if name not in (None, _DEFAULT_COLUMNS[option]):
                raise ValueError(f"{option}: a sequence file has no columns to name, got {name!r} ({path})")
        return *_read_sequences(path), None
    named = [name for name in columns.values() if name is not None]
    if "" in named or len(set(named)) < len(named):
        raise ValueError(f"user, item, time: expected different column names, got {', '.join(map(repr, named))}")
    return _read_table(path, kind, user, item, time)


def read_columns(path: Path, format: str) -> dict[str, list[str]]:
    """All columns of a table, by name."""
    (_, header), *rows = _records(path, format)
    return dict(zip(header, map(list, zip(*(row for _, row in rows), strict=True)), strict=True))


def number_array(values: Sequence[float]) -> np.ndarray:
    """int64 where all values are whole numbers (int), else float64: never float32, which merges Unix seconds."""
    whole = all(isinstance(value, int | np.integer) for value in values)
    return np.array(values, np.int64 if whole else np.float64)


def _format(path: Path, format: str | None) -> str:
    if format is not None:
        if format not in _FORMATS:
            raise ValueError(f"format: expected one of {', '.join(map(repr, _FORMATS))}, got {format!r}")
        return format
    name = Path(path.stem) if path.suffix in _OPENERS else path
    if name.suffix not in _SUFFIX_FORMAT:
        expected = ", ".join(_SUFFIX_FORMAT)
        raise ValueError(f"format: {path} ends in none of {expected} (nor .gz or .xz behind these): name the format")
    return _SUFFIX_FORMAT[name.suffix]


def _text(path: Path) -> str:
    try:
        with _OPENERS.get(path.suffix, open)(path, "rb") as file:
            data = file.read()
    except (gzip.BadGzipFile, lzma.LZMAError, zlib.error, EOFError) as error:
        raise ValueError(f"{path}: damaged or not a {path.suffix} file ({error})") from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # `start` counts from behind a byte order mark, which holds no line break.
        line = error.object.count(b"\n", 0, error.start) + 1
        byte = error.object[error.start]
        raise ValueError(f"{path}:{line}: byte 0x{byte:02x} is not UTF-8: convert the file to UTF-8") from error


def _read_sequences(path: Path) -> tuple[list[str], list[str]]:
    users: list[str] = []
    items: list[str] = []
    # Not splitlines(): it also splits at control characters that are no line ends.
    for number, line in enumerate(_text(path).split("\n"), start=1):
        fields = line.split()
        if len(fields) == 1:
            raise ValueError(f"{path}:{number}: user {fields[0]!r} has no items")
        users.extend(fields[:1] * (len(fields) - 1))
        items.extend(fields[1:])
    if not users:
        raise ValueError(f"{path}: no interactions in the file")
    return users, items


def _records(path: Path, format: str) -> Iterator[tuple[int, list[str]]]:
    """(line, fields) of each record, header first; blank lines are skipped, all records are as wide as the header."""
    reader = csv.reader(io.StringIO(_text(path), newline=""), delimiter=_DELIMITER[format], strict=True)
    width, line = 0, 1
    try:
        for row in reader:
            if len(row) != width and row:
                if width:
                    raise ValueError(f"{path}:{line}: expected {width} fields, got {len(row)}")
                width = len(row)
            if row:
                yield line, row
            line = reader.line_num + 1
    except csv.Error as error:
        raise ValueError(f"{path}:{line}: {error}") from error
    if not width:
        raise ValueError(f"{path}: the file is empty, expected a line of column names")


def _read_table(
    path: Path, format: str, user: str, item: str, time: str | None
) -> tuple[list[str], list[str], np.ndarray | None]:
    records = _records(path, format)
    _, header = next(records)
    u, i = _column(path, header, "user", user), _column(path, header, "item", item)
    t = None if time is None else _column(path, header, "time", time)
    users: list[str] = []
    items: list[str] = []
    times: list[str] = []
    lines = array("q")
    for line, row in records:
        user_id, item_id = row[u], row[i]
        if not user_id or user_id.isspace() or not item_id or item_id.isspace():
            raise ValueError(f"{path}:{line}: empty {'item' if user_id.strip() else 'user'} id")
        users.append(user_id)
        items.append(item_id)
        if t is not None:
            times.append(row[t])
            lines.append(line)
    if not users:
        raise ValueError(f"{path}: column names but no interactions in the file")
    return users, items, None if t is None else _times(path, lines, times)


def _column(path: Path, header: list[str], option: str, name: str) -> int:
    if header.count(name) == 1:
        return header.index(name)
    if name in header:
        raise ValueError(f"{path}: {option} column {name!r} appears {header.count(name)} times")
    lower = {column.lower(): column for column in reversed(header)}
    near = [lower[match] for match in difflib.get_close_matches(name.lower(), lower, n=3, cutoff=0.5)]
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
    found = ", ".join(map(repr, header))
    omit = ' (time="" where the rows are in time order)' if option == "time" else ""
    raise ValueError(f"{path}: no {option} column {name!r}; the file has {found}{hint}{omit}")


def _times(path: Path, lines: Sequence[int], times: list[str]) -> np.ndarray:
    try:
        return np.fromiter(map(int, times), np.int64, len(times))
    except (ValueError, OverflowError):
        pass
    values = np.empty(len(times), np.float64)
    for k, text in enumerate(times):
        try:
            values[k] = float(text)
        except ValueError:
            raise ValueError(f"{path}:{lines[k]}: time {text!r} is not a number (such as Unix seconds)") from None
    if not np.isfinite(values).all():
        bad = int(np.flatnonzero(~np.isfinite(values))[0])
        raise ValueError(f"{path}:{lines[bad]}: time {times[bad]!r} is not finite")
    return values
