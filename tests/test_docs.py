"""Every example in a docstring, and every block of code in the README and in docs/, runs and prints what it says.

A page is one session in an empty folder: its blocks run in order and share their names. `python` is executed, `pycon`
is executed and what it prints compared, and in `sh` the lines that call fastcl are.
"""

import doctest
import importlib
import pkgutil
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fastcl
from fastcl.recsys.cli import main
from fastcl.registry import LOSSES

pytestmark = pytest.mark.usefixtures("one_thread")

# Compiled ones have no docstrings, and the CUDA part cannot be imported everywhere.
LEFT_OUT = ("__main__", "libfastcl_cpu", "_C_cuda")
MODULES = [m.name for m in pkgutil.walk_packages(fastcl.__path__, "fastcl.") if not m.name.endswith(LEFT_OUT)]
ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```(python|pycon|sh)\n(.*?)^```$", re.S | re.M)
# These run elsewhere: the one as a user's file, the other beside the packages that it is about.
ELSEWHERE = {
    "docs/contribute/adding-a-model.md": "recsys/test_adding_a_model",
    "docs/guide/migration.md": "core/test_compat",
}
# The page whose program makes the small log.csv that other pages use as well.
LOG_PAGE = "docs/start/recommender.md"
LOG = next(block for kind, block in BLOCK.findall((ROOT / LOG_PAGE).read_text()) if 'open("log.csv"' in block)
PAGES = [
    str(page.relative_to(ROOT))
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if BLOCK.search(page.read_text()) and str(page.relative_to(ROOT)) not in ELSEWHERE
]


@pytest.fixture(autouse=True)
def _own_losses_are_forgotten() -> Iterator[None]:
    known = dict(LOSSES)
    yield
    LOSSES.clear()
    LOSSES.update(known)


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0


def test_public_functions_have_an_example() -> None:
    public = [getattr(fastcl, name) for name in fastcl.__all__ if name not in ("Evicted", "show_config")]
    assert [f.__name__ for f in public if ">>>" not in (f.__doc__ or "")] == []


@pytest.mark.parametrize("page", PAGES)
def test_pages_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "page"}
    if page != LOG_PAGE and "log.csv" in (ROOT / page).read_text():
        exec(LOG, {})
    text = (ROOT / page).read_text()
    for found in BLOCK.finditer(text):
        line = text.count("\n", 0, found.start(2))
        run(found[1], found[2], f"{page}, line {line + 1}", line, names)


def run(kind: str, block: str, where: str, line: int, names: dict[str, Any]) -> None:
    if kind == "python":
        exec(compile("\n" * line + block, where.partition(",")[0], "exec"), names)
    elif kind == "pycon":
        compared(block, where, line, names)
    else:
        for command in block.replace("\\\n", "").splitlines():
            if command.startswith("fastcl "):
                assert main.main(shlex.split(command, comments=True)[1:]) == 0, f"{where}: {command}"


def compared(block: str, where: str, line: int, names: dict[str, Any]) -> None:
    """A session whose names are the page's: what it sets is there for the blocks behind it."""
    test = doctest.DocTestParser().get_doctest(block, names, where, where, line)
    test.globs = names  # not the copy that the parser makes
    printed: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    runner.run(test, out=printed.append, clear_globs=False)
    assert not printed, "".join(printed)


def test_a_page_that_is_wrong_is_noticed() -> None:
    names: dict[str, Any] = {}
    run("pycon", ">>> x = 2\n>>> x + 1\n3\n", "page", 0, names)
    assert names["x"] == 2
    for kind, block in (("python", "x.y\n"), ("pycon", ">>> x + 1\n4\n"), ("sh", "fastcl train\n")):
        with pytest.raises((AssertionError, AttributeError, SystemExit)):
            run(kind, block, "page", 0, names)


def test_what_runs_elsewhere_does() -> None:
    for page, test in ELSEWHERE.items():
        assert (ROOT / page).is_file()
        assert Path(page).name in (ROOT / "tests" / f"{test}.py").read_text()
