"""fastcl demo: SASRec and CLRec on purchases, or on movie ratings."""

import argparse
from pathlib import Path
from typing import Any

from fastcl.recsys.reporting import demo
from fastcl.recsys.training.threads import add_threads


def add(commands: Any) -> None:
    parser = commands.add_parser("demo", help="train sasrec and clrec on a bundled data set, about two minutes")
    option = parser.add_argument
    of_data = "bundled data set; movies are in the repository alone (default: %(default)s)"
    option("--data", choices=list(demo.PLANS), default="purchases", help=of_data)
    option("--seed", type=int, default=0, help="seed of the training (default: %(default)s)")
    of_out = "folder to write to; an earlier demo in it is overwritten (default: %(default)s)"
    option("-o", "--out", metavar="FOLDER", default="runs/demo", help=of_out)
    add_threads(parser)
    option("--json", action="store_true", help="print report.json instead of the report")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    text = demo.run(args.data, args.out, args.seed)
    print((Path(args.out) / "report.json").read_text(encoding="utf-8") if args.json else text)
