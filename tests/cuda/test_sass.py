"""The machine code of the CUDA kernels, compiled and read without a GPU: nothing spills, and enough blocks fit.

Compiling an element takes nvcc 10 seconds, so that `make check` reads them; run it after a change of csrc/cuda.
How the kernels compute is tested in the emulator; benchmarks/sass_report.py tells what their loops cost.
"""

import json
import shutil
from pathlib import Path

import pytest

from benchmarks import sass_report

PLAN = json.loads(Path(__file__).with_name("cuda_occupancy.json").read_text())["blocks"]
PLANNED_BLOCKS = {
    f"walk {element.lower()} {dim} {which}": blocks
    for element, dims in PLAN.items()
    for dim, walks in dims.items()
    for which, blocks in walks.items()
}
ELEMENTS = {name.split()[1] for name in PLANNED_BLOCKS}
SOURCES = sass_report.ROOT / "csrc" / "cuda"
OTHERS = {"pack_rows", "finish_forward", "finish_backward<float>", "chunk_forward", "chunk_backward", "forward_double"}


def test_every_element_has_a_file() -> None:
    assert {f"walk_{element}.cu" for element in ELEMENTS} == {path.name for path in SOURCES.glob("walk_*.cu")}


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["80", "90", "100"])
def test_nothing_spills_and_blocks_fit(arch: str, tmp_path: Path) -> None:
    reason = sass_report.missing() or (None if shutil.which("c++filt") else "c++filt was not found")
    if reason is not None:
        pytest.skip(reason)
    files = [*(f"walk_{element}.cu" for element in sorted(ELEMENTS)), "launch.cu"]
    rows = {row["kernel"]: row for file in files for row in sass_report.report(arch, tmp_path, file)}
    assert {name for name in rows if name.startswith("walk ")} == PLANNED_BLOCKS.keys()
    assert rows.keys() >= OTHERS
    # Kernels that are no walk wait for memory, and only many warps hide the wait.
    planned = dict.fromkeys(rows, 4) | PLANNED_BLOCKS
    spilled = {name: row for name, row in rows.items() if row["local bytes"] or row["local accesses"]}
    assert spilled == {}
    assert {name: row["registers"] for name, row in rows.items() if row["blocks"] < planned[name]} == {}
    # The loops consist of tensor core instructions, so finding some shows that the code was read.
    assert all(row["mix"]["HMMA"] >= 32 for name, row in rows.items() if name in PLANNED_BLOCKS)


LOOP = [
    (0x100, "MOV R1, R2"),
    (0x110, "HMMA.16816.F32.BF16 R4, R8, R10, R4"),
    (0x120, "@P0 BRA 0x160"),
    (0x130, "IADD3 R1, R1, R2, RZ"),
    (0x140, "IADD3 R1, R1, R2, RZ"),
    (0x150, "STL [R1], R2"),
    (0x160, "MUFU.EX2 R1, R1"),
    (0x170, "@P1 BRA 0x110"),
    (0x180, "EXIT"),
]


def test_the_loop_and_its_usual_path_are_found() -> None:
    loop = sass_report.main_loop(LOOP)
    assert [address for address, _ in loop] == list(range(0x110, 0x180, 0x10))
    assert sass_report.hot_path(loop) == ["HMMA.16816.F32.BF16", "BRA", "MUFU.EX2", "BRA"]
    assert sass_report.local_accesses(LOOP) == 1


def test_cycles_are_per_64_x_64_logits() -> None:
    # 64 x 64 logits of 64 bfloat16 features: 32 instructions of 16 x 8 x 16 for each of four warps.
    spent = sass_report.cycles("walk bfloat16 64 lse", ["HMMA.16816.F32.BF16"] * 32 + ["MUFU.EX2"] * 32)
    assert spent == {"tensor": 206, "exponential": 256, "shared": 0, "integer": 0, "multiply-add": 0, "issue": 64}
    # With the sums another product of the same size: the same instructions are half as many logits.
    assert sass_report.cycles("walk bfloat16 64 forward", ["HMMA.16816.F32.BF16"] * 32)["tensor"] == 413


def test_names_and_registers() -> None:
    prefix = "void fastcl::cuda::walk<fastcl::cuda::Tf32, 128, fastcl::cuda::"
    assert sass_report.short(f"{prefix}LogSumExp<fastcl::cuda::Tf32, true>, true>(W)") == "walk tf32 128 forward"
    assert sass_report.short(f"{prefix}SoftplusSum<fastcl::cuda::Tf32>, true>(W)") == "walk tf32 128 softplus"
    assert sass_report.short("fastcl::cuda::pack_rows(fastcl::cuda::Packing, long)") == "pack_rows"
    assert [sass_report.blocks_by_registers(n) for n in (64, 128, 129, 168, 255)] == [8, 4, 3, 3, 2]
