"""The time buckets of CLRec and Multi-CLRec: the limits of the buckets, and the unit of the data's times."""

import warnings
from collections.abc import Sequence
from fractions import Fraction

from fastcl.recsys.data import Histories
from fastcl.recsys.data.reading.times import unit_of

_MINUTE, _HOUR, _DAY = 60.0, 3600.0, 86400.0
# From a minute to four years, in seconds.
TIME_CUTS = (
    *(_MINUTE, 5 * _MINUTE, 15 * _MINUTE, _HOUR, 4 * _HOUR, 12 * _HOUR),
    *(_DAY, 2 * _DAY, 4 * _DAY, 7 * _DAY, 14 * _DAY, 30 * _DAY),
    *(60 * _DAY, 120 * _DAY, 240 * _DAY, 365 * _DAY, 730 * _DAY, 1461 * _DAY),
)
# The seconds in each unit, as fractions so that limits of whole days stay whole numbers.
UNITS = {
    **{name: Fraction(1, 10**digits) for name, digits in (("millisecond", 3), ("microsecond", 6), ("nanosecond", 9))},
    **{"second": Fraction(1), "minute": Fraction(60), "hour": Fraction(3600), "day": Fraction(86400)},
}
GUESSED = {"s": "second", "ms": "millisecond", "us": "microsecond", "ns": "nanosecond"}


def cuts_in(unit: str, seconds: Sequence[float]) -> list[float]:
    """Limits of time buckets, given in seconds, converted to one of UNITS."""
    return [float(Fraction(cut) / UNITS[unit]) for cut in seconds]


def check_unit(train: Histories, unit: str, cuts: Sequence[float]) -> None:
    """Warns where times and limits are given and the times look like times of another unit."""
    guess = None if train.time is None or not cuts else unit_of(train.time)
    if guess is not None and GUESSED[guess] != unit:
        warnings.warn(f"time_unit: times look like {GUESSED[guess]}s, got {unit!r}", stacklevel=3)


def check_cuts(cuts: Sequence[float]) -> None:
    if list(cuts) != sorted(set(cuts)):
        raise ValueError(f"time_cuts: expected rising limits, got {cuts}")
