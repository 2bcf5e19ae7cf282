"""fastcl demo: both models on a bundled data set."""

import argparse
from typing import Any

from fastcl.recsys import demo


def add(commands: Any) -> None:
    parser = commands.add_parser("demo", help="train both models on a bundled data set, about two minutes")
    option = parser.add_argument
    option("--data", choices=list(demo.PLANS), default="movies")
    option("--seed", type=int, default=0)
    option("-o", "--out", default="runs/demo", help="an earlier demo in it is overwritten (default: %(default)s)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    print(demo.run(args.data, args.out, args.seed))
