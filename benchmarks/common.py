"""What every benchmark shares: alternating timings, medians of ratios, the machine, tables. Measures nothing itself."""

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import fastcl


def alternate(candidates: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Seconds per call of each candidate, `repeats` times in turn: a change of the machine's load meets all alike.

    A candidate faster than 2 ms is called several times per measurement.
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
    """Median over the repetitions of seconds[over] / seconds[under]: each ratio compares neighbours in time."""
    return statistics.median(a / b for a, b in zip(seconds[over], seconds[under], strict=True))


def machine() -> dict[str, Any]:
    """What a figure must be read with: processor, instruction set, threads, versions."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = [
            line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        ]
        model = lines[0] if lines else model
    facts = fastcl.config()
    return {
        "processor": model,
        "cores": os.cpu_count(),
        **{key: facts[key] for key in ("isa", "threads", "torch", "version")},
    }


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as a Markdown table; floats with two decimals."""
    head = list(rows[0])
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for row in rows:
        cells = ["-" if row[h] is None else f"{row[h]:.2f}" if isinstance(row[h], float) else str(row[h]) for h in head]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write_json(path: Path, content: Any) -> None:
    """Written whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(path.suffix + ".part")
    part.write_text(json.dumps(content, indent=1) + "\n")
    part.replace(path)
