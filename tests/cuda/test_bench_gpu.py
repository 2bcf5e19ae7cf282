"""The parts of the GPU benchmark that need no GPU: all compared forms are one loss; floors, the table, the targets."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import bench_gpu, roofline
from benchmarks.cases import Case

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", roofline.SHAPES)
def test_everything_compared_computes_the_same(name: str) -> None:
    case = roofline.SHAPES[name].case
    small = dataclasses.replace(case, n=24, m=24 if case.kind in ("batch", "both") else 40, d=8)
    found = {}
    for key, loss in bench_gpu.losses(small, compiling=False).items():
        if key == "memeff":  # for GPUs alone
            continue
        x = bench_gpu.inputs(small, "cpu")
        value = loss(small, x)
        value.backward()
        found[key] = [value.detach(), *(t.grad for t in x[:3] if t.grad is not None)]
    assert len(found) >= 2
    for key, values in found.items():
        assert len(values) == (2 if case.kind == "frozen" else 4 if case.kind == "shared" else 3), key
        for a, b in zip(values, found["ours"], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_floors_by_hand() -> None:
    # 8192 x 8192 logits of 128 features: 2 * 8192^2 * 128 = 17.2 GFLOP, at 989 TFLOP/s 17.4 us; 67.1 M exponentials at
    # 3.71e12/s are 18.1 us. With backward four times the products and twice the exponentials.
    simclr = roofline.SHAPES["simclr"].case
    assert roofline.floor(simclr, "bf16", False) == pytest.approx(18.1e-6, rel=0.01)
    assert roofline.floor(simclr, "bf16", True) == pytest.approx(69.5e-6, rel=0.01)
    # A frozen queue takes no gradient: one product more, and no exponential.
    moco = roofline.SHAPES["moco"].case
    assert roofline.work(moco, "fp32", True) == (4 * 256 * 65536 * 128, 256 * 65536, (256 + 65536) * 128 * 4)
    # Two launches of 3 us are the least.
    assert roofline.fused(roofline.SHAPES["clrec"].case, "bf16", False) == pytest.approx(6e-6)


def test_faster_tensor_cores_lower_a_floor_until_memory_is_what_counts() -> None:
    case = Case(4096, 4096, 128, "batch", "")
    fast = roofline.Rates(tensor={"bf16": 1e30}, exp=1e30, memory=1e12)
    assert roofline.floor(case, "bf16", False, fast) == 2 * 8192 * 128 / 1e12


def line(seconds: dict[str, list[float]], name: str = "simclr") -> dict[str, object]:
    facts = {"MB": 9.0, "eager MB": None, "launches": 4}
    failed = {"compile": "out of memory"}
    return bench_gpu.row(name, "bf16", True, seconds, failed, facts, roofline.PAPER)


def test_a_row_of_the_table() -> None:
    # Eager takes three times as long, as neighbours in time have it, while the machine slows down by ten.
    found = line({"ours": [1e-4, 1e-3, 1e-4], "eager": [3e-4, 3e-3, 3e-4]})
    assert found["ms"] == pytest.approx(0.1)
    assert found["of floor"] == pytest.approx(0.695, rel=0.01)
    assert found["eager /"] == pytest.approx(3.0)
    assert found["compile /"] == "out of memory"
    assert found["memeff /"] is None
    assert found["floor"] == "69 us"
    assert "| simclr | 8,192 x 8,192 x 128 | bf16 | step | 0.10 | 69 us |" in bench_gpu.markdown([found])
    assert bench_gpu.missed([found]) == []


def test_targets_that_are_missed_are_named() -> None:
    slow = line({"ours": [1e-3], "eager": [0.9e-3], "memeff": [1.5e-3]})
    assert bench_gpu.missed([slow]) == [
        "simclr bf16 step: 0.15 of what is expected, target 0.5",
        "simclr bf16 step: eager takes 0.90 of our time, target 1",
        "simclr bf16 step: memeff takes 1.50 of our time, target 2",
    ]
    wide = line({"ours": [1e-2], "eager": [2e-2], "memeff": [1e-2]}, "clip-1024")
    assert bench_gpu.missed([wide]) == []  # memeff is a target up to 512 features


def test_measured_rates_take_the_place_of_paper() -> None:
    measured = {"mma bf16": 6e14, "mma tf32": 3e14, "exp": 3e12, "copy": 3e12}
    measured |= {"product bf16": 8e14, "product tf32": 4e14, "product fp32": 5e13}
    rates = bench_gpu.rates(measured)
    assert rates.tensor == {"bf16": 8e14, "tf32": 4e14, "fp32": 1e14}
    assert rates.mma_sync["fp32"] == 1e14  # three TF32 products


def test_precision_is_put_back() -> None:
    before = torch.get_float32_matmul_precision()
    with bench_gpu.precision("tf32"):
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and the program would measure it")
def test_without_a_gpu_it_says_so() -> None:
    command = [sys.executable, "-m", "benchmarks.bench_gpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.strip().endswith("torch finds no CUDA device here")


def test_the_script_parses() -> None:
    subprocess.run(["bash", "-n", str(ROOT / "benchmarks" / "gpu.sh")], check=True)
