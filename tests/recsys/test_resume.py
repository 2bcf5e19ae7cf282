"""Interrupted training: killed or stopped at any moment, it ends with the same bits; what does not fit is refused."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fastcl.recsys import (
    BERT4Rec,
    CLRec,
    ContrastVAE,
    Histories,
    Interactions,
    MultiCLRec,
    SASRec,
    Split,
    evaluate,
    fit,
    load,
    resume,
    writing,
)
from fastcl.recsys.cli import main
from fastcl.recsys.training import checkpoint, loop

pytestmark = pytest.mark.usefixtures("one_thread")
COLUMNS = ["--user", "who", "--item", "what", "--time", "when"]
SETTINGS: dict[type, dict[str, Any]] = {
    SASRec: {"dim": 8, "batch": 15, "max_len": 5, "loss": "bce"},  # draws negatives, and dropout
    CLRec: {"dim": 8, "batch": 40, "negatives": 200, "max_len": 5},  # a queue that is not full after the first epoch
    # The main queue is full after the first epoch, those of the intents are not.
    MultiCLRec: {"dim": 8, "batch": 40, "main": 60, "secondary": 90, "intents": 2, "served": 1, "max_len": 5},
    ContrastVAE: {"dim": 8, "batch": 15, "max_len": 5, "reconstruction": "sampled", "samples": 5},  # parts of the loss
    BERT4Rec: {"dim": 8, "batch": 15, "max_len": 5},  # draws what it covers
}


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """40 users who walk along a ring of 30 items."""
    rng = np.random.default_rng(0)
    lines = ["who,what,when"]
    for user in range(40):
        start = rng.integers(30)
        lines += [f"u{user},i{(start + step) % 30},{1000 * user + 60 * step}" for step in range(3 + user % 5)]
    path = tmp_path / "log.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def split(table: Path) -> Split:
    return Interactions.read(table, user="who", item="what", time="when").split()


def small(model_class: type, split: Split, **options: Any) -> Any:
    return model_class(split.items, seed=0, **SETTINGS[model_class] | options)


def untimed(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def assert_same_run(folder: Path, whole: Path) -> None:
    assert untimed(folder) == untimed(whole)
    for name in ("model.safetensors", "last.safetensors"):
        ours, theirs = load_file(folder / name), load_file(whole / name)
        assert ours.keys() == theirs.keys()
        for key, tensor in ours.items():
            assert torch.equal(tensor, theirs[key]), f"{name}: {key}"
    # What differs in last.safetensors is the seconds.
    assert (folder / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert {path.name for path in folder.iterdir()} == set(checkpoint.FILES)


def train_command(table: Path, run: Path, model_class: type, epochs: int) -> list[str]:
    settings = [f"{name}={value}" for name, value in SETTINGS[model_class].items()]
    options = ["--epochs", str(epochs), "--threads", "1", "--save-every", "0", "-o", str(run)]
    return ["train", str(table), *COLUMNS, "--model", model_class.name, "--set", *settings, *options]


def killed(command: list[str], run: Path, saves: int, pause: float) -> None:
    """Starts the command and kills it once it has written so many checkpoints, and a moment later."""
    process = subprocess.Popen([sys.executable, "-m", "fastcl.recsys", *command], stderr=subprocess.DEVNULL)
    last, seen, before = run / "last.safetensors", 0, None
    while seen < saves and process.poll() is None:
        try:
            now = os.stat(last).st_ino
        except FileNotFoundError:
            now = before
        seen, before = seen + (now != before), now
        time.sleep(0.0005)
    time.sleep(pause)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "the command had ended before it could be killed"


@pytest.mark.parametrize(
    ("model_class", "kills"),
    [
        (CLRec, 1),
        pytest.param(CLRec, 20, marks=pytest.mark.slow),
        pytest.param(SASRec, 20, marks=pytest.mark.slow),
    ],
)
def test_killed_at_random_moments(model_class: type, kills: int, table: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(kills)
    whole, run = tmp_path / "whole", tmp_path / "run"
    epochs = 20 * kills
    for kill in range(kills):
        begun = (run / "config.json").exists()
        command = ["resume", str(run)] if begun else train_command(table, run, model_class, epochs)
        # One of the kills at the very start, perhaps before there is anything to resume.
        killed(command, run, saves=int(rng.integers(1, 40)) if kill else 1, pause=0.005 * rng.random())
    assert main.main(["resume", str(run)]) == 0
    assert main.main(train_command(table, whole, model_class, epochs)) == 0
    assert len(untimed(run)) == epochs
    assert_same_run(run, whole)


class Stop(BaseException):
    """Ends a training as Ctrl-C would."""


@pytest.mark.parametrize(
    ("model_class", "more"),
    [
        (SASRec, {}),
        pytest.param(CLRec, {}, marks=pytest.mark.slow),
        pytest.param(CLRec, {"encoder": "sasrec", "batch": 15}, marks=pytest.mark.slow),
        (CLRec, {"negatives_from": "vectors", "momentum": 0.9, "tasks": ("u2i", "u2u")}),
        pytest.param(CLRec, {"objective": "ipw", "propensity": "learned"}, marks=pytest.mark.slow),
        pytest.param(CLRec, {"objective": "negative_sampling", "samples": 3}, marks=pytest.mark.slow),
        pytest.param(MultiCLRec, {}, marks=pytest.mark.slow),
        pytest.param(MultiCLRec, {"negatives_from": "vectors"}, marks=pytest.mark.slow),
        pytest.param(BERT4Rec, {}, marks=pytest.mark.slow),
        pytest.param(ContrastVAE, {}, marks=pytest.mark.slow),
    ],
)
def test_stopped_before_any_of_its_writes(
    model_class: type, more: dict[str, Any], split: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace, left = os.replace, 10**9

    def replace_or_stop(*paths: Any) -> None:
        nonlocal left
        if left == 0:
            raise Stop
        left -= 1
        replace(*paths)

    monkeypatch.setattr(os, "replace", replace_or_stop)
    whole, options = tmp_path / "whole", {"epochs": 2, "save_every": 0.0, "progress": False}
    history = fit(small(model_class, split, **more), split, out=whole, **options)
    writes = 10**9 - left
    assert writes > 3 + 3 * len(history), "nothing was written within an epoch"
    for stop in range(writes):
        run = tmp_path / f"run{stop}"
        left = stop
        with pytest.raises(Stop):
            fit(small(model_class, split, **more), split, out=run, **options)
        left = 10**9
        if (run / "config.json").exists():
            resume(run, split, progress=False)
        else:
            with pytest.raises(FileNotFoundError, match="not a run folder"):
                resume(run, split, progress=False)
            fit(small(model_class, split, **more), split, out=run, **options)
        assert_same_run(run, whole)


def test_early_stopping_and_a_complete_run(split: Split, tmp_path: Path) -> None:
    options = {"epochs": 30, "lr": 0.1, "patience": 4, "metric": "recall@10", "progress": False}
    model = small(SASRec, split)
    history = fit(model, split, out=tmp_path / "run", **options)
    best = max(history, key=lambda line: line["recall@10"])  # the first of equal ones
    assert [line["epoch"] for line in history if line["best"]][-1] == best["epoch"]
    assert len(history) == best["epoch"] + 4 < 30
    loaded = load(tmp_path / "run")
    assert torch.equal(loaded.scores(split.test.history), model.scores(split.test.history))
    assert evaluate(loaded, split.valid, counts=split.counts)["recall@10"] == best["recall@10"]
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    assert resume(tmp_path / "run", split, progress=False) == history
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


def test_several_seeds_are_one_command(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    several = ["--json", "--seed", "1,2,3"]
    assert main.main([*train_command(table, whole, SASRec, 2), *several]) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    names = ["seed-1", "seed-2", "seed-3"]
    assert [line["run"] for line in printed] == [str(whole / name) for name in names]
    assert [json.loads((whole / name / "config.json").read_text())["seed"] for name in names] == [1, 2, 3]
    assert len({untimed(whole / name)[0]["loss"] for name in names}) == 3
    assert main.main([*train_command(table, tmp_path / "one", SASRec, 2), "--seed", "2"]) == 0
    assert_same_run(whole / "seed-2", tmp_path / "one")

    replace = os.replace

    def replace_or_stop(source: Path, path: Path) -> None:
        if (path.parent.name, path.name) == ("seed-2", "metrics.jsonl"):
            raise Stop
        replace(source, path)

    monkeypatch.setattr(os, "replace", replace_or_stop)
    with pytest.raises(Stop):
        main.main([*train_command(table, run, SASRec, 2), *several])
    monkeypatch.setattr(os, "replace", replace)
    capsys.readouterr()
    assert main.main(["resume", str(run), "--json"]) == 0
    assert [json.loads(line)["epochs"] for line in capsys.readouterr().out.splitlines()] == [2, 2, 2]
    for name in names:
        assert_same_run(run / name, whole / name)
    assert main.main([*train_command(table, run, SASRec, 2), "--seed", "1,1"]) == 2
    assert "--seed: expected different seeds, got 1,1" in capsys.readouterr().err


class Trap:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("executed",)


@pytest.mark.parametrize("name", ["last.safetensors", "model.safetensors"])
def test_a_pickle_is_not_executed(name: str, split: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    fit(small(SASRec, split), split, epochs=1, out=run, progress=False)
    (run / name).write_bytes(pickle.dumps(Trap()))
    with pytest.raises(ValueError, match="damaged, or not a file that fastcl saved"):
        resume(run, split, progress=False) if name.startswith("last") else load(run)
    assert not (tmp_path / "executed").exists()


def change(run: Path, **changes: Any) -> None:
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | changes))


def halve(run: Path) -> None:
    data = (run / "last.safetensors").read_bytes()
    (run / "last.safetensors").write_bytes(data[: len(data) // 2])


def flip(run: Path) -> None:
    data = bytearray((run / "last.safetensors").read_bytes())
    data[data.index(b'\\"loss\\": ') + 10] ^= 1  # a digit of the history, in the header
    (run / "last.safetensors").write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (halve, ValueError, r"last\.safetensors: damaged, or not a file"),
        (flip, ValueError, r"last\.safetensors: damaged, its content does not match its checksum"),
        (
            lambda run: shutil.copy(run / "model.safetensors", run / "last.safetensors"),
            ValueError,
            r"expected kind training, model sasrec, got kind None, model sasrec",
        ),
        (lambda run: (run / "last.safetensors").unlink(), FileNotFoundError, r"no last\.safetensors"),
        (
            lambda run: change(run, patience="x"),
            ValueError,
            r"settings of a training run: patience: expected .* got 'x'",
        ),
        (lambda run: change(run, epochs=3), ValueError, r"epochs was 2 when the run was begun, config\.json says 3"),
        (lambda run: change(run, epochs=0), ValueError, r"epochs: expected at least 1, got 0"),
        (lambda run: change(run, processes=2), ValueError, r"processes was 1 when .* config\.json says 2"),
        (lambda run: change(run, data_sha256="0"), ValueError, r"data: expected the clicks that .* was begun with"),
        (lambda run: change(run, config={"dim": 16}), ValueError, r"does not belong to config\.json"),
        (lambda run: change(run, lr="fast"), ValueError, r"lr: expected a finite number, got 'fast'"),
    ],
)
def test_what_does_not_fit_is_refused(
    damage: Any, error: type[Exception], message: str, split: Split, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    fit(small(SASRec, split), split, epochs=2, out=run, progress=False)
    damage(run)
    with pytest.raises(error, match=message):
        resume(run, split, progress=False)


def test_data_is_found_or_asked_for(
    table: Path, split: Split, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    of_no_file = dataclasses.replace(split)
    fit(small(SASRec, split), of_no_file, epochs=1, out=tmp_path / "bare", progress=False)
    with pytest.raises(ValueError, match=r"config\.json names no data; expected --data FILE"):
        resume(tmp_path / "bare")
    assert main.main(train_command(table, tmp_path / "run", SASRec, 1)) == 0
    assert len(resume(tmp_path / "run", progress=False)) == 1
    table.write_text(table.read_text().replace("u7,i", "u7,j"))
    assert main.main(["resume", str(tmp_path / "run")]) == 2
    assert "data: expected the clicks" in capsys.readouterr().err
    # Scoring needs no data at all.
    table.unlink()
    assert load(tmp_path / "run").scores(Histories.from_lists([[1, 2]])).shape == (1, len(split.items) + 1)


@pytest.mark.parametrize(("model_class", "schedule"), [(SASRec, "constant"), (CLRec, "constant"), (SASRec, "plateau")])
def test_a_rate_that_knows_no_end_extends_to_the_bits_of_a_longer_run(
    split: Split, tmp_path: Path, model_class: type, schedule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {"schedule": schedule, "progress": False}
    fit(small(model_class, split), split, epochs=4, out=tmp_path / "whole", **options)
    fit(small(model_class, split), split, epochs=2, out=tmp_path / "run", **options)
    assert len(resume(tmp_path / "run", split, epochs=4, progress=False)) == 4
    assert capsys.readouterr().err == ""
    assert_same_run(tmp_path / "run", tmp_path / "whole")
    assert (tmp_path / "run" / "config.json").read_text() == (tmp_path / "whole" / "config.json").read_text()
    before = (tmp_path / "run" / "last.safetensors").read_bytes()
    assert len(resume(tmp_path / "run", split, epochs=4, progress=False)) == 4  # as many as it has: nothing to do
    assert (tmp_path / "run" / "last.safetensors").read_bytes() == before
    with pytest.raises(ValueError, match="epochs: expected at least 4, got 3"):
        resume(tmp_path / "run", split, epochs=3)


def test_a_falling_rate_extends_and_says_what_that_is_not(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main.main(train_command(table, run, SASRec, 2)) == 0
    rates: list[float] = []
    step = loop.step

    def noted(run: Any, batches: Any) -> Any:
        rates.append(run.optimizer.param_groups[0]["lr"])
        return step(run, batches)

    monkeypatch.setattr(loop, "step", noted)
    assert main.main(["resume", str(run), "--epochs", "4"]) == 0
    assert "the result is not that of 4 epochs from the start" in capsys.readouterr().err
    config = checkpoint.read_config(run)
    assert (config["epochs"], config["extended"]) == (4, [{"from": 2, "to": 4, "after": 2}])
    steps = len(rates)
    lr = config["lr"]
    assert rates == [pytest.approx(lr * (1 - (steps + n) / (2 * steps))) for n in range(steps)]  # the second half
    assert len(untimed(run)) == 4
    load(run)
    assert main.main(["resume", str(run), "--epochs", "2"]) == 2
    assert "--epochs: expected at least 4, got 2" in capsys.readouterr().err


def test_an_extension_that_was_killed_goes_on_and_early_stopping_stays(
    split: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, options = tmp_path / "run", {"schedule": "constant", "progress": False}
    fit(small(SASRec, split), split, epochs=2, out=run, **options)

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(writing, "write_text", killed)  # last.safetensors is written, config.json is not
        with pytest.raises(KeyboardInterrupt):
            resume(run, split, epochs=3, progress=False)
    load(run)
    with pytest.raises(ValueError, match="epochs was 3 when the run was begun, config.json says 2"):
        resume(run, split, progress=False)
    assert len(resume(run, split, epochs=3, progress=False)) == 3
    assert len(resume(run, split, progress=False)) == 3
    # Without learning no epoch is better than the first: patience ends the run after the second one.
    stopped = tmp_path / "stopped"
    frozen_rate = {**options, "lr": 1e-30, "patience": 1}
    assert len(fit(small(SASRec, split), split, epochs=3, out=stopped, **frozen_rate)) == 2
    weights = (stopped / "model.safetensors").read_bytes()
    assert len(resume(stopped, split, epochs=9, progress=False)) == 2
    assert (stopped / "model.safetensors").read_bytes() == weights
