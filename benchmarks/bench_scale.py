"""What size costs: steps of training from 10^4 items on, by dense tables and by rows, on one process and on two, with
their memory; steps by rows in pages of 4 KiB; CLRec with momentum; saves; validation; the first batch of an epoch;
lists from an index; raw logs to clicks with Spark (which must be installed).

    python -m benchmarks.bench_scale [--only steps,saves,...] [--items 10000,100000] [--processes 1,2]

Each figure is of processes of its own, with one thread each (scale_work.py has the work). "CPU ms" is the CPU time of
the first process; with two processes it includes the waiting for the other one, which gloo spends asleep. A step of two
processes has 512 targets, a step of one 256. Results are merged into benchmarks/results/scale.json by what was asked
for; scale.png shows the steps.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks import scale_work
from benchmarks.common import chosen, hardware, markdown, numbers, write_json
from fastcl.recsys.training import processes

RESULTS = Path(__file__).parent / "results" / "scale.json"
SIZES = "10000,100000,400000,1000000"
KINDS = ("steps", "pages", "momentum", "saves", "validations", "first", "index", "spark")
TABLES = ("dense", "rows")
NAME = {"pages": "steps", "momentum": "steps", "first": "first_batch"}
SPARK = 10_000_000
FIRST = (30_000, 300_000)  # users of 30 clicks each


def questions(kind: str, sizes: list[int], counts: list[int], tables: list[str]) -> list[dict[str, Any]]:
    if kind == "first":
        return [{"users": users, "processes": 1} for users in FIRST]
    if kind == "spark":
        return [{"rows": SPARK, "master": "local[2]", "processes": 1}]
    if kind == "pages":
        return [{"items": size, "table": "rows", "large_pages": False, "processes": 1} for size in sizes]
    if kind == "momentum":
        return [{"items": size, "table": "dense", "momentum": 0.99, "processes": 1} for size in sizes]
    if kind == "index":
        return [{"items": size, "processes": 1} for size in sizes]
    return [
        {"items": size, "table": table, "processes": count} for size in sizes for count in counts for table in tables
    ]


def answer(kind: str, asked: dict[str, Any]) -> dict[str, Any]:
    """What the first of the asked processes found."""
    work = json.dumps([kind, {name: value for name, value in asked.items() if name != "processes"}])
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={asked['processes']}"]
    command = [sys.executable, *launch, "-m", "benchmarks.bench_scale", "--work", work]
    threads = {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | threads, check=False)
    if done.returncode:
        raise RuntimeError(f"{kind} {asked}: {done.stderr[:4000]}")
    return {**asked, **json.loads(done.stdout.splitlines()[-1])}


def work(text: str) -> None:
    kind, asked = json.loads(text)
    torch.set_num_threads(1)
    with processes.processes("cpu"):
        found = getattr(scale_work, NAME.get(kind, kind))(**asked)
        processes.wait()
        if processes.leads():
            print(json.dumps(found), flush=True)


def merged(known: list[dict[str, Any]], row: dict[str, Any], asked: dict[str, Any]) -> list[dict[str, Any]]:
    kept = [other for other in known if not asked.items() <= other.items()]
    return sorted([*kept, row], key=lambda each: [str(each.get("table")), each["processes"], each.get("items", 0)])


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    lines = sorted({(row["table"], row["processes"]) for row in rows})
    for table, count in lines:
        of = sorted((row["items"], row["ms"]) for row in rows if (row["table"], row["processes"]) == (table, count))
        style = ("o-" if count == 1 else "s--") if table == "rows" else ("o:" if count == 1 else "s:")
        label = f"{table}, {count} process{'es' if count > 1 else ''}"
        axes.plot(*zip(*of, strict=True), style, color="C0" if table == "rows" else "C1", label=label)
    axes.set(xscale="log", yscale="log", xlabel="items", ylabel="milliseconds of a step")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="steps")
    parser.add_argument("--items", type=numbers, default=numbers(SIZES))
    parser.add_argument("--processes", type=numbers, default=[1, 2])
    parser.add_argument("--tables", default=",".join(TABLES))
    parser.add_argument("--output", type=Path, default=RESULTS.with_suffix(""), help="path without suffix")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        return work(args.work)
    kinds = chosen(args.only, "--only", KINDS, parser)
    tables = chosen(args.tables, "--tables", TABLES, parser)
    path = args.output.with_suffix(".json")
    results = json.loads(path.read_text()) if path.exists() else {}
    for kind in kinds:
        for each in questions(kind, args.items, args.processes, tables):
            row = answer(kind, each)
            results = {**results, "machine": hardware(), kind: merged(results.get(kind, []), row, each)}
            write_json(path, results)
            print(markdown([row]), flush=True)
    if results.get("steps"):
        plot(results["steps"], path.with_suffix(".png"))
    return None


if __name__ == "__main__":
    main()
