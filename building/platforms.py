"""The platforms that wheels are built for, and stand-ins for torch's library to link against, so that building takes
no torch.

FASTCL_PLATFORM names another platform than this machine ("macos-arm64"; PLATFORMS lists them), for which zig's compiler
builds. FASTCL_PLATFORM=none makes a wheel without kernels, which runs everywhere, in chunked PyTorch.
"""

import os
import platform
import re
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Platform:
    """`triple`: what zig calls it; `tag`: that of its wheels."""

    triple: str
    tag: str


# The oldest systems that torch's own wheels run on.
PLATFORMS = {
    "linux-x86_64": Platform("x86_64-linux-gnu.2.28", "manylinux_2_28_x86_64"),
    "linux-aarch64": Platform("aarch64-linux-gnu.2.28", "manylinux_2_28_aarch64"),
    "macos-arm64": Platform("aarch64-macos.11.0", "macosx_11_0_arm64"),
    "windows-x86_64": Platform("x86_64-windows-gnu", "win_amd64"),
}
SHIM = Path(__file__).parent.parent / "csrc" / "torch_shim.h"


def wanted() -> str:
    """A key of PLATFORMS, "none", or "" for this machine with its own compiler."""
    name = os.environ.get("FASTCL_PLATFORM", "")
    if name not in ("", "none", *PLATFORMS):
        raise SystemExit(f"fastcl: FASTCL_PLATFORM: expected one of {', '.join([*PLATFORMS, 'none'])}, got {name!r}")
    return name


def built_for() -> str:
    """The name of the platform that is built for; not always one of PLATFORMS: any Linux with a compiler will do."""
    system = {"darwin": "macos", "win32": "windows"}.get(sys.platform, sys.platform)
    machine = platform.machine().lower()
    return wanted() or f"{system}-{'x86_64' if machine == 'amd64' else machine}"


def library_name(name: str) -> str:
    """Must agree with fastcl/_library.py."""
    return {"macos": "libfastcl_cpu.dylib", "windows": "fastcl_cpu.dll"}.get(name.split("-")[0], "libfastcl_cpu.so")


def torch_functions() -> list[str]:
    """What csrc/torch_shim.h declares of LibTorch's CPU library."""
    declared = re.findall(r"^FASTCL_SHIM \w+ (\w+)\(", SHIM.read_text(), re.M)
    return [name for name in declared if name != "aoti_torch_get_current_cuda_stream"]


def tbd() -> str:
    """A text that macOS's linkers take for torch's library: its name, and what it exports."""
    names = ", ".join(f"_{name}" for name in torch_functions())
    return f"""\
--- !tapi-tbd
tbd-version: 4
targets: [ arm64-macos, x86_64-macos ]
install-name: '@rpath/libtorch_cpu.dylib'
current-version: 0
compatibility-version: 0
exports:
  - targets: [ arm64-macos, x86_64-macos ]
    symbols: [ {names} ]
...
"""


def definitions() -> str:
    """A text of which dlltool makes an import library of torch's DLL."""
    return "\n".join(["LIBRARY torch_cpu.dll", "EXPORTS", *torch_functions(), ""])
