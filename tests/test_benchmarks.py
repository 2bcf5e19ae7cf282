"""The benchmarks compare equals, and run: losses agree at small sizes, and each program writes what it promises.

What they measure is not tested here; no figure is looked at.
"""

from __future__ import annotations

import dataclasses
import gzip
import itertools
import json
import os
import runpy
import shutil
import subprocess
import sys
import traceback
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from forks import ended, forked

import fastcl
from benchmarks import bench_threads_model, ceilings, paired, peer_suites, tables_scale
from benchmarks.cases import CASES, Case, fused, inputs, lean, textbook
from benchmarks.common import hardware, median_ratio
from benchmarks.peers import PEERS, Loss, missing
from fastcl._library import LIBRARY

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).parents[1]


def small(case: Case) -> Case:
    return dataclasses.replace(case, n=24, m=48 if case.m != case.n else 24, d=8)


def value_and_gradients(loss: Loss, case: Case) -> list[torch.Tensor]:
    x = inputs(case)
    value = loss(case, x)
    value.backward()
    return [value.detach(), *(t.grad for t in x[:3] if t.grad is not None)]


@pytest.mark.parametrize("name", CASES)
def test_everything_compared_computes_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.peers.CHUNK", 10)
    case = small(CASES[name])
    # In 16 bits torch's chunked loss also divides by the temperature in 16 bits.
    tolerance = 1e-5 if case.dtype == torch.float32 else 2e-2
    pairs = [(textbook, fused), (lean, fused)]
    pairs += [(peer.loss, peer.ours) for key, peer in PEERS.items() if peer.suits(case) and missing(key) is None]
    for theirs, ours in pairs:
        found, expected = value_and_gradients(theirs, case), value_and_gradients(ours, case)
        assert len(found) == len(expected) > 1
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a.float(), b.float(), rtol=tolerance, atol=tolerance * b.abs().max().item())


def test_ratios_are_taken_between_neighbours() -> None:
    # The machine is ten times slower in the second repetition; the median of the ratios does not see it.
    assert median_ratio({"a": [2.0, 20.0, 2.2], "b": [1.0, 10.0, 1.0]}, "a", "b") == 2.0


PROGRAMS = {
    "contrast": "--only tiny --against products,reference,lean,chunked --passes forward,both --threads 1 --repeats 1",
    "overhead": "--threads 1 --repeats 1",
    "memory": "--only tiny --against fastcl --threads 1",
    "cached": "--rows 8 --chunks 4 --repeats 1 --threads 1",
    "maxsim": "--only tiny --repeats 1 --threads 1",
    "variants": "--only gbce,bsl --rows 16 --repeats 1",
    "scaling": "--only tiny --threads 1 --columns 100,200 --repeats 1",
    "debias": "--seeds 1 --users 40 --items 40 --intents 4 --clicks 4 --epochs 1 --rounds 1 --epochs-a-round 1",
    "negatives": "--only text --items 300 --users 200 --repeats 1",
    "import": "--repeats 1",
    "compilers": f"{LIBRARY} {LIBRARY} --rounds 1",
}
SLOW = ("negatives", "cached", "import", "compilers")


def program(name: str, arguments: list[str], folder: Path) -> tuple[int, str, str]:
    """The exit code of a benchmark, what it printed and what it said of errors: as `python -m`, in a fork."""

    def work() -> int:
        sys.argv = [f"benchmarks/bench_{name}.py", *arguments]
        os.chdir(ROOT)
        with open(folder / "out", "w") as sys.stdout, open(folder / "err", "w") as sys.stderr:
            try:
                runpy.run_module(f"benchmarks.bench_{name}", run_name="__main__")
            except SystemExit as stop:
                return int(stop.code or 0)
            except BaseException:
                traceback.print_exc()
                return 1
        return 0

    code = ended(forked(work))
    return code, (folder / "out").read_text(), (folder / "err").read_text()


# A process for each peak of memory takes its time.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in PROGRAMS]
)
def test_program_runs(name: str, tmp_path: Path) -> None:
    output = tmp_path / "results"
    code, out, err = program(name, [*PROGRAMS[name].split(), "--output", str(output)], tmp_path)
    assert code == 0, err
    content = json.loads(output.with_suffix(".json").read_text())
    assert content["machine"]["torch"] == torch.__version__
    table = output.with_suffix(".md").read_text()
    assert table.strip() in out
    assert "| --- |" in table
    assert output.with_suffix(".png").exists() == (name in ("scaling", "debias"))


def test_an_unknown_case_is_named(tmp_path: Path) -> None:
    code, _, err = program("contrast", ["--only", "clerc"], tmp_path)
    assert code == 2
    assert "--only: expected some of clrec, " in err
    assert err.strip().endswith("got clerc")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("valgrind") is None, reason="needs valgrind")
def test_instructions_are_counted(tmp_path: Path) -> None:
    if "avx2" not in fastcl.config()["isas"]:
        pytest.skip("this processor has no AVX2")
    output = tmp_path / "instructions.json"
    command = [sys.executable, "-m", "benchmarks.count_instructions", "--output", str(output)]
    subprocess.run(command, cwd=ROOT, check=True)
    rows = json.loads(output.read_text())["rows"]
    # A vector of 8 floats a multiply-add at best, 4 products at most, and something must have been counted.
    assert all(1 / 8 < row["per multiply-add of N x M x D"] < 8 for row in rows)


def test_results_name_preloaded_libraries_without_their_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    assert "preloaded" not in hardware()
    monkeypatch.setenv("LD_PRELOAD", "/some/folder/libone.so:libtwo.so")
    assert hardware()["preloaded"] == ["libone.so", "libtwo.so"]


@pytest.mark.slow
def test_curves_are_measured_once_for_each_table_and_seed(tmp_path: Path) -> None:
    for name in ("amazon/Toys_and_Games", "movielens/ml-1m"):
        path = tmp_path / f"{name}.txt.gz"
        path.parent.mkdir()
        rows = (f"{user} " + " ".join(str(1 + (user * 3 + n) % 40) for n in range(8)) for user in range(1, 41))
        path.write_bytes(gzip.compress("\n".join(rows).encode()))
    output, states = tmp_path / "curves.json", tmp_path / "states"
    asked = ["--data", str(tmp_path), "--seeds", "1", "--output", str(output), "--states", str(states)]
    for only in ("amazon", "", "clrec"):
        code, _, err = program("curves", [*asked, "--only", only], tmp_path)
        assert code == 0, err
    rows = json.loads(output.read_text())["rows"]
    assert [(row["data"], row["table"]) for row in rows] == [
        (name, table) for name in ("amazon/Toys_and_Games", "movielens/ml-1m") for table in ("dense", "rows")
    ]
    for dense, by_rows in zip(rows[::2], rows[1::2], strict=True):
        assert len(dense["ndcg@10"]) == dense["epochs"]
        assert dense["ndcg@10"] == pytest.approx(by_rows["ndcg@10"], abs=3e-4)


@pytest.mark.slow
def test_scale_measures_what_it_is_asked_for(tmp_path: Path) -> None:
    kinds = "steps,pages,validations,saves,index"
    arguments = ["--only", kinds, "--items", "3000", "--tables", "rows", "--processes", "1,2"]
    command = [sys.executable, "-m", "benchmarks.bench_scale", *arguments, "--output", str(tmp_path / "scale")]
    subprocess.run(command, cwd=ROOT, check=True)
    found = json.loads((tmp_path / "scale.json").read_text())
    for kind in ("steps", "validations", "saves"):
        assert [(row["items"], row["table"], row["processes"]) for row in found[kind]] == [
            (3000, "rows", 1),
            (3000, "rows", 2),
        ]
    assert [row["large_pages"] for row in found["pages"]] == [False]
    assert found["index"][0]["recall@50"] > 0.5
    assert (tmp_path / "scale.png").exists()


def test_many_workers_are_arithmetic_over_one(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [
        {"items": size, "table": "rows", "processes": 1, "CPU ms": 20.0, "distinct rows": 7000.0, "memory, MB": memory}
        for size, memory in ((1_000_000, 900.0), (11_000_000, 8_600.0))
    ]
    monkeypatch.setattr(tables_scale, "results", lambda name: {"steps": steps})
    assert tables_scale.bytes_a_row() == pytest.approx(770)
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in tables_scale.workers().splitlines()]
    first = dict(zip(lines[0], lines[2], strict=True))
    sent = 7000 * 520 * 7 / 8 / 1e6  # of 7,000 rows an eighth is one's own
    step = 20 + sent / 1.25
    assert first["table of a worker, GB"] == f"{770 / 80:.1f}"
    assert first["sent in a step, MB"] == f"{sent:.1f}"
    assert first["targets a second, all"] == f"{8 * 256 * 1000 / step:,.0f}"
    assert first["MB a second"] == f"{1000 * sent / step:,.0f}"
    assert [line[-1] for line in lines[2:]] == ["-", "-", "500"]


def test_adapters_take_the_place_of_the_originals_in_all_modules_of_a_package() -> None:
    class Own:
        pass

    names = ("made_package", "made_package.losses", "made_package.trainer", "another_package")
    modules = {name: types.ModuleType(name) for name in names}
    for module in modules.values():
        vars(module).update(Loss=Own, Renamed=Own)
    adapters = types.SimpleNamespace(Loss=type("Adapter", (), {}))
    suite = peer_suites.Suite("made-package", ["made_package.losses"], ["Loss", "Missing"], [])
    with pytest.MonkeyPatch.context() as patch:
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
        peer_suites.swap(suite, adapters)
    found = {name: {module.Loss, module.Renamed} for name, module in modules.items()}
    assert found == {name: {adapters.Loss} for name in names[:3]} | {"another_package": {Own}}


def test_differences_from_other_packages_have_a_reason_each() -> None:
    failed = {"one[1]": "passed", "one[2]": "skipped", "two": "failed"}
    assert peer_suites.unexplained(failed, {"one": "because"}) == []
    (wrong,) = peer_suites.unexplained(failed, {})
    assert wrong.startswith("one: expected to pass, or a reason")
    (wrong,) = peer_suites.unexplained(failed, {"one": "because", "two": "because"})
    assert wrong.startswith("two: has a reason")


def test_callgrind_files_are_read(tmp_path: Path) -> None:
    """Names are written once, later a number stands for them; the line behind `calls=` holds the inclusive cost."""
    lines = """fn=(1) step
1 50
cfn=(2) torch_parallel_for
calls=2 0
5 300
fn=(2)
1 200
fn=(3) op
1 7
cfn=(2)
calls=1 0
9 43
cfn=(1)
calls=9 0
9 9
summary: 600
"""
    (tmp_path / "out").write_text(lines)
    assert bench_threads_model.read(tmp_path / "out") == (600, 343, 3)


def test_the_model_of_threads() -> None:
    assert bench_threads_model.model(one=100.0, serial=20.0, regions=3, empty=0.0, threads=4) == 40.0
    assert bench_threads_model.model(one=100.0, serial=100.0, regions=3, empty=2.0, threads=8) == 118.0


def test_the_share_of_the_ceiling() -> None:
    rates = {"fma": 100.0, "avx512_bf16": None, "amx": 1200.0}
    case, one = Case(10, 20, 30, "pairs", ""), 10 * 20 * 30 * 1e-9  # seconds at one multiply-add per nanosecond

    def least(isa: str, backward: bool, **other: object) -> float | None:
        return ceilings.seconds(dataclasses.replace(case, **other), backward, isa, rates)

    assert least("avx512", False) == pytest.approx(one / 100)
    assert least("avx512", True) == pytest.approx(3 * one / 100)
    assert least("avx512", True, kind="frozen") == pytest.approx(2 * one / 100)
    assert least("avx512", True, kind="queue") == pytest.approx((2 * one + 3 * one / 2) / 100)
    assert least("amx", True) == pytest.approx(18 * one / 1200)
    assert least("amx", True, dtype=torch.bfloat16) == pytest.approx(7 * one / 1200)
    assert least("baseline", True) is None
    assert ceilings.share(case, False, 2, one / 100, "avx512", rates) == pytest.approx(0.5)
    assert ceilings.share(case, False, 2, one / 100, "avx512", None) is None


def test_paired_tests_are_corrected_for_all_models_and_metrics() -> None:
    rng = np.random.default_rng(0)
    base = rng.random(400)
    better, same = base + 0.1 + 0.2 * rng.standard_normal(400), base + 0.2 * rng.standard_normal(400)
    gains = {
        name: dict.fromkeys(paired.METRICS, of) for name, of in (("base", base), ("better", better), ("same", same))
    }
    rows = {(row["label"], row["metric"]): row for row in paired.compared(gains, "base")}
    assert set(rows) == set(itertools.product(("better", "same"), paired.METRICS))
    for metric in paired.METRICS:
        assert rows["better", metric]["p holm"] < 0.01 < 0.05 < rows["same", metric]["p holm"]
        assert rows["better", metric]["difference"] == pytest.approx((better - base).mean())
        assert rows["better", metric]["p holm"] == pytest.approx(4 * rows["better", metric]["p"])  # four tests in all
