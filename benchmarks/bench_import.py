"""Milliseconds that importing fastcl takes beyond importing torch.

    python -m benchmarks.bench_import [--repeats 15] [--output benchmarks/results/import]

A new process each time, which imports torch and then the other, with all modules compiled (into a folder of their own,
whatever PYTHONDONTWRITEBYTECODE says) and in the system's cache; the two take turns. The target is 50 ms at most for
`import fastcl`.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, hardware, publish, report

AT_MOST = 50.0
# In the process itself, so that neither the start of the interpreter nor the spread of torch's own time counts.
PROGRAM = (
    "import time; begin = time.perf_counter(); import torch; middle = time.perf_counter(); import {}; "
    "print(middle - begin, time.perf_counter() - middle)"
)
IMPORTS = ("fastcl", "fastcl.recsys")


def milliseconds(module: str, compiled: str) -> tuple[float, float]:
    """Of torch, then of the module. compiled: the folder of compiled modules."""
    env = os.environ | {"PYTHONPYCACHEPREFIX": compiled}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-c", PROGRAM.format(module)]
    printed = subprocess.run(command, env=env, text=True, check=True, stdout=subprocess.PIPE).stdout
    torch, beyond = (float(text) * 1e3 for text in printed.split())
    return torch, beyond


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--output", type=Path, default=RESULTS / "import")
    args = parser.parse_args()
    of_torch: list[float] = []
    beyond: dict[str, list[float]] = {name: [] for name in IMPORTS}
    with tempfile.TemporaryDirectory() as compiled:
        for name in IMPORTS:
            milliseconds(name, compiled)
        for _ in range(args.repeats):
            for name in IMPORTS:
                torch, more = milliseconds(name, compiled)
                of_torch.append(torch)
                beyond[name].append(more)
    base = statistics.median(of_torch)
    rows: list[dict[str, Any]] = [{"import": "torch", "ms": base, "beyond torch, ms": 0.0}]
    for name, found in beyond.items():
        median = statistics.median(found)
        rows.append({"import": name, "ms": base + median, "beyond torch, ms": median})
    text = report(rows, f"medians of {args.repeats} processes each")
    met = rows[1]["beyond torch, ms"] <= AT_MOST
    content = {"machine": hardware(), "repeats": args.repeats, "at most": AT_MOST, "met": met, "rows": rows}
    publish(text, content, args.output)


if __name__ == "__main__":
    main()
