"""The tables of a study: means and spreads over seeds, beside given figures, as Markdown, CSV and LaTeX.

Nothing here trains or measures; the figures are those of finished runs (manifest.py).
"""

import csv
import io
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fastcl.recsys import latex
from fastcl.recsys.showing import number
from fastcl.recsys.studies.manifest import Manifest, Run, columns_of, runs, title


class Cell(NamedTuple):
    """A metric of several seeds. mean: None where no run has it. sd: None for fewer than two runs (n - 1 in its
    denominator). above: whether the mean is above the best given figure.
    """

    mean: float | None
    sd: float | None
    above: bool


class Row(NamedTuple):
    """done, planned: numbers of seeds; 0 for given figures."""

    name: str
    given: bool
    done: int
    planned: int
    cells: dict[str, Cell]


def cell_of(found: Sequence[float | None], least: float | None) -> Cell:
    """found: the metric of each run, None where a run lacks it. least: the best given figure, if there is one."""
    values = [value for value in found if value is not None]
    mean = statistics.mean(values) if values else None
    above = mean is not None and least is not None and mean > least
    return Cell(mean, statistics.stdev(values) if len(values) > 1 else None, above)


def cell(column: str, found: Sequence[float | None], least: float | None) -> str:
    """The Markdown of `cell_of`: empty where the runs lack the column, "missing" where there is no run."""
    return _markdown(column, cell_of(found, least), bool(found))


@dataclass(frozen=True)
class Study:
    """A manifest and its measured runs, by their ids. finished: whether a measured run has all that it is to have. Each
    method gives one table for each data set.
    """

    manifest: Manifest
    done: Sequence[Run]
    finished: Callable[[Run], bool] = field(default=lambda found: True, compare=False)

    @property
    def missing(self) -> list[str]:
        """The titles of the runs that are not finished."""
        ids = {run["id"] for run in self.done if self.finished(run)}
        return [title(run) for run in runs(self.manifest) if run["id"] not in ids]

    def rows(self, data: str) -> list[Row]:
        """The rows of a data set: given figures (the manifest's "paper") first, then a row for each label."""
        columns, given = columns_of(self.manifest, data), self.manifest.get("paper", {}).get(data, {})
        best = {name: max((row[name] for row in given.values() if name in row), default=None) for name in columns}
        rows = [
            Row(name, True, 0, 0, {column: Cell(row.get(column), None, False) for column in columns})
            for name, row in given.items()
        ]
        found = {run["id"]: run["test"] for run in self.done}
        labels: dict[str, list[str]] = {}
        for run in runs(self.manifest):
            if run["data"] == data:
                labels.setdefault(run["label"], []).append(run["id"])
        for label, ids in labels.items():
            tests = [found[run] for run in ids if run in found]
            cells = {column: cell_of([test.get(column) for test in tests], best[column]) for column in columns}
            rows.append(Row(label, False, len(tests), len(ids), cells))
        return rows

    @property
    def data(self) -> list[str]:
        """The names of the data sets, those of the given figures first."""
        return list(dict.fromkeys([*self.manifest.get("paper", {}), *(run["data"] for run in runs(self.manifest))]))

    def to_markdown(self) -> str:
        """Mean (standard deviation) over the finished seeds; bold above all given rows; missing runs by name."""
        lines = []
        for data in self.data:
            head = ["", "seeds", *columns_of(self.manifest, data)]
            lines += ["", f"**{data}**", "", f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
            for row in self.rows(data):
                cells = [_markdown(column, cell, row.given or row.done > 0) for column, cell in row.cells.items()]
                label = " ".join(row.name.split()).replace("|", "\\|")
                name = f"paper: {label} | |" if row.given else f"{label} | {_seeds(row)} |"
                lines.append(f"| {name} " + " | ".join(cells) + " |")
            lines += ["", self.manifest["notes"][data]] if data in self.manifest.get("notes", {}) else []
        if any(self.manifest.get("paper", {}).values()):
            lines += ["", "**Bold**: above all of the published rows."]
        lines += ["", f"Runs missing: {len(self.missing)}."]
        return "\n".join([*lines, *(f"- {name}" for name in self.missing)]).strip()

    def to_csv(self) -> str:
        """One line per row: data, name, given (yes or no), done, planned, each column and its standard deviation."""
        lines: list[dict[str, Any]] = []
        for data in self.data:
            for row in self.rows(data):
                line: dict[str, Any] = {"data": data, "name": row.name, "given": "yes" if row.given else "no"}
                line |= {"done": row.done, "planned": row.planned}
                for column, one in row.cells.items():
                    line |= {column: one.mean, f"{column} sd": one.sd}
                lines.append(line)
        text = io.StringIO()
        writer = csv.DictWriter(text, list(dict.fromkeys(name for line in lines for name in line)), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
        return text.getvalue()

    def to_latex(self) -> str:
        """Mean ± standard deviation, bold above all given rows; a rule between given rows and those of the study."""
        parts = []
        for data in self.data:
            lines: list[list[str]] = []
            for row in self.rows(data):
                cells = [_latex(column, one, row.given or row.done > 0) for column, one in row.cells.items()]
                seeds = "" if row.given else _seeds(row)
                first = not row.given and lines and not any(line[0].startswith("\\midrule") for line in lines)
                name = ("\\midrule\n" if first else "") + latex.escaped(row.name)
                lines.append([name, seeds, *cells])
            header = ["", "seeds", *map(latex.escaped, columns_of(self.manifest, data))]
            parts.append(latex.tabular(header, lines, data))
        return "\n\n".join(parts) + "\n"


def _seeds(row: Row) -> str:
    return str(row.done) if row.done == row.planned else f"{row.done} of {row.planned}"


def _markdown(column: str, found: Cell, ran: bool) -> str:
    if found.mean is None:
        return "" if ran else "missing"
    text = f"**{number(column, found.mean)}**" if found.above else number(column, found.mean)
    return text if found.sd is None else f"{text} ({number(column, found.sd)})"


def _latex(column: str, found: Cell, ran: bool) -> str:
    if found.mean is None:
        return "" if ran else "missing"
    text = latex.bold(number(column, found.mean)) if found.above else number(column, found.mean)
    return text if found.sd is None else f"{text} {latex.escaped('±')} {number(column, found.sd)}"
