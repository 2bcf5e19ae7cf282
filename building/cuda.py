"""Whether the CUDA part is built, and with which commands. Never imports torch.

FASTCL_CUDA=1 builds the CUDA part (an error without nvcc), FASTCL_CUDA=0 does not. Unset, it is built where nvcc is
found and the torch of the environment is a CUDA build; whether there is a GPU does not matter. FASTCL_CUDA_ARCHS names
the compute capabilities: "80;90".
"""

import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

from building import platforms

NVCC_FLAGS = ["-O3", "-std=c++17", "--expt-relaxed-constexpr", "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall,-Wextra"]
# What runs on compute capability 8.0 also runs on 8.6 and 8.9. The last one's PTX serves what is newer than all.
ARCHITECTURES = ("80", "90", "100")


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
    if platforms.wanted():
        return False
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


def cuda_commands(werror: bool) -> tuple[list[str], list[str], list[str]]:
    """The C++ compiler's flags for host code, nvcc's command line, and what to link: a runtime of our own, so that
    its version need not be that of torch's."""
    path = find_nvcc()
    if path is None:
        raise SystemExit("fastcl: FASTCL_CUDA=1, but nvcc was not found; set CUDA_HOME, or unset FASTCL_CUDA")
    home = path.resolve().parent.parent
    names = architectures(path)
    codes = [f"-gencode=arch=compute_{name},code=sm_{name}" for name in names]
    codes.append(f"-gencode=arch=compute_{names[-1]},code=compute_{names[-1]}")
    nvcc = [str(path), *NVCC_FLAGS, "-Icsrc", *codes, *(["-Werror=all-warnings"] if werror else [])]
    host = ["-isystem", str(home / "include"), f'-DFASTCL_CUDA_ARCHS="{";".join(names)}"']
    return host, nvcc, [f"-L{home / 'lib64'}", "-lcudart_static", "-lrt", "-ldl", "-lpthread"]
