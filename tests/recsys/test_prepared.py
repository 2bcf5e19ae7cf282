"""Prepared folders: whatever they are made of, they are read as their source is, to the same trained bits; their arrays
are mapped, not copied; whoever is killed leaves the earlier data; damage is refused by file."""

from __future__ import annotations

import csv
import json
import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastcl.recsys import Interactions, LeakageWarning, Split, prepare
from fastcl.recsys.cli import main
from fastcl.recsys.data import budget, generations, prepared, preparing
from fastcl.recsys.data.fingerprints import cases_fingerprint, fingerprint
from fastcl.recsys.data.ids import Ids
from fastcl.recsys.data.reading import columns, textfiles

DAY = 1_700_000_000


@pytest.fixture(autouse=True)
def _unleaked() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LeakageWarning)
        yield


def log(rows: int = 600, seed: int = 0) -> dict[str, list[Any]]:
    """Users of 1 to 60 rows, times with ties and in no order."""
    rng = np.random.default_rng(seed)
    user = [f"u{n}" for n in (rng.random(rows) ** 2 * 40).astype(int)]
    item, time = rng.integers(50, size=rows), DAY + rng.integers(300, size=rows)
    return {"user": user, "item": item.tolist(), "time": time.tolist()}


def table(path: Path, columns: dict[str, list[Any]], delimiter: str = ",", header: list[str] | None = None) -> Path:
    with open(path, "w", newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows([header or columns, *zip(*columns.values(), strict=True)])
    return path


def sequences(path: Path, columns: dict[str, list[Any]]) -> Path:
    path.write_text("".join(f"{user} {item}\n" for user, item in zip(columns["user"], columns["item"], strict=True)))
    return path


def parquet(path: Path, columns: dict[str, list[Any]]) -> Path:
    pyarrow, writer = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path.mkdir()
    whole = pyarrow.table(columns)
    for k in range(3):
        writer.write_table(whole[k * 200 : k * 200 + 200], path / f"part-{k}.parquet")
    return path


def fractions(columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Whole times in the first pieces, others behind them."""
    return {**columns, "time": [time if k < 500 else time + 0.25 for k, time in enumerate(columns["time"])]}


def dates(columns: dict[str, list[Any]], unit: str) -> dict[str, list[Any]]:
    moments = np.array(columns["time"]).astype("datetime64[s]").astype(f"datetime64[{unit}]") + np.arange(600) % 7
    return {**columns, "time": moments.astype(str).tolist()}


def with_bad(columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {**columns, "item": ["", *columns["item"][1:300], "NA", *columns["item"][301:]]}


INTER = ["user_id:token", "item_id:token", "timestamp:float"]
SOURCES: dict[str, tuple[Callable[[Path], Any], dict[str, Any]]] = {
    "csv": (lambda folder: table(folder / "log.csv", log()), {}),
    "inter": (lambda folder: table(folder / "log.inter", log(), "\t", INTER), {}),
    "sequences": (lambda folder: sequences(folder / "log.txt", log()), {}),
    "parquet": (lambda folder: parquet(folder / "log", log()), {}),
    "columns": (lambda folder: log(), {}),
    "without times": (lambda folder: log(), {"time": None}),
    "fractions": (lambda folder: table(folder / "log.csv", fractions(log())), {}),
    "seconds": (lambda folder: table(folder / "log.csv", dates(log(), "s")), {}),
    "nanoseconds": (lambda folder: table(folder / "log.csv", dates(log(), "ns")), {}),
    "first of each": (lambda folder: table(folder / "log.csv", log()), {"repeats": "first"}),
    "bad rows": (lambda folder: table(folder / "log.csv", with_bad(log())), {"on_error": "skip"}),
    "ids as they come": (lambda folder: {**log(), "user": [" é\n", "ü", *log()["user"][2:]]}, {"missing": ()}),
}  # fmt: skip


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces and buckets of a few rows, as those of a large log are."""
    for module, name in ((columns, "PIECE"), (textfiles, "_PIECE")):
        monkeypatch.setattr(module, name, 64)
    monkeypatch.setattr(preparing, "_ROW", 1 << 25)


def same(a: Interactions, b: Interactions) -> None:
    assert a.users == b.users
    assert a.items.ids == b.items.ids
    assert a.items.digest == b.items.digest
    assert a.report == b.report
    for one, other in ((a.log.offsets, b.log.offsets), (a.log.item, b.log.item), (a.log.time, b.log.time)):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other)


def same_split(a: Split, b: Split) -> None:
    assert (a.report, a.data_report) == (b.report, b.data_report)
    assert fingerprint(a) == fingerprint(b)
    assert cases_fingerprint(a) == cases_fingerprint(b)
    np.testing.assert_array_equal(a.counts, b.counts)
    for one, other in ((a.train, b.train), (a.valid.history, b.valid.history), (a.test.history, b.test.history)):
        assert one.users is not None
        assert other.users is not None
        assert list(one.users) == list(other.users)
        np.testing.assert_array_equal(one.lengths, other.lengths)
        np.testing.assert_array_equal(one.item, other.item)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("kind", SOURCES)
def test_a_prepared_folder_is_read_as_its_source(kind: str, tmp_path: Path) -> None:
    source, options = SOURCES[kind][0](tmp_path), SOURCES[kind][1]
    expected, made = Interactions.read(source, **options), prepare(source, tmp_path / "made", **options)
    same(made, expected)
    same(Interactions.read(tmp_path / "made"), expected)
    asked: list[dict[str, Any]] = [{}, {"how": "none"}, {"seed": 3}]
    if expected.log.time is not None:
        asked += [{"how": "time", "at": DAY + 200}, {"ties": "random", "seed": 1}]
    for how in asked:
        same_split(made.split(**how), expected.split(**how))
    assert len(list((tmp_path / "made").glob("data-*/bucket-*"))) == 0
    assert len(list((tmp_path / "made").glob("data-*/spool-*"))) == 0


@pytest.mark.parametrize("cut", [str(DAY + 200), np.int64(DAY + 200)])
def test_a_split_in_time_is_laid_out_where_asked_for(cut: Any, tmp_path: Path) -> None:
    made = prepare(log(), tmp_path / "made", how="time", at=cut)
    for at in (DAY + 200, str(DAY + 200), float(DAY + 200)):
        split = made.split("time", at)
        assert split.digests != {}
        same_split(split, Interactions.read(log()).split("time", at))
    assert made.split("time", DAY + 201).digests == {}


def test_what_training_needs_of_the_clicks_is_mapped_and_hashed_already(tmp_path: Path) -> None:
    made = prepare(log(), tmp_path / "made")
    for how in ("last-one", "none"):
        split = made.split(how)
        arrays = [split.train.offsets, split.train.item, split.train.time, split.counts, made.log.item]
        arrays += [x for part in (split.valid, split.test) if len(part) for x in (part.user, part.target)]
        assert all(isinstance(_bottom(array), np.memmap) for array in arrays)
        assert isinstance(split.train.users, Ids)
        assert set(split.digests) == {"data", "test"}
    # Other clicks have no digests of these.
    assert Interactions(made.items, made.users, made.log.last(2)).recorded == ()


def _bottom(array: Any) -> Any:
    while isinstance(array, np.ndarray) and not isinstance(array, np.memmap):
        array = array.base
    return array


def test_item_features_are_prepared_or_added_later(tmp_path: Path) -> None:
    tags, names = [f"a{k % 3}|b{k % 2}" for k in range(50)], [f"N{k}" for k in range(50)]
    features = {"item": [*range(50)], "tags": tags, "name": names}
    expected = Interactions.read(log(), item_features=features, title="name")
    prepare(log(), tmp_path / "bare")
    for made in (
        prepare(log(), tmp_path / "with", item_features=features, title="name"),
        Interactions.read(tmp_path / "bare", item_features=features, title="name"),
    ):
        same(made, expected)
        assert list(made.items.titles or ()) == list(expected.items.titles or ())
        assert made.items.to_json() == expected.items.to_json()
        assert made.split().digests != {}


SETTINGS = {"sasrec": ["max_len=6"], "clrec": ["max_len=6"], "mf": []}


def train(source: Path, run: Path, model: str) -> bytes:
    settings = ["--epochs", "1", "--set", "dim=8", "batch=64", *SETTINGS[model]]
    assert main.main(["train", str(source), "--model", model, *settings, "-o", str(run)]) == 0
    return (run / "model.safetensors").read_bytes()


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("model", SETTINGS)
def test_training_evaluation_and_lists_are_those_of_the_text(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, folder = table(tmp_path / "log.csv", log()), tmp_path / "made"
    assert main.main(["data", "prepare", str(text), "-o", str(folder)]) == 0
    assert main.main(["data", "check", str(folder)]) == 0
    assert train(folder, tmp_path / "b", model) == train(text, tmp_path / "a", model)
    configs = [json.loads((tmp_path / run / "config.json").read_text()) for run in "ab"]
    assert configs[0]["data_sha256"] == configs[1]["data_sha256"]
    assert configs[1]["data"]["path"] == str(folder)
    capsys.readouterr()
    for command in ("evaluate {} --json", "recommend {} --users {} --alone"):
        told = []
        for run, data in (("a", text), ("b", folder)):
            assert main.main(command.format(tmp_path / run, data).split()) == 0
            told.append(capsys.readouterr().out.replace(str(tmp_path / run), "RUN"))
        assert told[0] == told[1]
    # A run goes on with either: its clicks are the same.
    assert main.main(["resume", str(tmp_path / "a"), "--data", str(folder)]) == 0
    assert main.main(["evaluate", str(tmp_path / "a"), "--data", str(folder)]) == 0
    assert main.main(["recommend", str(tmp_path / "a"), "--users", str(folder)]) == 0


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut": (lambda path: path.write_bytes(path.read_bytes()[:-8]), r"item\.bin: expected 4,800 bytes, got 4,792"),
    "missing": (lambda path: path.unlink(), r"item\.bin: expected 4,800 bytes, got no file"),
    "offsets": (lambda path: path.with_name("offsets.bin").write_bytes(bytes(328)), r"offsets\.bin: damaged: it does"),
    "manifest": (lambda path: (path.parents[1] / "prepared.json").write_text("{"), r"prepared\.json: damaged"),
    "version": (lambda path: _change(path, version=2), r"prepared\.json: expected version 1, got 2; prepare the data"),
    "a name": (lambda path: _change(path, folder="../x"), r"prepared\.json: damaged \(its entry 'folder' is none of"),
    "no field": (lambda path: _change(path, files=3), r"prepared\.json: files: expected a table, got 3"),
    "no file": (lambda path: _change(path, files={}), r"prepared\.json: damaged \(it names no offsets\.bin\)"),
}  # fmt: skip


def _change(path: Path, **fields: Any) -> None:
    manifest = path.parents[1] / "prepared.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), **fields}))


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_folder_is_refused_by_file(kind: str, tmp_path: Path) -> None:
    prepare({**log(), "user": [f"u{k % 40}" for k in range(600)]}, tmp_path / "made")
    damage, message = DAMAGE[kind]
    damage(next((tmp_path / "made").glob("data-*/item.bin")))
    with pytest.raises(ValueError, match=message):
        Interactions.read(tmp_path / "made")


def test_changed_content_is_found_by_data_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepare(log(), tmp_path / "made")
    assert main.main(["data", "check", str(tmp_path / "made")]) == 0
    for name in ("item", "users", "held-time"):
        path = next((tmp_path / "made").glob(f"data-*/{name}.bin"))
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        capsys.readouterr()
        assert main.main(["data", "check", str(tmp_path / "made")]) == 2
        assert f"{name}.bin: damaged: its content has changed" in capsys.readouterr().err
        path.write_bytes(whole)


# The function at whose call the process is killed, from the sorting on to the manifest.
@pytest.mark.parametrize("at", ["describe", "ArrayFiles.add_ids", "split", "write_text", "asdict"])
@pytest.mark.parametrize("earlier", [False, True])
def test_a_killed_preparation_leaves_the_earlier_folder_or_none(
    at: str, earlier: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "made"
    first = prepare(log(), out) if earlier else None
    child = os.fork()
    if not child:  # ends within
        place, _, name = at.rpartition(".")
        target = getattr(preparing, place) if place else preparing
        setattr(target, name, lambda *args, **options: os.kill(os.getpid(), signal.SIGKILL))
        prepare(log(seed=1), out, force=True)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert len(list(out.glob("data-*"))) == 1 + earlier
    assert prepared.is_prepared(out) == earlier
    if first is not None:
        same(Interactions.read(out), Interactions.read(log()))
    prepare(log(seed=2), out, force=earlier)
    same(Interactions.read(out), Interactions.read(log(seed=2)))
    assert len(list(out.glob("data-*"))) == 1


def test_a_preparation_that_fails_leaves_nothing(tmp_path: Path) -> None:
    bad = {**log(), "item": [*log()["item"][1:], ""]}
    with pytest.raises(ValueError, match=r"row 599 \(from 0\): empty item id"):
        prepare(bad, tmp_path / "made")
    assert not (tmp_path / "made").exists()
    prepare(log(), tmp_path / "made")
    with pytest.raises(ValueError, match="empty item id"):
        prepare(bad, tmp_path / "made", force=True)
    same(Interactions.read(tmp_path / "made"), Interactions.read(log()))
    with pytest.raises(ValueError, match="split: expected a user with at least 3 interactions, the longest has 1"):
        prepare({"user": ["u"], "item": ["i"], "time": [1]}, tmp_path / "few")
    assert prepare({"user": ["u"], "item": ["i"], "time": [1]}, tmp_path / "few", how="none").log.item.tolist() == [1]


def test_one_who_writes_keeps_what_another_one_writes(tmp_path: Path) -> None:
    with generations.generation(tmp_path) as place:
        (place / "item.bin").write_bytes(b"")
        prepare(log(), tmp_path)
        assert (place / "item.bin").exists()
    assert not place.exists()  # no manifest names it
    same(Interactions.read(tmp_path), Interactions.read(log()))


def test_data_that_is_replaced_while_it_is_opened_is_opened_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(log(), tmp_path)
    found = [prepared.read_manifest(tmp_path)]
    prepare(log(seed=1), tmp_path, force=True)
    now = prepared.read_manifest
    monkeypatch.setattr(prepared, "read_manifest", lambda folder: found.pop() if found else now(folder))
    same(Interactions.read(tmp_path), Interactions.read(log(seed=1)))


def test_folders_that_hold_something_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="expected a folder, got a file"):
        prepare(log(), tmp_path / "file")
    with pytest.raises(FileExistsError, match="expected an empty or a prepared folder, got one with file"):
        prepare(log(), tmp_path, force=True)
    prepare(log(), tmp_path / "made")
    with pytest.raises(FileExistsError, match=r"holds prepared data; force \(--force\) replaces it"):
        prepare(log(), tmp_path / "made")


def test_options_that_a_folder_has_decided_are_refused(tmp_path: Path) -> None:
    prepare(log(), tmp_path / "made")
    for options in ({"user": "who"}, {"time": None}, {"format": "csv"}, {"repeats": "first"}, {"on_error": "skip"}):
        with pytest.raises(ValueError, match=rf"{next(iter(options))}: .*made is prepared and was read with its own"):
            Interactions.read(tmp_path / "made", **options)
    with pytest.raises(ValueError, match="got a prepared folder, which is read alone"):
        Interactions.presplit(tmp_path / "made", None, log())
    with pytest.raises(TypeError, match="memories"):
        prepare(log(), tmp_path / "other", memories=3)


def test_more_ids_than_fit_the_memory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="memory: expected at least 256, got 255"):
        prepare(log(), tmp_path / "made", memory=255)
    taken = iter([0, 100 << 20])
    monkeypatch.setattr(budget, "_private", lambda: next(taken, 257 << 20))
    with pytest.raises(ValueError, match="memory: expected more than 256 megabytes for the ids"):
        prepare(log(), tmp_path / "made", memory=256)
    assert not (tmp_path / "made").exists()


def test_ids_are_a_sequence_of_texts() -> None:
    texts = ("a", "", "é", "\ud800", "日本")
    ids = Ids.of(texts)
    assert ids == texts
    assert list(ids[1:4]) == list(texts[1:4])
    assert (ids[-1], ids[0], len(ids[:0])) == (texts[-1], "a", 0)
    assert list(ids[np.array([True, False, True, False, False])]) == ["a", "é"]
    assert list(ids[1:4][np.array([2, 0])]) == ["\ud800", ""]
    assert ids != texts[:4]
    assert repr(ids) == r"Ids('a', '', 'é', ... 5 in all)"
    with pytest.raises(IndexError):
        ids[5]
