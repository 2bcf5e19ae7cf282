"""What editors and type checkers are told of fastcl is true: mypy and pyright on right and wrong calls, and stubs that
say what is there.
"""

from __future__ import annotations

import inspect
import json
import os
import pydoc
import re
import subprocess
import sys
from pathlib import Path

import pytest
import stubs

import fastcl
from fastcl.registry import LOSSES

ROOT = Path(__file__).parent.parent
FILES = [Path(__file__).parent / name for name in ("typed_calls.py", "typed_recsys.py")]
# (file, number) -> line
LINES = {(file.name, nth): line for file in FILES for nth, line in enumerate(file.read_text().splitlines(), start=1)}
WRONG = {place for place, line in LINES.items() if line.endswith("# wrong")}
BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def checkers() -> dict[str, subprocess.Popen[str]]:
    """Both at work at the same time."""
    commands = {
        "mypy": [sys.executable, "-m", "mypy", "--no-error-summary", "--no-pretty", *map(str, FILES)],
        "pyright": [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, *map(str, FILES)],
    }
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT, "env": environment}
    return {name: subprocess.Popen(command, **pipes) for name, command in commands.items() if (BIN / name).is_file()}


@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_type_checkers_know_right_calls_from_wrong_ones(
    checkers: dict[str, subprocess.Popen[str]], checker: str
) -> None:
    if checker not in checkers:
        pytest.skip(f"{checker} is not installed")
    printed, errors = checkers[checker].communicate(timeout=300)
    if checker == "pyright":
        told = json.loads(printed)["generalDiagnostics"]
        errors_of = [item for item in told if item["severity"] == "error"]
        found = {(Path(item["file"]).name, item["range"]["start"]["line"] + 1) for item in errors_of}
    else:
        found = {(name, int(line)) for name, line in re.findall(r"(typed_\w+\.py):(\d+): error", printed)}
    unseen, refused = ([LINES[place] for place in sorted(places)] for places in (WRONG - found, found - WRONG))
    assert not unseen, f"{checker} let pass: {unseen}\n{printed[-2000:]}{errors[-2000:]}"
    assert not refused, f"{checker} refused: {refused}\n{printed[-2000:]}{errors[-2000:]}"


def test_everything_public_is_called_rightly_and_wrongly() -> None:
    names = [*fastcl.__all__, *(f"nn.{loss.module}" for loss in LOSSES.values())]
    for wrong in (False, True):
        lines = "\n".join(line for place, line in LINES.items() if (place in WRONG) is wrong)
        assert [name for name in names if not re.search(rf"\bfastcl\.{name}\b", lines)] == []


@pytest.mark.parametrize("path", stubs.STUBS, ids=lambda path: path.name)
def test_stubs_say_what_is_there(path: Path) -> None:
    assert path.read_text() == stubs.STUBS[path](), "run `make stubs`"


def test_signatures_are_true_at_run_time() -> None:
    shared = list(inspect.signature(fastcl.dcl).parameters)
    assert shared[:4] == ["query", "positive_key", "negative_keys", "temperature"]
    losses = ("mine", "infonce", "infonce_plus")
    own = {name: list(inspect.signature(getattr(fastcl, name)).parameters) for name in losses}
    assert own == {
        "mine": shared,
        "infonce": [*shared, "label_smoothing", "z_loss"],
        "infonce_plus": [*shared, "epsilon", "lam"],
    }
    made = inspect.signature(fastcl.nn.InfoNCEPlus)
    assert [*made.parameters] == own["infonce_plus"][3:]
    assert made.parameters["lam"].default == 1.1
    assert list(inspect.signature(fastcl.nn.InfoNCEPlus().forward).parameters) == own["infonce_plus"]
    assert "tau_plus" in help_of(fastcl.debiased_infonce)
    assert "tau_plus: float = 0.1" in help_of(fastcl.nn.DebiasedInfoNCE)


def help_of(thing: object) -> str:
    return pydoc.plain(pydoc.render_doc(thing))
