"""One run of the study of clicks: searches a method's settings on the rows that validate, and measures the best of them
on the rows that test.

A run trains every combination of its "grid" and looks at the AUC on the validating rows after each epoch. A combination
ends early after an epoch that is no better than the one before. The epoch and the combination with the best AUC are
tested, for each way of scoring by itself. Manifests, results and tables are those of quality.py.
"""

import itertools
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.clicks import contrastive, rows, training
from benchmarks.clicks.measures import auc, calibration, log_loss
from benchmarks.clicks.rows import Data
from benchmarks.clicks.training import Scored
from fastcl.recsys.options import one_of
from fastcl.recsys.reporting.tables import floors
from fastcl.recsys.studies.manifest import Run


class Kept(NamedTuple):
    """The best epoch of a way of scoring so far, with its scores of the rows that validate and that test."""

    auc: float
    epoch: int
    setting: dict[str, Any]
    valid: np.ndarray
    test: np.ndarray


def measure(run: Run, data: Path, folder: Path) -> dict[str, Any]:
    """What the results file has of a run. folder: keeps the scores of the rows that test, for paired.py."""
    started = time.process_time()
    made = rows.read(run["data"], data)
    kept = search(run, made)
    folder.mkdir(parents=True, exist_ok=True)
    test: dict[str, float] = {}
    chosen: dict[str, Any] = {}
    for name, best in kept.items():
        np.save(folder / f"{name or 'score'}.npy", best.test)
        prefix = "" if name in ("", "score") else f"{name}: "
        test |= {f"{prefix}{metric}": value for metric, value in measured(best, made).items()}
        chosen[name or "score"] = {"valid AUC": best.auc, "epoch": best.epoch, "setting": best.setting}
    return {"test": test, "chosen": chosen, "cpu_s": round(time.process_time() - started, 1)}


def measured(best: Kept, data: Data) -> dict[str, float]:
    """AUC of every group of the rows that test which has both labels; log loss of sigmoid(a + b * score), where a and b
    are fitted to the rows that validate.
    """
    label = data.test.label
    groups = {name: of for name, of in data.groups.items() if 0 < label[of].mean() < 1}
    found = {f"AUC, {name}": auc(best.test[of], label[of]) for name, of in groups.items()}
    a, b = calibration(best.valid, data.valid.label)
    return found | {"log loss": log_loss(a + b * best.test, label), "valid AUC": best.auc}


def search(run: Run, data: Data) -> dict[str, Kept]:
    """Way of scoring -> its best epoch."""
    kept: dict[str, Kept] = {}
    for setting, scorers in trainings(run, data):
        before: dict[str, float] = {}
        for epoch, scored in enumerate(scorers, 1):
            valid = scored(data.valid)
            value = {name: auc(score, data.valid.label) for name, score in valid.items()}
            better = [name for name in valid if name not in kept or value[name] > kept[name].auc]
            test = scored(data.test) if better else {}
            kept |= {name: Kept(value[name], epoch, setting, valid[name], test[name]) for name in better}
            if before and all(value[name] <= before[name] for name in value):
                break
            before = value
    return kept


def trainings(run: Run, data: Data) -> Iterator[tuple[dict[str, Any], Iterable[Scored]]]:
    """Each combination of the grid with what scores rows after each epoch; of a floor, one."""
    if run["plan"] is None:
        known = floors(data.split, "mask") | {"popularity, later": rows.later_popularity(data)}
        yield {}, [contrastive.scorer(known[run["model"]], data)]
        return
    one_of([*training.MODELS, *contrastive.MODELS], "model", run["model"])
    train = training.trained if run["model"] in training.MODELS else contrastive.trained
    options = {name: tuple(x) if isinstance(x, list) else x for name, x in (run["options"] or {}).items()}
    for setting in settings(run):
        yield setting, train(run["model"], data, options | setting, run["plan"]["epochs"], run["seed"])


def settings(run: Run) -> list[dict[str, Any]]:
    """Every combination of the grid of a plan."""
    grid = run["plan"]["grid"]
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
