"""docs/contribute/adding-a-loss.md is true: its three additions, made in a copy of the repository, are all it takes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs/contribute/adding-a-loss.md"
BLOCK = re.compile(r"^```diff\n--- (\S+)\n(.*?)^```$", re.S | re.M)
# A test of the copy: what the page says that the rest of fastcl makes of the loss, with no import but these.
FOUND = """
import inspect
import torch, fastcl, generated, stubs

def test_the_rest_of_fastcl_knows_poly_infonce():
    x, y = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)), torch.eye(5, 3)
    value = fastcl.poly_infonce(x, y, epsilon=0.5)
    assert torch.equal(fastcl.nn.PolyInfoNCE(epsilon=0.5)(x, y), value)
    assert "epsilon" in inspect.signature(fastcl.poly_infonce).parameters
    assert fastcl.registry.formula_of(fastcl.poly_infonce) is not None
    row = "| `poly_infonce` | `nn.PolyInfoNCE` | yes; not with `normalize=False` | `0.1` | `mean` |"
    assert row in generated.conventions()
    assert ".. autofunction:: fastcl.poly_infonce" in generated.family()
    assert "def poly_infonce(" in stubs.package() and "class PolyInfoNCE(LossModule):" in stubs.modules()
"""
# Has the loss a row, does the rest know it; its module; four gradient checks; every kind of negatives at once.
KINDS = "knows or gradcheck or modules_equal or (every_isa and baseline and everything)"
CHOSEN, TESTED = f"has_its_row or poly_infonce and ({KINDS})", 8


def test_three_additions_make_a_loss(tmp_path: Path) -> None:
    for folder in ("fastcl", "tests", "docs"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "sets"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    blocks = BLOCK.findall(PAGE.read_text())
    assert [name for name, _ in blocks] == ["fastcl/losses.py", "fastcl/reference.py", "tests/calls.py"]
    for name, diff in blocks:
        add(tmp_path / name, diff)
    (tmp_path / "tests/test_found.py").write_text(FOUND)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(tmp_path / "docs/_site")])}
    files = ["tests/test_found.py", "tests/core/test_nn.py", "tests/core/test_losses.py"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files, "-k", CHOSEN],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert f"{TESTED} passed" in done.stdout


def add(file: Path, diff: str) -> None:
    """Puts the lines with + where the lines without it, which must occur once, say."""
    lines = diff.splitlines(keepends=True)
    old = "".join(line[1:] for line in lines if line.startswith(" "))
    new = "".join(line[1:] for line in lines)
    text = file.read_text()
    assert text.count(old) == 1, f"{file.name} has no one place for {old!r}"
    file.write_text(text.replace(old, new))


def test_a_place_that_is_not_there_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "file.py").write_text("a\nb\nb\n")
    add(tmp_path / "file.py", "+new\n a\n")
    assert (tmp_path / "file.py").read_text() == "new\na\nb\nb\n"
    for place in ("b\n", "c\n"):
        with pytest.raises(AssertionError, match="no one place"):
            add(tmp_path / "file.py", f"+new\n {place}")
