"""A search over settings of a model: a grid or a part of it, judged by validation alone, with successive halving.

Every trial is an ordinary run folder, begun for all its epochs and stopped where the halving drops it, so that a trial
that goes on is resumed and ends with the bits of a run without stops. The state of a search is the run folders: the
same call after a kill reads from them what is done. The test cases are never looked at.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fastcl.recsys import schema, writing
from fastcl.recsys.data import Split, fingerprints
from fastcl.recsys.models import Model
from fastcl.recsys.models.base import make
from fastcl.recsys.options import at_least
from fastcl.recsys.training import checkpoint, lock, processes, state
from fastcl.recsys.training.fit import fit, resume
from fastcl.recsys.training.loop import check_metric
from fastcl.recsys.training.state import METRICS, Progress, Settings, planned, validation_metric

PLAN, FAILED, TABLE = "tune.json", "failed.json", "table.csv"
FORMAT = "fastcl-tune"


class Search(NamedTuple):
    """rows: one dict per trial, the best first: "trial" (its number), the settings in which trials differ, "epochs"
    (trained), "best epoch", the validation metrics at that epoch, "seconds" (of training), "state" ("complete",
    "stopped" by the halving, or "failed: " and why) and "folder". A trial that failed in its first epoch has no
    metrics. best: the run folder of the first row.
    """

    rows: list[dict[str, Any]]
    best: Path

    def to_csv(self) -> str:
        """`rows` as CSV with a header. A cell is empty where the row lacks the value."""
        names = list(dict.fromkeys(name for row in self.rows for name in row))
        text = io.StringIO()
        writer = csv.DictWriter(text, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        return text.getvalue()


def tune(
    model: type[Model],
    split: Split,
    values: Mapping[str, Sequence[Any]],
    *,
    out: str | Path,
    epochs: int = 20,
    trials: int | None = None,
    halving: int = 3,
    seed: int = 0,
    metric: str = "ndcg@10",
    device: str = "cpu",
    record: Mapping[str, Any] | None = None,
    progress: bool = True,
    **training: Any,
) -> Search:
    """Trains `model` on split.train with several settings and orders them by `metric` on split.valid. split.test is
    never read: `evaluate(load(found.best), split.test)` tests the best one, once.

    With n trials and `halving` h, all trials train for a first part of `epochs`, the best n/h of them (rounded up) for
    h times as many, and so on until the last ones train all `epochs` (successive halving, Jamieson and Talwalkar 2016).
    The learning rate of every trial falls over all `epochs`, so that the winner has the bits of a run that was
    trained with its settings alone. The same call goes on with a search that was interrupted and trains no epoch twice,
    except one that was cut off.

    Args:
        model: a class of models, such as SASRec.
        values: setting -> the values to try; a setting with one value has it in all trials.
        out: folder that gets a run folder for each trial, trial-1 and so on, and table.csv.
        epochs: passes over the train clicks that a trial trains at most, >= 1.
        trials: so many of the combinations, drawn without repeats by `seed`; None, or more than there are: all.
        halving: h, >= 1; 1: every trial trains all `epochs`.
        seed: seed of the draw, of the weights and of the training, the same in all trials.
        metric: as in `fit`.
        device: "cpu" or "cuda", where to train.
        record: as in `fit`, for the run folders of all trials.
        progress: whether to report on stderr.
        training: further arguments of `fit`: seen, patience, schedule, precision, accumulate, save_every.

    A trial whose loss stops being finite, or which lacks memory, has failed and is not tried again. Raises ValueError
    for settings that the model refuses, for a folder that holds another search, for a split without validation cases
    and in several processes; FloatingPointError where all trials fail.

    >>> from fastcl.recsys import SASRec, bundled
    >>> split = bundled("purchases").split()
    >>> values = {"lr": [0.001, 0.003], "dim": [32, 64]}
    >>> tune(SASRec, split, values, out="runs/search", seen="keep").best  # doctest: +SKIP
    """
    for name, low, number in (("epochs", 1, epochs), ("halving", 1, halving), ("trials", 1, trials)):
        if number is not None:
            at_least(low, name, number)
    metric = validation_metric(metric)
    if processes.count() > 1:
        raise ValueError(f"tune: expected a single process, got {processes.count()}; each trial is small")
    if not len(split.valid):
        raise ValueError("split: expected validation cases, which decide between the trials, got none")
    check_metric(split, metric)
    place = processes.device_of(device)
    asked = planned(epochs, training.get("patience"), training.get("schedule", "linear"), learns=model.learns)
    settings = Settings(lr=1.0, seed=seed, metric=metric, device=device, **{**training, **asked})
    combinations = drawn(model, values, trials, seed)
    out = Path(out)
    plan = {
        "format": FORMAT, "model": model.name, "trials": combinations, "epochs": epochs, "halving": halving,
        "seed": seed, "metric": metric, "training": training, "data_sha256": fingerprints.fingerprint(split),
    }  # fmt: skip
    with lock.held(out):
        _begin(out, plan)
        failed = _failures(out)

        def train(number: int, until: int) -> None:
            folder, options = out / f"trial-{number}", combinations[number - 1]
            done = _standing(folder)
            # Where a kill cut off the last write of a complete trial, `resume` does it without training.
            complete = done.done(settings) and len(checkpoint.read_metrics(folder)) == len(done.history)
            if number in failed or complete or (len(done.history) >= until and until < epochs):
                return
            if progress:
                print(f"trial {number} of {len(combinations)}: {_told(options)}", file=sys.stderr, flush=True)
            try:
                if (folder / "config.json").exists():
                    resume(folder, split, progress, on_epoch=lambda epoch: epoch.number >= until)
                else:
                    fit(
                        make(model, split, seed=seed, **options).to(place), split, epochs=epochs, seed=seed,
                        metric=metric, out=folder, record=record, progress=progress,
                        on_epoch=lambda epoch: epoch.number >= until, **training,
                    )  # fmt: skip
            except (FloatingPointError, MemoryError) as error:
                failed[number] = f"{error}"
                writing.write_text(out / FAILED, json.dumps(failed, indent=1) + "\n")

        alive = list(range(1, len(combinations) + 1))
        for until, kept in rungs(len(combinations), epochs, halving):
            for number in alive:
                train(number, until)
            alive = sorted((n for n in alive if n not in failed), key=lambda n: _rank(out, n, metric))[:kept]
        if len(failed) == len(combinations):
            raise FloatingPointError(f"all {len(failed)} trials failed: {failed[1]}")
        found = _search(out, combinations, failed, settings)
        writing.write_text(out / TABLE, found.to_csv())
    return found


def drawn(
    model: type[Model], values: Mapping[str, Sequence[Any]], trials: int | None, seed: int
) -> list[dict[str, Any]]:
    """The settings of the trials, in the order of the grid. ValueError where the model's config refuses one."""
    for name, several in values.items():
        if isinstance(several, str) or not isinstance(several, Sequence):
            raise TypeError(f"values: {name}: expected a list of values, got {several!r}")
        if not several or any(several.count(value) > 1 for value in several):
            raise ValueError(f"values: {name}: expected different values, at least one, got {list(several)}")
    grid = [dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())]
    if trials is not None and trials < len(grid):
        chosen = np.random.default_rng(seed).choice(len(grid), trials, replace=False)
        grid = [grid[n] for n in sorted(chosen)]
    for options in grid:
        try:
            model.Config(**options)
        except (TypeError, ValueError) as error:
            raise ValueError(f"values: {_told(options)}: {error}") from error
    return grid


def rungs(trials: int, epochs: int, halving: int) -> Iterator[tuple[int, int]]:
    """(epochs until which the trials of a rung train, trials that go on to the next rung), rung by rung.

    >>> list(rungs(9, 20, 3)), list(rungs(4, 20, 3)), list(rungs(4, 20, 1))
    ([(2, 3), (6, 1), (20, 1)], [(6, 2), (20, 1)], [(20, 1)])
    """
    parts = 0
    while halving > 1 and halving ** (parts + 1) <= min(trials, epochs):
        parts += 1
    for part in range(parts):
        yield epochs // halving ** (parts - part), math.ceil(trials / halving ** (part + 1))
    yield epochs, 1


def _begin(out: Path, plan: dict[str, Any]) -> None:
    """Writes the plan into a new folder; ValueError where the folder holds another one."""
    path = out / PLAN
    plan = json.loads(json.dumps(plan))
    if not path.exists():
        others = sorted(
            file.name for file in out.iterdir() if file.name != lock.NAME and not writing.is_left(file.name)
        )
        if others:
            raise ValueError(f"out: expected a new folder or one of a search, got {out}, which holds {others[0]}")
        writing.write_text(path, json.dumps(plan, indent=1) + "\n")
        return
    found = schema.parse(path.read_bytes(), str(path))
    schema.fits(found, dict[str, Any], str(path))
    for name, value in plan.items():
        if found.get(name) != value:
            what = "other data" if name == "data_sha256" else f"other {name}"
            raise ValueError(f"out: {out} holds a search with {what}; expected the same call, or another folder")


def _failures(out: Path) -> dict[int, str]:
    path = out / FAILED
    if not path.is_file():
        return {}
    found = schema.parse(path.read_bytes(), str(path))
    schema.fits(found, dict[str, str], str(path))
    return {int(number): text for number, text in found.items()}


def _standing(folder: Path) -> Progress:
    """How far a trial has come."""
    return state.progress_of(folder) if (folder / "config.json").exists() else Progress()


def _rank(out: Path, number: int, metric: str) -> tuple[float, int]:
    """Orders trials: the higher metric first, of equal ones the earlier trial."""
    best = _standing(out / f"trial-{number}").best
    return (-math.inf if best is None else -best[metric], number)


def _search(out: Path, combinations: Sequence[dict[str, Any]], failed: Mapping[int, str], settings: Settings) -> Search:
    differ = [name for name in combinations[0] if any(c[name] != combinations[0][name] for c in combinations)]
    rows = []
    for number, options in enumerate(combinations, start=1):
        folder = out / f"trial-{number}"
        done = _standing(folder)
        row: dict[str, Any] = {"trial": number, **{name: options[name] for name in differ}}
        row["epochs"] = len(done.history)
        best = done.best
        if best is not None:
            row["best epoch"] = best["epoch"]
            row |= {name: best[name] for name in dict.fromkeys((settings.metric, *METRICS))}
        standing = f"failed: {failed[number]}" if number in failed else "complete" if done.done(settings) else "stopped"
        seconds = sum(line["seconds"] for line in done.history)
        rows.append({**row, "seconds": seconds, "state": standing, "folder": str(folder)})
    rows.sort(key=lambda row: (row["trial"] in failed, -row.get(settings.metric, -math.inf), row["trial"]))
    return Search(rows, Path(rows[0]["folder"]))


def _told(options: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in options.items())
