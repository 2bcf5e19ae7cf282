"""KuaiRand-Pure as a test of debiasing: the clicks of a biased feed to train on, and the exposures of later weeks, the
uniformly random ones and those of the biased feed, to be judged on.

This file reads the data and measures scores. It trains nothing. The folder's README says how the data were made.
"""

import csv
import gzip
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fastcl.recsys.data import Cases, Feature, Histories, Items, Split

METRICS = ("AUC", "NDCG@5", "recall@50")
GROUPS = {"choosing": 0, "reporting": 2}  # name -> user % 4


class Shown(NamedTuple):
    """Exposures of users: those of user u are the entries from offsets[u] to offsets[u + 1]."""

    offsets: np.ndarray  # int64 [U+1]
    item: np.ndarray  # int64 [n]
    clicked: np.ndarray  # bool [n]


class Data(NamedTuple):
    """shown: "uniform" or "biased" -> the exposures. Users are in one order in `split`, `user` and `shown`."""

    split: Split
    user: np.ndarray  # int64 [U], the numbers that users have in the files
    shown: dict[str, Shown]
    candidate: np.ndarray  # bool [I+1]
    impressions: np.ndarray  # int64 [I+1], on the biased feed of later weeks, with one added to each item's


def rows(path: Path) -> Iterator[dict[str, str]]:
    with gzip.open(path, "rt", newline="") as file:
        yield from csv.DictReader(file)


def read(folder: Path) -> Data:
    """The log of `folder` and its two sets of exposures. Item i of the files is item i + 1."""
    items = list(rows(folder / "items.csv.gz"))
    tags = tuple(sorted({tag for row in items for tag in row["tag"].split("|")} - {""}))
    codes = np.zeros((len(items) + 1, max(row["tag"].count("|") + 1 for row in items)), np.int64)
    for number, row in enumerate(items, 1):
        values = [1 + tags.index(tag) for tag in row["tag"].split("|") if tag]
        codes[number, : len(values)] = values
    table = Items(tuple(row["item"] for row in items), features={"tag": Feature(tags, codes)})
    user, lists = [], []
    for row in rows(folder / "train.csv.gz"):
        user.append(int(row["user"]))
        lists.append([int(item) + 1 for item in row["items"].split()])
    place = {number: at for at, number in enumerate(user)}
    pairs: dict[str, dict[tuple[int, int], bool]] = {"uniform": {}, "biased": {}}
    for row in rows(folder / "random.csv.gz"):
        for name, clicked in (("clicked", True), ("passed", False)):
            for item in row[name].split():
                pairs["uniform"][int(row["user"]), int(item) + 1] = clicked
    impressions = np.ones(len(items) + 1, np.int64)
    for row in rows(folder / "standard_late.csv.gz"):
        pair = int(row["user"]), int(row["item"]) + 1
        impressions[pair[1]] += 1
        pairs["biased"][pair] = pairs["biased"].get(pair, False) or row["click"] == "1"
    train = Histories.from_lists(lists)
    none = np.empty(0, np.int64)
    cases = Cases(none, train.take(none), none)
    counts = np.bincount(train.item, minlength=len(items) + 1)
    split = Split(table, tuple(map(str, user)), train, cases, cases, counts)
    candidate = np.array([False] + [row["core"] == "1" and row["pool"] == "1" for row in items])
    shown = {name: _shown(found, place) for name, found in pairs.items()}
    return Data(split, np.array(user), shown, candidate, impressions)


def _shown(pairs: dict[tuple[int, int], bool], place: dict[int, int]) -> Shown:
    """The exposures of users who have train clicks."""
    known = sorted((place[user], item, clicked) for (user, item), clicked in pairs.items() if user in place)
    row, item, clicked = np.array(known).T
    offsets = np.zeros(len(place) + 1, np.int64)
    np.cumsum(np.bincount(row, minlength=len(place)), out=offsets[1:])
    return Shown(offsets, item, clicked.astype(bool))


def group(data: Data, feed: str, name: str) -> np.ndarray:
    """int64, the rows of the users of a group who clicked on some exposure of the feed and passed on another."""
    shown = data.shown[feed]
    clicks = np.add.reduceat(np.append(shown.clicked, False), shown.offsets[:-1]) * (np.diff(shown.offsets) > 0)
    mixed = (clicks > 0) & (clicks < np.diff(shown.offsets))
    return np.flatnonzero(mixed & (data.user % 4 == GROUPS[name]))


def auc(clicked: np.ndarray, passed: np.ndarray) -> float:
    """The share of pairs of a clicked [m] and a passed score [n] in which the clicked one is higher; equal ones count
    half.
    """
    difference = clicked[:, None] - passed
    return float(((difference > 0) + 0.5 * (difference == 0)).mean())


def ndcg(score: np.ndarray, clicked: np.ndarray, k: int = 5) -> float:
    """NDCG@k of the exposures [n] of a user in the order of their scores; those that are equal keep their order."""
    discount = 1 / np.log2(np.arange(2, 2 + min(k, len(score))))
    best = np.argsort(-score, kind="stable")[:k]
    return float((discount * clicked[best]).sum() / discount[: clicked.sum()].sum())


def measured(
    score: Callable[[Histories], np.ndarray], data: Data, feed: str, name: str, chunk: int = 1024
) -> np.ndarray:
    """float64 [users, 3], METRICS for each user of a group. score: histories -> scores of all items [B, I+1]. Recall
    ranks all candidates but the user's train clicks; a user none of whose clicked exposures is a candidate has NaN.
    """
    users, shown = group(data, feed, name), data.shown[feed]
    found = []
    for begin in range(0, len(users), chunk):
        part = users[begin : begin + chunk]
        history = data.split.train.take(part)
        scores = score(history)
        for at, user in enumerate(part):
            mine = slice(*shown.offsets[user : user + 2])
            item, clicked = shown.item[mine], shown.clicked[mine]
            seen = history.item[history.offsets[at] : history.offsets[at + 1]]
            ranked = np.where(data.candidate, scores[at], -np.inf)
            ranked[seen] = -np.inf
            wanted = item[clicked][ranked[item[clicked]] > -np.inf]
            top = np.argpartition(-ranked, 50)[:50]
            recall = np.isin(wanted, top).mean() if len(wanted) else np.nan
            row = scores[at, item]
            found.append((auc(row[clicked], row[~clicked]), ndcg(row, clicked), recall))
    return np.array(found)


def tenths(data: Data) -> list[dict[str, float]]:
    """The candidates in ten groups of equal size, the least clicked in training first: the groups' shares of the train
    clicks and of the impressions, and the share of their random exposures that was clicked.
    """
    candidate = np.flatnonzero(data.candidate)
    clicks = data.split.counts
    shown = data.shown["uniform"]
    exposed = np.bincount(shown.item, minlength=len(clicks))
    clicked = np.bincount(shown.item[shown.clicked], minlength=len(clicks))
    found = []
    for part in np.array_split(candidate[np.argsort(clicks[candidate], kind="stable")], 10):
        shares = {"clicks": clicks, "impressions": data.impressions}
        row = {name: float(of[part].sum() / of[candidate].sum()) for name, of in shares.items()}
        times = exposed[part].sum()
        found.append(row | {"click rate": float(clicked[part].sum() / times) if times else math.nan})
    return found
