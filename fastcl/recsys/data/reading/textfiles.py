"""Reads text files of interactions, which are tables or sequences, in pieces.

This module finds the line of every bad row; the collector decides what happens to the row.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain, compress, islice, repeat
from pathlib import Path
from typing import Any, NamedTuple

from fastcl.recsys.data.reading.collector import Collector, Fault, Reader
from fastcl.recsys.data.reading.formats import SPACES, Dialect, Form, Options, dialect_of
from fastcl.recsys.data.reading.guess import SAMPLE, not_sequences
from fastcl.recsys.data.reading.header import are_names, atomic, column_of, named, say, separator_of
from fastcl.recsys.data.reading.names import ATOMIC, recognised
from fastcl.recsys.data.reading.opening import open_text

_DEFAULTS = {"user": "user", "item": "item", "time": "time"}
_PIECE = 1 << 16  # lines
_LINE_ENDS = ("\n", "\r")
_UNDECODED = re.compile("[\0\udc80-\udcff]")  # zero bytes, and bytes without a meaning in the encoding
_EXCEL = re.compile(r'"?sep=(.)"?\s*', re.IGNORECASE)  # a first line that names the separator
_SKIPPED = ("", "_")  # names of columns that are not read


def reader(path: Path, options: Options) -> Reader:
    """The reader of one file. This function checks the options and does not open the file."""
    dialect = dialect_of(path, options)
    columns = {"user": options.user, "item": options.item, "time": options.time or ""}
    if dialect.delimiter is None:
        for option, name in columns.items():
            if name not in ("", _DEFAULTS[option]):
                where = f"{path}; a table is read with {say('format', 'csv')} or another format"
                raise ValueError(f"{option}: a sequence file has no columns to name, got {name!r} ({where})")
        if options.time_format is not None:
            raise ValueError(f"time_format: a sequence file has no times, got {options.time_format!r} ({path})")
        return Reader(False, partial(_read_sequences, path, options))
    return Reader(bool(columns["time"]), partial(_read_table, path, options, columns))


class Table(NamedTuple):
    """An open table whose header is read: the column names, the number of the next line, and the lines."""

    header: list[str]
    first: int
    dialect: Dialect
    text: Iterator[str]
    encoding: str
    note: str  # on the encoding


@contextmanager
def open_table(path: Path, form: Form) -> Iterator[Table]:
    """Opens a table file and reads its header."""
    dialect = dialect_of(path, form)
    with open_text(path, form.encoding) as (text, note):
        start = list(islice(text, 1))
        excel = _EXCEL.fullmatch(start[0]) if start and not dialect.typed else None
        if excel is None:
            text = chain(start, text)
        elif form.delimiter is None:
            dialect = dialect._replace(delimiter=excel[1])
        first = 1 + (excel is not None)
        if form.columns is None:
            header, first = _header(path, text, first, dialect, form.prefix)
        else:
            sample = list(islice(text, SAMPLE))
            header, text = list(form.columns), chain(sample, text)
            _check_columns(path, sample, header, dialect, form.prefix)
        yield Table(header, first, dialect, text, form.encoding, note)


def _header(path: Path, text: Iterator[str], first: int, dialect: Dialect, prefix: str) -> tuple[list[str], int]:
    """The column names, and the number of the line after them."""
    used: list[str] = []
    try:
        row = next((row for row in _rows(_remember(text, used), dialect) if row), None)
    except csv.Error as error:
        separator = separator_of(used[0])
        other = separator is not None and separator != dialect.delimiter
        hint = f": other separator ({named(separator, prefix)})?" if separator and other else ""
        raise ValueError(f"{path}:{first}: {error}, in the line of column names{hint}") from error
    if row is None:
        raise ValueError(f"{path}: the file is empty, expected a line of column names")
    return atomic(path, row) if dialect.typed else row, first + len(used)


def _remember(lines: Iterator[str], used: list[str]) -> Iterator[str]:
    for line in lines:
        used.append(line)
        yield line


def _check_columns(path: Path, sample: list[str], header: list[str], dialect: Dialect, prefix: str) -> None:
    """ValueError where `columns` differ in number from the fields of the first row, or where the file has a header."""
    rows = []
    with suppress(csv.Error):  # a bad row is refused, or counted, where it is read
        for row in _rows(iter(sample), dialect):
            rows += [row] if row else []
    if rows and len(rows[0]) != len(header):
        separator = separator_of(sample[0]) if len(rows[0]) == 1 else None
        hint = f"; other separator ({named(separator, prefix)})?" if separator else ""
        got = f"{len(header)} names for {len(rows[0])} fields ({sample[0].strip()[:60]!r})"
        expected = f"expected a name for each field of {path} (_ for one to skip)"
        raise ValueError(f"{prefix}columns: {expected}, got {got}{hint}")
    if rows and are_names(rows[0], rows[1:]):
        shown = ", ".join(rows[0])
        expected = "expected a file without a line of column names"
        raise ValueError(f"{prefix}columns: {expected}, got {path}, which begins with {shown!r}")


def _rows(lines: Iterator[str], dialect: Dialect) -> Iterator[list[str]]:
    """The fields of each record; an empty list for a blank line."""
    if dialect.quote:
        with _long_fields():
            yield from csv.reader(lines, **_csv(dialect))
        return
    for line in lines:
        yield _fields(line, dialect.delimiter)


def _csv(dialect: Dialect) -> dict[str, Any]:
    return {"delimiter": dialect.delimiter, "quotechar": dialect.quote, "strict": True}


@contextmanager
def _long_fields() -> Iterator[None]:
    """Allows fields of any length inside the block. The limit of csv holds for the whole process, so it is restored."""
    before = csv.field_size_limit(2**31 - 1)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _fields(line: str, delimiter: str | None) -> list[str]:
    if delimiter == SPACES:
        return line.split()
    bare = line.rstrip("\r\n")
    return bare.split(delimiter) if bare else []


class Piece(NamedTuple):
    """Some records: the line of each, the columns, the faults of bad records, and how many lines were read."""

    lines: Sequence[int]
    columns: list[list[str]]
    faults: list[Fault]
    blank: int
    taken: int
    cut: bool = False  # the last line of the file has no line end


def pieces(table: Table) -> Iterator[Piece]:
    """The records of a table, in pieces. A good record has as many fields as the header."""
    rest: list[str] = []
    first = table.first
    while True:
        lines = rest + list(islice(table.text, _PIECE))
        final = len(lines) - len(rest) < _PIECE
        piece = _records(lines, first, len(table.header), table.dialect, final)
        cut = final and bool(lines) and not lines[-1].endswith(_LINE_ENDS)
        yield _decoded(piece, table.encoding)._replace(cut=cut)
        first += piece.taken
        rest = lines[piece.taken :]
        if final:
            return


def _records(lines: list[str], first: int, width: int, dialect: Dialect, final: bool) -> Piece:
    text = "".join(lines)
    if dialect.quote and dialect.quote in text:
        with _long_fields():
            return _quoted(lines, first, width, dialect, final)
    assert dialect.delimiter is not None
    columns = _split(lines, text, width, dialect.delimiter)
    if columns is not None:
        return Piece(range(first, first + len(lines)), columns, [], 0, len(lines))
    return _unquoted(lines, first, width, dialect.delimiter)


def _split(lines: list[str], text: str, width: int, delimiter: str) -> list[list[str]] | None:
    """The columns of lines that all hold `width` fields, else None.

    One list of all fields is several times faster than one list per line, which makes the garbage collector run.
    """
    if delimiter == SPACES or width == 1:
        return None
    text = text.replace("\r\n", "\n")
    if "\r" in text or set(map(str.count, lines, repeat(delimiter))) != {width - 1}:
        return None
    # Line ends in place of delimiters, not the reverse: a delimiter "::" behind "a:" would be found one letter early.
    fields = text.removesuffix("\n").replace(delimiter, "\n").split("\n")
    return [fields[k::width] for k in range(width)]


def _unquoted(lines: list[str], first: int, width: int, delimiter: str) -> Piece:
    """Records of one line each, some of them blank or bad."""
    rows = [_fields(line, delimiter) for line in lines]
    good = [len(row) == width for row in rows]
    faults = [
        Fault(first + k, "wrong number of fields", f"expected {width} fields, got {len(row)}")
        for k, row in enumerate(rows)
        if row and len(row) != width
    ]
    places = list(compress(range(first, first + len(lines)), good))
    return Piece(places, _columns(list(compress(rows, good)), width), faults, rows.count([]), len(lines))


def _quoted(lines: list[str], first: int, width: int, dialect: Dialect, final: bool) -> Piece:
    """Records, some of them quoted, blank or bad.

    A bad record loses its first line only, so that a quote that is never closed does not swallow the rows after it.
    Every line is read at most twice, since a bad record ends at the next line with an odd number of quotes.
    """
    places: list[int] = []
    rows: list[list[str]] = []
    faults: list[Fault] = []
    blank = start = 0
    taken = len(lines)
    while start < len(lines):
        reader = csv.reader(map(lines.__getitem__, range(start, len(lines))), **_csv(dialect))
        begin = 0  # the line at which the next record begins, counted from `start`
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
            hint = "" if dialect.quote not in lines[start + begin] else _QUOTE_HINT
            faults.append(Fault(first + start + begin, "unreadable row", f"{error}{hint}"))
        start += begin + 1
    return Piece(places, _columns(rows, width), faults, blank, taken)


def _columns(rows: list[list[str]], width: int) -> list[list[str]]:
    return list(map(list, zip(*rows, strict=True))) if rows else [[] for _ in range(width)]


_QUOTE_HINT = '; a quote in an id is doubled inside quotes ("a""b"); quote="" (--quote "") where quotes mean nothing'


def _decoded(piece: Piece, encoding: str) -> Piece:
    """The piece with rows that hold undecodable or zero bytes turned into faults."""
    try:
        zero = False
        for column in piece.columns:
            text = "".join(column)
            zero = zero or "\0" in text
            text.encode()
    except UnicodeEncodeError:
        zero = True
    if zero:
        found = [_UNDECODED.search("".join(row)) for row in zip(*piece.columns, strict=True)]
        good = [character is None for character in found]
        bad = [undecoded(line, at[0], encoding) for line, at in zip(piece.lines, found, strict=True) if at]
        columns = [list(compress(column, good)) for column in piece.columns]
        return piece._replace(lines=list(compress(piece.lines, good)), columns=columns, faults=[*piece.faults, *bad])
    return piece


def undecoded(line: int, character: str, encoding: str) -> Fault:
    if character == "\0":
        return Fault(line, "zero bytes", "a zero byte: is the file damaged, or no text?")
    byte = ord(character) - 0xDC00
    hint = "" if "latin" in encoding else " (latin-1, or convert the file?)"
    return Fault(line, "undecodable bytes", f"byte 0x{byte:02x} is not {encoding.upper()}: name its encoding{hint}")


def _read_table(path: Path, options: Options, columns: dict[str, str], collector: Collector) -> None:
    with open_table(path, options) as table:
        collector.start(str(path), table.dialect.name, table.note, lambda line: f"{path}:{line}")
        wanted = {option: name for option, name in columns.items() if name}
        found = recognised(path, table.header, wanted, ATOMIC if table.dialect.typed else None)
        collector.tally.columns |= {option: name for option, name in found.items() if name != columns[option]}
        places = [column_of(path, table.header, option, name) for option, name in found.items()]
        for piece in pieces(table):
            collector.tally.blank_lines += piece.blank
            collector.tally.cut_short |= piece.cut
            users, items, *times = (piece.columns[k] for k in places)
            collector.add(piece.lines, users, items, times[0] if times else None, piece.faults)


def read_columns(path: Path, form: Form | None = None) -> dict[str, list[str]]:
    """name -> column, for all named columns of a table file. Raises ValueError "FILE:LINE: what" at a bad row."""
    form = form or Form()
    with open_table(path, form) as table:
        cells: list[list[str]] = [[] for _ in table.header]
        for piece in pieces(table):
            if piece.faults:
                line, _, message = min(piece.faults)
                raise ValueError(f"{path}:{line}: {message}")
            for column, more in zip(cells, piece.columns, strict=True):
                column += more
    named = [(name, column) for name, column in zip(table.header, cells, strict=True) if name not in _SKIPPED]
    for name, _ in named:
        column_of(path, table.header, "item_features", name, form.prefix)
    return dict(named)


def _read_sequences(path: Path, options: Options, collector: Collector) -> None:
    """Reads lines of `user item item ...`. A user's lines, where there are several, continue one history."""
    with open_text(path, options.encoding) as (text, encoding):
        collector.start(str(path), "sequence", encoding, lambda line: f"{path}:{line}")
        if options.format is None:
            sample = list(islice(text, SAMPLE))
            text = chain(sample, text)
            reason = not_sequences(sample)
            if reason is not None:
                keep = f"{say('format', 'sequence')} where they are sequences all the same"
                expected = "looks like a table, expected lines of `user item item ...`"
                raise ValueError(f"{path}: {expected}: {reason}; {keep}")
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
