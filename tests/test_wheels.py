"""Wheels: the checks of what was built notice every fault, and the tables behind the builds agree with the sources."""

from __future__ import annotations

import dataclasses
import io
import os
import runpy
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks import arm_loops
from building import check, platforms, try_wheels, wheels
from building.binary import Binary, read
from fastcl._library import LIBRARY

ROOT = Path(__file__).resolve().parent.parent
GOOD = {
    "linux-aarch64": Binary(
        "linux", "aarch64", {"libtorch_cpu.so", "libc.so.6"}, {"torch_parallel_for", "malloc"},
        check.our_functions(), system=(2, 17),
    ),
    "macos-arm64": Binary(
        "macos", "aarch64", {"@rpath/libtorch_cpu.dylib", "/usr/lib/libSystem.B.dylib"}, {"torch_parallel_for"},
        check.our_functions(), searched=["@loader_path/../torch/lib"], system=(11, 0), signed=True,
    ),
    "windows-x86_64": Binary(
        "windows", "x86_64", {"torch_cpu.dll", "KERNEL32.dll"}, {"torch_parallel_for"}, check.our_functions(),
    ),
}  # fmt: skip
FAULTS: list[tuple[str, dict[str, Any], str]] = [
    ("linux-aarch64", {"machine": "x86_64"}, "expected a library for linux aarch64, got linux x86_64"),
    ("linux-aarch64", {"needed": {"libtorch_cpu.so", "libgomp.so.1"}}, "not every system has: libgomp.so.1"),
    ("linux-aarch64", {"needed": {"libc.so.6"}}, "does not name torch's library"),
    ("linux-aarch64", {"system": (2, 34)}, "expected to run on linux 2.28, needs 2.34"),
    ("linux-aarch64", {"searched": ["RUNPATH /opt/torch"]}, "looks for libraries in RUNPATH /opt/torch"),
    ("linux-aarch64", {"exports": {"fastcl_set_isa", "_ZNSt"}}, "expected exports"),
    ("linux-aarch64", {"imports": {"torch_parallel_for", "PyErr_Clear"}}, "functions of Python: PyErr_Clear"),
    ("linux-aarch64", {"imports": {"malloc"}}, "asks nothing of torch"),
    ("macos-arm64", {"imports": {"torch_new_thing"}}, "for macos-arm64 does not export torch_new_thing"),
    ("macos-arm64", {"system": (13, 0)}, "expected to run on macos 11.0, needs 13.0"),
    ("macos-arm64", {"signed": False}, "has no signature"),
    ("windows-x86_64", {"needed": {"torch_cpu.dll", "libstdc++-6.dll"}}, "not every system has: libstdc++-6.dll"),
]


def test_a_good_library_passes() -> None:
    assert {name: check.library_problems(binary, name) for name, binary in GOOD.items()} == dict.fromkeys(GOOD, [])


@pytest.mark.parametrize(("name", "change", "words"), FAULTS, ids=[words for *_, words in FAULTS])
def test_a_fault_of_a_library_is_told(name: str, change: dict[str, Any], words: str) -> None:
    (found,) = check.library_problems(dataclasses.replace(GOOD[name], **change), name)
    assert words in found


def test_this_machines_library_is_read() -> None:
    pytest.importorskip("lief")
    library = read(Path(LIBRARY))
    assert library.exports == check.our_functions()
    assert "torch_parallel_for" in library.imports
    assert check.torch_problems(library, "linux-x86_64") == []
    assert [name for name in library.needed if name.startswith("libtorch")] == ["libtorch_cpu.so"]


def _wheel(folder: Path, tag: str, files: dict[str, bytes], said: str = "") -> Path:
    path = folder / f"fastcl-1.0-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("fastcl-1.0.dist-info/WHEEL", f"Wheel-Version: 1.0\nTag: {said or tag}\n")
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def test_faults_of_a_wheel_are_told(tmp_path: Path) -> None:
    nothing = {"fastcl/without_kernels.txt": b""}
    assert check.problems(_wheel(tmp_path, "py3-none-any", nothing)) == []
    for tag, files, words in (
        ("cp311-cp311-any", nothing, "expected a tag py3-none-PLATFORM"),
        ("py3-none-any", {}, "expected the libraries"),
        ("py3-none-any", nothing | {"fastcl/libfastcl_cpu.so": b""}, "expected the libraries"),
        ("py3-none-win_amd64", nothing, "expected the libraries ['fastcl/fastcl_cpu.dll'], got []"),
        ("py3-none-any", nothing | {"fastcl/x.py": bytes(3_000_001)}, "expected at most 3000000 bytes"),
    ):
        assert any(words in found for found in check.problems(_wheel(tmp_path, tag, files))), words
    other = _wheel(tmp_path, "py3-none-any", nothing, said="py3-none-win_amd64")
    assert check.problems(other) == ["the tag of its name is not that in its metadata"]
    assert check.problems(
        _wheel(tmp_path, "py3-none-any", nothing | {"fastcl/recsys/data/sets/x.xz": bytes(4_000_000)})
    ) == []


def test_paths_of_a_building_machine_are_found() -> None:
    for path in (b"/home/someone/fastcl", b"/tmp/build", b"/usr/lib/gcc/x86_64", b"C:\\Users\\someone"):
        assert check.MACHINE_PATH.search(b"\0" + path + b"\0"), path
    for path in (b"csrc/torch_shim.h", b"/usr/lib/libSystem.B.dylib", b"a/b"):
        assert not check.MACHINE_PATH.search(b"\0" + path + b"\0"), path


def test_the_package_looks_for_what_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    for system, name in (("linux", "linux-x86_64"), ("darwin", "macos-arm64"), ("win32", "windows-x86_64")):
        monkeypatch.setattr(sys, "platform", system)
        looked_for = runpy.run_path(str(ROOT / "fastcl" / "_library.py"))["LIBRARY"]
        assert Path(looked_for).name == platforms.library_name(name)


def test_what_torch_exports_is_recorded_for_every_platform() -> None:
    functions = set(platforms.torch_functions())
    assert "torch_parallel_for" in functions
    for name in platforms.PLATFORMS:
        assert check.torch_exports(name)
        assert all(functions <= exports for exports in check.torch_exports(name).values()), name
    assert all(f"_{function}" in platforms.tbd() and function in platforms.definitions() for function in functions)


def _tools(**env: str) -> subprocess.CompletedProcess[str]:
    code = "from building import backend; print(backend.tools())"
    env = {"FASTCL_CUDA": "0", "PYTHONPATH": os.pathsep.join(sys.path)} | env
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, text=True, capture_output=True, check=False)


def test_zigs_compiler_is_taken_where_there_is_none(tmp_path: Path) -> None:
    assert _tools(PATH=str(tmp_path)).stdout == "['ninja', 'ziglang']\n"
    (tmp_path / "c++").write_text("")
    (tmp_path / "c++").chmod(0o755)
    assert _tools(PATH=str(tmp_path)).stdout == "['ninja']\n"
    assert _tools(PATH=str(tmp_path), FASTCL_PLATFORM="macos-arm64").stdout == "['ninja', 'ziglang']\n"
    assert _tools(PATH=str(tmp_path), FASTCL_PLATFORM="none").stdout == "[]\n"
    refused = _tools(PATH=str(tmp_path), FASTCL_PLATFORM="amiga")
    assert refused.stderr == (
        "fastcl: FASTCL_PLATFORM: expected one of linux-x86_64, linux-aarch64, macos-arm64, windows-x86_64, none, "
        "got 'amiga'\n"
    )


def test_facts_of_a_place_are_those_of_its_selftest() -> None:
    said = (
        "isas           baseline, bf16\ntorch          2.11.0+cpu\npython         CPython 3.10.1\n"
        "system         Linux-6.1-aarch64, aarch64, 2 processors\nbf16 float32   good   contrast 1e-07\n"
    )
    assert try_wheels.facts(said) == "CPython 3.10.1, torch 2.11.0+cpu, aarch64, instruction sets: baseline, bf16"
    assert try_wheels.facts(said.replace("baseline, bf16", "")).endswith("instruction sets: none")
    assert try_wheels.facts("Traceback") == "unknown"


def test_another_python_is_asked_for_its_system_and_machine() -> None:
    own = f"This one={sys.executable} -I"
    *_, same = try_wheels.places([own], [])
    assert (same.name, same.python, same.tests) == ("This one", [sys.executable, "-I"], try_wheels.SOME)
    assert same.wheel == f"manylinux_2_28_{os.uname().machine}.whl"
    *_, emulated = try_wheels.places([], [own])
    assert emulated.tests == try_wheels.FEW
    tests = try_wheels.steps(emulated)["tests of losses"]
    assert try_wheels.PROPERTY_TESTS in tests
    assert tests[-3:] == try_wheels.FEW["losses"]
    warned = [
        place.name
        for place in try_wheels.places([own], [])
        if any("no compiled kernel" in word for word in try_wheels.steps(place)["tests of losses"])
    ]
    assert warned == ["Linux x86_64, no kernels"]
    windows = "print('Windows AMD64'.lower().capitalize())"
    *_, other = try_wheels.places([f'wine={sys.executable} -c "{windows}"'], [])
    assert (other.wheel, other.tests) == ("win_amd64.whl", try_wheels.OTHER_SYSTEM)
    with pytest.raises(SystemExit, match="--python: expected NAME=COMMAND of a Python, got This one="):
        list(try_wheels.places([f"This one={sys.executable} -c 1/0 ;"], []))


def test_every_test_file_of_a_place_exists() -> None:
    for tests in (try_wheels.LOSSES, try_wheels.SOME, try_wheels.OTHER_SYSTEM, try_wheels.FEW):
        assert [file for file, *_ in tests.values() if not (ROOT / file).exists()] == []


def test_a_place_goes_on_with_the_steps_that_have_not_passed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said = "print('torch  2.0+cpu\\npython  CPython 3.9\\nsystem  X, arm64, 2\\nisas  sse\\nall good; x')"
    commands = {
        "self-test": ["-c", said],
        "snippet": ["-c", "raise SystemExit(print('FAILED tests/x.py::test_y - no') or 1)"],
        "tests of losses": ["-c", "print('== 3 passed, 1 skipped in 2.0s ==')"],
        "tests of isa": ["-c", "print('1,204 passed in 2.0s'.replace(',', ''))"],
    }
    monkeypatch.setattr(try_wheels, "installed", lambda *rest: ([sys.executable], {}))
    monkeypatch.setattr(try_wheels, "steps", lambda place: commands)
    place = try_wheels.Place("here", "any.whl")
    before = {"good": True, "said": "kept", "counts": {"passed": 3, "skipped": 1}}
    failed = {"good": False, "said": "failed"}
    planned = [*commands, "epoch", "tests of soft"]
    done: dict[str, Any] = {"wheel": "0", "commit": "4a5b", "facts": "unknown", "planned": planned}
    done["steps"] = {"tests of losses": before, "snippet": failed}
    assert list(try_wheels.tried(place, tmp_path, "2.13.0", done)) == ["self-test", "snippet", "tests of isa"]
    assert done["steps"]["tests of losses"] is before
    assert done["steps"]["snippet"] == {"good": False, "said": "failed, tests/x.py::test_y"}
    assert try_wheels.row("here", done) == {
        "place": "here", "commit": "4a5b", "with": "CPython 3.9, torch 2.0+cpu, arm64, instruction sets: sse",
        "self-test": "all good", "README": "failed, tests/x.py::test_y", "one epoch": "not run",
        "losses' tests": "1,207 passed, 1 skipped, not run: soft",
    }  # fmt: skip


def test_the_digests_open_with_the_commit_and_the_table_tells_it(tmp_path: Path) -> None:
    assert try_wheels.commit_of(tmp_path) == "unknown"
    (tmp_path / "a.whl").write_text("x")
    wheels.write_sums(tmp_path)
    first, second = (tmp_path / wheels.SUMS).read_text().splitlines()
    assert (first, second) == (f"# commit {wheels.commit()}", f"{wheels.digest(tmp_path / 'a.whl')}  a.whl")
    assert try_wheels.commit_of(tmp_path) == wheels.commit()


def test_a_commit_is_told_with_what_has_changed_since(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(wheels, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert wheels.commit() == "unknown"
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@x.org"]
    (tmp_path / "a").write_text("x")
    for command in (["init", "-q"], ["add", "a"], ["commit", "-q", "-m", "a"]):
        subprocess.run([*git, *command], check=True)
    clean = wheels.commit()
    head = subprocess.run([*git, "rev-parse", "HEAD"], text=True, capture_output=True, check=True).stdout
    assert len(clean) == 12
    assert head.startswith(clean)
    (tmp_path / "a").write_text("y")
    assert wheels.commit() == f"{clean}-dirty"


def test_the_first_snippet_of_the_readme_runs() -> None:
    code = try_wheels.snippet()
    assert code.startswith("import torch, fastcl")
    outside = code.replace(repr(str(ROOT)), "'nowhere'")
    done = subprocess.run([sys.executable, "-c", outside], text=True, capture_output=True, check=False)
    assert (done.stdout, done.returncode) == ("ran\n", 0), done.stderr


def test_a_repacked_sdist_depends_on_its_files_alone(tmp_path: Path) -> None:
    def pack(name: str, date: int, *files: str) -> bytes:
        with tarfile.open(tmp_path / name, "w:gz") as archive:
            for file in files:
                member = tarfile.TarInfo(file)
                member.size, member.mtime, member.uname, member.mode = len(file), date, name, 0o600 | date
                archive.addfile(member, io.BytesIO(file.encode()))
        wheels.repack(tmp_path / name)
        return (tmp_path / name).read_bytes()

    assert pack("a", 4, "x/b", "x/a") == pack("b", 0, "x/a", "x/b") != pack("c", 0, "x/a", "x/c")
    with tarfile.open(tmp_path / "a") as archive:
        content = archive.extractfile("x/b")
        assert content is not None
        assert content.read() == b"x/b"


ASSEMBLY = """\
outer_function:
.L1:
\tmov x0, x1
.L2:                                   // the inner loop
\tldp q0, q1, [x0]
\tfmla v2.4s, v0.4s, v1.s[0]
\tfmla v3.4s, v0.4s, v1.s[1]
\t.loc 1
\tb.ne .L2
\tcbnz x1, .L1
other_function:
\tb .L2
"""


def test_inner_loops_are_found_in_assembly() -> None:
    inner = ["ldp q0, q1, [x0]", "fmla v2.4s, v0.4s, v1.s[0]", "fmla v3.4s, v0.4s, v1.s[1]", "b.ne .L2"]
    assert list(arm_loops.loops(ASSEMBLY)) == [("outer_function", inner)]
    product = arm_loops.Product("an example", "baseline", "outer", "fmla", 4)
    row = arm_loops.row(product, [("outer_function", inner), ("outer_function", ["fmla", "nop", "b"])])
    assert (row["instructions of the loop"], row["per multiply-add"], row["floor"]) == (4, 0.5, 0.25)
    with pytest.raises(SystemExit, match="an example: expected a loop with fmla, found none"):
        arm_loops.row(product, [("another", inner)])
