"""What one of two processes refuses, for test_torchrun.py, which forks for each.

Writes a line a case into said0 and said1: its name, the type of the error, the seconds until it came, its text.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fastcl.recsys import Interactions, SASRec, fit, resume, writing


def _case(said: Path, name: str, act: Callable[[], Any]) -> None:
    begun = time.perf_counter()
    try:
        act()
        kind, text = "none", ""
    except Exception as error:
        kind, text = type(error).__name__, str(error)
    with open(said, "a") as file:
        file.write(json.dumps([name, kind, time.perf_counter() - begun, text]) + "\n")


def main(rank: int, store: Path, table: Path, folder: Path) -> None:
    case = partial(_case, folder / f"said{rank}")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    split = Interactions.read(table, user="who", item="what", time="when").split()
    dist.barrier()  # one may have begun long before the other

    def train(of: Any = split, dim: int = 8, **options: Any) -> None:
        model = SASRec(split.items, seed=0, dim=dim, batch=16, max_len=5)
        fit(model, of, **{"epochs": 1, "progress": False, "out": folder / f"run{rank}", **options})

    case("out", lambda: train(out=folder / "taken" if rank == 0 else folder / "free"))
    case("split", lambda: train(of=split if rank == 0 else None))
    case("options", lambda: train(epochs=1 - rank))
    case("settings", lambda: train(lr=0.1 * (1 + rank)))
    case("models", lambda: train(dim=8 * (1 + rank)))
    case("record", lambda: train(record={"a": 1 if rank == 0 else {1}}))
    write = writing.write_set

    def full(*args: Any, **options: Any) -> None:
        raise OSError("no space")

    writing.write_set = full
    case("full", train)
    writing.write_set = write
    case("resume", lambda: resume(folder / f"none{rank}", split))
    case("end", lambda: train(out=folder / "end"))
    dist.destroy_process_group()
