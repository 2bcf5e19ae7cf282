"""Checks of option values and the parsing of `key=value` settings into the fields of a config dataclass.

Every refusal names the option, what was expected and what came. Nothing here knows a particular model.
"""

import dataclasses
import difflib
import math
import typing
from collections.abc import Iterable, Sequence
from typing import Any


def at_least(low: int, name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected a whole number, got {value!r}")
    if value < low:
        raise ValueError(f"{name}: expected at least {low}, got {value}")


def above(low: float, name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}: expected a number, got {value!r}")
    if not (value > low and math.isfinite(value)):
        raise ValueError(f"{name}: expected a finite number above {low:g}, got {value}")


def between(low: float, high: float, name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}: expected a number, got {value!r}")
    if not low <= value < high:
        raise ValueError(f"{name}: expected at least {low:g} and below {high:g}, got {value}")


def one_of(choices: Iterable[str], name: str, value: str) -> None:
    if value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {value!r}")


def parse_settings(config: type, settings: Sequence[str]) -> dict[str, Any]:
    """["key=value", ...] -> {key: value in the type of the dataclass field}; ValueError for anything else.

    >>> from fastcl.recsys import SASRecConfig
    >>> parse_settings(SASRecConfig, ["dim=32", "dropout=0.1"])
    {'dim': 32, 'dropout': 0.1}
    """
    types = typing.get_type_hints(config)
    fields = [field.name for field in dataclasses.fields(config)]
    parsed: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            raise ValueError(f"--set: expected key=value, got {setting!r}")
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=3, cutoff=0.5)
            hint = f"did you mean {' or '.join(near)}?" if near else f"expected one of {', '.join(fields)}"
            raise ValueError(f"--set: {config.__name__} has no field {key!r}; {hint}")
        if key in parsed:
            raise ValueError(f"--set: expected each key once, got {key!r} twice")
        parsed[key] = _convert(key, text, types[key])
    return parsed


def _convert(key: str, text: str, kind: Any) -> Any:
    try:
        if typing.get_origin(kind) is tuple:
            return tuple(typing.get_args(kind)[0](part) for part in text.split(",") if part.strip())
        return kind(text)
    except ValueError:
        wanted = {int: "a whole number", float: "a number"}.get(kind, "numbers separated by commas")
        raise ValueError(f"--set {key}: expected {wanted}, got {text!r}") from None
