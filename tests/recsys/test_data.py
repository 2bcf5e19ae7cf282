"""Histories, items, plain files and the bundled sets: what a file says is what a model gets."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from logs import lists, named, needs_movies, times, write

from fastcl.recsys import data as data_module
from fastcl.recsys.cli import main
from fastcl.recsys.data import Cases, Feature, Histories, Interactions, Items, bundled

ROWS = st.lists(st.lists(st.integers(1, 9), max_size=6), max_size=8)


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
    with pytest.raises(ValueError, match=r"titles: expected one per item \(2\), got 1"):
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
        ("log.csv", "usr,movieId,time\nu,i,1\n", r"no user column 'user'; .* did you mean 'usr'\?"),
        ("log.csv", "user,item,tyme\nu,i,1\n", r"no time column .* 'tyme'\? time=\"tyme\" .*=\"\""),
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
    with pytest.raises(ValueError, match="format: expected one of 'csv', .*'inter', 'sequence', 'parquet', got 'json'"):
        Interactions.read(missing, format="json")
    with pytest.raises(ValueError, match="format: .*missing ends in none of .csv, .tsv, .inter, .item, .txt"):
        Interactions.read(tmp_path / "missing")
    with pytest.raises(ValueError, match="expected different column names, got 'x', 'x', 'time'"):
        Interactions.read(missing, user="x", item="x")
    with pytest.raises(ValueError, match="user: a sequence file has no columns to name, got 'uid'"):
        Interactions.read(tmp_path / "missing.txt", user="uid")
    with pytest.raises(FileNotFoundError):
        Interactions.read(missing)


@needs_movies
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


@needs_movies
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


def test_movies_that_are_not_there_are_one_clear_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    # As in an installed package.
    elsewhere = (tmp_path / "data" / "movielens-small", *data_module._BUNDLED["movies"][1:])
    monkeypatch.setitem(data_module._BUNDLED, "movies", elsewhere)
    with pytest.raises(FileNotFoundError, match="movies: movielens-small is not in the package, since its terms"):
        bundled("movies")
    assert main.main(["data", "check", "bundled:movies"]) == 2
    assert "bundled:purchases is here" in capsys.readouterr().err


def test_a_feature_that_groups_no_items_is_named_with_what_to_do() -> None:
    """Titles by mistake, prices: one value an item, or nearly; a category, or tags that items share, are none."""
    count = 40
    names = [f"i{n}" for n in range(count)]
    table = {
        "item": names,
        "title": [f"Title {n}" for n in range(count - 2)] + ["Title 0", "Title 1"],
        "tags": [f"own{n}|also{n}" for n in range(count)],
        "category": [str(n % 3) for n in range(count)],
        "mixed": [f"{n % 4}|t{n}" for n in range(count)],
        "once": ["x"] + [""] * (count - 1),
        "none": [""] * count,
    }
    log = Interactions.read({"user": ["u"] * count, "item": names}, time=None)
    report = log.with_features(table).report
    assert report is not None
    assert report.ungrouped == {"title": 38, "tags": 80}
    lines = str(report).splitlines()
    at = lines.index("feature title: 40 of 40 items have it")
    assert "its 38 values group no items: if it is their title, --title title" in lines[at + 1]
    assert str(report).count("group no items") == 2
    with_title = log.with_features(table, title="mixed").report
    assert "its 38 values group no items: to leave it out, --feature-columns with the others" in str(with_title)
    with pytest.raises(ValueError, match="item_features: no title column 'nope'; the file has"):
        log.with_features(table, title="nope")
    titled = log.with_features(table, title="title", feature_columns=["category"]).report
    assert titled is not None
    assert titled.ungrouped == {}
    assert log.report is not None
    assert log.report.ungrouped == {}
