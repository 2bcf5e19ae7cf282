"""Quality of a warm start after one epoch against training anew, by weeks.

    python -m benchmarks.bench_weeks --data FOLDER [--states build/weeks]

FOLDER holds the Amazon data (amazon/Toys_and_Games). The log is cut at the begin of each of its last weeks. A model
that trained on all clicks before a cut is tested on the clicks of the week behind it (`fastcl.recsys.later`). Compared
are: a training anew of all epochs at each cut; one epoch anew; one epoch that begins with the model of the cut before
(a chain of such epochs behind one whole training); and the whole training of the first cut, left as it is. The cases of
a week are the same for all of them. Writes results/weeks.json after each week; "measured" counts those that it holds,
and the program goes on behind them. --states keeps each training, so that none is repeated.
"""

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import RESULTS, hardware, write_json
from benchmarks.sources import timed
from fastcl.recsys import (
    Cases,
    CLRec,
    Histories,
    Interactions,
    Items,
    Later,
    Model,
    Padded,
    Popularity,
    Scorer,
    Split,
    evaluate,
    fit,
    later,
    load,
    save,
)
from fastcl.recsys.models.carrying import carry
from fastcl.recsys.training.checkpoint import read_config

NAME = "amazon/Toys_and_Games"
WEEK = 7 * 86_400
WEEKS, EPOCHS = 3, 4
ANEW, ONE, WARM, LEFT, POPULAR = "anew", "anew, 1 epoch", "warm start, 1 epoch", "left as it is", "popularity"
METRICS = ("recall@10", "ndcg@10")


def between(data: Interactions, begin: float, end: float) -> Interactions:
    """The clicks from `begin` to before `end`, with the users and items that have some. Items are in the order of their
    first clicks, so that the table of an earlier cut begins that of a later one.
    """
    assert data.log.time is not None
    first = np.full(len(data.items) + 1, np.inf)
    np.minimum.at(first, data.log.item, data.log.time)
    inside = (data.log.time >= begin) & (data.log.time < end)
    users, row = np.unique(np.repeat(np.arange(len(data.log)), data.log.lengths)[inside], return_inverse=True)
    found = np.unique(data.log.item[inside])
    order = found[np.lexsort((found, first[found]))]
    number = np.zeros(len(data.items) + 1, np.int64)
    number[order] = np.arange(1, len(order) + 1)
    offsets = np.append(0, np.bincount(row, minlength=len(users)).cumsum()).astype(np.int64)
    codes = np.append(0, order)
    features = {name: replace(each, codes=each.codes[codes]) for name, each in data.items.features.items()}
    items = Items(tuple(data.items.ids[n - 1] for n in order.tolist()), features=features)
    log = Histories(offsets, number[data.log.item[inside]], data.log.time[inside])
    return Interactions(items, tuple(data.users[n] for n in users.tolist()), log)


def tested(scorer: Any, week: Later, cases: Cases) -> dict[str, Any]:
    table = week.split.items
    whole: Scorer = scorer if len(table) == len(scorer.items) else Padded(scorer, table)
    measured = evaluate(whole, cases, metrics=METRICS)
    return {**{name: measured[name] for name in METRICS}, "cases": len(cases)}


def known_to(items: Items, cases: Cases) -> Cases:
    """The cases with a click on one of the items before them."""
    known = [bool((cases.history.take(np.array([n])).item <= len(items)).any()) for n in range(len(cases))]
    return cases.take(np.flatnonzero(known))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--weeks", type=int, default=WEEKS)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("-o", "--out", type=Path, default=RESULTS / "weeks.json")
    parser.add_argument("--states", type=Path, default=Path("build/weeks"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    data = timed(NAME, args.data)
    assert data.log.time is not None
    end = float(data.log.time.max()) + 1
    settings = {"weeks": args.weeks, "epochs": args.epochs, "model": "clrec", "seed": 0, "data": NAME}
    earlier = json.loads(args.out.read_text()) if args.out.exists() else {"settings": {}}
    measured = earlier["settings"].pop("measured", 0)
    if earlier["settings"] != settings:
        earlier, measured = {"rows": []}, 0
    rows: list[dict[str, Any]] = earlier["rows"]
    left: Model | None = None
    chain: Model | None = None

    def train(how: str, split: Split, epochs: int, start: Model | None, seed: int) -> tuple[Model, float]:
        folder = args.states / f"{how} {seed}"
        if (folder / "config.json").exists():
            return load(folder), read_config(folder)["cpu_s"]
        model = CLRec(split.items, seed=seed, time_unit="second")
        if start is not None:
            carry(model, start)
        before = time.process_time()
        fit(model, split, epochs=epochs, seed=seed, progress=False)
        seconds = time.process_time() - before
        save(model, folder, {"cpu_s": seconds})
        return model, seconds

    for nth in range(args.weeks):
        cut = end - (args.weeks - nth) * WEEK
        before, week = between(data, 0, cut), between(data, cut, cut + WEEK)
        split = before.split("none")
        if nth < measured:  # only the models that later weeks need
            how, epochs = (ANEW, args.epochs) if chain is None else (WARM, 1)
            chain, _ = train(how, split, epochs, chain, nth)
            left = chain if left is None else left
            continue
        anew, seconds = train(ANEW, split, args.epochs, None, nth)
        found: dict[str, tuple[Any, float]] = {ANEW: (anew, seconds)}
        if left is None or chain is None:
            left = chain = anew
        else:
            found[ONE] = train(ONE, split, 1, None, nth)
            chain, seconds = train(WARM, split, 1, chain, nth)
            found[WARM] = (chain, seconds)
            found[LEFT] = (left, 0.0)
        found[POPULAR] = (Popularity(split.counts, split.items), 0.0)
        behind = later(split, before, week)
        cases = known_to(left.items, behind.split.test)
        for name, (scorer, cpu) in found.items():
            rows.append({"week": nth + 1, "how": name, "cpu_s": cpu, **tested(scorer, behind, cases)})
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        write_json(args.out, {"hardware": hardware(), "settings": {**settings, "measured": nth + 1}, "rows": rows})


if __name__ == "__main__":
    main()
