"""What evaluate, compare, report and intents share: opening run folders with the data that they were trained on, and
notes that readers of the figures need.
"""

import argparse
import hashlib
import json
import sys
import warnings
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fastcl.recsys.data import Split, fingerprints
from fastcl.recsys.data.ids import digest_of
from fastcl.recsys.data.scoring import check_items
from fastcl.recsys.data.source import Source
from fastcl.recsys.data.splits import ITEMS, LeakageWarning
from fastcl.recsys.evaluation.ranking import SEEN
from fastcl.recsys.models import Model
from fastcl.recsys.models.carrying import with_items
from fastcl.recsys.training import checkpoint, parts, processes, state, validation

# Fields of config.json that do not tell runs of different settings apart: versions, seed, data, machine.
NO_SETTINGS = (
    *("format", "version", "versions", "seed", "data", "data_sha256", "test_sha256", "split"),
    *("command", "threads", "device", "processes", "save_every", "log"),
)


MANY = 0.05  # a larger share of repeated targets in the cases gets a note


class Run(NamedTuple):
    folder: Path
    config: dict[str, Any]
    model: Model


class Opened(NamedTuple):
    """seen: the treatment of seen items. notes: one sentence about each unusual fact."""

    runs: list[Run]
    split: Split
    seen: str
    notes: list[str]


def add_run_options(parser: Any) -> None:
    option = parser.add_argument
    option(
        "--data",
        metavar="FILE",
        help="where the data is now, or other data on purpose (default: where training found it)",
    )
    option(
        "--seen", choices=SEEN, help="mask: rank no item of the history; keep: rank them too (default: as in training)"
    )


def run_folders(*folders: str) -> list[Path]:
    """The folders; a folder in which `train --seed 1,2,3` made several runs is replaced by these runs."""
    return [run for folder in folders for run in checkpoint.runs_in(Path(folder)) or [Path(folder)]]


def inputs_of(folder: str | Path, config: Mapping[str, Any] | None = None) -> dict[str, str | Path]:
    """Description -> path of the run's own files and its data, which no output of a command may replace."""
    config = checkpoint.read_config(folder) if config is None else config
    names = [*checkpoint.FILES, *(part.name for part in parts.found_in(Path(folder)))]
    files = {f"{name} of the run": Path(folder) / name for name in names}
    return files | {f"the {name} of the run's data": path for name, path in Source.recorded(config).files.items()}


def open_runs(folders: Sequence[Path], args: argparse.Namespace) -> Opened:
    """The runs and their data: of the same data with other item features and titles, that with the most. Where the
    split holds out whole items, models that encode features take items without a train click as new ones.

    ValueError where a run is named twice; where runs were trained on different data, or with different treatments of
    seen items and no --seen decides; where the data has changed since the training and no --data names it; and where
    the split holds no test cases, unless --on names other ones.
    """
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise ValueError(f"RUN: expected different folders, got {' '.join(map(str, folders))}")
    configs = [checkpoint.read_config(folder) for folder in folders]
    treatments = sorted({config.get("seen", "mask") for config in configs})
    if args.seen is None and len(treatments) > 1:
        raise ValueError(f"RUN: trained with --seen {' and '.join(treatments)}; expected --seen for all")
    runs = [Run(folder, config, checkpoint.load(folder)) for folder, config in zip(folders, configs, strict=True)]
    splits: dict[str, Split] = {}
    on = getattr(args, "on", None) is not None
    for run in runs:
        source = Source.of_run(run.folder, run.config, args.data)
        place = json.dumps([source.data, source.how], sort_keys=True)
        if place not in splits:
            with warnings.catch_warnings():
                if on:  # the cases are others than those of the split
                    warnings.simplefilter("ignore", LeakageWarning)
                splits[place] = source.split()
        try:
            check_items(run.model, splits[place].test.history, "data")
        except ValueError as error:
            raise ValueError(f"{error}; the model is that of {run.folder}") from error
    (first, split), *others = splits.items()
    for place, other in others:
        if _digest(other) != _digest(split):
            apart = f"{_path(first)} and {_path(place)}, whose users, items, times or split differ"
            raise ValueError(f"RUN: expected runs on the same data, got {apart}")
    if not (len(split.test) or on):
        hint = "; --on FILE has later clicks" if hasattr(args, "on") else ""
        what = "trained with --split none, which holds nothing out; there is no test case"
        raise ValueError(f"{folders[0]}: {what}{hint}")
    split = max(splits.values(), key=lambda one: (len(one.items.features), one.items.titles is not None))
    if holds_out_items(split):
        runs = [run._replace(model=_of_features(run.model, split)) for run in runs]
    seen = args.seen or treatments[0]
    of_run = (partial(_other_clicks, split=split, path=args.data), unfinished, partial(_sampled, split=split))
    found = [note for run in runs for about in of_run if (note := about(run))]
    found += _alike(runs)
    if seen == "mask" and not on and (note := repeats(split)):
        found.append(note)
    return Opened(runs, split, seen, found)


def holds_out_items(split: Split) -> bool:
    return split.report is not None and split.report.how == ITEMS


def _of_features(model: Model, split: Split) -> Model:
    return with_items(model, model.items, split.counts) if model.encodes_features else model


def _alike(runs: Sequence[Run]) -> list[str]:
    """A note for runs of the same settings and the same seed, such as a run and its copy."""
    found: dict[str, list[str]] = {}
    for run in runs:
        found.setdefault(json.dumps([_settings(run), run.config.get("seed")], sort_keys=True), []).append(
            str(run.folder)
        )
    several = (folders for folders in found.values() if len(folders) > 1)
    return [f"{', '.join(each)} have the same settings and the same seed: a run that counts twice?" for each in several]


def tell(notes: Sequence[str]) -> None:
    """Prints notes on stderr, one per line."""
    for note in notes:
        print(f"note: {note}", file=sys.stderr, flush=True)


def unfinished(run: Run) -> str | None:
    """A note where the training of `run` has not ended, else None; None too for a model that `fit` did not train."""
    try:
        settings = state.Settings.recorded(run.config)
    except ValueError:
        return None
    lines = checkpoint.read_metrics(run.folder)
    if state.Progress(lines).done(settings):
        return None
    done = f"{len(lines)} of {settings.epochs} epochs are done"
    return f"{run.folder}: {done}, the best of these counts; fastcl resume {run.folder} goes on"


def _sampled(run: Run, split: Split) -> str | None:
    """A note where the epoch whose weights were kept was chosen on a sample of the validation cases, else None."""
    try:
        told = validation.note(state.Settings.recorded(run.config), len(split.valid))
    except ValueError:
        return None
    return told and f"{run.folder}: {told}"


def repeats(split: Split) -> str | None:
    """A note where many test targets are repeats, which no model can find while seen items are masked."""
    count = int(split.test.repeated.sum()) if split.report is None else split.report.repeated_targets
    of = len(split.test.target)
    if count <= MANY * of:
        return None
    share = f"{count:,} of {of:,} test targets ({count / of:.0%})"
    return f"{share} are in their user's own history, sure misses under --seen mask; --seen keep ranks seen items too"


def suited(model: type[Model], split: Split, chosen: Collection[str]) -> dict[str, Any]:
    """The settings that `model` has for as many clicks as these, but for those that are `chosen`; a note tells them."""
    found = {name: value for name, value in model.suited(split.train, chosen).items() if name not in chosen}
    if found and processes.leads():
        values = " ".join(f"{name}={value}" for name, value in found.items())
        clicks = len(split.train.item) / len(split.train)
        tell([f"{values}: for users with {clicks:.1f} clicks on average; --set has the last word"])
    return found


def _other_clicks(run: Run, split: Split, path: str | None) -> str | None:
    """A note where `split` differs from the data that `run` was trained on and --data named it; without --data that is
    a ValueError. A note too where only the test cases differ.
    """
    trained = run.config.get("data_sha256")
    if trained is None:
        return None
    if trained == fingerprints.fingerprint(split):
        if run.config.get("test_sha256") in (None, fingerprints.cases_fingerprint(split)):
            return None
        return f"{run.folder}: the data has other test cases than when it was trained; earlier figures are of those"
    if path is None:
        place = run.config["data"]["path"]
        remedy = f"--data {place} takes them on purpose, --data FILE names another file"
        raise ValueError(f"data: {place} no longer holds the clicks that {run.folder} was trained on; {remedy}")
    note = f"{run.folder}: {path} holds other clicks than the training had"
    known = _trained_targets(run, split, trained)
    if known is None:
        return f"{note}; whether its test targets were among these is unknown: the data of the run is not at hand"
    of = len(split.test.target)
    return f"{note}; {known:,} of its {of:,} test targets were among these, as clicks of the same user"


def _trained_targets(run: Run, split: Split, trained: str) -> int | None:
    """How many test targets were in training with their user; None where the run's data cannot be read."""
    try:
        own = Source.recorded(run.config).split()
    except (OSError, ValueError, TypeError):
        return None
    if fingerprints.fingerprint(own) != trained:
        return None
    number = {user: n for n, user in enumerate(own.users)}
    user = np.array([number.get(split.users[u], -1) for u in split.test.user])[split.test.case]
    row = np.repeat(np.arange(len(own.train)), own.train.lengths)
    pairs = row * len(own.counts) + own.train.item  # both splits have the same item table, as checked before
    return int(np.isin(user * len(own.counts) + split.test.target, pairs).sum())


def groups_of(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Name -> the runs that differ in their seed alone. The name is the model's; where several groups have the same
    model, it also holds the settings in which they differ.
    """
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(json.dumps(_settings(run), sort_keys=True), []).append(run)
    names = {}
    for members in found.values():
        model = members[0].model.name
        alike = [_settings(other[0]) for other in found.values() if other[0].model.name == model]
        own = _settings(members[0])
        apart = [key for key in own if any(other.get(key) != own[key] for other in alike)]
        names[" ".join([model, *(f"{key}={own[key]}" for key in apart)])] = members
    return names


def _settings(run: Run) -> dict[str, Any]:
    """Those of the model, also where the run is older than one of them, and those of the training."""
    flat = {key: value for key, value in run.config.items() if key not in (*NO_SETTINGS, "config")}
    if "init" in flat:
        flat["init"] = f"{flat['init']['run']}@{flat['init']['sha256'][:8]}"
    return {**vars(run.model.config), **(state.EARLIER if "epochs" in flat else {}), **flat}


def _digest(split: Split) -> str:
    digest = hashlib.sha256(f"{split.items.digest} {digest_of(split.users)}".encode())
    history = split.test.history
    items = (part.item for part in history.blocks())
    train, test = split.train, split.test
    for array in (train.offsets, train.item, train.time, test.user, history.lengths, *items, test.target):
        digest.update(b"none" if array is None else np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _path(place: str) -> str:
    return str(json.loads(place)[0]["path"])
