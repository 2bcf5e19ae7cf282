"""Chooses settings on validation data: the weights of the co-occurrence floor, Multi-CLRec's `separation`, and how much
trained models shorten item vectors (`normalize`).

    python -m benchmarks.choices floor [--data shared/data]
    python -m benchmarks.choices separation [--data shared/data]
    python -m benchmarks.choices normalize [--data shared/data] --runs amazon/Beauty=RUN ...

Test cases are not used. Writes benchmarks/results/choices.json, with a row for each data set and variant. The standing
of a variant is the mean over the data sets of its validation NDCG@10 divided by that of the best variant on the set.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import write_json
from benchmarks.protocols import some
from benchmarks.sources import BUNDLED, timed
from fastcl.recsys import Interactions, MultiCLRec, bundled, evaluate, fit, load
from fastcl.recsys.data import Split
from fastcl.recsys.models.floors import CoOccurrence

RESULTS = Path(__file__).parent / "results" / "choices.json"
CASES = 1000  # validation cases of a set, the same for all its variants
# How items of the history are treated in the ranking: groceries are bought again, so they stay candidates.
SETS = {
    **{"bundled:movies": "mask", "bundled:purchases": "keep"},
    **{f"amazon/{name}": "mask" for name in ("Office_Products", "Beauty", "Toys_and_Games", "Sports_and_Outdoors")},
    **{"amazon/Tools_and_Home_Improvement": "mask", "lastfm/LastFM": "mask"},
}
FLOOR = {"decay": (0.6, 0.8, 0.9, 1.0), "steps": (1, 3, 5), "mix": (0.0, 0.3, 1.0, 3.0)}
SEPARATION = (0.0, 1.0)
EPOCHS = {"bundled:movies": 3}
SEEDS = (0, 1)
NORMALIZE = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)


def floor(folder: Path, runs: Sequence[str]) -> Iterator[dict[str, Any]]:
    for name, seen in SETS.items():
        split = _split(name, folder, False)
        cases = some(split.valid, CASES)
        for values in product(*FLOOR.values()):
            variant: dict[str, Any] = dict(zip(FLOOR, values, strict=True))
            if variant["mix"] == 0.0 and variant["steps"] > 1:  # transitions have weight 0, `steps` changes nothing
                continue
            scorer = CoOccurrence(split.train, len(split.items), **variant)
            found = evaluate(scorer, cases, seen=seen)
            yield {"choice": "floor", "set": name, **variant, "ndcg@10": found["ndcg@10"]}


def separation(folder: Path, runs: Sequence[str]) -> Iterator[dict[str, Any]]:
    for name, epochs in EPOCHS.items():
        split = _split(name, folder, True)
        for weight, seed in product(SEPARATION, SEEDS):
            model = MultiCLRec(split.items, seed=seed, separation=weight)
            lines = fit(model, split, epochs=epochs, seed=seed, seen=SETS[name], progress=False)
            best = [line for line in lines if line["best"]][-1]
            values = {key: best[key] for key in ("epoch", "recall@10", "ndcg@10")}
            yield {"choice": "separation", "set": name, "epochs": epochs, "separation": weight, "seed": seed, **values}


def normalize(folder: Path, runs: Sequence[str]) -> Iterator[dict[str, Any]]:
    for name, _, run in (text.partition("=") for text in runs):
        split, model = _split(name, folder, False), load(run)
        config = model.config
        for power in NORMALIZE:
            model.config = replace(config, normalize=power)  # read at each scoring
            found = evaluate(model, split.valid, k=20, seen=SETS[name])
            row = {"choice": "normalize", "set": name, "model": model.name, "debias": config.debias, "normalize": power}
            yield row | {"cases": len(split.valid), "ndcg@20": found["ndcg@20"], "recall@20": found["recall@20"]}


def standing(rows: list[dict[str, Any]], names: tuple[str, ...]) -> list[tuple[float, dict[str, Any]]]:
    """(mean share of the best, variant) for every variant of the rows, the best one first."""
    best: dict[str, float] = {}
    metric = "ndcg@20" if "ndcg@20" in rows[0] else "ndcg@10"
    for row in rows:
        best[row["set"]] = max(row[metric], best.get(row["set"], 0.0))
    shares: dict[tuple[Any, ...], list[float]] = {}
    for row in rows:
        shares.setdefault(tuple(row[name] for name in names), []).append(row[metric] / best[row["set"]])
    means = [(float(np.mean(values)), dict(zip(names, key, strict=True))) for key, values in shares.items()]
    return sorted(means, key=lambda pair: -pair[0])


def _split(name: str, folder: Path, features: bool) -> Split:
    if name.startswith(BUNDLED):
        return bundled(name.removeprefix(BUNDLED)).split()
    data = timed(name, folder) if features else Interactions.read(folder / f"{name}.txt.gz", format="sequence")
    return data.split()


CHOICES = {
    "floor": (floor, tuple(FLOOR)),
    "separation": (separation, ("separation",)),
    "normalize": (normalize, ("normalize",)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("choice", choices=list(CHOICES))
    parser.add_argument("--data", type=Path, default=Path("shared/data"))
    parser.add_argument("--runs", nargs="+", default=[], metavar="SET=RUN", help="trained models, for normalize")
    args = parser.parse_args()
    if args.choice == "normalize" and not args.runs:
        parser.error("--runs: expected SET=RUN, got none")
    search, names = CHOICES[args.choice]
    kept = json.loads(RESULTS.read_text())["rows"] if RESULTS.is_file() else []
    rows = []
    for row in search(args.data, args.runs):
        print(row, flush=True)
        rows.append(row)
    for share, variant in standing(rows, names):
        print(f"{share:.4f}", variant)
    new = {_about(row) for row in rows}
    write_json(RESULTS, {"cases": CASES, "rows": [row for row in kept if _about(row) not in new] + rows})


def _about(row: dict[str, Any]) -> tuple[Any, ...]:
    """What a later call of the program measures anew as a whole."""
    return row["choice"], row["set"], row.get("model"), row.get("debias")


if __name__ == "__main__":
    main()
