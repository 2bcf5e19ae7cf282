"""Times of a log: numbers as they are, ISO dates as Unix seconds (UTC), always int64 or float64.

Times are never rounded, shifted or rescaled; the unit of a number is guessed for the report only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from typing import Any

import numpy as np

# A column holds one kind of time; "date" is kept as int64 microseconds until all of it is known.
NUMBER, DATE = "number", "date"
_TICKS = 1_000_000
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_ISO = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)(?:[T ](\d\d):(\d\d)(?::(\d\d)(?:[.,](\d{1,9}))?)?)?\s*(Z|UTC|([+-])(\d\d):?(\d\d))?",
    re.ASCII,
)
_DECIMAL = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*", re.ASCII)
_WORDS = re.compile(r"\s*[+-]?(nan|inf|infinity)\s*", re.IGNORECASE)
_PLAIN_DATE = frozenset("0123456789-:. T")
_UNITS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
# 1980 to 2100 in seconds: as multiples of it the units are told apart, since they do not overlap.
_SPAN = (315_532_800, 4_102_444_800)

Faults = dict[int, tuple[str, str]]


class Clock:
    """Reads a column piece by piece; the first readable value decides whether it holds numbers or dates."""

    def __init__(self) -> None:
        self.kind: str | None = None

    def read(self, column: list[str] | np.ndarray) -> tuple[np.ndarray, Faults]:
        """The values of one piece, and for each unreadable entry its index with (reason, message); its value is 0.

        column: texts, or an array of int64, float64 or datetime64.
        """
        if isinstance(column, np.ndarray):
            return self._array(column)
        fast = _numbers(column) if self.kind != DATE else None
        if fast is not None and len(column):
            self.kind = NUMBER
            return fast, {}
        fast = _dates(column) if self.kind != NUMBER else None
        if fast is not None and len(column):
            self.kind = DATE
            return fast, {}
        return self._one_by_one(column)

    def join(self, pieces: Sequence[np.ndarray]) -> np.ndarray:
        """All pieces as one vector: int64 where every value is whole, else float64."""
        values = np.concatenate(pieces) if pieces else np.zeros(0, np.int64)
        if self.kind != DATE:
            return values
        return values // _TICKS if not (values % _TICKS).any() else values / _TICKS

    def _array(self, column: np.ndarray) -> tuple[np.ndarray, Faults]:
        if column.dtype.kind == "M":
            self.kind = DATE
            lost = np.isnat(column)
            values = np.where(lost, 0, column.astype("datetime64[us]").astype(np.int64))
        else:
            self.kind = NUMBER
            lost = ~np.isfinite(column)
            values = np.where(lost, 0, column)
        return values, {int(k): _unreadable(str(column[k])) for k in np.flatnonzero(lost)}

    def _one_by_one(self, column: Sequence[str]) -> tuple[np.ndarray, Faults]:
        values: list[int | float] = []
        faults: Faults = {}
        for k, text in enumerate(column):
            kind, value = parse(text)
            if kind is None or (self.kind is not None and kind != self.kind):
                faults[k] = _unreadable(text) if kind is None else _other_kind(text, kind)
                value = 0
            else:
                self.kind = kind
            values.append(value)
        whole = all(isinstance(value, int) for value in values)
        return np.array(values, np.int64 if whole else np.float64), faults


def parse(text: str) -> tuple[str | None, int | float]:
    """(kind, value) of one time; kind None where it is neither a finite number nor an ISO date.

    >>> parse("1500000000"), parse("1970-01-01T00:00:01Z"), parse("yesterday")
    (('number', 1500000000), ('date', 1000000), (None, 0))
    """
    if _DECIMAL.fullmatch(text):
        try:
            whole = int(text)
        except ValueError:
            pass
        else:
            if -(2**63) <= whole < 2**63:
                return NUMBER, whole
        value = float(text)
        return (NUMBER, value) if math.isfinite(value) else (None, 0)
    found = _ISO.fullmatch(text.strip())
    if found is None:
        return None, 0
    year, month, day, hour, minute, second, fraction, _, sign, zone_hours, zone_minutes = found.groups(default="0")
    try:
        moment = datetime(
            int(year), int(month), int(day), int(hour), int(minute), int(second), tzinfo=timezone.utc
        )  # fmt: skip
    except ValueError:
        return None, 0
    ahead = timedelta(hours=int(zone_hours), minutes=int(zone_minutes)) * (-1 if sign == "-" else 1)
    return DATE, (moment - ahead - _EPOCH) // timedelta(microseconds=1) + int(fraction.ljust(6, "0")[:6])


def unit_of(times: np.ndarray) -> str | None:
    """ "s", "ms", "us" or "ns": the unit in which the median lies between 1980 and 2100; None where none fits.

    >>> unit_of(np.array([1_500_000_000_000])), unit_of(np.array([1, 2, 3]))
    ('ms', None)
    """
    if not len(times):
        return None
    middle = float(np.median(times))
    fitting = (unit for unit, per_second in _UNITS.items() if _SPAN[0] <= middle / per_second < _SPAN[1])
    return next(fitting, None)


def iso(time: float, unit: str) -> str:
    """The time as text, to the second, UTC.

    >>> iso(1_500_000_000_000, "ms")
    '2017-07-14 02:40:00'
    """
    return (_EPOCH + timedelta(seconds=time // _UNITS[unit])).strftime("%Y-%m-%d %H:%M:%S")


def cut(at: Any, times: np.ndarray) -> int | float:
    """The cut that `at` names, in the unit of `times`: a number as it is, an ISO date by the guessed unit.

    Raises ValueError where `at` is neither, or a date while the unit of the times is unknown.
    """
    kind, value = parse(str(at)) if isinstance(at, int | float | str | np.number) and at is not True else (None, 0)
    if kind == NUMBER:
        return value
    if kind is None:
        raise ValueError(f"at: expected a number in the unit of the times or an ISO date (2017-10-01), got {at!r}")
    unit = unit_of(times)
    if unit is None:
        raise ValueError(f"at: expected a number, for the times have no unit that a date fits, got {at!r}")
    scaled = value * _UNITS[unit]
    return scaled // _TICKS if scaled % _TICKS == 0 else scaled / _TICKS


def _numbers(column: Sequence[str]) -> np.ndarray | None:
    """All at once where every entry is a plain number, else None. int() also takes 1_000 and other scripts' digits."""
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
    return values if np.isfinite(values).all() else None


def _dates(column: Sequence[str]) -> np.ndarray | None:
    """All at once where every entry is an ISO date without a zone, or all end in Z, else None."""
    if all(text.endswith("Z") for text in column):
        column = [text[:-1] for text in column]
    # Shorter forms (2017, 2017-10) and words (now, NaT) mean something to numpy, so they are kept from it.
    if not _PLAIN_DATE.issuperset("".join(column)) or min(map(len, column), default=0) < 10:
        return None
    try:
        return np.array(column, "datetime64[us]").astype(np.int64)
    except ValueError:
        return None


def _unreadable(text: str) -> tuple[str, str]:
    if not text.strip():
        return "missing time", f"time {text!r} is not a number (such as Unix seconds) or an ISO date"
    if _WORDS.fullmatch(text) or _DECIMAL.fullmatch(text) or text == "NaT":
        return "time not finite", f"time {text!r} is not finite"
    return "unreadable time", f"time {text!r} is not a number (such as Unix seconds) or an ISO date (2017-10-01 12:30)"


def _other_kind(text: str, kind: str) -> tuple[str, str]:
    other = NUMBER if kind == DATE else DATE
    return "other kind of time", f"time {text!r} is a {kind}, while the rows before it hold a {other}"
