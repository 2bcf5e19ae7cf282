"""fastcl similar: the items whose vectors are nearest to that of an item."""

import argparse
import json
from typing import Any

from fastcl.recsys.cli.cold import add_items_option, with_new_items
from fastcl.recsys.cli.lists import document
from fastcl.recsys.cli.recommend import add_item_options, lines, say_unknown
from fastcl.recsys.options import at_least
from fastcl.recsys.serving.recommend import similar
from fastcl.recsys.training import checkpoint
from fastcl.recsys.training.threads import add_threads


def add(commands: Any) -> None:
    parser = commands.add_parser("similar", help="the items whose vectors are nearest to that of an item")
    option = parser.add_argument
    option("folder", metavar="RUN", help="run folder")
    option("item", metavar="ITEM", help="id of the item")
    option("-k", type=int, default=10, help="length of the list (default: %(default)s)")
    add_item_options(parser)
    add_items_option(parser)
    add_threads(parser)
    option("--json", action="store_true", help="one JSON document on stdout")
    parser.set_defaults(run=run, names={"model": "RUN", "item": "ITEM", "only": "--only"})


def run(args: argparse.Namespace) -> None:
    at_least(1, "-k", args.k)
    model = with_new_items(checkpoint.load(args.folder), checkpoint.read_config(args.folder), args.items)
    say_unknown(args, model.items)
    row = similar(model, args.item, args.k, only=args.only, without=args.without)
    if args.json:
        found = {"run": args.folder, "item": args.item, "items": document(row, model.items)}
        print(json.dumps(found, ensure_ascii=False))
    else:
        print("".join(lines(row, model.items)), end="")
