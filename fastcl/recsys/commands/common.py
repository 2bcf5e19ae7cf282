"""What several commands share: reading the data a run was made from, and lists of numbers among the options."""

from typing import Any

from fastcl.recsys.data import Interactions, bundled
from fastcl.recsys.options import at_least

BUNDLED = "bundled:"
DATA_OPTIONS = ("user", "item", "time", "format")


def read_data(data: dict[str, Any]) -> Interactions:
    """The log that config.json's "data" describes: its path (or bundled:NAME) and how to read it."""
    path = data["path"]
    if path.startswith(BUNDLED):
        return bundled(path.removeprefix(BUNDLED))
    return Interactions.read(path, **{name: data[name] for name in DATA_OPTIONS if name in data})


def cutoffs(option: str, text: str) -> tuple[int, ...]:
    """"10,50" -> (10, 50)."""
    try:
        k = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{option}: expected whole numbers separated by commas, got {text!r}") from None
    for cutoff in k:
        at_least(1, option, cutoff)
    return k
