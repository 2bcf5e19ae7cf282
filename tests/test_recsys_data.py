"""Reading, histories, the split and the bundled sets: what a file says is what a model gets, and no target leaks."""

from __future__ import annotations

import gzip
import json
import lzma
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastcl.recsys.data import Cases, Feature, Histories, Interactions, Items, LeakageWarning, bundled
from fastcl.recsys.models import MODELS, Model
from fastcl.recsys.train import fit

ROWS = st.lists(st.lists(st.integers(1, 9), max_size=6), max_size=8)


def lists(histories: Histories) -> list[list[int]]:
    bounds = histories.offsets.tolist()
    return [histories.item[a:b].tolist() for a, b in zip(bounds, bounds[1:], strict=False)]


def times(histories: Histories) -> list[list[float]]:
    assert histories.time is not None
    bounds = histories.offsets.tolist()
    return [histories.time[a:b].tolist() for a, b in zip(bounds, bounds[1:], strict=False)]


def named(data: Interactions) -> dict[str, list[str]]:
    return {
        user: [data.items.ids[item - 1] for item in row] for user, row in zip(data.users, lists(data.log), strict=True)
    }


def write(path: Path, data: str | bytes) -> Path:
    raw = data.encode() if isinstance(data, str) else data
    opener = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    with opener(path, "wb") as file:
        file.write(raw)
    return path


@given(ROWS, st.data(), st.integers(1, 7))
def test_take_and_last_match_python_lists(rows: list[list[int]], data: st.DataObject, n: int) -> None:
    clock = [[float(10 * b + p) for p in range(len(row))] for b, row in enumerate(rows)]
    histories = Histories.from_lists(rows, clock)
    assert lists(histories) == rows
    assert histories.lengths.tolist() == [len(row) for row in rows]
    assert lists(histories.last(n)) == [row[-n:] for row in rows]
    assert times(histories.last(n)) == [row[-n:] for row in clock]
    picked = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=10)) if rows else []
    assert lists(histories.take(np.array(picked))) == [rows[b] for b in picked]
    assert times(histories.take(np.array(picked))) == [clock[b] for b in picked]


def test_histories_refuse_bad_arrays() -> None:
    item = np.array([1, 2, 3])
    with pytest.raises(ValueError, match="offsets: expected to rise from 0 to 3"):
        Histories(np.array([0, 2]), item)
    with pytest.raises(ValueError, match="offsets: expected to rise"):
        Histories(np.array([0, 3, 2, 3]), item)
    with pytest.raises(ValueError, match="item: expected numbers from 1"):
        Histories(np.array([0, 3]), item - 1)
    with pytest.raises(ValueError, match="int64"):
        Histories(np.array([0, 3]), item.astype(np.int32))
    with pytest.raises(ValueError, match="time: expected int64 or float64"):
        Histories(np.array([0, 3]), item, np.zeros(3, np.float32))
    with pytest.raises(ValueError, match="times: expected as many"):
        Histories.from_lists([[1, 2]], [[1.0]])
    with pytest.raises(ValueError, match="n: expected at least 1, got 0"):
        Histories.from_lists([[1]]).last(0)
    with pytest.raises(ValueError, match="equal lengths, got 1, 1, 2"):
        Cases(np.array([0]), Histories.from_lists([[1]]), np.array([1, 2]))


def test_items_encode_label_and_json() -> None:
    genres = Feature.from_labels([["Drama", "Comedy"], [], ["Drama"]])
    items = Items(("a", "01", "1"), ("Alpha", "", "One"), {"genres": genres})
    assert items.encode(["1", "01", "2", "a"]).tolist() == [3, 2, 0, 1]
    assert [items.label(i) for i in (1, 2, 3)] == ["Alpha", "01", "One"]
    with pytest.raises(ValueError, match=r"item: expected 1\.\.3, got 0"):
        items.label(0)
    assert genres.values == ("Comedy", "Drama")
    assert genres.codes.tolist() == [[0, 0], [2, 1], [0, 0], [2, 0]]
    again = Items.from_json(json.loads(json.dumps(items.to_json())))
    assert (again.ids, again.titles) == (items.ids, items.titles)
    assert again.features["genres"].values == genres.values
    assert again.features["genres"].codes.dtype == np.int64
    assert (again.features["genres"].codes == genres.codes).all()
    bare = Items.from_json(json.loads(json.dumps(Items(("x",), None, {"none": Feature.from_labels([[]])}).to_json())))
    assert bare.titles is None
    assert bare.features["none"].codes.shape == (2, 0)


def test_items_and_features_refuse_nonsense() -> None:
    with pytest.raises(ValueError, match="ids: expected distinct"):
        Items(("a", "a"))
    with pytest.raises(ValueError, match=r"titles: expected one a item \(2\), got 1"):
        Items(("a", "b"), ("A",))
    with pytest.raises(ValueError, match=r"features\['f'\]: expected 3 rows, got 2"):
        Items(("a", "b"), None, {"f": Feature.from_labels([["x"]])})
    with pytest.raises(ValueError, match=r"codes: expected 0\.\.1 and zeros in row 0"):
        Feature(("x",), np.array([[0], [2]]))
    with pytest.raises(ValueError, match=r"zeros in row 0, got 0\.\.1, row 0 \[1\]"):
        Feature(("x",), np.array([[1], [0]]))


TABLE = "user,item,time\nb,01,5\na,1,7\nb,1,5\na,01,3\nb,01,4\na,1,9\n"
EXPECTED = {"b": ["01", "01", "1"], "a": ["01", "1", "1"]}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("log.csv", TABLE),
        ("log.csv.gz", TABLE),
        ("log.csv.xz", TABLE),
        ("log.tsv", TABLE.replace(",", "\t")),
        ("log.tsv.xz", TABLE.replace(",", "\t")),
        ("bom.csv", "\ufeff" + TABLE),
        ("crlf.csv", TABLE.replace("\n", "\r\n")),
        ("no-last-newline.csv", TABLE.rstrip("\n")),
        ("blank-lines.csv", TABLE.replace("\n", "\n\n")),
        ("quotes.csv", TABLE.replace("01", '"01"').replace("user,", '"user",')),
        ("more-columns.csv", "".join(f"x,{line},y\n" for line in TABLE.splitlines())),
    ],
)
def test_every_table_form_reads_the_same(tmp_path: Path, name: str, text: str) -> None:
    data = Interactions.read(write(tmp_path / name, text))
    assert data.users == ("b", "a")
    assert data.items.ids == ("01", "1")
    # b has two rows at time 5: they keep the file's order.
    assert named(data) == EXPECTED
    assert data.log.time is not None
    assert data.log.time.dtype == np.int64
    assert data.log.time.tolist() == [4, 5, 5, 3, 7, 9]


@pytest.mark.parametrize("name", ["s.txt", "s.txt.gz", "s.txt.xz"])
def test_sequence_files(tmp_path: Path, name: str) -> None:
    data = Interactions.read(write(tmp_path / name, "\ufeffu1 5 7 5\r\n\r\nu2  7\t9\nu1 8"))
    assert named(data) == {"u1": ["5", "7", "5", "8"], "u2": ["7", "9"]}
    assert data.items.ids == ("5", "7", "9", "8")
    assert data.log.time is None


def test_format_option_beats_the_name(tmp_path: Path) -> None:
    assert named(Interactions.read(write(tmp_path / "log.dat", TABLE), format="csv")) == EXPECTED
    assert named(Interactions.read(write(tmp_path / "tabs.csv", TABLE.replace(",", "\t")), format="tsv")) == EXPECTED
    assert named(Interactions.read(write(tmp_path / "s.csv", "u 1 2"), format="sequence")) == {"u": ["1", "2"]}


def test_columns_of_other_names_and_quoted_ids(tmp_path: Path) -> None:
    text = 'ts,sku,uid\n1.5,"a, ""b""",é\n-2,"two\nlines",é\n'
    data = Interactions.read(write(tmp_path / "log.csv", text), user="uid", item="sku", time="ts")
    assert named(data) == {"é": ["two\nlines", 'a, "b"']}
    assert data.log.time is not None
    assert data.log.time.tolist() == [-2.0, 1.5]


@pytest.mark.parametrize("time", [None, ""])
def test_without_a_time_column_file_order_counts(tmp_path: Path, time: str | None) -> None:
    data = Interactions.read(write(tmp_path / "log.csv", TABLE), time=time)
    assert named(data) == {"b": ["01", "1", "01"], "a": ["1", "01", "1"]}
    assert data.log.time is None


def test_large_times_keep_every_second(tmp_path: Path) -> None:
    rows = [(1_500_000_000_000_000_000 + step, f"i{step}") for step in (3, 1, 2)]
    text = "user,item,time\n" + "".join(f"u,{item},{time}\n" for time, item in rows)
    assert named(Interactions.read(write(tmp_path / "log.csv", text)))["u"] == ["i1", "i2", "i3"]
    text = "user,item,time\nu,late,1500000000.75\nu,early,1500000000.5\n"
    assert named(Interactions.read(write(tmp_path / "float.csv", text)))["u"] == ["early", "late"]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xyz"), st.integers(0, 4)), min_size=1, max_size=30))
@settings(deadline=None)
def test_order_is_the_stable_sort_by_time(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str, int]]
) -> None:
    path = tmp_path_factory.mktemp("log") / "log.csv"
    write(path, "user,item,time\n" + "".join(f"{user},{item},{time}\n" for user, item, time in rows))
    data = Interactions.read(path)
    assert data.users == tuple(dict.fromkeys(user for user, _, _ in rows))
    assert data.items.ids == tuple(dict.fromkeys(item for _, item, _ in rows))
    expected = {u: [i for v, i, _ in sorted(rows, key=lambda row: row[2]) if v == u] for u in data.users}
    assert named(data) == expected


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("log.csv", "user,item,time\nu,i,1\nu,i\n", r"log\.csv:3: expected 3 fields, got 2"),
        ("log.csv.gz", "user,item,time\n\nu,i,1,9\n", r"log\.csv\.gz:3: expected 3 fields, got 4"),
        ("log.csv", 'user,item,time\n"u\nu",i,1\nu,i,\n', r"log\.csv:4: time '' is not a number"),
        ("log.csv", "user,item,time\n,i,1\n", r"log\.csv:2: empty user id"),
        ("log.csv", "user,item,time\nu,i,1\nu, ,1\n", r"log\.csv:3: empty item id"),
        ("log.csv", "user,item,time\nu,i,1\nu,i,1.10.2017\n", r"log\.csv:3: time '1.10.2017' is not a number"),
        ("log.csv", "user,item,time\nu,i,1\nu,i,nan\n", r"log\.csv:3: time 'nan' is not finite"),
        ("log.csv", "user,item,time\nu,i,1e999\n", r"log\.csv:2: time '1e999' is not finite"),
        ("log.csv", b"user,item,time\nu,i,1\nu,caf\xe9,2\n", r"log\.csv:3: byte 0xe9 is not UTF-8"),
        ("log.csv", 'user,item,time\nu,i,1\n"u,i,1\nu,i,2\n', r"log\.csv:3: unexpected end of data"),
        ("log.csv", "", r"log\.csv: the file is empty"),
        ("log.csv", "user,item,time\n", r"log\.csv: no interactions"),
        ("log.csv", "userId,movieId,time\nu,i,1\n", r"no user column 'user'; .* did you mean 'userId'\?"),
        ("log.csv", "user,item,timestamp\nu,i,1\n", r"no time column 'time'.* 'timestamp' or 'item'\?.*time=\"\""),
        ("log.csv", "user,item,item,time\nu,i,j,1\n", r"item column 'item' appears 2 times"),
        ("s.txt", "1 2 3\n2\n", r"s\.txt:2: user '2' has no items"),
        ("s.txt", "\n\n", r"s\.txt: no interactions"),
        ("s.txt", b"1 2 3\n2 \xff\n", r"s\.txt:2: byte 0xff is not UTF-8"),
    ],
)  # fmt: skip
def test_bad_files_name_file_line_and_fault(tmp_path: Path, name: str, text: str | bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Interactions.read(write(tmp_path / name, text))


def test_damaged_compression(tmp_path: Path) -> None:
    whole = gzip.compress(TABLE.encode() * 50)
    for name, raw in {"cut.csv.gz": whole[:-20], "not.csv.gz": TABLE.encode(), "not.csv.xz": TABLE.encode()}.items():
        (tmp_path / name).write_bytes(raw)
        with pytest.raises(ValueError, match=f"{name}: damaged or not a"):
            Interactions.read(tmp_path / name)


def test_options_are_checked_before_the_file_is_opened(tmp_path: Path) -> None:
    missing = tmp_path / "missing.csv"
    with pytest.raises(ValueError, match="format: expected one of 'csv', .*'inter', 'sequence', got 'json'"):
        Interactions.read(missing, format="json")
    with pytest.raises(ValueError, match="format: .*missing ends in none of .csv, .tsv, .inter, .txt"):
        Interactions.read(tmp_path / "missing")
    with pytest.raises(ValueError, match="expected different column names, got 'x', 'x', 'time'"):
        Interactions.read(missing, user="x", item="x")
    with pytest.raises(ValueError, match="user: a sequence file has no columns to name, got 'uid'"):
        Interactions.read(tmp_path / "missing.txt", user="uid")
    with pytest.raises(FileNotFoundError):
        Interactions.read(missing)


@given(
    st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=7), min_size=1, max_size=8).filter(
        lambda r: max(map(len, r)) >= 3
    )
)
def test_split_holds_out_the_last_two_and_leaks_nothing(rows: list[list[int]]) -> None:
    items = Items(tuple("abcdef"))
    users = tuple(f"u{u}" for u in range(len(rows)))
    clock = [list(range(len(row))) for row in rows]
    split = Interactions(items, users, Histories.from_lists(rows, clock)).split()
    held = [u for u, row in enumerate(rows) if len(row) >= 3]
    assert lists(split.train) == [row[:-2] if u in held else row for u, row in enumerate(rows)]
    assert times(split.train) == [row[:-2] if u in held else row for u, row in enumerate(clock)]
    for cases, back in ((split.valid, 2), (split.test, 1)):
        assert cases.user.tolist() == held
        assert lists(cases.history) == [rows[u][:-back] for u in held]
        assert times(cases.history) == [clock[u][:-back] for u in held]
        assert cases.target.tolist() == [rows[u][-back] for u in held]
    flat = [item for row in lists(split.train) for item in row]
    assert split.counts.tolist() == [flat.count(item) for item in range(7)]
    assert (split.items, split.users) == (items, users)


def test_split_refuses_what_it_cannot_do() -> None:
    data = Interactions(Items(("a",)), ("u",), Histories.from_lists([[1, 1]]))
    with pytest.raises(ValueError, match="at least 3 interactions, the longest has 2"):
        data.split()
    with pytest.raises(ValueError, match="how: expected one of last-one, time, got 'first-one'"):
        data.split("first-one")


@pytest.mark.parametrize(("name", "sizes"), [("movies", (671, 9_066, 100_004)), ("purchases", (2_345, 1_220, 152_543))])
def test_bundled_sets_are_whole_and_in_time_order(name: str, sizes: tuple[int, int, int]) -> None:
    data = bundled(name)
    assert (len(data.users), len(data.items), len(data.log.item)) == sizes
    assert data.log.time is not None
    assert data.log.time.dtype == np.int64
    inside = np.ones(len(data.log.item) - 1, bool)
    inside[data.log.offsets[1:-1] - 1] = False
    assert (np.diff(data.log.time)[inside] >= 0).all()
    assert np.unique(data.log.item).tolist() == list(range(1, sizes[1] + 1))


def test_bundled_features_belong_to_their_items() -> None:
    movies = bundled("movies").items
    star_wars = int(movies.encode(["260"])[0])
    assert movies.label(star_wars) == "Star Wars: Episode IV - A New Hope (1977)"
    genres, decade = movies.features["genres"], movies.features["decade"]
    assert {genres.values[c - 1] for c in genres.codes[star_wars] if c} == {"Action", "Adventure", "Sci-Fi"}
    assert [decade.values[c - 1] for c in decade.codes[star_wars] if c] == ["1970s"]
    assert movies.titles is not None
    assert movies.titles.count("") == 5
    assert movies.label(int(movies.encode(["108548"])[0])) == "108548"
    purchases = bundled("purchases").items
    acne = int(purchases.encode(["ACNE MEDICATIONS"])[0])
    for name, count, value in (("department", 22, "DRUG GM"), ("category", 265, "HAND/BODY/FACIAL PRODUCTS")):
        feature = purchases.features[name]
        assert len(feature.values) == count
        assert feature.values[feature.codes[acne, 0] - 1] == value
    with pytest.raises(ValueError, match="name: expected one of 'movies', 'purchases', got 'books'"):
        bundled("books")


# 6, 7: rows at equal times keep the order of the source, or a random one where asked; nothing sorts them by item.
def test_ties_in_the_order_of_the_source_or_a_random_one() -> None:
    order = list("cabfed")
    log = {"user": ["u"] * 8 + ["v"] * 6, "item": ["x", *order, "y", *order], "time": [1] + [5] * 6 + [9] + [5] * 6}
    data = Interactions.read(log)
    assert named(data) == {"u": ["x", *order, "y"], "v": order}
    assert data.report is not None
    assert (data.report.ties, data.report.tied_ends) == (10, 1)
    splits = [data.split(ties="random", seed=seed) for seed in range(8)]
    whole = [
        [data.items.ids[i - 1] for i in [*lists(s.test.history)[0], s.test.target[0]]] for s in splits
    ]  # fmt: skip
    assert all(row[0] == "x" and row[-1] == "y" and sorted(row[1:-1]) == sorted(order) for row in whole)
    assert len({tuple(row) for row in whole}) > 4
    assert len({int(s.test.target[1]) for s in splits}) > 2
    again = data.split(ties="random", seed=3)
    assert (again.test.history.item == splits[3].test.history.item).all()
    assert again.report is not None
    assert (again.report.ties, again.report.seed) == ("random", 3)
    untimed = Interactions.read(log, time=None)
    with pytest.raises(ValueError, match='ties: expected a log with times for "random"'):
        untimed.split(ties="random")
    with pytest.raises(ValueError, match="ties: expected one of input, random, got 'item'"):
        data.split(ties="item")


# 7: of an unsorted log the last in time is the test target, not the last in the file.
def test_unsorted_logs() -> None:
    data = Interactions.read({"user": list("uvuvuv"), "item": list("cCbBaA"), "time": [3, 3, 2, 2, 1, 1]})
    split = data.split()
    assert [data.items.ids[i - 1] for i in split.test.target] == ["c", "C"]
    assert data.report is not None
    assert data.report.unsorted == 4


# 9: users with one or two rows train; that they have no case is counted.
def test_short_users_train_and_are_counted() -> None:
    data = Interactions.read({"user": list("abbccc"), "item": list("xxyxyz")}, time=None)
    split = data.split()
    assert lists(split.train) == [[1], [1, 2], [1]]
    assert [data.users[u] for u in split.test.user] == ["c"]
    assert data.report is not None
    assert split.report is not None
    assert (data.report.short_users, split.report.not_evaluated) == (2, 2)


LOGS = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from("xyz"), st.integers(0, 9)), min_size=2, max_size=25
)  # fmt: skip


@given(LOGS, st.integers(1, 9))
def test_a_cut_in_time_parts_what_comes_before_from_what_comes_after(log: list[tuple[str, str, int]], at: int) -> None:
    users, items, clock = (list(column) for column in zip(*log, strict=True))
    data = Interactions.read({"user": users, "item": items, "time": clock})
    before = {u: [i for v, i, t in sorted(log, key=lambda row: row[2]) if v == u and t < at] for u in data.users}
    after = {u: [i for v, i, t in sorted(log, key=lambda row: row[2]) if v == u and t >= at] for u in data.users}
    tested = [u for u in data.users if before[u] and after[u]]
    validated = [u for u in data.users if len(before[u]) > 1]
    if not tested or not validated:
        with pytest.raises(ValueError, match="at: expected a time that parts the log|split: expected users with"):
            data.split("time", at)
        return
    split = data.split("time", at)

    def names(histories: Histories) -> list[list[str]]:
        return [[data.items.ids[i - 1] for i in row] for row in lists(histories)]

    assert names(split.train) == [before[u][:-1] if len(before[u]) > 1 else before[u] for u in data.users]
    assert [data.users[u] for u in split.test.user] == tested
    assert names(split.test.history) == [before[u] for u in tested]
    assert [data.items.ids[i - 1] for i in split.test.target] == [after[u][0] for u in tested]
    assert [data.users[u] for u in split.valid.user] == validated
    assert names(split.valid.history) == [before[u][:-1] for u in validated]
    assert [data.items.ids[i - 1] for i in split.valid.target] == [before[u][-1] for u in validated]
    report = split.report
    assert report is not None
    assert report.at == at
    assert report.later_in_train == 0
    assert report.held_out_unused == sum(map(len, after.values())) - len(tested)
    assert report.train_rows + report.valid_cases + report.test_cases + report.held_out_unused == len(log)
    shown = {item for row in names(split.train) for item in row}
    assert report.unseen_targets == sum(after[u][0] not in shown for u in tested)


def test_a_cut_may_be_a_date() -> None:
    clock = [1_506_816_000_000 + 3_600_000 * k for k in range(-3, 3)]
    data = Interactions.read({"user": ["u"] * 6, "item": list("abcdef"), "time": clock})
    split = data.split("time", at="2017-10-01T01:00Z")
    assert (lists(split.test.history), split.test.target.tolist()) == ([[1, 2, 3, 4]], [5])
    for at, message in (
        (None, "at: expected a number or an ISO date"),
        ("soon", "at: expected a number in the unit of the times or an ISO date"),
        ("1999-01-01", "at: expected a time that parts the log"),
        (True, "at: expected a number in the unit"),
    ):
        with pytest.raises(ValueError, match=message):
            data.split("time", at)
    with pytest.raises(ValueError, match='at: expected none with "last-one"'):
        data.split("last-one", at=3)
    with pytest.raises(ValueError, match='split: expected a log with times for "time"'):
        Interactions.read({"user": ["u"] * 3, "item": list("abc")}, time=None).split("time", at=3)


def test_leave_one_out_says_how_much_of_the_future_it_leaks() -> None:
    # u ends at 3, before v's train rows (10, 11); v ends last.
    log = {"user": list("uuuvvvv"), "item": list("abcabcd"), "time": [1, 2, 3, 10, 11, 12, 13]}
    data = Interactions.read(log)
    with pytest.warns(LeakageWarning, match="leaks the future: for 1 of 2 test cases") as caught:
        split = data.split()
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert split.report is not None
    assert split.report.later_in_train == 1
    assert "1 test targets are earlier than some row of train" in str(split.report)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data.split("time", at=11.5)
        untimed = Interactions.read(log, time=None).split().report
    assert untimed is not None
    assert untimed.later_in_train is None


# 13: files that are split already: items that only the test has stay targets, and are counted.
def test_files_that_are_split_already(tmp_path: Path) -> None:
    head = "user,item,time\n"
    train = write(tmp_path / "train.csv", head + "a,x,1\na,y,2\nb,x,1\nc,x,9\n")
    valid = write(tmp_path / "valid.csv.gz", head + "a,z,3\nb,y,2\nnew,x,1\n")
    test = write(tmp_path / "test.csv", head + "b,only-here,3\na,x,5\na,y,4\nnew,y,2\nlate,x,1\n")
    split = Interactions.presplit(train, valid, test)
    ids = split.items.ids
    assert ids == ("x", "y", "z", "only-here")
    assert split.users == ("a", "b", "c", "new", "late")
    assert lists(split.train) == [[1, 2], [1], [1], [], []]
    assert split.counts.tolist() == [0, 3, 1, 0, 0]
    assert [(split.users[u], ids[t - 1]) for u, t in zip(split.valid.user, split.valid.target, strict=True)] == [
        ("a", "z"), ("b", "y")
    ]  # fmt: skip
    assert [(split.users[u], ids[t - 1]) for u, t in zip(split.test.user, split.test.target, strict=True)] == [
        ("a", "y"), ("b", "only-here"), ("new", "y")
    ]  # fmt: skip
    assert lists(split.test.history) == [[1, 2, 3], [1, 2], [1]]
    assert split.report is not None
    assert (split.report.how, split.report.unseen_targets) == ("files", 1)
    assert (split.report.not_evaluated, split.report.held_out_unused) == (2, 3)
    swapped = write(tmp_path / "swapped.csv.gz", "user,time,item\na,z,3\n")
    with pytest.raises(ValueError, match=r"swapped\.csv\.gz:2: time 'z' is not"):
        Interactions.presplit(train, swapped, test)
    with pytest.raises(ValueError, match="sources: expected that all have times or none has, got both"):
        Interactions.presplit(train, valid, write(tmp_path / "test.txt", "a x\n"))


# 11: histories longer than a model's max_len are cut to the newest, by the model's own length and nothing else; and a
# split may leave users without a train history.
@pytest.mark.parametrize("model_class", MODELS.values(), ids=list(MODELS))
def test_models_take_long_and_empty_histories(model_class: type[Model]) -> None:
    log = [(f"u{u}", f"i{(u + step) % 9}", 100 * u + step) for u in range(12) for step in range(40)]
    log += [(f"late{u}", f"i{u}", 5000 + u) for u in range(4)]
    users, items, clock = (list(column) for column in zip(*log, strict=True))
    split = Interactions.read({"user": users, "item": items, "time": clock}).split("time", at=1120)
    assert (split.train.lengths == 0).any()
    options = {"dim": 8, "max_len": 3, "batch": 16} | ({"negatives": 32} if model_class.name == "clrec" else {})
    model = model_class(split.items, seed=0, **options)
    fit(model, split, epochs=1, progress=False)
    whole = model.scores(split.test.history)
    assert torch.isfinite(whole[:, 1:]).all()
    assert torch.equal(whole, model.scores(split.test.history.last(3)))
