"""Runs of no size for tests of run folders: their settings, their items, and a table to train on."""

from __future__ import annotations

from pathlib import Path

from fastcl.recsys import Items

TINY = {"dim": 4, "heads": 1, "blocks": 1, "max_len": 4, "batch": 8}
ITEMS = Items(tuple(f"i{n}" for n in range(9)))


def write_table(folder: Path) -> Path:
    """Nine users, nine items, in log.csv."""
    path = folder / "log.csv"
    rows = [f"u{user},i{(user * 3 + step) % 9},{1000 * user + step}" for user in range(9) for step in range(5)]
    path.write_text("\n".join(["user,item,time", *rows]) + "\n")
    return path
