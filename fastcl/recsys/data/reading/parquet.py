"""Reads Parquet: a file, or a folder of parts as Spark, Dask and Ray write them, in subfolders or not.

Files are read in the order of their paths, in which part.2 precedes part.10. All parts must hold the same kind of
values in each column that is read: pyarrow would silently cast one kind to another, so that the texts "07" and "7"
become one number. Nothing here numbers ids or judges rows.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from fastcl.recsys.data.reading.collector import Collector, Reader
from fastcl.recsys.data.reading.columns import PIECE, add_rows, array_of
from fastcl.recsys.data.reading.formats import Options, named_format
from fastcl.recsys.data.reading.header import column_of
from fastcl.recsys.data.reading.names import recognised

TEXT, WHOLE, DATES, ZONED = "text", "whole numbers", "dates", "dates with a zone"
_OF_IDS = (TEXT, WHOLE, "double", "decimal")
_OF_TIMES = (TEXT, WHOLE, "double", DATES, ZONED)
_NARROW = ("float", "halffloat")
# Files of table formats whose own log tells which Parquet files count. Deleted rows may still stand in the others.
_TABLE_LOGS = ("_delta_log", ".hoodie", "metadata/version-hint.text")


def require_pyarrow() -> Any:
    """The module pyarrow; ImportError with the remedy where the `parquet` extra is missing."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError("Parquet needs the package pyarrow: pip install 'fastcl[parquet]'") from error
    return pyarrow


def reader(path: Path, options: Options) -> Reader:
    """The reader of a file or folder. This function opens no file."""
    require_pyarrow()
    return Reader(bool(options.time), partial(_read, path, options))


def parts(path: Path) -> list[Path]:
    """The Parquet files of a folder, or the one file. Names that begin with _ or . are skipped, as Spark does.

    Raises ValueError where the folder holds no Parquet file, holds other files too, or belongs to a table format whose
    log decides which rows count.
    """
    if not path.is_dir():
        if path.exists() and not path.is_file():
            raise ValueError(f"{path}: a Parquet file is read from its end, which a pipe does not allow")
        return [path]
    log = next((name for name in _TABLE_LOGS if (path / name).exists()), None)
    if log is not None:
        which = f"holds {log}, the log of a table that says which of its files count"
        raise ValueError(f"{path}: {which}; expected a plain folder, which the table's own library writes")
    if (path / "_temporary").exists():
        raise ValueError(f"{path}: holds _temporary: it is still being written, or its writer was killed")
    names = (file.relative_to(path) for file in path.rglob("*") if file.is_file())
    found = [name for name in names if not any(part.startswith(("_", ".")) for part in name.parts)]
    other = next((name for name in sorted(found) if named_format(name) != "parquet"), None)
    if other is not None:
        raise ValueError(f"{path}: expected a folder of .parquet files alone, got {other}")
    if not found:
        raise ValueError(f"{path}: expected a folder with .parquet files, got none in it")
    return [path / name for name in sorted(found, key=_natural)]


def _natural(name: Path) -> list[str | int]:
    """A sorting key with part.2 before part.10: Dask writes numbers without leading zeros."""
    return [int(piece) if piece.isdecimal() else piece for piece in re.split(r"(\d+)", str(name))]


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """A pyarrow.parquet.ParquetFile. Damage that shows while it is open is a ValueError that names the file."""
    arrow = require_pyarrow()
    try:
        with arrow.parquet.ParquetFile(file) as found:
            yield found
    except (arrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        said = str(error).partition("\n")[0]
        raise ValueError(f"{file}: damaged or not a Parquet file ({said})") from error


def _read(path: Path, options: Options, collector: Collector) -> None:
    files = parts(path)
    wanted = {"user": options.user, "item": options.item, **({"time": options.time} if options.time else {})}
    kinds: dict[str, str] = {}
    names: dict[str, str] = {}
    begins = [0]
    for file in files:
        with opened(file) as part:
            schema = part.schema_arrow
            names = names or recognised(file, schema.names, wanted)
            found = {option: _checked(file, schema, option, name, options) for option, name in names.items()}
            begins.append(begins[-1] + part.metadata.num_rows)
        kinds = kinds or found
        for option, kind in found.items():
            if kind != kinds[option]:
                first = f"{kinds[option]} in {files[0]}"
                raise ValueError(f"{file}: column {names[option]!r} holds {kind}, but {first}; expected one kind")

    def where(row: int) -> str:
        k = bisect_right(begins, row) - 1
        return f"{files[k]}, row {row - begins[k]} (from 0)"

    collector.start(str(path), "parquet", "no encoding", where)
    collector.tally.columns |= {option: name for option, name in names.items() if name != wanted[option]}
    for file, begin in zip(files, begins, strict=False):
        with opened(file) as part:
            for batch in part.iter_batches(PIECE, columns=list(names.values())):
                add_rows(_arrays(batch, names), begin, collector)
                begin += len(batch)


def _arrays(batch: Any, names: Mapping[str, str]) -> dict[str, Any]:
    return {option: array_of(batch.column(name), option) for option, name in names.items()}


def _checked(file: Path, schema: Any, option: str, name: str, options: Options) -> str:
    """The kind of a column; ValueError where the file lacks the column or its values cannot serve as `option`."""
    column_of(file, schema.names, option, name)
    kind = _kind(schema.field(name).type)
    if kind in _NARROW:
        merged = f"merges neighbouring {'Unix seconds' if option == 'time' else 'ids'}"
        raise ValueError(f"{file}: column {name!r}: expected int64 or float64, got {kind}, which {merged}")
    known = _OF_TIMES if option == "time" else _OF_IDS
    if kind not in known:
        raise ValueError(f"{file}: column {name!r}: expected {', '.join(known)} as {option}, got {kind}")
    if option == "time" and options.time_format is not None and kind != TEXT:
        raise ValueError(f"time_format: expected a column of texts, got one of {kind} ({file})")
    return kind


def _kind(type: Any) -> str:
    """The kind of a column's values, whatever their width and encoding."""
    types = require_pyarrow().types
    if types.is_dictionary(type):
        type = type.value_type
    if any(getattr(types, f"is_{name}")(type) for name in ("string", "large_string", "string_view")):
        return TEXT
    if types.is_integer(type):
        return WHOLE
    if types.is_decimal(type):
        return "decimal"
    if types.is_date(type) or types.is_timestamp(type):
        return ZONED if getattr(type, "tz", None) else DATES
    return str(type)


def read_table(path: Path) -> Any:
    """All columns of a file or folder as one pyarrow.Table; ValueError where the parts differ in them."""
    arrow = require_pyarrow()
    tables = []
    for file in parts(path):
        with opened(file) as part:
            tables.append(part.read())
        kinds, first = ({each.name: _kind(each.type) for each in table.schema} for table in (tables[-1], tables[0]))
        odd = next((name for name in {**first, **kinds} if kinds.get(name) != first.get(name)), None)
        if odd is not None:
            got = f"{kinds.get(odd, 'none')}, but {first.get(odd, 'none')} in the first file"
            raise ValueError(f"{file}: column {odd!r} holds {got}; expected one kind")
    return arrow.concat_tables(tables, promote_options="permissive")
