"""Finds the C++ compiler and ninja: CXX, else c++, else zig's compiler from the PyPI package ziglang. Runs neither.

Another platform than this machine takes zig's compiler, and so does Windows.
"""

import importlib.util
import os
import shlex
import shutil
import sys
import sysconfig

from building import platforms


def own_compiler() -> list[str]:
    """The command of the machine's compiler; empty where zig's is to be used. CXX is taken as it is, found or not."""
    if platforms.wanted() or sys.platform == "win32":
        return []
    return shlex.split(os.environ.get("CXX", "")) or (["c++"] if shutil.which("c++") else [])


def zig() -> list[str]:
    """The command of zig, or one line that says how to get it."""
    if importlib.util.find_spec("ziglang") is None:
        missing = f"FASTCL_PLATFORM={platforms.wanted()}" if platforms.wanted() else "no C++ compiler"
        raise SystemExit(f"fastcl: {missing}: install zig's (pip install ziglang), or g++, or set CXX")
    return [sys.executable, "-m", "ziglang"]


def find_tools() -> tuple[list[str], str]:
    """The compiler's command line and the path of ninja, or one line that says which is missing."""
    cxx = own_compiler()
    if not cxx:
        name = platforms.built_for()
        if name not in platforms.PLATFORMS:
            raise SystemExit(f"fastcl: no C++ compiler: 'c++' was not found; install one or set CXX ({name})")
        cxx = [*zig(), "c++", "-target", platforms.PLATFORMS[name].triple, "-g0"]
    elif shutil.which(cxx[0]) is None:
        raise SystemExit(f"fastcl: no C++ compiler: {' '.join(cxx)!r} was not found; install g++ or set CXX")
    # Without build isolation a ninja from PyPI lies beside the interpreter, which need not be on PATH.
    search = os.pathsep.join([os.environ.get("PATH", os.defpath), sysconfig.get_path("scripts")])
    ninja = shutil.which("ninja", path=search)
    if ninja is None:
        raise SystemExit("fastcl: ninja was not found; install it (pip install ninja)")
    return cxx, ninja
