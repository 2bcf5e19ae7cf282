"""Requests a second and latency of examples/serve.py, by its threads and the size of its batches.

    python -m benchmarks.bench_service [--seconds 6] [--clients 32]      needs fastapi and uvicorn

The service is a process with a run of SASRec with random weights, on which the cost of serving does not depend, and
12,000 items. Another process has 32 clients that keep their connections; each asks again as soon as it is answered,
with the history of a random user (1 to 50 clicks). Both share the machine, so that a second core is partly the
clients'. Every answer is checked for its length. Writes benchmarks/results/service.json.
"""

import argparse
import asyncio
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import machine, markdown, write_json
from fastcl.recsys import Items, SASRec, save

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "service.json"
ITEMS = 12_000
PLANS = ((1, 1), (2, 1), (8, 1), (1, 8), (1, 32), (2, 32))  # (threads, batch)
WARM_UP = 1.0  # seconds
K = 10


def requests() -> list[bytes]:
    rng = np.random.default_rng(0)
    bodies = []
    for _ in range(1000):
        history = [f"item{number}" for number in rng.integers(0, ITEMS, rng.integers(1, 51))]
        bodies.append(json.dumps({"history": history, "k": K}).encode())
    head = "POST /recommend HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
    return [f"{head}{len(body)}\r\n\r\n".encode() + body for body in bodies]


async def client(port: int, asks: list[bytes], nth: int, until: float, found: list[tuple[float, float]]) -> None:
    """Appends (when asked, seconds until answered) of each request."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while (begin := time.perf_counter()) < until:
        writer.write(asks[nth % len(asks)])
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        rows = json.loads(await reader.readexactly(length))
        found.append((begin, time.perf_counter() - begin))
        if not head.startswith(b"HTTP/1.1 200") or len(rows) != K:
            raise ValueError(f"expected {K} items, got {head[:40]!r} {rows}")
        nth += 7
    writer.close()


async def load_test(port: int, clients: int, seconds: float) -> list[float]:
    """Seconds of each request that was asked after the warm-up, and before the end."""
    asks, found = requests(), list[tuple[float, float]]()
    begin = time.perf_counter()
    end = begin + WARM_UP + seconds
    await asyncio.gather(*(client(port, asks, 31 * nth, end, found) for nth in range(clients)))
    return [took for asked, took in found if asked >= begin + WARM_UP and asked + took <= end]


def wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        if process.poll() is not None:
            raise RuntimeError(f"the service ended with {process.returncode}")
        try:
            socket.create_connection(("127.0.0.1", port), 0.1).close()
            return
        except OSError:
            time.sleep(0.1)
    raise TimeoutError("the service does not answer")


def measured(run: Path, threads: int, batch: int, clients: int, seconds: float) -> dict[str, Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = [f"--port={port}", f"--threads={threads}", f"--batch={batch}"]
    service = subprocess.Popen([sys.executable, "-m", "examples.serve", str(run), *options], cwd=ROOT)
    try:
        wait_for(port, service)
        took = asyncio.run(load_test(port, clients, seconds))
    finally:
        service.terminate()
        service.wait()
    cuts = statistics.quantiles(took, n=20)
    return {
        "threads": threads,
        "batch": batch,
        "clients": clients,
        "requests a second": len(took) / seconds,
        "p50 ms": 1e3 * statistics.median(took),
        "p95 ms": 1e3 * cuts[18],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--clients", type=int, default=32)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        save(SASRec(Items(tuple(f"item{number}" for number in range(ITEMS))), seed=0).eval(), Path(folder) / "run")
        for threads, batch in PLANS:
            for clients in (1, args.clients) if (threads, batch) in ((1, 1), (1, 32)) else (args.clients,):
                rows.append(measured(Path(folder) / "run", threads, batch, clients, args.seconds))
                print(rows[-1], flush=True)
    write_json(RESULTS, {"machine": machine(), "items": ITEMS, "seconds": args.seconds, "rows": rows})
    print(markdown(rows))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
