"""The analyses of ContrastVAE (Wang et al. 2022), made from the results of `benchmarks.quality --run`.

    python -m benchmarks.analyses --data FOLDER --states FOLDER [--set amazon/Toys_and_Games]

There are four analyses: recall by frequency of the last item and by length of the history (Fig. 2 of the paper);
collapse of the posterior (mean KL to N(0, I), mean variance); robustness to deleted and replaced items; sensitivity to
the weight of the contrast. The first and the third rank the test cases with the saved weights of the first seed. The
second and the fourth are means over the seeds in results/contrastvae.json. Writes numbers.json, tables.md and pictures
to results/contrastvae-analyses/SET. Nothing is trained here: models without a finished run are left out.
"""

import argparse
import json
import os
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import RESULTS, markdown, write_json, write_text
from benchmarks.quality import HERE
from fastcl.recsys import Interactions
from fastcl.recsys.data import Scorer, Split
from fastcl.recsys.evaluation.groups import by_group
from fastcl.recsys.evaluation.ranking import rank_cases
from fastcl.recsys.evaluation.robustness import robustness
from fastcl.recsys.models import Model
from fastcl.recsys.reporting import pictures
from fastcl.recsys.reporting.tables import floors
from fastcl.recsys.studies.manifest import read, runs
from fastcl.recsys.training.checkpoint import load
from fastcl.recsys.writing import write_bytes

RANKED = (*(f"ContrastVAE {mode}" for mode in ("VA+DA", "VA", "MA", "DA", "AVAE")), "SASRec softmax")
METRIC, K = "recall@40", (40,)
GROUPED = {"frequency": "users with the same last item (cases)", "length": "items in the history (cases)"}
WEIGHT = "contrast_weight"

Run = dict[str, Any]
Numbers = dict[str, Any]


def finished(manifest: Mapping[str, Any], done: Sequence[Run], data: str) -> dict[str, list[Run]]:
    """label -> finished runs on `data`, in the manifest's order; without floors and without the authors' rules."""
    ids = {run["id"]: run for run in done}
    found: dict[str, list[Run]] = {}
    for run in runs(dict(manifest)):
        ours = run["plan"] is not None and "compat" not in run["options"]
        if ours and run["data"] == data and run["id"] in ids:
            found.setdefault(run["label"], []).append(ids[run["id"]])
    return found


def ranked(models: Mapping[str, Model], split: Split) -> Numbers:
    """Recall by group, of the models and the floors, and recall of the models under corruption."""
    scorers: dict[str, Scorer] = {**models, **floors(split, "mask")}
    groups = {
        name: by_group(rank_cases(scorer, split.test, k=K), split.test, by=tuple(GROUPED))
        for name, scorer in scorers.items()
    }
    return {"groups": groups, "robustness": {name: robustness(m, split.test, k=K) for name, m in models.items()}}


def collapse(trained: Mapping[str, Sequence[Run]]) -> dict[str, dict[str, float]]:
    """Of each ContrastVAE: "kl" to N(0, I) and "variance" of a latent dimension, means over all positions of the test
    histories; and its recall.
    """
    return {
        label: {
            "runs": len(seeds),
            **{key: statistics.mean(run["diagnostics"][key] for run in seeds) for key in ("kl", "variance")},
            METRIC: statistics.mean(run["test"][METRIC] for run in seeds),
        }
        for label, seeds in trained.items()
        if "diagnostics" in seeds[0]
    }


def sensitivity(trained: Mapping[str, Sequence[Run]], base: str = RANKED[0]) -> dict[str, dict[str, float]]:
    """Weight of the contrast -> metrics, in rising order, of the runs that differ from `base` only in this weight.
    Empty if there is just one weight.
    """

    def rest(run: Run) -> tuple[Any, Any]:
        return run["plan"], {name: value for name, value in run["options"].items() if name != WEIGHT}

    same = [seeds for seeds in trained.values() if base in trained and rest(seeds[0]) == rest(trained[base][0])]
    return {
        f"{seeds[0]['options'][WEIGHT]:g}": {
            "runs": len(seeds),
            **{name: statistics.mean(run["test"][name] for run in seeds) for name in (METRIC, "ndcg@20")},
        }
        for seeds in sorted(same, key=lambda seeds: seeds[0]["options"][WEIGHT])
        if len(same) > 1
    }


def draws(numbers: Numbers) -> dict[str, list[pictures.Draw]]:
    """Name of a picture -> its panels."""

    def bars(of: str, key: str, title: str) -> pictures.Draw:
        values = {name: row[key] for name, row in numbers[of].items()}
        return partial(pictures.bars, values=values, title=title, label=key)

    found: dict[str, list[pictures.Draw]] = {
        "groups": [
            partial(
                pictures.groups,
                reports={name: groups[by] for name, groups in numbers["groups"].items()},
                metric=METRIC,
                title=f"Recall by {by}",
                label=label,
            )
            for by, label in GROUPED.items()
        ],
        "robustness": [
            partial(pictures.corruption, reports=numbers["robustness"], kind=kind, metric=METRIC)
            for kind in ("delete", "replace")
        ],
        "collapse": [
            bars("collapse", "kl", "Mean KL to N(0, I), 0: collapse"),
            bars("collapse", "variance", "Mean variance of a latent dimension"),
        ],
    }
    if numbers["sensitivity"]:
        title = "Weight of the contrast"
        found["sensitivity"] = [bars("sensitivity", key, title) for key in (METRIC, "ndcg@20")]
    return found


def tables(numbers: Numbers) -> str:
    parts = [f"{numbers['data']}, test, all items ranked; {METRIC} where no metric is named."]
    for by in GROUPED:
        found = {name: groups[by] for name, groups in numbers["groups"].items()}
        parts.append(
            _table(by, {n: {f"{r['group']} ({r['cases']:,})": r[METRIC] for r in g} for n, g in found.items()})
        )
    corrupted = numbers["robustness"]
    parts.append(
        _table("corrupted", {n: {f"{r['kind']} {r['ratio']:g}": r[METRIC] for r in g} for n, g in corrupted.items()})
    )
    last = {"posterior": numbers["collapse"], "weight of the contrast": numbers["sensitivity"]}
    parts += [_table(head, rows) for head, rows in last.items() if rows]
    return "\n\n".join(parts) + "\n"


def _table(head: str, rows: Mapping[str, Mapping[str, float]]) -> str:
    def shown(value: float) -> str:
        return str(value) if isinstance(value, int) else f"{value:.4f}"

    return markdown([{head: name, **{key: shown(value) for key, value in row.items()}} for name, row in rows.items()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("--data", type=Path, default=os.environ.get("FASTCL_DATA"), help="folder of the data (or FASTCL_DATA)")
    option("--states", type=Path, default="runs/studies", help="folder of checkpoints (default: %(default)s)")
    option("--set", default="amazon/Toys_and_Games", help="data set (default: %(default)s)")
    option("--output", type=Path, default=RESULTS / "contrastvae-analyses", metavar="FOLDER")
    option("--threads", type=int, default=torch.get_num_threads(), help="(default: %(default)s)")
    args = parser.parse_args()
    if args.data is None or not Path(args.data).is_dir():
        parser.error(f"--data: expected the folder of the data sets, got {args.data}")
    torch.set_num_threads(args.threads)
    manifest = json.loads((HERE / "studies" / "contrastvae.json").read_text())
    trained = finished(manifest, read(RESULTS / "contrastvae.json"), args.set)
    if RANKED[0] not in trained:
        parser.error(f"--set: expected one with a finished run of {RANKED[0]}, got {args.set}")
    models = {label: load(args.states / trained[label][0]["id"]) for label in RANKED if label in trained}
    split = Interactions.read(Path(args.data) / f"{args.set}.txt.gz", format="sequence").split()
    numbers = {"data": args.set, **ranked(models, split)}
    numbers |= {"collapse": collapse(trained), "sensitivity": sensitivity(trained)}
    folder = args.output / Path(args.set).name
    write_json(folder / "numbers.json", numbers)
    for name, panels in draws(numbers).items():
        write_bytes(folder / f"{name}.png", pictures.png(pictures.side_by_side(*panels)))
    write_text(folder / "tables.md", tables(numbers))
    print(tables(numbers))


if __name__ == "__main__":
    main()
