"""fastcl evaluate: test metrics of a run beside the floors."""

import argparse
from typing import Any

from fastcl.recsys import checkpoint, report
from fastcl.recsys.commands.common import cutoffs, read_split
from fastcl.recsys.metrics import SEEN


def add(commands: Any) -> None:
    parser = commands.add_parser("evaluate", help="test metrics of a run beside the floors")
    option = parser.add_argument
    option("folder", metavar="RUN")
    option("--data", metavar="FILE", help="where the data is now (default: where it was in training)")
    option("--seen", choices=SEEN, help="(default: as in training)")
    option("--k", default="10", help="cut-offs, separated by commas (default: %(default)s)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    k = cutoffs("--k", args.k)
    config = checkpoint.read_config(args.folder)
    model = checkpoint.load(args.folder)
    data = config.get("data")
    if args.data is None and data is None:
        raise ValueError(f"{args.folder}: its config.json names no data; expected --data FILE")
    split = read_split({**config, "data": {**(data or {}), **({"path": args.data} if args.data else {})}})
    if split.items.ids != model.items.ids:
        raise ValueError(f"data: expected the {len(model.items):,} items of the run, got {len(split.items):,} others")
    seen = args.seen or config.get("seen", "mask")
    scorers = {**report.floors(split, seen), model.name: model}
    print(report.result_table({name: report.on_test(scorer, split, seen, k) for name, scorer in scorers.items()}, k))
