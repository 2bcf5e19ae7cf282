"""The search over settings: which trials there are, which go on, that no epoch is trained twice whatever interrupts it,
that the winner is the run of its settings alone, and that the test cases are looked at only where asked."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tiny_runs import TINY, stopped_after, write_table

from fastcl.recsys import CLRec, Interactions, SASRec, Split, evaluate, fit, load, tune
from fastcl.recsys.cli import main
from fastcl.recsys.studies.tune import drawn, rungs
from fastcl.recsys.training import loop

pytestmark = pytest.mark.usefixtures("one_thread")
VALUES: dict[str, list[Any]] = {
    **{name: [value] for name, value in TINY.items()},
    "lr": [1e-4, 0.003, 0.03],
    "dim": [4, 8],
}
SET = [f"{name}={','.join(map(str, values))}" for name, values in VALUES.items()]


@pytest.fixture
def split(tmp_path: Path) -> Split:
    return Interactions.read(write_table(tmp_path)).split()


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, int]]]:
    """(folder, epoch) of every epoch that is trained."""
    epoch, found = loop.epoch, []

    def counted(run: Any, *args: Any) -> Any:
        found.append((run.folder.name, len(run.progress.history) + 1))
        return epoch(run, *args)

    monkeypatch.setattr(loop, "epoch", counted)
    return found


def without_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name not in ("seconds", "folder")} for row in rows]


def test_trials_that_are_worse_stop_early_and_the_winner_is_the_run_of_its_settings(
    split: Split, tmp_path: Path, trained: list[tuple[str, int]]
) -> None:
    found = tune(SASRec, split, VALUES, out=tmp_path / "search", epochs=6, halving=2, progress=False)
    assert list(rungs(6, 6, 2)) == [(1, 3), (3, 2), (6, 1)]
    assert len(trained) == len(set(trained)) == 6 * 1 + 3 * 2 + 2 * 3
    assert sorted(row["epochs"] for row in found.rows) == [1, 1, 1, 3, 6, 6]
    assert [row["state"] for row in found.rows].count("complete") == 2
    order = [row["ndcg@10"] for row in found.rows]
    assert order == sorted(order, reverse=True)
    # At each rung, those that went on are not below those that did not.
    for until, _ in rungs(6, 6, 2):
        lines = [
            [json.loads(line)["ndcg@10"] for line in (Path(row["folder"]) / "metrics.jsonl").read_text().splitlines()]
            for row in found.rows
        ]
        on = [max(values[:until]) for values in lines if len(values) > until]
        off = [max(values) for values in lines if len(values) == until]
        assert not on or not off or min(on) >= max(off)
    best = found.rows[0]
    assert set(best) == {
        "trial",
        "lr",
        "dim",
        "epochs",
        "best epoch",
        "ndcg@10",
        "recall@10",
        "seconds",
        "state",
        "folder",
    }
    alone = tmp_path / "alone"
    settings = {**TINY, "lr": best["lr"], "dim": best["dim"]}
    fit(SASRec(split.items, seed=0, **settings), split, epochs=6, out=alone, progress=False)
    a, b = (load_file(folder / "model.safetensors") for folder in (found.best, alone))
    assert all(a[name].equal(b[name]) for name in b)
    table = list(csv.DictReader((tmp_path / "search" / "table.csv").read_text().splitlines()))
    assert [int(row["trial"]) for row in table] == [row["trial"] for row in found.rows]


def test_a_search_that_was_killed_goes_on_to_the_same_table(
    split: Split, tmp_path: Path, trained: list[tuple[str, int]]
) -> None:
    options: dict[str, Any] = {"epochs": 4, "halving": 2, "trials": 4, "progress": False}
    whole = tune(SASRec, split, VALUES, out=tmp_path / "whole", **options)
    epochs = sorted(trained)
    trained.clear()
    for saves in (1, 2, 3):  # an epoch is saved once
        with stopped_after(saves):
            tune(SASRec, split, VALUES, out=tmp_path / "killed", **options)
    found = tune(SASRec, split, VALUES, out=tmp_path / "killed", **options)
    assert without_times(found.rows) == without_times(whole.rows)
    assert sorted(trained) == epochs
    trained.clear()
    assert tune(SASRec, split, VALUES, out=tmp_path / "killed", **options).rows == found.rows
    assert trained == []
    with pytest.raises(ValueError, match="out: .*killed holds a search with other epochs; expected the same call"):
        tune(SASRec, split, VALUES, out=tmp_path / "killed", **{**options, "epochs": 5})
    with pytest.raises(
        ValueError, match=r"out: expected a new folder or one of a search, got .*, which holds "
    ):
        tune(SASRec, split, VALUES, out=tmp_path, **options)


def test_a_trial_whose_loss_is_not_finite_has_failed(split: Split, tmp_path: Path, trained: list[Any]) -> None:
    values = {**VALUES, "lr": [1e30, 0.003], "dim": [4]}
    out = tmp_path / "search"
    for _ in range(2):
        found = tune(SASRec, split, values, out=out, epochs=2, halving=1, progress=False)
        assert [row["trial"] for row in found.rows] == [2, 1]
        assert found.rows[1]["state"].startswith("failed: ")
        assert "ndcg@10" not in found.rows[1]
    assert [name for name, _ in trained].count("trial-1") == 1  # not again
    with pytest.raises(FloatingPointError, match="all 1 trials failed: "):
        tune(SASRec, split, {**values, "lr": [1e30]}, out=tmp_path / "none", epochs=1, progress=False)


def test_a_schedule_has_the_patience_of_fit(split: Split, tmp_path: Path) -> None:
    found = tune(SASRec, split, {"dim": [4]}, out=tmp_path / "s", epochs=1, schedule="plateau", progress=False)
    assert [row["state"] for row in found.rows] == ["complete"]


def test_combinations_are_drawn_without_repeats() -> None:
    grid = drawn(SASRec, VALUES, None, 0)
    assert len(grid) == 6
    some = drawn(SASRec, VALUES, 4, 1)
    assert len(some) == 4
    assert all(options in grid for options in some)
    assert all(some.count(options) == 1 for options in some)
    assert some == drawn(SASRec, VALUES, 4, 1) != drawn(SASRec, VALUES, 4, 2)
    assert drawn(SASRec, VALUES, 99, 1) == grid
    for values, said in (
        ({"dim": 4}, "values: dim: expected a list of values, got 4"),
        ({"dim": [4, 4]}, r"values: dim: expected different values, at least one, got \[4, 4\]"),
        ({"dim": [6], "heads": [1, 4]}, "values: dim=6 heads=4: "),
    ):
        with pytest.raises((ValueError, TypeError), match=said):
            drawn(SASRec, values, None, 0)  # type: ignore[arg-type]


def test_the_test_cases_decide_nothing(split: Split, tmp_path: Path) -> None:
    values = {name: [value] for name, value in TINY.items()} | {"lr": [0.01, 0.003]}
    other = replace(split, test=replace(split.test, target=split.test.target % 9 + 1))
    options: dict[str, Any] = {"epochs": 1, "progress": False}
    rows = [tune(SASRec, s, values, out=tmp_path / n, **options).rows for n, s in (("a", split), ("b", other))]
    assert without_times(rows[0]) == without_times(rows[1])
    with pytest.raises(ValueError, match="split: expected validation cases"):
        tune(SASRec, replace(split, valid=split.valid.take([])), values, out=tmp_path / "none")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, out = write_table(tmp_path), tmp_path / "search"
    words = ["tune", str(log), "--model", "sasrec", "--set", *SET, "--epochs", "2", "--halving", "2", "-o", str(out)]
    assert main.main(words) == 0
    text = capsys.readouterr().out
    assert "best by validation: " in text
    assert "on the test cases" not in text
    assert main.main([*words, "--final", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    best = load(found["best"])
    split = Interactions.read(log).split()
    trial = f"trial {found['rows'][0]['trial']}"
    assert found["test"][trial] == evaluate(best, split.test)
    assert set(found["test"]) == {"popularity", "co-occurrence", trial}
    assert main.main([*words, "--final"]) == 0
    assert "on the test cases:" in capsys.readouterr().out
    assert main.main(["evaluate", found["best"]]) == 0  # a trial is an ordinary run
    for more, said in (
        (["--set", "dmi=3"], "--set: SASRecConfig has no field 'dmi'; did you mean dim?"),
        (["--set", "dropout=0.1,x"], "--set dropout: expected a number, got 'x'"),
        (["--set", "dropout=0.1,2"], "--set: dim=4"),
        (["--set", "dim=4"], "--set: expected each key once, got 'dim' twice"),
        (["--trials", "0"], "--trials: expected at least 1, got 0"),
        (["--halving", "0"], "--halving: expected at least 1, got 0"),
        (["--epochs", "3"], "-o/--out"),
        (["--split", "none"], "--split: expected validation cases"),
    ):
        capsys.readouterr()
        assert main.main([*words, *more]) == 2
        assert re.search(re.escape(said).replace("\\-o/", "(-o/)?"), capsys.readouterr().err), said


def test_a_log_without_times_needs_no_setting(tmp_path: Path) -> None:
    log = write_table(tmp_path)
    log.write_text(re.sub(r",\d+$", "", log.read_text().replace(",time", ""), flags=re.M))
    split = Interactions.read(log, time=None).split()
    values = {"dim": [4], "batch": [8], "negatives": [20], "max_len": [4]}
    found = tune(CLRec, split, values, out=tmp_path / "search", epochs=1, progress=False)
    assert json.loads((found.best / "config.json").read_text())["config"]["time_cuts"] == []
