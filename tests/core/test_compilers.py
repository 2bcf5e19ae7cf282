"""The sources of the kernels: both compilers accept them without a warning, and the figures in their comments are those
of the code.
"""

from __future__ import annotations

import decimal
import re
import shutil
import subprocess
from decimal import Decimal
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
KERNELS = sorted((ROOT / "csrc/cpu").glob("kernels_*.cpp"))


def clang_or_skip() -> str:
    found = [name for name in ("clang++", *(f"clang++-{n}" for n in range(30, 13, -1))) if shutil.which(name)]
    if not found:
        pytest.skip("no clang++ here")
    return found[0]


@pytest.mark.parametrize("source", KERNELS, ids=lambda path: path.stem)
def test_clang_takes_the_kernels_without_a_warning(source: Path) -> None:
    command = [clang_or_skip(), "-std=c++17", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", f"-I{ROOT / 'csrc'}"]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def _worst_error(coefficients: list[Decimal]) -> Decimal:
    """Of the polynomial, highest power first, relative to 2^f over [-1/2, 1/2]."""
    worst = Decimal(0)
    for f in (Decimal(i) / 200 for i in range(-100, 101)):
        p = Decimal(0)
        for c in coefficients:
            p = p * f + c
        worst = max(worst, abs(p / (f * Decimal(2).ln()).exp() - 1))
    return worst


def test_exp2_is_as_exact_as_its_comment_says() -> None:
    source = (ROOT / "csrc/cpu/vec.inl.h").read_text()
    printed, rounded, double = map(Decimal, re.search(
        r"error is (\S+) with the.{0,20} as printed and (\S+) with the.*Taylor.{0,40} of (\S+)\.\n", source, re.S
    ).groups())  # fmt: skip
    body = re.search(r"exp2_fraction\(Vec<float> f\) \{(.*?)\n\}", source, re.S)[1]
    coefficients = [Decimal(c) for c in re.findall(r"([\d.]+)f\b", body)]
    assert len(coefficients) == 7
    terms = int(re.search(r"for \(int k = (\d+); k > 0; --k\) p = p", source)[1])
    with decimal.localcontext() as context:
        context.prec = 40
        as_float = [Decimal(torch.tensor(float(c)).item()) for c in coefficients]
        taylor = [Decimal(1)]
        for k in range(1, terms + 1):
            taylor.insert(0, taylor[0] * Decimal(2).ln() / k)
        for said, error in zip(
            (printed, rounded, double), map(_worst_error, (coefficients, as_float, taylor)), strict=True
        ):
            assert Decimal("0.95") <= error / said <= Decimal("1.05"), (said, error)


def test_log2_is_as_exact_as_its_comment_says() -> None:
    source = (ROOT / "csrc/cpu/reducer.inl.h").read_text()
    said = Decimal(re.search(r"a minimax polynomial times t, with a relative error of (\S+);", source)[1])
    body = re.search(r"log2_1p\(Vec<float> t\) \{(.*?)\n\}", source, re.S)[1]
    found = re.findall(r"(splat\(|\+ |- )([\d.]+)f", body)
    coefficients = [Decimal(torch.tensor(float(c)).item()) * (-1 if sign == "- " else 1) for sign, c in found]
    assert len(coefficients) == 9
    with decimal.localcontext() as context:
        context.prec = 40
        worst = Decimal(0)
        for t in (Decimal(i) / 400 for i in range(1, 401)):
            p = Decimal(0)
            for c in coefficients:
                p = p * t + c
            worst = max(worst, abs(p * t / ((1 + t).ln() / Decimal(2).ln()) - 1))
    assert Decimal("0.9") <= worst / said <= Decimal("1.1"), (said, worst)
