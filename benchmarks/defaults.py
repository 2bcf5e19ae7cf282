"""What `fastcl train FILE --model M` reaches with nothing else set, beside the same model with other settings.

    python -m benchmarks.defaults [--set ml-100k] [--model sasrec] [--data shared/data] [--states build/defaults]

Leave-one-out, all items ranked, items of the history left out, one seed; validation NDCG@10 chooses the epoch. The
default is what `fastcl train` does: `fit(model, split)` of a model with its `suited` settings. TUNED has other
settings, chosen on validation data among the few that SEARCHED lists. Those of sasrec and contrastvae on Toys, from the
search that the manifest of the ContrastVAE study tells of, are not run here: their test figures are in
contrastvae.json. "constant rate" rows are of `fit(model, split, schedule="constant")`. A training that was cut off goes
on. Writes benchmarks/results/defaults.json.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import machine, write_json
from fastcl.recsys import (
    MODELS,
    CoOccurrence,
    Interactions,
    Popularity,
    Split,
    bundled,
    evaluate,
    fit,
    load,
    resume,
)
from fastcl.recsys.data import Scorer
from fastcl.recsys.models.base import make

RESULTS = Path(__file__).parent / "results" / "defaults.json"
SETS: dict[str, Callable[[Path], Interactions]] = {
    "ml-100k": lambda folder: Interactions.read(folder / "movielens" / "ml-100k.tsv.gz"),
    "purchases": lambda folder: bundled("purchases"),
    "Toys": lambda folder: Interactions.read(folder / "amazon" / "Toys_and_Games.txt.gz", format="sequence"),
}
# (set, model) -> (settings, options of fit)
TUNED: dict[tuple[str, str], tuple[dict[str, Any], dict[str, Any]]] = {
    ("ml-100k", "sasrec"): ({"lr": 3e-3, "batch": 32}, {"epochs": 25}),
    ("purchases", "sasrec"): ({"lr": 2e-3, "batch": 32}, {"epochs": 12}),
    ("ml-100k", "clrec"): ({"dropout": 0.4}, {"epochs": 10}),
    ("purchases", "contrastvae"): ({"lr": 1e-3}, {"epochs": 6}),
    ("Toys", "clrec"): ({"encoder": "pooling", "dropout": 0.2, "max_len": 20, "lr": 3e-3}, {}),
}
# What TUNED was chosen from.
SEARCHED = {
    "ml-100k, sasrec": "lr 1e-3 and 2e-3 with batches of 128, lr 3e-3 with batches of 32; validation of 4 to 34 epochs",
    "ml-100k, clrec": "lr 1e-3, dropout 0.4 and the defaults, 10 epochs each",
    "Toys, clrec": "the encoder pooling with its defaults, and the encoder sasrec with the settings of `CLRec.suited`",
    "purchases, contrastvae": "lr 1e-3 with 6 epochs and the defaults",
    "purchases, clrec": "log_q 0, 0.75 and 1: 1, the default, was the best",
    "purchases, sasrec": "lr 1e-3 with batches of 128, lr 3e-3 with batches of 32, 3 epochs each; lr 2e-3 of the demo",
}
METRICS = ("ndcg@10", "recall@10")
SHOWN = ("sasrec", "clrec", "contrastvae")  # the models of the table
SMALL = ("ml-100k", "purchases")  # the sets of the table of all models
FLOORS = ("popularity", "co-occurrence")


def measured(
    name: str, model: str, split: Split, settings: dict[str, Any], plan: dict[str, Any], folder: Path
) -> dict[str, Any]:
    begun = time.process_time()
    if (folder / "config.json").exists():
        history = resume(folder, split, progress=True)
    else:
        built = make(MODELS[model], split, seed=0, **(MODELS[model].suited(split.train) | settings))
        history = fit(built, split, out=folder, save_every=60, **plan)
    best = [line for line in history if line["best"]][-1]
    found = evaluate(load(folder), split.test)
    return {
        "epochs": len(history),
        "best epoch": best["epoch"],
        "CPU-seconds of the last part": time.process_time() - begun,
        "valid": {metric: best[metric] for metric in METRICS},
        "test": {metric: found[metric] for metric in METRICS},
        "curve": [round(line["ndcg@10"], 4) for line in history],
        "machine": machine(),
    }


def floors(split: Split) -> dict[str, dict[str, float]]:
    scorers: dict[str, Scorer] = {
        "popularity": Popularity(split.counts, split.items),
        "co-occurrence": CoOccurrence(split.train, len(split.items)),
    }
    found = {name: evaluate(scorer, split.test) for name, scorer in scorers.items()}
    return {name: {metric: of[metric] for metric in METRICS} for name, of in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=SETS, action="append")
    parser.add_argument("--model", choices=list(MODELS), action="append")
    parser.add_argument("--data", type=Path, default=Path("shared/data"))
    parser.add_argument("--states", type=Path, default=Path("build/defaults"))
    args = parser.parse_args()
    report = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"floors": {}, "rows": []}
    report["searched"] = SEARCHED
    known = {(row["set"], row["model"], row["which"]) for row in report["rows"]}
    for name in args.set or SETS:
        split = SETS[name](args.data).split()
        report["floors"].setdefault(name, floors(split))
        for model in args.model or sorted({of for _, of in TUNED}):
            plans: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {"default": ({}, {})}
            if model in SHOWN:
                plans["constant rate"] = ({}, {"schedule": "constant"})
            if (name, model) in TUNED:
                plans["tuned"] = TUNED[name, model]
            for which, (settings, plan) in plans.items():
                if (name, model, which) in known:
                    continue
                found = measured(name, model, split, settings, plan, args.states / name / model / which)
                row = {"set": name, "model": model, "which": which, "settings": settings, "plan": plan, **found}
                report["rows"].append(row)
                write_json(RESULTS, report)
                print(row, flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
