"""Logs as tests write them to files and look at them again: histories as lists, users and items by name."""

import gzip
import lzma
from pathlib import Path

import pytest

from fastcl.recsys.data import Histories, Interactions

# MovieLens is in the repository and in no archive that is made of it.
MOVIES = Path(__file__).parents[1] / "data" / "movielens-small"
needs_movies = pytest.mark.skipif(not MOVIES.is_dir(), reason="needs data/movielens-small of the repository")


def lists(histories: Histories) -> list[list[int]]:
    bounds = histories.offsets.tolist()
    return [histories.item[a:b].tolist() for a, b in zip(bounds, bounds[1:], strict=False)]


def times(histories: Histories) -> list[list[float]]:
    assert histories.time is not None
    bounds = histories.offsets.tolist()
    return [histories.time[a:b].tolist() for a, b in zip(bounds, bounds[1:], strict=False)]


def named(data: Interactions) -> dict[str, list[str]]:
    return {
        user: [data.items.ids[item - 1] for item in row] for user, row in zip(data.users, lists(data.log), strict=True)
    }


def write(path: Path, data: str | bytes) -> Path:
    raw = data.encode() if isinstance(data, str) else data
    opener = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    with opener(path, "wb") as file:
        file.write(raw)
    return path
