"""How much of a step can be divided among threads, and what a model makes of it for more threads than a machine has.

    python -m benchmarks.bench_threads_model [--repeats 15] [--output benchmarks/results/threads-model]

Counted under callgrind, on one thread: the instructions of a whole step (Python, torch and the op), those of them in
parallel regions, and the number of regions. Measured on this machine: the step on one thread and on two, the time of
an instruction outside the regions, that of an empty region, and the speed that a step on one thread keeps while
another process takes the same step on the other core. The model for p threads:

    time(p) = serial + (time(1) - serial) / p + regions * empty(p)
    serial  = instructions outside the regions * time of an instruction of a step that has next to no arithmetic
    empty(p) = the time of an empty region on two threads * log2(p)

It leaves out what threads do to each other through memory and clocks, and the loads of parts of different size. It is a
bound on what dividing the work can give, not a measurement. "2 threads, cores shared" is the model with the parallel
part at the speed of two processes, which share nothing but the machine: what is lost up to there is the machine's, and
what is lost below it the library's.
"""

import argparse
import ctypes
import functools
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.cases import CASES, fused, inputs
from benchmarks.common import alternate, hardware, publish, report, step
from benchmarks.count_instructions import control

SHAPES = ("clrec", "ntxent-small", "small", "tiny")
PASSES = {"forward": False, "forward+backward": True}
THREADS = (8, 64)
REGION = "torch_parallel_for"  # LibTorch's function, through which the kernels reach its threads
STEPS = 5  # counted at once


class Counts(NamedTuple):
    """Of one step."""

    instructions: float
    inside: float  # of parallel regions
    regions: float


def steps() -> Iterator[tuple[str, str, Callable[[], None]]]:
    for shape in SHAPES:
        case = CASES[shape]
        x = inputs(case)
        learns = [t for t in x[:3] if t.requires_grad]
        for name, backward in PASSES.items():
            yield shape, name, step(functools.partial(fused, case, x), learns, backward)


def child() -> None:
    torch.set_num_threads(1)
    runs = [run for _, _, run in steps()]
    for run in runs:
        run()  # work done once per process must not be counted
    control("-i on")
    for run in runs:
        for count in (1, STEPS + 1):  # the difference leaves out what stands around the steps
            control("-z")
            for _ in range(count):
                run()
            control("-d")


def read(path: Path) -> Counts:
    """What callgrind wrote: its total, and the calls of `REGION` with their inclusive instructions."""
    text = path.read_text()
    total = re.search(r"^(?:summary|totals): (\d+)", text, re.M)
    assert total is not None
    names: dict[str, str] = {}
    regions = inside = 0
    lines = iter(text.splitlines())
    for line in lines:
        named = re.match(r"c?fn=(\(\d+\))(?: (.*))?", line)
        if named is None:
            continue
        if named.group(2):
            names[named.group(1)] = named.group(2)
        if line.startswith("cfn=") and names.get(named.group(1)) == REGION:
            regions += int(next(lines).removeprefix("calls=").split()[0])
            inside += int(next(lines).split()[-1])
    return Counts(int(total.group(1)), inside, regions)


def counted() -> dict[tuple[str, str], Counts]:
    with tempfile.TemporaryDirectory() as folder:
        command = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={folder}/out"]
        command += [sys.executable, "-m", "benchmarks.bench_threads_model", "--child"]
        environment = {**os.environ, "FASTCL_ISA": "avx2", "OMP_NUM_THREADS": "1"}
        subprocess.run(command, env=environment, check=True, capture_output=True)
        found = {}
        for number, (shape, name) in enumerate((s, p) for s in SHAPES for p in PASSES):
            few, many = (read(Path(folder, f"out.{2 * number + part}")) for part in (1, 2))
            found[shape, name] = Counts(*((b - a) / STEPS for a, b in zip(few, many, strict=True)))
    return found


def empty_region(threads: int) -> float:
    """Seconds of a region whose parts do nothing: the C library's `labs`, which ignores all but one argument."""
    torch.set_num_threads(threads)
    library = ctypes.CDLL(None)
    if not hasattr(library, REGION):
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    region, nothing = getattr(library, REGION), ctypes.cast(ctypes.CDLL(None).labs, ctypes.c_void_p)
    region.argtypes = [ctypes.c_int64] * 3 + [ctypes.c_void_p] * 2

    def seconds(parts: int) -> float:
        begun = time.perf_counter()
        for _ in range(200):
            region(0, parts, 1, nothing, None)
        return (time.perf_counter() - begun) / 200

    seconds(threads)
    # Less that of a call which finds a single part, and starts no thread.
    return statistics.median(seconds(threads) - seconds(1) for _ in range(31))


def measured(repeats: int) -> dict[int, dict[tuple[str, str], float]]:
    """Seconds of each step by the number of threads."""
    found = {}
    for threads in (1, 2):
        torch.set_num_threads(threads)
        runs = {f"{shape} {name}": run for shape, name, run in steps()}
        medians = {key: statistics.median(values) for key, values in alternate(runs, repeats).items()}
        found[threads] = {(shape, name): medians[f"{shape} {name}"] for shape in SHAPES for name in PASSES}
    return found


def forever(chosen: str) -> None:
    """Takes a step on one thread until it is killed, after a line that tells that it begins."""
    torch.set_num_threads(1)
    (run,) = (run for shape, name, run in steps() if f"{shape} {name}" == chosen)
    run()
    print("begun", flush=True)
    while True:
        run()


def kept(repeats: int) -> dict[tuple[str, str], float]:
    """Of the speed of each step on one thread, the share that is left while another process takes the same step."""
    torch.set_num_threads(1)
    found = {}
    for shape, name, run in steps():

        def seconds(run: Callable[[], None] = run) -> float:
            count, begun = 0, time.perf_counter()
            while (spent := time.perf_counter() - begun) < 0.05:
                run()
                count += 1
            return spent / count

        command = [sys.executable, "-m", "benchmarks.bench_threads_model", "--forever", f"{shape} {name}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"}) as other:
            try:
                assert other.stdout is not None
                other.stdout.readline()
                ratios = []
                for _ in range(repeats):
                    other.send_signal(signal.SIGSTOP)
                    alone = seconds()
                    other.send_signal(signal.SIGCONT)
                    ratios.append(alone / seconds())
            finally:
                other.kill()
        found[shape, name] = statistics.median(ratios)
    return found


def model(one: float, serial: float, regions: float, empty: float, threads: int, speed: float = 1.0) -> float:
    return serial + (one - serial) / threads / speed + regions * empty * math.log2(threads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--output", type=Path, help="path without suffix")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--forever", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child()
        return
    if args.forever:
        forever(args.forever)
    counts = counted()
    seconds, empty, speed = measured(args.repeats), empty_region(2), kept(args.repeats)
    rows = []
    for (shape, name), count in counts.items():
        case = CASES[shape]
        # The smallest step tells what an instruction outside the regions takes.
        per_instruction = seconds[1]["tiny", name] / counts["tiny", name].instructions
        serial = (count.instructions - count.inside) * per_instruction
        one = seconds[1][shape, name]
        at = functools.partial(model, one, serial, count.regions, empty)
        rows.append(
            {
                "N x M x D": f"{case.n:,} x {case.m:,} x {case.d:,}",
                "loss": case.what,
                "pass": name,
                "one thread, us": one * 1e6,
                "serial, us": serial * 1e6,
                "regions": round(count.regions),
                "2 threads, measured": one / seconds[2][shape, name],
                "2 threads, model": one / at(2),
                "speed beside another": speed[shape, name],
                "2 threads, cores shared": one / at(2, speed[shape, name]),
                **{f"{p} threads, model": one / at(p) for p in THREADS},
            }
        )
    page = report(rows, f"medians of {args.repeats} alternating repetitions; an empty region {empty * 1e6:.1f} us")
    publish(page, {"machine": hardware(), "empty region us": empty * 1e6, "rows": rows}, args.output)


if __name__ == "__main__":
    main()
