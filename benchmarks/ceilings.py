"""The share of a core's peak rate of multiply-adds that a measured loss reaches, per instruction set.

The peak rates are those of ceilings.cpp, which is compiled and run here. Must not time a loss.
"""

import json
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from benchmarks.cases import Case

Rates = Mapping[str, float | None]

# Tile products of bfloat16 for one product of the type: for similarities, and for weights times values.
TILE_PRODUCTS = {torch.float32: (6, 6), torch.float16: (4, 5), torch.bfloat16: (1, 3)}


def measured() -> Rates | None:
    """Multiply-adds per nanosecond of one core by `fma`, `avx512_bf16` and `amx`; None without a compiler for x86."""
    compiler = shutil.which("g++")
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "ceilings"
        source = Path(__file__).with_name("ceilings.cpp")
        built = subprocess.run(
            [compiler, "-O3", "-march=native", source, "-o", program], capture_output=True, check=False
        )
        if built.returncode:
            return None
        found: Rates = json.loads(subprocess.run([program], capture_output=True, check=True, text=True).stdout)
        return found


def seconds(case: Case, backward: bool, isa: str, rates: Rates) -> float | None:
    """The least time of one core for the products that the loss needs; None for an instruction set without a rate.

    Forward needs one product. With backward there are two more, or one more if the keys are frozen.
    """
    amx, fma = rates["amx"], rates["fma"]
    learns, frozen = {"frozen": (0, case.m), "queue": (case.n, case.m)}.get(case.kind, (case.m, 0))
    first = learns + frozen  # columns whose similarities are computed
    sums = 2 * learns + frozen if backward else 0
    if isa == "amx" and amx is not None:
        one, other = TILE_PRODUCTS[case.dtype]
        return case.n * case.d * (one * first + other * sums) / amx * 1e-9
    if isa != "avx512" or fma is None:
        return None
    return case.n * case.d * (first + sums) / fma * 1e-9


def share(case: Case, backward: bool, threads: int, taken: float, isa: str, rates: Rates | None) -> float | None:
    """The least time on that many cores divided by the seconds taken; None where the least is not known."""
    least = None if rates is None else seconds(case, backward, isa, rates)
    return None if least is None else least / threads / taken
