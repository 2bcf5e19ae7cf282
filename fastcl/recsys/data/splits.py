"""Splits of a log: which rows train, validate and test. Every split but that of whole items (items_split.py) is, for
each user, a number of rows that train, a number that validate behind them, and a number that test.

No row is dropped silently: the split's report counts the rows that neither train nor are a target.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fastcl.recsys.data.blocks import ranges
from fastcl.recsys.data.containers import Cases, Histories, Items, Split
from fastcl.recsys.data.items_split import by_items
from fastcl.recsys.data.reading import times
from fastcl.recsys.data.reports import SplitReport
from fastcl.recsys.data.views import Views
from fastcl.recsys.options import at_least, one_of

TRAIN, VALID, TEST = 0, 1, 2
TIES = ("input", "random")
TARGETS = ("first", "all")


class LeakageWarning(UserWarning):
    """Train holds interactions that are later than test targets."""


def last_one(log: Histories, at: Any) -> tuple[np.ndarray, float | None]:
    """int64 [3, U], rows of each part: a user's last row tests, the one before validates; of fewer than 3 all train."""
    if at is not None:
        raise ValueError(f'at: expected none with "last-one", got {at!r}')
    lengths = log.lengths
    if lengths.max(initial=0) < 3:
        longest = lengths.max(initial=0)
        raise ValueError(f"split: expected a user with at least 3 interactions, the longest has {longest}")
    held = (lengths >= 3).astype(np.int64)
    return np.stack([lengths - 2 * held, held, held]), None


def by_time(log: Histories, at: Any) -> tuple[np.ndarray, float | None]:
    """The same numbers, and the cut: rows at or after `at` test; a user's last of two or more before it validates."""
    if log.time is None:
        raise ValueError('split: expected a log with times for "time", got one without')
    if at is None:
        raise ValueError('at: expected a number or an ISO date with "time", got none')
    cut = times.cut(at, log.time)
    lengths = log.lengths
    trained = np.zeros(len(log), np.int64)
    for begin, end in ranges(lengths):
        first, last = log.offsets[begin], log.offsets[end]
        before = np.concatenate([np.zeros(1, np.int64), np.cumsum(log.time[first:last] < cut)])
        trained[begin:end] = np.diff(before[log.offsets[begin : end + 1] - first])
    if trained.sum() in (0, lengths.sum()):
        span = f"{log.time.min()} to {log.time.max()}"
        raise ValueError(f"at: expected a time inside the log ({span}), got {at!r} = {cut}")
    valid = (trained >= 2).astype(np.int64)
    return np.stack([trained - valid, valid, lengths - trained]), cut


def nothing(log: Histories, at: Any) -> tuple[np.ndarray, float | None]:
    """The same numbers where every row trains: for the last training before serving, when all settings are chosen."""
    if at is not None:
        raise ValueError(f'at: expected none with "none", got {at!r}')
    return np.stack([log.lengths, np.zeros_like(log.lengths), np.zeros_like(log.lengths)]), None


HOW: dict[str, Callable[[Histories, Any], tuple[np.ndarray, float | None]]] = {
    "last-one": last_one,
    "time": by_time,
    "none": nothing,
}

ITEMS = "items"  # the one split whose parts are no beginnings and ends of a user's rows
WAYS = (*HOW, ITEMS)


def split(
    items: Items, users: Sequence[str], log: Histories, how: str, at: Any, ties: str, seed: int,
    pack: Callable[[Views], Histories] = Views.packed,
) -> Split:  # fmt: skip
    """As `Interactions.split` says. pack: puts the train histories, which models read as a whole, behind each other."""
    check(how, ties, seed)
    if ties == "random":
        log = shuffle_ties(log, seed)
    if how == ITEMS:
        return by_items(items, users, log, at, ties, seed)
    count, cut = HOW[how](log, at)
    return from_parts(items, users, log, count, how=how, at=cut, ties=ties, seed=seed, pack=pack)


def check(how: str, ties: str, seed: int) -> None:
    one_of(WAYS, "how", how)
    one_of(TIES, "ties", ties)
    at_least(0, "seed", seed)


def warn_of_leak(report: SplitReport | None) -> None:
    """A LeakageWarning for the caller's caller, where train holds what is later than a test target."""
    late = report.later_in_train if report else 0
    if report and report.how == "last-one" and late:
        message = (
            f"leave-one-out leaks the future: for {late:,} of {report.test_cases:,} test cases, train holds "
            "interactions (of other users) that are later than the target; "
            'split("time", at=...) (--split time --at TIME) keeps them apart'
        )
        warnings.warn(message, LeakageWarning, stacklevel=3)


def shuffle_ties(log: Histories, seed: int) -> Histories:
    """The same log in which the rows of a user at equal times are in random order."""
    if log.time is None:
        raise ValueError('ties: expected a log with times for "random", got one without')
    row = np.repeat(np.arange(len(log)), log.lengths)
    order = np.lexsort((np.random.default_rng(seed).random(len(row)), log.time, row))
    return Histories(log.offsets, log.item[order], log.time[order], log.items, log.users)


def hold_out(log: Histories, part: np.ndarray, share: float, seed: int) -> tuple[Histories, np.ndarray]:
    """The log and its parts, where a random `share` of every user's train rows, rounded down, validates.

    A user's validation rows stand behind the train rows.
    """
    user = np.repeat(np.arange(len(log)), log.lengths)
    train = np.flatnonzero(part == TRAIN)
    order = train[np.lexsort((np.random.default_rng(seed).random(len(train)), user[train]))]
    each = np.bincount(user[train], minlength=len(log))
    nth = np.arange(len(order)) - np.repeat(each.cumsum() - each, each)
    part = part.copy()
    # Without the small term 0.29 * 100, which is just below 29 in floating point, would hold out 28 rows.
    part[order[nth < np.floor(share * each + 1e-9)[user[order]]]] = VALID
    order = np.lexsort((part, user))
    time = None if log.time is None else log.time[order]
    return Histories(log.offsets, log.item[order], time, log.items, log.users), part[order]


def per_user(part: np.ndarray, log: Histories) -> np.ndarray:
    """int64 [3, U], rows of each part, from the part of every row."""
    return np.stack([_per_user(part == kind, log) for kind in (TRAIN, VALID, TEST)])


def from_parts(
    items: Items, users: Sequence[str], log: Histories, count: np.ndarray, *, how: str, at: float | None, ties: str,
    seed: int, targets: str = "first", validates: bool = True, pack: Callable[[Views], Histories] = Views.packed,
) -> Split:  # fmt: skip
    """The split in which the first count[TRAIN] rows of a user train, the next count[VALID] validate, the rest test.

    A user's first validation row is the target of a case whose history is the user's train rows; the first test row is
    the target of a case whose history is the train and validation rows. A user without such a row, or without a
    history, has no case. With targets="all" every validation row of a user is a target of that user's one case, and
    likewise every test row. validates: whether a split without validation cases is an error.
    """
    starts = log.offsets[:-1]

    def cases(kind: int, history: np.ndarray) -> Cases:
        held = np.flatnonzero((count[kind] > 0) & (history > 0))
        known, first = Views(log, starts[held], history[held]), (starts + history)[held]
        if targets == "first":
            return Cases(held, known, log.item[first])
        found = log.slice(first, count[kind][held])
        return Cases(held, known, found.item, offsets=found.offsets)

    whole = bool((count[TRAIN] == log.lengths).all())
    train = log if whole else pack(Views(log, starts, count[TRAIN]))
    valid, test = cases(VALID, count[TRAIN]), cases(TEST, count[TRAIN] + count[VALID])
    counts = np.bincount(train.item, minlength=len(items) + 1).astype(np.int64)
    late = None
    if not len(test):
        late = 0
    elif log.time is not None:
        target_time = log.time[(starts + count[TRAIN] + count[VALID])[test.user]]
        newest = log.time[(starts + count[TRAIN] - 1)[count[TRAIN] > 0]]  # of each user
        late = int((target_time < newest.max()).sum()) if len(newest) else 0
    report = SplitReport(
        how=how,
        at=at,
        ties=ties,
        seed=seed,
        train_rows=len(train.item),
        valid_cases=len(valid),
        test_cases=len(test),
        not_evaluated=len(users) - len(test),
        held_out_unused=int(count[[VALID, TEST]].sum()) - len(valid.target) - len(test.target),
        unseen_targets=int((counts[test.target] == 0).sum()),
        repeated_targets=int(test.repeated.sum()),
        later_in_train=late,
    )
    if how != "none" and not (len(test) and (len(valid) or not validates)):
        missing = "test" if not len(test) else "validation"
        raise ValueError(f"split: expected users with a history and a {missing} row, got none ({report.how})")
    return Split(items, users, train, valid, test, counts, report)


def _per_user(rows: np.ndarray, log: Histories) -> np.ndarray:
    """int64 [U], the number of marked rows of each user. rows: bool, the marks."""
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(rows)])
    return before[log.offsets[1:]] - before[log.offsets[:-1]]
