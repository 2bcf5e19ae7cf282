"""The build backend: setuptools, and from PyPI what a build takes that the machine may lack. That is ninja, zig's
compiler where there is no other, and pybind11 where the CUDA part is built.
"""

from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  the hooks that are not defined here

from building import platforms
from building.compiler import own_compiler
from building.cuda import cuda_wanted


def tools() -> list[str]:
    """What to take from PyPI for this build."""
    if platforms.wanted() == "none":
        return []
    found = ["ninja"] if own_compiler() else ["ninja", "ziglang"]
    return [*found, "pybind11>=3"] if cuda_wanted() else found


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    return [*build_meta.get_requires_for_build_wheel(config_settings), *tools()]


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    return [*build_meta.get_requires_for_build_editable(config_settings), *tools()]
