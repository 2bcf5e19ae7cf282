"""Builds the extension fastcl._C with ninja. It must not import torch: the C++ binds to LibTorch's stable C ABI, so one
build serves every torch from 2.11 on, and building works under pip's isolation, where there is no torch.
Name, version and dependencies are in pyproject.toml."""

import os
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

BUILD_NINJA = """\
builddir = {temp}
rule compile
  command = {cxx} {flags} -MMD -MF $out.d -c $in -o $out
  depfile = $out.d
  deps = gcc
rule stub
  command = {cxx} -shared -fPIC -Wl,-soname,libtorch_cpu.so -x c++ /dev/null -o $out
rule link
  command = {cxx} -shared -Wl,--no-as-needed $in -o $out
{objects}
build {stub}: stub
build {output}: link {inputs} {stub}
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


def ninja_path(path: Path) -> str:
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def ninja_words(words: list[str]) -> str:
    return shlex.join(words).replace("$", "$$")


class NinjaBuild(build_ext):
    def run(self) -> None:
        if sys.platform != "linux":
            raise SystemExit(f"fastcl: expected Linux; building on {sys.platform} is not supported yet")
        if os.environ.get("FASTCL_CUDA", "0") == "1":
            raise SystemExit("fastcl: FASTCL_CUDA=1, but this version has no CUDA kernels yet; unset it")
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
        if os.environ.get("FASTCL_WERROR") == "1":
            flags.append("-Werror")

        output = Path(self.get_ext_fullpath(ext.name)).resolve()
        temp = Path(self.build_temp).resolve() / ext.name
        objects = {source: temp / (source.replace("/", "_") + ".o") for source in ext.sources}
        # An empty library with torch's soname: linking it records that _C needs libtorch_cpu.so, without having torch.
        # At run time the loader matches that name to the library that `import torch` has already loaded.
        script = BUILD_NINJA.format(
            temp=ninja_path(temp),
            cxx=ninja_words(cxx),
            flags=ninja_words(flags),
            objects="\n".join(f"build {ninja_path(obj)}: compile {source}" for source, obj in objects.items()),
            inputs=" ".join(map(ninja_path, objects.values())),
            stub=ninja_path(temp / "libtorch_cpu.so"),
            output=ninja_path(output),
        )
        output.parent.mkdir(parents=True, exist_ok=True)
        temp.mkdir(parents=True, exist_ok=True)
        (temp / "build.ninja").write_text(script)
        jobs = ["-j", os.environ["MAX_JOBS"]] if "MAX_JOBS" in os.environ else []
        command = [ninja, "-f", str(temp / "build.ninja"), *jobs]
        if subprocess.run(command, check=False).returncode != 0:
            raise SystemExit("fastcl: compiling failed; the compiler's message is above")


sources = sorted(str(path) for pattern in ("*.cpp", "cpu/*.cpp") for path in Path("csrc").glob(pattern))
setup(ext_modules=[Extension("fastcl._C", sources)], cmdclass={"build_ext": NinjaBuild})
