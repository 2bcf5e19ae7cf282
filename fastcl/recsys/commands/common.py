"""What several commands share: reading the data a run was made from, and lists of numbers among the options."""

from collections.abc import Mapping
from typing import Any

from fastcl.recsys.data import Interactions, Split, bundled
from fastcl.recsys.options import at_least

BUNDLED = "bundled:"
DATA_OPTIONS = ("user", "item", "time", "format")


def read_data(data: dict[str, Any]) -> Interactions:
    """The log that config.json's "data" describes: its path (or bundled:NAME) and how to read it."""
    path = data["path"]
    if path.startswith(BUNDLED):
        return bundled(path.removeprefix(BUNDLED))
    return Interactions.read(path, **{name: data[name] for name in DATA_OPTIONS if name in data})


def read_split(config: Mapping[str, Any]) -> Split:
    """The split that the run of this config.json was made from."""
    if "data" not in config:
        raise ValueError("split: expected the data of the run, which its config.json does not name, got None")
    return read_data(config["data"]).split()


def cutoffs(option: str, text: str) -> tuple[int, ...]:
    """"10,50" -> (10, 50)."""
    return whole_numbers(option, text, low=1)


def whole_numbers(option: str, text: str, low: int) -> tuple[int, ...]:
    """"1,2,3" -> (1, 2, 3), none below `low`."""
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{option}: expected whole numbers separated by commas, got {text!r}") from None
    for number in numbers:
        at_least(low, option, number)
    return numbers
