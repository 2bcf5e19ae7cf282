"""What several processes save of tables that they share out, for test_row_saves.py, which forks for each."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import rows_ranks
import torch

from fastcl.recsys import SASRec, Split, fit, resume
from fastcl.recsys.training import loop, parts, processes, state
from fastcl.recsys.training.rowadam import RowAdam
from fastcl.recsys.training.state import Settings

ROWS = 7


class Stop(Exception):
    """An interruption that meets every process at the same save."""


def saved(number: int, width: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """What the save of this number holds: a tensor that is alike in all processes, and one of ROWS rows."""
    rows = torch.arange(ROWS)[:, None] * 1000.0 + torch.arange(width) + 0.5 * number
    return torch.full((2,), float(number)), rows


def save_often(path: Path, saves: int, width: int = 3, done: Path | None = None) -> None:
    """Saves 0, 1, ...; `done` tells which of them all processes have seen to the end."""
    rank, count = processes.rank(), processes.count()
    for number in range(saves):
        alike, rows = saved(number, width)
        parts.write(path, {"alike": alike}, {"rows": rows[rank::count]}, {"number": str(number)})
        if done is not None and rank == 0:
            done.write_text(str(number))


def save_twice(path: Path, victim: int, point: int, told: Path) -> None:
    """A whole save, and one in which process `victim` is killed at its change of a name number `point`. One that has
    not so many changes writes `told`.
    """
    save_often(path, 1)
    left = point if processes.rank() == victim else 10**9
    true = {name: getattr(os, name) for name in ("replace", "unlink")}

    def counted(name: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal left
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
            return true[name](*args, **options)

        return call

    for name in true:
        setattr(os, name, counted(name))
    save_often(path, 2)
    if processes.rank() == victim:
        told.touch()


def go_on(folder: Path, out: Path | None, steps: int | None) -> None:
    """Trains SASRec in float64 from the state in `folder`, if there is one, to its end, or to the save after so many
    steps of this call. `out` gets the result of the first process.
    """
    data = rows_ranks.split()
    model = SASRec(data.items, seed=1, table="rows", **rows_ranks.SMALL[SASRec]).double()
    run = loop.new_run(model, data, Settings(2, 1e-2, save_every=0.0), folder)
    run.optimizer = RowAdam(model, 1e-2, (0.9, 0.98), eps=1e-6)
    model.share = (processes.rank(), processes.count())
    if (folder / state.LAST).exists():
        run.progress = state.restore(folder, model, run.optimizer)
    left = steps

    def save() -> None:
        nonlocal left
        if left is None:
            return
        left -= 1
        if left == 0:
            state.save(folder, model, run.optimizer, run.progress)
            raise Stop

    try:
        while len(run.progress.history) < 2:
            loop.epoch(run, save)
            line = {"epoch": len(run.progress.history) + 1, "loss": 1.0, "best": True}
            run.progress = state.Progress([*run.progress.history, line])
    except Stop:
        return
    run.optimizer.join()
    if out is not None and processes.leads():
        torch.save(model.state_dict(), out)


def small(data: Split) -> SASRec:
    """With dropout, whose random state is part of a checkpoint."""
    return SASRec(data.items, seed=1, table="rows", **{**rows_ranks.SMALL[SASRec], "dropout": 0.2})


def train(out: Path, stop: int | None = None, again: bool = False) -> None:
    """A training of two epochs that saves at each step; `stop`: interrupted at this save. again: goes on instead."""
    data = rows_ranks.split()
    save, left = state.save, stop

    def save_or_stop(*args: Any) -> None:
        nonlocal left
        if left == 0:
            raise Stop
        left = None if left is None else left - 1
        save(*args)

    state.save = save_or_stop
    try:
        if again:
            resume(out, data, progress=False)
        else:
            record = {"data": {"path": "log.csv", "time": ""}}  # a test that reads it says where it is
            fit(small(data), data, epochs=2, lr=1e-2, save_every=0.0, out=out, record=record, progress=False)
    except Stop:
        assert stop is not None
    state.save = save


def misread(folder: Path) -> None:
    """The second process reads a row that is in no table, in the middle of an epoch."""
    data, seen = rows_ranks.split(), 0

    class Misreading(SASRec):
        def reads(self, batch: Any) -> Any:
            nonlocal seen
            seen += 1
            wrong = torch.tensor([999 if processes.rank() == 1 and seen == 3 else 0])
            return [*super().reads(batch), (self.item, wrong)]

    model = Misreading(data.items, seed=1, table="rows", **rows_ranks.SMALL[SASRec])
    try:
        fit(model, data, epochs=1, progress=False)
        text = "none"
    except ValueError as error:
        text = str(error)
    (folder / f"said{processes.rank()}").write_text(text)
