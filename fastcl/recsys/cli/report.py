"""fastcl report: one page about one run or several."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from fastcl.recsys.cli.runs import Run, add_run_options, groups_of, inputs_of, open_runs, run_folders, tell
from fastcl.recsys.evaluation.groups import GROUPS
from fastcl.recsys.reporting.report import FILES, report
from fastcl.recsys.reporting.tables import FLOORS
from fastcl.recsys.training.checkpoint import read_metrics
from fastcl.recsys.training.threads import add_threads
from fastcl.recsys.writing import check_folder


def add(commands: Any) -> None:
    parser = commands.add_parser("report", help="one page about runs: verdict, tables, pictures, examples")
    option = parser.add_argument
    option("folders", nargs="+", metavar="RUN", help="run folders, or folders of several runs, on the same data")
    add_run_options(parser)
    option(
        "-o",
        "--out",
        required=True,
        metavar="FOLDER",
        help="folder to write to; files of the same names are overwritten",
    )
    by = f"groups of cases: {', '.join(GROUPS)}, or a feature of the items (default: {','.join(GROUPS)})"
    option("--by", metavar="GROUPS", default=",".join(GROUPS), help=by)
    add_threads(parser)
    option("--json", action="store_true", help="print the files as JSON")
    parser.set_defaults(run=run, names={"by": "--by", "format": "--data", "columns": "--data"})


def run(args: argparse.Namespace) -> None:
    folders = run_folders(*args.folders)
    for folder in folders:
        check_folder("-o", args.out, FILES, {"--data": args.data, **inputs_of(folder)})
    runs, split, seen, notes = open_runs(folders, args)
    names = [_name(run.folder.resolve()) for run in runs]
    if len(set(names)) < len(names):  # folders with equal names are named by their paths
        names = [str(run.folder) for run in runs]
    named = dict(zip(names, runs, strict=True))
    for run in runs:  # the queue that the report replays is that of the first process
        run.model.share = (0, run.config.get("processes", 1))
    tell(notes)
    print("measuring ...", file=sys.stderr, flush=True)
    files = report(
        {name: run.model for name, run in named.items()},
        split,
        args.out,
        title=_title(args.data or runs[0].config.get("data", {}).get("path", "")),
        logs={name: read_metrics(run.folder) for name, run in named.items()},
        epochs={name: run.config["epochs"] for name, run in named.items() if "epochs" in run.config},
        seeds={name: run.config.get("seed", 0) for name, run in named.items()},
        seen=seen,
        notes=notes,
        groups=_groups(runs, names),
        by=[part.strip() for part in args.by.split(",") if part.strip()],
    )
    if args.json:
        print(json.dumps({"files": [str(file) for file in files]}))
    else:
        print("\n".join(map(str, files)))


def _title(path: str) -> str:
    """ "bundled:movies" -> "movies", "data/log.csv" -> "log.csv"."""
    return path.removeprefix("bundled:") if path.startswith("bundled:") else Path(path).name


def _name(folder: Path) -> str:
    """The folder's own name, with that of the folder around it where it would be a seed's or a floor's."""
    alone = not folder.name.startswith("seed-") and folder.name not in FLOORS
    return folder.name if alone else f"{folder.parent.name}/{folder.name}"


def _groups(runs: list[Run], names: list[str]) -> dict[str, str]:
    """Name of a run -> name of its group, for groups of several runs with the same settings."""
    name_of = {run.folder: name for run, name in zip(runs, names, strict=True)}
    found: dict[str, str] = {}
    for label, members in groups_of(runs).items():
        if len(members) > 1:
            found |= {name_of[run.folder]: f"{label}, {len(members)} seeds" for run in members}
    return found
