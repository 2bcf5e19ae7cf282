"""Lists of recommended items as files: CSV, JSON with a line per user, or Parquet. Files are made a piece at a time."""

import csv
import io
import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from fastcl.recsys.data import Items
from fastcl.recsys.data.reading.formats import named_format
from fastcl.recsys.data.reading.parquet import require_pyarrow
from fastcl.recsys.serving.recommend import Row

UserRow = tuple[str | None, Row]  # user (None: the history of --history), items with scores
_TOGETHER = 10_000  # lists per row group of Parquet


def check(path: str | Path) -> None:
    """ValueError where the name of `path` tells another format than can be written, ImportError where it is Parquet and
    pyarrow is missing. Commands call it before any work.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in ("", ".csv", ".jsonl", ".parquet", ".pq"):
        raise ValueError(f"-o: expected a name that ends in .csv, .jsonl or .parquet, got {path}")
    if named_format(Path(path)) == "parquet":
        require_pyarrow()


def written(path: Path, rows: Iterable[UserRow], items: Items) -> Iterator[bytes]:
    """The content of a file, in pieces, in the format that its name tells."""
    if named_format(path) == "parquet":
        return parquet_parts(rows, items)
    texts = json_lines(rows, items) if path.suffix.lower() == ".jsonl" else csv_lines(rows, items)
    return (text.encode() for text in texts)


def csv_lines(rows: Iterable[UserRow], items: Items) -> Iterator[str]:
    """The header, then text with the lines of one user at a time."""
    titled = items.titles is not None
    yield "user,rank,item,score,title\n" if titled else "user,rank,item,score\n"
    for user, row in rows:
        text = io.StringIO()
        for place, (item, score) in enumerate(row, start=1):
            titles = [title(item, items) or ""] if titled else []
            csv.writer(text, lineterminator="\n").writerow([user, place, item, f"{score:.7g}", *titles])
        yield text.getvalue()


def json_lines(rows: Iterable[UserRow], items: Items) -> Iterator[str]:
    for user, row in rows:
        yield json.dumps({"user": user, "items": document(row, items)}, ensure_ascii=False) + "\n"


def parquet_parts(rows: Iterable[UserRow], items: Items) -> Iterator[bytes]:
    """The columns of the CSV: user and item as text, rank int32, score float32, title (null where it is unknown)."""
    arrow = require_pyarrow()
    fields = {"user": arrow.string(), "rank": arrow.int32(), "item": arrow.string(), "score": arrow.float32()}
    if items.titles is not None:
        fields["title"] = arrow.string()
    schema = arrow.schema(fields)
    sink = _Sink()
    rows = iter(rows)
    with arrow.parquet.ParquetWriter(sink, schema) as writer:
        while some := list(islice(rows, _TOGETHER)):
            lines = [(user, place, *pair) for user, row in some for place, pair in enumerate(row, start=1)]
            columns: list[list[Any]] = [[line[k] for line in lines] for k in range(4)]
            if items.titles is not None:
                columns.append([title(item, items) for item in columns[2]])
            arrays = [arrow.array(column, type) for column, type in zip(columns, fields.values(), strict=True)]
            writer.write_table(arrow.table(arrays, schema=schema))
            yield sink.taken()
    yield sink.taken()


class _Sink(io.RawIOBase):
    """A file object from which the written bytes are taken in pieces (`taken`)."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._size = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size

    def write(self, data: Any) -> int:
        self._pieces.append(bytes(data))
        self._size += len(self._pieces[-1])
        return len(self._pieces[-1])

    def taken(self) -> bytes:
        found = b"".join(self._pieces)
        self._pieces.clear()
        return found


def document(row: Row, items: Items) -> list[dict[str, Any]]:
    """A row as dicts for JSON."""
    return [{"item": item, "title": title(item, items), "score": score} for item, score in row]


def title(item: str, items: Items) -> str | None:
    """The title of an item, None where it has none."""
    found = items.label(int(items.encode([item])[0]))
    return found if found != item else None
