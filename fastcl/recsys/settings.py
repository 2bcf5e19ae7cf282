"""Settings of a model: dataclass fields that carry their meaning, and the checks and help texts made of them.

A setting is described only where it is declared. Nothing here knows a particular model; options.py reads the command
line.
"""

import dataclasses
import inspect
import textwrap
import typing
from collections.abc import Collection
from typing import Any, NamedTuple, TypeVar

from fastcl.recsys.options import near, one_of

T = TypeVar("T")
C = TypeVar("C")


class Setting(NamedTuple):
    """One field of a config dataclass, in words."""

    name: str
    type: str
    default: str  # as Python writes it; "" where there is none
    meaning: str  # "" for a field that was declared without `setting`


def setting(default: T, meaning: str, choices: Collection[str] = ()) -> T:
    """A dataclass field with its default and its meaning, one or more whole sentences.

    choices: the names that a text field may have; `check_choices` refuses others. They are read when a config is made,
        so that a table may grow.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Config:
    ...     dim: int = setting(64, "Width of the vectors.")
    >>> Config(dim=8), settings_of(Config)[0].meaning
    (Config(dim=8), 'Width of the vectors.')
    """
    metadata = {"meaning": " ".join(meaning.split()), "choices": choices}
    # The cast tells type checkers the type of the default; at run time the dataclass gets a field.
    return typing.cast(T, dataclasses.field(default=default, metadata=metadata))


def check_choices(config: Any) -> None:
    """ValueError for a field whose value is not among its choices."""
    for field in dataclasses.fields(config):
        if field.metadata.get("choices"):
            one_of(field.metadata["choices"], field.name, getattr(config, field.name))


def settings_of(config: type) -> list[Setting]:
    """The fields of a config dataclass in their order."""
    types = typing.get_type_hints(config)
    return [
        Setting(
            field.name,
            _type_name(types[field.name]),
            "" if field.default is dataclasses.MISSING else repr(field.default),
            field.metadata.get("meaning", ""),
        )
        for field in dataclasses.fields(config)
        if field.init
    ]


def described(config: type, width: int = 88) -> str:
    """All settings as text for `help`, each with its type, its default and its meaning."""
    lines = []
    for one in settings_of(config):
        default = f" = {shortened(one.default)}" if one.default else ""
        lines += textwrap.wrap(f"{one.name}: {one.type}{default}", width, subsequent_indent=" " * 8)
        lines += textwrap.wrap(
            one.meaning, width, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False
        )
    return "\n".join(lines)


def shortened(default: str) -> str:
    """A default that fits in a line; a long tuple is shortened to its first and last entries."""
    return default if len(default) < 60 else f"{default[:24].rpartition(',')[0]}, ... {default[-20:].partition(' ')[2]}"


def with_settings(doc: str | None, config: type) -> str:
    """A docstring with the settings of `config` behind it, if it has any."""
    if not settings_of(config):
        return f"{inspect.cleandoc(doc or '')}\n"
    return f"{inspect.cleandoc(doc or '')}\n\nSettings:\n{textwrap.indent(described(config), '    ')}\n"


def settled(kind: type[C], config: C | None, options: dict[str, Any]) -> C:
    """The config of a model that is made with `config` or with `options`, the fields of `kind`.

    Raises TypeError for both at once, for a config of another kind, and for an option that is no field.
    """
    if config is None:
        names = [one.name for one in settings_of(kind)]
        for name in options:
            if name not in names:
                raise TypeError(f"{name}: {kind.__name__} has no such setting; {near(name, names)}")
        return kind(**options)
    if not isinstance(config, kind):
        raise TypeError(f"config: expected {kind.__name__}, got {type(config).__name__}")
    if options:
        asked = ", ".join(options)
        raise TypeError(f"config: expected a {kind.__name__} or keywords, got both ({asked}); put them into the config")
    return config


def _type_name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind).replace("typing.", "")
