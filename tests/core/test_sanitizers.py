"""The CPU kernels under sanitizers, on random problems and without torch (sanitizers/kernels.cpp).

The default suite runs a build that is not optimised: it tries half as many problems a second, takes a third of the time
to compile, and every access is still there to be checked. `make check` runs longer, and the other builds.
"""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from compiler import compile_all, compiler_or_skip

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [
    ROOT / "tests/core/sanitizers/kernels.cpp",
    *sorted((ROOT / "csrc/cpu").glob("kernels_*.cpp")),
    ROOT / "csrc/cpu/isa.cpp",
]
BUILDS = {
    "address,undefined, not optimised": ["-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "address,undefined": ["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "thread": ["-O1", "-fsanitize=thread"],
    "none": ["-O3"],
}


# Cores without and with products of bfloat16 matrices.
ARM_CORES = ("neoverse-n1", "max,sve=off")


def run(build: str, seconds: int, seed: int, folder: Path) -> None:
    compiler = compiler_or_skip()
    program = folder / "kernels"
    common = [compiler, "-std=c++17", "-g1", *BUILDS[build], f"-I{ROOT / 'csrc'}"]  # -g1: enough for a report's lines
    command = [*common, *compile_all(common, SOURCES, folder), "-o", str(program), "-lpthread"]
    linked = subprocess.run(command, capture_output=True, text=True, check=False)
    if "cannot find" in linked.stderr:
        pytest.skip(f"this compiler has no runtime for its sanitizers: {build}")
    assert linked.returncode == 0, linked.stderr
    result = subprocess.run([str(program), str(seconds), str(seed)], capture_output=True, text=True, check=False)
    print(build, result.stdout.strip())
    assert result.returncode == 0, result.stdout + result.stderr
    assert int(result.stdout.split()[0]) > 0


def test_clean_under_address_and_undefined_sanitizers(tmp_path: Path) -> None:
    run("address,undefined, not optimised", seconds=3, seed=0, folder=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("build", list(BUILDS)[1:])
def test_clean_for_longer(build: str, tmp_path: Path) -> None:
    run(build, seconds=60, seed=1, folder=tmp_path)


@pytest.mark.slow
def test_the_kernels_for_arm_in_an_emulator(tmp_path: Path) -> None:
    emulator = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if emulator is None or importlib.util.find_spec("ziglang") is None:
        pytest.skip("no qemu for 64-bit ARM here, or no zig to compile for it")
    program = tmp_path / "kernels"
    command = [sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-linux-musl", "-std=c++17", "-O3", "-g0"]
    command += ["-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'csrc'}"]
    objects = compile_all(command, SOURCES, tmp_path)
    subprocess.run([*command, *objects, "-o", str(program)], check=True)
    for core in ARM_CORES:
        ran = [emulator, "-cpu", core, str(program), "20", "3"]
        result = subprocess.run(ran, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr
        assert int(result.stdout.split()[0]) > 0
