"""bfloat16 by AVX512_BF16 on one thread: its time and its share of the ceiling, and the time on a processor that starts
as many of the instructions as multiply-adds.

    python -m benchmarks.bench_bf16 [--rounds 5] [--output benchmarks/results/bf16]

AMD's processors start one VDPBF16PS where they start one multiply-add; Intel's start a quarter as many. On Intel the
former is imitated: in a second library each VDPBF16PS of the kernels is compiled as the multiply-add of float32 on the
same registers. Its results are wrong, but every load, conversion and exponential is there, so that its time is what the
kernels would take. The ceilings are measured in the same run (ceilings.cpp). Needs the build of `setup.py build_ext
--inplace`, of which the second library takes the other objects.
"""

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import fastcl
from benchmarks.bench_compilers import package_with
from benchmarks.cases import CASES, fused, inputs
from benchmarks.common import RESULTS, alternate, hardware, publish, report, step
from fastcl._library import LIBRARY

ROOT = Path(__file__).resolve().parent.parent
NAMES = ("batch", "beauty")
PASSES = {"forward": False, "forward+backward": True}
SETS = {"float32": "avx512", "bfloat16 by float32": "avx512", "bfloat16": "avx512_bf16", "float16": "avx512"}
TYPES = {"float32": torch.float32, "float16": torch.float16}
CALLS = 6
IMITATED = ("imitated float32", "imitated bfloat16")
SOURCE = "csrc/cpu/kernels_avx512_bf16.cpp"
IMITATION = """\
#include <immintrin.h>
#define _mm512_dpbf16_ps(sum, a, b) _mm512_fmadd_ps((__m512)(a), (__m512)(b), sum)
"""


def child(names: list[str]) -> None:
    """Prints the seconds of the fastest of CALLS calls of the named rows of SETS, by case and pass. Rows take turns."""
    torch.set_num_threads(1)
    found = {}
    for what in NAMES:
        for pass_, backward in PASSES.items():
            candidates = {}
            for name in names:
                case = replace(CASES[what], dtype=TYPES.get(name, torch.bfloat16))
                x = inputs(case)
                learns = [t for t in x[:3] if t.requires_grad]
                run = step(functools.partial(fused, case, x), learns, backward)
                candidates[name] = functools.partial(with_set, SETS[name], run)
            for name, took in alternate(candidates, CALLS).items():
                found[f"{name}|{what}|{pass_}"] = min(took)
    print(json.dumps(found))


def with_set(isa: str, run: Callable[[], None]) -> None:
    fastcl.set_isa(isa)
    run()


def seconds(folder: Path, names: list[str]) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.bench_bf16", "--child", ",".join(names)]
    env = os.environ | {"PYTHONPATH": str(folder)}
    done = subprocess.run(command, cwd=folder, env=env, text=True, check=True, stdout=subprocess.PIPE)
    answer: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return answer


def imitation(folder: Path) -> Path:
    """A library whose kernels of avx512_bf16 multiply and add float32 instead."""
    wrapper, built, library = folder / "imitation.h", folder / "kernels.o", folder / "imitation.so"
    wrapper.write_text(IMITATION)
    objects = sorted(ROOT.glob("build/temp.*/*/fastcl._cpu/*.o"))
    others = [str(path) for path in objects if path.name != SOURCE.replace("/", "_") + ".o"]
    if len(others) == len(objects):
        raise SystemExit("no build was found; make one with `python setup.py build_ext --inplace`")
    flags = ["-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-Icsrc", "-include", str(wrapper)]
    subprocess.run(["c++", *flags, "-c", SOURCE, "-o", str(built)], cwd=ROOT, check=True)
    torch_stand_in = str(objects[0].parent / "libtorch_cpu.so")
    link = ["-shared", "-Wl,--version-script=building/exports.map", str(built), *others]
    link += ["-Wl,--no-as-needed", torch_stand_in, "-o", str(library)]
    subprocess.run(["c++", *link], cwd=ROOT, check=True)
    return library


def ceilings(folder: Path) -> dict[str, float]:
    program = folder / "ceilings"
    subprocess.run(["g++", "-O3", "-march=native", str(ROOT / "benchmarks/ceilings.cpp"), "-o", program], check=True)
    answer: dict[str, float] = json.loads(subprocess.run([program], capture_output=True, check=True).stdout)
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULTS / "bf16")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child.split(","))
        return
    with tempfile.TemporaryDirectory() as text:
        first, second = Path(text, "first"), Path(text, "second")
        first.mkdir()
        second.mkdir()
        package_with(Path(LIBRARY), first)
        package_with(imitation(Path(text)), second)
        peak = ceilings(Path(text))
        rounds = []
        for _ in range(args.rounds):
            found = seconds(first, list(SETS))
            imitated = {f"imitated {key}": value for key, value in seconds(second, ["float32", "bfloat16"]).items()}
            rounds.append(found | imitated)
    rows: list[dict[str, Any]] = []
    for what in NAMES:
        case = CASES[what]
        for pass_, backward in PASSES.items():
            products = case.n * case.m * case.d * (3 if backward else 1)
            took = {name: [found[f"{name}|{what}|{pass_}"] for found in rounds] for name in [*SETS, *IMITATED]}
            row: dict[str, Any] = {"N x M x D": f"{case.n:,} x {case.m:,} x {case.d:,}", "pass": pass_}
            row |= {f"{name}, ms": statistics.median(took[name]) * 1e3 for name in ("float32", "bfloat16")}
            for name, unit in (("float32", "fma"), ("bfloat16", "avx512_bf16")):
                row[f"{name}, share of its ceiling"] = products / (statistics.median(took[name]) * 1e9 * peak[unit])
            for name in ("bfloat16 by float32", "float16", "bfloat16", "imitated bfloat16"):
                under = took["imitated float32" if name in IMITATED else "float32"]  # of the same process
                ratios = [a / b for a, b in zip(took[name], under, strict=True)]
                row[f"{name} / float32"] = statistics.median(ratios)
            rows.append(row)
    note = f"one thread, medians of {args.rounds} rounds; multiply-adds per nanosecond: " + ", ".join(
        f"{peak[unit]:.1f} by {unit}" for unit in ("fma", "avx512_bf16")
    )
    publish(report(rows, note), {"machine": hardware(), "ceilings": peak, "rows": rows}, args.output)


if __name__ == "__main__":
    main()
