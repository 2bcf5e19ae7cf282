"""Lists from a run over HTTP: pip install fastapi uvicorn, then python -m examples.serve RUN --port 8000

curl localhost:8000/recommend -H 'Content-Type: application/json' -d '{"history": ["sku1", "sku2"], "k": 5}'
"""

import argparse
import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import torch
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel, Field

from fastcl.recsys import frozen, load, recommend


class Ask(BaseModel):
    history: list[str]
    k: int = Field(default=10, ge=1, le=1000)


def service(model, threads: int = 1, batch: int = 32) -> FastAPI:
    """Each thread answers up to `batch` of the requests that wait, with one call, as soon as it is free."""
    waiting, pool = asyncio.Queue(), ThreadPoolExecutor(threads)

    async def work():
        while True:
            asks = [await waiting.get()]
            while len(asks) < batch and not waiting.empty():
                asks.append(waiting.get_nowait())
            histories, k = [ask.history for ask, _ in asks], max(ask.k for ask, _ in asks)
            call = asyncio.get_running_loop().run_in_executor(pool, recommend, model, histories, k)
            (found,) = await asyncio.gather(call, return_exceptions=True)
            for nth, (ask, answer) in enumerate(asks):
                if not answer.done():  # the client may have gone
                    answer.set_result(found if isinstance(found, BaseException) else found[nth][: ask.k])

    @asynccontextmanager
    async def lifespan(app):
        with frozen(model):  # the items are encoded once
            workers = [asyncio.create_task(work()) for _ in range(threads)]
            yield
            for worker in workers:
                worker.cancel()

    app = FastAPI(lifespan=lifespan)

    @app.post("/recommend")
    async def answer(ask: Ask) -> list[tuple[str, float]]:
        waiting.put_nowait((ask, answer := asyncio.get_running_loop().create_future()))
        row = await answer
        if isinstance(row, BaseException):
            raise row
        return row

    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run")
    for name, default in {"port": 8000, "threads": 1, "batch": 32}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.set_num_threads(1)
    uvicorn.run(service(load(args.run), args.threads, args.batch), port=args.port, log_level="warning")
