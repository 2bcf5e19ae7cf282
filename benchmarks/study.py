"""One run of a study: trains a model by its plan, resumably after each epoch, and measures it on test once.

Runs are listed, stored and shown by fastcl.recsys.studies; epochs and checkpoints are the package's. `fit` is not used,
because a study of a paper validates by a protocol of its own and may have the optimiser settings of that paper.
"""

import resource
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.protocols import PROTOCOLS, SEEN, some
from benchmarks.sources import Parts
from fastcl.recsys.data import Scorer, Split
from fastcl.recsys.models import MODELS, ContrastVAE, Model
from fastcl.recsys.models.base import make
from fastcl.recsys.options import one_of
from fastcl.recsys.reporting import tables
from fastcl.recsys.training import checkpoint, loop, state
from fastcl.recsys.training.state import Progress, Settings

# By the names that the studies' manifests have.
SCHEDULES: dict[str, Callable[[float, int], float]] = {
    "constant": state.SCHEDULES["constant"],
    "falling": state.SCHEDULES["linear"],
}


class Plan(NamedTuple):
    """epochs: the largest number. patience: epochs without a better validation result that end the run. betas: Adam's.

    valid: the number of users that validate, the same ones in all runs; 0: all. every: validation comes after the first
    epoch, after so many more each time, and after the last. decay: decoupled weight decay (AdamW) of all weights.
    """

    epochs: int
    patience: int
    schedule: str = "falling"
    betas: tuple[float, float] = (0.9, 0.98)
    valid: int = 0
    every: int = 1
    decay: float = 0.0


def measure(
    model_name: str,
    options: dict[str, Any],
    plan: Plan | None,
    seed: int,
    parts: Parts,
    folder: Path,
    protocol: str = "ranking",
) -> dict[str, Any]:
    """Trains the run in `folder`, continuing it if it was begun, and tests it; a floor is only tested. Returns the
    entry for the results file.

    folder: gets the state of the run after every epoch, and at the end the best weights as a run folder.
    protocol: a name in protocols.PROTOCOLS.
    """
    split = parts.split
    floors = tables.floors(split, SEEN[protocol])
    if model_name in floors:
        return _tested(floors[model_name], parts, protocol)
    one_of(MODELS, "model", model_name)
    assert plan is not None, "a model needs a plan"
    one_of(SCHEDULES, "schedule", plan.schedule)
    settings = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    model = make(MODELS[model_name], split, seed=seed, **settings)
    rules = PROTOCOLS[protocol](model)
    done = train(model, plan, seed, split, folder, partial(_say, rules.watched), protocol)
    done |= _tested(model, parts, protocol) if not parts.valid_is_test else _after_the_last(done)
    if isinstance(model, ContrastVAE):
        done["diagnostics"] = model.diagnostics(split.test.history)
    done["peak_rss_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    checkpoint.save(model, folder, {"seed": seed, "plan": plan._asdict()})
    return done


def _tested(scorer: Scorer, parts: Parts, protocol: str) -> dict[str, Any]:
    """The metrics on the test cases of the split; those on other cases have the cases' name as a prefix."""
    test = PROTOCOLS[protocol](scorer).test
    done = test(scorer, parts.split.test)
    for name, cases in parts.others.items():
        done["test"] |= {f"{name} {metric}": value for metric, value in test(scorer, cases)["test"].items()}
    return done


def _after_the_last(done: dict[str, Any]) -> dict[str, Any]:
    """Of a run that was validated on the test cases: the metrics after its last epoch, and as "best" those after the
    epoch that was the best on test.
    """
    return {"test": done["last"] | {f"best {name}": value for name, value in done["valid"].items()}}


def train(
    model: Model,
    plan: Plan,
    seed: int,
    split: Split,
    folder: Path,
    say: Callable[[dict[str, Any]], None],
    protocol: str = "ranking",
) -> dict[str, Any]:
    """Trains, from the state in `folder` if there is one, gives the model its best weights, and returns the log. `say`
    is called with the log after every epoch, when the state is on disk.
    """
    rules = PROTOCOLS[protocol](model)
    cases = some(split.valid, plan.valid)
    settings = Settings(plan.epochs, model.config.lr, seed=seed, patience=plan.patience)
    run = loop.new_run(model, split, settings, betas=plan.betas, rate=SCHEDULES[plan.schedule])
    for group in run.optimizer.param_groups:
        group |= {"weight_decay": plan.decay, "decoupled_weight_decay": True}
    folder.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        if (folder / state.LAST).is_file():
            run.progress = state.restore(folder, model, run.optimizer)
        while not run.progress.done(settings):
            started = time.process_time()
            loss = sum(loop.epoch(run).values())
            epoch, kept = len(run.progress.history) + 1, run.progress.best
            due = kept is None or epoch % plan.every == 0 or epoch == plan.epochs
            valid = rules.validate(model.eval(), cases) if due else run.progress.history[-1]["valid"]
            line: dict[str, Any] = {"epoch": epoch, "loss": loss, "valid": valid}
            line["cpu_s"] = time.process_time() - started
            line["best"] = kept is None or (due and rules.better(valid, kept["valid"]))
            run.progress = Progress([*run.progress.history, line])
            # Weights before state: a run killed between the two repeats this epoch, with the same result.
            if line["best"]:
                checkpoint.save_weights(model, folder)
            state.save(folder, model, run.optimizer, run.progress)
            say(_log(run.progress, rules.watched))
    path = folder / "model.safetensors"
    checkpoint.fill(model, checkpoint.read_tensors(path, {"model": model.name})[0], path)
    model.eval()
    return _log(run.progress, rules.watched)


def _log(progress: Progress, watched: str) -> dict[str, Any]:
    """The log of a run for the results file. "curve" has each epoch's loss and watched validation metric."""
    assert progress.best is not None, "a run has an epoch"
    return {
        "epochs": len(progress.history),
        "best_epoch": progress.best["epoch"],
        "cpu_s": sum(line["cpu_s"] for line in progress.history),
        "valid": progress.best["valid"],
        "last": progress.history[-1]["valid"],
        "curve": [[round(line["loss"], 4), round(line["valid"][watched], 5)] for line in progress.history],
    }


def _say(watched: str, log: dict[str, Any]) -> None:
    loss, value = log["curve"][-1]
    at = f"loss {loss:.4f}, validation {watched} {value:.4f}, best {max(n for _, n in log['curve']):.4f}"
    print(f"  epoch {log['epochs']}: {at}, {log['cpu_s']:.0f} s of CPU", flush=True)
