"""Merges logs by external id, such as the log of the last week with the log that was trained on. Reads no files."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fastcl.recsys.data import Histories, Interactions, Items


def merge(*logs: Interactions) -> Interactions:
    """One log of the users and items of all `logs`, numbered in the order in which they first appear.

    A user's interactions are in time order; at equal times, or where no log has times, they are in the order of the
    logs. What two logs share counts once: with times, interactions of the same user, item and time; without times, a
    user's earlier history where the later one begins with it. The result has no item features and no report.

    Raises ValueError for no log, or where only some logs have times.

    >>> first = Interactions.read({"user": ["u", "u"], "item": ["x", "y"], "time": [1, 2]})
    >>> later = Interactions.read({"user": ["u", "u", "v"], "item": ["y", "z", "x"], "time": [2, 3, 3]})
    >>> both = merge(first, later)
    >>> both.users, both.log.item.tolist(), both.log.lengths.tolist()
    (('u', 'v'), [1, 2, 3, 1], [3, 1])
    """
    if not logs:
        raise ValueError("logs: expected at least one, got none")
    if len({log.log.time is None for log in logs}) > 1:
        raise ValueError("logs: expected all with times or all without, got both")
    return functools.reduce(lambda a, b: joined(a, b)[0], logs)


def of_users(data: Interactions, users: Sequence[str]) -> Interactions:
    """The log of the named users alone, in the order of `users`."""
    number = {user: n for n, user in enumerate(data.users)}
    return replace(data, users=tuple(users), log=data.log.take(np.array([number[user] for user in users], np.int64)))


def joined(a: Interactions, b: Interactions) -> tuple[Interactions, np.ndarray]:
    """The two logs as one, as `merge` says; and bool [P], which of its interactions `a` does not have."""
    users = tuple(dict.fromkeys((*a.users, *b.users)))
    items = Items(tuple(dict.fromkeys((*a.items.ids, *b.items.ids))))
    number = {user: n for n, user in enumerate(users)}
    user = np.concatenate(
        [np.repeat([number[user] for user in log.users], log.log.lengths).astype(np.int64) for log in (a, b)]
    )
    item = np.concatenate([np.append(0, items.encode(log.items.ids))[log.log.item] for log in (a, b)])
    time = None
    if a.log.time is not None and b.log.time is not None:
        time = np.concatenate([a.log.time, b.log.time])
        keep, fresh = _first_of_each(user * (len(items) + 1) + item, time, len(a.log.item))
        order = np.lexsort((time[keep], user[keep]))
    else:
        again = _begun_with(a, b)
        later = np.arange(len(user)) >= len(a.log.item)
        keep = np.flatnonzero(later | ~np.isin(user, [number[name] for name in again]))
        row = {name: n for n, name in enumerate(a.users)}
        before = np.array([a.log.lengths[row[name]] if name in again else 0 for name in b.users], np.int64)
        nth = np.arange(len(b.log.item)) - np.repeat(b.log.offsets[:-1], b.log.lengths)
        fresh = np.append(np.zeros(len(a.log.item), bool), nth >= np.repeat(before, b.log.lengths))
        order = np.argsort(user[keep], kind="stable")
    kept = keep[order]
    offsets = np.cumsum(np.append(0, np.bincount(user[kept], minlength=len(users))), dtype=np.int64)
    log = Histories(offsets, item[kept], None if time is None else time[kept])
    return Interactions(items, users, log), fresh[kept]


def _first_of_each(pair: np.ndarray, time: np.ndarray, earlier: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows to keep: the first `earlier` rows without those whose pair and time a later row has, and all later rows.
    And bool [P], the later rows whose pair and time no earlier row has.
    """
    order = np.lexsort((time, pair))
    begins = np.append(True, (np.diff(pair[order]) != 0) | (np.diff(time[order]) != 0))[: len(order)]
    group = np.empty(len(order), np.int64)
    group[order] = np.cumsum(begins) - 1
    later = np.bincount(group[earlier:], minlength=len(order) + 1) > 0
    before = np.bincount(group[:earlier], minlength=len(order) + 1) > 0
    is_later = np.arange(len(order)) >= earlier
    return np.flatnonzero(is_later | ~later[group]), is_later & ~before[group]


def _begun_with(a: Interactions, b: Interactions) -> set[str]:
    """The users whose history in b begins with their history in a."""
    row = {user: n for n, user in enumerate(a.users)}

    def clicks(log: Interactions, n: int) -> list[str]:
        return [log.items.ids[item - 1] for item in log.log.item[log.log.offsets[n] : log.log.offsets[n + 1]].tolist()]

    found = set()
    for n, user in enumerate(b.users):
        if user in row:
            before = clicks(a, row[user])
            if clicks(b, n)[: len(before)] == before:
                found.add(user)
    return found
