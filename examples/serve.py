"""Lists from a run over HTTP: pip install fastapi uvicorn, then python -m examples.serve RUN --port 8000

curl localhost:8000/recommend -H 'Content-Type: application/json' -d '{"history": ["sku1", "sku2"], "k": 5}'
"""

import argparse

import torch
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel, Field

from fastcl.recsys import Batcher, load
from fastcl.recsys.training.checkpoint import read_config


class Ask(BaseModel):
    history: list[str]
    k: int = Field(default=10, ge=1, le=1000)


def service(batcher: Batcher) -> FastAPI:
    app = FastAPI()
    @app.post("/recommend")
    async def answer(ask: Ask) -> list[tuple[str, float]]:
        return await batcher.answer(ask.history, ask.k)

    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run")
    for name, default in {"port": 8000, "threads": 1, "batch": 32}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.set_num_threads(1)
    seen = read_config(args.run).get("seen", "mask")
    with Batcher(load(args.run), threads=args.threads, batch=args.batch, seen=seen) as batcher:
        uvicorn.run(service(batcher), port=args.port, log_level="warning")
