"""fastcl tune: a search over settings of a model, judged by validation; the test cases are looked at only if asked."""

import argparse
import json
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fastcl.recsys.cli.common import add_data_options, source_of
from fastcl.recsys.cli.runs import repeats, suited, tell
from fastcl.recsys.cli.train import add_training_options
from fastcl.recsys.data import Scorer
from fastcl.recsys.evaluation.ranking import SEEN, evaluate
from fastcl.recsys.models import MODELS
from fastcl.recsys.options import choices_of
from fastcl.recsys.reporting import tables
from fastcl.recsys.studies.tune import Search, tune
from fastcl.recsys.training import checkpoint

EPOCHS = 20


def add(commands: Any) -> None:
    parser = commands.add_parser("tune", help="search settings of a model by validation, with successive halving")
    option = parser.add_argument
    add_data_options(parser)
    option("--model", choices=list(MODELS), required=True, help="the model; fastcl models tells what each is")
    values = "settings of the model with the values to try, separated by commas, or by / for a setting that is a list"
    option("--set", nargs="+", action="extend", required=True, metavar="key=values", help=values)
    text = "try only so many of the combinations, drawn at random by --seed (default: all)"
    option("--trials", type=int, metavar="N", help=text)
    text = "of the trials, 1/N goes on to N times as many epochs; 1: all train to the end (default: %(default)s)"
    option("--halving", type=int, default=3, metavar="N", help=text)
    option("--seed", type=int, default=0, help="seed of the draw, of all weights and trainings (default: %(default)s)")
    seen = "mask: rank no item of the history; keep: rank them too, for data with repeats (default: %(default)s)"
    option("--seen", choices=SEEN, default="mask", help=seen)
    add_training_options(parser, f"{EPOCHS} of the longest trial", "never", "linear")
    option("-o", "--out", required=True, metavar="FOLDER", help="folder for the run folders of the trials")
    option("--final", action="store_true", help="also test the best trial, beside the floors")
    option("--json", action="store_true", help="print everything as JSON")
    names = {"how": "--split", "split": "--split", "values": "--set"}
    parser.set_defaults(run=run, names=names, epochs=EPOCHS, schedule="linear")


def run(args: argparse.Namespace) -> None:
    if dist.is_torchelastic_launched():
        raise ValueError("tune: expected a single process, got torchrun; each trial is small")
    checkpoint.require_safetensors()
    model = MODELS[args.model]
    values = choices_of(model.Config, args.set)
    source = source_of(args)
    split = source.split()
    if args.seen == "mask" and (note := repeats(split)):
        tell([note])
    values |= {name: [value] for name, value in suited(model, split, values).items()}
    names = ("epochs", "trials", "halving", "seed", "metric", "device")
    training = ("seen", "patience", "schedule", "precision", "accumulate", "save_every")
    options = {name: getattr(args, name) for name in (*names, *training)}
    found = tune(model, split, values, out=Path(args.out), record=source.to_json(), **options)
    test: dict[str, dict[str, float]] = {}
    if args.final:
        best = checkpoint.load(found.best)
        scorers: dict[str, Scorer] = {**tables.floors(split, args.seen), f"trial {found.rows[0]['trial']}": best}
        test = {name: evaluate(scorer, split.test, seen=args.seen) for name, scorer in scorers.items()}
    if args.json:
        print(json.dumps({"rows": found.rows, "best": str(found.best), **({"test": test} if test else {})}, indent=1))
    else:
        print(_text(found, test))


def _text(found: Search, test: dict[str, dict[str, float]]) -> str:
    columns = [name for name in dict.fromkeys(n for row in found.rows for n in row) if name != "folder"]
    rows = [[_cell(name, row.get(name)) for name in columns] for row in found.rows]
    parts = [tables.table(columns, rows), f"best by validation: {found.best}"]
    parts += [f"on the test cases:\n{tables.result_table(test)}"] if test else []
    return "\n\n".join(parts)


def _cell(column: str, value: Any) -> str:
    if value is None:
        return "-"
    if column == "seconds":
        return f"{value:.1f}"
    return f"{value:.4f}" if isinstance(value, float) and "@" in column else str(value)
