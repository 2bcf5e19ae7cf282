"""The containers of recommender data: item table, ragged histories, prediction cases, split.

Users of the library name items by strings; the containers number them 1..I and reserve 0 for padding. Nothing here
reads files, draws random numbers, pads or drops rows.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from fastcl.recsys.data.blocks import ranges
from fastcl.recsys.data.ids import Ids, digest_of
from fastcl.recsys.data.reports import DataReport, SplitReport
from fastcl.recsys.showing import summary

PAD = 0
Made = TypeVar("Made")


@dataclass(frozen=True, eq=False)
class Feature:
    """One categorical item feature; an item may have several values, or none.

    values: the names of the values; `values[k]` has code k+1.
    codes:  int64 [I+1, W], up to W codes for each item, filled up with 0 (no value); row 0 (padding) is all 0.
    """

    values: tuple[str, ...]
    codes: np.ndarray

    __repr__ = summary

    def __post_init__(self) -> None:
        codes = np.asarray(self.codes)
        if codes.ndim != 2 or codes.dtype != np.int64 or len(codes) < 1:
            raise ValueError(f"codes: expected an int64 array [I+1, W], got {codes.dtype} {list(codes.shape)}")
        if codes.size and (codes.min() < 0 or codes.max() > len(self.values) or codes[0].any()):
            span = f"{codes.min()}..{codes.max()}, row 0 {codes[0].tolist()}"
            raise ValueError(f"codes: expected 0..{len(self.values)} and zeros in row 0, got {span}")

    @property
    def groups(self) -> bool:
        """Whether items share values. False where a value has at most 1.1 items on average, as titles and prices do."""
        used = int(np.count_nonzero(self.codes))
        return used < 2 or used > 1.1 * len(np.unique(self.codes[self.codes > 0]))

    @classmethod
    def from_labels(cls, labels: Sequence[Sequence[str]]) -> Feature:
        """Feature from the value names of items 1..I, in order; values are numbered alphabetically.

        >>> Feature.from_labels([["Comedy", "Drama"], [], ["Drama"]]).codes.tolist()
        [[0, 0], [1, 2], [0, 0], [2, 0]]
        """
        values = tuple(sorted({value for row in labels for value in row}))
        code = {value: k for k, value in enumerate(values, start=1)}
        codes = np.zeros((len(labels) + 1, max(map(len, labels), default=0)), np.int64)
        for item, row in enumerate(labels, start=1):
            codes[item, : len(row)] = [code[value] for value in row]
        return cls(values, codes)


@dataclass(frozen=True, eq=False)
class Items:
    """The item table: item i (1..I) has the external id `ids[i-1]` and, where known, a title and features.

    ids: distinct non-empty strings; `Ids` were compared when their file was made. titles: one per item, "" where
        unknown.
    features: name -> Feature of I+1 rows.
    """

    ids: Sequence[str]
    titles: Sequence[str] | None = None
    features: Mapping[str, Feature] = field(default_factory=dict)

    __repr__ = summary

    def __post_init__(self) -> None:
        if not isinstance(self.ids, Ids) and (len(set(self.ids)) != len(self.ids) or "" in self.ids):
            raise ValueError("ids: expected distinct non-empty strings, got a repeated or an empty one")
        if self.titles is not None and len(self.titles) != len(self.ids):
            raise ValueError(f"titles: expected one per item ({len(self.ids)}), got {len(self.titles)}")
        for name, feature in self.features.items():
            if len(feature.codes) != len(self.ids) + 1:
                raise ValueError(f"features[{name!r}]: expected {len(self.ids) + 1} rows, got {len(feature.codes)}")

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def _number(self) -> dict[str, int]:
        return {item: number for number, item in enumerate(self.ids, start=1)}

    @cached_property
    def digest(self) -> str:
        """A hash of the ids in their order: two tables in which each number means the same id have the same digest."""
        if isinstance(self.ids, Ids) and self.ids.digest is not None:
            return self.ids.digest
        return digest_of(self.ids)

    def encode(self, ids: Iterable[str]) -> np.ndarray:
        """External ids to numbers, int64; 0 where an id is unknown.

        >>> Items(("x", "y")).encode(["y", "?"]).tolist()
        [2, 0]
        """
        return np.array([self._number.get(item, PAD) for item in ids], np.int64)

    def label(self, item: int) -> str:
        """The title of item 1..I, or its id where it has none."""
        if not 1 <= item <= len(self.ids):
            raise ValueError(f"item: expected 1..{len(self.ids)}, got {item}")
        return (self.titles[item - 1] if self.titles else "") or self.ids[item - 1]

    def to_json(self) -> dict[str, Any]:
        """Plain lists and strings for json.dump; `from_json` restores them exactly."""
        return {
            "ids": list(self.ids),
            "titles": None if self.titles is None else list(self.titles),
            "features": {
                name: {"values": list(feature.values), "codes": feature.codes.tolist()}
                for name, feature in self.features.items()
            },
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Items:
        """The inverse of `to_json`."""
        features = {
            name: Feature(tuple(feature["values"]), np.array(feature["codes"], np.int64))
            for name, feature in data["features"].items()
        }
        return cls(tuple(data["ids"]), None if data["titles"] is None else tuple(data["titles"]), features)


@dataclass(frozen=True, eq=False)
class Histories:
    """Ragged histories, packed: row b is `item[offsets[b]:offsets[b+1]]`, oldest first.

    offsets: int64 [B+1], rising from 0 to P. item: int64 [P], 1..I. time: int64 or float64 [P], or None.
    items: the item table that numbers the items, or None. Logs and splits set it, so that a model with another table
        refuses these histories.
    users: object [B], the external id of each row's user, or None. Models with one vector per user need it.
    """

    offsets: np.ndarray
    item: np.ndarray
    time: np.ndarray | None = None
    items: Items | None = field(default=None, repr=False)
    users: np.ndarray | Ids | None = field(default=None, repr=False)

    __repr__ = summary

    def __post_init__(self) -> None:
        offsets, item = self.offsets, self.item
        if offsets.dtype != np.int64 or item.dtype != np.int64 or offsets.ndim != 1 or item.ndim != 1:
            raise ValueError(f"offsets, item: expected int64 vectors, got {offsets.dtype} and {item.dtype}")
        if len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != len(item) or (np.diff(offsets) < 0).any():
            raise ValueError(f"offsets: expected to rise from 0 to {len(item)}, got {offsets}")
        if len(item) and item.min() < 1:
            raise ValueError(f"item: expected numbers from 1 (0 is padding), got {item.min()}")
        if self.time is not None and (self.time.shape != item.shape or self.time.dtype not in (np.int64, np.float64)):
            raise ValueError(f"time: expected int64 or float64 {item.shape}, got {self.time.dtype} {self.time.shape}")
        self._check_users()

    def _check_users(self) -> None:
        if self.users is not None and len(self.users) != len(self):
            raise ValueError(f"users: expected one per row ({len(self)}), got {len(self.users)}")

    @classmethod
    def mapped(cls, offsets: np.ndarray, item: np.ndarray, time: np.ndarray | None) -> Histories:
        """The same of arrays that were checked when their files were made: none of them is read here."""
        made = object.__new__(cls)
        vars(made).update(offsets=offsets, item=item, time=time, items=None, users=None)
        return made

    def named(self, items: Items | None, users: np.ndarray | Ids | None) -> Histories:
        """The same rows, of these items and users."""
        made = copy.copy(self)
        vars(made).update(items=items, users=users)
        made._check_users()
        return made

    def blocks(self) -> Iterator[Histories]:
        """All rows in order, about a million clicks at a time (a row is never parted), without `users`."""
        for begin, end in ranges(self.lengths):
            yield self.take(np.arange(begin, end))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """int64 [B], the number of interactions of each row."""
        return np.diff(self.offsets)

    def take(self, rows: np.ndarray) -> Histories:
        """The rows whose numbers are given, in that order; a number may occur twice.

        >>> Histories.from_lists([[1, 2], [], [3]]).take(np.array([2, 0])).item.tolist()
        [3, 1, 2]
        """
        rows = np.asarray(rows, np.int64)
        taken = self.slice(self.offsets[:-1][rows], self.lengths[rows])
        return taken if self.users is None else taken.named(self.items, self.users[rows])

    def last(self, n: int) -> Histories:
        """The newest n interactions of each row, or all of a row that has fewer."""
        if n < 1:
            raise ValueError(f"n: expected at least 1, got {n}")
        lengths = np.minimum(self.lengths, n)
        return self.slice(self.offsets[1:] - lengths, lengths).named(self.items, self.users)

    def slice(self, starts: np.ndarray, lengths: np.ndarray) -> Histories:
        """item[starts[b] : starts[b] + lengths[b]] as row b. The result has no `users`: a slice may cross rows."""
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        index = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
        return Histories(offsets, self.item[index], None if self.time is None else self.time[index], self.items)

    @classmethod
    def from_lists(cls, lists: Sequence[Sequence[int]], times: Sequence[Sequence[float]] | None = None) -> Histories:
        """Histories from one list of item numbers per row and, optionally, one list of as many times per row.

        >>> Histories.from_lists([[1, 2], [], [3]]).lengths.tolist()
        [2, 0, 1]
        """
        offsets = np.cumsum([0, *map(len, lists)], dtype=np.int64)
        item = np.array([item for row in lists for item in row], np.int64)
        if times is None:
            return cls(offsets, item)
        if [len(row) for row in times] != [len(row) for row in lists]:
            raise ValueError("times: expected as many times as items in each row, got other lengths")
        return cls(offsets, item, number_array([time for row in times for time in row]))


@dataclass(frozen=True, eq=False)
class Cases:
    """Prediction cases: given row c of `history`, predict `target[c]`, or target[offsets[c]:offsets[c+1]] where cases
    have several targets.

    user: int64 [C], index into the users. target: int64 [T], 1..I; T = C without offsets.
    counts: int64 [I+1], interactions of each item in train; a `Split` sets the counts of its cases.
    offsets: int64 [C+1] from 0 to T, at least one target per case; None: one target per case.
    """

    user: np.ndarray
    history: Histories
    target: np.ndarray
    counts: np.ndarray | None = None
    offsets: np.ndarray | None = None

    __repr__ = summary

    def __post_init__(self) -> None:
        targets = len(self.target) if self.offsets is None else len(self.offsets) - 1
        if not len(self.user) == len(self.history) == targets:
            sizes = f"{len(self.user)}, {len(self.history)}, {targets}"
            raise ValueError(f"user, history, target: expected equal lengths, got {sizes}")
        if self.offsets is not None:
            rising = self.offsets[0] == 0 and self.offsets[-1] == len(self.target) and (np.diff(self.offsets) > 0).all()
            if not rising:
                raise ValueError(f"offsets: expected to rise from 0 to {len(self.target)}, got {self.offsets}")
        if len(self.target) and self.target.min() < 1:
            raise ValueError(f"target: expected numbers from 1 (0 is padding), got {self.target.min()}")

    def __len__(self) -> int:
        return len(self.history)

    @property
    def case(self) -> np.ndarray:
        """int64 [T], the case to which each target belongs."""
        every = np.arange(len(self))
        return every if self.offsets is None else np.repeat(every, np.diff(self.offsets))

    def take(self, rows: np.ndarray) -> Cases:
        """The cases whose numbers are given, in that order."""
        rows = np.asarray(rows, np.int64)
        if self.offsets is None:
            return Cases(self.user[rows], self.history.take(rows), self.target[rows], self.counts)
        targets = Histories(self.offsets, self.target).take(rows)
        return Cases(self.user[rows], self.history.take(rows), targets.item, self.counts, targets.offsets)

    @property
    def repeated(self) -> np.ndarray:
        """bool [T], whether the target occurs in the history of its case; masking seen items makes it a sure miss."""
        found = [np.zeros(0, bool)]
        for begin, end in ranges(self.history.lengths):
            part = self.take(np.arange(begin, end))
            row = np.repeat(np.arange(len(part)), part.history.lengths)
            if part.offsets is None:
                again = row[part.history.item == part.target[row]]
                found.append(np.bincount(again, minlength=len(part)) > 0)
                continue
            width = 1 + max(part.history.item.max(initial=0), part.target.max(initial=0))
            found.append(np.isin(part.case * width + part.target, row * width + part.history.item))
        return np.concatenate(found)


@dataclass(frozen=True, eq=False)
class Split:
    """Train histories (row u = user u), validation and test cases.

    counts: int64 [I+1], interactions of each item in train. `valid` and `test` carry the same counts, and all histories
        the same `items`.
    report: how the split was made and what it leaves out. data_report: what reading the log found.
    digests: "data" and "test", as fingerprints.py finds them, where a prepared folder tells them.
    """

    items: Items
    users: Sequence[str]
    train: Histories
    valid: Cases
    test: Cases
    counts: np.ndarray
    report: SplitReport | None = field(default=None, repr=False)
    data_report: DataReport | None = field(default=None, repr=False)
    # Not of the constructor: a split with other parts has none.
    digests: Mapping[str, str] = field(default_factory=dict, repr=False, init=False)
    # "data" and "split" of a config.json: the files that it was made of, and how; {} where they are unknown.
    origin: Mapping[str, Any] = field(default_factory=dict, repr=False, init=False)

    __repr__ = summary

    def __post_init__(self) -> None:
        users = by_row(self.users)
        object.__setattr__(self, "train", self.train.named(self.items, users))
        for name in ("valid", "test"):
            cases = getattr(self, name)
            history = cases.history.named(self.items, users[cases.user])
            object.__setattr__(self, name, replace(cases, history=history, counts=self.counts))


def with_origin(made: Made, origin: Mapping[str, Any]) -> Made:
    """The same log or split, with what says how to read or make it again."""
    object.__setattr__(made, "origin", origin)
    return made


def by_row(users: Sequence[str]) -> np.ndarray | Ids:
    """The users in a form that is indexed by arrays of rows."""
    return users if isinstance(users, Ids) else np.array(users, object)


class Scorer(Protocol):
    """What `evaluate` and `recommend` need of a model or a floor (a method without training, such as popularity)."""

    def scores(self, histories: Histories) -> torch.Tensor:
        """float32 [B, I+1], higher is better; column 0 (padding) is -inf."""
        ...


def number_array(values: Sequence[float]) -> np.ndarray:
    """An int64 array where all values are of type int, else float64; float32 would merge neighbouring Unix seconds."""
    whole = all(isinstance(value, int | np.integer) for value in values)
    return np.array(values, np.int64 if whole else np.float64)
