"""What evaluate, compare and report say of runs and data that are not what a reader of their figures takes them for."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from fastcl.recsys.cli import main

pytestmark = pytest.mark.usefixtures("one_thread")
REPORTS = (("evaluate",), ("compare",), ("report", "-o", "pictures"))


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """40 users with 8 clicks each, and in front of them one who clicks on all items, so that no row that is missing
    further down changes their numbers.
    """
    rng = np.random.default_rng(0)
    path = tmp_path / "log.csv"
    rows = [f"first,i{n},{n}" for n in range(30)]
    rows += [f"u{user},i{rng.integers(30)},{step}" for user in range(40) for step in range(90, 98)]
    path.write_text("user,item,time\n" + "\n".join(rows) + "\n")
    return path


def call(*arguments: str | Path | int) -> int:
    return main.main([str(a) for a in arguments])


def trained(folder: Path, log: Path, epochs: int = 2) -> Path:
    command = ["train", log, "--model", "sasrec", "--epochs", epochs, "--set", "dim=8", "batch=8", "max_len=5"]
    assert call(*command, "-o", folder) == 0
    return folder


@pytest.mark.parametrize("command", REPORTS, ids=lambda command: command[0])
def test_clicks_other_than_those_of_the_training_are_never_silent(
    command: tuple[str, ...], log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """An older export, a newer one, fewer users, times reversed: at the run's own path an error, by --data a note."""
    monkeypatch.chdir(tmp_path)
    run = trained(tmp_path / "run", log, epochs=1)
    header, *rows = log.read_text().splitlines()
    older = [row for row in rows if not row.endswith((",96", ",97"))]
    newer = [*rows, *(f"u{user},i{user % 30},99" for user in range(40))]
    fewer = rows[: 30 + 30 * 8]
    turned = [",".join([*row.split(",")[:2], str(-int(row.split(",")[2]))]) for row in rows]
    whole = log.read_text()
    known = r"^note: .*run: .*data.csv holds other clicks than the training had; (\d+) of its \d+ test targets were amo"
    counts = []
    for changed in (older, newer, fewer, turned) if command[0] == "evaluate" else (older,):
        text = "\n".join([header, *changed]) + "\n"
        data = tmp_path / "data.csv"
        data.write_text(text)
        capsys.readouterr()
        assert call(*command, run, "--data", data) == 0
        counts.append(int(re.findall(known, capsys.readouterr().err, re.M)[0]))
        log.write_text(text)
        assert call(*command, run) == 2
        error = capsys.readouterr().err
        assert "no longer holds the clicks that" in error
        assert "--data FILE names another file" in error
        if command[0] != "report":  # which takes seconds
            assert call(*command, run, "--data", log) == 0  # on purpose, and nobody can know what was trained on
            assert "is unknown: the data of the run is not at hand" in capsys.readouterr().err
        log.write_text(whole)
    assert counts[0] == 40  # all targets of the older export but one were train clicks
    if command[0] == "report":
        return
    (tmp_path / "moved.csv").write_text(whole)
    assert call(*command, run, "--data", tmp_path / "moved.csv") == 0  # the same clicks elsewhere
    assert "holds other clicks" not in capsys.readouterr().err


def test_other_test_cases_after_the_same_training_get_a_note(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = trained(tmp_path / "run", log, epochs=1)
    text = log.read_text()
    for changed in (text, re.sub(r"(u\d+),i\d+,97", r"\1,i3,97", text)):
        log.write_text(changed)
        capsys.readouterr()
        assert call("evaluate", run) == 0
        assert ("other test cases than" in capsys.readouterr().err) == (changed != text)


def test_recommend_says_where_clicks_of_the_training_are_gone(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its --users would get what they clicked in a row that the file has no more."""
    monkeypatch.chdir(tmp_path)
    run = trained(tmp_path / "run", log, epochs=1)
    header, *rows = log.read_text().splitlines()
    week = tmp_path / "week.csv"
    week.write_text(f"{header}\nu1,i1,200\n")
    one = "user,item,time\nu1,i1,1\n"  # no split can be made of it
    older = "\n".join([header, *(row for row in rows if not row.endswith(",90"))]) + "\n"
    for text, gone in ((log.read_text(), False), (older, True), (one, True)):
        log.write_text(text)
        capsys.readouterr()
        assert call("recommend", run, "--users", week) == 0
        told = capsys.readouterr().err
        assert ("log.csv has changed since the training: clicks that are no longer in it may be" in told) == gone
        assert call("recommend", run, "--users", week, "--alone") == 0
        assert "has changed" not in capsys.readouterr().err


@pytest.mark.parametrize("command", REPORTS, ids=lambda command: command[0])
def test_a_training_that_has_not_ended_is_named_in_every_report(
    command: tuple[str, ...], log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    run = trained(tmp_path / "run", log)
    capsys.readouterr()
    if command[0] != "report":
        assert call(*command, run) == 0
        assert "epochs are done" not in capsys.readouterr().err
    metrics = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text(metrics[0] + "\n")  # as it is while the second epoch runs
    assert call(*command, run, "--json") == 0 if command[0] != "report" else call(*command, run) == 0
    told = capsys.readouterr()
    assert told.err.count("1 of 2 epochs are done, the best of these counts") == 1
    if command[0] != "report":
        assert any("1 of 2 epochs are done" in note for note in json.loads(told.out)["notes"])
    else:
        assert "1 of 2 epochs are done" in (tmp_path / "pictures" / "index.html").read_text()
