"""The CUDA op from end to end without a GPU: the host code is compiled as it is for CUDA, against the emulator, and
registers itself for CPU tensors in a process of its own, where test_contrast_cuda.py then runs (see on_emulator.py).

What the kernels compute is tested in more detail elsewhere; here it is the way through Python, torch and launches.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
# Slow in the emulator, and many times the same code for the host.
LONGER = " or ".join(
    f"test_{name}"
    for name in (
        *("losses_equal_the_textbook", "values_and_gradients", "any_storage_offset", "softplus_sums"),
        "a_small_problem_takes_at_most_four_launches",
    )
)


@pytest.fixture(scope="module")
def op(emulated_kernels: Path) -> Path:
    library = emulated_kernels.with_name("op.so")
    command = [os.environ.get("CXX", "c++"), "-std=c++17", "-O2", "-fPIC", "-Wall", "-Wextra", "-Werror"]
    command += ["-DFASTCL_EMULATED", f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'tests/cuda/cuda_emulator'}", "-shared"]
    torch_cpu = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    sources = map(str, sorted((ROOT / "csrc/cuda").glob("*_cuda.cpp")))
    command += [*sources, str(emulated_kernels), str(torch_cpu), "-o", str(library)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return library


def run(op: Path, chosen: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "on_emulator", "-p", "no:cacheprovider"]
    folders = (ROOT / "tests", ROOT / "tests" / "cuda", os.environ.get("PYTHONPATH", ""))
    done = subprocess.run(
        [*command, "test_contrast_cuda.py", "-k", chosen],
        cwd=ROOT / "tests" / "cuda",
        env={
            **os.environ,
            "FASTCL_EMULATED_OP": str(op),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(map(str, folders)),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]
    assert int(re.findall(r"(\d+) passed", done.stdout)[0]) > 30
    assert int(re.findall(r"(\d+) emulated launches", done.stdout)[0]) > 500


def test_the_property_tests_pass_on_emulated_kernels(op: Path) -> None:
    run(op, f"not ({LONGER})")


@pytest.mark.slow
def test_the_longer_ones_pass_too(op: Path) -> None:
    run(op, LONGER)
