"""Studies of the models' quality: works through a manifest of runs and shows the results beside the paper's.

    python -m benchmarks.quality --paper contrastvae                      shows the tables and lists missing runs
    python -m benchmarks.quality --paper contrastvae --run --data FOLDER  does the missing runs; may be stopped any time

Finished runs are skipped, an unfinished run continues from its newest epoch. The manifest is studies/PAPER.json, the
results are in results/PAPER.json. One run is trained and measured by study.py.

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
import hashlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import machine, write_json
from benchmarks.sources import SPLITS
from benchmarks.study import Plan, measure
from fastcl.recsys.reporting import pictures
from fastcl.recsys.reporting.tables import number
from fastcl.recsys.writing import write_bytes

HERE = Path(__file__).parent


def runs(manifest: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One run for each entry and seed of the manifest. Its id changes with everything that can change the result."""
    for entry in manifest["runs"]:
        for seed in entry.get("seeds", [0]):
            run = {key: entry.get(key) for key in ("label", "data", "model", "options", "plan")} | {"seed": seed}
            run |= {key: entry[key] for key in ("split", "measured by") if key in entry}  # override the study's
            content = json.dumps({key: run[key] for key in run if key != "label"}, sort_keys=True)
            yield run | {"id": hashlib.sha256(content.encode()).hexdigest()[:12]}


def work(manifest: dict[str, Any], results: Path, data: Path, states: Path, only: Sequence[str]) -> None:
    """Does the missing runs whose title contains a text of `only`, in the order of these texts and of the manifest.
    Results are written after each run.
    """
    for run in (run for text in only for run in runs(manifest) if text in title(run)):
        if any(found["id"] == run["id"] for found in read(results)):
            continue
        print(f"{title(run)} ({run['id']})", flush=True)
        parts = SPLITS[run.get("split", "last-one")](run["data"], data)
        plan = None if run["plan"] is None else Plan(**run["plan"])
        found = measure(
            run["model"],
            run["options"] or {},
            plan,
            run["seed"],
            parts,
            states / run["id"],
            run.get("measured by", manifest["measured by"]),
        )
        facts = {"revision": revision(), "machine": machine()}
        write_json(results, {"runs": [*read(results), run | found | facts]})
        test, columns = found["test"], columns_of(manifest, run["data"])
        print("  test:", ", ".join(f"{name} {number(name, test[name])}" for name in columns), flush=True)


def columns_of(manifest: dict[str, Any], data: str) -> list[str]:
    return manifest.get("columns of", {}).get(data, manifest["columns"])


def title(run: dict[str, Any]) -> str:
    return f"{run['label']}, {run['data']}, seed {run['seed']}"


def read(results: Path) -> list[dict[str, Any]]:
    return json.loads(results.read_text())["runs"] if results.is_file() else []


def revision() -> str:
    """The short commit id, with "-dirty" if fastcl/ or csrc/ differ from it."""
    git = ["git", "-C", str(HERE.parent)]
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    changed = subprocess.run([*git, "status", "--porcelain", "--", "fastcl", "csrc"], capture_output=True, text=True)
    return (commit or "unknown") + ("-dirty" if changed.stdout.strip() else "")


def table(manifest: dict[str, Any], done: list[dict[str, Any]]) -> str:
    """The paper's figures and ours on test, as Markdown: mean (standard deviation) over the finished seeds."""
    found = {run["id"]: run for run in done}
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run in runs(manifest):
        groups.setdefault((run["data"], run["label"]), []).append(run)
    lines = []
    for data, paper in manifest["paper"].items():
        columns = columns_of(manifest, data)
        best = {name: max((row[name] for row in paper.values() if name in row), default=None) for name in columns}
        head = ["", "seeds", *columns]
        lines += ["", f"**{data}**", "", f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
        for name, row in paper.items():
            cells = [number(column, row[column]) if column in row else "" for column in columns]
            lines.append(f"| paper: {name} | | " + " | ".join(cells) + " |")
        for (where, label), group in groups.items():
            if where != data:
                continue
            tests = [found[run["id"]]["test"] for run in group if run["id"] in found]
            cells = [cell(column, [test.get(column) for test in tests], best[column]) for column in columns]
            ran = str(len(tests)) if len(tests) == len(group) else f"{len(tests)} of {len(group)}"
            lines.append(f"| {label} | {ran} | " + " | ".join(cells) + " |")
        lines += ["", manifest["notes"][data]] if data in manifest.get("notes", {}) else []
    missing = [title(run) for run in runs(manifest) if run["id"] not in found]
    lines += ["", "**Bold**: above all of the published rows.", "", f"Runs missing: {len(missing)}."]
    return "\n".join([*lines, *(f"- {name}" for name in missing)]).strip()


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


def cell(column: str, found: list[float | None], least: float | None) -> str:
    """Empty where the runs do not have the column."""
    values = [value for value in found if value is not None]
    if not values:
        return "" if found else "missing"
    mean = statistics.mean(values)
    text = number(column, mean) if least is None or mean <= least else f"**{number(column, mean)}**"
    return f"{text} ({number(column, statistics.stdev(values))})" if len(values) > 1 else text


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
        work(manifest, results, Path(args.data), args.states, args.only)
    print(table(manifest, read(results)))
    if args.draw and (picture := drawn(manifest, read(results))):
        write_bytes(args.draw, picture)


if __name__ == "__main__":
    main()
