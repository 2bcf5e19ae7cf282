"""Items without clicks: recall of held-out items by a model that encodes features, against popularity and chance.

    python -m benchmarks.bench_cold --data FOLDER

FOLDER holds the Amazon data (amazon/Toys_and_Games with its attributes); the purchases are bundled. A tenth of the
items is held out as a whole (`split("items")`); CLRec trains without their clicks, and `with_items` encodes them by
their features. Each test target is ranked among the held-out items alone, which is the question of a launch, and among
all items. Beside the models stand chance (random scores) and the popularity of the features: the mean clicks of the
trained items that share a feature value. "no ids": the ids of new items add nothing, instead of the mean of the ids of
items that share a feature value. The recall of the validation cases, whose items are trained, shows what the
training with ids left out (`id_dropout`) costs there. Writes results/cold.json after each row, and goes on behind the
rows that the file has.
"""

import argparse
import gzip
import json
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import RESULTS, hardware, write_json
from benchmarks.sources import timed
from fastcl.recsys import CLRec, Histories, Interactions, Scorer, bundled, evaluate, fit, with_items
from fastcl.recsys.models.carrying import Among, of_features

TOYS, PURCHASES = "amazon/Toys_and_Games", "bundled:purchases"
SETS = {PURCHASES: "keep", TOYS: "mask"}  # how items of the history are treated
SHARES = (0.0, 0.5)
Row = dict[str, Any]
EPOCHS = 5


class Chance:
    """A random score for each item and history."""

    def __init__(self, items: int) -> None:
        self.items, self.generator = items, torch.Generator().manual_seed(0)

    def scores(self, histories: Histories) -> torch.Tensor:
        return torch.rand(len(histories), self.items + 1, generator=self.generator)


class Constant:
    """The same scores for every history."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def scores(self, histories: Histories) -> torch.Tensor:
        return self.values.repeat(len(histories), 1)


def read(name: str, folder: Path) -> Interactions:
    if name == PURCHASES:
        return bundled("purchases")
    data = timed(name, folder)
    with gzip.open(folder / f"{name}.item2attributes.json.gz", "rt") as file:
        attributes = json.load(file)
    cells = [list(map(str, attributes.get(item, []))) for item in data.items.ids]
    return data.with_features({"item": list(data.items.ids), "attributes": cells})


def measure(name: str, data: Interactions, seen: str, done: Collection[str], keep: Callable[[Row], None]) -> None:
    """Gives `keep` each row but those that are done."""
    split = data.split("items", ties="input", seed=0)
    cold = np.append(False, split.counts[1:] == 0)
    counts = torch.from_numpy(split.counts).float()
    which = np.flatnonzero(cold)
    counts[which] = of_features(counts[1:, None], split.items, split.items, which, ~cold)[0][:, 0]
    scorers: dict[str, tuple[Scorer, float]] = {
        "chance": (Chance(len(split.items)), 0.0),
        "popularity of the features": (Constant(counts), 0.0),
    }

    def test(how: str, scorer: Scorer, trained: Scorer | None, cpu: float) -> None:
        row: Row = {
            "data": name,
            "how": how,
            "cpu_s": cpu,
            "items": int(cold.sum()),
            "cases": len(split.test),
        }
        row["recall@10 among new"] = evaluate(Among(scorer, cold), split.test, metrics="recall@10")["recall@10"]
        row["recall@10 among all"] = evaluate(scorer, split.test, metrics="recall@10", seen=seen)["recall@10"]
        if trained is not None:
            row["recall@10 of trained"] = evaluate(trained, split.valid, metrics="recall@10", seen=seen)["recall@10"]
        keep(row)
        print(json.dumps(row), file=sys.stderr, flush=True)

    for how, (scorer, cpu) in scorers.items():
        if how not in done:
            test(how, scorer, None, cpu)
    for share in SHARES:
        how = f"clrec, id_dropout {share:g}"
        if {how, f"{how}, no ids"} <= set(done):
            continue
        model = CLRec(split.items, seed=0, id_dropout=share)
        before = time.process_time()
        fit(model, split, epochs=EPOCHS, seen=seen, progress=False)
        cpu = time.process_time() - before
        encoded: Any = with_items(model, split.items, split.counts)
        test(how, encoded, model, cpu)
        with torch.no_grad():
            encoded.item.id.weight[torch.from_numpy(cold)] = 0.0
        test(f"{how}, no ids", encoded, None, 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("-o", "--out", type=Path, default=RESULTS / "cold.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: dict[tuple[str, str], Row] = {}
    for row in json.loads(args.out.read_text())["rows"] if args.out.exists() else []:
        rows[row["data"], row["how"]] = row

    def keep(row: Row) -> None:
        rows[row["data"], row["how"]] = row
        report = {"hardware": hardware(), "settings": {"epochs": EPOCHS, "seed": 0}, "rows": list(rows.values())}
        write_json(args.out, report)

    for name, seen in SETS.items():
        measure(name, read(name, args.data), seen, [how for data, how in rows if data == name], keep)


if __name__ == "__main__":
    main()
