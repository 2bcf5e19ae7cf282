"""Settings that follow from how much there is to learn from: which they are, that the commands begin with them and tell
them, and that what the user sets has the last word.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import write_table

from fastcl.recsys import MODELS, CLRec, Histories, SASRec
from fastcl.recsys.cli import main
from fastcl.recsys.models import sasrec
from fastcl.recsys.models.base import SHORT
from fastcl.recsys.models.clrec import model as clrec

FOR_SHORT = sasrec.FOR_SHORT
pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = ["dim=4", "max_len=4", "batch=8"]


def histories(clicks: int, users: int = 3) -> Histories:
    return Histories.from_lists([[1] * (clicks + user) for user in range(-(users // 2), users // 2 + 1)])


@pytest.mark.parametrize(("model", "expected"), [(SASRec, sasrec.FOR_SHORT), (CLRec, clrec.FOR_SHORT)])
def test_short_histories_have_settings_of_their_own(model: Any, expected: dict[str, Any]) -> None:
    assert model.suited(histories(SHORT - 1)) == expected
    assert model.suited(histories(SHORT)) == {}  # the mean counts
    model.Config(**expected)
    defaults = vars(model.Config())
    assert all(defaults[name] != value for name, value in expected.items())


def test_a_chosen_encoder_keeps_its_own_settings(tmp_path: Path) -> None:
    log = str(write_table(tmp_path))
    words = ["train", log, "--model", "clrec", "--epochs", "1", "--set", *SMALL, "negatives=16"]
    assert main.main([*words, "-o", str(tmp_path / "run")]) == 0
    assert main.main([*words, "encoder=pooling", "-o", str(tmp_path / "own")]) == 0
    runs = (("run", clrec.FOR_SHORT), ("own", vars(CLRec.Config())))
    for folder, expected in runs:
        found = recorded(tmp_path / folder) | {"max_len": expected["max_len"]}  # max_len is among SMALL
        assert {name: found[name] for name in clrec.FOR_SHORT} == {name: expected[name] for name in clrec.FOR_SHORT}
        assert found["rate"] == expected["lr"]


@pytest.mark.parametrize("name", MODELS)
def test_every_model_can_be_asked(name: str) -> None:
    for clicks in (2, 200):
        MODELS[name].Config(**MODELS[name].suited(histories(clicks)))


def recorded(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text())
    return config["config"] | {"rate": config["lr"]}


def test_train_begins_with_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = str(write_table(tmp_path))  # three train clicks a user
    words = ["train", log, "--model", "sasrec", "--epochs", "1", "--set", *SMALL]
    assert main.main([*words, "-o", str(tmp_path / "run")]) == 0
    found = recorded(tmp_path / "run")
    assert {name: found[name] for name in FOR_SHORT} == FOR_SHORT
    assert found["rate"] == found["lr"]
    told = " ".join(f"{name}={value}" for name, value in FOR_SHORT.items())
    assert f"note: {told}: for users with 3.0 clicks on average; --set has the last word" in capsys.readouterr().err

    assert main.main([*words, "dropout=0.1", "--lr", "0.007", "-o", str(tmp_path / "own")]) == 0
    found, told = recorded(tmp_path / "own"), capsys.readouterr().err
    assert (found["dropout"], found["rate"], found["positions"]) == (0.1, 0.007, "newest")
    assert "positions=newest" in told
    assert "dropout=" not in told
    assert "lr=" not in told


def test_tune_begins_with_them(tmp_path: Path) -> None:
    log = str(write_table(tmp_path))
    words = ["tune", log, "--model", "sasrec", "--epochs", "1", "--set", *SMALL, "dropout=0.1,0.2"]
    assert main.main([*words, "-o", str(tmp_path / "search")]) == 0
    for number, dropout in ((1, 0.1), (2, 0.2)):
        found = recorded(tmp_path / "search" / f"trial-{number}")
        assert {name: found[name] for name in FOR_SHORT} == FOR_SHORT | {"dropout": dropout}
