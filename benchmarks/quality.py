"""Studies of the models' quality: works through a manifest of runs and shows the results beside the paper's.

    python -m benchmarks.quality --paper contrastvae                      shows the tables and lists missing runs
    python -m benchmarks.quality --paper contrastvae --run --data FOLDER  does the missing runs; may be stopped any time

Finished runs are skipped, an unfinished run continues from its newest epoch. The manifest is studies/PAPER.json, the
results are in results/PAPER.json. Manifests, results and tables are those of `fastcl study` (fastcl.recsys.studies);
what differs is how one run is trained and measured, by the papers' protocols, which study.py does.

Two settings of the environment make long studies faster. With
    MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=17179869184 MALLOC_TOP_PAD_=268435456
glibc keeps the memory of a step for the next one instead of returning it: a step by the authors' rules of ContrastVAE
took 18% less time on one machine. On AMD processors MKL, which makes torch's float32 products, uses AVX2 even if there
is AVX-512. With a preloaded library that makes MKL take the processor for one of Intel's, such a step took 40% less
time on one machine (a product alone 57%). Results name preloaded libraries:
    echo 'int mkl_serv_intel_cpu_true(void) { return 1; }' | gcc -x c -shared -fPIC -o libmkl-avx512.so -
    LD_PRELOAD=$PWD/libmkl-avx512.so python -m benchmarks.quality ...
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.clicks import study as clicks
from benchmarks.common import machine
from benchmarks.sources import SPLITS
from benchmarks.study import Plan, measure
from fastcl.recsys.reporting import pictures
from fastcl.recsys.showing import number
from fastcl.recsys.studies import manifest as studies
from fastcl.recsys.studies.manifest import Run, columns_of, read, runs
from fastcl.recsys.studies.summary import Study
from fastcl.recsys.writing import write_bytes

HERE = Path(__file__).parent


def work(manifest: dict[str, Any], results: Path, data: Path, states: Path, only: Sequence[str]) -> None:
    """Does the missing runs whose title contains a text of `only`, by the protocols of the papers. Results are written
    after each run.
    """

    def measured(run: Run, folder: Path) -> dict[str, Any]:
        protocol = run.get("measured by", manifest["measured by"])
        found = MEASURES.get(protocol, partial(ranked, protocol=protocol))(run, data, folder)
        test = found["test"]
        shown = (f"{name} {number(name, test[name])}" for name in columns_of(manifest, run["data"]) if name in test)
        print("  test:", ", ".join(shown), flush=True)
        return found | {"revision": revision(), "machine": machine()}

    studies.work(manifest, results, states, only, measured, partial(print, flush=True))


def ranked(run: Run, data: Path, folder: Path, protocol: str) -> dict[str, Any]:
    """Trains a recommender or takes a floor, and measures how it ranks."""
    parts = SPLITS[run.get("split", "last-one")](run["data"], data)
    plan = None if run["plan"] is None else Plan(**run["plan"])
    return measure(run["model"], run["options"] or {}, plan, run["seed"], parts, folder, protocol)


# Protocols of studies that rank nothing; all others are those of protocols.py.
MEASURES: dict[str, Callable[[Run, Path, Path], dict[str, Any]]] = {"clicks": clicks.measure}


def revision() -> str:
    """The short commit id, with "-dirty" if fastcl/ or csrc/ differ from it."""
    git = ["git", "-C", str(HERE.parent)]
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    changed = subprocess.run([*git, "status", "--porcelain", "--", "fastcl", "csrc"], capture_output=True, text=True)
    return (commit or "unknown") + ("-dirty" if changed.stdout.strip() else "")


def drawn(manifest: dict[str, Any], done: list[dict[str, Any]]) -> bytes | None:
    """A picture of the first finished seed of every row: CLRec's figure 4, and recall against diversity. None if no run
    measured these.
    """
    found = {run["id"]: run for run in done}
    panels: list[pictures.Draw] = []
    for data in manifest["paper"]:
        rows: dict[str, dict[str, Any]] = {}
        for run in runs(manifest):
            if run["data"] == data and run["id"] in found:
                rows.setdefault(run["label"], found[run["id"]])
        clicks = [run["train clicks"] for run in rows.values() if "train clicks" in run]
        if clicks:
            shares = {"train clicks": clicks[0]} | {label: run["impressions"] for label, run in rows.items()}
            at = {label: (run["test"]["recall@10"], run["test"]["diversity@10"]) for label, run in rows.items()}
            panels.append(partial(pictures.impressions, shares=shares, title=f"{data}: top 10 of all test users"))
            panels.append(partial(pictures.points, values=at, title=data, x="recall@10", y="diversity@10"))
    return pictures.png(pictures.side_by_side(*panels)) if panels else None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    option = parser.add_argument
    option("--paper", required=True, choices=sorted(path.stem for path in (HERE / "studies").glob("*.json")))
    option("--run", action="store_true", help="do the missing runs")
    option(
        "--only",
        nargs="+",
        default=[""],
        metavar="TEXT",
        help="only runs whose title contains TEXT; titles are shown in the list of missing runs",
    )
    option("--data", type=Path, default=os.environ.get("FASTCL_DATA"), help="folder of the data (or FASTCL_DATA)")
    option("--states", type=Path, default="runs/studies", help="folder of checkpoints (default: %(default)s)")
    option("--draw", type=Path, metavar="PNG", help="also draw which items the lists show, if that was measured")
    option("--threads", type=int, default=torch.get_num_threads(), help="(default: %(default)s)")
    args = parser.parse_args()
    manifest = json.loads((HERE / "studies" / f"{args.paper}.json").read_text())
    results = HERE / "results" / f"{args.paper}.json"
    if args.run:
        if args.data is None or not Path(args.data).is_dir():
            sys.exit(f"--data: expected the folder of the data sets, got {args.data}")
        torch.set_num_threads(args.threads)
        try:
            work(manifest, results, Path(args.data), args.states, args.only)
        except ValueError as error:
            sys.exit(f"--{error}" if str(error).startswith("only: ") else str(error))
    print(Study(manifest, read(results)).to_markdown())
    if args.draw and (picture := drawn(manifest, read(results))):
        write_bytes(args.draw, picture)


if __name__ == "__main__":
    main()
