"""Milliseconds that importing fastcl takes beyond importing torch.

    python -m benchmarks.bench_import [--repeats 15] [--output benchmarks/results/import]

A new process each time, with all modules compiled (into a folder of their own, whatever PYTHONDONTWRITEBYTECODE says)
and in the system's cache; the three programs take turns. The target is 50 ms at most for `import fastcl`.
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
# In the process itself, so that the start of the interpreter does not count.
PROGRAM = "import time; begin = time.perf_counter(); import {}; print(time.perf_counter() - begin)"
IMPORTS = {"torch": "torch", "fastcl": "torch, fastcl", "fastcl.recsys": "torch, fastcl.recsys"}


def seconds(modules: str, compiled: str) -> float:
    """compiled: the folder of compiled modules."""
    command = [sys.executable, "-c", PROGRAM.format(modules)]
    env = os.environ | {"PYTHONPYCACHEPREFIX": compiled}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    return float(subprocess.run(command, env=env, text=True, check=True, stdout=subprocess.PIPE).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--output", type=Path, default=RESULTS / "import")
    args = parser.parse_args()
    times: dict[str, list[float]] = {name: [] for name in IMPORTS}
    with tempfile.TemporaryDirectory() as compiled:
        for modules in IMPORTS.values():
            seconds(modules, compiled)
        for _ in range(args.repeats):
            for name, modules in IMPORTS.items():
                times[name].append(seconds(modules, compiled) * 1e3)
    rows: list[dict[str, Any]] = []
    for name, found in times.items():
        beyond = statistics.median(a - b for a, b in zip(found, times["torch"], strict=True))
        rows.append({"import": name, "ms": statistics.median(found), "beyond torch, ms": beyond})
    text = report(rows, f"medians of {args.repeats} processes each")
    met = rows[1]["beyond torch, ms"] <= AT_MOST
    content = {"machine": hardware(), "repeats": args.repeats, "at most": AT_MOST, "met": met, "rows": rows}
    publish(text, content, args.output)


if __name__ == "__main__":
    main()
