"""A run that Python made of files names them, so that every command on it reads them again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_runs import TINY, write_table

from fastcl.recsys import CLRec, Interactions, SASRec, Split, bundled, fit, prepare, resume
from fastcl.recsys.cli import main
from fastcl.recsys.training.checkpoint import read_config

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    text = write_table(tmp_path).read_text().replace("user,item,time", "who;what;when", 1)
    Path("log.txt").write_text(text.replace(",", ";"))
    Path("items.csv").write_text("what,tag,name\n" + "".join(f"i{n},{n % 2},N{n}\n" for n in range(9)))
    return tmp_path


def trained(split: Split, model: Any = SASRec, **record: Any) -> dict[str, Any]:
    sizes = {"negatives": 9} if model is CLRec else {}
    options = {name: value for name, value in TINY.items() if name != "blocks"} if model is CLRec else TINY
    model = model(split.items, seed=0, **options, **sizes)
    fit(model, split, epochs=1, out="run", force=True, progress=False, **record)
    return read_config("run")


def test_commands_take_a_run_that_python_made(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = {"user": "who", "item": "what", "time": "when", "format": "semicolon", "missing": ("none",)}
    log = Interactions.read("log.txt", **names, item_features="items.csv", title="name")
    config = trained(log.split("items", at=np.float32(0.25)), CLRec)
    assert config["data"]["path"] == str(place / "log.txt")
    assert config["split"] == {"how": "items", "at": 0.25, "ties": "input", "seed": 0}
    asked = ["recommend", "run", "--users", "log.txt", "--fallback", "popular"]
    for words in (["evaluate", "run", "--by", "tag"], asked):
        assert main.main(words) == 0
        assert "names no data" not in capsys.readouterr().err
    assert len(resume("run", epochs=2, progress=False)) == 2
    # The command of the same data and split records the same clicks.
    columns = ["--user", "who", "--item", "what", "--time", "when", "--format", "semicolon"]
    told = ["train", "log.txt", *columns, "--split", "items", "--at", "0.25", "--model", "popular", "-o", "other"]
    assert main.main(told) == 0
    assert read_config("other")["data_sha256"] == config["data_sha256"]


def test_files_that_are_split_prepared_or_bundled_are_named(place: Path) -> None:
    names = {"user": "who", "item": "what", "time": "when", "format": "semicolon"}
    made = Interactions.presplit("log.txt", None, "log.txt", targets="all", hold_out=0.3, **names)
    assert trained(made)["data_sha256"] == trained(made)["data_sha256"]
    assert main.main(["evaluate", "run"]) == 0
    prepare("log.txt", "prepared", **names)
    assert trained(Interactions.read("prepared").split())["data"]["path"] == str(place / "prepared")
    assert main.main(["evaluate", "run"]) == 0
    assert bundled("purchases").split().origin["data"] == {"path": "bundled:purchases"}


def test_files_of_a_split_are_looked_for_beside_the_data(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for part in ("train", "valid", "test"):
        Path("old").mkdir(exist_ok=True)
        shutil.copy("log.csv", f"old/{part}.csv")
    trained(Interactions.presplit("old/train.csv", "old/valid.csv", "old/test.csv"))
    Path("old").rename("new")
    assert main.main(["evaluate", "run", "--data", "new/train.csv"]) == 0
    Path("new/test.csv").unlink()
    capsys.readouterr()
    assert main.main(["evaluate", "run", "--data", "new/train.csv"]) == 2
    told = "test.csv: the data of run is not whole; this file may also lie beside the FILE of --data"
    assert told in capsys.readouterr().err


def test_what_was_no_file_or_is_recorded_otherwise_is_not_named(place: Path) -> None:
    log = Interactions.read(json.loads('{"user": ["a","a","a"], "item": ["x","y","z"], "time": [1,2,3]}'))
    assert log.split().origin == {}
    named = Interactions.read("log.csv")
    with_table = Interactions.read("log.csv", item_features={"item": ["i1"], "tag": ["t"]})
    assert with_table.origin == named.with_features({"item": ["i1"], "tag": ["t"]}).origin == {}
    assert "data" not in trained(with_table.split())
    assert trained(named.split(), record={"data": {"path": "log.csv"}})["data"] == {"path": "log.csv"}
