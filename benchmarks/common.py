"""Shared by the benchmarks: alternating timings, medians of ratios, facts about the machine, options, tables, files.

Must not know a loss or a shape: those are in cases.py.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fastcl

RESULTS = Path(__file__).parent / "results"


def alternate(candidates: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Seconds per call of each candidate, measured `repeats` times.

    Candidates take turns, so that a change of the machine's load affects all alike. One that takes less than 2 ms is
    called several times per measurement.
    """
    inner = {}
    for name, run in candidates.items():
        run()  # warm-up: compilation, caches, allocator
        begin = time.perf_counter()
        run()
        inner[name] = max(1, int(2e-3 / (time.perf_counter() - begin)))
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(repeats):
        for name, run in candidates.items():
            begin = time.perf_counter()
            for _ in range(inner[name]):
                run()
            seconds[name].append((time.perf_counter() - begin) / inner[name])
    return seconds


def median_ratio(seconds: Mapping[str, Sequence[float]], over: str, under: str) -> float:
    """Median of seconds[over] / seconds[under]; each ratio is of two measurements that follow each other."""
    return statistics.median(a / b for a, b in zip(seconds[over], seconds[under], strict=True))


def step(loss: Callable[[], Tensor], learns: Sequence[Tensor], backward: bool) -> Callable[[], None]:
    """One timed call: the loss alone under no_grad, or with its backward pass into fresh gradients of `learns`."""

    def run() -> None:
        if not backward:
            with torch.no_grad():
                loss()
            return
        for x in learns:
            x.grad = None
        loss().backward()

    return run


def products(query: Tensor, blocks: Sequence[tuple[Tensor, bool]], backward: bool) -> Callable[[], None]:
    """The bare matrix products of a loss, into preallocated outputs: query [N, D] with blocks of (keys [M, D], whether
    the keys get a gradient).

    Each block takes one product forward, one more backward for the gradient of the query and, if its keys get a
    gradient, one for that.
    """
    q = query.detach()
    dq = torch.empty_like(q)
    work = [(k.detach(), torch.empty(len(q), len(k), dtype=q.dtype), torch.empty_like(k), own) for k, own in blocks]

    def run() -> None:
        for k, s, dk, own in work:
            torch.mm(q, k.T, out=s)
            if backward:
                torch.mm(s, k, out=dq)
                if own:
                    torch.mm(s.T, q, out=dk)

    return run


def machine() -> dict[str, Any]:
    """The facts that a figure depends on: processor, instruction set, versions, number of threads."""
    return hardware() | {"threads": torch.get_num_threads()}


def hardware() -> dict[str, Any]:
    """`machine` without the number of threads, for results whose rows name it. Lists preloaded libraries, since one of
    them may change which instructions torch's products use.
    """
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = [
            line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        ]
        model = lines[0] if lines else model
    facts = fastcl.config()
    found = {"processor": model, "cores": os.cpu_count(), **{key: facts[key] for key in ("isa", "torch", "version")}}
    preloaded = [Path(library).name for library in os.environ.get("LD_PRELOAD", "").replace(":", " ").split()]
    return found | ({"preloaded": preloaded} if preloaded else {})


def numbers(text: str) -> list[int]:
    """The numbers in a text like `1,2`, each at least 1. For argparse."""
    found = [int(part) for part in text.split(",")]
    if min(found) < 1:
        raise ValueError(text)
    return found


def all_thread_counts() -> list[int]:
    """1, 2, 4 ... up to the number of cores, which is the last."""
    cores = os.cpu_count() or 1
    return sorted({1, cores} | {2**i for i in range(1, 8) if 2**i < cores})


def chosen(text: str, option: str, choices: Iterable[str], parser: argparse.ArgumentParser) -> list[str]:
    """The comma-separated names of an option, each one of `choices`."""
    names = [name for name in text.split(",") if name]
    unknown = [name for name in names if name not in choices]
    if unknown:
        parser.error(f"{option}: expected some of {', '.join(choices)}, got {', '.join(unknown)}")
    return names


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as a Markdown table; floats with two decimals."""
    head = list(rows[0])
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for row in rows:
        cells = ["-" if row[h] is None else f"{row[h]:.2f}" if isinstance(row[h], float) else str(row[h]) for h in head]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def report(rows: Sequence[Mapping[str, Any]], note: str) -> str:
    """A page of results: a line with the facts of the machine and a note on the measurement, and the table."""
    facts = ", ".join(f"{key} {value}" for key, value in hardware().items())
    return f"{facts}; {note}\n\n{markdown(rows)}\n"


def results(name: str) -> Any:
    """The content of benchmarks/results/NAME.json."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def write_text(path: Path, content: str) -> None:
    """Writes a file by way of a temporary one, so that the file is complete or not there at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(path.suffix + ".part")
    part.write_text(content)
    part.replace(path)


def write_json(path: Path, content: Any) -> None:
    write_text(path, json.dumps(content, indent=1) + "\n")


def publish(page: str, content: Any, output: Path | None) -> None:
    """Prints a page of results; with `output`, a path without suffix, it also becomes a file beside its JSON."""
    print(page)
    if output is not None:
        write_json(output.with_suffix(".json"), content)
        write_text(output.with_suffix(".md"), page)
