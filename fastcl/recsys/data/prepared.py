"""A prepared folder: a log as arrays in files that processes map and share, with its report and its splits.

    prepared.json     what the folder holds: its one generation of files, their sizes and SHA-256; written last
    data-.../*.bin    the arrays, without headers

Opening looks at sizes and at the ends of arrays, so that it costs the same for any number of clicks; `verify` reads all
of it. Nothing here writes (preparing.py does).
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from fastcl.recsys import schema
from fastcl.recsys.data.containers import Cases, Feature, Histories, Items, Split
from fastcl.recsys.data.ids import Ids
from fastcl.recsys.data.reading import times
from fastcl.recsys.data.reports import DataReport, SplitReport
from fastcl.recsys.data.views import Views

MANIFEST = "prepared.json"
VERSION = 1
GENERATION = re.compile(r"data-[0-9a-f]{16}")
_NAME = re.compile(r"[a-z0-9-]+\.bin")
_TYPES = ("|u1", "<i8", "<f8")
_READ = 1 << 22  # bytes


@dataclass
class File:
    type: str
    shape: list[int]
    sha256: str

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.type).itemsize


@dataclass
class OfSplit:
    """at: as it was asked for. train: whether its clicks have files of their own; else they are the whole log."""

    name: str
    how: str
    at: str | float | None
    train: bool
    report: dict[str, Any]
    digests: dict[str, str]


@dataclass
class OfFeature:
    name: str
    values: list[str]


@dataclass
class Manifest:
    """The content of prepared.json."""

    format: Literal["fastcl-data"]
    version: int
    folder: str
    files: dict[str, File]
    timed: bool
    titled: bool
    items_digest: str
    features: list[OfFeature]
    splits: list[OfSplit]
    report: dict[str, Any] | None


class Recorded(NamedTuple):
    """A split that the folder holds, without the items and users that it is of."""

    how: str
    at: str | float | None
    train: Histories
    valid: Cases
    test: Cases
    counts: np.ndarray
    report: SplitReport
    digests: Mapping[str, str]

    def answers(self, how: str, at: Any, ties: str) -> bool:
        """Whether it is what `Interactions.split` is asked for."""
        if how != self.how or ties != "input":
            return False
        return at == self.at or (at is not None and times.parse(str(at)).value == self.report.at)

    def split(self, items: Items, users: Any, seed: int, read: DataReport | None) -> Split:
        report = dataclasses.replace(self.report, seed=seed)
        made = Split(items, users, self.train, self.valid, self.test, self.counts, report, read)
        object.__setattr__(made, "digests", self.digests)
        return made


class Prepared(NamedTuple):
    """What `read` finds."""

    items: Items
    users: Ids
    log: Histories
    report: DataReport | None
    splits: tuple[Recorded, ...]


def is_prepared(path: str | Path) -> bool:
    return os.path.isfile(Path(path) / MANIFEST)  # of a name that is too long False, where Path.is_file raises


def read_manifest(folder: Path) -> Manifest:
    """The manifest, checked; ValueError that names it where it is damaged."""
    where = str(folder / MANIFEST)
    found = schema.parse((folder / MANIFEST).read_bytes(), where)
    schema.fits(found, Manifest, where)
    if found["version"] != VERSION:
        raise ValueError(f"{where}: expected version {VERSION}, got {found['version']}; prepare the data again")
    files = {name: File(**file) for name, file in found["files"].items()}
    odd = [name for name, file in files.items() if not _NAME.fullmatch(name) or file.type not in _TYPES]
    odd += [name for name, file in files.items() if any(size < 0 for size in file.shape)]
    if odd or not GENERATION.fullmatch(found["folder"]):
        entry = schema.short((odd or ["folder"])[0])
        raise ValueError(f"{where}: damaged (its entry {entry} is none of a preparation)")
    splits, features = [OfSplit(**each) for each in found["splits"]], [OfFeature(**each) for each in found["features"]]
    return Manifest(**{**found, "files": files, "splits": splits, "features": features})


def read(folder: Path) -> Prepared:
    """The log in a prepared folder. ValueError that names the file which is missing, cut, or not as the others say."""
    about = read_manifest(folder)
    try:
        return _opened(folder, about)
    except ValueError:
        now = read_manifest(folder)
        if now.folder == about.folder:
            raise
        return _opened(folder, now)  # the data was replaced, and its earlier files removed, in between


def _opened(folder: Path, about: Manifest) -> Prepared:
    arrays = _Arrays(folder, about)
    log = Histories.mapped(arrays("offsets"), arrays("item"), arrays("time") if about.timed else None)
    arrays.expect("offsets", log.offsets[-1] == len(log.item) and log.offsets[0] == 0)
    users, ids = arrays.ids("users"), arrays.ids("items", about.items_digest)
    arrays.expect("offsets", len(log.offsets) == len(users) + 1)
    features = {
        each.name: Feature(tuple(each.values), arrays(f"feature-{k}")) for k, each in enumerate(about.features)
    }
    items = Items(ids, arrays.ids("titles") if about.titled else None, features)
    where = str(folder / MANIFEST)
    splits = tuple(_split(arrays, each, log, f"{where}: splits") for each in about.splits)
    return Prepared(items, users, log, _report(DataReport, about.report, f"{where}: report"), splits)


def verify(folder: Path) -> None:
    """Reads every file; ValueError that names the first whose content is not what was written."""
    about = read_manifest(folder)
    arrays = _Arrays(folder, about)
    for name, file in about.files.items():
        arrays(name.removesuffix(".bin"))
        digest = hashlib.sha256()
        with open(arrays.place / name, "rb") as content:
            while piece := content.read(_READ):
                digest.update(piece)
        if digest.hexdigest() != file.sha256:
            raise ValueError(f"{arrays.place / name}: damaged: its content has changed; prepare the data again")


def mapped(path: Path, file: File) -> np.ndarray:
    """The array in a file, of which nothing is read yet. It is mapped copy-on-write, since torch warns of arrays that
    may not be written: what is written would be the process's own, and never reach the file.
    """
    if not file.bytes:  # which cannot be mapped
        return np.zeros(file.shape, file.type)
    return np.asarray(np.memmap(path, file.type, "c", shape=tuple(file.shape)))


class _Arrays:
    """The files of a folder, mapped."""

    def __init__(self, folder: Path, about: Manifest) -> None:
        self.place, self._files = folder / about.folder, about.files

    def __call__(self, name: str) -> np.ndarray:
        path, file = self.place / f"{name}.bin", self._files.get(f"{name}.bin")
        if file is None:
            raise ValueError(f"{self.place.parent / MANIFEST}: damaged (it names no {name}.bin)")
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            raise ValueError(f"{path}: expected {file.bytes:,} bytes, got no file; prepare the data again") from None
        if size != file.bytes:
            raise ValueError(f"{path}: expected {file.bytes:,} bytes, got {size:,}; prepare the data again")
        return mapped(path, file)

    def ids(self, name: str, digest: str | None = None) -> Ids:
        data, bounds = self(name), self(f"{name}-bounds")
        self.expect(f"{name}-bounds", len(bounds) > 0 and bounds[0] == 0 and bounds[-1] == len(data))
        return Ids(data, bounds, digest=digest)

    def expect(self, name: str, good: bool | np.bool_) -> None:
        if not good:
            path = self.place / f"{name}.bin"
            raise ValueError(f"{path}: damaged: it does not fit the other files; prepare the data again")


def _split(arrays: _Arrays, about: OfSplit, log: Histories, where: str) -> Recorded:
    name = about.name
    train = log
    if about.train:
        offsets, item = arrays(f"{name}-offsets"), arrays(f"{name}-item")
        train = Histories.mapped(offsets, item, arrays(f"{name}-time") if log.time is not None else None)
        arrays.expect(f"{name}-offsets", len(offsets) == len(log.offsets) and offsets[-1] == len(item))

    def cases(part: str) -> Cases:
        of_cases = ("user", "start", "length", "target")
        user, start, length, target = (arrays(f"{name}-{part}-{what}") for what in of_cases)
        arrays.expect(f"{name}-{part}-user", len(user) == len(start) == len(length) == len(target))
        return Cases(user, Views(log, start, length), target)

    report = _report(SplitReport, about.report, where)
    assert report is not None, "a split has a report"
    counts = arrays(f"{name}-counts")
    return Recorded(about.how, about.at, train, cases("valid"), cases("test"), counts, report, about.digests)


def _report(kind: Any, found: dict[str, Any] | None, where: str) -> Any:
    if found is None:
        return None
    schema.keys_fit(found, kind, where)
    try:
        return kind(**{**found, **({"faults": tuple(found["faults"])} if "faults" in found else {})})
    except TypeError as error:
        raise ValueError(f"{where}: damaged ({error})") from error
