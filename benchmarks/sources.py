"""The data of the studies: logs by name, with times and item classes if these are known, and splits by name.

Nothing is measured or trained here.
"""

import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fastcl.recsys import Histories, Interactions, bundled
from fastcl.recsys.data import Cases, Split
from fastcl.recsys.data.splits import TEST, TRAIN, VALID, from_parts, per_user

BUNDLED = "bundled:"
DAY = 86_400


class Parts(NamedTuple):
    """others: name -> further test cases beside those of the split. valid_is_test: the split validates on its test
    cases, so that a result shows what choosing an epoch on test gives.
    """

    split: Split
    others: dict[str, Cases]
    valid_is_test: bool = False


def last_one(name: str, folder: Path) -> Parts:
    """Leave-one-out."""
    return Parts(_log(name, folder).split(), {})


def attributes(name: str, folder: Path) -> Parts:
    """Leave-one-out, with a feature of the items: their attributes or, where the data have none, their classes."""
    known = _attributes(name, folder)
    return Parts(_log(name, folder).with_features(known or _classes(name, folder)).split(), {})


def merged(name: str, folder: Path) -> Parts:
    """Leave-one-out with the validation items in the training data too, as BERT4Rec's test and CLRec's table 8 have it.

    Validation on trained items prefers late epochs.
    """
    split = last_one(name, folder).split
    assert len(split.test) == len(split.users), "every user is tested"
    train = split.test.history
    counts = np.bincount(train.item, minlength=len(split.counts))
    return Parts(replace(split, train=train, counts=counts), {})


def shift(name: str, folder: Path) -> Parts:
    """The weekdays in the first four fifths of the rows train. The test is on each user's first row of a later weekday
    and, with the same history, on the first row of a later weekend, as in CLRec's table 4.
    """
    data = timed(name, folder)
    assert data.log.time is not None, "the log was read with times"
    cut = float(np.quantile(data.log.time, 0.8))
    weekend = (data.log.time // DAY + 3) % 7 >= 5  # the first day of 1970 was a Thursday
    trains = (data.log.time < cut) & ~weekend
    tests = data.log.time >= cut
    split = _parts(data, trains, tests & ~weekend, cut)
    return Parts(split, {"weekends": _parts(data, trains, tests & weekend, cut).test})


def given(name: str, folder: Path) -> Parts:
    """Files that are split already, as LightGCN's, which have no validation part: all of train trains, and the test
    cases take the place of validation.
    """
    split = _presplit(name, folder, 0.0)
    return Parts(replace(split, valid=split.test), {}, valid_is_test=True)


def held_out(name: str, folder: Path) -> Parts:
    """The same, but a random tenth of every user's train items validates."""
    return Parts(_presplit(name, folder, 0.1), {})


SPLITS: dict[str, Callable[[str, Path], Parts]] = {
    "last-one": last_one,
    "attributes": attributes,
    "merged": merged,
    "shift": shift,
    "given": given,
    "held-out": held_out,
}


def _parts(data: Interactions, trains: np.ndarray, tests: np.ndarray, cut: float) -> Split:
    """A split that has only the rows in `trains` or `tests`. A user's last train row validates, if there are two."""
    used = trains | tests
    row = np.repeat(np.arange(len(data.log)), data.log.lengths)
    lengths = np.bincount(row[used], minlength=len(data.log))
    assert data.log.time is not None, "the log was read with times"
    log = Histories(np.concatenate([[0], lengths.cumsum()]), data.log.item[used], data.log.time[used])
    part = np.where(tests[used], TEST, TRAIN)
    trained = np.bincount(row[trains], minlength=len(data.log))
    part[(log.offsets[:-1] + trained - 1)[trained >= 2]] = VALID
    count = per_user(part, log)
    return from_parts(data.items, data.users, log, count, how="weekdays", at=cut, ties="input", seed=0)


def _presplit(name: str, folder: Path, hold_out: float) -> Split:
    train, test = folder / name / "train.txt.gz", folder / name / "test.txt.gz"
    return Interactions.presplit(train, None, test, targets="all", hold_out=hold_out, format="sequence")


def _log(name: str, folder: Path) -> Interactions:
    if name.startswith(BUNDLED):
        return bundled(name.removeprefix(BUNDLED))
    return Interactions.read(folder / f"{name}.txt.gz", format="sequence")


def timed(name: str, folder: Path) -> Interactions:
    """The log with times, and with the class of each item as a feature; its attributes where no classes are known."""
    if name.startswith(BUNDLED):
        return bundled(name.removeprefix(BUNDLED))
    pairs = list(zip(_rows(folder / f"{name}.txt.gz"), _rows(folder / f"{name}.times.txt.gz"), strict=True))
    columns = {
        "user": [user for (user, *items), _ in pairs for _ in items],
        "item": [item for (_, *items), _ in pairs for item in items],
        "time": [int(time) for _, (_, *times) in pairs for time in times],
    }
    known = _classes(name, folder) if (folder / f"{name}.item_class.txt.gz").is_file() else _attributes(name, folder)
    return Interactions.read(columns, item_features=known)


def _attributes(name: str, folder: Path) -> dict[str, list[str]] | None:
    path = folder / f"{name}.item2attributes.json.gz"
    if not path.is_file():
        return None
    with gzip.open(path, "rt") as file:
        known = json.load(file)
    return {"item": list(known), "attribute": ["|".join(map(str, values)) for values in known.values()]}


def _classes(name: str, folder: Path) -> dict[str, list[str]]:
    classes = zip(*_rows(folder / f"{name}.item_class.txt.gz"), strict=True)
    return dict(zip(("item", "class"), map(list, classes), strict=True))


def _rows(path: Path) -> Iterator[list[str]]:
    with gzip.open(path, "rt") as file:
        for line in file:
            yield line.split()
