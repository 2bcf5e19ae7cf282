"""The figures of the pages are those of benchmarks/results: pages are up to date, and nobody typed a figure."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import tables, tables_speed, tables_studies
from benchmarks.common import results
from benchmarks.front_picture import svg

ROOT = Path(__file__).parents[1]
# What a measurement looks like. Code, links and addresses are no measurements.
FIGURE = re.compile(r"\d\.\d|\d ?(?:%|(?:ns|us|ms|MB|MiB|GB|GiB)\b)")
NO_FIGURE = re.compile(r"`[^`]*`|\]\([^)]*\)|https?://\S+")


def test_pages_are_up_to_date() -> None:
    assert [str(path) for path, _ in tables.outdated()] == []


RESULTS = sorted(page for page in (ROOT / "docs" / "results").glob("*.md") if page.name != "data-sources.md")


@pytest.mark.parametrize("page", RESULTS, ids=lambda page: page.name)
def test_no_figure_of_the_results_is_typed(page: Path) -> None:
    text = NO_FIGURE.sub("", re.sub(r"^```.*?^```$", "", tables.MARKED.sub("", page.read_text()), flags=re.S | re.M))
    assert [line for line in text.splitlines() if FIGURE.search(line)] == []


def test_every_table_has_a_place() -> None:
    placed = {found["name"] for page in tables.pages() for found in tables.MARKED.finditer(page.read_text())}
    assert set(tables.TABLES) - placed == set()


def test_figures_are_written_between_marks() -> None:
    page = "A <!-- table: one -->old<!-- end --> b.\n\n<!-- table: two -->\nold\n<!-- end -->\n\nc\n"
    made = {"one": lambda: "1", "two": lambda: "| 2 |"}
    done = tables.filled(page, made)
    assert done == "A <!-- table: one -->1<!-- end --> b.\n\n<!-- table: two -->\n\n| 2 |\n\n<!-- end -->\n\nc\n"
    assert tables.filled(done, made) == done


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("<!-- table: three --><!-- end -->", "expected one of one, two, got 'three'"),
        ("<!-- table: one -->", "expected <!-- end --> after every mark"),
        ("<!-- table: one --> <!-- table: two --><!-- end -->", "expected <!-- end --> before the next mark"),
    ],
)
def test_wrong_marks_are_refused(page: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tables.filled(page, {"one": str, "two": str})


def test_check_names_what_is_out_of_date(tmp_path: Path) -> None:
    """In a copy, where one figure of a page and one of its source are changed."""
    for name in ("docs/assets", "docs/results", "benchmarks/results"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "README.md").write_text("<!-- table: machine -->a slide rule<!-- end -->")
    (tmp_path / "docs/assets/speed.svg").write_text(svg())
    program = f"import pathlib, sys; from benchmarks import tables; tables.ROOT = pathlib.Path({str(tmp_path)!r}); "
    program += "tables.PICTURE = tables.ROOT / 'docs/assets/speed.svg'; sys.argv[1:] = ['--check']; tables.main()"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "README.md: out of date; run python -m benchmarks.tables\n")
    assert "a slide rule" in (tmp_path / "README.md").read_text()


def test_where_fastcl_loses_has_the_runs_with_tables_of_their_own() -> None:
    lost = [row for row in results("contrast-cpu-clip")["rows"] if row["ratios"]["lean"] < 1]
    table = tables_speed.losing()
    assert lost
    assert all(f"{tables_speed.named(row)['N x M x D']} | {row['what']} | with backward" in table for row in lost)


def test_a_curve_has_one_row_for_the_seeds_of_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"temperature": 0.1, "lam": 1.2}
    run = {"label": "MF", "data": "d", "model": "mf", "options": options, "split": "held-out", "seeds": [0, 1]}
    done = [{part: {"recall@20": value, "ndcg@20": value} for part in ("valid", "test")} for value in (0.2, 0.4)]
    monkeypatch.setattr(tables_studies, "study", lambda paper: ({"runs": [run]}, {("d", "MF"): done}))
    _, _, *rows = tables_studies.curve("d").splitlines()
    assert [row.startswith("| 0.1 | 1.2 | 0.3000 (") for row in rows] == [True]
