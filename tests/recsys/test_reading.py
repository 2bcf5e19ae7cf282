"""Sources as people have them: every form reads the same, and what cannot be read is named or counted.

Numbers in comments are those of the list of complaints about other libraries that these tests answer:
1 own file, 2 own column names, 3 quotes and encodings, 4 data frames, 5 float32 times, 6-7 ties, 8 repeats,
9 short users, 10 nothing left, 11 long histories, 12 memory, 13 files that are split already.
"""

from __future__ import annotations

import csv
import gzip
import io
import lzma
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcl.recsys.data import Interactions

HEADER = "user,item,time\n"
NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0\r"), min_size=1, max_size=4).filter(str.strip)
WORDS = st.text(st.characters(codec="utf-8", categories=("L", "N", "P")), min_size=1, max_size=4)
CLOCKS = (
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.datetimes(min_value=datetime(1900, 1, 1), max_value=datetime(2200, 1, 1)),
)


def write(path: Path, data: str | bytes) -> Path:
    raw = data.encode() if isinstance(data, str) else data
    with {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)(path, "wb") as file:
        file.write(raw)
    return path


def rows(data: Interactions) -> list[tuple[str, str, float | None]]:
    """(user, item, time) of every interaction, by user and time."""
    user = np.repeat(np.arange(len(data.users)), data.log.lengths)
    clock = [None] * len(user) if data.log.time is None else data.log.time.tolist()
    triples = zip(user.tolist(), data.log.item.tolist(), clock, strict=True)
    return [(data.users[u], data.items.ids[i - 1], t) for u, i, t in triples]


def sort(log: list[tuple[str, str, Any]]) -> list[tuple[str, str, Any]]:
    """What reading makes of a log: users in order of appearance, a stable sort by time within each."""
    place = {user: k for k, user in enumerate(dict.fromkeys(user for user, _, _ in log))}
    return sorted(log, key=lambda row: (place[row[0]], row[2]))


def seconds(moment: datetime) -> int | float:
    since = moment.replace(tzinfo=timezone.utc) - datetime(1970, 1, 1, tzinfo=timezone.utc)
    micro = since // timedelta(microseconds=1)
    return micro // 10**6 if micro % 10**6 == 0 else micro / 10**6


@given(st.data(), st.sampled_from(["csv", "tsv", "semicolon", "columns", "lists"]), st.sampled_from(CLOCKS))
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, form: str, clock: st.SearchStrategy[Any]
) -> None:
    log = data.draw(st.lists(st.tuples(NAMES, NAMES, clock), min_size=1, max_size=12))
    stamped = [(u, i, t.isoformat() if isinstance(t, datetime) else t) for u, i, t in log]
    if form in ("columns", "lists"):
        users, items, clocks = (list(column) for column in zip(*stamped, strict=True))
        typed = np.array(clocks) if form == "columns" and not isinstance(clocks[0], str) else clocks
        found = Interactions.read({"user": users, "item": items, "time": typed}, missing=())
    else:
        suffix = data.draw(st.sampled_from(["", ".gz", ".xz"]))
        encoding = data.draw(st.sampled_from(["utf-8", "utf-8-sig", "utf-16"]))
        text = io.StringIO(newline="")
        end = data.draw(st.sampled_from(["\n", "\r\n"]))
        delimiter = {"csv": ",", "tsv": "\t", "semicolon": ";"}[form]
        csv.writer(text, delimiter=delimiter, lineterminator=end).writerows([("user", "item", "time"), *stamped])
        path = write(tmp_path_factory.mktemp("log") / f"log{suffix}", text.getvalue().encode(encoding))
        found = Interactions.read(path, format=form, encoding=encoding, missing=())
    assert found.report is not None
    assert found.report.rows_read == found.report.rows == len(log)
    plain = [(u, i, seconds(t) if isinstance(t, datetime) else t) for u, i, t in log]
    assert rows(found) == [pytest.approx(row) if isinstance(row[2], str) else row for row in sort(plain)]


@given(st.lists(st.tuples(WORDS, WORDS, st.integers(-(2**40), 2**40)), min_size=1, max_size=12), st.booleans())
def test_what_is_written_in_an_inter_or_sequence_file_is_read(
    tmp_path_factory: pytest.TempPathFactory, log: list[tuple[str, str, int]], atomic: bool
) -> None:
    path = tmp_path_factory.mktemp("log") / ("log.inter" if atomic else "log.txt")
    if atomic:
        header = "user_id:token\titem_id:token\ttimestamp:float\n"
        write(path, header + "".join(f"{u}\t{i}\t{t}\n" for u, i, t in log))
        assert rows(Interactions.read(path, missing=())) == sort(log)
    else:
        write(path, "".join(f"{u} {i}\n" for u, i, _ in log))
        found = Interactions.read(path, format="sequence", missing=())
        assert rows(found) == [(u, i, None) for u, i, _ in sort([(u, i, 0) for u, i, _ in log])]


# 1: wrong separator, typed header, no header: what to do is in the message.
@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("log.csv", "user\titem\ttime\na\tx\t1\n", r'the only column is .*: other separator \(format="tsv" '),
        ("log.csv", "user;item;time\na;x;1\n", r'other separator \(format="semicolon" '),
        ("log.csv", "196,242,881250949\n186,302,891717742\n", r"the first line looks like data .*column names first"),
        ("log.inter", "user\titem\na\tx\n", r"log\.inter:1: expected a header of name:type .*got 'user'"),
        ("log.csv", 'user,"item\n', r"log\.csv:1: unexpected end of data, in the line of column names"),
        ("log.csv", "user,item,time\na,x,1\na,y\n", r"log\.csv:3: expected 3 fields, got 2"),
        ("log.csv", b"user,item,time\na,x,1\n".decode().encode("utf-16"), r"looks like UTF-16, not UTF-8"),
    ],
)
def test_a_file_of_another_form_says_what_to_do(tmp_path: Path, name: str, text: str | bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Interactions.read(write(tmp_path / name, text))


# 2: no fixed column names.
def test_columns_of_any_name(tmp_path: Path) -> None:
    path = write(tmp_path / "log.csv", "session id,x,sku\ns,1,k\n")
    assert rows(Interactions.read(path, user="session id", item="sku", time="")) == [("s", "k", None)]
    path = write(tmp_path / "log.inter", "session:token\titem_id:token\trating:float\ns\tk\t4\n")
    assert rows(Interactions.read(path, user="session", time=None)) == [("s", "k", None)]


# 3: a lone quote, latin-1.
def test_a_quote_inside_an_id_is_a_character(tmp_path: Path) -> None:
    assert rows(Interactions.read(write(tmp_path / "log.csv", HEADER + 'a,5" disk,1\n')))[0][1] == '5" disk'
    header = "user_id:token\titem_id:token\ttimestamp:float\n"
    assert rows(Interactions.read(write(tmp_path / "log.inter", header + 'a\t"disk\t1\n')))[0][1] == '"disk'


def test_a_quote_that_opens_a_field_and_never_closes_costs_one_row(tmp_path: Path) -> None:
    text = HEADER + 'a,x,1\n"disk,y,2\nb,"z",3\nb,"y ""q""",4\n"c,x,5\nd,x",6\ne,x,7\n'
    path = write(tmp_path / "log.csv", text)
    with pytest.raises(ValueError, match=r"log\.csv:3: .*quote=\"\""):
        Interactions.read(path)
    data = Interactions.read(path, on_error="skip")
    # Lines 6 and 7 could be one record, but of too few fields: only the first of them is lost.
    assert rows(data) == [("a", "x", 1), ("b", "z", 3), ("b", 'y "q"', 4), ("d", 'x"', 6), ("e", "x", 7)]
    assert data.report is not None
    assert [fault.rpartition("/")[2][:9] for fault in data.report.faults] == ["log.csv:3", "log.csv:6"]
    plain = Interactions.read(path, quote="")
    assert [row[1] for row in rows(plain)] == ["x", "y", '"z"', '"y ""q"""', "x", 'x"', "x"]


def test_quoted_records_across_the_pieces_a_file_is_read_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastcl.recsys.data.reading.textfiles._PIECE", 4)
    log = [(f"u{k}", "two\nlines" if k % 3 == 0 else f"i{k}", k) for k in range(20)]
    text = HEADER + "".join(f'{u},"{i}",{t}\n' for u, i, t in log) + "bad\n"
    path = write(tmp_path / "log.csv", text)
    assert rows(Interactions.read(path, on_error="skip")) == log
    with pytest.raises(ValueError, match=rf"log\.csv:{len(text.splitlines())}: expected 3 fields, got 1"):
        Interactions.read(path)


def test_encodings(tmp_path: Path) -> None:
    path = write(tmp_path / "log.csv", (HEADER + "a,x,1\né,café,2\nb,x,3\n").encode("latin-1"))
    assert rows(Interactions.read(path, encoding="latin-1"))[1] == ("é", "café", 2)
    with pytest.raises(ValueError, match=r"log\.csv:3: byte 0xe9 is not UTF-8: name its encoding \(latin-1"):
        Interactions.read(path)
    data = Interactions.read(path, on_error="skip")
    assert rows(data) == [("a", "x", 1), ("b", "x", 3)]
    assert data.report is not None
    assert data.report.dropped == {"undecodable bytes": 1}
    with pytest.raises(ValueError, match="encoding: expected a text encoding such as utf-8 or latin-1, got 'utf-9'"):
        Interactions.read(path, encoding="utf-9")
    marked = Interactions.read(write(tmp_path / "bom.csv", "\ufeff" + HEADER + "a,x,1\n")).report
    assert marked is not None
    assert marked.encoding == "utf-8 with a byte order mark"


class Frame:
    """What a data frame offers, without the library."""

    def __init__(self, **columns: np.ndarray) -> None:
        self.columns = list(columns)
        self._columns = columns

    def __getitem__(self, name: str) -> np.ndarray:
        return self._columns[name]


# 4: float seconds stay seconds, NaN is no item and no time, 1 and "1" are one item, no further column is needed.
def test_a_frame_means_what_a_file_would(tmp_path: Path) -> None:
    frame = Frame(
        user=np.array([7, 7, 8]), item=np.array(["1", 1, 1.0], object), time=np.array([1_500_000_000.5, 1.0, 2.0])
    )
    data = Interactions.read(frame)
    assert rows(data) == [("7", "1", 1.0), ("7", "1", 1_500_000_000.5), ("8", "1", 2.0)]
    assert data.log.time is not None
    assert data.log.time.dtype == np.float64
    for column in ("item", "user", "time"):
        table = {"user": [1.0, 2.0], "item": [3.0, 4.0], "time": [5.0, 6.0]} | {column: [1.0, float("nan")]}
        with pytest.raises(ValueError, match=rf"table, row 1 \(from 0\): (empty {column} id|time '' is not)"):
            Interactions.read({name: np.array(values) for name, values in table.items()} if column != "time" else table)
        kept = Interactions.read(table, on_error="skip")
        assert len(rows(kept)) == 1
    with pytest.raises(ValueError, match=r"row 1 \(from 0\): time 'nan' is not finite"):
        Interactions.read(Frame(user=np.arange(2), item=np.arange(2), time=np.array([1.0, np.nan])))
    ids = [-1, 2**70, "01", None, True, b"x"]
    data = Interactions.read({"user": ["u"] * 6, "item": ids}, time=None, on_error="skip")
    assert data.items.ids == ("-1", str(2**70), "01")
    assert data.report is not None
    assert data.report.dropped == {"missing item id": 1, "item id of another type": 2}


def test_tables_that_are_none() -> None:
    with pytest.raises(TypeError, match="source: expected a path, a data frame or a mapping of columns, got int"):
        Interactions.read(3)
    with pytest.raises(ValueError, match="source: expected columns of one length, got 1, 2"):
        Interactions.read({"user": ["a"], "item": ["x", "y"]}, time=None)
    with pytest.raises(ValueError, match="no user column 'usher'; the file has 'User', 'item'; did you mean 'User'"):
        Interactions.read({"User": ["a"], "item": ["x"]}, user="usher", time=None)


# 8: repeats are kept, unless asked otherwise; then the first in time stays, not the first in the file.
def test_repeats(tmp_path: Path) -> None:
    path = write(tmp_path / "log.csv", HEADER + "a,x,9\na,y,2\na,x,1\nb,x,1\na,x,9\n")
    assert [row[1:] for row in rows(Interactions.read(path)) if row[0] == "a"] == [
        ("x", 1), ("y", 2), ("x", 9), ("x", 9)
    ]  # fmt: skip
    data = Interactions.read(path, repeats="first")
    assert rows(data) == [("a", "x", 1), ("a", "y", 2), ("b", "x", 1)]
    assert data.report is not None
    assert data.report.dropped == {"repeated item of a user": 2}
    with pytest.raises(ValueError, match="repeats: expected one of keep, first, got 'last'"):
        Interactions.read(path, repeats="last")


# 10: nothing left is an error that says why.
def test_nothing_left(tmp_path: Path) -> None:
    path = write(tmp_path / "log.csv", HEADER + "a,,1\nb,x,soon\n")
    with pytest.raises(ValueError, match=r"no interactions in it, all 2 rows are bad: .*log\.csv:2: empty item id"):
        Interactions.read(path, on_error="skip")
    # The reason of most rows is told, with an example, wherever its first row stands.
    write(path, HEADER + "a,,1\n" + "b,x,soon\n" * 9)
    with pytest.raises(ValueError, match=r"all 10 rows are bad: 9 unreadable time, 1 missing item id \(.*csv:3: time"):
        Interactions.read(path, on_error="skip")
    write(path, HEADER + "a,,1\n" * 9 + "b,x,soon\nb,x,1\n")
    report = Interactions.read(path, on_error="skip").report
    assert report is not None
    assert report.faults[-1].endswith("name its time_format (--time-format)")
    for name in ("empty.csv", "empty.txt", "empty.csv.gz"):
        with pytest.raises(ValueError, match="empty|no interactions"):
            Interactions.read(write(tmp_path / name, ""))


def test_a_row_that_is_dropped_leaves_no_trace(tmp_path: Path) -> None:
    text = HEADER + "a,x,1\nonly-here,only-here,soon\n\na,y\nb,x,2\n ,x,3\nb,y,inf\n"
    data = Interactions.read(write(tmp_path / "log.csv", text), on_error="skip")
    assert (data.users, data.items.ids) == (("a", "b"), ("x",))
    report = data.report
    assert report is not None
    assert (report.rows_read, report.rows, report.blank_lines) == (6, 2, 1)
    assert report.dropped == {
        "unreadable time": 1, "wrong number of fields": 1, "missing user id": 1, "time not finite": 1
    }  # fmt: skip
    assert [fault.rpartition("log.csv:")[2].partition(":")[0] for fault in report.faults] == ["3", "5", "7", "8"]
    sequences = Interactions.read(write(tmp_path / "s.txt", b"a x y\nb\nc \xff\nd x\n"), on_error="skip")
    assert sequences.users == ("a", "d")
    assert sequences.report is not None
    assert sequences.report.dropped == {"user without items": 1, "undecodable bytes": 1}


def test_the_earliest_bad_row_is_the_one_that_is_named(tmp_path: Path) -> None:
    lines = [f"u{k},i,{k}" for k in range(50)]
    for at in ((10, "u,i,soon"), (20, "u,i"), (30, ",i,3")):
        lines[at[0]] = at[1]
    with pytest.raises(ValueError, match=r"log\.csv:12: time 'soon'"):
        Interactions.read(write(tmp_path / "log.csv", HEADER + "\n".join(lines)))


def test_a_file_cut_inside_a_line(tmp_path: Path) -> None:
    whole = HEADER + "a,x,1500000000\na,y,1500000001\n"
    cut = Interactions.read(write(tmp_path / "log.csv", whole[:-4])).report
    assert cut is not None
    assert cut.cut_short
    assert "is the file whole?" in str(cut)
    with pytest.raises(ValueError, match=r"log\.csv:3: expected 3 fields, got 2"):
        Interactions.read(write(tmp_path / "log.csv", whole[:-12]))
    packed = gzip.compress((HEADER + "a,x,1\n" * 400_000).encode())
    (tmp_path / "log.csv.gz").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(ValueError, match=r"log\.csv\.gz: damaged"):
        Interactions.read(tmp_path / "log.csv.gz", on_error="skip")


@pytest.mark.parametrize("as_file", [True, False])
def test_item_features(tmp_path: Path, as_file: bool) -> None:
    log = {"user": ["u", "u", "u"], "item": ["x", "y", "z"]}
    table = {"item": ["y", "x", "w"], "brand": ["b", "a", "b"], "tags": ["new| red|new", "", "red"]}
    table["name"] = ["Y", "X", "W"]
    lines = "\n".join(",".join(row) for row in zip(*([name, *cells] for name, cells in table.items()), strict=True))
    source = write(tmp_path / "items.csv", lines + "\n") if as_file else table
    data = Interactions.read(log, time=None, item_features=source, title="name")
    assert data.items.titles == ("X", "Y", "")
    brand, tags = data.items.features["brand"], data.items.features["tags"]
    assert (brand.values, brand.codes.tolist()) == (("a", "b"), [[0], [1], [2], [0]])
    assert (tags.values, tags.codes.tolist()) == (("new", "red"), [[0, 0], [0, 0], [1, 2], [0, 0]])
    assert data.report is not None
    assert (data.report.features, data.report.feature_rows_unused) == ({"brand": 2, "tags": 1}, 1)
    one = Interactions.read(log, time=None, item_features=source, feature_columns=["tags"], separator="")
    assert one.items.features["tags"].values == ("new| red|new",)
    with pytest.raises(ValueError, match="no item_features column 'tag'.* did you mean 'tags'"):
        Interactions.read(log, time=None, item_features=source, feature_columns=["tag"])


def test_item_feature_files_that_are_none(tmp_path: Path) -> None:
    log = {"user": ["u"], "item_id": ["x"]}
    atomic = write(tmp_path / "a.item", "item_id:token\tclass:token_seq\nx\ta b\n")
    data = Interactions.read(log, item="item_id", time=None, item_features=atomic, separator=" ")
    assert data.items.features["class"].values == ("a", "b")
    with pytest.raises(ValueError, match=r"a\.csv: expected one row per item, got several of 'x'"):
        data.with_features(write(tmp_path / "a.csv", "item,c\nx,1\ny,2\nx,3\n"))
    with pytest.raises(ValueError, match=r"b\.csv:3: expected 2 fields, got 1"):
        data.with_features(write(tmp_path / "b.csv", "item,c\nx,1\ny\n"))


# 12: a large log costs a small multiple of its arrays, and no list of all its texts.
def test_memory_of_reading_stays_near_that_of_the_arrays(tmp_path: Path) -> None:
    count = 300_000
    lines = (f"u{k % 5000},i{k * 7 % 9000},{k}\n" for k in range(count))
    path = write(tmp_path / "log.csv", HEADER + "".join(lines))
    code = (
        "import resource, sys; from fastcl.recsys import Interactions\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before = peak(); Interactions.read(sys.argv[1]); print((peak() - before) * 1024)\n"
        "assert not {'pandas', 'polars', 'pyarrow'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], check=True, capture_output=True, text=True)
    # Three int64 columns and what sorting them takes; texts alone would be over 180 bytes a row.
    assert int(done.stdout) < 160 * count + 30 * 2**20
