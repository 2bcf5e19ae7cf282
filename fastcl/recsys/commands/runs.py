"""What evaluate, compare and plot share: run folders opened together with the one data set they were trained on."""

import argparse
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fastcl.recsys import checkpoint
from fastcl.recsys.commands.common import read_split
from fastcl.recsys.data import Split
from fastcl.recsys.metrics import SEEN
from fastcl.recsys.models import Model

# What config.json says beside the settings of a run: how, when and from where, not what was trained.
NO_SETTINGS = (
    *("format", "versions", "seed", "data", "data_sha256", "split", "command"),
    *("threads", "device", "processes", "save_every"),
)


class Run(NamedTuple):
    folder: Path
    config: dict[str, Any]
    model: Model


def add_run_options(parser: Any) -> None:
    option = parser.add_argument
    option("--data", metavar="FILE", help="where the data is now (default: where it was in training)")
    option("--seen", choices=SEEN, help="(default: as in training)")


def run_folders(*folders: str) -> list[Path]:
    """The folders themselves, or the runs in one where `train --seed 1,2,3` made several."""
    return [run for folder in folders for run in checkpoint.runs_in(Path(folder)) or [Path(folder)]]


def open_runs(folders: Sequence[Path], args: argparse.Namespace) -> tuple[list[Run], Split, str]:
    """The runs, their data, and how seen items are treated.

    ValueError where a run is named twice or cannot be compared with the first: on other data, or with other treatment
    of seen items and no --seen to decide.
    """
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise ValueError(f"RUN: expected different folders, got {' '.join(map(str, folders))}")
    configs = [checkpoint.read_config(folder) for folder in folders]
    treatments = sorted({config.get("seen", "mask") for config in configs})
    if args.seen is None and len(treatments) > 1:
        raise ValueError(f"RUN: trained with --seen {' and '.join(treatments)}; expected --seen for all")
    runs = [Run(folder, config, checkpoint.load(folder)) for folder, config in zip(folders, configs, strict=True)]
    splits: dict[str, Split] = {}
    for run in runs:
        place = json.dumps(_data(run, args.data), sort_keys=True)
        splits[place] = splits[place] if place in splits else _split(run, args.data)
        _check_items(run, splits[place])
    (first, split), *others = splits.items()
    for place, other in others:
        if _digest(other) != _digest(split):
            raise ValueError(f"RUN: expected runs on the same data, got {_path(first)} and {_path(place)}")
    return runs, split, args.seen or treatments[0]


def groups_of(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs that differ by their seed alone, together: the model's name, and where several groups have it, the settings
    by which they differ.
    """
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(json.dumps(_settings(run.config), sort_keys=True), []).append(run)
    names = {}
    for members in found.values():
        model = members[0].model.name
        alike = [_settings(other[0].config) for other in found.values() if other[0].model.name == model]
        own = _settings(members[0].config)
        apart = [key for key in own if any(other.get(key) != own[key] for other in alike)]
        names[" ".join([model, *(f"{key}={own[key]}" for key in apart)])] = members
    return names


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    flat = {key: value for key, value in config.items() if key not in (*NO_SETTINGS, "config")}
    return {**config["config"], **flat}


def _data(run: Run, path: str | None) -> dict[str, Any]:
    data = run.config.get("data")
    if path is None and data is None:
        raise ValueError(f"{run.folder}: its config.json names no data; expected --data FILE")
    return {**(data or {}), **({"path": path} if path else {})}


def _split(run: Run, path: str | None) -> Split:
    return read_split({**run.config, "data": _data(run, path)})


def _check_items(run: Run, split: Split) -> None:
    items = run.model.items.ids
    if split.items.ids != items:
        got = f"{len(split.items):,} others"
        raise ValueError(f"data: expected the {len(items):,} items of the run {run.folder}, got {got}")


def _digest(split: Split) -> str:
    digest = hashlib.sha256(json.dumps([split.items.ids, split.users]).encode())
    for array in (split.train.offsets, split.train.item, split.test.user, split.test.history.item, split.test.target):
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _path(place: str) -> str:
    return str(json.loads(place)["path"])
