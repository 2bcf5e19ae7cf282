"""The work that bench_scale.py measures, each in processes of its own: steps, saves, validation, the first batch of an
epoch, and lists from an index, over a made-up catalogue of any size.

Popularity follows a power law, 1 / rank ** 0.8, and says nothing about quality. Time and memory do not depend on it but
for the number of distinct items in a batch.
"""

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastcl import pages
from fastcl.recsys import Cases, CLRec, Histories, Items, SASRec, Split, export, open_index, recommend
from fastcl.recsys.data.ids import Ids
from fastcl.recsys.data.scoring import frozen
from fastcl.recsys.training import loop, processes, state, validation
from fastcl.recsys.training.state import Settings

LENGTH = 30
CASES = 256
LR = 3e-3


def own() -> float:
    """MB of the process that are of no file."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) * 1024 / 1e6


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def timed(run: Callable[[], Any]) -> dict[str, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return {"ms": 1e3 * (time.perf_counter() - wall), "CPU ms": 1e3 * (time.process_time() - cpu)}


def middle(found: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(each[name] for each in found) for name in found[0]}


def catalogue(count: int) -> Items:
    """Items whose ids are numbers of eight digits, without a Python string for each."""
    digits = (np.arange(count)[:, None] // 10 ** np.arange(7, -1, -1) % 10 + 48).astype(np.uint8)
    return Items(Ids(digits.reshape(-1), np.arange(count + 1, dtype=np.int64) * 8, digest=f"{count} of eight digits"))


def clicks(items: int, users: int) -> Histories:
    """Histories of 30 clicks; popular items have numbers all over the table."""
    rng = np.random.default_rng(0)
    upto = np.cumsum(np.arange(1, items + 1) ** -0.8)
    item = np.searchsorted(upto, rng.random(users * LENGTH) * upto[-1])
    spread = 1 + (item.astype(np.uint64) * np.uint64(2654435761) % np.uint64(items)).astype(np.int64)
    return Histories(np.arange(users + 1, dtype=np.int64) * LENGTH, spread)


def run_of(items: int, table: str, **options: Any) -> loop.Run:
    """CLRec with the paper's sizes, about to train."""
    names, log = catalogue(items), clicks(items, 4_000)
    rows = np.arange(CASES)
    target = log.slice(log.offsets[1 : CASES + 1] - 1, np.ones(CASES, np.int64)).item
    valid = Cases(rows, log.take(rows), target)
    none = Cases(rows[:0], log.take(rows[:0]), target[:0])
    counts = np.bincount(log.item, minlength=items + 1)
    split = Split(names, tuple(map(str, range(len(log)))), log, valid, none, counts)
    model = CLRec(names, seed=0, table=table, time_cuts=(), **options)
    model.share = processes.rank(), processes.count()
    run = loop.new_run(model, split, Settings(1, LR, seen="keep"))
    run.optimizer.share_out()
    return run


def steps(items: int, table: str, rounds: int = 9, momentum: float = 0.0, large_pages: bool = True) -> dict[str, Any]:
    """A step of training: the loss, the gradients, the optimiser; and the making of its batch."""
    if not large_pages:
        pages.LEAST = sys.maxsize
    before = own()
    size = processes.count()
    options = {"momentum": momentum, "negatives_from": "vectors"} if momentum else {}
    run = run_of(items, table, batch=256 * size, negatives=256 * size + 2304, **options)
    for rule in run.optimizer.rules.values():
        for key in rule.PER_ROW:
            getattr(rule, key).add_(0)  # as after many steps: no row pays for the first touch of its memory
    batches = run.model.train().batches(run.split.train, np.random.default_rng(0))
    alone, whole, rows = [], [], []
    with run.optimizer.reading():
        for nth in range(10 + rounds):  # the queue of negatives is full after nine
            batch: list[Any] = []
            alone.append(timed(partial(lambda into: into.append(next(batches)), batch)))
            rows.append(len(torch.cat([ids for _, ids in run.model.reads(batch[0]) if ids is not None]).unique()))
            processes.wait()
            whole.append(timed(partial(loop.step, run, batch)))
            if nth == 9:
                alone, whole, rows = [], [], []
        memory = own() - before
    return {
        **middle(whole),
        "batch, CPU ms": middle(alone)["CPU ms"],
        "distinct rows": statistics.median(rows),
        "memory, MB": memory,
    }


def saves(items: int, table: str) -> dict[str, Any]:
    """A checkpoint within an epoch."""
    run = run_of(items, table)
    for rule in run.optimizer.rules.values():
        for key in rule.PER_ROW:
            getattr(rule, key).add_(0)
    before = peak()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(processes.collect(folder.encode())[0].decode())  # that of the first process
        found = timed(lambda: state.save(place, run.model, run.optimizer, run.progress))
        size = sum(file.stat().st_size for file in place.rglob("*") if file.is_file())
        processes.wait()
    return {**found, "peak more, MB": peak() - before, "files, MB": size / 1e6}


def validations(items: int, table: str) -> dict[str, Any]:
    """A case of validation: time of all cases divided by their number."""
    run = run_of(items, table)
    before = peak()
    found = timed(lambda: validation.validate(run))
    return {**{name: value / CASES for name, value in found.items()}, "peak more, MB": peak() - before}


def first_batch(users: int) -> dict[str, Any]:
    """The first batch of an epoch, of CLRec over 100,000 items: it draws the order of all clicks."""
    log = clicks(100_000, users)
    model = CLRec(catalogue(100_000), seed=0, time_cuts=())
    batches = model.batches(log, np.random.default_rng(0))
    before = peak()
    found = timed(lambda: next(batches))
    return {"clicks": len(log.item), **found, "peak more, MB": peak() - before}


def index(items: int) -> dict[str, Any]:
    """Lists by exact search and from an index, of a SASRec without training but for its items: these are unit vectors
    around 2,000 centres in 12 of 64 dimensions, with noise in all.
    """
    rng = np.random.default_rng(7)
    centre, turn = rng.standard_normal((2_000, 12), np.float32), rng.standard_normal((12, 64), np.float32)
    made = (centre[rng.integers(0, 2_000, items)] + 0.5 * rng.standard_normal((items, 12), np.float32)) @ turn
    made += 0.3 * rng.standard_normal((items, 64), np.float32)
    names = catalogue(items)
    model = SASRec(names, seed=0, dim=64).eval()
    model.item.weight.data[1:] = torch.from_numpy(made / np.linalg.norm(made, axis=1, keepdims=True))
    histories = clicks(items, 1_000)
    with tempfile.TemporaryDirectory() as folder, frozen(model):
        about: dict[str, Any] = {}
        built = timed(lambda: about.update(export(model, folder, "faiss", queries=histories.last(5), k=50)))
        opened = timed(lambda: open_index(folder))
        found = open_index(folder)
        asked = [[names.ids[item - 1] for item in histories.item[n * LENGTH : n * LENGTH + 5]] for n in range(30)]
        by_index = middle([timed(partial(recommend, model, [row], 50, index=found)) for row in asked][5:])
        exact = middle([timed(partial(recommend, model, [row], 50)) for row in asked][5:])
    recall = next(value for name, value in about.items() if name.startswith("recall@"))
    return {
        "index": about["index"],
        "export, s": built["ms"] / 1e3,
        "file, MB": about["bytes"] / 1e6,
        "open, ms": opened["ms"],
        "recall@50": recall,
        "search, ms": about["query_ms"],
        "list, ms": by_index["ms"],
        "exact list, ms": exact["ms"],
    }


def spark(rows: int, master: str) -> dict[str, Any]:
    """The recipe of examples/spark_clicks.py, and the preparation of what it writes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe = [sys.executable, "-m", "examples.spark_clicks"]
        prepare = [sys.executable, "-m", "fastcl.recsys", "data", "prepare", str(folder / "clicks")]
        commands = {
            "make": [*recipe, "make", str(rows), str(folder / "logs")],
            "clicks": [*recipe, "clicks", str(folder / "logs"), str(folder / "clicks"), "--master", master],
            "prepare": [*prepare, "-o", str(folder / "prepared")],
        }
        found: dict[str, Any] = {}
        for what, command in commands.items():
            begun = time.perf_counter()
            subprocess.run(command, check=True, capture_output=True)
            found[f"{what}, s"] = time.perf_counter() - begun
        about = json.loads((folder / "prepared" / "prepared.json").read_text())
        found["rows kept"] = about["report"]["rows"]
        for what in ("logs", "clicks", "prepared"):
            found[f"{what}, MB"] = (
                sum(file.stat().st_size for file in (folder / what).rglob("*") if file.is_file()) / 1e6
            )
        return found
