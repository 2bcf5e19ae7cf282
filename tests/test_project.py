"""The files around the code say the same: version, what CI runs, what an archive of the sources holds."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_the_version_is_the_same_everywhere() -> None:
    (version,) = re.findall(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert f"version: {version}" in (ROOT / "CITATION.cff").read_text().splitlines()
    assert re.search(rf"^## {re.escape(version)}\b", (ROOT / "CHANGELOG.md").read_text(), re.M)


def test_public_ci_runs_what_every_change_must_pass() -> None:
    steps = re.findall(r"- run: (.*)", (ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert steps == [".ci/run", "make docs"]


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_links_to_files_lead_somewhere(page: str) -> None:
    """Those of docs/ are checked where the pages are built."""
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", (ROOT / page).read_text()):
        assert "://" in link or (ROOT / link).exists(), link


def test_the_front_page_fits_on_two_screens() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 130
    # A mark on one line holds a figure that a program writes, of any length.
    assert [line for line in lines if len(line) > 100 and "<!-- table:" not in line] == []
