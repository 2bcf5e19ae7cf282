"""What is shipped: the library asks torch for stable symbols only, and installing works in the ways the README names.
The slow tests make their own environments; none of them may touch the environment the tests run in."""

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fastcl
from fastcl._library import LIBRARY

ROOT = Path(__file__).resolve().parent.parent
EXERCISE = """
import torch, fastcl
query, key = torch.randn(5, 7, requires_grad=True), torch.randn(5, 7, requires_grad=True)
fastcl.infonce(query, key).backward()
assert torch.isfinite(query.grad).all() and torch.isfinite(key.grad).all()
print(torch.__version__, fastcl.__file__)
"""


def run(*command: str | Path, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a command with `env` added to the environment; stdout holds what it printed on both streams, in order."""
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=os.environ | env,
        text=True,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def checked(*command: str | Path, cwd: Path = ROOT, **env: str) -> str:
    done = run(*command, cwd=cwd, **env)
    assert done.returncode == 0, done.stdout
    return done.stdout


def need(program: str) -> str:
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"{program} is not installed")
    return path


def test_the_library_uses_only_stable_symbols_and_no_python() -> None:
    undefined = checked(need("nm"), "-DC", "--undefined-only", LIBRARY)
    assert "torch_parallel_for" in undefined  # nm did list what we take from torch
    assert re.findall(r"\b(?:at|c10|torch)::.*|\b_?Py[A-Z_]\w+", undefined) == []


def test_the_library_gives_its_own_functions_only() -> None:
    defined = checked(need("nm"), "-D", "--defined-only", LIBRARY)
    names = [line.split()[-1] for line in defined.splitlines()]
    assert "fastcl_set_isa" in names
    assert [name for name in names if not name.startswith("fastcl_")] == []


def test_the_library_needs_torch_by_name_and_no_openmp() -> None:
    dynamic = checked(need("readelf"), "-d", LIBRARY)
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic))
    assert "libtorch_cpu.so" in needed
    assert not [name for name in needed if "omp" in name]
    assert not re.search(r"\((RPATH|RUNPATH)\)", dynamic)


def test_shim_agrees_with_torch_headers() -> None:
    headers = Path(torch.__file__).parent / "include"
    if not (headers / "torch/csrc/stable/c/shim.h").exists():
        pytest.skip("torch's headers are not installed")
    checked(need("c++"), "-std=c++17", "-fsyntax-only", "-Icsrc", f"-I{headers}", "tests/core/check_shim.cpp")


def test_version_is_that_of_pyproject() -> None:
    declared = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert declared is not None
    assert fastcl.__version__ == declared[1] == importlib.metadata.version("fastcl")


def test_types_are_declared() -> None:
    assert (Path(fastcl.__file__).parent / "py.typed").exists()


def test_import_is_light() -> None:
    # torch itself loads tqdm where it is installed, so what counts is what fastcl adds.
    code = "import sys, torch; before = set(sys.modules); import fastcl; print(*(set(sys.modules) - before))"
    added = checked(sys.executable, "-c", code).split()
    assert "fastcl.losses" in added
    assert not [name for name in added if re.match(r"(matplotlib|tqdm|safetensors|fastcl\.recsys)\b", name)]


def test_sources_alone_say_what_to_do(tmp_path: Path) -> None:
    # As in a clone after `pip install .`: what Python finds first has not been built.
    shutil.copytree(ROOT / "fastcl", tmp_path / "fastcl", ignore=shutil.ignore_patterns("*.so", "__pycache__", "*.xz"))
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__init__.py").touch()
    (tmp_path / "benchmarks" / "some.py").write_text("import fastcl\n")
    name = Path(LIBRARY).name
    words = f"{tmp_path}/fastcl holds the sources without the compiled part, {name}; run `pip install -e .` "
    for command in (["-c", "import fastcl.losses"], ["-m", "fastcl.recsys", "info"], ["-m", "benchmarks.some"]):
        done = run(sys.executable, *command, cwd=tmp_path)
        assert done.returncode != 0
        assert words in done.stdout.splitlines()[-1]


def test_a_library_that_cannot_be_loaded_is_one_line(tmp_path: Path) -> None:
    # As where the library was built for another kind of processor.
    shutil.copytree(ROOT / "fastcl", tmp_path / "fastcl", ignore=shutil.ignore_patterns("*.so", "__pycache__", "*.xz"))
    (tmp_path / "fastcl" / Path(LIBRARY).name).write_bytes(b"no library")
    done = run(sys.executable, "-c", "import fastcl", cwd=tmp_path)
    assert done.returncode != 0
    last = done.stdout.splitlines()[-1]
    assert last.startswith("ImportError: fastcl: the compiled part cannot be loaded: ")
    assert f"(torch {torch.__version__}, Python " in last  # the self-test, which prints such facts, cannot run there


WITHOUT_KERNELS = """
import warnings, torch
warnings.simplefilter("ignore")
import fastcl
assert fastcl.__file__.startswith({folder!r})
print([fastcl.config()[name] for name in ("cpu", "isa", "isas", "compiled_isas")], fastcl.set_isa("auto"))
query, key = torch.eye(3, requires_grad=True), torch.eye(3)
loss = fastcl.infonce(query, key, temperature=1.0)
loss.backward()
print(round(loss.item(), 4), torch.isfinite(query.grad).all().item())
"""


def test_without_kernels_everything_runs_in_pytorch(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "fastcl", tmp_path / "fastcl", ignore=shutil.ignore_patterns("*.so", "__pycache__", "*.xz"))
    (tmp_path / "fastcl" / "without_kernels.txt").touch()
    facts, loss = checked(
        sys.executable, "-c", WITHOUT_KERNELS.format(folder=str(tmp_path)), cwd=tmp_path
    ).splitlines()
    assert re.fullmatch(r"\['chunked PyTorch: no kernels for \w+ \w+ in this .*', 'none', \[\], \[\]\] auto", facts)
    assert loss == "0.5514 True"


def test_missing_compiler_is_one_line(tmp_path: Path) -> None:
    done = run(sys.executable, "setup.py", "build_ext", "--build-temp", tmp_path, PATH=str(tmp_path), CXX="c++")
    assert done.returncode != 0
    assert done.stdout.splitlines()[-1].startswith("fastcl: no C++ compiler")
    assert "Traceback" not in done.stdout


def test_missing_ninja_is_one_line(tmp_path: Path) -> None:
    if shutil.which("ninja", path=sysconfig.get_path("scripts")):
        pytest.skip("ninja lies beside this interpreter")
    (tmp_path / "c++").symlink_to(need("c++"))
    done = run(sys.executable, "setup.py", "build_ext", "--build-temp", tmp_path, PATH=str(tmp_path), CXX="c++")
    assert done.returncode != 0
    assert done.stdout.splitlines()[-1].startswith("fastcl: ninja was not found")
    assert "Traceback" not in done.stdout


def refused_build(tmp_path: Path, **env: str) -> str:
    done = run(sys.executable, "setup.py", "build_ext", "--build-temp", tmp_path, "--build-lib", tmp_path, **env)
    assert done.returncode != 0
    assert "Traceback" not in done.stdout
    return done.stdout.splitlines()[-1]


def test_cuda_without_nvcc_is_one_line(tmp_path: Path) -> None:
    # Told before anything is compiled.
    message = refused_build(tmp_path, FASTCL_CUDA="1", CUDA_HOME=str(tmp_path))
    assert message == "fastcl: FASTCL_CUDA=1, but nvcc was not found; set CUDA_HOME, or unset FASTCL_CUDA"
    assert refused_build(tmp_path, FASTCL_CUDA="yes") == "fastcl: FASTCL_CUDA: expected 0, 1 or nothing, got 'yes'"


def test_unknown_cuda_architectures_are_one_line(tmp_path: Path) -> None:
    nvcc = tmp_path / "bin" / "nvcc"  # which lists what it knows, and that is all it is asked
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho sm_80 sm_90\n")
    nvcc.chmod(0o755)
    message = refused_build(tmp_path, FASTCL_CUDA="1", CUDA_HOME=str(tmp_path), FASTCL_CUDA_ARCHS="80;sm_90")
    assert message == "fastcl: FASTCL_CUDA_ARCHS: expected numbers such as 80;90, got sm_90"


# From here on: whole installs.


def make_venv(folder: Path, *, with_torch: bool) -> Path:
    """A fresh environment's python; `with_torch` lets it see the packages of the running one, except fastcl."""
    checked(sys.executable, "-m", "venv", folder)
    if with_torch:
        (folder / "outer").mkdir()
        for entry in Path(torch.__file__).parent.parent.iterdir():
            if "fastcl" not in entry.name:
                (folder / "outer" / entry.name).symlink_to(entry)
        (site,) = folder.glob("lib/python3*/site-packages")
        (site / "outer.pth").write_text(str(folder / "outer"))
    return folder / "bin" / "python"


def check_build_environment(pip_log: Path, *tools: str) -> None:
    # Unlike what pip prints, its log tells what went into the isolated build environment.
    installed = re.findall(r"Installing collected packages: (.*)", pip_log.read_text())
    taken = set(" ".join(installed).replace(",", " ").split())
    assert {re.sub(r"-[\d.]+$", "", name) for name in taken} - {"fastcl"} == {"setuptools", "ninja", *tools}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, since building writes beside them."""
    copy = tmp_path_factory.mktemp("source") / "fastcl"
    skipped = shutil.ignore_patterns(".*", "*.so", "build", "dist", "*.egg-info", "__pycache__", "runs")
    shutil.copytree(ROOT, copy, ignore=skipped)
    return copy


def check_contents(names: list[str], metadata: str) -> None:
    """Nothing but the purchases, which are in the public domain, as data; and the licences say so."""
    data = {Path(name).name for name in names if name.endswith((".xz", ".gz", ".csv", ".dat", ".zip"))}
    assert {"purchases.csv.xz", "products.csv.xz"} <= data
    figures = "benchmarks/results/"  # of the demo on movies, not its data
    assert not [name for name in names if re.search(r"movielens|ratings|movies", name, re.I) and figures not in name]
    assert not [name for name in names if "/sets/" in name and "completejourney" not in name and Path(name).suffix]
    assert "License-Expression: Apache-2.0 AND CC0-1.0" in metadata.splitlines()
    files = re.findall(r"^License-File: (.*)$", metadata, re.M)
    assert files == ["LICENSE", "fastcl/recsys/data/sets/completejourney/README.txt"]


def test_archives_hold_no_data_with_terms(source: Path, tmp_path: Path) -> None:
    if importlib.util.find_spec("setuptools") is None:
        pytest.skip("setuptools is not installed")
    built = f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})"
    checked(sys.executable, "-c", built, cwd=source)
    (sdist,) = tmp_path.glob("fastcl-*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = archive.getnames()
        metadata = archive.extractfile(next(name for name in names if name.count("/") == 1 and "PKG-INFO" in name))
        assert metadata is not None
        text = metadata.read().decode()
    check_contents(names, text)
    # What a wheel takes from the tree, without the compiled part.
    checked(sys.executable, "setup.py", "-q", "build_py", "--build-lib", tmp_path / "lib", cwd=source)
    check_contents([str(path) for path in (tmp_path / "lib").rglob("*") if path.is_file()], text)


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist, which thereby must be complete."""
    folder = tmp_path_factory.mktemp("dist")
    python = make_venv(folder / "venv", with_torch=False)
    # The build backend called directly: what a front end such as `build` does, without having to install one.
    checked(python, "-m", "pip", "install", "setuptools>=77")
    checked(python, "-c", f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})", cwd=source)
    (sdist,) = folder.glob("fastcl-*.tar.gz")
    log = folder / "pip.log"
    checked(python, "-m", "pip", "wheel", "--log", log, "--no-deps", "-w", folder, sdist)
    check_build_environment(log)
    (built,) = folder.glob("fastcl-*.whl")
    return built


@pytest.fixture
def venv(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "venv"
    shutil.rmtree(tmp_path / "venv", ignore_errors=True)  # with a torch of its own it is several GB


@pytest.mark.slow
def test_wheel_from_sdist_works(wheel: Path, venv: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        metadata = next(name for name in archive.namelist() if name.endswith("/METADATA"))
        check_contents(archive.namelist(), archive.read(metadata).decode())
    python = make_venv(venv, with_torch=True)
    checked(python, "-m", "pip", "install", wheel)
    assert str(venv) in checked(python, "-c", EXERCISE, cwd=tmp_path)
    movies = run(python, "-m", "fastcl.recsys", "data", "check", "bundled:movies", cwd=tmp_path)
    assert movies.returncode == 2
    assert "movies: movielens-small is not in the package" in movies.stdout
    checked(python, "-m", "fastcl.recsys", "data", "check", "bundled:purchases", cwd=tmp_path)
    help_text = checked(venv / "bin" / "fastcl", "--help", cwd=tmp_path)
    assert "recommend" in help_text
    package = Path(checked(python, "-c", "import fastcl; print(*fastcl.__path__)", cwd=tmp_path).strip())
    bundled = [path.relative_to(ROOT / "fastcl") for path in (ROOT / "fastcl/recsys/data/sets").rglob("*.*")]
    typed = [Path(name) for name in ("py.typed", "__init__.pyi", "nn.pyi")]
    assert bundled
    assert [name for name in [*typed, *bundled] if not (package / name).exists()] == []


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--editable"]], ids=["plain", "editable"])
def test_install_from_the_tree_works(source: Path, venv: Path, tmp_path: Path, options: list[str]) -> None:
    python = make_venv(venv, with_torch=True)
    log = tmp_path / "pip.log"
    checked(python, "-m", "pip", "install", "--log", log, *options, ".", cwd=source)
    check_build_environment(log)
    assert str(source if options else venv) in checked(python, "-c", EXERCISE, cwd=tmp_path)


# What a CUDA build of torch has and a CPU build has not, as far as our CUDA part asks for it when it is loaded.
TORCH_CUDA = 'extern "C" int aoti_torch_get_current_cuda_stream(int, void**) { return 1; }\n'
LOADED = """
import torch
torch.version.cuda = "13.0"
import fastcl
print(fastcl.config()["cuda"], torch._C._dispatch_has_kernel_for_dispatch_key("fastcl::contrast_backward", "CUDA"))
"""


@pytest.mark.slow
def test_a_wheel_with_cuda_works_on_a_cpu_torch(source: Path, venv: Path, tmp_path: Path) -> None:
    if not (shutil.which("nvcc") or Path("/usr/local/cuda/bin/nvcc").exists()):
        pytest.skip("nvcc is not installed")
    python = make_venv(venv, with_torch=True)
    wishes = {"FASTCL_CUDA": "1", "FASTCL_CUDA_ARCHS": "90", "FASTCL_WERROR": "1"}
    checked(python, "-m", "pip", "install", ".", cwd=source, **wishes)
    assert str(venv) in checked(python, "-c", EXERCISE, cwd=tmp_path)
    said = checked(python, "-c", "import fastcl; print(fastcl.config()['cuda'])", cwd=tmp_path).strip()
    assert said == "chunked PyTorch: this torch is not a CUDA build; our kernels are built"

    (part,) = venv.glob("lib/python3*/site-packages/fastcl/_C_cuda*.so")
    undefined = checked(need("nm"), "-DC", "--undefined-only", part)
    assert "aoti_torch_create_device_guard" in undefined
    assert re.findall(r"\b(?:at|c10|torch|fastcl)::.*", undefined) == []
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", checked(need("readelf"), "-d", part)))
    assert {"libtorch_cpu.so", "libtorch_cuda.so"} < needed
    assert not [name for name in needed if "cudart" in name]

    # With what it needs of libtorch_cuda it registers its kernels, GPU or not.
    (tmp_path / "torch_cuda.cpp").write_text(TORCH_CUDA)
    checked(need("c++"), "-shared", "-fPIC", "torch_cuda.cpp", "-o", "libtorch_cuda.so", cwd=tmp_path)
    found = checked(python, "-c", LOADED, cwd=tmp_path, LD_LIBRARY_PATH=str(tmp_path))
    assert found.split("\n")[0] == "compiled kernels for compute capability 90 True"


@pytest.mark.slow
def test_installing_without_a_compiler_takes_zigs(source: Path, venv: Path, tmp_path: Path) -> None:
    python = make_venv(venv, with_torch=True)
    log = tmp_path / "pip.log"
    alone = str(venv / "bin")
    assert shutil.which("c++", path=alone) is None
    checked(python, "-m", "pip", "install", "--log", log, ".", cwd=source, PATH=alone, CXX="")
    check_build_environment(log, "ziglang")
    assert str(venv) in checked(python, "-c", EXERCISE, cwd=tmp_path)


@pytest.mark.slow
def test_missing_compiler_under_pip_is_one_line(source: Path, venv: Path) -> None:
    python = make_venv(venv, with_torch=True)
    done = run(python, "-m", "pip", "install", ".", cwd=source, CXX="no-such-compiler")
    assert done.returncode != 0
    assert "fastcl: no C++ compiler: 'no-such-compiler' was not found" in done.stdout
    assert "Traceback" not in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("version", ["2.11", "2.13", "2.14"])
def test_one_wheel_serves_every_torch(wheel: Path, venv: Path, tmp_path: Path, version: str) -> None:
    here = torch.__version__.startswith(version + ".")
    python = make_venv(venv, with_torch=here)
    if not here and run(python, "-m", "pip", "install", f"torch=={version}.*", "numpy").returncode != 0:
        pytest.skip(f"torch {version} cannot be installed here")
    checked(python, "-m", "pip", "install", wheel)
    assert checked(python, "-c", EXERCISE, cwd=tmp_path).startswith(version + ".")
