"""The header of a table, which is its line of column names: how it is read, and which column an option means.

Every error says what the file holds and which option probably mends it.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fastcl.recsys.data.reading.times import unit_of

_ATOMIC_TYPES = ("token", "float", "token_seq", "float_seq")
_FORMATS = {",": "csv", "\t": "tsv", ";": "semicolon"}
_SHOWN = 20  # columns that an error lists
_SEPARATORS = ("\t", "::", "|", ";", ",")  # the rarest in ids comes first
_DATE = re.compile(r"\d{1,4}([-/.])\d{1,2}\1\d{1,4}([T ,].*)?|[A-Z][a-z]{2} [A-Z][a-z]{2} \d\d .*")


def atomic(path: Path, header: list[str]) -> list[str]:
    """The column names of a RecBole file, whose header holds `name:type`, without the types."""
    untyped = [cell for cell in header if cell.rpartition(":")[2] not in _ATOMIC_TYPES or not cell.rpartition(":")[0]]
    if untyped:
        types = "|".join(_ATOMIC_TYPES)
        raise ValueError(f"{path}:1: expected a header of name:type ({types}) in an .inter file, got {untyped[0]!r}")
    return [cell.rpartition(":")[0] for cell in header]


def say(option: str, value: str | Sequence[str]) -> str:
    """An option with its value, as Python and the command line write it.

    >>> print(say("item_format", "tsv"), say("columns", ["user", "_"]), sep="; ")
    item_format="tsv" (--item-format tsv); columns=['user', '_'] (--columns user,_)
    """
    if isinstance(value, str):
        shown = repr(value) if '"' in value or "\\" in repr(value) else f'"{value}"'
        word = "$'\\t'" if value == "\t" else shlex.quote(value)
    else:
        shown, word = repr([*value]), shlex.quote(",".join(value))
    return f"{option}={shown} (--{option.replace('_', '-')} {word})"


def separator_of(line: str) -> str | None:
    """The likely separator of a line: the sign that occurs most often outside quotes, else a space; None for one word.

    >>> separator_of("1::1193::5"), separator_of('"a;b";"c,d"'), separator_of("1 2 3"), separator_of("word")
    ('::', ';', ' ', None)
    """
    bare = re.sub(r'"[^"]*"', "", line.strip())
    found = max(_SEPARATORS, key=bare.count)
    return found if found in bare else " " if len(line.split()) > 1 else None


def named(separator: str, prefix: str = "") -> str:
    """The option that names a separator, as an error shows it."""
    if separator in _FORMATS:
        return say(f"{prefix}format", _FORMATS[separator])
    return say(f"{prefix}delimiter", separator)


def are_names(first: Sequence[str], others: Sequence[Sequence[str]]) -> bool:
    """Whether the first line looks like column names: no field is a number, but all fields below one of them are."""
    if not others or any(map(_is_value, first)):
        return False
    below = zip(*(row for row in others if len(row) == len(first)), strict=True)
    return any(all(map(_is_number, column)) for column in below)


def column_of(where: Path | str, header: Sequence[str], option: str, name: str, prefix: str = "") -> int:
    """The position of the column `name`; ValueError with a hint where no column or several columns have that name."""
    if header.count(name) == 1:
        return header.index(name)
    if name in header:
        raise ValueError(f"{where}: {option} column {name!r} appears {header.count(name)} times")
    found = ", ".join(map(repr, header[:_SHOWN])) + ", ..." * (len(header) > _SHOWN)
    separator = separator_of(header[0]) if len(header) == 1 else None
    if separator is not None:
        hint = f"the only column is {found}: other separator ({named(separator, prefix)})?"
        raise ValueError(f"{where}: no {option} column {name!r}; {hint}")
    if any(map(_is_value, header)):
        guess = _by_position(header)
        columns = say(f"{prefix}columns", guess)
        timeless = "" if "time" in guess else f", and {say('time', '')} where it has no times"
        raise ValueError(
            f"{where}: no {option} column {name!r}; the first line looks like data ({found}): "
            f"expected a line of column names first, or a name for each field, perhaps {columns}{timeless}"
        )
    taken = {"", "_", "user", "item", "time"}  # columns of other options, and columns that are skipped
    lower = {column.lower(): column for column in reversed(header) if column not in taken and column.isprintable()}
    near = [lower[match] for match in difflib.get_close_matches(name.lower(), lower, n=3, cutoff=0.5)]
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
    if option in ("user", "item", "time"):
        hint += f" {say(option, near[0])}" if near else f'; name it: {option}="..." (--{option} COLUMN)'
    omit = f"; {say('time', '')} where the rows are in time order" if option == "time" else ""
    raise ValueError(f"{where}: no {option} column {name!r}; the file has {found}{hint}{omit}")


def _by_position(row: Sequence[str]) -> list[str]:
    """A guess at the columns of a row of data, for an error to show. The time is a date, else the last number that is
    a time between 1980 and 2100; the user and the item are the first two other fields.

    >>> _by_position(["1", "1193", "5", "978300760"]), _by_position(["u", "2014-04-07T10:51:09Z", "i", "0"])
    (['user', 'item', '_', 'time'], ['user', 'time', 'item', '_'])
    """
    dates = [k for k, cell in enumerate(row) if _DATE.fullmatch(cell)]
    numbers = [k for k, cell in enumerate(row) if _is_number(cell) and unit_of(np.array([float(cell)]))]
    time = (dates or numbers[::-1] or [-1])[0]
    others = iter(("user", "item"))
    return ["time" if k == time else next(others, "_") for k in range(len(row))]


def _is_value(cell: str) -> bool:
    """Whether a cell is a number or a date, which no column has as its name."""
    return _is_number(cell) or _DATE.fullmatch(cell) is not None


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
