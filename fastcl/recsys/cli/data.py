"""fastcl data check: what a file holds, which rows would be dropped, and why. Trains and writes nothing."""

import argparse
import json
from dataclasses import replace
from typing import Any

from fastcl.recsys.cli.common import add_read_options, source_of


def add(commands: Any) -> None:
    parser = commands.add_parser("data", help="what a file of interactions holds, before training on it")
    actions = parser.add_subparsers(dest="action", required=True, metavar="action")
    check = actions.add_parser(
        "check",
        help="rows, users, items, ties, repeats, bad rows; trains and writes nothing",
        description="Reads a file as `train` would and says what is in it. Exit code 0: readable as asked; 2: not.",
    )
    add_read_options(check)
    check.add_argument("--json", action="store_true", help="one JSON document on stdout")
    check.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    source = source_of(args)
    # The report counts all bad rows, even where `train` would stop at the first.
    report = replace(source, data={**source.data, "on_error": "skip"}).read().report
    assert report is not None
    bad = len(report.faults) > 0 and args.on_error == "raise"
    print(json.dumps({"readable": not bad, **report.to_json()}, indent=2) if args.json else str(report))
    if bad:
        raise ValueError(f"{args.file}: has bad rows, the first is {report.faults[0]}; --on-error skip drops them")
