"""Threads share a model: each gets the lists that it would get alone, and the items are encoded by one of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from threading import Barrier
from typing import Any

import numpy as np
import pytest
from made import LEARNED, made

from fastcl.recsys import (
    CoOccurrence,
    Histories,
    Interactions,
    Items,
    Model,
    Popularity,
    frozen,
    query_vectors,
    recommend,
    recommend_users,
    similar,
)
from fastcl.recsys.models import LATER

pytestmark = pytest.mark.usefixtures("one_thread")
THREADS = 32
OPTIONS: dict[str, Any] = {"dim": 16, "max_len": 7, "time_cuts": ()}
SIZES: dict[str, dict[str, int]] = {
    "clrec": {"batch": 16, "negatives": 48},
    "multi_clrec": {"batch": 16, "main": 32, "secondary": 8},
}


def log() -> Interactions:
    """200 users with 5 clicks each on 60 items."""
    clicks = np.random.default_rng(0).integers(1, 61, (200, 5))
    items = Items(tuple(f"i{number}" for number in range(60)))
    return Interactions(items, tuple(f"u{user}" for user in range(200)), Histories.from_lists(clicks.tolist()))


def at_once(call: Callable[[int], Any]) -> list[Any]:
    """call(0), call(1), ..., one for each thread, begun together."""
    ready = Barrier(THREADS)

    def run(number: int) -> Any:
        ready.wait()
        return call(number)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(run, range(THREADS)))


WITHIN: dict[str, Callable[[Model], Any]] = {"alone": nullcontext, "frozen": frozen}


@pytest.mark.parametrize(
    ("name", "within"),
    [
        *((name, "alone") for name in LEARNED if name not in LATER),
        *(pytest.param(name, "alone", marks=pytest.mark.slow) for name in LEARNED if name in LATER),
        ("clrec", "frozen"),
        ("lightgcn", "frozen"),
    ],
)
def test_32_threads_get_equal_lists(name: str, within: str) -> None:
    """A model in training mode, so that one that left eval mode under another thread would drop out."""
    data = log()
    model = made(name, data.items, seed=3, **OPTIONS, **SIZES.get(name, {}))
    popular = Popularity(data.split().counts, data.items)

    def served(number: int) -> list[Any]:
        ids = [data.items.ids[(7 * number + step) % 60] for step in range(5)]
        return [
            recommend(model, [ids, ids[2:], []], k=5, fallback=popular),
            similar(model, ids[0], k=5),
            query_vectors(model, [ids, ids[:1]]).tolist(),
            [row for _, row in zip(range(3), recommend_users(model, data, k=5).rows, strict=False)],
        ]

    alone = [served(number) for number in range(THREADS)]
    with WITHIN[within](model):
        assert at_once(served) == alone
    assert model.training


def test_a_floor_is_shared_too() -> None:
    data = log()
    floor = CoOccurrence(data.split().train, len(data.items))

    def served(number: int) -> Any:
        return floor.scores(data.log.take(np.arange(number, number + 9))).tolist()

    assert at_once(served) == [served(number) for number in range(THREADS)]


def test_the_first_calls_encode_the_items_once(monkeypatch: pytest.MonkeyPatch) -> None:
    data = log()
    model = made("clrec", data.items, seed=3, **OPTIONS, **SIZES["clrec"])
    encode, calls = type(model).item_vectors, [0]

    def slow(self: Model) -> Any:
        calls[0] += 1
        time.sleep(0.05)  # the others arrive meanwhile
        return encode(self)

    def served(number: int) -> Any:
        return recommend(model, [[data.items.ids[number]]], k=5)

    alone = [served(number) for number in range(THREADS)]
    monkeypatch.setattr(type(model), "item_vectors", slow)
    with frozen(model):
        assert at_once(served) == alone
    assert calls == [1]


def test_a_failed_first_call_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    data = log()
    model = made("clrec", data.items, seed=3, **OPTIONS, **SIZES["clrec"])
    encode, calls = type(model).item_vectors, [0]

    def broken(self: Model) -> Any:
        calls[0] += 1
        if calls[0] == 1:
            raise MemoryError("the first one")
        return encode(self)

    monkeypatch.setattr(type(model), "item_vectors", broken)

    def served(number: int) -> int:
        try:
            return len(recommend(model, [[data.items.ids[number]]], k=5)[0])
        except MemoryError:
            return -1

    with frozen(model):
        found = at_once(served)
    assert sorted(found) == [-1] + [5] * (THREADS - 1)
    assert calls == [2]
