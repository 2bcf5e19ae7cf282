"""Times of every form: kept to the second, never float32, dates in UTC, units guessed and not believed.

Numbers in comments are explained in test_reading.py.
"""

from __future__ import annotations

import unittest.mock
import warnings
from datetime import date, datetime, timedelta, timezone
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcl.recsys.cli import main
from fastcl.recsys.data import Interactions
from fastcl.recsys.data.reading import times

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
        (["2017-10-01T00:00:00-05:00 ", " 2017-10-01 05:00:00+00"], [1_506_834_000, 1_506_834_000]),
        ([" 5", "+6", "-7", "8 "], [5, 6, -7, 8]),
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


@pytest.mark.parametrize(
    "text",
    ["", "nan", "inf", "NaT", "now", "1_000", "2017", "2017-13-01", "2017-02-29", "0000-01-01",
     "2017-01-01 24:00", "2017-01-01 12", "2017-01-01T00:00:00+24:00", "1.10.2017", "٣", "\\N", "NA", "-"],
)  # fmt: skip
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
    with pytest.raises(ValueError, match="at: expected a number, since the times are of no unit that fits a date"):
        times.cut("2017-10-01", np.arange(5))


# Texts of dates and numbers, and texts that are nearly such: every character may be another one.
DIGITS = "2017-10-01T09:05:07.123456789+01:30"
DATES = st.builds(
    lambda moment, cut, zone: (moment.strftime("%Y-%m-%d %H:%M:%S.%f") + "789")[:cut] + zone,
    st.datetimes(),
    st.sampled_from([10, 13, 16, 19, 20, 22, 26, 29]),
    st.sampled_from(["", "Z", " UTC", "+05:30", "-05:00", "-0500", "+05", "+99:99", " ", "z"]),
)
NUMBERS = st.one_of(
    st.integers(-(2**65), 2**65).map(str), st.floats().map(str), st.sampled_from(["1_0", "5.", "\x1c7"])
)  # fmt: skip
NEARLY = st.builds(
    lambda text, at, sign: text[: at % (len(text) + 1)] + sign + text[at % (len(text) + 1) + 1 :],
    st.one_of(DATES, NUMBERS, st.just(DIGITS)),
    st.integers(0, 40),
    st.sampled_from(["", "0", "9", "-", ":", " ", "T", "\0", "٣", "x", "\xa0", "é"]),
)


def _kept(found: times.Times) -> list[tuple[float, int] | None]:
    below = np.zeros(len(found.values), int) if found.below is None else found.below
    pairs = zip(found.values.tolist(), below.tolist(), strict=True)
    return [None if k in found.faults else pair for k, pair in enumerate(pairs)]


@given(st.lists(st.one_of(DATES, NUMBERS, NEARLY), min_size=1, max_size=12))
def test_what_a_time_is_does_not_depend_on_the_times_beside_it(column: list[str]) -> None:
    clock = times.Clock()
    whole = _kept(clock.read(column))
    for text, together in zip(column, whole, strict=True):
        single = times.Clock()
        alone = _kept(single.read([text]))[0]
        parsed = times.parse(text)
        assert alone == (None if parsed.kind is None else (parsed.value, parsed.below))
        assert together == (alone if single.kind == clock.kind else None)  # numbers and dates do not mix


@given(st.lists(st.tuples(st.datetimes(datetime(1000, 1, 1)), st.integers(-720, 720)), min_size=1, max_size=9))
def test_dates_with_offsets_are_what_datetime_makes_of_them(rows: list[tuple[datetime, int]]) -> None:
    moments = [moment.replace(tzinfo=timezone(timedelta(minutes=ahead))) for moment, ahead in rows]
    epoch = datetime(1970, 1, 1, tzinfo=timezone.utc)
    found = times.Clock().read([moment.isoformat() for moment in moments])
    assert (found.faults, found.below) == ({}, None)
    assert found.values.tolist() == [(moment - epoch) // timedelta(microseconds=1) for moment in moments]


@pytest.mark.parametrize("good", ["2017-10-01 12:00", "1500000000"])
def test_a_bad_time_costs_its_own_row_only(tmp_path: Path, good: str) -> None:
    for bad in ("2017-10-01 12", "soon", "2017-10-01 12:00+9", "", "1e999"):
        text = HEADER + f"a,x,{good}\nb,x,{bad}\n" + f"c,x,{good}\n" * 3
        data = Interactions.read(write(tmp_path / "log.csv", text), on_error="skip")
        assert data.report is not None
        assert (data.report.rows, list(data.report.dropped.values())) == (4, [1])


def test_a_column_of_negative_offsets_is_read_without_a_warning_and_at_once() -> None:
    column = [f"2017-10-01 12:00:{k % 60:02}-05:00" for k in range(20_000)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = times.Clock().read(column)
        with unittest.mock.patch.object(times, "parse", side_effect=AssertionError("read one by one")):
            again = times.Clock().read([*column[:7000], *("2017-10-01 12:00:01+01:00 " for _ in range(7000))])
    assert found.values.tolist() == [(1_506_877_200 + k % 60) * 10**6 for k in range(20_000)]
    assert again.values[7000:].tolist() == [1_506_855_601 * 10**6] * 7000


@pytest.mark.parametrize("form", ["texts", "array"])
def test_nanoseconds_decide_the_order_and_are_told(form: str) -> None:
    texts = [f"2017-10-01T00:00:00.000001{k}00" for k in (4, 1, 3, 2)]
    column = np.array(texts, "datetime64[ns]") if form == "array" else texts
    data = Interactions.read({"user": ["u"] * 4, "item": ["4", "1", "3", "2"], "time": column})
    assert [row[1] for row in rows(data)] == ["1", "2", "3", "4"]
    assert data.report is not None
    assert (data.report.rounded_times, data.report.unsorted, data.report.ties) == (4, 2, 3)
    assert "4 times have more digits than are kept (those of dates still decide the order)" in str(data.report)


def test_whole_numbers_beside_fractions_are_counted_where_they_lose_digits() -> None:
    large = ["1500000000000000001", "1.5", "1500000000000000000", "3"]
    report = Interactions.read({"user": ["u"] * 4, "item": list("abcd"), "time": large}).report
    assert report is not None
    assert (report.rounded_times, report.time_type) == (1, "float64")
    report = Interactions.read({"user": ["u"] * 3, "item": list("abc"), "time": [large[0], large[2], "3"]}).report
    assert report is not None
    assert (report.rounded_times, report.time_type) == (0, "int64")


# Beyond the calendar a time is printed as the number it is.
@pytest.mark.parametrize("odd", ["1600000002000", "-99999999999", "9" * 18, "-1e300", "1e17", "9" * 300])
def test_times_beyond_the_calendar(tmp_path: Path, odd: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = "".join(f"u{u},i{k},{1_600_000_000 + k}\n" for u in range(3) for k in range(4))
    path = write(tmp_path / "log.csv", HEADER + lines + f"u0,i9,{odd}\n")
    assert main.main(["data", "check", str(path)]) == 0
    text = capsys.readouterr().out
    assert str(times.parse(odd).value) in text.replace(",", "")
    assert "1 times are not between 1980 and 2100" in text
    options = ["--model", "sasrec", "--epochs", "1", "--set", "dim=8", "batch=8", "max_len=4"]
    assert main.main(["train", str(path), *options, "-o", str(tmp_path / "run")]) == 0


def test_placeholders_and_mixed_units_are_counted(tmp_path: Path) -> None:
    clock = [1_600_000_000, 0, 9_999_999_999, 1_600_000_001, 1_600_000_002_000, 1_600_000_003, 1_600_000_004, -1]
    report = Interactions.read({"user": list("abcdefgh"), "item": [1] * 8, "time": clock}).report
    assert report is not None
    assert (report.odd_times, report.time_unit) == (4, "s")
    dates = ["2020-01-01", "1970-01-01", "2021-01-01 00:00:01.5"]
    report = Interactions.read({"user": list("abc"), "item": [1] * 3, "time": dates}).report
    assert report is not None
    assert report.odd_times == 1
    report = Interactions.read({"user": list("abc"), "item": [1] * 3, "time": [1, 2, 3]}).report
    assert report is not None
    assert (report.odd_times, report.time_unit) == (0, None)
