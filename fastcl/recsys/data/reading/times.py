"""Times of a log: numbers as they are, ISO dates (or dates of a strptime format) as Unix seconds, UTC.

Numbers are never shifted or rescaled: whole numbers are int64, others the nearest float64. Dates are read to the
nanosecond and kept to the microsecond: finer digits only decide the order, and are counted. What a text means never
depends on the texts beside it, except that a column holds either numbers or dates.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta, timezone
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

# A column holds one kind of time; "date" is kept as int64 microseconds until all of it is known.
NUMBER, DATE = "number", "date"
MISSING_WORDS = (
    "NA", "N/A", "n/a", "#N/A", "<NA>", "nan", "NaN", "NAN", "NaT", "null", "Null", "NULL", "(null)", "none", "None",
    "NONE", "undefined", "\\N", "-",
)  # fmt: skip
_TICKS = 1_000_000
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_ISO = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)(?:[T ](\d\d):(\d\d)(?::(\d\d)(?:[.,](\d{1,9}))?)?)?\s*(Z|UTC|([+-])(\d\d)(?::?(\d\d))?)?",
    re.ASCII,
)
_LONGEST = 40  # characters; no ISO date is longer
_SHAPES = 8  # so many shapes of dates of one length are read as arrays, the rest text by text
_DECIMAL = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_WORDS = re.compile(r"[+-]?(nan|inf|infinity)", re.IGNORECASE)
_UNITS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
# 1980 to 2100 in seconds. The spans of s, ms, us and ns do not overlap, so the size of a time tells its unit.
_SPAN = (315_532_800, 4_102_444_800)
EXACT = 2**53  # a float64 holds every whole number below

Faults = dict[int, tuple[str, str]]


class Times(NamedTuple):
    """One piece of a column. values: int64 or float64, 0 where unreadable. below: int16, nanoseconds beyond the
    microsecond of dates; None where all are 0. faults: index -> (reason, message) of each unreadable value."""

    values: np.ndarray
    below: np.ndarray | None
    faults: Faults


class Moment(NamedTuple):
    """What a text means as a time; kind is None for a text that is neither a finite number nor a date."""

    kind: str | None
    value: int | float = 0  # a number, or microseconds since 1970
    below: int = 0  # nanoseconds beyond the microsecond


class Clock:
    """Reads a column piece by piece; the first readable value decides whether it holds numbers or dates.

    format: a strptime format that all texts of the column follow; None: numbers or ISO dates.
    rounded: how many whole numbers were rounded to float64, which the column is where it holds fractions too.
    """

    def __init__(self, format: str | None = None) -> None:
        self.kind: str | None = None if format is None else DATE
        self.format = format
        self.rounded = 0

    def read(self, column: list[str] | np.ndarray) -> Times:
        """The times of one piece: texts, or an array of int64, float64 or datetime64."""
        if isinstance(column, np.ndarray):
            return self._array(column)
        if self.kind != DATE and len(column):
            fast = _numbers(column)
            if fast is not None:
                self.kind = NUMBER
                return Times(fast, None, {})
        if self.format is not None:
            return self._gather(column, [_strptime(text.strip(), self.format) for text in column])
        texts = [text.strip() for text in column]
        ticks, below, good = _dates(texts)
        if good.all() and len(column) and self.kind != NUMBER:
            self.kind = DATE
            return Times(ticks, below if below.any() else None, {})
        dates = zip(ticks.tolist(), below.tolist(), good.tolist(), strict=True)
        return self._gather(
            column,
            [Moment(DATE, tick, ns) if ok else parse(text) for text, (tick, ns, ok) in zip(texts, dates, strict=True)],
        )

    def join(self, pieces: Sequence[np.ndarray]) -> np.ndarray:
        """All pieces as one vector: int64 where every value is whole, else float64. Dates become seconds."""
        final = self.final(pieces)
        return np.concatenate([final(piece) for piece in pieces]) if pieces else np.zeros(0, np.int64)

    def final(self, pieces: Iterable[np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
        """What makes each of the pieces a part of that vector; walks over all of them, once."""
        if self.kind == DATE:
            if any((piece % _TICKS).any() for piece in pieces):
                return lambda piece: piece / _TICKS
            return lambda piece: piece // _TICKS
        whole, rounded = True, 0
        for piece in pieces:
            if piece.dtype.kind == "f":
                whole = False
            elif _large(piece):
                rounded += _inexact(piece.tolist())
        if whole:
            return lambda piece: piece
        self.rounded += rounded
        return lambda piece: piece.astype(np.float64)

    def _array(self, column: np.ndarray) -> Times:
        if column.dtype.kind != "M":
            self.kind = NUMBER
            lost = ~np.isfinite(column)
            faults = {int(k): _unreadable(str(column[k])) for k in np.flatnonzero(lost)}
            return Times(np.where(lost, 0, column), None, faults)
        self.kind = DATE
        missing = np.isnat(column)
        column = np.where(missing, np.zeros(1, column.dtype), column)
        values = column.astype("datetime64[us]")
        # Only units finer than microseconds have digits below them. Times far from 1970 do not fit nanoseconds.
        fine = np.datetime_data(column.dtype)[0] in ("ns", "ps", "fs", "as")
        # The conversion wraps around for years that 64 bits of microseconds do not reach.
        beyond = np.zeros(len(column), bool) if fine else values.astype(column.dtype) != column
        below = (column.astype("datetime64[ns]") - values.astype("datetime64[ns]")).astype(np.int16) if fine else None
        ticks = values.astype(np.int64)
        faults = {int(k): _unreadable("NaT") for k in np.flatnonzero(missing)}
        faults |= {int(k): ("time out of range", f"time {column[k]} is out of range") for k in np.flatnonzero(beyond)}
        return Times(ticks, below if below is not None and below.any() else None, faults)

    def _gather(self, column: Sequence[str], moments: Sequence[Moment]) -> Times:
        """The times of single texts. A moment of another kind than the column's first one is a fault too."""
        faults: Faults = {}
        for k, moment in enumerate(moments):
            if moment.kind is None:
                faults[k] = _unreadable(column[k], self.format)
            elif self.kind is None:
                self.kind = moment.kind
            elif moment.kind != self.kind:
                faults[k] = _other_kind(column[k], moment.kind)
        kept = [Moment(self.kind) if k in faults else moment for k, moment in enumerate(moments)]
        whole = all(isinstance(moment.value, int) for moment in kept)
        below = np.array([moment.below for moment in kept], np.int16)
        values = np.array([moment.value for moment in kept], np.int64 if whole else np.float64)
        self.rounded += 0 if whole else _inexact(moment.value for moment in kept)
        return Times(values, below if below.any() else None, faults)


def parse(text: str) -> Moment:
    """The meaning of one text, a number or an ISO date; spaces around it are ignored.

    >>> [tuple(parse(text)) for text in ("1500000000", "1970-01-01T00:00:01Z", "yesterday")]
    [('number', 1500000000, 0), ('date', 1000000, 0), (None, 0, 0)]
    """
    text = text.strip()
    if _DECIMAL.fullmatch(text):
        try:
            whole = int(text)
        except ValueError:
            pass
        else:
            if -(2**63) <= whole < 2**63:
                return Moment(NUMBER, whole)
        value = float(text)
        return Moment(NUMBER, value) if math.isfinite(value) else Moment(None)
    found = _ISO.fullmatch(text)
    if found is None:
        return Moment(None)
    year, month, day, hour, minute, second, fraction, _, sign, zone_hours, zone_minutes = found.groups(default="0")
    if int(zone_hours) > 23 or int(zone_minutes) > 59:
        return Moment(None)
    try:
        moment = datetime(
            int(year), int(month), int(day), int(hour), int(minute), int(second), tzinfo=timezone.utc
        )  # fmt: skip
    except ValueError:
        return Moment(None)
    ahead = timedelta(hours=int(zone_hours), minutes=int(zone_minutes)) * (-1 if sign == "-" else 1)
    micro, below = divmod(int(fraction.ljust(9, "0")), 1000)
    return Moment(DATE, (moment - _EPOCH - ahead) // timedelta(microseconds=1) + micro, below)


def check_format(format: Any) -> None:
    """ValueError for a text that is no strptime format or lacks the day, month or year."""
    if not isinstance(format, str):
        raise TypeError(f"time_format: expected a strptime format such as '%d.%m.%Y %H:%M', got {format!r}")
    day = datetime(2011, 12, 29, 13, 14, 15, tzinfo=timezone.utc)
    try:
        same = datetime.strptime(day.strftime(format), format).date() == day.date()
    except ValueError:
        same = False
    if not same:
        message = "expected a strptime format with year, month and day, such as '%d.%m.%Y %H:%M'"
        raise ValueError(f"time_format: {message}, got {format!r}")


@lru_cache(1 << 16)
def _strptime(text: str, format: str) -> Moment:
    try:
        moment = datetime.strptime(text, format)
        aware = moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)
        return Moment(DATE, (aware - _EPOCH) // timedelta(microseconds=1))
    except (ValueError, OverflowError):
        return Moment(None)


def unit_of(times: np.ndarray) -> str | None:
    """ "s", "ms", "us" or "ns": the unit in which the median lies between 1980 and 2100; None where none fits. Of
    more than two million times, it is the median of a million or more, evenly spaced.

    >>> unit_of(np.array([1_500_000_000_000])), unit_of(np.array([1, 2, 3]))
    ('ms', None)
    """
    if not len(times):
        return None
    middle = float(np.median(times[:: 1 + (len(times) >> 20)]))
    fitting = (unit for unit, per_second in _UNITS.items() if _SPAN[0] <= middle / per_second < _SPAN[1])
    return next(fitting, None)


def outside(times: np.ndarray, unit: str) -> int:
    """How many times are not between 1980 and 2100 in that unit: times of another unit, or placeholders such as 0.

    >>> outside(np.array([0, 1_500_000_000, 1_500_000_000_000]), "s")
    2
    """
    low, high = (bound * _UNITS[unit] for bound in _SPAN)
    return int(((times < low) | (times >= high)).sum())


def iso(time: float, unit: str) -> str:
    """The time as text, to the second, UTC; the bare number for a year before 1 or after 9999.

    >>> iso(1_500_000_000_000, "ms"), iso(10**17, "s")
    ('2017-07-14 02:40:00', '100000000000000000')
    """
    try:
        return (_EPOCH + timedelta(seconds=time // _UNITS[unit])).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, ValueError):
        return str(time)


def cut(at: Any, times: np.ndarray) -> int | float:
    """The cut that `at` names, in the unit of `times`. A number is taken as it is, an ISO date converted to the unit.

    Raises ValueError where `at` is neither, or is a date while `unit_of` finds no unit for the times.
    """
    text = isinstance(at, int | float | str | np.number) and at is not True
    kind, value, below = parse(str(at)) if text else Moment(None)
    if kind == NUMBER:
        return value
    if kind is None:
        raise ValueError(f"at: expected a number in the unit of the times or an ISO date (2017-10-01), got {at!r}")
    unit = unit_of(times)
    if unit is None:
        raise ValueError(f"at: expected a number, since the times are of no unit that fits a date, got {at!r}")
    scaled = (value * 1000 + below) * _UNITS[unit]
    return scaled // (_TICKS * 1000) if scaled % (_TICKS * 1000) == 0 else scaled / (_TICKS * 1000)


def _numbers(column: Sequence[str]) -> np.ndarray | None:
    """All numbers at once where every text is a plain number, else None.

    Texts with "_" or beyond ASCII are left to `parse`: int() also takes 1_000 and the digits of other scripts.
    """
    joined = "".join(column)
    if "_" in joined or not joined.isascii():
        return None
    try:
        return np.fromiter(map(int, column), np.int64, len(column))
    except (ValueError, OverflowError):
        pass
    try:
        values = np.fromiter(map(float, column), np.float64, len(column))
    except ValueError:
        return None
    # Whole numbers beyond 2**53 beside fractions are left to `parse`, which counts those that are rounded.
    return values if np.isfinite(values).all() and not _large(values) else None


def _inexact(values: Iterable[int | float]) -> int:
    """How many of the values are whole numbers that no float64 equals."""
    return sum(isinstance(value, int) and int(float(value)) != value for value in values)


def _large(values: np.ndarray) -> bool:
    return bool(len(values)) and bool(values.max() >= EXACT or values.min() <= -EXACT)


def _dates(texts: list[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(microseconds, nanoseconds beyond them, whether it is a date) of texts that may be ISO dates.

    Texts of one shape, which differ in their digits alone, are read together. A text that this function takes for no
    date may be one to `parse`: this function looks at the first few shapes only.
    """
    count = len(texts)
    ticks, below, good = np.zeros(count, np.int64), np.zeros(count, np.int16), np.zeros(count, bool)
    if not "".join(texts).isascii():
        return ticks, below, good
    lengths = np.fromiter(map(len, texts), np.int64, count)
    for length in np.unique(lengths[(lengths >= 10) & (lengths <= _LONGEST)]).tolist():
        rows = np.flatnonzero(lengths == length)
        signs = np.array([texts[k] for k in rows], f"S{length}").view(np.uint8).reshape(-1, length)
        shapes = np.where((signs >= ord("0")) & (signs <= ord("9")), ord("0"), signs)
        for _ in range(_SHAPES):
            same = (shapes == shapes[0]).all(1)
            found = _ISO.fullmatch(texts[rows[0]])
            if found:
                ticks[rows[same]], below[rows[same]], good[rows[same]] = _of_one_shape(signs[same], found)
            if same.all():
                break
            rows, signs, shapes = rows[~same], signs[~same], shapes[~same]
    return ticks, below, good


def _of_one_shape(signs: np.ndarray, found: re.Match[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`_dates` of texts of one shape. signs: uint8 [n, length], ASCII; found: the match of one of them."""

    def number(group: int) -> np.ndarray:
        begin, end = found.span(group)
        powers = 10 ** np.arange(end - begin)[::-1]
        return (signs[:, begin:end].astype(np.int64) - ord("0")) @ powers

    year, month, day, hour, minute, second, fraction, zone_hours, zone_minutes = map(number, (*range(1, 8), 10, 11))
    good = (year >= 1) & (month >= 1) & (month <= 12) & (hour < 24) & (minute < 60) & (second < 60)
    months = (year - 1970) * 12 + np.where(good, month, 1) - 1
    days = [m.astype("datetime64[M]").astype("datetime64[D]").astype(np.int64) for m in (months, months + 1)]
    first, following = days
    good &= (day >= 1) & (day <= following - first) & (zone_hours < 24) & (zone_minutes < 60)
    ahead = (zone_hours * 60 + zone_minutes) * (-1 if found[9] == "-" else 1)
    digits = found.end(7) - found.start(7)
    micro, below = np.divmod(fraction * 10 ** (9 - digits), 1000)
    seconds = (((first + day - 1) * 24 + hour) * 60 + minute - ahead) * 60 + second
    return np.where(good, seconds * _TICKS + micro, 0), np.where(good, below, 0), good


def _unreadable(text: str, format: str | None = None) -> tuple[str, str]:
    expected = "is not a number (such as Unix seconds) or an ISO date" if format is None else f"is not of {format!r}"
    bare = text.strip()
    if not bare:
        return "missing time", f"time {text!r} {expected}"
    if _WORDS.fullmatch(bare) or _DECIMAL.fullmatch(bare):
        return "time not finite", f"time {text!r} is not finite" if format is None else f"time {text!r} {expected}"
    if bare in MISSING_WORDS:
        return "missing time", f"time {text!r} {expected}"
    example = " (2017-10-01 12:30); of another form: name its time_format (--time-format)" if format is None else ""
    return "unreadable time", f"time {text!r} {expected}{example}"


def _other_kind(text: str, kind: str) -> tuple[str, str]:
    other = NUMBER if kind == DATE else DATE
    return "other kind of time", f"time {text!r} is a {kind}, while the rows before it hold a {other}"
