"""The recommenders on systems that lack what POSIX has: everything is imported, trained and saved in a process
from which the modules, functions and flags were taken that Windows, or macOS, has not.

What Windows itself does is tested by building/try_wheels.py.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fastcl.recsys.training import threads

WITHOUT = """
import importlib, os, pkgutil, signal, subprocess, sys
import fastcl, numpy, safetensors.torch, tqdm, matplotlib.pyplot

sys.modules["fcntl"] = sys.modules["resource"] = None
for name in ("sched_getaffinity", "O_NOFOLLOW", "O_NONBLOCK", "fchmod", "fork"):
    delattr(os, name)
del signal.SIGPIPE
sys.platform = "win32"

import fastcl.recsys
for found in pkgutil.walk_packages(fastcl.recsys.__path__, "fastcl.recsys."):
    if not found.name.endswith("__main__"):
        importlib.import_module(found.name)

from fastcl.recsys.cli.main import main
from fastcl.recsys.writing import write_text
from pathlib import Path

folder = Path(sys.argv[1])
write_text(folder / "log.csv", "user,item,time\\n" + "".join(f"u{n % 7},i{n * n % 11},{n}\\n" for n in range(80)))
write_text(folder / "log.csv", (folder / "log.csv").read_text())  # over a file
run = str(folder / "run")
for words in (
    ["train", str(folder / "log.csv"), "--model", "sasrec", "--epochs", "1", "--set", "dim=8", "batch=4", "-o", run],
    ["data", "prepare", str(folder / "log.csv"), "-o", str(folder / "prepared")],
    ["data", "prepare", str(folder / "log.csv"), "-o", str(folder / "prepared"), "--force"],
    ["recommend", run, "--history", "i1", "-o", str(folder / "list.csv")],
):
    assert main(words) == 0, words
print(sorted(path.name for path in folder.rglob("*") if "fastcl" in path.name or path.name.startswith("data-")))
"""


def test_modules_of_posix_are_imported_under_a_condition() -> None:
    for path in (Path(__file__).parents[2] / "fastcl").rglob("*.py"):
        assert not re.search(r"^(import|from) (fcntl|grp|pwd|resource|termios)\b", path.read_text(), re.M), path


@pytest.mark.slow
def test_nothing_asks_for_what_only_posix_has(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WITHOUT, str(tmp_path)], text=True, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    # No lock, no temporary file and no earlier generation is left.
    (generation,) = ast.literal_eval(done.stdout.splitlines()[-1])
    assert generation.startswith("data-")


def test_all_cores_count_where_no_process_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(threads.os, "sched_getaffinity")
    monkeypatch.setattr(threads.os, "cpu_count", lambda: 3)
    monkeypatch.setattr(threads, "_quota", lambda root, own: 2.5)
    assert threads.cores() == 3
    monkeypatch.setattr(threads, "_quota", lambda root, own: 1.0)
    assert threads.cores() == 1
