"""The C++ compiler of tests that build something of their own."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest


def compiler_or_skip() -> str:
    """Its command, from CXX where that is set."""
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        pytest.skip(f"no C++ compiler ({compiler}) here")
    return compiler


def compile_all(command: Sequence[str], sources: Sequence[Path], folder: Path) -> list[str]:
    """Compiles each source with `command`, all at once; the object files, which lie in `folder`."""
    objects = [str(folder / f"{source.name}.o") for source in sources]
    jobs = [
        subprocess.Popen([*command, "-c", str(source), "-o", built], stderr=subprocess.PIPE, text=True)
        for source, built in zip(sources, objects, strict=True)
    ]
    errors = [job.communicate()[1] for job in jobs]
    assert not any(job.returncode for job in jobs), "\n".join(errors)
    return objects
