"""How files are written: the options that say so, and what a file's name tells where an option is not given.

One table of formats serves the log and the item features. A file is opened only to say in an error what it looks like.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from fastcl.recsys.data.reading.guess import looks_like
from fastcl.recsys.data.reading.header import say
from fastcl.recsys.data.reading.times import MISSING_WORDS, check_format
from fastcl.recsys.options import one_of

ON_ERROR = ("raise", "skip")
REPEATS = ("keep", "first")
SPACES = " "  # this delimiter is any run of spaces and tabs
PACKED = (".gz", ".xz", ".bz2", ".zst")
_SUFFIXES = {
    **{".csv": "csv", ".tsv": "tsv", ".inter": "inter", ".item": "inter", ".txt": "sequence"},
    **dict.fromkeys((".parquet", ".pq"), "parquet"),
}
_JSON = "a line of JSON a row is not read: pass it as a data frame (pandas.read_json(FILE, lines=True)), or convert it"
_FRAME = "is not read: pass it as a data frame (pandas, polars or pyarrow read it), or convert it"
_OTHERS = {
    **dict.fromkeys((".json", ".jsonl", ".ndjson"), _JSON),
    **dict.fromkeys((".feather", ".arrow", ".orc"), f"a file of Apache's columns {_FRAME}"),
    **dict.fromkeys((".xlsx", ".xls", ".ods"), f"a spreadsheet {_FRAME}"),
    **dict.fromkeys((".zip", ".tar", ".tgz", ".7z", ".rar", ".tbz"), "an archive is not read: unpack it"),
    **dict.fromkeys((".pkl", ".pickle", ".npz", ".npy", ".h5", ".mat"), f"a file of Python's objects {_FRAME}"),
}


class Format(NamedTuple):
    """delimiter: the separator of fields; None for lines of `user item item ...` and for formats that are no text.
    typed: whether the header holds `name:type`.
    """

    delimiter: str | None
    quoted: bool = True
    typed: bool = False


FORMATS = {
    "csv": Format(","),
    "tsv": Format("\t"),
    "semicolon": Format(";"),
    "inter": Format("\t", quoted=False, typed=True),
    "sequence": Format(None, quoted=False),
    "parquet": Format(None, quoted=False),
}


class Dialect(NamedTuple):
    """How one file is read: a format and its options. quote: "" where a quote is a character like any other."""

    name: str
    delimiter: str | None
    quote: str
    typed: bool


def check_texts(option: str, texts: Any) -> None:
    """TypeError unless `texts` is None or a sequence of texts."""
    # A set has no order, which columns need, and JSON holds none.
    ordered = isinstance(texts, Iterable) and not isinstance(texts, str | Set)
    if texts is not None and not (ordered and all(isinstance(text, str) for text in texts)):
        raise TypeError(f"{option}: expected a sequence of texts, got {texts!r}")


@dataclass(frozen=True)
class Form:
    """How a file is written. The values are checked here; `Interactions.read` says what each option means."""

    prefix: ClassVar[str] = ""  # what error messages put before the options' names

    format: str | None = None
    delimiter: str | None = None
    columns: Sequence[str] | None = None
    encoding: str = "utf-8"
    quote: str = '"'
    missing: Sequence[str] | None = None

    def __post_init__(self) -> None:
        prefix = self.prefix
        if self.format is not None and self.format not in FORMATS:
            raise ValueError(f"{prefix}format: expected one of {', '.join(map(repr, FORMATS))}, got {self.format!r}")
        if self.delimiter is not None:
            if not isinstance(self.delimiter, str):
                raise TypeError(f"{prefix}delimiter: expected a text such as ';' or '::', got {self.delimiter!r}")
            if not self.delimiter or set(self.delimiter) & set("\n\r\"'"):
                raise ValueError(f"{prefix}delimiter: expected a text such as ';' or '::', got {self.delimiter!r}")
        check_texts(f"{prefix}columns", self.columns)
        check_texts("missing", self.missing)
        try:
            io.TextIOWrapper(io.BytesIO(), encoding=self.encoding)
        except LookupError:
            raise ValueError(
                f"{prefix}encoding: expected a text encoding such as utf-8 or latin-1, got {self.encoding!r}"
            ) from None
        if self.quote not in ("", '"', "'"):
            raise ValueError(f"quote: expected a quote character or '' for none, got {self.quote!r}")

    @property
    def missing_words(self) -> frozenset[str]:
        return frozenset(MISSING_WORDS if self.missing is None else self.missing)


class ItemForm(Form):
    """How the item features of a log are written."""

    prefix = "item_"


@dataclass(frozen=True)
class Options(Form):
    """The reading options of `Interactions.read`. The values are checked here."""

    user: str = "user"
    item: str = "item"
    time: str | None = "time"
    time_format: str | None = None
    on_error: str = "raise"
    repeats: str = "keep"

    def __post_init__(self) -> None:
        named = [self.user, self.item, *([self.time] if self.time else [])]
        for option, name in zip(("user", "item", "time"), named, strict=False):
            if not isinstance(name, str):
                raise TypeError(f"{option}: expected a column name, got {name!r}")
        if "" in named or len(set(named)) < len(named):
            raise ValueError(f"user, item, time: expected different column names, got {', '.join(map(repr, named))}")
        super().__post_init__()
        if self.time_format is not None:
            check_format(self.time_format)
            if not self.time:
                raise ValueError(f"time_format: expected a time column with it, got {self.time_format!r} and none")
        one_of(ON_ERROR, "on_error", self.on_error)
        one_of(REPEATS, "repeats", self.repeats)


def is_parquet(path: Path, form: Form) -> bool:
    """Whether `path` is a Parquet file or a folder of Parquet files: the options decide, else the name. ValueError
    where it is one and an option of text files is given.
    """
    named = form.format or (None if form.delimiter is not None else named_format(path))
    if named != "parquet" and not path.is_dir():
        return False
    if form.format not in (None, "parquet"):
        raise ValueError(f"{form.prefix}format: expected 'parquet' for a folder, got {form.format!r} ({path})")
    of_texts = ("delimiter", "columns", "encoding", "quote")
    given = {f"{form.prefix}{name}": (getattr(form, name), getattr(Form, name)) for name in of_texts}
    if form.prefix:  # the encoding and the quote of item features are those of the log, which may be text
        del given[f"{form.prefix}encoding"], given[f"{form.prefix}quote"]
    refuse_unused(given, f"a Parquet file has none ({path})")
    return True


def dialect_of(path: Path, form: Form) -> Dialect:
    """How the file is read: the options decide, else its name. ValueError where they contradict each other or where
    neither tells."""
    name, prefix = form.format or _by_name(path, form), form.prefix
    delimiter, quoted, typed = FORMATS[name]
    if form.delimiter is not None:
        if name not in ("csv", "inter") and delimiter != form.delimiter:  # these two may have another separator
            raise ValueError(f"{prefix}delimiter: expected none beside format {name!r}, got {form.delimiter!r}")
        delimiter, name = form.delimiter, f"fields between {form.delimiter!r}"
    if delimiter is None and form.columns is not None:
        raise ValueError(f"{prefix}columns: a sequence file has no columns to name, got {list(form.columns)} ({path})")
    quoted = quoted and delimiter != SPACES and delimiter is not None and len(delimiter) == 1
    if not quoted and form.quote == "'" and not prefix:
        raise ValueError(f"quote: fields of this form ({name}) are never quoted, got {form.quote!r}")
    return Dialect(name, delimiter, form.quote if quoted else "", typed)


def _by_name(path: Path, form: Form) -> str:
    if form.delimiter is not None:
        return "csv"  # `dialect_of` replaces the comma by the delimiter that was given
    suffix, found, prefix = _suffix(path), named_format(path), form.prefix
    if suffix in _OTHERS:
        raise ValueError(f"{prefix}format: {path}: {_OTHERS[suffix]}")
    if found is None or (found == "sequence" and form.columns is not None):
        known = ", ".join(_SUFFIXES)
        reason = "may hold sequences" if found else f"ends in none of {known} (nor in these with {' or '.join(PACKED)})"
        choice = f"name the format, {say(prefix + 'format', 'csv')}, or the delimiter, {say(prefix + 'delimiter', ';')}"
        raise ValueError(f"{prefix}format: {path} {reason}: {looks_like(path, form.encoding, prefix) or choice}")
    return found


def _suffix(path: Path) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    return next((suffix for suffix in reversed(suffixes) if suffix not in PACKED), "")


def named_format(path: Path) -> str | None:
    """The format that the name of a file tells, or None."""
    return _SUFFIXES.get(_suffix(path))


def refuse_unused(given: dict[str, tuple[Any, Any]], reason: str) -> None:
    """ValueError for an option that is set and would have no effect. given: option -> (its value, its default)."""
    for option, (value, default) in given.items():
        if value != default:
            raise ValueError(f"{option}: {reason}, got {value!r}")
