"""Functions that are told each epoch, and trackers: what they get, that none of them can lose a run or tell an epoch
twice, and that a resumed run goes on in the same log."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file
from tiny_runs import TINY, stopped_after, write_table

from fastcl.recsys import Epoch, Interactions, SASRec, Split, fit, log_to, resume
from fastcl.recsys.cli import main
from fastcl.recsys.training import trackers

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def split(tmp_path: Path) -> Split:
    return Interactions.read(write_table(tmp_path)).split()


def model(split: Split) -> SASRec:
    return SASRec(split.items, seed=0, **TINY)


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def without_times(run: Path) -> list[dict[str, Any]]:
    return [{**line, "seconds": 0.0} for line in lines(run)]


def same_weights(a: Path, b: Path) -> bool:
    x, y = (load_file(run / "model.safetensors") for run in (a, b))
    return x.keys() == y.keys() and all(x[name].equal(y[name]) for name in x)


def test_the_function_gets_each_epoch_when_it_is_on_disk(split: Split, tmp_path: Path) -> None:
    told: list[Epoch] = []
    run, own = tmp_path / "run", model(split)

    def hook(epoch: Epoch) -> None:
        told.append(epoch)
        assert lines(run)[-1]["epoch"] == epoch.number
        assert not own.training

    fit(own, split, epochs=3, out=run, on_epoch=hook, progress=False)
    for epoch, line in zip(told, lines(run), strict=True):
        assert (epoch.number, epoch.planned, epoch.last) == (line["epoch"], 3, line["epoch"] == 3)
        assert (epoch.loss, epoch.seconds, epoch.best) == (line["loss"], line["seconds"], line["best"])
        assert epoch.metrics == {name: line[name] for name in ("ndcg@10", "recall@10")}
    with pytest.raises(dataclasses.FrozenInstanceError):
        told[0].loss = 0.0  # type: ignore[misc]
    with pytest.raises(TypeError, match="on_epoch: expected a function of an Epoch, got str"):
        fit(model(split), split, epochs=1, on_epoch="print", out=tmp_path / "new")  # type: ignore[arg-type]
    assert not (tmp_path / "new").exists()


def test_true_ends_the_training_and_resume_goes_on_to_the_same_bits(split: Split, tmp_path: Path) -> None:
    whole, halted = tmp_path / "whole", tmp_path / "halted"
    fit(model(split), split, epochs=4, out=whole, progress=False)
    found = fit(model(split), split, epochs=4, out=halted, on_epoch=lambda e: np.bool_(e.number == 2), progress=False)
    assert len(found) == len(lines(halted)) == 2
    told: list[int] = []
    resume(halted, split, progress=False, on_epoch=lambda epoch: told.append(epoch.number))
    assert told == [3, 4]
    assert without_times(halted) == without_times(whole)
    assert same_weights(halted, whole)


def test_a_function_that_fails_loses_nothing(split: Split, tmp_path: Path) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    fit(model(split), split, epochs=3, out=whole, progress=False)

    def fails(epoch: Epoch) -> Any:
        if epoch.number == 2:
            return "stop"
        raise OSError("no such server")

    with pytest.warns(RuntimeWarning) as warned:
        assert len(fit(model(split), split, epochs=3, out=run, on_epoch=fails, progress=False)) == 3
    assert [str(warning.message) for warning in warned] == [
        "on_epoch failed after epoch 1, training goes on: OSError: no such server",
        "on_epoch failed after epoch 2, training goes on: TypeError: expected True, False or None from it, got str",
        "on_epoch failed after epoch 3, training goes on: OSError: no such server",
    ]
    assert same_weights(run, whole)


def words(run: Path, tracker: str, *more: str) -> list[str]:
    settings = [f"{name}={value}" for name, value in TINY.items()]
    log = str(run.parent / "log.csv")
    fixed = ["--model", "sasrec", "--epochs", "3", "--log", tracker, "--set", *settings]
    return ["train", log, *fixed, "-o", str(run), *more]


def interrupted_and_resumed(run: Path, tracker: str) -> None:
    """Three epochs on the command line, two of them before an interruption."""
    write_table(run.parent)
    with stopped_after(2):
        assert main.main(words(run, tracker)) == 130
        raise KeyboardInterrupt
    assert [line["epoch"] for line in lines(run)] != [1, 2, 3]
    assert main.main(["resume", str(run)]) == 0


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[tuple[int, bool]]]:
    """A tracker "memory" that keeps (epoch, last) of each run, and refuses epoch 2 the first time."""
    held: dict[str, list[tuple[int, bool]]] = {}
    refused: list[int] = []

    def opened(folder: Path, config: Mapping[str, Any], kept: dict[str, Any]) -> Callable[[Epoch], None]:
        kept.setdefault("run", f"run {len(held)}")
        mine = held.setdefault(kept["run"], [])

        def send(epoch: Epoch) -> None:
            if epoch.number == 2 and not refused:
                refused.append(2)
                raise OSError("no such server")
            mine.append((epoch.number, epoch.last))

        return send

    monkeypatch.setitem(trackers.TRACKERS, "memory", ("json", opened))
    return held


@pytest.mark.filterwarnings("default:on_epoch failed")
def test_a_tracker_that_missed_an_epoch_gets_it_with_the_next(
    server: dict[str, list[tuple[int, bool]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    interrupted_and_resumed(run, "memory")
    assert server == {"run 0": [(1, False), (2, False), (3, True)]}
    assert json.loads((run / "log.json").read_text()) == {"memory": {"sent": 3, "run": "run 0"}}
    assert main.main(words(run, "memory", "--force")) == 0  # another run in the same folder has a log of its own
    assert server["run 1"] == server["run 0"]
    assert json.loads((run / "config.json").read_text())["log"] == ["memory"]
    kept = json.loads((run / "log.json").read_text())
    (run / "log.json").write_text(json.dumps({"memory": {**kept["memory"], "sent": 2}}))  # killed before the last one
    assert main.main(["resume", str(run)]) == 0
    assert server["run 1"] == [*server["run 0"], (3, True)]
    (run / "log.json").write_text('{"memory": {"sent": "x"}}')
    capsys.readouterr()
    assert main.main(["resume", str(run)]) == 0
    assert "log.json: memory: expected the number of epochs sent, got 'x'" in capsys.readouterr().err


def test_a_package_that_is_missing_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_table(tmp_path)
    for name in ("mlflow", "wandb", "tensorboard", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("mlflow", "wandb", "tensorboard"):
        assert main.main(words(tmp_path / "run", name)) == 2
        told = f"fastcl train: error: --log: {name} needs the package {name}: pip install 'fastcl[{name}]'\n"
        assert capsys.readouterr().err == told
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="tracker: expected one of tensorboard, mlflow, wandb, got 'neptune'"):
        log_to("neptune", tmp_path)


def test_a_folder_that_is_no_run_is_named(split: Split, tmp_path: Path) -> None:
    trackers.TRACKERS["json"] = ("json", lambda folder, config, kept: lambda epoch: None)
    try:
        with pytest.warns(RuntimeWarning, match="other: not a run folder"):
            fit(model(split), split, epochs=1, on_epoch=log_to("json", tmp_path / "other"), progress=False)
    finally:
        del trackers.TRACKERS["json"]


def test_tensorboard_shows_each_epoch_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = tmp_path / "run"
    interrupted_and_resumed(run, "tensorboard")
    assert main.main(words(run, "tensorboard", "--force", "--seed", "1")) == 0  # what it replaces is no longer shown
    found = EventAccumulator(str(run)).Reload()
    for tag, name in (("loss", "loss"), ("validation/ndcg@10", "ndcg@10"), ("seconds", "seconds")):
        events = found.Scalars(tag)
        assert [event.step for event in events] == [1, 2, 3]
        assert [event.value for event in events] == pytest.approx([line[name] for line in lines(run)])


def test_mlflow_keeps_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="needs mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    run = tmp_path / "run"
    interrupted_and_resumed(run, "mlflow")
    client = mlflow.MlflowClient()
    (found,) = client.search_runs([client.get_experiment_by_name("fastcl").experiment_id])
    assert found.info.status == "FINISHED"
    assert found.data.params["dim"] == "4"
    for key, name in (("loss", "loss"), ("validation/ndcg_at_10", "ndcg@10")):
        history = client.get_metric_history(found.info.run_id, key)
        assert [metric.step for metric in history] == [1, 2, 3]
        assert [metric.value for metric in history] == [line[name] for line in lines(run)]


def test_wandb_keeps_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="needs wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    run = tmp_path / "run"
    interrupted_and_resumed(run, "wandb")
    kept = json.loads((run / "log.json").read_text())["wandb"]
    assert kept["sent"] == 3
    names = [path.name for path in (tmp_path / "wandb").glob("offline-run-*")]
    assert names
    assert all(name.endswith(kept["run"]) for name in names)  # one id: an upload joins the parts
