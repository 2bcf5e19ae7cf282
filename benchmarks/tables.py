"""Writes every measured figure of the documentation, from the JSON files in benchmarks/results.

    python -m benchmarks.tables            updates the pages and the front page's picture
    python -m benchmarks.tables --check    writes nothing; lists files that are out of date and exits with 1 if any is

A page marks the place of a table with two comments, and the program writes the text between them:

    <!-- table: speed -->
    <!-- end -->

Two comments on one line hold a figure inside a sentence. The modules in `SOURCES` have a function without arguments for
each name, which returns Markdown. Nothing is measured here.
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from benchmarks import (
    front_picture,
    prepare,
    tables_clicks,
    tables_cost,
    tables_exposure,
    tables_models,
    tables_quality,
    tables_scale,
    tables_speed,
    tables_studies,
    tables_suites,
    tables_wheels,
)
from benchmarks.common import write_text

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "assets" / "speed.svg"
SOURCES = (
    tables_speed,
    tables_cost,
    tables_studies,
    tables_models,
    tables_quality,
    tables_wheels,
    tables_suites,
    tables_scale,
    tables_exposure,
    tables_clicks,
)
TABLES: dict[str, Callable[[], str]] = {
    **{name: make for module in SOURCES for name, make in module.TABLES.items()},
    "originals": prepare.listing,
}
MARKED = re.compile(r"(<!-- table: (?P<name>[^\n]*?) -->)(?P<old>.*?)(?P<close><!-- end -->)", re.S)


def filled(text: str, tables: Mapping[str, Callable[[], str]] = TABLES) -> str:
    """The page with every marked place rewritten; ValueError for an unknown name or a mark without an end."""

    def written(found: re.Match[str]) -> str:
        if found["name"] not in tables:
            raise ValueError(f"table: expected one of {', '.join(tables)}, got {found['name']!r}")
        if "<!-- table:" in found["old"]:
            raise ValueError(f"table {found['name']}: expected <!-- end --> before the next mark, got none")
        made = tables[found["name"]]()
        return f"{found[1]}\n\n{made}\n\n{found['close']}" if "\n" in found["old"] else found[1] + made + found["close"]

    done = MARKED.sub(written, text)
    if done.count("<!-- table:") != len(MARKED.findall(text)):
        raise ValueError("table: expected <!-- end --> after every mark, got one without")
    return done


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def outdated() -> Iterator[tuple[Path, str]]:
    """Every file that is out of date, with the content it should have."""
    for path in pages():
        text = path.read_text()
        try:
            new = filled(text)
        except ValueError as error:
            raise ValueError(f"{path.relative_to(ROOT)}: {error}") from None
        if new != text:
            yield path, new
    picture = front_picture.svg()
    if not PICTURE.is_file() or PICTURE.read_text() != picture:
        yield PICTURE, picture


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file is out of date")
    args = parser.parse_args()
    found = list(outdated())
    for path, new in found:
        said = "out of date; run python -m benchmarks.tables" if args.check else "written"
        print(f"{path.relative_to(ROOT)}: {said}")
        if not args.check:
            write_text(path, new)
    if args.check and found:
        sys.exit(1)


if __name__ == "__main__":
    main()
