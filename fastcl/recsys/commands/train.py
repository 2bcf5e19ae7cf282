"""fastcl train: a model on the user's own file, into a run folder."""

import argparse
import sys
from pathlib import Path
from typing import Any

from fastcl.recsys import checkpoint
from fastcl.recsys.commands.common import BUNDLED, read_data
from fastcl.recsys.metrics import SEEN
from fastcl.recsys.models import MODELS
from fastcl.recsys.options import at_least, parse_settings
from fastcl.recsys.train import fit, new_folder


def add(commands: Any) -> None:
    parser = commands.add_parser("train", help="train a model on a file of your own")
    option = parser.add_argument
    option("file", help="table (.csv, .tsv) or sequences (.txt), also .gz, .xz; or bundled:movies, bundled:purchases")
    option("--model", choices=list(MODELS), required=True)
    option("--epochs", type=int, default=20, help="(default: %(default)s)")
    option("--seed", type=int, default=0)
    fields = "; ".join(f"{name}: {', '.join(m.Config.__dataclass_fields__)}" for name, m in MODELS.items())
    option("--set", nargs="+", action="extend", default=[], metavar="key=value", help=f"model settings ({fields})")
    for column in ("user", "item", "time"):
        more = '; "" where the rows are in time order' if column == "time" else ""
        option(f"--{column}", default=column, metavar="COLUMN", help=f"its column (default: {column}{more})")
    option("--format", choices=["csv", "tsv", "sequence"], help="where the file's name does not tell")
    option("--seen", choices=SEEN, default="mask", help="never recommend items of the history, or keep them (repeats)")
    option("-o", "--out", required=True, metavar="RUN", help="run folder")
    option("--force", action="store_true", help="overwrite the run in RUN")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    model_class = MODELS[args.model]
    options = parse_settings(model_class.Config, args.set)
    model_class.Config(**options)
    at_least(1, "--epochs", args.epochs)
    at_least(0, "--seed", args.seed)
    new_folder(args.out, args.force)
    checkpoint.require_safetensors()
    path = args.file if args.file.startswith(BUNDLED) else str(Path(args.file).resolve())
    data = {"path": path, "user": args.user, "item": args.item, "time": args.time, "format": args.format}
    log = read_data(data)
    split = log.split()
    if "time_cuts" in model_class.Config.__dataclass_fields__ and log.log.time is None:
        options.setdefault("time_cuts", ())
    model = model_class(split.items, seed=args.seed, **options)
    clicks = f"{len(split.users):,} users, {len(split.items):,} items, {len(log.log.item):,} clicks"
    print(f"{args.file}: {clicks}", file=sys.stderr)
    settings = {"out": args.out, "seed": args.seed, "seen": args.seen, "force": args.force, "record": {"data": data}}
    history = fit(model, split, epochs=args.epochs, **settings)
    best = max(history, key=lambda line: line["ndcg@10"])
    figures = f"recall@10 {best['recall@10']:.4f}, ndcg@10 {best['ndcg@10']:.4f}"
    print(f"{args.out}: best of {args.epochs} epochs is {best['epoch']}, validation {figures}")
