"""Compares the scores that the runs of the study of clicks left behind, row by row, with those of CLRec.

    python -m benchmarks.clicks.paired --data FOLDER --states FOLDER

`--states` is that of quality.py, whose runs wrote the scores. Writes results/clicks-paired.json: for each data set, way
of scoring and group of rows the AUC of a method less that of CLRec, over the seeds that both have, with the standard
error over the rows. Rows of data sets whose scores are not in the folder stay as they are. Trains nothing.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.clicks import rows
from benchmarks.clicks.measures import difference
from benchmarks.common import RESULTS, write_json
from fastcl.recsys.studies.manifest import Manifest, runs

MANIFEST = Path(__file__).parents[1] / "studies" / "clicks.json"
BASE, WAYS = "CLRec", ("score", "share", "popular share")


def compared(manifest: Manifest, data: Path, states: Path) -> Iterator[dict[str, Any]]:
    found: dict[tuple[str, str, str], dict[int, np.ndarray]] = {}
    for run in runs(manifest):
        for way in WAYS:
            path = states / run["id"] / f"{way}.npy"
            if path.is_file():
                found.setdefault((run["data"], way, run["label"]), {})[run["seed"]] = np.load(path)
    labels = {name: rows.read(name, data) for name in dict.fromkeys(name for name, _, _ in found)}
    for (name, way, label), mine in found.items():
        base = found.get((name, way, BASE), {})
        seeds = sorted(mine.keys() & base.keys())
        if label == BASE or not seeds:
            continue
        one, other = (np.stack([of[seed] for seed in seeds]) for of in (mine, base))
        for group, of in labels[name].groups.items():
            mean, error = difference(one[:, of], other[:, of], labels[name].test.label[of])
            row = {
                "data": name,
                "way": way,
                "method": label,
                "group": group,
                "seeds": len(seeds),
                "rows": int(of.sum()),
            }
            yield row | {"difference": mean, "standard error": error}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    option = parser.add_argument
    option("--data", type=Path, required=True, help="folder of the data")
    option("--states", type=Path, default=Path("runs/studies"), help="folder of the runs (default: %(default)s)")
    option("--output", type=Path, default=RESULTS / "clicks-paired.json", help="(default: %(default)s)")
    args = parser.parse_args()
    found = list(compared(json.loads(MANIFEST.read_text()), args.data, args.states))
    kept = json.loads(args.output.read_text())["rows"] if args.output.is_file() else []
    anew = {row["data"] for row in found}
    write_json(args.output, {"rows": [row for row in kept if row["data"] not in anew] + found})
    for row in found:
        print(*row.values())


if __name__ == "__main__":
    main()
