"""fastcl train: a model on the user's own file, into a run folder."""

import argparse
import sys
from typing import Any

from fastcl.recsys import checkpoint
from fastcl.recsys.commands.common import add_data_options, data_of, read_split, split_of
from fastcl.recsys.metrics import SEEN
from fastcl.recsys.models import MODELS
from fastcl.recsys.options import at_least, parse_settings
from fastcl.recsys.train import fit, new_folder


def add(commands: Any) -> None:
    parser = commands.add_parser("train", help="train a model on a file of your own")
    option = parser.add_argument
    add_data_options(parser)
    option("--model", choices=list(MODELS), required=True)
    option("--epochs", type=int, default=20, help="(default: %(default)s)")
    option("--seed", type=int, default=0)
    fields = "; ".join(f"{name}: {', '.join(m.Config.__dataclass_fields__)}" for name, m in MODELS.items())
    option("--set", nargs="+", action="extend", default=[], metavar="key=value", help=f"model settings ({fields})")
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
    record = {"data": data_of(args), "split": split_of(args)}
    split = read_split(record)
    if "time_cuts" in model_class.Config.__dataclass_fields__ and split.train.time is None:
        options.setdefault("time_cuts", ())
    model = model_class(split.items, seed=args.seed, **options)
    print(f"{split.data_report}\n{split.report}", file=sys.stderr)
    settings = {"out": args.out, "seed": args.seed, "seen": args.seen, "force": args.force, "record": record}
    history = fit(model, split, epochs=args.epochs, **settings)
    best = max(history, key=lambda line: line["ndcg@10"])
    figures = f"recall@10 {best['recall@10']:.4f}, ndcg@10 {best['ndcg@10']:.4f}"
    print(f"{args.out}: best of {args.epochs} epochs is {best['epoch']}, validation {figures}")
