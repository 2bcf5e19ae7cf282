"""Reads interactions from whatever holds them: files (textfiles.py), tables in memory (columns.py), one or several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fastcl.recsys.data.reading import columns, textfiles
from fastcl.recsys.data.reading.collector import Collector, Log
from fastcl.recsys.data.reading.formats import Options

Source = str | Path | Mapping[str, Any] | Any  # the last: a data frame, known by its `columns`


def read_log(sources: Sequence[Source], options: Options) -> Log:
    """The rows of all sources, one behind the other, as parts 0, 1, ... of one log. Options are checked first."""
    readers = [
        textfiles.reader(Path(source), options) if isinstance(source, str | Path) else columns.reader(source, options)
        for source in sources
    ]
    if len({reader.timed for reader in readers}) > 1:
        raise ValueError("sources: expected that all have times or none has, got both")
    collector = Collector(readers[0].timed, options)
    for part, reader in enumerate(readers):
        collector.part = part
        reader.read(collector)
    return collector.finish()
