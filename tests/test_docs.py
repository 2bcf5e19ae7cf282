"""Every example in a public docstring and every Python block of the README runs and prints what it says."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import fastcl

# Compiled ones have no docstrings, and the CUDA part cannot be imported everywhere.
LEFT_OUT = ("__main__", "_C", "_C_cuda")
MODULES = [m.name for m in pkgutil.walk_packages(fastcl.__path__, "fastcl.") if not m.name.endswith(LEFT_OUT)]
README = Path(__file__).parent.parent / "README.md"


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0


def test_public_functions_have_an_example() -> None:
    public = [getattr(fastcl, name) for name in fastcl.__all__ if name not in ("Evicted", "show_config")]
    assert [f.__name__ for f in public if ">>>" not in (f.__doc__ or "")] == []


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", README.read_text(), re.S))
def test_readme_code_runs(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "README.md", "exec"), {})
