"""Reads sources of interactions: text (textfiles.py), Parquet (parquet.py), tables in memory (columns.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fastcl.recsys.data.prepared import is_prepared
from fastcl.recsys.data.reading import columns, parquet, textfiles
from fastcl.recsys.data.reading.collector import Collector, Log, Reader
from fastcl.recsys.data.reading.formats import Options, is_parquet

Source = str | Path | Mapping[str, Any] | Any  # Any: a data frame of any library


def read_log(sources: Sequence[Source], options: Options) -> Log:
    """The rows of all sources, one source after the other, as parts 0, 1, ... of one log. Checks all options first."""
    readers = [reader(source, options) for source in sources]
    if len({each.timed for each in readers}) > 1:
        raise ValueError("sources: expected that all have times or none has, got both")
    collector = Collector(readers[0].timed, options)
    for part, each in enumerate(readers):
        collector.part = part
        each.read(collector)
    return collector.finish()


def reader(source: Source, options: Options) -> Reader:
    """The reader of one source, whose options are checked."""
    if not isinstance(source, str | Path):
        return columns.reader(source, options)
    path = Path(source)
    if is_prepared(path):
        raise ValueError(f"{path}: expected a file or a folder of Parquet, got a prepared folder, which is read alone")
    return parquet.reader(path, options) if is_parquet(path, options) else textfiles.reader(path, options)
