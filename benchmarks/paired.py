"""Paired tests over users: the models of a study against one of them, by the weights that the study's runs saved.

    python -m benchmarks.paired --data FOLDER --states FOLDER [--set amazon/Beauty] [--against "SASRec softmax"]

A model is tested on the users of the test cases; a user's value is the mean over the model's seeds. p is corrected by
Holm's rule for the number of models and metrics of the data set. Models without a finished run whose weights are in one
of the folders of `--states` are left out, and so are weights that do not give the figures of results/contrastvae.json.
The floors without training are tested too. Writes results/paired.json, one data set at a time. Nothing is trained here.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.analyses import finished
from benchmarks.common import RESULTS, machine, write_json
from benchmarks.quality import HERE
from benchmarks.sources import SPLITS
from fastcl.recsys.data import Scorer
from fastcl.recsys.evaluation.measures import users_gains
from fastcl.recsys.evaluation.paired import holm, paired_test
from fastcl.recsys.evaluation.ranking import rank_cases
from fastcl.recsys.reporting.tables import floors
from fastcl.recsys.studies.manifest import read
from fastcl.recsys.training.checkpoint import load

REPORT = RESULTS / "paired.json"
METRICS, K = ("recall@20", "ndcg@20"), (20,)
SAME = 2e-4  # how far a figure computed anew may be from the stored one: other processors round ties otherwise

Gains = Mapping[str, np.ndarray]  # metric -> float [users]


def compared(gains: Mapping[str, Gains], against: str) -> list[dict[str, Any]]:
    """A row for each name but `against` and each metric: the paired test and its p corrected for all rows."""
    tests: list[dict[str, Any]] = [
        {"label": name, "metric": metric, **paired_test(of[metric], gains[against][metric])}
        for name, of in gains.items()
        if name != against
        for metric in METRICS
    ]
    corrected = holm([test["p"] for test in tests])
    return [test | {"p holm": p} for test, p in zip(tests, corrected, strict=True)]


def weights(run: Mapping[str, Any], states: Sequence[Path]) -> Path | None:
    folders = [folder / run["id"] for folder in states if (folder / run["id"] / "config.json").is_file()]
    return folders[0] if folders else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("--data", type=Path, required=True, help="folder of the data sets")
    option("--states", type=Path, nargs="+", required=True, help="folders of the studies' checkpoints")
    option("--set", default="amazon/Office_Products", help="data set (default: %(default)s)")
    option("--against", default="SASRec softmax", help="label of a study's run (default: %(default)s)")
    args = parser.parse_args()
    manifest = json.loads((HERE / "studies" / "contrastvae.json").read_text())
    split = SPLITS["last-one"](args.set, args.data).split

    def gains(scorer: Scorer) -> Gains:
        return users_gains(rank_cases(scorer, split.test, k=K, seen="mask"), METRICS)

    found: dict[str, tuple[int, Gains]] = {name: (1, gains(of)) for name, of in floors(split, "mask").items()}
    for label, group in finished(manifest, read(RESULTS / "contrastvae.json"), args.set).items():
        seeds = []
        for run in group:
            folder = weights(run, args.states)
            if folder is None:
                continue
            seeds.append(gains(load(folder)))
            apart = max(abs(float(seeds[-1][metric].mean()) - run["test"][metric]) for metric in METRICS)
            if apart > SAME:
                print(f"{label}, seed {run['seed']}: left out, since its weights give figures {apart:.4f} from its own")
                seeds.pop()
        if seeds:
            found[label] = len(seeds), {metric: np.mean([of[metric] for of in seeds], axis=0) for metric in METRICS}
    if args.against not in found:
        parser.error(f"--against: expected one of {', '.join(found)}, got {args.against}")
    rows = compared({name: of for name, (_, of) in found.items()}, args.against)
    report = json.loads(REPORT.read_text()) if REPORT.is_file() else {}
    report[args.set] = {
        "against": args.against,
        "users": len(split.test),
        "models": {
            name: {"seeds": n, **{metric: float(of[metric].mean()) for metric in METRICS}}
            for name, (n, of) in found.items()
        },
        "tests": rows,
        "machine": machine(),
    }
    write_json(REPORT, report)
    for row in rows:
        print(f"{row['label']}, {row['metric']}: {row['difference']:+.4f}, p {row['p holm']:.4f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
