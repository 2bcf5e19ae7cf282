"""Checks of option values and the parsing of `key=value` settings into the fields of a config dataclass.

Every error names the option, what was expected and what came. Nothing here knows a particular model.
"""

import contextlib
import dataclasses
import difflib
import enum
import math
import types
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


def up_to(high: float, name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}: expected a number, got {value!r}")
    if not 0.0 <= value <= high:
        raise ValueError(f"{name}: expected from 0 to {high:g}, got {value}")


def one_of(choices: Iterable[str], name: str, value: str) -> None:
    if value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {value!r}")


def near(name: str, names: Sequence[str]) -> str:
    """The hint for a name that is none of `names`: the names that look like it, or all names.

    >>> near("dmi", ["dim", "heads"])
    'did you mean dim?'
    """
    alike = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(alike)}?" if alike else f"expected one of {', '.join(names)}"


def parse_settings(config: type, settings: Sequence[str]) -> dict[str, Any]:
    """["key=value", ...] -> {key: value in the type of the dataclass field}; ValueError for anything else.

    A field may be an int, float, str, bool ("true", "false"), Enum (a member's name) or Literal, None ("none"), a tuple
    of such types (values separated by commas), or a union of them.

    >>> from fastcl.recsys import SASRecConfig
    >>> parse_settings(SASRecConfig, ["dim=32", "dropout=0.1"])
    {'dim': 32, 'dropout': 0.1}
    """
    fields = [field.name for field in dataclasses.fields(config) if field.init]
    parsed: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            raise ValueError(f"--set: expected key=value, got {setting!r}")
        if key not in fields:
            raise ValueError(f"--set: {config.__name__} has no field {key!r}; {near(key, fields)}")
        if key in parsed:
            raise ValueError(f"--set: expected each key once, got {key!r} twice")
        kind = typing.get_type_hints(config)[key]
        try:
            wanted = _wanted(kind)
        except TypeError as unknown:
            raise ValueError(
                f"--set {key}: {config.__name__} declares it as {unknown}, which no text stands for"
            ) from None
        try:
            parsed[key] = _convert(text, kind)
        except ValueError:
            raise ValueError(f"--set {key}: expected {wanted}, got {text!r}") from None
    return parsed


def choices_of(config: type, settings: Sequence[str]) -> dict[str, list[Any]]:
    """["key=a,b", ...] -> {key: the values, each as `parse_settings` has it}. The values of a setting that is itself a
    list are separated by "/".

    >>> from fastcl.recsys import ContrastVAEConfig
    >>> choices_of(ContrastVAEConfig, ["lr=0.001,0.003", "augment=mask/crop,mask"])
    {'lr': [0.001, 0.003], 'augment': [('mask',), ('crop', 'mask')]}
    """
    found: dict[str, list[Any]] = {}
    hints = typing.get_type_hints(config)
    for setting in settings:
        key, equals, text = setting.partition("=")
        parts = text.split("/" if _is_list(hints.get(key)) else ",")
        for part in parts if equals else [text]:
            parsed = parse_settings(config, [f"{key}{equals}{part}"])
            if key in found and part is parts[0]:
                raise ValueError(f"--set: expected each key once, got {key!r} twice")
            found.setdefault(key, []).append(parsed[key])
    return found


_BOOLS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_SIMPLE = {int: "a whole number", float: "a number", bool: "true or false", type(None): "none", str: "a text"}


def _wanted(kind: Any) -> str:
    """A type in words; TypeError, with the name of the type, where no text can stand for its values."""
    choices = _choices(kind)
    if kind in _SIMPLE:
        return _SIMPLE[kind]
    if choices is not None:
        return f"one of {', '.join(choices)}"
    parts = [_wanted(part) for part in _parts(kind) if part is not Ellipsis]
    if not _is_tuple(kind):
        return " or ".join(parts)
    return f"values separated by commas, each {parts[0]}" if ... in _parts(kind) else f"{', '.join(parts)}, with commas"


def _convert(text: str, kind: Any) -> Any:
    """The text as a value of a type that `_wanted` accepts; ValueError where the text stands for no value of it."""
    choices = _choices(kind)
    if kind is bool or kind is type(None) or choices is not None:
        words = _BOOLS if kind is bool else {"none": None} if choices is None else choices
        if text not in words and text.lower() not in words:
            raise ValueError(text)
        return words.get(text, words.get(text.lower()))
    if kind in _SIMPLE:
        return kind(text)
    parts = list(_parts(kind))
    if _is_tuple(kind):
        cells = [cell for cell in text.split(",") if cell.strip()]
        kinds = parts[:1] * len(cells) if ... in parts else parts
        return tuple(_convert(cell, part) for cell, part in zip(cells, kinds, strict=True))
    for part in sorted(parts, key=lambda part: part is str):  # str comes last, since it takes any text
        with contextlib.suppress(ValueError):
            return _convert(text, part)
    raise ValueError(text)


def _choices(kind: Any) -> dict[str, Any] | None:
    """text -> value, for a Literal or an Enum; None for other types."""
    if typing.get_origin(kind) is typing.Literal:
        return {str(choice): choice for choice in typing.get_args(kind)}
    return dict(kind.__members__) if isinstance(kind, type) and issubclass(kind, enum.Enum) else None


def _is_tuple(kind: Any) -> bool:
    return typing.get_origin(kind) is tuple


def _is_list(kind: Any) -> bool:
    """Whether values of the type are written with commas."""
    return _is_tuple(kind) or (
        typing.get_origin(kind) in (typing.Union, types.UnionType) and any(map(_is_tuple, typing.get_args(kind)))
    )


def _parts(kind: Any) -> tuple[Any, ...]:
    if not _is_tuple(kind) and typing.get_origin(kind) not in (typing.Union, types.UnionType):
        raise TypeError(getattr(kind, "__name__", kind) if isinstance(kind, type) else kind)
    return typing.get_args(kind)
