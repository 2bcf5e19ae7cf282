"""The least time that a loss can take on a GPU, calculated from the GPU's rates. Nothing is measured here.

    python -m benchmarks.roofline

`floor` is the largest of three times: products at the rate of the tensor cores, exponentials at theirs, and one
transfer of inputs and gradients at the memory's. `fused` is the time expected of fastcl's kernels: mma.sync reaches
0.62 of the tensor cores' rate, and overlap is 0.75 of perfect. Above 128 features it is the time of a library's
products around chunks that stay in the second-level cache. bench_gpu.py replaces the rates of PAPER by measured ones.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from benchmarks.cases import Case
from benchmarks.common import markdown


@dataclass(frozen=True)
class Rates:
    """Operations per second of a whole GPU. Types: fp32 (by three TF32 products), tf32, bf16."""

    tensor: Mapping[str, float] = field(default_factory=lambda: {"fp32": 165e12, "tf32": 495e12, "bf16": 989e12})
    mma_sync: Mapping[str, float] = field(
        default_factory=lambda: {"fp32": 0.62 * 165e12, "tf32": 0.62 * 495e12, "bf16": 0.62 * 989e12}
    )
    library: Mapping[str, float] = field(default_factory=lambda: {"fp32": 50e12, "tf32": 400e12, "bf16": 798e12})
    exp: float = 16 * 132 * 1.755e9
    memory: float = 3.0e12  # bytes read and written
    cache: float = 5.0e12


PAPER = Rates()  # an H100 SXM: copy and library products as published measurements, the rest from its data sheet
KERNEL = 3e-6  # seconds of the shortest kernel
OVERLAP = 0.75


class Shape(NamedTuple):
    case: Case
    types: tuple[str, ...]


def case(n: int, m: int, d: int, kind: str, what: str) -> Case:
    return Case(n, m, d, kind, what)


# "both": in-batch in both directions (CLIP), the mean of the two losses.
SHAPES = {
    "clrec": Shape(case(256, 2560, 64, "shared", "CLRec, negatives that learn"), ("fp32", "tf32", "bf16")),
    "moco": Shape(case(256, 65536, 128, "frozen", "MoCo, frozen queue"), ("fp32", "tf32", "bf16")),
    "simclr": Shape(case(8192, 8192, 128, "batch", "in-batch"), ("fp32", "tf32", "bf16")),
    "items": Shape(case(12800, 12101, 64, "table", "full softmax"), ("fp32", "tf32", "bf16")),
    "clip-512": Shape(case(32768, 32768, 512, "both", "CLIP"), ("tf32", "bf16")),
    "clip-1024": Shape(case(32768, 32768, 1024, "both", "CLIP"), ("tf32", "bf16")),
}
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16}


class Work(NamedTuple):
    """The work of forward, or of forward and backward; a multiply-add counts as two operations."""

    flop: float
    exp: float
    moved: float  # bytes of inputs and gradients


def work(case: Case, type_: str, backward: bool) -> Work:
    """Forward needs one product. With backward there are three more, or one more if the keys are frozen."""
    logits = case.n * case.m
    moved = (case.n + case.m) * case.d * (2 if type_ == "bf16" else 4)
    if case.kind == "frozen":
        return Work((4 if backward else 2) * logits * case.d, logits, moved)
    both = case.kind == "both"  # one product serves both directions, since a pass can sum over rows and over columns
    flop = (8 if backward else 2) * logits * case.d
    return Work(flop, (2 if both else 1) * (2 if backward else 1) * logits, (3 if backward else 1) * moved)


def floor(case: Case, type_: str, backward: bool, rates: Rates = PAPER) -> float:
    """The least possible seconds."""
    needed = work(case, type_, backward)
    return max(needed.flop / rates.tensor[type_], needed.exp / rates.exp, needed.moved / rates.memory)


def fused(case: Case, type_: str, backward: bool, rates: Rates = PAPER) -> float:
    """The seconds expected of fastcl's kernels."""
    needed = work(case, type_, backward)
    logits = case.n * case.m
    if case.d > 128:  # chunks: besides the products, each pass writes and reads 16-bit logits in the cache
        return needed.flop / rates.library[type_] + (7 if backward else 2) * 2 * logits / rates.cache
    launches = 2 if case.kind == "frozen" or not backward else 4
    loop = max(needed.flop / rates.mma_sync[type_], 1.06 * needed.exp / rates.exp) / OVERLAP
    seconds = max(loop, needed.moved / rates.memory / OVERLAP, launches * KERNEL)
    if backward:  # the partial sums of the splits are written and read once
        seconds += 2 * min(logits / 4096, 132) * 128 * case.d * 4 / rates.cache
    return seconds


def shown(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 9.995e-4 else f"{seconds * 1e3:.2g} ms"


def rows() -> list[dict[str, object]]:
    return [
        {
            "shape": name,
            "N x M x D": f"{shape.case.n:,} x {shape.case.m:,} x {shape.case.d:,}",
            "type": type_,
            **{
                f"{what.__name__} {'step' if backward else 'forward'}": shown(what(shape.case, type_, backward))
                for what in (floor, fused)
                for backward in (False, True)
            },
        }
        for name, shape in SHAPES.items()
        for type_ in shape.types
    ]


if __name__ == "__main__":
    print(markdown(rows()))
