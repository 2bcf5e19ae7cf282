"""Instruction sets: each agrees with the float64 truth on a fixed grid of awkward sizes, and choosing one works."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import assert_budget, assert_peaked, outputs_and_gradients, tolerance
from problems import BF16, DTYPES, F16, F32, F64, Problem

import fastcl
from fastcl import reference

# One below, at and above the widths of vectors (2 to 32 lanes) and tiles, and the features around them.
GRID = [(1, 1, 1), (2, 3, 5), (5, 17, 33), (31, 65, 8), (33, 31, 15), (64, 64, 64), (65, 129, 16), (67, 300, 31),
        (3, 700, 100), (130, 47, 200), (17, 16, 129), (9, 70, 384), (5, 41, 1000), (257, 1100, 33)]  # fmt: skip


# Shapes whose rows or columns can be shared out.
SHARED = [(1, 1, 1), (67, 300, 31), (257, 1100, 33)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("threads", "n", "m", "d"), [(1, *g) for g in GRID] + [(2, *g) for g in SHARED])
def test_every_isa_agrees_with_the_truth(
    isa: str, one_thread: None, threads: int, n: int, m: int, d: int, dtype: torch.dtype
) -> None:
    torch.set_num_threads(threads)
    problem = Problem(n=n, m=m, d=d, query_dtype=dtype, key_dtype=dtype, scale="rows", bias="some_inf", ids="many")
    tensors, _ = problem.build()
    if m > 30 and d > 4:
        assert_peaked(tensors["query"], tensors["key"], 1.0)
    ours = outputs_and_gradients(fastcl.contrast, problem)
    plain = outputs_and_gradients(reference.contrast, problem)
    truth = outputs_and_gradients(reference.contrast, problem, F64)
    largest = problem.largest_logit()
    for name in ("pos", "lse"):
        tol = tolerance(F64 if dtype == F64 else F32, largest)
        assert_budget(name, ours[name], plain[name], truth[name], tol, floor=1.0, factor=0.0)
    for name in truth.keys() - {"pos", "lse"}:
        # Plain torch rounds 16-bit logits to 16 bits, which excuses nothing.
        factor = 0.0 if dtype in (BF16, F16) else 2.0
        assert_budget(name, ours[name], plain[name], truth[name], tolerance(dtype, largest), factor=factor)


def automatic() -> str:
    """The set that is chosen unasked: the fastest, where it pays (test_avx512_bf16.py tests where that is)."""
    facts = Path("/proc/cpuinfo")
    amd = "AuthenticAMD" in (facts.read_text() if facts.exists() else platform.processor())
    return [name for name in fastcl.config()["isas"] if amd or name != "avx512_bf16"][-1]


def test_the_portable_kernels_are_always_there() -> None:
    config = fastcl.config()
    assert config["isas"][0] == "baseline"
    assert config["isa"] in config["isas"]


def test_set_isa_returns_the_previous_and_takes_effect() -> None:
    isas = fastcl.config()["isas"]
    start = fastcl.set_isa("auto")
    assert fastcl.config()["isa"] == automatic()
    previous = "auto"
    for name in [*isas, "auto"]:
        assert fastcl.set_isa(name) == previous
        assert fastcl.config()["isa"] == (automatic() if name == "auto" else name)
        previous = name
    fastcl.set_isa(start)


def test_what_is_chosen_also_runs_tiny_problems() -> None:
    # Tests of an instruction set are mostly of tiny problems: left to itself the choice would be another one there.
    q = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    found = {}
    start = fastcl.set_isa("auto")
    for name in [*fastcl.config()["isas"], "auto"]:
        fastcl.set_isa(name)
        found[name] = fastcl.contrast(q, q, scale=3.0)[1]
    fastcl.set_isa(start)
    for lse in found.values():
        torch.testing.assert_close(lse, found["auto"])
    if "amx" in found:
        assert torch.equal(found["auto"], found["avx512"])
        assert not torch.equal(found["auto"], found["amx"])


def test_set_isa_refuses_what_cannot_run_here() -> None:
    before = fastcl.config()["isa"]
    with pytest.raises(ValueError, match=r"isa.*baseline.*'sse9'"):
        fastcl.set_isa("sse9")
    assert fastcl.config()["isa"] == before


# One process that has torch and forks for each name, of which each imports fastcl for the first time. With one name it
# does not fork, which Windows cannot.
_CHOSEN = """
import os, sys, torch
for name in sys.argv[1:]:
    if len(sys.argv) == 2 or os.fork() == 0:
        os.environ["FASTCL_ISA"] = name
        import fastcl
        print(fastcl.config()["isa"], flush=True)
        os._exit(0)
    os.wait()
"""


def test_environment_chooses_the_isa() -> None:
    names = fastcl.config()["isas"]
    chosen = []
    for asked in [names] if hasattr(os, "fork") else [[name] for name in names]:
        done = subprocess.run([sys.executable, "-c", _CHOSEN, *asked], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        chosen += done.stdout.split()
    assert chosen == [*names]


def test_environment_with_an_unknown_isa_is_refused_with_the_choices() -> None:
    code = "import fastcl, torch; fastcl.contrast(torch.ones(1, 1), torch.ones(1, 1))"
    environment = {**os.environ, "FASTCL_ISA": "sse9"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    last_line = done.stderr.strip().splitlines()[-1]
    assert "FASTCL_ISA" in last_line
    assert "sse9" in last_line
    assert "baseline" in last_line
