"""A queue as a plain list, and pushes that go to both: what the tests of NegativeQueue compare it with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import fastcl

Entry = tuple[float, "int | None", "float | None"]


class ListQueue:
    """The model: a list of (key number, id, log q), oldest first, that drops from the front."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.entries = capacity, list[Entry]()
        self.has_ids = self.has_log_q = False

    def push(self, entries: list[Entry]) -> list[Entry]:
        self.entries += entries
        split = max(0, len(self.entries) - self.capacity)
        evicted, self.entries = self.entries[:split], self.entries[split:]
        return evicted


def keys_of(numbers: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
    """Three features a key, all made from its number, so that a torn row shows."""
    return torch.tensor([[x, -x, 2 * x] for x in numbers], dtype=dtype).reshape(len(numbers), 3)


def batch_of(first: int, size: int, with_ids: bool, with_log_q: bool) -> tuple[list[Entry], dict[str, Any]]:
    numbers = list(range(first, first + size))
    entries = [(float(x), 100 + x if with_ids else None, -x / 8 if with_log_q else None) for x in numbers]
    arguments: dict[str, Any] = {"keys": keys_of([float(x) for x in numbers])}
    if with_ids:
        arguments["ids"] = torch.tensor([100 + x for x in numbers], dtype=torch.int64)
    if with_log_q:
        arguments["log_q"] = torch.tensor([-x / 8 for x in numbers])
    return entries, arguments


def assert_rows(
    entries: list[Entry], keys: Tensor, ids: Tensor | None, log_q: Tensor | None, model: ListQueue, ordered: bool
) -> None:
    order = torch.arange(len(entries)) if ordered else keys[:, 0].argsort()
    assert torch.equal(keys[order], keys_of([x for x, _, _ in entries], keys.dtype))
    assert (ids is not None) == model.has_ids
    assert (log_q is not None) == model.has_log_q
    if ids is not None:
        assert ids.dtype == torch.int64
        found = ids[order].tolist()
        assert [i for i in found if i >= 0] == [e[1] for e in entries if e[1] is not None]
        assert [i >= 0 for i in found] == [e[1] is not None for e in entries]
    if log_q is not None:
        # Entries pushed without one carry log 1: no correction.
        assert log_q[order].tolist() == [0.0 if e[2] is None else e[2] for e in entries]


def assert_equal_to_model(queue: fastcl.NegativeQueue, model: ListQueue) -> None:
    assert len(queue) == len(model.entries)
    assert len(queue.keys) == len(queue)
    # Numbers grow with every push, so the model's order, oldest first, is also the sorted one.
    assert_rows(model.entries, queue.keys, queue.ids, queue.log_q, model, ordered=False)
    for count in range(len(model.entries) + 2):
        newest = model.entries[max(0, len(model.entries) - count) :]
        assert_rows(newest, *queue.newest(count), model, ordered=True)


def push_both(queue: fastcl.NegativeQueue, model: ListQueue, first: int, size: int, ids: bool, log_q: bool) -> None:
    entries, arguments = batch_of(first, size, ids, log_q)
    evicted = queue.push(**arguments)
    model.has_ids |= ids
    model.has_log_q |= log_q
    expected = model.push(entries)
    assert isinstance(evicted, fastcl.Evicted)
    assert_rows(expected, evicted.keys, evicted.ids, evicted.log_q, model, ordered=True)
    assert_equal_to_model(queue, model)


def filled(capacity: int, *sizes: int) -> tuple[fastcl.NegativeQueue, ListQueue]:
    queue, model, first = fastcl.NegativeQueue(capacity, 3), ListQueue(capacity), 0
    for size in sizes:
        push_both(queue, model, first, size, True, True)
        first += size
    return queue, model


def other_queue(capacity: int = 5) -> fastcl.NegativeQueue:
    """One that holds something else, which is to go."""
    return filled(capacity, 2)[0]
