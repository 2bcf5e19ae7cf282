"""How much memory forward and backward need beyond inputs and gradients: peak resident set, one process for each form.

    python -m benchmarks.bench_memory [--only large,items] [--against fastcl,compile] [--threads 1,2]
        [--output benchmarks/results/memory]

A child process makes the inputs and runs a small problem first, so that code, thread pool and allocator are in place.
It then resets the high-water mark that Linux keeps of the resident set, and runs one step. The figure is the new mark
minus the resident set before the step and minus the bytes of the gradients. Code from torch.compile fits one shape, so
there the first problem has the measured shape: the compiler's own memory is not counted. Linux only.
"""

import argparse
import ctypes
import dataclasses
import functools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import CASES, Case, Inputs, fused, inputs, lean, textbook
from benchmarks.common import all_thread_counts, chosen, hardware, numbers, publish, report
from benchmarks.peers import PEERS, Loss, missing

AT_MOST_MB = 64

compiler = functools.cache(torch.compile)  # when first called: importing it takes seconds, and few children need it


def compiled(case: Case, x: Inputs) -> Tensor:
    return compiler(textbook)(case, x)


SHAPES = {
    "large": Case(16384, 16384, 128, "batch", "in-batch"),
    "views": Case(16384, 16384, 128, "views", "NT-Xent"),
    **{name: CASES[name] for name in ("moco", "items", "wide")},
    "tiny": CASES["tiny"],
}
LOSSES: dict[str, Loss] = {
    "fastcl": fused,
    "reference": textbook,
    "lean": lean,
    "compile": compiled,
    **{name: PEERS[name].loss for name in ("chunked", "torch lce")},
}


def resident(field: str) -> int:
    """VmRSS or VmHWM of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status: expected {field}")


def peak_over(run: Callable[[], Any]) -> int:
    """The bytes by which the resident set grows at most while `run` runs."""
    ctypes.CDLL(None).malloc_trim(0)  # otherwise it could use memory freed before, which the mark would not show
    Path("/proc/self/clear_refs").write_text("5")  # sets the high-water mark to the present size
    before = resident("VmRSS")
    run()
    return resident("VmHWM") - before


def extra_bytes(case: Case, loss: Loss) -> int:
    x = inputs(case)
    first = case if loss is LOSSES["compile"] else dataclasses.replace(case, n=64, m=64)
    loss(first, inputs(first)).backward()
    taken = peak_over(lambda: loss(case, x).backward())
    return taken - sum(t.grad.nbytes for t in x[:3] if t.grad is not None)


def measured(shape: str, name: str, threads: int) -> float | str | None:
    """MiB, measured in a process of its own; None if the form does not compute this loss; or why it cannot run."""
    if name in PEERS:
        if not PEERS[name].suits(SHAPES[shape]):
            return None
        if missing(name):
            return missing(name)
    command = [sys.executable, "-m", "benchmarks.bench_memory", "--only", shape, "--against", name]
    done = subprocess.run([*command, "--threads", str(threads), "--child"], capture_output=True, text=True, check=False)
    if done.returncode < 0:
        return "out of memory"
    if done.returncode:
        raise SystemExit(f"{shape}, {name}: {done.stderr}")
    return json.loads(done.stdout) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(name for name in SHAPES if name != "tiny"))
    parser.add_argument("--against", default=",".join(LOSSES))
    parser.add_argument("--threads", type=numbers, default=all_thread_counts()[:2])
    parser.add_argument("--output", type=Path, help="path without suffix")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    shapes = chosen(args.only, "--only", SHAPES, parser)
    names = chosen(args.against, "--against", LOSSES, parser)
    if args.child:
        torch.set_num_threads(args.threads[0])
        print(extra_bytes(SHAPES[shapes[0]], LOSSES[names[0]]))
        return

    rows: list[dict[str, Any]] = []
    for threads in args.threads:
        for shape in shapes:
            case = SHAPES[shape]
            row = {"what": case.what, "N x M x D": f"{case.n:,} x {case.m:,} x {case.d:,}", "threads": threads}
            megabytes = {f"{name} MB": measured(shape, name, threads) for name in names}
            ours = megabytes.get("fastcl MB")
            met = None if not isinstance(ours, float) else "met" if ours <= AT_MOST_MB else "not met"
            rows.append({**row, **megabytes, f"fastcl <= {AT_MOST_MB} MB": met})
            print(".", end="", flush=True)
    print()
    page = report(rows, "peak resident set of forward+backward beyond inputs and gradients, float32")
    publish(page, {"machine": hardware(), "rows": rows}, args.output)


if __name__ == "__main__":
    main()
