"""fastcl recommend: the best next items for a history."""

import argparse
import sys
from typing import Any

from fastcl.recsys import checkpoint
from fastcl.recsys.metrics import SEEN
from fastcl.recsys.options import at_least
from fastcl.recsys.recommend import recommend


def add(commands: Any) -> None:
    parser = commands.add_parser("recommend", help="the best next items for a history")
    option = parser.add_argument
    option("folder", metavar="RUN")
    option("--history", required=True, help="item ids, oldest first, separated by commas")
    option("-k", type=int, default=10, help="(default: %(default)s)")
    option("--seen", choices=SEEN, help="(default: as in training)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    at_least(1, "-k", args.k)
    model = checkpoint.load(args.folder)
    history = [part.strip() for part in args.history.split(",") if part.strip()]
    unknown = [item for item, number in zip(history, model.items.encode(history), strict=True) if number == 0]
    seen = args.seen or checkpoint.read_config(args.folder).get("seen", "mask")
    (best,) = recommend(model, [history], args.k, seen)
    if unknown:
        print(f"skipped {len(unknown)} of {len(history)} unknown: {', '.join(unknown)}", file=sys.stderr)
    for item, score in best:
        title = model.items.label(int(model.items.encode([item])[0]))
        print(f"{score:9.4f}  {item}" + (f"  {title}" if title != item else ""))
