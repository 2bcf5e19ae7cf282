"""Logs put together, against plain loops over rows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcl.recsys import Histories, Interactions, Items, merge

Rows = list[tuple[str, str, int]]
LOG = st.lists(st.tuples(st.sampled_from("uvw"), st.sampled_from("xyz"), st.integers(0, 4)), min_size=1, max_size=12)


def read(rows: Rows, timed: bool = True) -> Interactions:
    users, items, times = map(list, zip(*rows, strict=True))
    table = {"user": users, "item": items} | ({"time": times} if timed else {})
    return Interactions.read(table, time="time" if timed else None)


def rows_of(data: Interactions) -> dict[str, list[tuple[str, int | None]]]:
    log = data.log
    found = {}
    for n, user in enumerate(data.users):
        inside = range(log.offsets[n], log.offsets[n + 1])
        found[user] = [
            (data.items.ids[log.item[k] - 1], None if log.time is None else int(log.time[k])) for k in inside
        ]
    return found


@given(st.lists(LOG, min_size=1, max_size=3))
def test_with_times_no_click_is_lost_and_none_counts_twice(logs: list[Rows]) -> None:
    whole: Rows = []
    for rows in logs:
        whole = [row for row in whole if row not in rows] + rows
    users = list(dict.fromkeys(user for rows in logs for user, _, _ in rows))
    expected = {user: sorted([r[1:] for r in whole if r[0] == user], key=lambda click: click[1]) for user in users}
    merged = merge(*map(read, logs))
    assert rows_of(merged) == expected
    assert list(merged.users) == users
    assert merged.items.ids == tuple(dict.fromkeys(item for rows in logs for _, item, _ in rows))
    assert merged.log.items is merged.items


@given(LOG, LOG)
def test_without_times_a_longer_export_takes_the_place_of_the_shorter(first: Rows, second: Rows) -> None:
    merged = rows_of(merge(read(first, False), read(second, False)))
    for user, found in merged.items():
        a, b = ([item for name, item, _ in rows if name == user] for rows in (first, second))
        assert [item for item, _ in found] == (b if b[: len(a)] == a else a + b)
    whole = read(first + second, False)
    assert rows_of(merge(read(first, False), whole)) == rows_of(whole)


def test_logs_that_cannot_be_merged_are_refused() -> None:
    with pytest.raises(ValueError, match="logs: expected at least one, got none"):
        merge()
    with pytest.raises(ValueError, match="expected all with times or all without, got both"):
        merge(read([("u", "x", 1)]), read([("u", "x", 1)], False))
    empty = Interactions(Items(("x",)), ("u",), Histories.from_lists([[]]))
    assert rows_of(merge(empty, empty)) == {"u": []}
