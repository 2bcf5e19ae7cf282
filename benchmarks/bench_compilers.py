"""The kernels of several compilers in one run: seconds of a loss on every instruction set, on one thread.

    python -m benchmarks.bench_compilers LIBRARY LIBRARY ... [--rounds 5] [--output benchmarks/results/compilers]

Each LIBRARY is a libfastcl_cpu.so, of a build here or taken out of a wheel; the name of its compiler is read from it.
The libraries take turns in processes of their own, in which the package is a copy with that library. A figure is the
median over the rounds of the fastest call in each; ratios are of the same round.
"""

import argparse
import functools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import fastcl
from benchmarks.cases import Case, fused, inputs
from benchmarks.common import RESULTS, hardware, publish, report, step
from benchmarks.count_instructions import compiler
from fastcl._library import LIBRARY

CASES = [
    Case(256, 2560, 64, "shared", "negatives that learn"),
    Case(512, 512, 128, "batch", "in-batch"),
    Case(512, 512, 128, "batch", "in-batch, bfloat16", dtype=torch.bfloat16),
]
PASSES = {"forward": False, "forward+backward": True}
SECONDS = 0.12  # of each figure in each round


def fastest(run: Any) -> float:
    run()
    end, best = time.perf_counter() + SECONDS, float("inf")
    while time.perf_counter() < end:
        begin = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - begin)
    return best


def child() -> None:
    """Prints the seconds of every instruction set, case and pass."""
    torch.set_num_threads(1)
    found = {}
    for isa in fastcl.config()["isas"]:
        fastcl.set_isa(isa)
        for case in CASES:
            x = inputs(case)
            learns = [t for t in x[:3] if t.requires_grad]
            for name, backward in PASSES.items():
                run = step(functools.partial(fused, case, x), learns, backward)
                found[f"{isa}|{case.what}|{name}"] = fastest(run)
    print(json.dumps(found))


def package_with(library: Path, folder: Path) -> Path:
    """A folder in which `fastcl` is this package with another library."""
    package = Path(LIBRARY).parent
    left_out = shutil.ignore_patterns("recsys", "__pycache__", "*.so")
    shutil.copytree(package, folder / "fastcl", ignore=left_out)
    shutil.copy(library, folder / "fastcl" / Path(LIBRARY).name)
    (folder / "benchmarks").symlink_to(Path(__file__).resolve().parent)
    return folder


def measured(folder: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.bench_compilers", "--child"]
    env = os.environ | {"PYTHONPATH": str(folder)}
    done = subprocess.run(command, cwd=folder, env=env, text=True, check=True, stdout=subprocess.PIPE)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("libraries", type=Path, nargs="*")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULTS / "compilers")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child()
        return
    if len(args.libraries) < 2:
        parser.error("expected two libraries or more")
    words = [compiler(path).replace(":", "").split() for path in args.libraries]
    names = [f"{said[0]} {said[-1]}" for said in words]
    with tempfile.TemporaryDirectory() as text:
        folders = [package_with(path, Path(text, str(i))) for i, path in enumerate(args.libraries)]
        rounds = [[measured(folder) for folder in folders] for _ in range(args.rounds)]
    rows = []
    for key in rounds[0][0]:
        isa, what, name = key.split("|")
        row: dict[str, Any] = {"instruction set": isa, "what": what, "pass": name}
        for i, said in enumerate(names):
            row[f"{said}, ms"] = statistics.median(found[i][key] for found in rounds) * 1e3
        for i, said in enumerate(names[1:], 1):
            row[f"{said} / {names[0]}"] = statistics.median(found[i][key] / found[0][key] for found in rounds)
        rows.append(row)
    text = report(rows, f"one thread, medians of {args.rounds} rounds")
    publish(text, {"machine": hardware(), "compilers": names, "rows": rows}, args.output)


if __name__ == "__main__":
    main()
