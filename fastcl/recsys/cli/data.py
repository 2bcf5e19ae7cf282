"""fastcl data check: what a file holds, which rows would be dropped, and why. fastcl data prepare: a folder from which
training starts at once. Neither of them trains.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastcl.recsys.cli.common import add_read_options, source_of
from fastcl.recsys.data import prepared
from fastcl.recsys.data.preparing import MEMORY, prepare
from fastcl.recsys.data.source import BUNDLED, FEATURES, READ
from fastcl.recsys.data.splits import HOW


def add(commands: Any) -> None:
    parser = commands.add_parser("data", help="what a file of interactions holds; a large one prepared for training")
    actions = parser.add_subparsers(dest="action", required=True, metavar="action")
    check = actions.add_parser(
        "check",
        help="rows, users, items, ties, repeats, bad rows; trains and writes nothing",
        description="Reads a file as `train` would and says what is in it; of a prepared folder, whether its files are "
        "as they were written. Exit code 0: readable as asked; 2: not.",
    )
    add_read_options(check)
    check.add_argument("--json", action="store_true", help="one JSON document on stdout")
    check.set_defaults(run=run)
    make = actions.add_parser(
        "prepare",
        help="a folder of a large file, from which every command starts at once",
        description="Reads a file, or a folder of Parquet files, once and writes a folder that `train`, `evaluate` and "
        "`recommend --users` take in its place. Processes map its files, so that clicks cost them no memory of their "
        "own; results are those of the file, bit for bit.",
    )
    add_read_options(make)
    option = make.add_argument
    option("-o", "--out", required=True, metavar="FOLDER", help="prepared folder to write")
    text = "the split whose train rows are laid out in the folder; any other can be made of it (default: %(default)s)"
    option("--split", choices=tuple(HOW), default="last-one", help=text)
    option("--at", metavar="TIME", help="time from which --split time holds out, as of `train`")
    text = "megabytes that the preparation may take (default: %(default)s)"
    option("--memory", type=int, default=MEMORY, metavar="MB", help=text)
    option("--force", action="store_true", help="replace prepared data that is in FOLDER")
    option("--json", action="store_true", help="print the report as JSON")
    make.set_defaults(run=run_prepare, names={"how": "--split"})


def run(args: argparse.Namespace) -> None:
    source = source_of(args)
    if prepared.is_prepared(source.data["path"]):
        prepared.verify(Path(source.data["path"]))
    else:  # the report counts all bad rows, even where `train` would stop at the first
        source = replace(source, data={**source.data, "on_error": "skip"})
    report = source.read().report
    assert report is not None
    bad = len(report.faults) > 0 and args.on_error == "raise"
    print(json.dumps({"readable": not bad, **report.to_json()}, indent=2) if args.json else str(report))
    if bad:
        raise ValueError(f"{args.file}: has bad rows, the first is {report.faults[0]}; --on-error skip drops them")


def run_prepare(args: argparse.Namespace) -> None:
    if args.file.startswith(BUNDLED):
        raise ValueError(f"FILE: expected a file or a folder, got {args.file}, which is small")
    data = source_of(argparse.Namespace(**{name: value for name, value in vars(args).items() if name != "split"})).data
    options = {name: data[name] for name in (*READ, *FEATURES) if name in data}
    made = prepare(data["path"], args.out, how=args.split, at=args.at, memory=args.memory, force=args.force, **options)
    report = made.report
    assert report is not None
    told = {"prepared": args.out, **report.to_json()}
    print(json.dumps(told, indent=2) if args.json else f"{report}\n{args.out}: ready to train on")
