"""fastcl intents: which categories the intents of a run hold, how evenly they share items, users and lists."""

import argparse
import json
from pathlib import Path
from typing import Any

from fastcl.recsys.cli.runs import add_run_options, open_runs, tell
from fastcl.recsys.models import MultiCLRec
from fastcl.recsys.options import at_least
from fastcl.recsys.reporting import tables
from fastcl.recsys.reporting.intents import intents
from fastcl.recsys.training.threads import add_threads

SHOWN = 3  # categories shown per intent


def add(commands: Any) -> None:
    parser = commands.add_parser("intents", help="what the intents of a multi_clrec run are, on its test histories")
    option = parser.add_argument
    option("folder", metavar="RUN", help="run folder")
    add_run_options(parser)
    option("-k", type=int, default=10, help="length of the recommended lists (default: %(default)s)")
    add_threads(parser)
    option("--json", action="store_true", help="one JSON document on stdout, with the whole map of the categories")
    parser.set_defaults(run=run, names={"format": "--data", "columns": "--data"})


def run(args: argparse.Namespace) -> None:
    at_least(1, "-k", args.k)
    (opened,), split, seen, notes = open_runs([Path(args.folder)], args)
    if not isinstance(opened.model, MultiCLRec):
        raise ValueError(f"{args.folder}: expected a run of multi_clrec, got one of {opened.model.name}")
    tell(notes)
    found = intents(opened.model, split.test.history, args.k, seen)
    if args.json:
        print(json.dumps(found))
        return
    rows = []
    for intent, (items, users) in enumerate(zip(found["items"], found["users"], strict=True)):
        most = sorted(found["categories"], key=lambda row: -row["items"] * row["intents"][intent])[:SHOWN]
        named = [f"{row['category']} {row['intents'][intent]:.2f}" for row in most if row["intents"][intent] > 0.005]
        rows.append([str(intent), f"{items:,}", f"{users:.3f}", ", ".join(named) or "-"])
    print(tables.table(["intent", "items", "users", found["category"] or "category"], rows))
    for name in ("balance", "polarity", "top_intent", "list_share", "list_intents"):
        print(f"{name:13}{found[name]:.3f}")
