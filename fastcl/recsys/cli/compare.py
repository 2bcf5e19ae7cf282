"""fastcl compare: runs side by side, seeds of the same settings together."""

import argparse
import json
from pathlib import Path
from typing import Any

from fastcl.recsys.cli.evaluate import add_metric_options, asked_metrics, vectors_for
from fastcl.recsys.cli.runs import add_run_options, groups_of, inputs_of, open_runs, run_folders, tell
from fastcl.recsys.evaluation.comparison import Comparison, compare
from fastcl.recsys.evaluation.measures import COUNTS
from fastcl.recsys.evaluation.paired import stars
from fastcl.recsys.evaluation.ranking import evaluate
from fastcl.recsys.reporting import tables
from fastcl.recsys.training.threads import add_threads
from fastcl.recsys.writing import check_output, write_text


def add(commands: Any) -> None:
    parser = commands.add_parser("compare", help="runs side by side: mean and spread over seeds, a paired test")
    option = parser.add_argument
    of_runs = "run folders, or folders of several runs, on the same data; every two of them are compared by a test"
    option("folders", nargs="+", metavar="RUN", help=of_runs)
    add_run_options(parser)
    add_metric_options(parser)
    option("--csv", metavar="FILE", help="file to write the table to, as CSV")
    option("--latex", metavar="FILE", help="file to write both tables to, as LaTeX")
    add_threads(parser)
    option("--json", action="store_true", help="print everything as JSON")
    parser.set_defaults(run=run, names={"format": "--data", "columns": "--data"})


def run(args: argparse.Namespace) -> None:
    protocol = args.protocol or "full"
    metrics, k = asked_metrics(args)
    folders = run_folders(*args.folders)
    for option, path in (("--csv", args.csv), ("--latex", args.latex)):
        for folder in folders if path else ():
            check_output(option, path, {"--data": args.data, **inputs_of(folder)})
    if args.csv and args.latex:
        check_output("--latex", args.latex, {"the file of --csv": args.csv})
    runs, split, seen, notes = open_runs(folders, args)
    vectors = vectors_for(metrics, split)
    tell(notes)
    options: dict[str, Any] = {"k": k, "seen": seen, "protocol": protocol, "vectors": vectors}
    options["metrics"] = metrics if args.metrics else None  # those that nobody asked for are shown and not all tested
    groups = groups_of(runs)
    found = compare({name: [run.model for run in members] for name, members in groups.items()}, split.test, **options)
    # The popularity index and the tests are about the runs alone, so floors are added after them.
    for name, floor in tables.floors(split, seen).items():
        found.rows.append({"name": f"floor: {name}", "runs": 1, **evaluate(floor, split.test, **options)})
    if args.csv:
        write_text(Path(args.csv), found.to_csv())
    if args.latex:
        write_text(Path(args.latex), found.to_latex())
    if args.json:
        shown = {name: [str(run.folder) for run in members] for name, members in groups.items()}
        settings = {"k": k, "protocol": protocol, "seen": seen, "folders": shown, "notes": notes}
        print(json.dumps({**settings, "rows": found.rows, "tests": found.tests}, indent=1))
    else:
        print(_text(found))


def _text(found: Comparison) -> str:
    columns = [c for c in found.rows[0] if c not in ("name", *COUNTS) and not c.endswith(" sd")]
    best = {column: found.best(column) for column in columns}
    rows = [[row["name"], *(_cell(row, column, best[column]) for column in columns)] for row in found.rows]
    parts = [tables.table(["", *columns], rows)]
    if found.tests:
        tests = [
            [test["name"], test["against"], test["metric"], f"{test['difference']:+.4f}",
             f"{test['low']:+.4f} to {test['high']:+.4f}" if "low" in test else "-",
             f"{test['p']:.4f}", _with_stars(test["p holm"])]
            for test in found.tests
        ]  # fmt: skip
        parts.append(tables.table(["", "against", "metric", "difference", "95%", "p", "p (Holm)"], tests))
        count = f"{len(tests)} test{'s' if len(tests) > 1 else ''}"
        told = f"p: paired randomisation test over users, two-sided; p (Holm): corrected for all {count} above"
        levels = "* below 0.05, ** below 0.01, *** below 0.001"
        lacks = "; -: no interval, a figure of all lists together or of one case"
        whole = "" if all("low" in test for test in found.tests) else lacks
        parts.append(f"{told}; {levels}, at the best value by its largest p against the others{whole}")
    return "\n\n".join(parts)


def _with_stars(p: float) -> str:
    return f"{p:.4f} {stars(p):3}"


def _cell(row: dict[str, Any], column: str, best: tuple[str, str] | None) -> str:
    if column not in row:
        return "-"
    if column == "runs":
        return str(row[column])
    value = tables.number(column, row[column])
    spread = row.get(f"{column} sd")
    value = value if spread is None else f"{value} ±{tables.number(column, spread)}"
    return f"{value} {best[1]}" if best and best[0] == row["name"] and best[1] else value
