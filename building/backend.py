"""The build backend: setuptools, and from PyPI what a build takes that the machine may lack. That is ninja, zig's
compiler where there is no other, and pybind11 where the CUDA part is built.
"""

import sys
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403

from building import platforms
from building.compiler import own_compiler
from building.cuda import cuda_wanted

# setup.py imports this folder too.
sys.path.insert(0, str(Path(__file__).parent.parent))


def _tools() -> list[str]:
    if platforms.wanted() == "none":
        return []
    tools = ["ninja"] if own_compiler() else ["ninja", "ziglang"]
    return [*tools, "pybind11>=3"] if cuda_wanted() else tools


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    return [*build_meta.get_requires_for_build_wheel(config_settings), *_tools()]


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    return [*build_meta.get_requires_for_build_editable(config_settings), *_tools()]
