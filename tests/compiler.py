"""The C++ compiler of tests that build something of their own."""

import os
import shutil

import pytest


def compiler_or_skip() -> str:
    """Its command, from CXX where that is set."""
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        pytest.skip(f"no C++ compiler ({compiler}) here")
    return compiler
