"""The collector that every reader of interactions fills: it numbers ids and gathers rows.

A bad row raises an error that names it or, where the caller asked for that, is dropped and counted. Nothing here
parses, guesses or repairs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress, repeat
from typing import Any, NamedTuple

import numpy as np

from fastcl.recsys.data.reading.formats import Options
from fastcl.recsys.data.reading.times import MISSING_WORDS, Clock
from fastcl.recsys.data.reports import Tally


class Fault(NamedTuple):
    """Why a row is bad. place: its line, or its row in a table. reason: a few words by which faults are counted.
    message: the reason with the values of this row.
    """

    place: int
    reason: str
    message: str


@dataclass
class Log:
    """The rows of a source in its order. Users and items are numbered from 0 in order of first appearance."""

    users: tuple[str, ...]
    items: tuple[str, ...]
    user: np.ndarray  # int64 [P]
    item: np.ndarray  # int64 [P]
    time: np.ndarray | None  # int64 or float64 [P]
    below: np.ndarray | None  # int16 [P], nanoseconds beyond the microseconds of `time`, which order equal times
    part: np.ndarray  # int8 [P], the number of the source that the row came from
    tally: Tally
    look_missing: int


class Piece(NamedTuple):
    """Some rows of a log, as `Log` has them."""

    user: np.ndarray
    item: np.ndarray
    time: np.ndarray | None
    below: np.ndarray | None
    part: np.ndarray
    look_missing: int


@dataclass
class Collector:
    """Takes rows piece by piece, refuses or drops bad rows, and numbers the ids of good rows."""

    timed: bool
    options: Options
    column: Callable[[], Any] = list  # makes what keeps the pieces of a column: it has `append` and gives them in order
    tally: Tally = field(default_factory=Tally)
    part: int = 0

    def __post_init__(self) -> None:
        self._clock = Clock(self.options.time_format)
        self._words = self.options.missing_words
        self._where: Callable[[int], str] = str
        self._numbers: tuple[dict[str, int], dict[str, int]] = ({}, {})
        self._columns = self.column(), self.column()
        self._times, self._below, self._parts = self.column(), self.column(), self.column()
        self._missing: tuple[set[int], set[int]] = (set(), set())

    def start(self, source: str, format: str, encoding: str, where: Callable[[int], str]) -> None:
        """Begins the next source; `where` turns a place in it into words for a message."""
        tally = self.tally
        tally.source = f"{tally.source}, {source}" if tally.source else source
        tally.format, tally.encoding, self._where = format, encoding, where

    def add(
        self,
        places: Sequence[int],
        users: list[str],
        items: list[str],
        times: list[str] | np.ndarray | None,
        faults: Sequence[Fault] = (),
    ) -> None:
        """Adds one piece: its rows in order with the place of each, and the faults of records that make no row."""
        values, below, bad = (None, None, {}) if times is None else self._clock.read(times)
        self.tally.rows_read += len(users) + len(faults)
        fresh = [set(names).difference(known) for names, known in zip((users, items), self._numbers, strict=True)]
        for what, names, new in zip(("user", "item"), (users, items), fresh, strict=True):
            none = {name: _no_id(what, name) for name in new if not name.strip() or name.strip() in self._words}
            if none:
                bad |= {k: none[name] for k, name in enumerate(names) if name in none}
        for place, reason, message in sorted([*faults, *(Fault(places[k], *fault) for k, fault in bad.items())]):
            text = f"{self._where(place)}: {message}"
            if self.options.on_error == "raise":
                raise ValueError(text)
            self.tally.drop(reason, text)
        if bad:
            keep = np.ones(len(users), bool)
            keep[list(bad)] = False
            users, items = list(compress(users, keep)), list(compress(items, keep))
            values = None if values is None else values[keep]
            below = None if below is None else below[keep]
        for names, number, new, column, missing in zip(
            (users, items), self._numbers, fresh, self._columns, self._missing, strict=True
        ):
            for name in dict.fromkeys(names) if new else ():
                if name in new:
                    if name.strip() in MISSING_WORDS:
                        missing.add(len(number))
                    number[name] = len(number)
            column.append(np.fromiter(map(number.__getitem__, names), np.int64, len(names)))
        if values is not None:
            self._times.append(values)
            self._below.append(np.zeros(len(values), np.int16) if below is None else below)
        self._parts.append(np.full(len(users), self.part, np.int8))

    def names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The ids of users and items so far, by their numbers."""
        users, items = (tuple(number) for number in self._numbers)
        return users, items

    def users(self) -> Iterator[np.ndarray]:
        """The users of all rows, a piece at a time."""
        yield from self._columns[0]

    def pieces(self) -> Iterator[Piece]:
        """Everything gathered, as it came. Raises ValueError where no row is left."""
        if not self._numbers[0]:
            raise ValueError(f"{self.tally.source}: no interactions in it" + self._because())
        final = self._clock.final(self._times)
        self.tally.rounded_times = self._clock.rounded
        missing = [np.array(sorted(codes), np.int64) for codes in self._missing]
        times = zip(self._times, self._below, strict=True) if self.timed else repeat((None, None))
        for user, item, part, (time, below) in zip(*self._columns, self._parts, times, strict=False):
            if below is not None:
                self.tally.rounded_times += int(np.count_nonzero(below))
            look = sum(len(codes) for codes in missing) and np.isin(user, missing[0]) | np.isin(item, missing[1])
            yield Piece(user, item, None if time is None else final(time), below, part, int(np.sum(look)))

    def finish(self) -> Log:
        """Everything gathered, in one piece. Raises ValueError where no row is left."""
        columns = list(zip(*self.pieces(), strict=True))
        user, item, part = (np.concatenate(columns[k]) for k in (0, 1, 4))
        time, below = (np.concatenate(columns[k]) if self.timed else None for k in (2, 3))
        users, items = self.names()
        below = below if below is not None and below.any() else None
        return Log(users, items, user, item, time, below, part, self.tally, sum(columns[5]))

    def _because(self) -> str:
        """Why no row is left: the reasons with their counts, and an example of the most frequent one."""
        dropped = sorted(self.tally.dropped.items(), key=lambda each: -each[1])
        if not dropped:
            return ""
        counts = ", ".join(f"{count:,} {reason}" for reason, count in dropped)
        all_of = f", all {self.tally.rows_read:,} rows are bad: {counts}"
        return f"{all_of} ({self.tally.firsts[dropped[0][0]]})"


def _no_id(what: str, name: str) -> tuple[str, str]:
    if not name.strip():
        return f"missing {what} id", f"empty {what} id"
    word = name.strip()
    fault = f'{what} id {word!r} stands for a missing value; missing=() (--missing "") where it is an id'
    return f"missing {what} id ({word})", fault


class Reader(NamedTuple):
    """A source whose options are checked and of which nothing is read yet."""

    timed: bool
    read: Callable[[Collector], None]
