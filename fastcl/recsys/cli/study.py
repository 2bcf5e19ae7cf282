"""fastcl study: the tables of a study, whose missing runs --run does."""

import argparse
import json
from pathlib import Path
from typing import Any

from fastcl.recsys.studies.measuring import files_of, read_manifest
from fastcl.recsys.studies.study import results_of, study
from fastcl.recsys.training import checkpoint
from fastcl.recsys.training.threads import add_threads
from fastcl.recsys.writing import check_output, write_text


def add(commands: Any) -> None:
    parser = commands.add_parser("study", help="tables of many runs with several settings and seeds; does missing runs")
    option = parser.add_argument
    option("file", metavar="FILE", help="manifest of the study, which fastcl.recsys.study describes")
    option("--run", action="store_true", dest="work", help="do the missing runs; may be stopped at any time")
    text = "with --run, only runs whose title contains TEXT; titles are shown in the list of missing runs"
    option("--only", nargs="+", default=[""], metavar="TEXT", help=text)
    text = "file of the finished runs (default: NAME.results.json beside NAME.json)"
    option("--results", metavar="FILE", help=text)
    text = "folder of the run folders (default: NAME.runs beside NAME.json)"
    option("--states", metavar="FOLDER", help=text)
    option("--csv", metavar="FILE", help="file to write the tables to, as CSV")
    option("--latex", metavar="FILE", help="file to write the tables to, as LaTeX")
    add_threads(parser)
    option("--json", action="store_true", help="print the finished and the missing runs as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    checkpoint.require_safetensors()
    if args.only != [""] and not args.work:
        raise ValueError(f"--only: expected --run with it, got {' '.join(args.only)}")
    file = Path(args.file)
    inputs: dict[str, str | Path | None] = {"the manifest": file, **files_of(read_manifest(file), file.parent)}
    results = results_of(file, args.results)
    for name, out in {"results": results, "csv": args.csv, "latex": args.latex}.items():
        if out:
            check_output(f"--{name}", out, inputs)
            inputs[f"the file of --{name}"] = out
    found = study(args.file, run=args.work, only=args.only, results=results, states=args.states)
    if args.csv:
        write_text(Path(args.csv), found.to_csv())
    if args.latex:
        write_text(Path(args.latex), found.to_latex())
    if args.json:
        print(json.dumps({"runs": list(found.done), "missing": found.missing}, indent=1))
    else:
        print(found.to_markdown())
