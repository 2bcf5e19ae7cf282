"""Where a run's data comes from: what config.json calls "data" and "split", read again whenever it is asked for.

It knows which reader serves a path and which paths cannot be read twice; no command line and no models here.
"""

import os
import stat
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from fastcl.recsys import schema
from fastcl.recsys.data import Interactions, Split, bundled
from fastcl.recsys.data.interactions import OF_ITEMS
from fastcl.recsys.data.merging import merge
from fastcl.recsys.data.reading.formats import Options, named_format

BUNDLED = "bundled:"
PIPE = "pipe:"  # in front of a path that was read and cannot be read again
READ = tuple(field.name for field in fields(Options))
FEATURES = ("item_features", *OF_ITEMS)
STDIN = "/dev/stdin"
FILES = ("path", "valid", "test", "item_features")


def at(data: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The same "data" with its clicks at another path, whose format is that of the first one where its name, as that of
    a pipe, tells none."""
    told = data.get("format") or data.get("delimiter") or named_format(Path(path))
    alike = {} if told else {"format": named_format(Path(data.get("path", "")))}
    return {**data, "path": path, **alike}


def lasting(data: Mapping[str, Any]) -> dict[str, Any]:
    """The same "data" for a config.json: what was a pipe is marked, since it cannot be read again."""
    return {**data, **{name: f"{PIPE}{data[name]}" for name in FILES if data.get(name) and _is_pipe(data[name])}}


def _is_pipe(path: str) -> bool:
    try:
        mode = os.stat(path).st_mode
    except OSError:  # bundled:NAME, or a file that is gone by now
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _refuse_pipes(data: Mapping[str, Any]) -> None:
    for name in FILES:
        path = data.get(name) or ""
        if path.startswith(PIPE):
            what = "data" if name == "path" else name
            hint = "expected a file that holds the same: --data FILE" if name == "path" else "expected a file"
            raise FileNotFoundError(f"{what}: was read from the pipe {path.removeprefix(PIPE)}, which is gone; {hint}")


def read_data(data: dict[str, Any]) -> Interactions:
    """The log that config.json's "data" describes: its path (or bundled:NAME) and how to read it."""
    path = checked_data(data)["path"]
    _refuse_pipes(data)
    if path.startswith(BUNDLED):
        try:
            return bundled(path.removeprefix(BUNDLED))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
    return Interactions.read(path, **_options(data))


def read_clicks(config: Mapping[str, Any], *paths: str) -> Interactions:
    """The logs at `paths` (none: the run's own, with the files that it validates and tests on) as one, read as the
    run's was; without its item features, which may have moved: the model has them.
    """
    whole = checked_data(config["data"]) if config.get("data") else {}
    data = {name: value for name, value in whole.items() if name not in FEATURES}
    own = [data[name] for name in ("path", "valid", "test") if data.get(name)]
    return merge(*(read_data(at(data, path)) for path in paths or own))


def read_split(config: Mapping[str, Any]) -> Split:
    """The split that config.json describes: its "data", read as recorded and split as its "split" says."""
    if config.get("data") is None:
        raise ValueError("split: expected the data of the run, which its config.json does not name, got None")
    data = checked_data(config["data"])
    _refuse_pipes(data)
    if data.get("valid"):
        return Interactions.presplit(data["path"], data["valid"], data["test"], **_options(data))
    return read_data(data).split(**split_options(config))


def split_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json's "split", with the types that splitting expects; ValueError otherwise."""
    how = {} if config.get("split") is None else config["split"]
    schema.fits(how, dict[str, Any], "config.json: split")
    schema.keys_fit(how, Interactions.split, "config.json: split", skip=("self",))
    return dict(how)


def checked_data(data: Any) -> dict[str, Any]:
    """config.json's "data", with the types that reading expects; ValueError otherwise."""
    where = "config.json: data"
    schema.fits(data, dict[str, Any], where)
    if not data.get("path"):
        raise ValueError(f"{where}: expected a path, got none")
    given = {name: data[name] for name in (*READ, *OF_ITEMS) if name in data}
    schema.keys_fit(given, Interactions.read, where, skip=("cls", "source"))
    for name in FILES:
        schema.fits(data.get(name), str | None, f"{where}: {name}")
    return {**data, "path": STDIN if data["path"] == "-" else data["path"]}


def _options(data: dict[str, Any]) -> dict[str, Any]:
    return {name: data[name] for name in (*READ, *FEATURES) if name in data}


def read_split_of(folder: Path, config: Mapping[str, Any], path: str | Path | None = None) -> Split:
    """The split of a run, its data read as in training, from `path` where it is elsewhere now.

    ValueError where config.json names no data or describes it wrongly, FileNotFoundError where it is not there.
    """
    data = of_run(folder, config, path)
    try:
        return read_split({**config, "data": data})
    except FileNotFoundError as error:
        if error.filename is None:
            raise  # it says itself what is not there: a pipe, or a bundled set
        raise FileNotFoundError(
            f"{error.filename}: the data of {folder} is not there; --data FILE says where it is"
        ) from error


def of_run(folder: Path, config: Mapping[str, Any], path: str | Path | None) -> dict[str, Any]:
    data = config.get("data")
    if path is None and data is None:
        raise ValueError(f"{folder}: its config.json names no data; expected --data FILE")
    known = checked_data(data) if data else {}
    return at(known, str(path)) if path else known
