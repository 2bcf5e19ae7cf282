"""The analyses of a study, from the run folders that `quality --run` left: figures, pictures and a page of tables.

    python -m benchmarks.analyses --paper contrastvae --data FOLDER --states FOLDER

ContrastVAE's (Wang et al. 2022): recall by frequency of the last item and by length of the history (Fig. 2), collapse
of the posterior (mean KL to N(0, I), mean variance), robustness to deleted and replaced items, all on Toys with seed 0;
and sensitivity to the weight of the contrast on Office, from the results that are there. Writes numbers.json, PNGs and
tables.md to results/PAPER-analyses. Nothing trains here; models that were not trained yet are left out.
"""

import argparse
import json
import os
import statistics
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import RESULTS, markdown, write_json, write_text
from benchmarks.quality import HERE, read, runs
from fastcl.recsys import Interactions, pictures
from fastcl.recsys.checkpoint import load, write_bytes
from fastcl.recsys.data import Scorer, Split
from fastcl.recsys.groups import by_group
from fastcl.recsys.metrics import rank_cases
from fastcl.recsys.models import Model
from fastcl.recsys.report import floors
from fastcl.recsys.robustness import robustness

TOYS, OFFICE = "amazon/Toys_and_Games", "amazon/Office_Products"
METRIC, K = "recall@40", (20, 40)
COLUMNS = ("recall@20", "recall@40", "ndcg@20", "ndcg@40")
GROUPED = {"frequency": "users with the same last item (cases)", "length": "items in the history (cases)"}
VARIED = "contrast_weight"

Numbers = dict[str, Any]


def finished(manifest: Mapping[str, Any], done: list[dict[str, Any]], data: str) -> dict[str, dict[str, Any]]:
    """label -> result, of the first seed of every model that was trained on `data`."""
    ids = {run["id"]: run for run in done}
    found: dict[str, dict[str, Any]] = {}
    for run in runs(dict(manifest)):
        if run["data"] == data and run["plan"] is not None and run["id"] in ids:
            found.setdefault(run["label"], ids[run["id"]])
    return found


def measured(models: Mapping[str, Model], split: Split) -> Numbers:
    """What the pictures on one data set show; floors take part where they cost little."""
    scorers: dict[str, Scorer] = {**models, **floors(split, "mask")}
    groups = {
        name: by_group(rank_cases(scorer, split.test, k=K), split.test, by=tuple(GROUPED))
        for name, scorer in scorers.items()
    }
    corrupted = {name: robustness(model, split.test, k=K) for name, model in models.items()}
    latent: dict[str, dict[str, float]] = {}
    for name, model in models.items():
        diagnostics = getattr(model, "diagnostics", None)
        if callable(diagnostics):
            latent[name] = diagnostics(split.test.history)
    return {"groups": groups, "robustness": corrupted, "diagnostics": latent}


def sensitivity(manifest: Mapping[str, Any], done: list[dict[str, Any]]) -> list[dict[str, float]]:
    """A row for each weight of the contrast on Office, rising: runs that differ from "ContrastVAE VA" by it alone."""
    results = {run["id"]: run for run in done}
    of_set = [run for run in runs(dict(manifest)) if run["data"] == OFFICE and run["model"] == "contrastvae"]
    base = next(run for run in of_set if run["label"] == "ContrastVAE VA")
    found: dict[float, list[dict[str, float]]] = {}
    for run in of_set:
        same = run["plan"] == base["plan"] and {**run["options"], VARIED: 0} == {**base["options"], VARIED: 0}
        if same and run["id"] in results:
            found.setdefault(run["options"][VARIED], []).append(results[run["id"]]["test"])
    return [
        {VARIED: weight, "seeds": len(tests)}
        | {name: statistics.mean(test[name] for test in tests) for name in COLUMNS}
        for weight, tests in sorted(found.items())
    ]


def draws(numbers: Numbers) -> dict[str, list[pictures.Draw]]:
    """Name of a picture -> its panels."""
    reports, corrupted, latent = numbers["groups"], numbers["robustness"], numbers["diagnostics"]
    found: dict[str, list[pictures.Draw]] = {
        "groups": [
            partial(
                pictures.groups,
                reports={name: groups[by] for name, groups in reports.items()},
                metric=METRIC,
                title=f"Toys: recall by {by}",
                label=label,
            )
            for by, label in GROUPED.items()
        ],
        "robustness": [
            partial(pictures.corruption, reports=corrupted, kind=kind, metric=METRIC) for kind in ("delete", "replace")
        ],
        "collapse": [
            partial(
                pictures.bars, values={name: values[key] for name, values in latent.items()}, title=title, label=key
            )
            for key, title in (("kl", "Toys: mean KL to N(0, I)"), ("variance", "Toys: mean variance of z"))
        ],
    }
    weights = {f"{row[VARIED]:g}": row[METRIC] for row in numbers["sensitivity"]}
    if weights:
        title = "Office: weight of the contrast"
        found["sensitivity"] = [partial(pictures.bars, values=weights, title=title, label=METRIC)]
    return found


def tables(numbers: Numbers) -> str:
    parts = [f"Toys, seed 0, test, full ranking, {METRIC}; Office: mean over the seeds that ran."]
    for by in GROUPED:
        rows = [
            {by: name, **{f"{row['group']} ({row['cases']:,})": f"{row[METRIC]:.4f}" for row in groups[by]}}
            for name, groups in numbers["groups"].items()
        ]
        parts.append(markdown(rows))
    noise = [
        {"corrupted": name, **{f"{row['kind']} {row['ratio']:g}": f"{row[METRIC]:.4f}" for row in rows}}
        for name, rows in numbers["robustness"].items()
    ]
    parts.append(markdown(noise))
    latent = [
        {"posterior": name, **{key: f"{value:.3f}" for key, value in values.items()}}
        for name, values in numbers["diagnostics"].items()
    ]
    weights = [
        {name: f"{value:.4f}" if name in COLUMNS else f"{value:g}" for name, value in row.items()}
        for row in numbers["sensitivity"]
    ]
    return "\n\n".join([*parts, *(markdown(rows) for rows in (latent, weights) if rows)]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("--paper", required=True, choices=["contrastvae"])
    option("--data", type=Path, default=os.environ.get("FASTCL_DATA"), help="folder of the data (or FASTCL_DATA)")
    option("--states", type=Path, default="runs/studies", help="folder of checkpoints (default: %(default)s)")
    option("--threads", type=int, default=torch.get_num_threads(), help="(default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    manifest = json.loads((HERE / "studies" / f"{args.paper}.json").read_text())
    done = read(RESULTS / f"{args.paper}.json")
    trained = finished(manifest, done, TOYS)
    if args.data is None or not Path(args.data).is_dir():
        parser.error(f"--data: expected the folder of the data sets, got {args.data}")
    if not trained:
        parser.error(f"--paper: expected a study with results on {TOYS}, got none")
    models = {label: load(args.states / run["id"]) for label, run in trained.items()}
    split = Interactions.read(Path(args.data) / f"{TOYS}.txt.gz", format="sequence").split()
    numbers = {**measured(models, split), "sensitivity": sensitivity(manifest, done)}
    folder = RESULTS / f"{args.paper}-analyses"
    write_json(folder / "numbers.json", numbers)
    for name, panels in draws(numbers).items():
        write_bytes(folder / f"{name}.png", pictures.png(pictures.side_by_side(*panels)))
    write_text(folder / "tables.md", tables(numbers))
    print(tables(numbers))


if __name__ == "__main__":
    main()
