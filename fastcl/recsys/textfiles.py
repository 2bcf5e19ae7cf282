"""Reads interaction files: tables (.csv, .tsv, .inter) and sequence files (.txt), plain, .gz or .xz, in pieces.

Every bad row gets its line; what happens to it is the collector's business.
"""

from __future__ import annotations

import csv
import gzip
import io
import lzma
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import compress, islice, repeat
from pathlib import Path
from typing import Any, NamedTuple

from fastcl.recsys.collector import Collector, Fault, Options, Reader
from fastcl.recsys.header import HEADERS, column_of

DELIMITERS = {"csv": ",", "tsv": "\t", "semicolon": ";", "inter": "\t"}
FORMATS = (*DELIMITERS, "sequence")
_SUFFIXES = {".csv": "csv", ".tsv": "tsv", ".inter": "inter", ".txt": "sequence"}
_OPENERS: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open}
_DEFAULTS = {"user": "user", "item": "item", "time": "time"}
_ATOMIC = {"user": "user_id", "item": "item_id", "time": "timestamp"}  # what RecBole names them
_PIECE = 1 << 16  # lines
_LINE_ENDS = ("\n", "\r")
_UNDECODED = re.compile("[\udc80-\udcff]")  # bytes that the encoding has no meaning for


def reader(path: Path, options: Options) -> Reader:
    """The reader of one file; its options are checked, the file is not opened."""
    kind = format_of(path, options.format)
    columns = {"user": options.user, "item": options.item, "time": options.time or ""}
    if kind == "sequence":
        for option, name in columns.items():
            if name not in ("", _DEFAULTS[option]):
                raise ValueError(f"{option}: a sequence file has no columns to name, got {name!r} ({path})")
        return Reader(False, partial(_read_sequences, path, options))
    if kind == "inter":
        columns = {option: _ATOMIC[option] if name == option else name for option, name in columns.items()}
    return Reader(bool(columns["time"]), partial(_read_table, path, kind, options, columns))


def format_of(path: Path, format: str | None) -> str:
    """The format that was named, or that the file's name tells."""
    if format is not None:
        if format not in FORMATS:
            raise ValueError(f"format: expected one of {', '.join(map(repr, FORMATS))}, got {format!r}")
        return format
    name = Path(path.stem) if path.suffix in _OPENERS else path
    if name.suffix not in _SUFFIXES:
        expected = ", ".join(_SUFFIXES)
        raise ValueError(f"format: {path} ends in none of {expected} (nor .gz or .xz behind these): name the format")
    return _SUFFIXES[name.suffix]


@contextmanager
def open_text(path: Path, encoding: str) -> Iterator[tuple[io.TextIOWrapper, str]]:
    """The text of a file, line ends as they are, and a note on its encoding; undecodable bytes become U+DC80..DCFF."""
    try:
        with _OPENERS.get(path.suffix, open)(path, "rb") as raw:
            start = raw.peek(4)[:4]
            note = encoding
            if encoding.lower().replace("_", "-") in ("utf-8", "utf8"):
                if start.startswith((b"\xff\xfe", b"\xfe\xff")):
                    raise ValueError(f"{path}: looks like UTF-16, not UTF-8: name its encoding (utf-16)")
                encoding, note = "utf-8-sig", "utf-8" + " with a byte order mark" * start.startswith(b"\xef\xbb\xbf")
            yield io.TextIOWrapper(raw, encoding, errors="surrogateescape", newline=""), note
    except (gzip.BadGzipFile, lzma.LZMAError, zlib.error, EOFError) as error:
        raise ValueError(f"{path}: damaged or not a {path.suffix} file ({error})") from error
    except UnicodeError as error:
        raise ValueError(f"{path}: cannot be read as {encoding} ({error})") from error


class Piece(NamedTuple):
    """Some records: the line of each and the columns, the faults of what is none, and how many lines they took."""

    lines: Sequence[int]
    columns: list[list[str]]
    faults: list[Fault]
    blank: int
    taken: int
    cut: bool = False  # the last line of the file has no line end


def pieces(text: Iterator[str], first: int, width: int, dialect: dict[str, Any], encoding: str) -> Iterator[Piece]:
    """The records of a table behind its header, which have `width` fields each; `first` is the line that comes next."""
    rest: list[str] = []
    while True:
        lines = rest + list(islice(text, _PIECE))
        final = len(lines) - len(rest) < _PIECE
        piece = _records(lines, first, width, dialect, final)
        cut = final and bool(lines) and not lines[-1].endswith(_LINE_ENDS)
        yield _decoded(piece, encoding)._replace(cut=cut)
        first += piece.taken
        rest = lines[piece.taken :]
        if final:
            return


def _records(lines: list[str], first: int, width: int, dialect: dict[str, Any], final: bool) -> Piece:
    text = "".join(lines)
    if dialect["quoting"] == csv.QUOTE_NONE or dialect["quotechar"] not in text:
        columns = _split(lines, text, width, dialect["delimiter"])
        if columns is not None:
            return Piece(range(first, first + len(lines)), columns, [], 0, len(lines))
    return _one_by_one(lines, first, width, dialect, final)


def _split(lines: list[str], text: str, width: int, delimiter: str) -> list[list[str]] | None:
    """The columns of lines that all hold `width` unquoted fields, else None. One list of all fields instead of one a
    row, which keeps the garbage collector out of it: several times faster than csv.reader."""
    text = text.replace("\r\n", "\n")
    if width == 1 or "\r" in text or set(map(str.count, lines, repeat(delimiter))) != {width - 1}:
        return None
    fields = text.removesuffix("\n").replace("\n", delimiter).split(delimiter)
    return [fields[k::width] for k in range(width)]


def _one_by_one(lines: list[str], first: int, width: int, dialect: dict[str, Any], final: bool) -> Piece:
    """Records of which some are quoted, blank or bad. A bad record costs its first line only: a quote that is never
    closed must not swallow the rows behind it."""
    places: list[int] = []
    rows: list[list[str]] = []
    faults: list[Fault] = []
    blank = start = 0
    taken = len(lines)
    while start < len(lines):
        reader = csv.reader(lines[start:] if start else lines, **dialect)
        begin = 0  # line of the record to come, counted from `start`
        try:
            for row in reader:
                if len(row) == width:
                    places.append(first + start + begin)
                    rows.append(row)
                elif not row:
                    blank += 1
                else:
                    fault = f"expected {width} fields, got {len(row)}"
                    if reader.line_num - begin > 1:
                        fault += f" over {reader.line_num - begin} lines (a quote that is not closed?)"
                    faults.append(Fault(first + start + begin, "wrong number of fields", fault))
                    if reader.line_num - begin > 1:
                        break
                begin = reader.line_num
            else:
                break
        except csv.Error as error:
            if "end of data" in str(error) and not final and len(lines) - start - begin < _PIECE:
                taken = start + begin
                break
            hint = "" if dialect["quotechar"] not in lines[start + begin] else _QUOTE_HINT
            faults.append(Fault(first + start + begin, "unreadable row", f"{error}{hint}"))
        start += begin + 1
    columns = list(map(list, zip(*rows, strict=True))) if rows else [[] for _ in range(width)]
    return Piece(places, columns, faults, blank, taken)


_QUOTE_HINT = '; a quote in an id is doubled inside quotes ("a""b"), or set quote="" where quotes mean nothing'


def _decoded(piece: Piece, encoding: str) -> Piece:
    """The same piece without the rows that hold undecodable bytes, which become faults."""
    try:
        for column in piece.columns:
            "".join(column).encode()
    except UnicodeEncodeError:
        found = [_UNDECODED.search("".join(row)) for row in zip(*piece.columns, strict=True)]
        good = [character is None for character in found]
        bad = [undecoded(line, at[0], encoding) for line, at in zip(piece.lines, found, strict=True) if at]
        columns = [list(compress(column, good)) for column in piece.columns]
        return piece._replace(lines=list(compress(piece.lines, good)), columns=columns, faults=[*piece.faults, *bad])
    return piece


def undecoded(line: int, character: str, encoding: str) -> Fault:
    byte = ord(character) - 0xDC00
    hint = "" if "latin" in encoding else " (latin-1, or convert the file?)"
    return Fault(line, "undecodable bytes", f"byte 0x{byte:02x} is not {encoding.upper()}: name its encoding{hint}")


def open_table(
    path: Path, kind: str, options: Options, text: io.TextIOWrapper
) -> tuple[list[str], int, dict[str, Any]]:
    """The column names of a table, the line behind them, and how csv.reader reads it."""
    quoting = csv.QUOTE_NONE if kind == "inter" or not options.quote else csv.QUOTE_MINIMAL
    dialect: dict[str, Any] = {
        "delimiter": DELIMITERS[kind],
        "quoting": quoting,
        "quotechar": options.quote or '"',
        "strict": True,
    }
    reader = csv.reader(text, **dialect)
    try:
        header = next((row for row in reader if row), None)
    except csv.Error as error:
        raise ValueError(f"{path}:1: {error}, in the line of column names") from error
    if header is None:
        raise ValueError(f"{path}: the file is empty, expected a line of column names")
    return HEADERS[kind](path, header), reader.line_num + 1, dialect


def _read_table(path: Path, kind: str, options: Options, columns: dict[str, str], collector: Collector) -> None:
    with open_text(path, options.encoding) as (text, encoding):
        collector.start(str(path), kind, encoding, lambda line: f"{path}:{line}")
        header, first, dialect = open_table(path, kind, options, text)
        places = [column_of(path, header, option, name) for option, name in columns.items() if name]
        for piece in pieces(text, first, len(header), dialect, options.encoding):
            collector.tally.blank_lines += piece.blank
            collector.tally.cut_short |= piece.cut
            users, items, *times = (piece.columns[k] for k in places)
            collector.add(piece.lines, users, items, times[0] if times else None, piece.faults)


def _read_sequences(path: Path, options: Options, collector: Collector) -> None:
    """A user may have several lines: they follow each other."""
    with open_text(path, options.encoding) as (text, encoding):
        collector.start(str(path), "sequence", encoding, lambda line: f"{path}:{line}")
        numbered, line = enumerate(text, start=1), ""
        while True:
            places: list[int] = []
            users: list[str] = []
            items: list[str] = []
            faults: list[Fault] = []
            for number, line in numbered:
                fields = line.split()
                found = _UNDECODED.search(line)
                if found:
                    faults.append(undecoded(number, found[0], options.encoding))
                elif len(fields) == 1:
                    faults.append(Fault(number, "user without items", f"user {fields[0]!r} has no items"))
                elif fields:
                    places.extend([number] * (len(fields) - 1))
                    users.extend(fields[:1] * (len(fields) - 1))
                    items.extend(fields[1:])
                else:
                    collector.tally.blank_lines += 1
                if len(users) >= _PIECE:
                    break
            collector.add(places, users, items, None, faults)
            if len(users) < _PIECE:
                break
        collector.tally.cut_short |= bool(line) and not line.endswith(_LINE_ENDS)
