"""The split that holds out whole items, to measure what a model makes of items that nobody has clicked yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fastcl.recsys.data.containers import Cases, Histories, Items, Split
from fastcl.recsys.data.reports import SplitReport
from fastcl.recsys.data.views import Views
from fastcl.recsys.options import above

SHARE = 0.1


def by_items(items: Items, users: Sequence[str], log: Histories, at: Any, ties: str, seed: int) -> Split:
    """A random share `at` of the clicked items (None: a tenth), drawn with `seed`, is held out: none of their clicks
    trains, validates or is part of a history.

    A user's last click on a held-out item is the test target, with the user's clicks on the other items before it as
    history; a user without such clicks has no case. Of the clicks on the other items the last one of a user with at
    least three validates.
    """
    try:
        share = SHARE if at is None else float(at)
    except (TypeError, ValueError):
        raise ValueError(f"at: expected a share of the items, such as 0.1, got {at!r}") from None
    above(0.0, "at", share)
    clicked = np.unique(log.item)
    count = round(share * len(clicked))
    if not 0 < count < len(clicked):
        raise ValueError(f"at: expected a share of the {len(clicked):,} clicked items, such as 0.1, got {share}")
    held = np.zeros(len(items) + 1, bool)
    held[np.random.default_rng(seed).permutation(clicked)[:count]] = True
    row = np.repeat(np.arange(len(log)), log.lengths)
    kept = ~held[log.item]
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(kept)])  # kept clicks before each click of the log
    offsets = before[log.offsets]
    lengths = np.diff(offsets)
    rest = Histories(offsets, log.item[kept], None if log.time is None else log.time[kept], log.items)
    validates = np.flatnonzero(lengths >= 3)
    starts, trained = offsets[:-1], lengths.copy()
    trained[validates] -= 1
    target = rest.item[(starts + trained)[validates]]
    valid = Cases(validates, Views(rest, starts[validates], trained[validates]), target)
    able = np.flatnonzero(~kept & (before[:-1] > offsets[:-1][row]))
    last = able[np.append(np.diff(row[able]) > 0, True)] if len(able) else able
    test = Cases(row[last], Views(rest, starts[row[last]], before[last] - starts[row[last]]), log.item[last])
    if not (len(test) and len(valid)):
        missing = "test" if not len(test) else "validation"
        raise ValueError(f"split: expected users with a history and a {missing} row, got none (items)")
    train = rest.slice(starts, trained)
    late = None
    if log.time is not None and train.time is not None:
        late = int((log.time[last] < train.time.max()).sum())
    report = SplitReport(
        how="items",
        at=share,
        ties=ties,
        seed=seed,
        train_rows=len(train.item),
        valid_cases=len(valid),
        test_cases=len(test),
        not_evaluated=len(users) - len(test),
        held_out_unused=int((~kept).sum()) - len(test),
        unseen_targets=len(test),
        repeated_targets=0,
        later_in_train=late,
    )
    counts = np.bincount(train.item, minlength=len(items) + 1).astype(np.int64)
    return Split(items, users, train, valid, test, counts, report)
