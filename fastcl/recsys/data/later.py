"""Cases made of clicks that came after a training, such as those of the week behind it. Nothing here scores."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from fastcl.recsys.data.containers import Cases, Histories, Items, Split
from fastcl.recsys.data.growing import grown
from fastcl.recsys.data.interactions import Interactions
from fastcl.recsys.data.merging import joined
from fastcl.recsys.data.views import Views


@dataclass(frozen=True)
class LaterReport:
    """What `later` counted.

    clicks: interactions of the new log. again: those that the earlier log has too. cases: clicks with a history; the
        next three count among them. new_user_cases: of users whom the earlier log lacks. new_item_cases: of items that
        the split lacks. repeated: whose item is in their own history.
    no_history: clicks before which their user has no click on an item of the split.
    new_users, new_items: users whom the earlier log lacks; items of the new log that the split lacks.
    before_training_ended: clicks with a case that are earlier than the newest one of the training, which has seen what
        came after them; None without times.
    """

    clicks: int
    again: int
    cases: int
    no_history: int
    new_users: int
    new_user_cases: int
    new_items: int
    new_item_cases: int
    repeated: int
    before_training_ended: int | None

    def to_json(self) -> dict[str, Any]:
        """Numbers by their names."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [
            f"{self.clicks:,} clicks: {self.cases:,} are cases, {self.no_history:,} have no click on a known item "
            f"before them, {self.again:,} are in the earlier data too",
            f"{self.new_users:,} new users with {self.new_user_cases:,} cases, "
            f"{self.new_items:,} new items with {self.new_item_cases:,} cases",
        ]
        if self.before_training_ended:
            lines.append(f"{self.before_training_ended:,} cases are earlier than the newest click of the training")
        return "\n".join(lines)


class Later(NamedTuple):
    """split: the training of the earlier split, and the new clicks as test cases; it has no validation case. groups:
    name -> bool [C], the cases of known users and items, of new users and of new items.
    """

    split: Split
    groups: dict[str, np.ndarray]
    report: LaterReport


def later(split: Split, before: Interactions, after: Interactions, items: Items | None = None) -> Later:
    """Every click of `after` that `before` lacks as a test case, whose history is all that its user clicked before it
    in either log: how would a model that was trained on `split` have done on these clicks?

    A click needs a click on an item of the table before it; others are counted and make no case. Clicks at equal times
    are in the order of the logs, and those without times follow all earlier ones.

    Args:
        split: what the model was trained on; its item table comes first in that of the result.
        before: the log that the split was made of.
        after: the new log; users and items are matched by their ids.
        items: the item table that a model of `with_items` has, which begins with that of the split; None: the split's.

    Raises ValueError where the logs have times in one of them only, or where no click makes a case.

    >>> from fastcl.recsys import Interactions, Popularity, evaluate
    >>> log = {"user": list("aaabbb"), "item": list("xyzxyz"), "time": [1, 2, 3, 1, 2, 3]}
    >>> data = Interactions.read(log)
    >>> new = Interactions.read({"user": ["a", "c"], "item": ["w", "x"], "time": [8, 9]})
    >>> week = later(data.split("none"), data, new)
    >>> week.report.cases, week.report.new_item_cases, week.report.no_history
    (1, 1, 1)
    >>> evaluate(Popularity(week.split.counts), week.split.test, seen="keep")["recall@10"]
    1.0
    """
    known = split.items if items is None else items
    if lost := set(split.users) - set(before.users):
        raise ValueError(f"before: expected the users of the split, got none of {len(lost):,} such as {min(lost)!r}")
    if (before.log.time is None) != (after.log.time is None):
        raise ValueError("on: expected times where the data of the training has them, and none where it has none")
    both, fresh = joined(before, after)
    table = grown(known, both.items)
    number = np.append(0, table.encode(both.items.ids))
    log = Histories(both.log.offsets, number[both.log.item], both.log.time)
    row = np.repeat(np.arange(len(log)), log.lengths)
    nth = np.arange(len(row)) - log.offsets[:-1][row]
    ranked = np.append(0, np.cumsum(log.item <= len(known)))
    starts = log.offsets[:-1][row]
    has_history = ranked[np.arange(len(row))] > ranked[starts]
    at = np.flatnonzero(fresh & has_history)
    if not len(at):
        again = len(after.log.item) - int(fresh.sum())
        got = f"none of {len(after.log.item):,}, {again:,} of which are in the earlier data too"
        raise ValueError(f"on: expected a new click of a user with a click before it, got {got}")
    users = tuple(both.users)
    of_train = {user: n for n, user in enumerate(users)}
    test = Cases(row[at], Views(log, starts[at], nth[at]), log.item[at])
    train = _rows(split.train, np.array([of_train[user] for user in split.users], np.int64), len(users))
    counts = np.concatenate([split.counts, np.zeros(len(table) - len(split.items), np.int64)])
    found = Split(table, users, train, _no_cases(), test, counts)
    earlier_users, of_split = set(before.users), len(split.items)
    is_new = np.array([user not in earlier_users for user in users])[row[at]]
    new_item = log.item[at] > of_split
    early = None
    if log.time is not None and split.train.time is not None:
        early = int((log.time[at] < split.train.time.max(initial=log.time.min())).sum())
    report = LaterReport(
        clicks=len(after.log.item),
        again=len(after.log.item) - int(fresh.sum()),
        cases=len(at),
        no_history=int(fresh.sum()) - len(at),
        new_users=len(set(after.users) - earlier_users),
        new_user_cases=int(is_new.sum()),
        new_items=int((np.unique(log.item[fresh]) > of_split).sum()),
        new_item_cases=int(new_item.sum()),
        repeated=int(found.test.repeated.sum()),
        before_training_ended=early,
    )
    groups = {"known users and items": ~is_new & ~new_item, "new users": is_new, "new items": new_item}
    return Later(found, groups, report)


def _rows(histories: Histories, rows: np.ndarray, count: int) -> Histories:
    """The same histories as the rows `rows` of `count`; all other rows are empty."""
    lengths = np.zeros(count, np.int64)
    lengths[rows] = histories.lengths
    order = np.argsort(rows, kind="stable")
    taken = histories.take(order)
    return Histories(np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]), taken.item, taken.time)


def _no_cases() -> Cases:
    none = np.zeros(0, np.int64)
    return Cases(none, Histories(np.zeros(1, np.int64), none), none)
