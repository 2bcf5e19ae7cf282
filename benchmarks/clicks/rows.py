"""The data of the study of clicks, by the rule of table 9 of Zhou et al. 2021: one row a user, whether the user's last
item is the one that the row shows.

A row's history is all of a user's clicks but the last. A coin decides whether its target is the last click, label 1, or
a random item that the user never clicked, label 0. Rows up to the 70 % quantile of the users' last times train, later
ones test. Of the rows that train, the last 15 % by time validate. Nothing is trained or measured here.
"""

import functools
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.sources import timed
from fastcl.recsys.data import Cases, Histories, Items, Split
from fastcl.recsys.models.floors import Popularity

TRAINED, LEARNED = 0.7, 0.85  # quantiles of the last times: of all users, and of the users whose rows train
SEED = 1111  # of the coins and of the random items; that of the paper's program
COMMON = 0.9  # a value that more than this share of the items has tells nothing about a user


class Rows(NamedTuple):
    """history: of each row, without the target. target: int64 [N]. label: bool [N]. time: [N], the user's last time."""

    history: Histories
    target: np.ndarray
    label: np.ndarray
    time: np.ndarray

    def take(self, rows: np.ndarray) -> "Rows":
        return Rows(self.history.take(rows), self.target[rows], self.label[rows], self.time[rows])


class Data(NamedTuple):
    """split: what recommenders train on, the histories of the rows that train, and their targets where the label is 1;
    it has no cases. test: the rows that test. group: name -> bool, which rows of `test` belong to it.
    """

    split: Split
    train: Rows
    valid: Rows
    test: Rows
    groups: dict[str, np.ndarray]

    @property
    def items(self) -> Items:
        return self.split.items


@functools.cache
def read(name: str, folder: Path) -> Data:
    found = timed(name, folder)
    return made(found.items, found.log)


def made(items: Items, log: Histories) -> Data:
    """log: histories with times, of at least two clicks each."""
    rows = labelled(items, log, np.random.default_rng(SEED))
    trains = rows.time <= np.quantile(rows.time, TRAINED)
    learns = trains & (rows.time <= np.quantile(rows.time[trains], LEARNED))
    train, valid, test = (rows.take(np.flatnonzero(part)) for part in (learns, trains & ~learns, ~trains))
    return Data(_split(items, train), train, valid, test, _groups(items, test))


def labelled(items: Items, log: Histories, rng: np.random.Generator) -> Rows:
    """One row for each history."""
    assert log.time is not None, "the log was read with times"
    last = log.offsets[1:] - 1
    label = rng.random(len(log)) < 0.5
    target = np.where(label, log.item[last], rng.integers(1, len(items) + 1, len(log)))
    row = np.repeat(np.arange(len(log)), log.lengths)
    while True:
        clicked = np.bincount(row[log.item == target[row]], minlength=len(log)) > 0
        again = clicked & ~label
        if not again.any():
            return Rows(log.slice(log.offsets[:-1], log.lengths - 1), target, label, log.time[last])
        target[again] = rng.integers(1, len(items) + 1, again.sum())


def later_popularity(data: Data) -> Popularity:
    """A floor that also counts the histories of the rows that validate and test. Some of these clicks are later than
    the row that is scored, so that this floor knows more of the time of the test than any model.
    """
    count = len(data.items) + 1
    histories = [np.bincount(part.history.item, minlength=count) for part in (data.valid, data.test)]
    return Popularity(data.split.counts + sum(histories), data.items)


def every_click(data: Data) -> Rows:
    """A row for every click but a user's first, as a recommender trains, instead of one for each user. The coins are
    drawn anew; the history of a row is what precedes its target.
    """
    log = data.split.train
    length = np.concatenate([np.arange(2, n + 1) for n in log.lengths])
    start = np.repeat(log.offsets[:-1], np.maximum(log.lengths - 1, 0))
    return labelled(data.items, log.slice(start, length), np.random.default_rng(SEED))


def _split(items: Items, train: Rows) -> Split:
    history = train.history
    assert history.time is not None, "the log was read with times"
    end = history.offsets[1:][train.label]
    log = Histories(
        history.offsets + np.concatenate([[0], np.cumsum(train.label)]),
        np.insert(history.item, end, train.target[train.label]),
        np.insert(history.time, end, train.time[train.label]),
    )
    none = np.empty(0, np.int64)
    cases = Cases(none, log.take(none), none)
    users = tuple(f"user {row}" for row in range(len(log)))
    return Split(items, users, log, cases, cases, np.bincount(log.item, minlength=len(items) + 1))


def _groups(items: Items, test: Rows) -> dict[str, np.ndarray]:
    """Mixed interests: the half of the rows in which the most frequent value of the items' feature has the smallest
    share of the history. Late: the later half. Category known: the target has a value that the history has.
    """
    groups: dict[str, np.ndarray] = {"all": np.ones(len(test.target), bool)}
    late = test.time > np.median(test.time)
    groups |= {"early": ~late, "late": late}
    if items.features:
        held = values(items, test.history)
        share = held.max(1) / test.history.lengths
        mixed = share <= np.median(share)
        own = values(items, Histories(np.arange(len(test.target) + 1), test.target))
        known = np.asarray(((held > 0) & (own > 0)).any(1))
        groups |= {"one interest": ~mixed, "mixed interests": mixed, "mixed and late": mixed & late}
        groups |= {"category known": known}
    return groups


def values(items: Items, history: Histories) -> np.ndarray:
    """[B, values + 1], how many items of each history have each value of the first feature. A value that nearly all
    items have counts nowhere.
    """
    feature = next(iter(items.features.values()))
    count = len(feature.values) + 1
    held = np.bincount(feature.codes[feature.codes > 0], minlength=count) / len(items)
    row = np.repeat(np.arange(len(history)), history.lengths)
    found = np.zeros((len(history), count))
    for codes in feature.codes[history.item].T:
        np.add.at(found, (row, codes), 1)
    found[:, 0] = 0
    found[:, held > COMMON] = 0
    return found
