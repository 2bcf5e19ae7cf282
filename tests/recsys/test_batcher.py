"""Batcher: each request gets its own row, whatever waits beside it. A bad request fails alone, and the block ends when
all are answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import numpy as np
import pytest

from fastcl.recsys import Batcher, CLRec, Items, Model, Popularity, SASRec, frozen, recommend
from fastcl.recsys.serving import batcher as module

pytestmark = pytest.mark.usefixtures("one_thread")
ITEMS = Items(tuple(f"i{number}" for number in range(60)))


def model() -> SASRec:
    return SASRec(ITEMS, dim=16, seed=0).eval()


def history(nth: int) -> list[str]:
    return [ITEMS.ids[(7 * nth + step) % 60] for step in range(1 + nth % 5)]


class Watched:
    """`recommend` that notes the sizes of its calls and waits in the first one until the gate is open."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes, self.begun, self.gate = list[int](), Event(), Event()
        monkeypatch.setattr(module, "recommend", self)

    def __call__(self, of: Model, histories: Sequence[Any], *args: Any, **options: Any) -> Any:
        if histories:  # none: the options are checked
            self.sizes.append(len(histories))
            self.begun.set()
            assert self.gate.wait(60)
        return recommend(of, histories, *args, **options)


@pytest.mark.parametrize(("threads", "batch"), [(1, 32), (4, 3)])
def test_each_client_gets_its_own_row(threads: int, batch: int) -> None:
    served = model()
    with Batcher(served, threads=threads, batch=batch, without=["i3"]) as batcher, ThreadPoolExecutor(8) as pool:
        rows = list(pool.map(lambda nth: batcher.submit(history(nth), 1 + nth % 7).result(60), range(100)))
    with frozen(served):
        for nth, row in enumerate(rows):
            (expected,) = recommend(served, [history(nth)], 1 + nth % 7, without=["i3"])
            assert [item for item, _ in row] == [item for item, _ in expected]
            assert [score for _, score in row] == pytest.approx([score for _, score in expected], abs=1e-4)


def test_what_waits_is_answered_with_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    with Batcher(model(), batch=4) as batcher:
        first = batcher.submit(history(0))
        assert watched.begun.wait(60)
        others = [batcher.submit(history(nth)) for nth in range(1, 8)]
        cancelled = others.pop(1)
        assert cancelled.cancel()
        watched.gate.set()
        assert all(len(answer.result(60)) == 10 for answer in (first, *others))
    assert watched.sizes == [1, 3, 3]  # of the second batch's four requests one was cancelled


def test_a_bad_request_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    wrong: Any = ["i1", 3]
    with Batcher(model(), strict=True) as batcher:
        blocked = batcher.submit(history(0))
        assert watched.begun.wait(60)
        good, bad, stranger = (batcher.submit(of) for of in (history(3), wrong, ["nobody's"]))
        watched.gate.set()
        assert len(good.result(60)) == len(blocked.result(60)) == 10
        with pytest.raises(TypeError, match="histories: expected ids as strings, got 3"):
            bad.result(60)
        with pytest.raises(ValueError, match="unknown: .nobody's."):
            stranger.result(60)
        with pytest.raises(ValueError, match="k: "):
            batcher.submit(history(0), 0)
    assert watched.sizes == [1, 3, 1, 1, 1]


def test_coroutines_are_woken_once_for_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    wrong: Any = ["i1", 3]

    async def main() -> list[Any]:
        loop, woken = asyncio.get_running_loop(), []
        call = loop.call_soon_threadsafe
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *args: [woken.append(args), call(*args)])
        with Batcher(served) as batcher:
            tasks = [asyncio.create_task(batcher.answer(history(0)))]
            while not watched.begun.is_set():
                await asyncio.sleep(0.01)
            tasks += [asyncio.create_task(batcher.answer(of, 5)) for of in (history(1), wrong, history(2), history(4))]
            await asyncio.sleep(0.01)
            tasks[3].cancel()
            await asyncio.sleep(0.01)
            watched.gate.set()
            found = await asyncio.gather(*tasks, return_exceptions=True)
        assert len(woken) == 2
        return found

    served = model()
    found = asyncio.run(main())
    assert watched.sizes == [1, 3, 1, 1, 1]  # of four that waited one was cancelled, and one fails alone
    assert [item for item, _ in found[1]] == [item for item, _ in recommend(served, [history(1)], 5)[0]]
    assert [type(each) for each in found] == [list, list, TypeError, asyncio.CancelledError, list]


def test_times_of_some_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    served = CLRec(ITEMS, dim=16, time_cuts=(1.0, 10.0), seed=0).eval()
    ids, times = ["i1", "i2", "i3"], [0, 5, 5 + 10**15]
    with Batcher(served) as batcher:
        batcher.submit(ids)
        assert watched.begun.wait(60)
        answers = [batcher.submit(ids), batcher.submit(ids, times=times)]
        watched.gate.set()
        without, with_times = (answer.result(60) for answer in answers)
    assert watched.sizes == [1, 2]
    expected = recommend(served, [ids]) + recommend(served, [ids], times=[times])
    for row, wanted in zip((without, with_times), expected, strict=True):
        assert dict(row) == pytest.approx(dict(wanted), abs=1e-5)
    assert dict(without) != pytest.approx(dict(with_times), abs=1e-4)


def test_the_end_of_the_block_waits_for_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    watched.gate.set()
    served = model().train()
    batcher = Batcher(served, batch=2, fallback=Popularity(np.arange(61), ITEMS))
    with pytest.raises(RuntimeError, match="inside the `with` block, got one outside"):
        batcher.submit(history(0))
    for _ in range(2):  # a batcher may be used again
        with batcher:
            assert not served.training
            answers = [batcher.submit(history(nth)[: nth % 3]) for nth in range(9)]
            with pytest.raises(RuntimeError, match="one `with` block at a time"), batcher:
                pass
        assert served.training
        assert all(answer.done() and len(answer.result()) == 10 for answer in answers)


@pytest.mark.parametrize("wrong", [{"threads": 0}, {"batch": 1.5}, {"seen": "no"}, {"only": ["nobody's"]}])
def test_bad_options_are_refused_at_once(wrong: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match=f"{next(iter(wrong))}: expected"):
        Batcher(model(), **wrong)
