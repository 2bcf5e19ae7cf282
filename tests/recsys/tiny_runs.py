"""Runs of no size for tests of run folders: their settings, items, a table to train on, and how they are stopped."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastcl.recsys import Items
from fastcl.recsys.training import state

TINY = {"dim": 4, "heads": 1, "blocks": 1, "max_len": 4, "batch": 8}
ITEMS = Items(tuple(f"i{n}" for n in range(9)))


def write_sequences(path: Path, users: int, items: int, length: int) -> None:
    """Users with random histories of different items, as "tiny.txt.gz" in the folder `path`, the format of studies."""
    rng = np.random.default_rng(0)
    lines = [" ".join(map(str, [n, *1 + rng.choice(items, length, replace=False)])) for n in range(1, users + 1)]
    with gzip.open(path / "tiny.txt.gz", "wt") as file:
        file.write("\n".join(lines) + "\n")


def write_table(folder: Path) -> Path:
    """Nine users, nine items, in log.csv."""
    path = folder / "log.csv"
    rows = [f"u{user},i{(user * 3 + step) % 9},{1000 * user + step}" for user in range(9) for step in range(5)]
    path.write_text("\n".join(["user,item,time", *rows]) + "\n")
    return path


@contextmanager
def stopped_after(saves: int) -> Iterator[None]:
    """Interrupts the training in the block after its state was saved `saves` times, which must come to pass."""
    save, done = state.save, 0

    def save_or_stop(*args: Any) -> None:
        nonlocal done
        save(*args)
        done += 1
        if done == saves:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "save", save_or_stop)
        with pytest.raises(KeyboardInterrupt):
            yield
