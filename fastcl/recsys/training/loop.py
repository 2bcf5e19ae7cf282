"""One epoch of training: turns batches into optimiser steps, with a schedule of the learning rate, mixed precision,
several batches per step and several processes.

It uses only the methods `batches`, `steps`, `targets`, `begins_stage`, `parts`, `after_update` and `after_step` of
models. It does not validate and touches no files.
"""

import itertools
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from fastcl.recsys.data import Split
from fastcl.recsys.data.scoring import check_items, check_not_frozen
from fastcl.recsys.evaluation.measures import WITHOUT_K
from fastcl.recsys.models import Model
from fastcl.recsys.models.base import UserModel
from fastcl.recsys.training import processes
from fastcl.recsys.training.rowadam import RowAdam
from fastcl.recsys.training.state import SCHEDULES, Progress, Settings

T = TypeVar("T")


@dataclass
class Run:
    """A training under way.

    folder: None where nothing is written. rate: one of `state.SCHEDULES`, or a function like these. facts: the facts
    about the run that its tensor files hold (`state.facts_of`).
    """

    model: Model
    split: Split
    settings: Settings
    folder: Path | None
    optimizer: RowAdam
    progress: Progress
    rate: Callable[[float, int], float]
    facts: dict[str, str] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """Optimiser steps per epoch."""
        return -(-self.model.steps(self.split.train) // self.settings.accumulate)


def new_run(
    model: Model,
    split: Split,
    settings: Settings,
    folder: Path | None = None,
    betas: tuple[float, float] = (0.9, 0.98),
    rate: Callable[[float, int], float] | None = None,
) -> Run:
    """A training that has not begun. Raises what `check` raises.

    rate: as in `Run`; None: the schedule of the settings.

    beta2 is 0.98 as in the code of the papers on CLRec and ContrastVAE: with 0.999 rarely clicked items move too far.
    """
    check(model, split, settings)
    optimizer = RowAdam(model, lr=settings.lr, betas=betas)
    return Run(model, split, settings, folder, optimizer, Progress(), rate or SCHEDULES[settings.schedule])


def check(model: Model, split: Split, settings: Settings) -> None:
    """ValueError where `model` and `split` have different item tables, where there is nothing to train on, where a
    `frozen` block holds the model, where `patience` is given without validation cases, or for a metric that these
    cases do not have.
    """
    check_not_frozen(model)
    check_metric(split, settings.metric)
    if settings.patience is not None and not len(split.valid):
        raise ValueError(f"patience: expected none for a split without validation cases, got {settings.patience}")
    check_items(model, split.train, "split")
    if isinstance(model, UserModel):
        model.check_users(split.train)
    if not model.learns and settings.epochs != 1:
        what = f"1 for {model.name}, which counts the clicks in one pass"
        raise ValueError(f"epochs: expected {what}, got {settings.epochs}")
    if not model.steps(split.train):
        longest = int(split.train.lengths.max(initial=0))
        raise ValueError(f"split: nothing to train on: expected a train history of at least 2 clicks, got {longest}")


def check_metric(split: Split, metric: str) -> None:
    """ValueError for a metric without a cut-off where validation cases have several targets."""
    if metric in WITHOUT_K and len(split.valid) and split.valid.offsets is not None:
        expected = "expected one with a cut-off where cases have several targets"
        raise ValueError(f"metric: {expected}, got {metric!r}")


def epoch(run: Run, save: Callable[[], None] = lambda: None, label: str = "") -> dict[str, float]:
    """Trains the rest of the epoch that `run.progress` is in; returns each part of the loss, averaged over its steps.

    save: called between two steps once `save_every` seconds have passed since the last call. label: label of the bar on
    a terminal; "": no bar.
    """
    model, settings, progress = run.model, run.settings, run.progress
    number = len(progress.history) + 1
    if progress.step == 0:
        # Each process draws its own dropout; the order of the batches is the same in all.
        torch.manual_seed(int(np.random.SeedSequence((settings.seed, number, processes.rank())).generate_state(1)[0]))
    batches = model.batches(run.split.train, np.random.default_rng((settings.seed, number)))
    groups = itertools.islice(_grouped(batches, settings.accumulate), progress.step, None)
    model.train()
    names = model.part_names
    total = torch.tensor(progress.total or [0.0] * len(names), dtype=torch.float64, device=model.device)
    stalls = progress.stalls(settings)
    begun, before = time.perf_counter(), progress.seconds
    saved = begun
    steps = run.steps
    with run.optimizer.reading():
        for group in _bar(groups, steps, progress.step, label):
            done = (number - 1) * steps + progress.step
            for options in run.optimizer.param_groups:
                options["lr"] = settings.lr * run.rate(done / (settings.epochs * steps), stalls)
            total += step(run, group)
            progress.step += 1
            late = time.perf_counter() - saved >= settings.save_every
            if run.folder is not None and progress.step < steps and processes.decided(late):
                progress.total = _finite(total.tolist(), number, settings.lr)
                progress.seconds = before + time.perf_counter() - begun
                save()
                saved = time.perf_counter()
    progress.total = _finite(total.tolist(), number, settings.lr)
    progress.seconds = before + time.perf_counter() - begun
    return {name: part / max(steps, 1) for name, part in zip(names, progress.total, strict=True)}


def step(run: Run, batches: list[Any]) -> Tensor:
    """One optimiser step. Returns the parts of its loss as means over the targets of all batches in all processes."""
    model, optimizer = run.model, run.optimizer
    precision = torch.autocast(model.device.type, torch.bfloat16, enabled=run.settings.precision == "bfloat16")
    alone = len(batches) == 1 and processes.count() == 1
    weights = [1 if alone else model.targets(batch) for batch in batches]
    optimizer.zero_grad()
    if any(model.begins_stage(batch) for batch in batches):
        optimizer.forget()
    # `part_names` gives the number of parts without a batch, so that a process whose share is empty can add zeros.
    sums = torch.zeros(len(model.part_names) + 1, dtype=torch.float64, device=model.device)
    for batch, weight in zip(batches, weights, strict=True):
        if optimizer.tables:
            optimizer.read(model.reads(batch))
        if weight or optimizer.shared:
            with precision:
                parts = model.parts(batch)
                terms = torch.stack([parts[name] for name in model.part_names])
                loss = terms.sum()
            (loss if alone else loss * weight).backward()
            sums += weight * torch.cat([terms.detach().double(), sums.new_ones(1)])
        if batch is not batches[-1]:
            _after_step(run, batch, weight)
    if not alone:
        sums = processes.add(sums)
        processes.add_gradients(model.parameters())
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= sums[-1]
    optimizer.step()
    optimizer.step_rows(1.0 if alone else 1.0 / float(sums[-1]))
    model.after_update()
    _after_step(run, batches[-1], weights[-1])
    return sums[:-1] / sums[-1]


def _after_step(run: Run, batch: Any, weight: int) -> None:
    """Rows are fetched by all processes, one without targets too."""
    after = run.model.reads_after(batch)
    if after:
        run.optimizer.look(after)
    if weight:
        run.model.after_step(batch)


def _finite(parts: list[float], number: int, lr: float) -> list[float]:
    loss = sum(parts)
    if not math.isfinite(loss):
        raise FloatingPointError(
            f"loss: expected a finite number, got {loss} in epoch {number}; try a lower lr than {lr}"
        )
    return parts


def _grouped(batches: Iterator[T], size: int) -> Iterator[list[T]]:
    while group := list(itertools.islice(batches, size)):
        yield group


def _bar(batches: Iterable[T], total: int, done: int, label: str) -> Iterable[T]:
    if label and sys.stderr.isatty():
        try:
            from tqdm import tqdm
        except ImportError:
            return batches
        return tqdm(batches, total=total, initial=done, desc=label, leave=False, file=sys.stderr)
    return batches
