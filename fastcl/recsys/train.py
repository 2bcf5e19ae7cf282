"""Training: fit a model, or resume a run that was interrupted; validation after every epoch, best weights kept.

An epoch's steps are in loop.py, what a run is and how it is kept in state.py. Reads no data files, except for `resume`
where it is given none.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastcl.recsys import checkpoint, launch, loop, state
from fastcl.recsys.data import Cases, Split
from fastcl.recsys.loop import Run
from fastcl.recsys.metrics import evaluate
from fastcl.recsys.models import Model
from fastcl.recsys.state import Settings


def fit(
    model: Model,
    split: Split,
    *,
    epochs: int,
    lr: float | None = None,
    out: str | Path | None = None,
    seed: int = 0,
    seen: str = "mask",
    metric: str = "ndcg@10",
    patience: int | None = None,
    precision: str = "float32",
    accumulate: int = 1,
    save_every: float = 600.0,
    force: bool = False,
    record: Mapping[str, Any] | None = None,
    progress: bool = True,
) -> list[dict[str, Any]]:
    """Trains `model` on split.train and leaves it in eval mode with the weights of its best epoch on split.valid,
    or of its last one where that has no case (the split "none").

    Same seed, machine and thread count: the same weights bit for bit, interrupted (see `resume`) or not. The caller's
    random state is neither read nor moved. With torch.distributed initialised, every process calls it with the same
    arguments; each batch is shared out among them, and only the first process writes and reports.

    Args:
        epochs: passes over the train clicks, >= 1.
        lr: learning rate of the first step, falling linearly to 0 at the last one; None: the model's config.
        out: run folder, written before the first step; None: nothing is written. One that exists and is not empty is
            refused unless `force`.
        seed: of batch order, dropout and negatives (the initial weights have the model's own), >= 0.
        seen: "mask" or "keep", how validation treats items of the history.
        metric: "ndcg@10" or "recall@10" on split.valid, all items ranked: decides which epoch is the best.
        patience: stop after so many epochs without a new best, >= 1; None: never.
        precision: "float32", or "bfloat16": the loss runs under torch.autocast; weights, optimiser and validation stay
            float32.
        accumulate: batches a step, >= 1. For a loss over targets (SASRec) the step is that of one batch so many times
            as large. For one with in-batch negatives (CLRec) it is the mean of the batches' losses: each keeps its own
            negatives, so only `batch` changes their number.
        save_every: seconds between two checkpoints within an epoch, >= 0.
        record: joins config.json (the data's path and options, say).
        progress: report on stderr: a bar on a terminal, a line an epoch elsewhere.

    Returns: one dict an epoch: epoch, loss (mean over the steps), loss_parts (of each term, where the model's loss has
        several), recall@10, ndcg@10 (validation, if any), seconds (training alone), best (whether its weights are the
        best so far); the same lines as metrics.jsonl.

    Raises FloatingPointError when the loss stops being finite; ValueError for a bad option, a split whose items are not
    those of the model, or one in which no user has two train clicks, so that there is no target to train on.

    >>> from fastcl.recsys import SASRec, bundled
    >>> split = bundled("purchases").split()
    >>> fit(SASRec(split.items, seed=0), split, epochs=10, out="runs/first")  # doctest: +SKIP
    """
    settings = Settings(
        epochs,
        model.config.lr if lr is None else lr,
        seed=seed,
        seen=seen,
        metric=metric,
        patience=patience,
        precision=precision,
        accumulate=accumulate,
        save_every=save_every,
        device=model.device.type,
    )
    loop.check(model, split, settings)
    folder = None if out is None else begin(model, split, settings, out, force, record)
    launch.same_start(model)
    return _train(loop.new_run(model, split, settings, folder), progress)


def resume(folder: str | Path, split: Split | None = None, progress: bool = True) -> list[dict[str, Any]]:
    """Goes on with the run in `folder` from its last checkpoint; `load(folder)` then gives its best model.

    The end is the same bit for bit as without the interruption (same machine, same versions; the number of threads is
    taken from the run). A run that is complete is left as it is.

    Args:
        split: the data of the run; None: read from where config.json says.
        progress: report on stderr.

    Returns: all lines of metrics.jsonl, as `fit` does. Raises FileNotFoundError where there is no run, ValueError where
        a file of it is damaged, the data is another, or the number of processes is.

    >>> resume("runs/first")  # doctest: +SKIP
    """
    folder = Path(folder)
    config = checkpoint.read_config(folder)
    settings = Settings.recorded(config)
    with launch.threads(settings.threads), launch.processes(settings.device) as device, _own_random_state(device):
        if settings.processes != launch.count():
            raise ValueError(
                f"{folder}: expected the {settings.processes} processes that began it, got {launch.count()}; "
                f"torchrun --nproc-per-node={settings.processes} -m fastcl.recsys resume {folder}"
            )
        if split is None:
            from fastcl.recsys.commands.common import read_split  # the commands import this module

            split = read_split(config)
        if config.get("data_sha256") != state.fingerprint(split):
            raise ValueError(f"data: expected the clicks that {folder} was begun with, got others")
        if launch.leads():
            checkpoint.sweep(folder)
        run = loop.new_run(checkpoint.build(folder).to(device), split, settings, folder)
        run.progress = state.restore(folder, run.model, run.optimizer)
        if progress and launch.leads():
            _announce(folder, config, run)
        return _train(run, progress)


def begin(
    model: Model,
    split: Split,
    settings: Settings,
    out: str | Path,
    force: bool = False,
    record: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a run folder for training that has not begun, which `resume` can do; an earlier run in it is removed."""
    loop.check(model, split, settings)
    folder = new_folder(out, force) if launch.leads() else Path(out)
    if launch.leads():
        folder.mkdir(parents=True, exist_ok=True)
        checkpoint.clear(folder)
    with _own_random_state(model.device):
        run = loop.new_run(model, split, settings, folder)
        state.save(folder, model, run.optimizer, run.progress)
    if launch.leads():
        facts = {**asdict(settings), "data_sha256": state.fingerprint(split), **(record or {})}
        checkpoint.save_description(model, folder, facts)
    launch.wait()
    return folder


def new_folder(out: str | Path, force: bool) -> Path:
    """`out` as a path that a run may be written to; FileExistsError where something is there already. Makes nothing."""
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder}: expected a folder for the run, got a file")
    # What is left of a run that was killed while its folder was being written is no run yet.
    unfinished = ("items.json", "last.safetensors")
    if folder.is_dir() and not force and any(p.name not in unfinished and p.suffix != ".tmp" for p in folder.iterdir()):
        raise FileExistsError(f"{folder}: exists and is not empty; --force overwrites the run in it")
    return folder


def _train(run: Run, progress: bool) -> list[dict[str, Any]]:
    model, settings = run.model, run.settings
    report = progress and launch.leads()
    model.share = (launch.rank(), launch.count())
    best = _best_weights(run)
    with _own_random_state(model.device):
        while not run.progress.done(settings):
            epoch = len(run.progress.history) + 1
            label = f"{model.name} {epoch}/{settings.epochs}" if report else ""
            parts = loop.epoch(run, lambda: _save(run), label)
            scores = _validate(run)
            found = run.progress.best
            line: dict[str, Any] = {
                "epoch": epoch,
                "loss": sum(parts.values()),
                **({"loss_parts": parts} if len(parts) > 1 else {}),
                **scores,
                "seconds": run.progress.seconds,
                "best": found is None or not scores or scores[settings.metric] > found[settings.metric],
            }
            run.progress = state.Progress([*run.progress.history, line])
            if line["best"]:
                best = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            _save(run)
            if report:
                _say(model.name, settings.epochs, line)
    model.load_state_dict(best)
    model.eval()
    return run.progress.history


def _best_weights(run: Run) -> dict[str, Tensor]:
    """Of a run that goes on, and brings its files up to last.safetensors, which is written before them."""
    if run.folder is None or run.progress.best is None:
        return {}
    _publish(run)
    if run.progress.step == 0 and run.progress.history[-1]["best"]:
        return {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    return checkpoint.read_tensors(run.folder / "model.safetensors", {"model": run.model.name})[0]


def _save(run: Run) -> None:
    if run.folder is not None:
        state.save(run.folder, run.model, run.optimizer, run.progress)
        _publish(run)


def _publish(run: Run) -> None:
    """model.safetensors and metrics.jsonl as of the last finished epoch."""
    history = run.progress.history
    if run.folder is None or not history or not launch.leads():
        return
    if run.progress.step == 0 and history[-1]["best"]:
        checkpoint.save_weights(run.model.name, run.model.state_dict(), run.folder)
    checkpoint.write_text(run.folder / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in history))


def _validate(run: Run) -> dict[str, float]:
    """Means over all validation cases, none where there are no cases; each process scores its own part of them, none
    scores one twice.
    """
    valid = run.split.valid
    if not len(valid):
        return {}
    rows = np.arange(launch.rank(), len(valid), launch.count())
    part = Cases(valid.user[rows], valid.history.take(rows), valid.target[rows])
    sums = torch.zeros(len(state.METRICS) + 1, device="cpu", dtype=torch.float64)
    if len(rows) or launch.count() == 1:
        scores = evaluate(run.model.eval(), part, counts=run.split.counts, seen=run.settings.seen)
        if launch.count() == 1:
            return {name: scores[name] for name in state.METRICS}
        means = [1.0, *(scores[name] for name in state.METRICS)]
        sums = len(rows) * torch.tensor(means, device="cpu", dtype=torch.float64)
    total = launch.add(sums.to(run.model.device)).tolist()
    return {name: value / total[0] for name, value in zip(state.METRICS, total[1:], strict=True)}


@contextmanager
def _own_random_state(device: torch.device) -> Iterator[None]:
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield


def _announce(folder: Path, config: Mapping[str, Any], run: Run) -> None:
    now = checkpoint.versions()
    for name, version in config.get("versions", {}).items():
        if now.get(name) != version:
            text = f"begun with {name} {version}, goes on with {now.get(name)}: the result may differ in its last bits"
            print(f"{folder}: {text}", file=sys.stderr)
    if not run.progress.history and not run.progress.step:
        return
    finished = f"{len(run.progress.history)} of {run.settings.epochs} epochs are finished"
    print(f"{folder}: {finished}{', the run is complete' if run.progress.done(run.settings) else ''}", file=sys.stderr)


def _say(name: str, epochs: int, line: Mapping[str, Any]) -> None:
    found = ", ".join(f"{metric} {line[metric]:.4f}" for metric in reversed(state.METRICS) if metric in line)
    shown = f"validation {found}" if found else "no validation"
    best = "  best so far" if found and line["best"] else ""
    print(
        f"{name} epoch {line['epoch']}/{epochs}: loss {line['loss']:.4f}, {shown}, {line['seconds']:.1f} s{best}",
        file=sys.stderr,
        flush=True,
    )
