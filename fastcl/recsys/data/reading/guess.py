"""What a file looks like, for errors about a file that cannot be read as asked. A guess never decides how to read."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from fastcl.recsys.data.reading.header import are_names, named, separator_of
from fastcl.recsys.data.reading.opening import open_text

SAMPLE = 1000  # lines
_ROWS = 5  # so many lines with equally many words look like a table
_WIDEST = 8  # the most words that a line of such a table may have
_NAMES = frozenset(
    {"user", "userid", "uid", "session", "sessionid", "visitorid", "item", "itemid", "iid", "sku", "movieid",
     "productid", "artistid", "songid", "time", "timestamp", "rating"}
)  # fmt: skip


def looks_like(path: Path, encoding: str, prefix: str) -> str | None:
    """What the first line of a regular file tells about its separator, in words; None where it tells nothing."""
    if not path.is_file():
        return None
    with open_text(path, encoding) as (text, _):
        line = next((line for line in islice(text, SAMPLE) if line.strip()), "").strip()
    separator = separator_of(line)
    if separator is None:
        return None
    shown = line if len(line) <= 60 else f"{line[:60]}..."
    return f"its first line, {shown!r}, looks like fields between {separator!r}: {named(separator, prefix)}?"


def not_sequences(lines: Sequence[str]) -> str | None:
    """Why the first lines of a file are a table and not `user item item ...`; None where they may be sequences.

    Lines are a table where every one holds one of , ; | ::, where every one holds the same number of tabs (2 or more),
    where 5 lines or more hold the same number of words (3 to 8), or where the first one holds column names. Pairs of
    words (`user item`) are sequences.

    >>> not_sequences(["1\\t2\\t5", "1\\t3\\t5"])
    'every line has 3 fields between tabs: format="tsv" (--format tsv)'
    >>> not_sequences(["1 2", "1 3"]), not_sequences(["1 2 3 4", "2 2"])
    (None, None)
    """
    lines = [line.strip() for line in lines if line.strip()]
    if not lines:
        return None
    for separator in ("::", "|", ";", ","):
        if all(separator in line for line in lines):
            return f"every line has {separator!r} in it: {named(separator)}"
    tabs = {line.count("\t") for line in lines}
    if len(tabs) == 1 and max(tabs) >= 2 and len(lines) > 1:
        return f"every line has {max(tabs) + 1} fields between tabs: {named(chr(9))}"
    rows = [line.split() for line in lines]
    separator = "\t" if len(tabs) == 1 and max(tabs) > 0 else " "
    widths = {len(row) for row in rows}
    if len(widths) == 1:
        bare = {word.lower().replace("_", "").replace("-", "") for word in rows[0]}
        if are_names(rows[0], rows[1:]) or (len(bare) > 1 and bare <= _NAMES):
            return f"its first line looks like column names, {' '.join(rows[0])!r}: {named(separator)}"
        if 3 <= max(widths) <= _WIDEST and len(rows) >= _ROWS:
            return f"every line has {max(widths)} fields between spaces: {named(separator)}"
    return None
