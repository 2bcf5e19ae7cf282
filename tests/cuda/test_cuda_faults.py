"""Whether the tests of the CUDA kernels notice faults: the emulator itself, sanitizers, faults planted in a kernel.

All but the first test compile a lot and are left to `make check`.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from compiler import compiler_or_skip

ROOT = Path(__file__).resolve().parents[2]
EMULATOR = ROOT / "tests" / "cuda" / "cuda_emulator"
KERNELS = ROOT / "csrc" / "cuda"
BUILDS = {
    "plain": ["-O2"],
    "address": ["-O1", "-g1", "-fsanitize=address"],
    "undefined": ["-O1", "-g1", "-fsanitize=undefined", "-fno-sanitize-recover=all"],
    "thread": ["-O1", "-g1", "-fsanitize=thread"],
}


def compile_and_link(sources: list[Path], build: str, folder: Path, cache: Path, defines: dict[Path, str]) -> Path:
    """The program of these sources; objects without a define of their own are made once in `cache`."""
    compiler = compiler_or_skip()
    objects = []
    for source in sources:
        define = defines.get(source)
        target = (folder if define else cache) / f"{source.name}.{build}.o"
        objects.append(str(target))
        if target.exists():
            continue
        command = [compiler, "-std=c++17", "-Wall", "-Wextra", "-Werror", "-DFASTCL_EMULATED", *BUILDS[build]]
        command += [f"-D{define}"] if define else []
        command += [f"-I{ROOT / 'csrc'}", f"-I{EMULATOR}", "-x", "c++", "-c", str(source), "-o", str(target)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    program = folder / build
    flags = [flag for flag in BUILDS[build] if flag.startswith("-fsanitize")]
    done = subprocess.run([compiler, *flags, *objects, "-o", str(program)], capture_output=True, text=True, check=False)
    if "cannot find" in done.stderr:
        pytest.skip(f"this compiler has no runtime for the {build} build")
    assert done.returncode == 0, done.stderr
    return program


def run(*command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, errors="replace")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("objects")


@pytest.mark.parametrize("build", ["plain", *(pytest.param(b, marks=pytest.mark.slow) for b in list(BUILDS)[1:])])
def test_the_emulator_keeps_to_its_specification(build: str, tmp_path: Path, cache: Path) -> None:
    program = compile_and_link([EMULATOR / "check_emulator.cpp"], build, tmp_path, cache, {})
    done = run(program)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[-4]) > 100


@pytest.mark.slow
def test_the_thread_sanitizer_sees_races_between_emulated_threads(tmp_path: Path, cache: Path) -> None:
    program = compile_and_link([EMULATOR / "check_emulator.cpp"], "thread", tmp_path, cache, {})
    races = run(program, "list").stdout.split()
    assert len(races) == 7
    for race in races:
        assert "data race" in run(program, race).stderr, race


# Types and cases (indices of kCases in check_kernels.cpp): the thread sanitizer is slow, and has to see buffers reused.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "runs"),
    [
        ("plain", [(4, "ftbhd", "01234567")]),
        ("address", [(2, "ftbhd", "01234567")]),
        ("undefined", [(2, "ftbhd", "01234567")]),
        ("thread", [(2, "b", "25"), (2, "f", "2"), (1, "h", "5"), (1, "t", "5"), (2, "d", "7")]),
    ],
)
def test_kernels_are_clean(build: str, runs: list[tuple[int, str, str]], tmp_path: Path, cache: Path) -> None:
    sources = [EMULATOR / "check_kernels.cpp", *sorted(KERNELS.glob("*.cu"))]
    program = compile_and_link(sources, build, tmp_path, cache, {})
    for seeds, types, cases in runs:
        done = run(program, seeds, types, cases)
        assert done.returncode == 0, done.stdout + done.stderr[-4000:]
        assert int(done.stdout.split()[-4]) == 14 * seeds * len(types) * len(cases)


# A fault, the build that must notice, and by which words.
FAULTS = [
    ("NONE", "plain", ""),
    ("NO_SYNC", "plain", "FAIL"),
    ("NO_SYNC", "thread", "data race"),
    ("WAR", "plain", "FAIL"),
    ("WAR", "thread", "data race"),
    ("TAIL", "plain", "FAIL"),
    ("FRAGMENT", "plain", "FAIL"),
    ("NO_WAIT", "plain", "FAIL"),
    ("ROW_TAIL", "address", "heap-buffer-overflow"),
    ("SKIP_CHUNK", "plain", "FAIL"),
    ("DIVERGE", "plain", "wait at __syncthreads"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "build", "words"), FAULTS, ids=lambda x: x)
def test_planted_faults_are_noticed(fault: str, build: str, words: str, tmp_path: Path, cache: Path) -> None:
    walk = KERNELS / "walk_bfloat16.cu"
    sources = [EMULATOR / "check_kernels.cpp", EMULATOR / "only_bfloat16.cpp", KERNELS / "launch.cu", walk]
    assert fault == "NONE" or any(f"FAULT_{fault}" in file.read_text() for file in KERNELS.glob("*.cuh"))
    program = compile_and_link(sources, build, tmp_path, cache, {walk: f"FAULT_{fault}"})
    done = run(program, 2, "b", "2" if build == "thread" else "01234567")
    assert (done.returncode != 0) == (fault != "NONE"), f"{fault} went unnoticed"
    assert words in done.stdout + done.stderr
