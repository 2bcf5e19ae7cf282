"""What the documentation generates: docstrings as reStructuredText, and pages from parsers, settings and losses.

`make docs` builds the whole; these run without Sphinx.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import sys
from pathlib import Path
from types import ModuleType

import pytest

import fastcl
import fastcl.eval
import fastcl.nn
import fastcl.recsys
from fastcl.recsys import MODELS
from fastcl.recsys.cli.main import build_parser
from fastcl.registry import LOSSES

SITE = Path(__file__).parent.parent / "docs" / "_site"


@pytest.fixture
def docstrings(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SITE))
    return importlib.import_module("docstrings")


@pytest.fixture
def generated(docstrings: ModuleType) -> ModuleType:
    return importlib.import_module("generated")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Plain `name` and a*b.", "Plain \\ ``name``\\  and a\\*b."),
        ("A `name =\nvalue` over a line's end.", "A \\ ``name = value``\\  over a line's end."),
        ("Loss:\n\n    a = b * c_\n", "Loss:\n\n::\n\n    a = b * c_"),
        (
            "Args:\n    x, y: [N, D].\n    z: more,\n        and more.\n",
            "**Arguments**\n\n- ``x``, ``y``: [N, D].\n- ``z``: more,\n  and more.",
        ),
        ("Returns: a tensor\n    of one row.", "**Returns:** a tensor\nof one row."),
        ("lr: a rate.\nOther arguments: as above.", "- ``lr``: a rate.\n\nOther arguments: as above."),
        ('"a": one,\n     more.\n"b-c":   two.', '- ``"a"``: one,\n  more.\n- ``"b-c"``: two.'),
        (">>> f(1)\n2", ">>> f(1)\n2"),
    ],
)
def test_docstrings_become_restructured_text(docstrings: ModuleType, text: str, expected: str) -> None:
    lines = "\n".join(docstrings.converted(text.split("\n"))).strip()
    while "\n\n\n" in lines:
        lines = lines.replace("\n\n\n", "\n\n")
    assert lines == expected


def test_every_public_docstring_converts(docstrings: ModuleType) -> None:
    found = 0
    for module in (fastcl, fastcl.nn, fastcl.eval, fastcl.recsys):
        for name in module.__all__:
            value = getattr(module, name)
            members = vars(value).values() if inspect.isclass(value) else ()
            for text in filter(None, map(inspect.getdoc, filter(callable, (value, *members)))):
                lines = text.splitlines()
                docstrings.process(None, "", name, value, None, lines)
                assert any(lines), name
                found += 1
    assert found > 200


def test_every_option_is_on_the_page(generated: ModuleType) -> None:
    page = generated.commands()
    found = [build_parser()]
    for one in found:
        for action in one._actions:
            if isinstance(action, argparse._SubParsersAction):
                found += action.choices.values()
            elif action.help != argparse.SUPPRESS and action.option_strings != ["-h", "--help"]:
                assert all(option in page for option in action.option_strings or [action.dest])
        assert f"# `{one.prog}`\n" in page or one.prog == "fastcl"


def test_every_setting_is_on_the_page(generated: ModuleType) -> None:
    parts = generated.configs().split("## `")[1:]
    assert [part.partition("`")[0] for part in parts] == list(MODELS)
    for model, part in zip(MODELS.values(), parts, strict=True):
        module, _, name = part.split("`")[2].rpartition(".")
        assert getattr(importlib.import_module(module), name) is model.Config
        assert [f"| `{field.name}` |" in part for field in dataclasses.fields(model.Config)].count(False) == 0


def test_every_loss_is_in_the_table_of_conventions(generated: ModuleType) -> None:
    rows = generated.conventions().split("\n")[2:]
    assert [row.split("`")[1] for row in rows] == list(LOSSES)
    by_name = {row.split("`")[1]: row for row in rows}
    assert "normalize=False" in by_name["infonce"]
    assert "always" in by_name["nt_xent"]
    assert "as they are" in by_name["siglip"]


def test_every_public_name_is_in_the_reference(generated: ModuleType) -> None:
    text = "".join(page.read_text() for page in (SITE.parent / "reference").glob("*.md")) + generated.family()
    recsys = sys.modules["fastcl.recsys"].__all__
    missing = [f"fastcl.{name}" for name in fastcl.__all__ if f"fastcl.{name}\n" not in text]
    missing += [f"fastcl.recsys.{name}" for name in recsys if f"fastcl.recsys.{name}\n" not in text]
    # Settings have a page of their own, and MODELS is the table of models.
    assert [name for name in missing if not name.endswith(("Config", "MODELS"))] == []
