"""How well users who were not in training are served, whom a model with users folds in from the items of the history.

    python -m benchmarks.strangers RUN --data FOLDER --set gowalla

RUN is the folder of a finished run of the study mineplus (a folder in runs/studies). Its test users are ranked
for twice: with the vectors that training gave them, and as strangers. Writes benchmarks/results/strangers.json.
"""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import RESULTS, machine, write_json
from benchmarks.protocols import several
from benchmarks.quality import HERE, revision
from benchmarks.sources import given
from fastcl.recsys import load
from fastcl.recsys.data import Cases, Scorer
from fastcl.recsys.studies.manifest import runs

FILE = RESULTS / "strangers.json"


def measured(scorer: Scorer, cases: Cases) -> dict[str, dict[str, float]]:
    """Recall@20 and NDCG@20 of the cases with their users, and without."""
    bare = dataclasses.replace(cases, history=cases.history.named(cases.history.items, None))
    return {"known": several(scorer).validate(scorer, cases), "folded in": several(scorer).validate(scorer, bare)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--set", required=True, help="name of the data set")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    manifest = json.loads((HERE / "studies" / "mineplus.json").read_text())
    run = next(run for run in runs(manifest) if run["id"] == args.run.name)
    row: dict[str, Any] = {"id": run["id"], "label": run["label"], "data": args.set, "seed": run["seed"]}
    row |= measured(load(args.run), given(args.set, args.data).split.test)
    row |= {"revision": revision(), "machine": machine()}
    before = json.loads(FILE.read_text())["rows"] if FILE.is_file() else []
    write_json(FILE, {"rows": [*(other for other in before if other["id"] != row["id"]), row]})
    print(json.dumps(row, indent=1))


if __name__ == "__main__":
    main()
