"""Histories of `recommend --users`: the clicks of the files and those of the run's own data, each once."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from fastcl.recsys import Items, SASRec, recommend, save
from fastcl.recsys.cli import main

pytestmark = pytest.mark.usefixtures("one_thread")
IDS = tuple(f"i{n}" for n in range(1, 41))
ITEMS = Items(IDS)
OPTIONS = {"dim": 16, "max_len": 7}


def call(*arguments: str | Path) -> int:
    return main.main([str(a) for a in arguments])


def test_clicks_of_the_training_belong_to_the_histories_of_a_later_file(tmp_path, capsys):
    """Of all splits' files, once each, before the new ones; nothing that was clicked there is recommended."""
    rng = np.random.default_rng(2)
    clicks = [(f"u{u}", f"i{i}", t) for u in range(12) for t, i in enumerate(rng.permutation(30)[:10])]
    parts = {"train": (0, 8), "valid": (8, 9), "test": (9, 10), "week": (9, 10)}
    for name, (low, high) in parts.items():
        rows = [row for row in clicks if low <= row[2] < high]
        rows += [(f"u{u}", "i30", 20) for u in range(6)] + [("new", "i1", 20)] if name == "week" else []
        lines = ["user,item,time", *(",".join(map(str, row)) for row in rows)]
        (tmp_path / f"{name}.csv").write_text("\n".join(lines) + "\n")
    paths = {name: str(tmp_path / f"{name}.csv") for name in parts}
    reading = {"user": "user", "item": "item", "time": "time"}
    record = {"data": {"path": paths["train"], "valid": paths["valid"], "test": paths["test"], **reading}}
    model = SASRec(ITEMS, seed=0, **OPTIONS)
    run = tmp_path / "run"
    save(model, run, record)

    def lists(*arguments: str) -> dict[str, list[str]]:
        assert call("recommend", run, "--users", *arguments, "-k", "40", "--json") == 0
        rows = json.loads(capsys.readouterr().out)["recommendations"]
        return {row["user"]: [entry["item"] for entry in row["items"]] for row in rows}

    assert call("recommend", run, "--users", paths["week"]) == 0
    told = capsys.readouterr().err
    assert "note: 12 of 13 users are in the run's data too: their clicks there, 108, are part of their hist" in told
    found = lists(paths["week"])
    assert list(found) == [*(f"u{u}" for u in range(12)), "new"]
    for user, items in found.items():
        own = [item for name, item, _ in clicks if name == user] + ["i30"] * (user in {f"u{u}" for u in range(6)})
        assert set(items) == set(IDS) - set(own or ["i1"])
        assert items == [item for item, _ in recommend(model, [own or ["i1"]], k=40)[0]]
    assert set(lists(paths["week"], "--alone")["u0"]) == set(IDS) - {"i30", clicks[9][1]}
    read, write = os.pipe()  # which can be read once
    os.write(write, Path(paths["week"]).read_bytes())
    os.close(write)
    assert lists(f"/dev/fd/{read}") == found
    os.close(read)
    own = [paths[name] for name in ("train", "valid", "test")]
    assert lists(*own, "--alone")["u1"] == lists(*own)["u1"]
    # The clicks in the run's other files count too where a part of its files is named.
    assert lists(paths["train"]) == lists(shutil.copy(paths["train"], tmp_path / "copy.csv")) == lists(*own)
    Path(paths["train"]).unlink()
    assert call("recommend", run, "--users", paths["week"]) == 0
    told = f"the run's data has moved from {paths['train']}: what was clicked there is unknown and may be recommended"
    assert told in capsys.readouterr().err
    assert call("recommend", run, "--history", "i1", "--alone") == 2


@pytest.mark.parametrize("part", ["train", "test"])
def test_a_part_of_the_runs_own_files_is_no_further_clicks(part, tmp_path, capsys):
    """Without times nothing tells that they are the same clicks."""
    parts = {"train": ["i1", "i2", "i3"], "valid": ["i4"], "test": ["i5"]}
    for name, items in parts.items():
        (tmp_path / f"{name}.csv").write_text("\n".join(["user,item", *(f"u,{item}" for item in items)]) + "\n")
    path, valid, test = (str(tmp_path / f"{name}.csv") for name in parts)
    model = SASRec(ITEMS, seed=0, **OPTIONS).eval()
    data = {"path": path, "valid": valid, "test": test, "user": "user", "item": "item", "time": None}
    save(model, tmp_path / "run", {"data": data})
    assert call("recommend", tmp_path / "run", "--users", tmp_path / f"{part}.csv", "-k", "40", "--json") == 0
    (row,) = json.loads(capsys.readouterr().out)["recommendations"]
    (expected,) = recommend(model, [sum(parts.values(), [])], k=40)
    assert [(entry["item"], pytest.approx(entry["score"], abs=1e-5)) for entry in row["items"]] == expected


def test_files_are_read_as_the_runs_own_was(tmp_path, capsys):
    """Its columns, encoding and repeats, wherever its own data and its item features are now."""
    gone = {"path": str(tmp_path / "gone.csv"), "item_features": str(tmp_path / "gone too.csv")}
    reading = {"user": "who", "item": "what", "time": "when", "encoding": "latin-1", "repeats": "first"}
    model = SASRec(Items(("é1", "é2", "é3")), seed=0, **OPTIONS).eval()
    save(model, tmp_path / "run", {"data": {**gone, **reading}})
    path = tmp_path / "log.csv"
    path.write_bytes("when,what,who\n1,é1,zoé\n2,é2,zoé\n3,é1,zoé\n".encode("latin-1"))
    assert call("recommend", tmp_path / "run", "--users", path, "-k", "3", "--seen", "keep", "--json") == 0
    (found,) = json.loads(capsys.readouterr().out)["recommendations"]
    (expected,) = recommend(model, [["é1", "é2"]], k=3, seen="keep")
    assert found["user"] == "zoé"
    assert [(entry["item"], entry["score"]) for entry in found["items"]] == expected
