"""Times of every form: kept to the second, never float32, dates in UTC, units guessed and not believed.

Numbers in comments are explained in test_recsys_reading.py.
"""

from __future__ import annotations

from datetime import date, datetime, timezone
from pathlib import Path

import numpy as np
import pytest

from fastcl.recsys import times
from fastcl.recsys.data import Interactions

HEADER = "user,item,time\n"


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def rows(data: Interactions) -> list[tuple[str, str, float | None]]:
    """(user, item, time) of every interaction, by user and time."""
    user = np.repeat(np.arange(len(data.users)), data.log.lengths)
    clock = [None] * len(user) if data.log.time is None else data.log.time.tolist()
    triples = zip(user.tolist(), data.log.item.tolist(), clock, strict=True)
    return [(data.users[u], data.items.ids[i - 1], t) for u, i, t in triples]


# 5: float32 merges seconds, so it is refused rather than believed.
def test_times_are_never_float32(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="time: expected int64 or float64, got float32"):
        Interactions.read({"user": [1, 2], "item": [1, 2], "time": np.array([1.0, 2.0], np.float32)})
    clock = [881250949, 881250950, 881250948]
    data = Interactions.read(write(tmp_path / "log.csv", HEADER + "".join(f"u,i{t},{t}.0\n" for t in clock)))
    assert data.log.time is not None
    assert (data.log.time.dtype, data.log.time.tolist()) == (np.float64, [float(t) for t in sorted(clock)])


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["2017-10-01", "1970-01-01"], [1_506_816_000, 0]),
        (["2017-10-01 00:00:01", "2017-10-01T00:00:02"], [1_506_816_001, 1_506_816_002]),
        (["2017-10-01T00:00:01Z", "2017-10-01T00:00:02Z"], [1_506_816_001, 1_506_816_002]),
        (["2017-10-01T02:00:00+02:00", "2017-09-30 19:00-0500"], [1_506_816_000, 1_506_816_000]),
        (["2017-10-01T00:00:00.250", "2017-10-01"], [1_506_816_000.25, 1_506_816_000]),
        (["1500000000123", "1500000000122"], [1_500_000_000_123, 1_500_000_000_122]),
        ([" 5", "+6", "-7"], [5, 6, -7]),
        (["1e3", "5", ".5"], [1000.0, 5.0, 0.5]),
        (["9223372036854775807", "-9223372036854775808"], [2**63 - 1, -(2**63)]),
    ],
)  # fmt: skip
def test_times_of_every_form(tmp_path: Path, texts: list[str], expected: list[float]) -> None:
    lines = "".join(f"u{k},i,{text}\n" for k, text in enumerate(texts))
    for data in (
        Interactions.read(write(tmp_path / "log.csv", HEADER + lines)),
        Interactions.read({"user": [f"u{k}" for k in range(len(texts))], "item": ["i"] * len(texts), "time": texts}),
    ):
        assert data.log.time is not None
        assert data.log.time.tolist() == expected
        assert data.log.time.dtype == (np.float64 if any(isinstance(t, float) for t in expected) else np.int64)


@pytest.mark.parametrize("text", ["", "nan", "inf", "NaT", "now", "1_000", "2017", "2017-13-01", "1.10.2017", "٣"])
def test_times_that_are_none(tmp_path: Path, text: str) -> None:
    other = "2017-10-01" if not text.isdigit() or not text.isascii() else "2017-01-01"
    data = Interactions.read(write(tmp_path / "log.csv", f"{HEADER}a,x,{other}\nb,x,{text}\n"), on_error="skip")
    assert data.users == ("a",)
    with pytest.raises(ValueError, match=r"log\.csv:3: time "):
        Interactions.read(tmp_path / "log.csv")


def test_times_in_frames() -> None:
    moments = [datetime(2017, 10, 1, 12), datetime(2017, 10, 1, 11)]
    base = 1_506_855_600
    for column in (
        np.array(moments, "datetime64[ns]"),
        moments,
        [moment.replace(tzinfo=timezone.utc) for moment in moments],
        [str(moment) for moment in moments],
    ):
        data = Interactions.read({"user": ["u", "u"], "item": ["late", "early"], "time": column})
        assert rows(data) == [("u", "early", base), ("u", "late", base + 3600)]
    assert rows(Interactions.read({"user": ["u"], "item": ["x"], "time": [date(2017, 10, 1)]}))[0][2] == 1_506_816_000
    with pytest.raises(ValueError, match="time '2017-10-01' is a date, while the rows before it hold a number"):
        Interactions.read({"user": ["u", "u"], "item": ["x", "y"], "time": [3, "2017-10-01"]})


@pytest.mark.parametrize(("unit", "scale"), [("s", 1), ("ms", 10**3), ("us", 10**6), ("ns", 10**9)])
def test_the_unit_of_times_is_guessed_and_dates_cut_in_it(unit: str, scale: int) -> None:
    clock = 1_506_816_000 * scale + np.arange(5)
    assert times.unit_of(clock) == unit
    assert times.iso(int(clock[0]), unit) == "2017-10-01 00:00:00"
    assert times.cut("2017-10-01", clock) == clock[0]
    assert times.cut("12.5", clock) == 12.5
    with pytest.raises(ValueError, match="at: expected a number, for the times have no unit that a date fits"):
        times.cut("2017-10-01", np.arange(5))
