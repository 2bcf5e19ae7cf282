"""Does leaving out log q debias a recommender where exposure was really random? A study on KuaiRand-Pure.

    python -m benchmarks.exposure --data FOLDER --states FOLDER    does the missing runs, and shows what they found

Models train on the clicks of a biased feed and are judged on exposures of later weeks: on videos that were shown at
random, and for contrast on those that the feed chose. Each method is searched with seed 0 on the choosing users; its
best setting by the AUC among the random exposures is trained with further seeds. `--report` compares the chosen
settings on the reporting users, with paired standard errors.

Finished runs are in results/exposure.json and are skipped. `--states` keeps their weights, and what each reporting user
measured, which nothing but `--report` reads.
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.common import machine, write_json
from benchmarks.debias_methods import ImpressionNegatives, trained
from benchmarks.exposure_data import GROUPS, METRICS, Data, group, measured, read, tenths
from benchmarks.quality import revision
from fastcl.recsys.data import Histories, Scorer
from fastcl.recsys.models import MODELS, Model
from fastcl.recsys.reporting.tables import floors
from fastcl.recsys.studies import manifest as studies
from fastcl.recsys.studies.manifest import Run, runs

RESULTS = Path(__file__).parent / "results" / "exposure.json"
FEEDS = ("uniform", "biased")
BASE = "full softmax"  # what the others are compared with
EPOCHS = 1  # of all runs but some of APART
SEEDS = (0, 1, 2)
TEMPERATURES = (0.07, 0.2)
# The encoder of all methods but Multi-CLRec: a small Transformer over windows of 50 clicks, which costs the least for
# each click. Batches are small beside the negatives, so that the queue holds three quarters of them.
ENCODER: dict[str, Any] = {"encoder": "sasrec", "dim": 32, "max_len": 50, "blocks": 1, "heads": 2, "batch": 32}
POOLED: dict[str, Any] = {"dim": 32, "hidden": 32, "max_len": 50, "batch": 1024, "main": 2560, "secondary": 640}
ALPHAS = (0.0, 0.25, 0.5, 0.75, 1.0)
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    BASE: ("clrec", ENCODER | {"objective": "full_softmax"}),
    "sampled softmax": ("clrec", ENCODER | {"objective": "sampled_softmax"}),
    **{f"CLRec, ids, log_q {alpha:g}": ("clrec", ENCODER | {"log_q": alpha}) for alpha in ALPHAS},
    "CLRec, batch": ("clrec", ENCODER | {"negatives_from": "batch", "log_q": 0.0}),
    "CLRec, impressions": ("impressions", ENCODER),
    "IPW, popularity": ("clrec", ENCODER | {"objective": "ipw", "propensity": "popularity"}),
    "CLRec, vectors": ("clrec", ENCODER | {"negatives_from": "vectors", "log_q": 0.0}),
    "IPW, learned": ("clrec", ENCODER | {"objective": "ipw", "propensity": "learned"}),
    "Multi-CLRec by tag": ("multi_clrec", POOLED | {"intents": 8, "category": "tag"}),
}
# One setting changed at a time, at the first temperature and seed 0: (method, options, epochs).
APART: dict[str, tuple[str, dict[str, Any], int]] = {
    "full softmax, two epochs": (BASE, {}, 2),
    "CLRec, two epochs": ("CLRec, ids, log_q 0", {}, 2),
    **{f"CLRec, {n} negatives": ("CLRec, ids, log_q 0", {"negatives": n}, EPOCHS) for n in (1000, 6000)},
}

# The methods whose temperature is searched; to save time the others are trained at the first one alone.
SEARCHED = (BASE, "CLRec, ids, log_q 0", "CLRec, ids, log_q 1")
SHIFTED = (BASE, "CLRec, ids, log_q 0")
SHIFTS = (-1.0, -0.5, -0.25, 0.0, 0.25, 0.5, 1.0)


def entry(label: str, options: Mapping[str, Any], epochs: int, seed: int) -> dict[str, Any]:
    model, settings = METHODS[label]
    plan = {"epochs": epochs}
    return {"label": label, "data": "kuairand", "model": model, "options": settings | dict(options), "plan": plan,
            "seeds": [seed]}  # fmt: skip


def search() -> list[dict[str, Any]]:
    """The runs with seed 0 that settings are chosen by."""
    return [
        entry(label, {"temperature": temperature}, EPOCHS, 0)
        for temperature in TEMPERATURES
        for label in METHODS
        if temperature == TEMPERATURES[0] or label in SEARCHED
    ]


def apart() -> list[dict[str, Any]]:
    return [entry(of, options | {"temperature": TEMPERATURES[0]}, n, 0) for of, options, n in APART.values()]


def best(found: Sequence[Run]) -> dict[str, dict[str, Any]]:
    """Method -> its setting with the best AUC among the random exposures of the choosing users, with seed 0."""
    grid = {run["id"] for run in runs({"runs": search()})}
    chosen: dict[str, Run] = {}
    for run in found:
        kept = chosen.get(run["label"])
        if run["id"] in grid and (kept is None or auc_of(run) > auc_of(kept)):
            chosen[run["label"]] = run
    return {label: {"temperature": chosen[label]["options"]["temperature"]} for label in METHODS if label in chosen}


def auc_of(run: Run) -> float:
    return float(run["choosing"]["uniform"]["AUC"])


def further(found: Sequence[Run]) -> list[dict[str, Any]]:
    """The runs of the chosen settings with all seeds."""
    chosen = best(found)
    return [entry(label, chosen[label], EPOCHS, seed) for seed in SEEDS for label in chosen]


def made(run: Run, data: Data) -> Model:
    options = {name: tuple(x) if isinstance(x, list) else x for name, x in run["options"].items()}
    if run["model"] == "impressions":
        return ImpressionNegatives(data.split.items, data.impressions, seed=run["seed"], **options)
    return MODELS[run["model"]](data.split.items, seed=run["seed"], **options)


def loaded(run: Run, data: Data, states: Path) -> Model:
    """The trained model of a finished run."""
    model = made(run, data)
    model.load_state_dict(torch.load(states / run["id"] / "weights.pt"))
    return model.eval()


def kept(run: Run, data: Data, states: Path, feed: str, name: str) -> np.ndarray:
    """`by_user` of a finished run, measured once and then read from a file beside its weights."""
    path = states / run["id"] / f"{feed}-{name}.npy"
    if not path.is_file():
        np.save(path, by_user(loaded(run, data, states), data, feed, name))
    return np.load(path)


def by_user(scorer: Scorer, data: Data, feed: str, name: str) -> np.ndarray:
    """[users, METRICS] of a trained model or a floor."""

    def score(histories: Histories) -> np.ndarray:
        with torch.inference_mode():
            return scorer.scores(histories).numpy()

    return measured(score, data, feed, name)


def do(run: Run, folder: Path, data: Data) -> dict[str, Any]:
    """Trains a run, keeps its weights in `folder` and measures it on the choosing users."""
    started = time.process_time()
    model = trained(made(run, data), data.split.train, run["plan"]["epochs"], run["seed"])
    spent = time.process_time() - started
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), folder / "weights.pt")
    choosing = {}
    for feed in FEEDS:
        means = np.nanmean(by_user(model, data, feed, "choosing"), 0)
        np.save(folder / f"{feed}-reporting.npy", by_user(model, data, feed, "reporting"))  # nothing looks at it yet
        choosing[feed] = dict(zip(METRICS, means.tolist(), strict=True))
    print(f"  {spent:.0f} s of CPU, AUC and NDCG@5 among random exposures {auc_of({'choosing': choosing}):.4f}"
          f" {choosing['uniform']['NDCG@5']:.4f}", flush=True)  # fmt: skip
    return {"choosing": choosing, "cpu_s": round(spent, 1), "revision": revision(), "machine": machine()}


def report(found: Sequence[Run], data: Data, states: Path) -> list[dict[str, Any]]:
    """One row for each method and feed: the means over the reporting users, each user's mean over the seeds; and the
    differences from BASE with their standard errors over the users, who are the same for all methods.
    """
    finished = {run["id"] for run in found}
    rows = []
    for feed in FEEDS:
        values: dict[str, list[np.ndarray]] = {}
        for label, floor in floors(data.split, "mask").items():
            values[label] = [by_user(floor, data, feed, "reporting")]
        for run in runs({"runs": further(found)}):
            if run["id"] in finished:
                values.setdefault(run["label"], []).append(kept(run, data, states, feed, "reporting"))
        base = np.mean(values[BASE], 0)
        for label, seeds in values.items():
            of_seeds = np.array(seeds)
            row = {"feed": feed, "method": label, "seeds": len(of_seeds), "settings": best(found).get(label, {})}
            difference = of_seeds.mean(0) - base
            for nth, metric in enumerate(METRICS):
                column = difference[:, nth][~np.isnan(difference[:, nth])]
                row[metric] = {
                    "mean": float(np.nanmean(of_seeds[:, :, nth])),
                    "of seeds": np.nanmean(of_seeds[:, :, nth], 1).tolist(),
                    "difference": float(column.mean()),
                    "standard error": float(column.std(ddof=1) / len(column) ** 0.5),
                }
            rows.append(row)
    return rows


def shifted(found: Sequence[Run], data: Data, states: Path) -> list[dict[str, Any]]:
    """The choosing users' AUC and NDCG@5 if a multiple of the log share of the train clicks is added to the scores of
    a trained model, whose seed is 0. What serving can undo, training need not have done.
    """
    log_share = np.log1p(data.split.counts)
    rows = []
    for run in runs({"runs": [one for one in further(found) if one["label"] in SHIFTED and one["seeds"] == [0]]}):
        model = loaded(run, data, states)
        for weight in SHIFTS:
            row: dict[str, Any] = {"method": run["label"], "weight": weight}
            for feed in FEEDS:
                values = np.nanmean(by_user(Shifted(model, weight * log_share), data, feed, "choosing"), 0)
                row[feed] = dict(zip(METRICS, values.tolist(), strict=True))
            rows.append(row)
    return rows


class Shifted(NamedTuple):
    """A scorer whose scores have a constant of each item added."""

    scorer: Scorer
    by: np.ndarray  # [I+1]

    def scores(self, histories: Histories) -> torch.Tensor:
        return self.scorer.scores(histories) + torch.from_numpy(self.by).float()


def told(found: Sequence[Run], data: Data, states: Path) -> dict[str, Any]:
    """What the results file has beside the runs."""
    users = {feed: {name: len(group(data, feed, name)) for name in GROUPS} for feed in FEEDS}
    moved = shifted(found, data, states)
    return {"users": users, "tenths": tenths(data), "shifted": moved, "reported": report(found, data, states)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    option = parser.add_argument
    option("--data", type=Path, required=True, help="the folder of KuaiRand-Pure's files")
    option("--states", type=Path, default=Path("runs/exposure"), help="folder of weights (default: %(default)s)")
    option("--output", type=Path, default=RESULTS, help="file of the finished runs (default: %(default)s)")
    option("--only", nargs="+", default=[""], metavar="TEXT", help="only runs whose title contains TEXT")
    option("--runs", type=int, default=10**6, help="do at most so many runs (default: all that are missing)")
    option("--report", action="store_true", help="measure the chosen settings on the reporting users")
    args = parser.parse_args()
    torch.set_num_threads(1)
    data = read(args.data)
    for stage in (lambda found: search(), further, lambda found: apart()):
        finished = studies.read(args.output)
        for one in stage(finished):
            (run,) = runs({"runs": [one]})
            known = run["id"] in {each["id"] for each in finished}
            if args.runs and not known and any(text in studies.title(run) for text in args.only):
                measure = partial(do, data=data)
                studies.work({"runs": [one]}, args.output, args.states, [""], measure, partial(print, flush=True))
                args.runs -= 1
    if args.report:
        finished = studies.read(args.output)
        write_json(args.output, {"runs": finished, **told(finished, data, args.states)})


if __name__ == "__main__":
    main()
