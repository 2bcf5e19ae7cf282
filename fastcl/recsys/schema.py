"""The content of the JSON files of a run folder as types. Each file is checked against its type before it is used.

A type is a dataclass or an annotation. `Settings` and the models' Configs check the ranges of values. A value that does
not fit is a ValueError that names the file and the field.
"""

import dataclasses
import inspect
import json
import math
import re
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

DEPTH = 16  # the most levels of what a caller records in config.json


@dataclasses.dataclass
class Config:
    """config.json as `save` writes it. `fit` adds the fields of `Settings`, callers add any fields (`record`)."""

    format: Literal["fastcl-run"]
    version: int
    model: str
    config: dict[str, Any]
    versions: dict[str, str]


@dataclasses.dataclass
class Origin:
    """The earlier run whose weights a training began with."""

    run: str
    sha256: str

    others: ClassVar[Any] = int


@dataclasses.dataclass
class Recorded:
    """Further fields of config.json that commands read. "data" and "split" are checked where they are used."""

    seen: Literal["mask", "keep"] = "mask"
    seed: int = 0
    data_sha256: str | None = None
    test_sha256: str | None = None
    log: list[str] = dataclasses.field(default_factory=list)
    init: Origin | None = None


@dataclasses.dataclass
class FeatureTable:
    values: list[str]
    codes: list[list[int]]


@dataclasses.dataclass
class ItemTable:
    """items.json. users: the user ids of a `UserModel`."""

    ids: list[str]
    titles: list[str] | None
    features: dict[str, FeatureTable]
    users: list[str] | None = None


@dataclasses.dataclass
class Line:
    """A line of metrics.jsonl, which is an epoch. Further fields are metrics, or parts of the loss by name."""

    epoch: int
    loss: float
    best: bool

    others: ClassVar[Any] = float | dict[str, float]


@dataclasses.dataclass
class Standing:
    """The progress that last.safetensors holds, as `state.Progress` has it."""

    history: list[Line]
    step: int
    total: list[float]
    seconds: float


def parse(text: str | bytes, where: str) -> Any:
    """The JSON document in `text`; ValueError "WHERE: damaged (...)" for other text, for too deep nesting and for half
    a character, which no path and no file can hold.
    """
    try:
        document = json.loads(text)
        if re.search(rb"\\u[dD][89a-fA-F]", text.encode() if isinstance(text, str) else text):
            # "surrogateescape": the bytes of a path that are no UTF-8.
            json.dumps(document, ensure_ascii=False).encode(errors="surrogateescape")
        return document
    except RecursionError:
        raise ValueError(f"{where}: damaged (nested too deeply)") from None
    except ValueError as error:
        raise ValueError(f"{where}: damaged ({error})") from error


def fits(value: Any, hint: Any, where: str) -> None:
    """Raises ValueError "WHERE: expected ..., got ..." where `value`, as JSON gives it, is not of the type `hint`."""
    if dataclasses.is_dataclass(hint):
        _fields_fit(value, hint, where)
    elif hint is Any:
        _plain(value, where)
    elif typing.get_origin(hint) in (typing.Union, types.UnionType):
        _one_fits(value, typing.get_args(hint), where)
    elif typing.get_origin(hint) is Literal:
        choices = typing.get_args(hint)
        if not any(type(value) is type(choice) and value == choice for choice in choices):
            raise _unexpected(where, f"one of {', '.join(map(str, choices))}", value)
    elif typing.get_origin(hint) in (dict, Mapping):
        of = typing.get_args(hint)[1]
        for key, part in _typed(value, dict, where).items():
            fits(part, of, f"{where}: {short(key)}")
    elif typing.get_origin(hint) in (list, tuple, Sequence):
        _list_fits(_typed(value, list, where), typing.get_args(hint)[0], where)
    else:
        _typed(value, hint, where)


def lines_fit(lines: Any, where: str, needed: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The lines, checked: they are those of epochs 1, 2, ..., have the same fields, which include `needed`, and the
    first is the best so far.
    """
    fits(lines, list[Line], where)
    for nth, line in enumerate(lines, start=1):
        missing = [name for name in needed if type(line.get(name)) not in (int, float)]
        parts = [{name: set(part) for name, part in x.items() if type(part) is dict} for x in (line, lines[0])]
        if missing or line.keys() != lines[0].keys() or parts[0] != parts[1]:
            asked = f"a number {missing[0]}" if missing else "the fields of the first one"
            raise ValueError(f"{where}: entry {nth}: expected {asked}, got others")
        if line["epoch"] != nth or (nth == 1 and not line["best"]):
            raise ValueError(f"{where}: entry {nth}: expected the line of epoch {nth}, got another")
    return list(lines)


def keys_fit(value: Mapping[str, Any], function: Any, where: str, skip: Sequence[str] = ()) -> None:
    """`fits` for keyword arguments: their names and types must be those of `function`, or of a dataclass's fields."""
    try:
        hints = typing.get_type_hints(function)
    except NameError:  # an annotation uses a name that is imported for type checkers only
        hints = {}
    names = [name for name in inspect.signature(function).parameters if name not in skip]
    for name, part in value.items():
        if name not in names:
            raise ValueError(f"{where}: expected one of {', '.join(names)}, got {short(name)}")
        fits(part, hints.get(name, Any), f"{where}: {name}")


def short(value: Any) -> str:
    """A value as a message shows it."""
    text = repr(value) if isinstance(value, str | int | float | bool | None) else type(value).__name__
    text = {"list": "a list", "dict": "a table"}.get(text, text)
    return text if len(text) <= 60 else f"{text[:57]}..."


_WORDS: dict[Any, str] = {
    int: "a whole number", float: "a finite number", str: "text", bool: "true or false", list: "a list",
    dict: "a table", type(None): "null",
}  # fmt: skip


def _typed(value: Any, kind: Any, where: str) -> Any:
    if kind not in _WORDS:
        return value  # a type that JSON lacks; the model's own Config checks the value
    if kind is float and type(value) in (int, float):
        try:
            good = math.isfinite(value)
        except OverflowError:
            good = False
    else:
        good = type(value) is kind and not (kind is int and abs(value) >= 2**63)
    if not good:
        raise _unexpected(where, _WORDS[kind], value)
    return value


def _fields_fit(value: Any, hint: Any, where: str) -> None:
    hints = typing.get_type_hints(hint)
    fields = {field.name: field for field in dataclasses.fields(hint)}
    for name, part in _typed(value, dict, where).items():
        if name in fields:
            fits(part, hints[name], f"{where}: {name}")
        else:
            fits(part, getattr(hint, "others", Any), f"{where}: {short(name)}")
    for name, field in fields.items():
        if name not in value and field.default is field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{where}: expected a field {name}, got none")


def _list_fits(value: list[Any], of: Any, where: str) -> None:
    # items.json is mostly long lists of text and of numbers, which this loop checks fast.
    if of is str and all(type(part) is str for part in value):
        return
    for nth, part in enumerate(value, start=1):
        fits(part, of, f"{where}: entry {nth}")


def _one_fits(value: Any, hints: Sequence[Any], where: str) -> None:
    for hint in hints:
        try:
            return fits(value, hint, where)
        except ValueError:
            pass
    kinds = [dict if dataclasses.is_dataclass(hint) else typing.get_origin(hint) or hint for hint in hints]
    words = [_WORDS.get(kind, str(hint)) for kind, hint in zip(kinds, hints, strict=True)]
    raise _unexpected(where, " or ".join(words), value)


def _plain(value: Any, where: str) -> None:
    """ValueError where the nesting is deeper than DEPTH: code that handles the value later is recursive."""
    level = [value]
    for _ in range(DEPTH):
        level = [part for x in level for part in (x.values() if type(x) is dict else x if type(x) is list else ())]
        if not level:
            return
    raise ValueError(f"{where}: expected at most {DEPTH} levels, got more")


def _unexpected(where: str, expected: str, value: Any) -> ValueError:
    return ValueError(f"{where}: expected {expected}, got {short(value)}")
