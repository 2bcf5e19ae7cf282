"""Learning curves of tables that are trained by rows beside those of dense tables: NDCG@10 on all validation cases
after each epoch, with the same seeds.

    python -m benchmarks.bench_curves --data FOLDER [--only amazon] [--seeds 1,2] [--states FOLDER]

FOLDER holds amazon/Toys_and_Games and movielens/ml-1m. Trainings that benchmarks/results/curves.json has are not done
again, and one that was interrupted goes on from its state. `popularity` is the NDCG@10 of the most clicked items, which
a model that learns is above.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.common import RESULTS, hardware, numbers, write_json
from benchmarks.sources import last_one
from fastcl.recsys import CLRec, Model, Popularity, evaluate, fit, resume

TABLES = ("dense", "rows")
METRIC = "ndcg@10"


class Case(NamedTuple):
    data: str
    model: Callable[..., Model]
    name: str
    options: dict[str, Any]
    epochs: int


CASES = (
    Case("amazon/Toys_and_Games", CLRec, "clrec", {}, 3),
    Case("movielens/ml-1m", CLRec, "clrec", {"batch": 1024, "max_len": 20}, 1),
)


def curve(case: Case, seed: int, table: str, data: Path, state: Path) -> dict[str, Any]:
    """One training, whose run folder is `state`."""
    split = last_one(case.data, data).split
    if (state / "config.json").exists():
        lines = resume(state, split, progress=False)
    else:
        model = case.model(split.items, seed=seed, table=table, **case.options)
        lines = fit(model, split, epochs=case.epochs, seed=seed, out=state, save_every=20.0, progress=False)
    popular = evaluate(Popularity(split.counts, split.items), split.valid, counts=split.counts, metrics=(METRIC,))
    return {METRIC: [line[METRIC] for line in lines], "popularity": popular[METRIC]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--only", default="", help="trainings of which the data or the model has one of these in it")
    parser.add_argument("--seeds", type=numbers, default=[1, 2])
    parser.add_argument("--states", type=Path, default="runs/curves", help="folder of unfinished trainings")
    parser.add_argument("--output", type=Path, default=RESULTS / "curves.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    known = json.loads(args.output.read_text())["rows"] if args.output.exists() else []
    for case in CASES:
        about = {"data": case.data, "model": case.name, "options": case.options, "epochs": case.epochs}
        if not any(text in f"{case.data} {case.name}" for text in args.only.split(",")):
            continue
        for seed in args.seeds:
            for table in TABLES:
                asked = about | {"seed": seed, "table": table}
                if any(asked.items() <= row.items() for row in known):
                    continue
                state = args.states / f"{case.data.replace('/', '-')}-{case.name}-{seed}-{table}"
                known.append(asked | curve(case, seed, table, args.data, state))
                print(json.dumps(known[-1]), file=sys.stderr, flush=True)
                write_json(args.output, {"machine": hardware(), "rows": known})


if __name__ == "__main__":
    main()
