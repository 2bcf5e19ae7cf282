"""The line of column names of a table: what it must look like, and which column an option means.

Every refusal says what the file has, and what was probably meant.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from pathlib import Path

_ATOMIC_TYPES = ("token", "float", "token_seq", "float_seq")
_SEPARATORS = {",": 'format="csv"', "\t": 'format="tsv"', ";": 'format="semicolon"'}


def plain(path: Path, header: list[str]) -> list[str]:
    """The names as they are."""
    return header


def atomic(path: Path, header: list[str]) -> list[str]:
    """The names of a RecBole file, whose header is `name:type`, without their types."""
    untyped = [cell for cell in header if cell.rpartition(":")[2] not in _ATOMIC_TYPES or not cell.rpartition(":")[0]]
    if untyped:
        types = "|".join(_ATOMIC_TYPES)
        raise ValueError(f"{path}:1: expected a header of name:type ({types}) in an .inter file, got {untyped[0]!r}")
    return [cell.rpartition(":")[0] for cell in header]


HEADERS: dict[str, Callable[[Path, list[str]], list[str]]] = {
    "csv": plain, "tsv": plain, "semicolon": plain, "inter": atomic,
}  # fmt: skip


def column_of(where: Path | str, header: Sequence[str], option: str, name: str) -> int:
    """The position of the column `name`; ValueError that helps where there is none, or several."""
    if header.count(name) == 1:
        return header.index(name)
    if name in header:
        raise ValueError(f"{where}: {option} column {name!r} appears {header.count(name)} times")
    found = ", ".join(map(repr, header))
    if len(header) == 1:
        separators = [format for sign, format in _SEPARATORS.items() if sign in header[0]]
        if separators:
            raise ValueError(
                f"{where}: no {option} column {name!r}; the only column is {found}: other separator ({separators[0]})?"
            )
    if any(map(_looks_like_data, header)):
        raise ValueError(
            f"{where}: no {option} column {name!r}; the first line looks like data ({found}): "
            "expected a line of column names first"
        )
    lower = {column.lower(): column for column in reversed(header)}
    near = [lower[match] for match in difflib.get_close_matches(name.lower(), lower, n=3, cutoff=0.5)]
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
    omit = ' (time="" where the rows are in time order)' if option == "time" else ""
    raise ValueError(f"{where}: no {option} column {name!r}; the file has {found}{hint}{omit}")


def _looks_like_data(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
