"""Tells in some seconds whether this installation computes what it should, and prints what a bug report needs.

    python -m fastcl.selftest

It needs no network and writes no file. Every instruction set of this processor runs the two operators, forward and
backward, in all dtypes, against their textbook forms in float64. The exit status is 1 if any result is wrong.
"""

import os
import platform
import sys
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import fastcl
from fastcl import reference, reference_pairwise

# The error that rounding may cause, relative to the largest number of a result.
ALLOWED = {torch.float64: 1e-11, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}
# Rows, columns, features: one element, sizes between those of vectors and tiles, and work for several threads.
SHAPES = ((1, 1, 1), (33, 70, 17), (130, 1100, 64))
OPERATORS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "contrast": (lambda q, k, **x: fastcl.contrast(q, k, **x)[1], lambda q, k, **x: reference.contrast(q, k, **x)[1]),
    "softplus_sum": (fastcl.softplus_sum, reference_pairwise.softplus_sum),
}


def _results(function: Callable[..., Tensor], query: Tensor, key: Tensor, bias: Tensor) -> list[Tensor]:
    """The values of the rows, and the gradients of a sum of them, weighted unevenly."""
    leaves = [t.detach().clone().requires_grad_() for t in (query, key, bias)]
    rows = function(leaves[0], leaves[1], scale=2.0, bias=leaves[2])
    (rows * torch.linspace(0.5, 1.5, len(rows), dtype=rows.dtype, device=rows.device)).sum().backward()
    return [rows.detach(), *(t.grad for t in leaves if t.grad is not None)]


def error(name: str, dtype: torch.dtype, shape: tuple[int, int, int]) -> float:
    """The largest error of an operator's value and gradients, each relative to its largest number."""
    n, m, d = shape
    random = torch.Generator("cpu").manual_seed(n)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float32, device="cpu")

    query, key = (normal(count, d).to(dtype) / d**0.5 for count in (n, m))
    bias = normal(m).to(torch.float64 if dtype == torch.float64 else torch.float32)
    ours, textbook = OPERATORS[name]
    found = _results(ours, query, key, bias)
    truth = _results(textbook, query.double(), key.double(), bias.double())
    errors = [float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(found, truth, strict=True)]
    return max(errors, key=lambda e: e if e == e else float("inf"))  # NaN is the largest


def checks() -> Iterator[tuple[str, bool, str]]:
    """(what ran, whether it is right, the errors) for each instruction set and dtype."""
    before = fastcl.set_isa("auto")
    try:
        for isa in fastcl.config()["isas"] or ["auto"]:
            fastcl.set_isa(isa)
            for dtype, allowed in ALLOWED.items():
                errors = {name: max(error(name, dtype, shape) for shape in SHAPES) for name in OPERATORS}
                said = ", ".join(f"{name} {worst:.1e}" for name, worst in errors.items())
                right = all(worst <= allowed for worst in errors.values())
                yield f"{isa} {str(dtype).removeprefix('torch.')}", right, f"{said} (allowed {allowed:.0e})"
    finally:
        fastcl.set_isa(before)


def main() -> int:
    started = time.perf_counter()
    fastcl.show_config()
    print(f"{'python':15}{platform.python_implementation()} {platform.python_version()}")
    print(f"{'system':15}{platform.platform()}, {platform.machine()}, {os.cpu_count()} processors")
    wrong = 0
    for name, right, said in checks():
        print(f"{name:20} {'good ' if right else 'WRONG'}  {said}")
        wrong += not right
    seconds = time.perf_counter() - started
    print(f"{wrong} wrong" if wrong else "all good", f"after {seconds:.1f} s; a bug report needs all lines above")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
