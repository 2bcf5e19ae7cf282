"""Parquet as people have it: a file or a folder of parts reads as the same rows in a text file do; drift of types,
nulls and broken parts are refused by file and row; lists go out as they do to CSV."""

from __future__ import annotations

import csv
import datetime as dt
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastcl.recsys import Items, SASRec, save
from fastcl.recsys.cli import main
from fastcl.recsys.data import Interactions

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

MONDAY = dt.datetime(2024, 1, 1, tzinfo=dt.timezone.utc)


def log(rows: int = 400) -> dict[str, list[Any]]:
    rng = np.random.default_rng(0)
    user = [f"u{n:02}" for n in rng.integers(30, size=rows)]
    return {"user": user, "item": rng.integers(50, size=rows).tolist(), "time": rng.integers(99, size=rows).tolist()}


def write(path: Path, columns: Any, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.table(columns), path, **options)
    return path


def alike(one: Interactions, other: Interactions) -> None:
    assert one.users == other.users
    assert one.items.ids == other.items.ids
    for a, b in ((one.log.offsets, other.log.offsets), (one.log.item, other.log.item), (one.log.time, other.log.time)):
        assert a is not None
        assert b is not None
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.fixture
def text(tmp_path: Path) -> Interactions:
    """The same rows, read from CSV."""
    path = tmp_path / "log.csv"
    columns = log()
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([columns, *zip(*columns.values(), strict=True)])
    return Interactions.read(path)


KINDS = {
    "as written": {},
    "ids as dictionaries": {"user": lambda values: pyarrow.array(values).dictionary_encode()},
    "long text": {"user": lambda values: pyarrow.array(values, pyarrow.large_string())},
    "numbers of 16 bits": {"item": lambda values: pyarrow.array(values, pyarrow.int16())},
    "numbers as text": {"item": lambda values: pyarrow.array(list(map(str, values)))},
    "whole floats": {"item": lambda values: pyarrow.array(values, pyarrow.float64())},
    "dates": {"time": lambda values: pyarrow.array(values, pyarrow.timestamp("s"))},
    "dates in another zone": {"time": lambda values: pyarrow.array(values, pyarrow.timestamp("us", "Asia/Tokyo"))},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_reads_as_its_rows_in_text_do(kind: str, text: Interactions, tmp_path: Path) -> None:
    columns = {name: KINDS[kind].get(name, pyarrow.array)(values) for name, values in log().items()}
    if kind == "dates in another zone":
        columns["time"] = pyarrow.compute.multiply(columns["time"].cast("int64"), 10**6).cast(columns["time"].type)
    alike(Interactions.read(write(tmp_path / "log.parquet", columns, row_group_size=37)), text)


def test_a_folder_of_parts_reads_in_the_order_of_its_paths(text: Interactions, tmp_path: Path) -> None:
    """Twelve parts, named as Dask does, beside what Spark leaves; one part is empty."""
    folder, table = tmp_path / "events", pyarrow.table(log())
    cuts = [*range(0, 400, 40), 400, 400]
    for k, (begin, end) in enumerate(zip(cuts, cuts[1:], strict=False)):
        write(folder / f"part.{k}.parquet", table[begin:end])
        (folder / f".part.{k}.parquet.crc").write_bytes(b"crc")
    (folder / "_SUCCESS").touch()
    data = Interactions.read(folder)
    alike(data, text)
    assert data.report is not None
    assert data.report.format == "parquet"


def test_a_folder_of_folders_a_day_is_read(text: Interactions, tmp_path: Path) -> None:
    table = pyarrow.table(log())
    for day in (1, 2):
        write(tmp_path / f"events/date=2024-01-0{day}/part-00000.snappy.parquet", table[(day - 1) * 200 : day * 200])
    alike(Interactions.read(tmp_path / "events"), text)


DRIFT = {
    "text and numbers": (["7"], [7], r"p2\.parquet: column 'item' holds whole numbers, but text in .*p1\.parquet"),
    "numbers and text": ([7], ["07"], r"p2\.parquet: column 'item' holds text, but whole numbers in .*p1\.parquet"),
    "bytes": ([7], [b"7"], r"p2\.parquet: column 'item': expected text, whole numbers, .* as item, got binary"),
    "32 bits": ([7], pyarrow.array([7], pyarrow.float32()), r"p2\.parquet: column 'item': .* got float, which merges"),
    "truth": ([True], [True], r"p1\.parquet: column 'item': expected .* got bool"),
}


@pytest.mark.parametrize("kind", DRIFT)
def test_parts_that_differ_in_their_types_are_refused(kind: str, tmp_path: Path) -> None:
    first, second, message = DRIFT[kind]
    for name, item in (("p1", first), ("p2", second)):
        write(tmp_path / f"log/{name}.parquet", {"user": ["u"], "item": item, "time": [1]})
    with pytest.raises(ValueError, match=message):
        Interactions.read(tmp_path / "log")


def test_numbers_of_other_widths_are_no_drift(tmp_path: Path) -> None:
    for k, width in enumerate((pyarrow.int32(), pyarrow.int64())):
        item = pyarrow.array([7, 8], width)
        write(tmp_path / f"log/{k}.parquet", {"user": ["u", "v"], "item": item, "time": [k, k]})
    assert Interactions.read(tmp_path / "log").items.ids == ("7", "8")


@pytest.mark.parametrize("column", ["user", "item", "time"])
def test_a_null_is_refused_by_file_and_row(column: str, tmp_path: Path) -> None:
    good = {"user": ["u", "v", "w"], "item": [1, 2, 3], "time": [1, 2, 3]}
    write(tmp_path / "log/a.parquet", good)
    write(tmp_path / "log/b.parquet", {**good, column: [*good[column][:2], None]})
    with pytest.raises(ValueError, match=r"b\.parquet, row 2 \(from 0\): "):
        Interactions.read(tmp_path / "log")
    data = Interactions.read(tmp_path / "log", on_error="skip")
    assert data.report is not None
    assert len(data.log.item) == 5
    assert sum(data.report.dropped.values()) == 1


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def flipped(path: Path) -> None:
    """A byte of the first page of data: the footer is whole, so that reading fails in the middle."""
    data = bytearray(path.read_bytes())
    data[4:24] = bytes(20)
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [cut, flipped, lambda path: path.write_bytes(b"")], ids=["cut", "bytes", "empty"])
def test_a_broken_part_is_named(damage: Any, tmp_path: Path) -> None:
    for name in "abc":
        write(tmp_path / f"log/{name}.parquet", log())
    damage(tmp_path / "log/b.parquet")
    with pytest.raises(ValueError, match=r"log/b\.parquet: damaged or not a Parquet file"):
        Interactions.read(tmp_path / "log")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("_temporary/0/x.parquet", "holds _temporary: it is still being written"),
        ("_delta_log/0.json", "holds _delta_log, the log of a table that says which of its files count"),
        ("notes.csv", r"expected a folder of \.parquet files alone, got notes\.csv"),
    ],
)
def test_folders_that_do_not_tell_which_rows_count_are_refused(name: str, message: str, tmp_path: Path) -> None:
    write(tmp_path / "log/a.parquet", log())
    (tmp_path / "log" / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "log" / name).write_bytes(b"")
    with pytest.raises(ValueError, match=message):
        Interactions.read(tmp_path / "log")


def test_a_folder_without_parts_and_options_of_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    with pytest.raises(ValueError, match=r"log: expected a folder with \.parquet files, got none"):
        Interactions.read(tmp_path / "log")
    path = write(tmp_path / "log/a.parquet", log())
    for options in ({"encoding": "latin-1"}, {"columns": ["user", "item", "time"]}, {"quote": ""}):
        with pytest.raises(ValueError, match=rf"{next(iter(options))}: a Parquet file has none"):
            Interactions.read(path, **options)
    with pytest.raises(ValueError, match="format: expected 'parquet' for a folder, got 'csv'"):
        Interactions.read(tmp_path / "log", format="csv")
    with pytest.raises(ValueError, match=r"a\.parquet: .*column 'who'"):
        Interactions.read(path, user="who")
    with pytest.raises(FileNotFoundError):
        Interactions.read(tmp_path / "none.parquet")


def test_without_pyarrow_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = write(tmp_path / "log.parquet", log())
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ImportError, match=r"Parquet needs the package pyarrow: pip install 'fastcl\[parquet\]'"):
        Interactions.read(path)


def test_item_features_are_read_from_parquet(tmp_path: Path) -> None:
    table = {"item": ["x", "y"], "tags": [["new", "red"], []], "name": ["An x", "A y"]}
    path = write(tmp_path / "items.parquet", table)
    data = Interactions.read({"user": ["u", "u"], "item": ["x", "y"]}, time=None, item_features=path, title="name")
    assert data.items.titles == ("An x", "A y")
    assert data.items.features["tags"].codes.tolist() == [[0, 0], [1, 2], [0, 0]]
    folder = tmp_path / "parts"
    write(folder / "a.parquet", {"item": ["x"], "tags": ["new"]})
    write(folder / "b.parquet", {"item": ["y"], "tags": [3]})
    with pytest.raises(ValueError, match=r"b\.parquet: column 'tags' holds whole numbers, but text"):
        data.with_features(folder)


def test_training_and_lists_by_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, run = write(tmp_path / "log.parquet", log()), tmp_path / "run"
    settings = ["dim=4", "heads=1", "blocks=1", "max_len=4"]
    told = ["--model", "sasrec", "--epochs", "1", "-o", str(run), "--set", *settings]
    assert main.main(["train", str(path), *told]) == 0
    for name in ("lists.csv", "lists.parquet"):
        assert main.main(["recommend", str(run), "--users", str(path), "-k", "3", "-o", str(tmp_path / name)]) == 0
    capsys.readouterr()
    found = parquet.read_table(tmp_path / "lists.parquet")
    assert dict(zip(found.column_names, map(str, found.schema.types), strict=True)) == {
        "user": "string", "rank": "int32", "item": "string", "score": "float",
    }  # fmt: skip
    with open(tmp_path / "lists.csv", newline="") as file:
        expected = list(csv.DictReader(file))
    assert [(row["user"], str(row["rank"]), row["item"], f"{row['score']:.7g}") for row in found.to_pylist()] == [
        tuple(row.values()) for row in expected
    ]


def test_lists_of_titled_items_have_a_title_or_null(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    items = Items(("a", "b", "c"), titles=("An a", "", "A c"))
    save(SASRec(items, seed=0, dim=4, heads=1, blocks=1, max_len=4), tmp_path / "run")
    out = tmp_path / "one.parquet"
    assert main.main(["recommend", str(tmp_path / "run"), "--history", "a", "-o", str(out)]) == 0
    capsys.readouterr()
    rows = {row["item"]: (row["user"], row["title"]) for row in parquet.read_table(out).to_pylist()}
    assert rows == {"b": (None, None), "c": (None, "A c")}
