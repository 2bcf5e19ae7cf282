"""`Batcher`: the requests that wait are answered together, by one call of `recommend`.

It knows threads, event loops and futures, and no web framework.
"""

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from types import TracebackType
from typing import Any, NamedTuple

from fastcl.recsys.data import Scorer
from fastcl.recsys.data.scoring import frozen
from fastcl.recsys.evaluation.cutoffs import Cutoffs, cutoff
from fastcl.recsys.models import Model
from fastcl.recsys.options import at_least
from fastcl.recsys.serving.index import ItemIndex, open_index
from fastcl.recsys.serving.recommend import Row, recommend


class _Request(NamedTuple):
    history: Sequence[str]
    k: int
    times: Sequence[float] | None
    answer: "Future[Row] | asyncio.Future[Row]"
    loop: asyncio.AbstractEventLoop | None  # of a coroutine that waits; None: a thread does


class Batcher:
    """Answers single histories that many clients ask for at once, in a `with` block.

    Each of `threads` threads takes the requests that wait, up to `batch` of them, and answers these with one call of
    `recommend`, which costs little more than a call for one history. No request waits for others to come. A request
    that `recommend` refuses fails alone. Inside the block the model is `frozen`, so that its items are encoded once.
    The end of the block waits until every request is answered.

    Args:
        model: any `Model`.
        threads: how many batches are computed at the same time, >= 1. More than one seldom pays: they share Python's
            lock.
        batch: the most histories of one call, >= 1.
        seen, strict, only, without, fallback, index: as in `recommend`, for every request.

    Raises what `recommend` raises for these.

    >>> from fastcl.recsys import Batcher, Items, SASRec
    >>> model = SASRec(Items(ids=("a", "b", "c")), dim=8, seed=0)
    >>> with Batcher(model) as batcher:
    ...     answer = batcher.submit(["a"], k=2)
    >>> sorted(item for item, score in answer.result())
    ['b', 'c']
    """

    def __init__(
        self,
        model: Model,
        *,
        threads: int = 1,
        batch: int = 32,
        seen: str = "mask",
        strict: bool = False,
        only: Sequence[str] | None = None,
        without: Sequence[str] = (),
        fallback: Scorer | None = None,
        index: str | Path | ItemIndex | None = None,
    ) -> None:
        at_least(1, "threads", threads)
        at_least(1, "batch", batch)
        self.model, self.threads, self.batch = model, threads, batch
        opened = open_index(index) if isinstance(index, str | Path) else index
        self._options: dict[str, Any] = {"seen": seen, "strict": strict, "only": only, "without": without}
        self._options |= {"fallback": fallback, "index": opened}
        recommend(model, [], **self._options)  # a bad option is an error here, and not of each request
        self._waiting: SimpleQueue[_Request | None] = SimpleQueue()  # None ends one thread
        self._open, self._lock, self._block = False, Lock(), ExitStack()

    def submit(self, history: Sequence[str], k: Cutoffs = 10, times: Sequence[float] | None = None) -> Future[Row]:
        """The k best items for a history, as a row of `recommend`, once they are known: `submit(...).result()` waits. A
        cancelled request is not computed. Coroutines wait for `answer` instead.

        history: external ids, oldest first. k: length of the row. times: one number per id, as in `recommend`.

        Raises what `recommend` raises for a bad k, and RuntimeError outside the `with` block; all other errors are
        those of the future.
        """
        answer: Future[Row] = Future()
        self._put(_Request(history, cutoff(k), times, answer, None))
        return answer

    async def answer(self, history: Sequence[str], k: Cutoffs = 10, times: Sequence[float] | None = None) -> Row:
        """What `submit` gives, for a coroutine. The answers of one batch wake the event loop once, which takes a busy
        service a fraction of the time of one wake-up each.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Row] = loop.create_future()
        self._put(_Request(history, cutoff(k), times, answer, loop))
        return await answer

    def _put(self, request: _Request) -> None:
        with self._lock:
            if not self._open:
                raise RuntimeError("batcher: expected a request inside the `with` block, got one outside")
            self._waiting.put(request)

    def __enter__(self) -> "Batcher":
        with self._lock:
            if self._open:
                raise RuntimeError("batcher: expected one `with` block at a time, got a second one")
            self._block.enter_context(frozen(self.model))
            for _ in range(self.threads):
                thread = Thread(target=self._work, daemon=True)
                self._block.callback(thread.join)
                thread.start()
            self._open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._open = False
            for _ in range(self.threads):
                self._waiting.put(None)
        self._block.close()

    def _work(self) -> None:
        while (first := self._waiting.get()) is not None:
            taken = [first]
            while len(taken) < self.batch:
                try:
                    request = self._waiting.get_nowait()
                except Empty:
                    break
                if request is None:  # meant for a thread that waits
                    self._waiting.put(None)
                    break
                taken.append(request)
            self._answer([request for request in taken if _wanted(request)])

    def _answer(self, requests: Sequence[_Request]) -> None:
        done: dict[asyncio.AbstractEventLoop | None, list[tuple[_Request, Row | BaseException]]] = defaultdict(list)
        for request, outcome in zip(requests, self._outcomes(requests), strict=True):
            done[request.loop].append((request, outcome))
        for loop, outcomes in done.items():
            if loop is None:
                _deliver(outcomes)
            else:
                with suppress(RuntimeError):  # of a closed loop, where nobody waits
                    loop.call_soon_threadsafe(_deliver, outcomes)

    def _outcomes(self, requests: Sequence[_Request]) -> list[Row | BaseException]:
        if not requests:
            return []
        try:
            return [row[: request.k] for request, row in zip(requests, self._rows(requests), strict=True)]
        except BaseException as error:
            if len(requests) == 1:
                return [error]
        return [outcome for request in requests for outcome in self._outcomes([request])]

    def _rows(self, requests: Sequence[_Request]) -> list[Row]:
        histories, times = [request.history for request in requests], None
        if any(request.times is not None for request in requests):  # a history without times was made in one moment
            times = [[0] * len(of.history) if of.times is None else of.times for of in requests]
        return recommend(self.model, histories, max(request.k for request in requests), times=times, **self._options)


def _wanted(request: _Request) -> bool:
    if isinstance(request.answer, asyncio.Future):
        return not request.answer.cancelled()
    return request.answer.set_running_or_notify_cancel()


def _deliver(outcomes: Iterable[tuple[_Request, Row | BaseException]]) -> None:
    for request, outcome in outcomes:
        if request.answer.done():  # a coroutine that went away meanwhile
            continue
        if isinstance(outcome, BaseException):
            request.answer.set_exception(outcome)
        else:
            request.answer.set_result(outcome)
