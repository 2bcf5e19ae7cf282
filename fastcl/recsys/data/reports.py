"""Reports: what reading a log found, and what a split holds out. Both give counts and no judgement.

Nothing here reads or changes data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from fastcl.recsys.data.blocks import ranges
from fastcl.recsys.data.reading import times
from fastcl.recsys.showing import summary

EXAMPLES = 5  # so many faults are quoted in full; later ones are only counted


@dataclass
class Tally:
    """What the readers count while they read."""

    source: str = ""
    format: str = ""
    encoding: str = ""
    rows_read: int = 0  # rows of data, good or bad, without blank lines and the header
    blank_lines: int = 0
    dropped: dict[str, int] = field(default_factory=dict)  # reason -> rows
    columns: dict[str, str] = field(default_factory=dict)  # option -> the column that was recognised
    # faults: the first few bad rows and the first of each reason, as "FILE:LINE: what". firsts: reason -> its first.
    faults: list[str] = field(default_factory=list)
    firsts: dict[str, str] = field(default_factory=dict)
    rounded_times: int = 0  # times with more digits than are kept
    cut_short: bool = False  # the last line has no line end, so it may have been cut in the middle

    def drop(self, reason: str, fault: str) -> None:
        if reason not in self.dropped or len(self.faults) < EXAMPLES:
            self.faults.append(fault)
        self.firsts.setdefault(reason, fault)
        self.dropped[reason] = self.dropped.get(reason, 0) + 1


@dataclass(frozen=True)
class DataReport:
    """What `Interactions.read` found.

    source, format, encoding: where and how the log was read. columns: "user", "item", "time" -> the column that was
        recognised without being named. rows_read: rows of data, good or bad. rows: interactions kept.
    dropped: reason -> number of rows left out. faults: the first few bad rows and the first of each reason, in full.
    blank_lines: number of empty lines. cut_short: whether the last line lacks a line end (perhaps the file was cut).
    ties: rows at the same time as the row before them in their user's history. tied_ends: users whose last two rows
        are tied, so that ties="input" or "random" decides which of them is the test target.
    repeats: rows whose user had the item before. duplicates: repeats that have the same time too.
    short_users: users with fewer than 3 rows, who only train in "last-one". longest, median_length: rows per user.
        longest_user: the user with the most rows.
    unsorted: rows that stand in the source after a later row of their user.
    look_missing: rows whose user or item is a word for a missing value (NA, null, ...), kept as an id because
        `missing` excludes the word. spaced_ids: distinct ids that begin or end with a space.
    rounded_times: times that lost digits: below the microsecond of dates, or whole numbers beyond 2**53 in a column
        with fractions. odd_times: times before 1980 or after 2099 in the guessed unit, which may be placeholders or
        times of another unit.
    time_type: "int64", "float64" or None. time_unit: "s", "ms", "us", "ns" (guessed from the size) or None.
        first, last: the earliest and the latest time.
    features: name -> number of items in the log that have a value. ungrouped: name -> number of values, for features
        whose values hardly any two items share (titles, prices), which say little more than the item's id.
        feature_rows_unused: items of the feature file that the log lacks. titled: whether items have titles.
    """

    source: str
    format: str
    encoding: str
    columns: Mapping[str, str]
    rows_read: int
    rows: int
    users: int
    items: int
    dropped: Mapping[str, int]
    faults: tuple[str, ...]
    blank_lines: int
    cut_short: bool
    ties: int
    tied_ends: int
    duplicates: int
    repeats: int
    short_users: int
    longest: int
    longest_user: str
    median_length: float
    unsorted: int
    look_missing: int
    spaced_ids: int
    rounded_times: int
    odd_times: int
    time_type: str | None
    time_unit: str | None
    first: float | None
    last: float | None
    features: Mapping[str, int]
    ungrouped: Mapping[str, int]
    feature_rows_unused: int
    titled: bool = False

    __repr__ = summary

    def to_json(self) -> dict[str, Any]:
        """Numbers, strings, lists and dicts for json.dump."""
        return asdict(self)

    def __str__(self) -> str:
        """A readable text, one fact a line.

        >>> from fastcl.recsys import bundled
        >>> print(str(bundled("purchases").report).splitlines()[1])
        152,543 rows, 2,345 users, 1,220 items
        """
        lines = [
            f"{self.source} ({self.format}, {self.encoding})",
            f"{self.rows:,} rows, {self.users:,} users, {self.items:,} items",
            f"rows a user: median {self.median_length:g}, longest {self.longest:,}",
            self._time_line(),
        ]
        facts = (
            (self.short_users, "users have fewer than 3 rows: they train and are not evaluated"),
            (self.ties, "rows share their time with the row before them in their user's history"),
            (self.tied_ends, "users end in such a tie: the order of the rows decides their test target"),
            (self.repeats, "rows repeat an item of their user"),
            (self.duplicates, "of the repeats have the same time too"),
            (self.odd_times, "times are not between 1980 and 2100: placeholders, or of another unit"),
            (self.rounded_times, "times have more digits than are kept (those of dates still decide the order)"),
            (self.unsorted, "rows stand in the source after a later row of their user (reading sorts them)"),
            (self.look_missing, "rows have a user or item that is a word for a missing value (kept as asked)"),
            (self.spaced_ids, "ids begin or end with a space (kept: text is text)"),
            (self.blank_lines, "blank lines"),
            (self.feature_rows_unused, "items of the feature file are not in the log"),
        )
        lines += [f"{count:,} {what}" for count, what in facts if count]
        if self.columns:
            taken = ", ".join(f"{option} is {name!r}" for option, name in self.columns.items())
            lines.append(f"columns by their names: {taken}")
        for name, count in self.features.items():
            lines.append(f"feature {name}: {count:,} of {self.items:,} items have it")
            if name in self.ungrouped:
                title = "" if self.titled else f"if it is their title, --title {name}; "
                lines.append(
                    f"  its {self.ungrouped[name]:,} values group no items: {title}to leave it out, --feature-columns "
                    f"with the others ({'' if self.titled else 'title, '}feature_columns in Python)"
                )
        if self.users > 2 and 2 * self.longest > self.rows:
            share = f"{self.longest:,} of {self.rows:,} rows"
            lines.append(f"user {self.longest_user!r} has {share}: a word for a missing value?")
        if self.cut_short:
            lines.append("the last line has no line end: is the file whole?")
        lines += [f"dropped {count:,} of {self.rows_read:,}: {reason}" for reason, count in self.dropped.items()]
        lines += [f"  {fault}" for fault in self.faults]
        return "\n".join(lines)

    def _time_line(self) -> str:
        if self.first is None or self.last is None:
            return "no times: the order of the rows is the order in time"
        if self.time_unit is None:
            return f"times {self.first} to {self.last} ({self.time_type}, of no unit that fits a date)"
        first, last = (times.iso(time, self.time_unit) for time in (self.first, self.last))
        return f"times {first} to {last} UTC ({self.time_type}, looks like {self.time_unit})"


def describe(
    tally: Tally,
    lengths: np.ndarray,  # int64 [U], rows of each user
    item: np.ndarray,  # int64 [N], the users' rows one user after the other, each user's in time order
    times_: np.ndarray | None,  # [N]
    users: Sequence[str],
    items: Sequence[str],
    unsorted: int,
    look_missing: int,
) -> DataReport:
    """The report of a log in time order, without item features: `Interactions` adds their counts."""
    unit = None if times_ is None else times.unit_of(times_)
    found: Counter[str] = Counter()
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    for begin, end in ranges(lengths):
        some = slice(offsets[begin], offsets[end])
        found.update(_counts(lengths[begin:end], item[some], None if times_ is None else times_[some], unit))
    return DataReport(
        source=tally.source,
        format=tally.format,
        encoding=tally.encoding,
        columns=dict(tally.columns),
        rows_read=tally.rows_read,
        rows=int(offsets[-1]),
        users=len(users),
        items=len(items),
        dropped=dict(tally.dropped),
        faults=tuple(tally.faults),
        blank_lines=tally.blank_lines,
        cut_short=tally.cut_short,
        ties=found["ties"],
        tied_ends=found["tied_ends"],
        duplicates=found["duplicates"],
        repeats=found["repeats"],
        short_users=int((lengths < 3).sum()),
        longest=int(lengths.max()),
        longest_user=users[int(lengths.argmax())],
        median_length=float(np.median(lengths)),
        unsorted=unsorted,
        look_missing=look_missing,
        spaced_ids=sum(name != name.strip() for names in (users, items) for name in names),
        rounded_times=tally.rounded_times,
        odd_times=found["odd_times"],
        time_type=None if times_ is None else str(times_.dtype),
        time_unit=unit,
        first=None if times_ is None else times_.min().item(),
        last=None if times_ is None else times_.max().item(),
        features={},
        ungrouped={},
        feature_rows_unused=0,
    )


def _counts(lengths: np.ndarray, item: np.ndarray, times_: np.ndarray | None, unit: str | None) -> dict[str, int]:
    """Of some users' rows: what of the report is a sum over users."""
    row = np.repeat(np.arange(len(lengths)), lengths)
    pair = row * (1 + item.max(initial=0)) + item
    order = np.argsort(pair, kind="stable")  # stable: within a pair the rows stay in time order
    again = pair[order[1:]] == pair[order[:-1]]
    if times_ is None:
        return {"repeats": int(again.sum())}
    tied = np.zeros(len(row) + 1, bool)  # one more: the last row of nobody
    tied[1:-1] = (row[1:] == row[:-1]) & (times_[1:] == times_[:-1])
    return {
        "repeats": int(again.sum()),
        "duplicates": int((again & (times_[order[1:]] == times_[order[:-1]])).sum()),
        "ties": int(tied.sum()),
        "tied_ends": int(tied[lengths.cumsum() - 1].sum()),
        "odd_times": 0 if unit is None else times.outside(times_, unit),
    }


@dataclass(frozen=True)
class SplitReport:
    """What a split holds out and what it cannot use.

    how: "last-one", "time", "items", "none" or "files". at: the cut of "time", in the unit of the times, or the share
        of "items". ties, seed: as given.
    train_rows, valid_cases, test_cases: sizes. not_evaluated: users without a test case.
    held_out_unused: rows held out of train that are no target (a user's rows after the first one).
    unseen_targets: test targets that train never shows.
    repeated_targets: test targets in their user's history, which are sure misses where seen items are masked.
    later_in_train: test cases whose target is earlier than some row of train; None without times.
    """

    how: str
    at: float | None
    ties: str
    seed: int
    train_rows: int
    valid_cases: int
    test_cases: int
    not_evaluated: int
    held_out_unused: int
    unseen_targets: int
    repeated_targets: int
    later_in_train: int | None

    __repr__ = summary

    def to_json(self) -> dict[str, Any]:
        """Numbers and strings for json.dump."""
        return asdict(self)

    def _cut(self, at: float) -> str:
        unit = times.unit_of(np.array([at])) if self.how == "time" else None
        return f"{at:.15g}" if unit is None else f"{times.iso(at, unit)} UTC"

    def __str__(self) -> str:
        """A readable text, one fact a line."""
        if self.how == "none":
            return f"split none: {self.train_rows:,} train rows; nothing is held out, so nothing can be evaluated"
        cut = "" if self.at is None else f" at {self._cut(self.at)}"
        lines = [
            f"split {self.how}{cut}: {self.train_rows:,} train rows, {self.valid_cases:,} validation cases, "
            f"{self.test_cases:,} test cases"
        ]
        rest = "before the last one" if self.how == "items" else "after the first one"
        facts = (
            (self.not_evaluated, "users have no test case"),
            (self.held_out_unused, f"rows are held out without being a target (a user's rows {rest})"),
            (self.unseen_targets, "test targets never occur in train"),
            (self.repeated_targets, "test targets are in their user's history: sure misses unless seen items are kept"),
            (self.later_in_train or 0, "test targets are earlier than some row of train, which leaks the future"),
        )
        lines += [f"{count:,} {what}" for count, what in facts if count]
        if self.later_in_train is None:
            lines.append("the log has no times, so it is unknown whether train holds rows later than the test targets")
        return "\n".join(lines)
