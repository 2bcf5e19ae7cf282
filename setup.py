"""Builds the extensions fastcl._C and, where CUDA is wanted, fastcl._C_cuda, with ninja. It must not import torch: the
C++ binds to LibTorch's stable C ABI, so one build serves every torch from 2.11 on, and building works under pip's
isolation, where there is no torch. Name, version and dependencies are in pyproject.toml.

FASTCL_CUDA=1 builds the CUDA part (an error without nvcc), FASTCL_CUDA=0 does not. Unset, it is built where nvcc is
found and the torch of the environment is a CUDA build; whether there is a GPU does not matter. FASTCL_CUDA_ARCHS names
the compute capabilities: "80;90"."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# Never -ffast-math: it would drop the -inf and NaN rules of the losses. No -march either: every instruction set is
# compiled from its own file and chosen at run time.
FLAGS = ["-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]
NVCC_FLAGS = ["-O3", "-std=c++17", "--expt-relaxed-constexpr", "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall,-Wextra"]
# What runs on compute capability 8.0 also runs on 8.6 and 8.9. The last one's PTX serves what is newer than all.
ARCHITECTURES = ("80", "90", "100")
WERROR = os.environ.get("FASTCL_WERROR") == "1"

BUILD_NINJA = """\
builddir = {temp}
rule compile
  command = {cxx} {flags} -MMD -MF $out.d -c $in -o $out
  depfile = $out.d
  deps = gcc
rule compile_cuda
  command = {nvcc} -MMD -MF $out.d -c $in -o $out
  depfile = $out.d
  deps = gcc
rule stub
  command = {cxx} -shared -fPIC -Wl,-soname,$soname -x c++ /dev/null -o $out
rule link
  command = {cxx} -shared -Wl,--no-as-needed $in -Wl,--as-needed {libraries} -o $out
{objects}
{stubs}
build {output}: link {inputs}
"""


def find_tools() -> tuple[list[str], str]:
    """The compiler's command line and the path of ninja, or one line that says which is missing."""
    cxx = shlex.split(os.environ.get("CXX", "c++"))
    if not cxx or shutil.which(cxx[0]) is None:
        raise SystemExit(f"fastcl: no C++ compiler: {' '.join(cxx)!r} was not found; install g++ or set CXX")
    # Without build isolation a ninja from PyPI lies beside the interpreter, which need not be on PATH.
    search = os.pathsep.join([os.environ.get("PATH", os.defpath), sysconfig.get_path("scripts")])
    ninja = shutil.which("ninja", path=search)
    if ninja is None:
        raise SystemExit("fastcl: ninja was not found; install it (pip install ninja)")
    return cxx, ninja


def find_nvcc() -> Path | None:
    """In CUDA_HOME or CUDA_PATH if one is set, else where it usually is."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    usual = Path(home or "/usr/local/cuda") / "bin" / "nvcc"
    if usual.exists() or home:
        return usual if usual.exists() else None
    found = shutil.which("nvcc")
    return Path(found) if found else None


def torch_cuda_version() -> str | None:
    """torch.version.cuda of the environment that is built for, read as text: under pip's isolation it can be seen, but
    not imported. None for a CPU build and where there is no torch."""
    path = Path(sysconfig.get_path("purelib")) / "torch" / "version.py"
    found = re.search(r"^cuda\b[^=]*= *['\"]([^'\"]+)['\"]", path.read_text(), re.M) if path.exists() else None
    return found[1] if found else None


def cuda_wanted() -> bool:
    wish = os.environ.get("FASTCL_CUDA", "")
    if wish not in ("", "0", "1"):
        raise SystemExit(f"fastcl: FASTCL_CUDA: expected 0, 1 or nothing, got {wish!r}")
    return wish == "1" or (wish == "" and find_nvcc() is not None and torch_cuda_version() is not None)


def architectures(nvcc: Path) -> list[str]:
    """The compute capabilities to compile for: those named, or our own choice as far as this nvcc knows them."""
    named = os.environ.get("FASTCL_CUDA_ARCHS", "").replace(",", ";").split(";")
    named = [name.strip() for name in named if name.strip()]
    listed = subprocess.run([str(nvcc), "--list-gpu-code"], capture_output=True, text=True, check=True).stdout.split()
    unknown = [name for name in named if f"sm_{name}" not in listed]
    if unknown:
        raise SystemExit(f"fastcl: FASTCL_CUDA_ARCHS: expected numbers such as 80;90, got {';'.join(unknown)}")
    return named or [name for name in ARCHITECTURES if f"sm_{name}" in listed]


def cuda_commands() -> tuple[list[str], list[str], list[str]]:
    """The C++ compiler's flags for host code, nvcc's command line, and what to link: a runtime of our own, so that
    its version need not be that of torch's."""
    path = find_nvcc()
    if path is None:
        raise SystemExit("fastcl: FASTCL_CUDA=1, but nvcc was not found; set CUDA_HOME, or unset FASTCL_CUDA")
    home = path.resolve().parent.parent
    names = architectures(path)
    codes = [f"-gencode=arch=compute_{name},code=sm_{name}" for name in names]
    codes.append(f"-gencode=arch=compute_{names[-1]},code=compute_{names[-1]}")
    nvcc = [str(path), *NVCC_FLAGS, "-Icsrc", *codes, *(["-Werror=all-warnings"] if WERROR else [])]
    host = ["-isystem", str(home / "include"), f'-DFASTCL_CUDA_ARCHS="{";".join(names)}"']
    return host, nvcc, [f"-L{home / 'lib64'}", "-lcudart_static", "-lrt", "-ldl", "-lpthread"]


def ninja_path(path: Path) -> str:
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def ninja_words(words: list[str]) -> str:
    return shlex.join(words).replace("$", "$$")


class NinjaBuild(build_ext):
    def run(self) -> None:
        if sys.platform != "linux":
            raise SystemExit(f"fastcl: expected Linux; building on {sys.platform} is not supported yet")
        if cuda_wanted():
            cuda_commands()  # what is wrong there is told before anything is compiled
        super().run()

    def build_extension(self, ext: Extension) -> None:
        cxx, ninja = find_tools()
        try:
            import pybind11  # here, so that building an sdist needs nothing but setuptools
        except ImportError:
            raise SystemExit("fastcl: pybind11 was not found; install it (pip install pybind11)") from None
        flags = [*FLAGS, "-Icsrc"]
        # As system headers, so that -Wextra speaks of our code only.
        for include in dict.fromkeys([pybind11.get_include(), *map(sysconfig.get_path, ("include", "platinclude"))]):
            flags += ["-isystem", include]
        if WERROR:
            flags.append("-Werror")
        nvcc, libraries, sonames = [], [], ["libtorch_cpu.so"]
        if ext.name.endswith("_cuda"):
            cuda_flags, nvcc, libraries = cuda_commands()
            flags += cuda_flags
            sonames.append("libtorch_cuda.so")

        output = Path(self.get_ext_fullpath(ext.name)).resolve()
        temp = Path(self.build_temp).resolve() / ext.name
        objects = {source: temp / (source.replace("/", "_") + ".o") for source in ext.sources}
        rules = {source: "compile_cuda" if source.endswith(".cu") else "compile" for source in ext.sources}
        # Empty libraries with torch's sonames: linking them records what is needed of torch, without having torch. At
        # run time the loader matches the names to the libraries that `import torch` has already loaded.
        stubs = {soname: temp / soname for soname in sonames}
        script = BUILD_NINJA.format(
            temp=ninja_path(temp),
            cxx=ninja_words(cxx),
            flags=ninja_words(flags),
            nvcc=ninja_words(nvcc),
            libraries=ninja_words(libraries),
            objects="\n".join(f"build {ninja_path(obj)}: {rules[source]} {source}" for source, obj in objects.items()),
            stubs="\n".join(f"build {ninja_path(path)}: stub\n  soname = {name}" for name, path in stubs.items()),
            inputs=" ".join(map(ninja_path, [*objects.values(), *stubs.values()])),
            output=ninja_path(output),
        )
        output.parent.mkdir(parents=True, exist_ok=True)
        temp.mkdir(parents=True, exist_ok=True)
        (temp / "build.ninja").write_text(script)
        jobs = ["-j", os.environ["MAX_JOBS"]] if "MAX_JOBS" in os.environ else []
        command = [ninja, "-f", str(temp / "build.ninja"), *jobs]
        if subprocess.run(command, check=False).returncode != 0:
            raise SystemExit("fastcl: compiling failed; the compiler's message is above")


def sources(*patterns: str) -> list[str]:
    return sorted(str(path) for pattern in patterns for path in Path("csrc").glob(pattern))


extensions = [Extension("fastcl._C", sources("*.cpp", "cpu/*.cpp"))]
if cuda_wanted():
    extensions.append(Extension("fastcl._C_cuda", sources("cuda/*.cpp", "cuda/*.cu")))
setup(ext_modules=extensions, cmdclass={"build_ext": NinjaBuild})
