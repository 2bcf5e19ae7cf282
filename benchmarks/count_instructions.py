"""Counts the instructions per multiply-add with callgrind: a figure that the load of the machine cannot change.

    python -m benchmarks.count_instructions [--isa avx2] [--output benchmarks/results/instructions.json]

The losses run under valgrind on one thread. Only the inside of the compiled op is counted: packing, products,
exponentials and the host code around them, without Python and torch. The shapes are small enough for valgrind and large
enough for the loops to dominate. Valgrind does not support AVX-512, so the default is the AVX2 kernels. Two runs agree
to 1 in 10,000 (addresses differ). Counts depend on the compiler, whose name is stored with them.
"""

import argparse
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import fastcl
from benchmarks.cases import Case, fused, inputs
from benchmarks.common import RESULTS, markdown, step, write_json
from fastcl._library import LIBRARY

SHAPES = [
    Case(256, 2560, 64, "shared", "negatives that learn"),
    Case(256, 4096, 128, "frozen", "frozen queue"),
    Case(512, 512, 128, "batch", "in-batch"),
    Case(512, 512, 128, "views", "NT-Xent"),
    Case(512, 2048, 64, "table", "full softmax"),
    Case(512, 2048, 128, "table", "full softmax"),  # by the difference to 64 features, what is beside the products
    Case(512, 512, 512, "batch", "in-batch, wide"),
    Case(512, 512, 128, "batch", "in-batch, bfloat16", dtype=torch.bfloat16),
    Case(512, 512, 128, "pairs", "SigLIP"),
]
PASSES = {"forward": False, "forward+backward": True}
KNOWN = ("baseline", "avx2")  # the instruction sets that valgrind supports
OPS = [f"fastcl::(anonymous namespace)::{op}_*" for op in ("contrast", "softplus_sum")]


def control(option: str) -> None:
    """Tells the callgrind that runs this process to start counting (-i on), or to write and reset its counts (-d)."""
    command = ["callgrind_control", *option.split(), str(os.getpid())]
    subprocess.run(command, check=True, capture_output=True)


def child() -> None:
    torch.set_num_threads(1)
    runs = []
    for case in SHAPES:
        x = inputs(case)
        learns = [t for t in x[:3] if t.requires_grad]
        runs += [step(functools.partial(fused, case, x), learns, backward) for backward in PASSES.values()]
    runs[1]()  # work done once per process must not be counted
    control("-i on")
    for run in runs:
        run()
        control("-d")


def compiler(path: Path = Path(LIBRARY)) -> str:
    """The name and version that the compiler left in the library, or "unknown"."""
    signed = re.search(rb"GCC: [^\0]+|clang version [^\0]+", path.read_bytes())
    return signed.group().decode() if signed else "unknown"


def counts(isa: str) -> list[int]:
    """Instructions of each shape and pass, in order."""
    if shutil.which("valgrind") is None:
        raise SystemExit("valgrind was not found; install it (apt-get install valgrind)")
    with tempfile.TemporaryDirectory() as folder:
        command = ["valgrind", "--tool=callgrind", "--instr-atstart=no", *(f"--toggle-collect={op}" for op in OPS)]
        command += [f"--callgrind-out-file={folder}/out", sys.executable, "-m", "benchmarks.count_instructions"]
        done = subprocess.run(
            [*command, "--child"],
            env={**os.environ, "FASTCL_ISA": isa, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(done.stderr)
        found = []
        for part in range(1, len(SHAPES) * len(PASSES) + 1):
            text = Path(folder, f"out.{part}").read_text()
            summary = re.search(r"^(?:summary|totals): (\d+)", text, re.M)
            found.append(int(summary.group(1)) if summary else 0)
        if 0 in found:
            raise SystemExit(f"callgrind missed calls of {OPS}: was the library stripped, or its functions renamed?")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isa", default="avx2", choices=[isa for isa in fastcl.config()["isas"] if isa in KNOWN])
    parser.add_argument("--output", type=Path, default=RESULTS / "instructions.json")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child()
        return

    pairs = [(case, name) for case in SHAPES for name in PASSES]
    rows = [
        {
            "what": case.what,
            "N x M x D": f"{case.n:,} x {case.m:,} x {case.d:,}",
            "pass": name,
            "instructions": count,
            "per multiply-add of N x M x D": round(count / (case.n * case.m * case.d), 4),
        }
        for (case, name), count in zip(pairs, counts(args.isa), strict=True)
    ]
    print(markdown(rows))
    write_json(args.output, {"isa": args.isa, "compiler": compiler(), "rows": rows})


if __name__ == "__main__":
    main()
