"""Builds the library of CPU kernels, fastcl/libfastcl_cpu.so, and, where CUDA is wanted, the extension fastcl._C_cuda,
with ninja. It must not import torch: the C++ binds to LibTorch's stable C ABI, so one build serves every torch from
2.11 on, and building works under pip's isolation, where there is no torch. The library uses no header of Python either:
a wheel without the CUDA part serves every Python. Name, version and dependencies are in pyproject.toml; the folder
building/ says for which platforms (FASTCL_PLATFORM), with which compiler (CXX) and whether for CUDA (FASTCL_CUDA)."""

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from building import platforms
from building.compiler import find_tools, zig
from building.cuda import cuda_commands, cuda_wanted

# Never -ffast-math: it would drop the -inf and NaN rules of the losses. No -march either: every instruction set is
# compiled from its own file and chosen at run time.
FLAGS = ["-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]
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
rule stand_in
  command = {stand_in}
rule link
  command = {cxx} -shared {link}
{objects}
{stand_ins}
build {output}: link {inputs}
"""


def ninja_path(path: Path) -> str:
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def ninja_words(words: list[str]) -> str:
    return shlex.join(words).replace("$", "$$")


def pybind11_flags() -> list[str]:
    """Of the CUDA part. As system headers, so that -Wextra speaks of our code only."""
    try:
        import pybind11  # here, so that nothing else needs it
    except ImportError:
        raise SystemExit("fastcl: pybind11 was not found; install it (pip install pybind11)") from None
    paths = [pybind11.get_include(), *map(sysconfig.get_path, ("include", "platinclude"))]
    return [flag for path in dict.fromkeys(paths) for flag in ("-isystem", path)]


class NinjaBuild(build_ext):
    def run(self) -> None:
        if cuda_wanted():
            cuda_commands(WERROR)  # what is wrong there is told before anything is compiled
        super().run()

    def get_ext_filename(self, fullname: str) -> str:
        *package, name = fullname.split(".")
        if name == "_cpu":
            return os.path.join(*package, platforms.library_name(platforms.built_for()))
        return str(super().get_ext_filename(fullname))

    def build_extension(self, ext: Extension) -> None:
        cxx, ninja = find_tools()
        flags, nvcc, libraries, sonames = [*FLAGS, "-Icsrc"], [], [], ["libtorch_cpu.so"]
        if ext.name.endswith("_cuda"):
            cuda_flags, nvcc, libraries = cuda_commands(WERROR)
            flags += pybind11_flags() + cuda_flags
            sonames.append("libtorch_cuda.so")
        if WERROR:
            flags.append("-Werror")

        output = Path(self.get_ext_fullpath(ext.name)).resolve()
        temp = Path(self.build_temp).resolve() / platforms.built_for() / ext.name
        temp.mkdir(parents=True, exist_ok=True)
        objects = {source: temp / (source.replace(os.sep, "_") + ".o") for source in ext.sources}
        rules = {source: "compile_cuda" if source.endswith(".cu") else "compile" for source in ext.sources}
        made, stand_in, link = self.linking(cxx, temp, output, sonames)
        if platforms.wanted():
            libraries.append("-s")  # a wheel has no symbols for debuggers and profilers
        script = BUILD_NINJA.format(
            temp=ninja_path(temp),
            cxx=ninja_words(cxx),
            flags=ninja_words(flags),
            nvcc=ninja_words(nvcc),
            stand_in=stand_in,
            link=f"{link} {ninja_words(libraries)} -o $out",
            objects="\n".join(f"build {ninja_path(obj)}: {rules[source]} {source}" for source, obj in objects.items()),
            stand_ins="\n".join(f"build {ninja_path(path)}: stand_in\n  name = {path.name}" for path in made),
            inputs=" ".join(map(ninja_path, [*objects.values(), *made])),
            output=ninja_path(output),
        )
        output.parent.mkdir(parents=True, exist_ok=True)
        (temp / "build.ninja").write_text(script)
        jobs = ["-j", os.environ["MAX_JOBS"]] if "MAX_JOBS" in os.environ else []
        command = [ninja, "-f", str(temp / "build.ninja"), *jobs]
        if subprocess.run(command, check=False).returncode != 0:
            raise SystemExit("fastcl: compiling failed; the compiler's message is above")

    def linking(self, cxx: list[str], temp: Path, output: Path, sonames: list[str]) -> tuple[list[Path], str, str]:
        """Stand-ins for torch's libraries, the command that makes them, and how to link with them.

        Linking a stand-in records what is needed of torch, without having torch. At run time the loader matches the
        names to the libraries that `import torch` has already loaded."""
        system = platforms.built_for().split("-")[0]
        if system == "macos":
            text = temp / "libtorch_cpu.tbd"
            text.write_text(platforms.tbd())
            # Where pip installs torch, should the loader look for it anew.
            words = [str(text), f"-Wl,-install_name,@rpath/{output.name}", "-Wl,-rpath,@loader_path/../torch/lib"]
            return [], ":", f"$in {ninja_words(words)}"
        if system == "windows":
            text = temp / "torch_cpu.def"
            text.write_text(platforms.definitions())
            words = [*zig(), "dlltool", "-m", "i386:x86-64", "-d", str(text)]
            return [temp / "torch_cpu.lib"], f"{ninja_words(words)} -l $out", "$in"
        stand_in = f"{ninja_words(cxx)} -shared -fPIC -Wl,-soname,$name -x c++ /dev/null -o $out"
        exports = "" if len(sonames) > 1 else "-Wl,--version-script=building/exports.map "  # Python loads the CUDA part
        return [temp / name for name in sonames], stand_in, f"{exports}-Wl,--no-as-needed $in -Wl,--as-needed"


class Package(build_py):
    def run(self) -> None:
        super().run()
        if platforms.wanted() == "none":
            text = "This build of fastcl has no compiled kernels; everything runs in chunked PyTorch.\n"
            Path(self.build_lib, "fastcl", "without_kernels.txt").write_text(text)


class Wheel(bdist_wheel):
    """Without the CUDA part nothing in a wheel depends on the Python that built it."""

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, system = super().get_tag()
        name = platforms.wanted()
        if name == "none":
            return "py3", "none", "any"
        if name:
            system = platforms.PLATFORMS[name].tag
        return (python, abi, system) if cuda_wanted() else ("py3", "none", system)


def sources(*patterns: str) -> list[str]:
    return sorted(str(path) for pattern in patterns for path in Path("csrc").glob(pattern))


extensions = [] if platforms.wanted() == "none" else [Extension("fastcl._cpu", sources("*.cpp", "cpu/*.cpp"))]
if cuda_wanted():
    extensions.append(Extension("fastcl._C_cuda", sources("cuda/*.cpp", "cuda/*.cu")))
setup(ext_modules=extensions, cmdclass={"build_py": Package, "build_ext": NinjaBuild, "bdist_wheel": Wheel})
