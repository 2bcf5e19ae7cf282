"""Speed-up by threads, and the cost of one similarity from few to many columns.

    python -m benchmarks.bench_scaling [--only moco,batch] [--threads 1,2] [--columns 1000,10000,100000,1000000]
        [--repeats 7] [--output benchmarks/results/scaling]

Threads: the time on one thread divided by the time on several, at the large shapes of cases.py. The target for two
threads is at least 1.9. Columns: nanoseconds per element of the N x M matrix, for 256 queries of 64 features against
frozen and learning keys, on the first of --threads. The most expensive M should cost at most 1.4 times the cheapest.
The bare matrix products show how much of the difference any program would see on this machine's caches. With --output
PATH, PATH.json, PATH.md (the tables) and PATH.png (a plot) are written.
"""

import argparse
import functools
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.bench_contrast import bare_products
from benchmarks.cases import CASES, Case, fused, inputs
from benchmarks.common import (
    all_thread_counts,
    alternate,
    chosen,
    hardware,
    markdown,
    median_ratio,
    numbers,
    publish,
    report,
    step,
)

LARGE = ("moco", "batch", "ntxent", "beauty", "items", "wide")
AT_LEAST = {2: 1.9}  # threads -> speedup
FLAT = 1.4
N, D = 256, 64
COLUMNS = "1000,3000,10000,30000,100000,300000,1000000"
PASSES = {"forward": False, "forward+backward": True}
KINDS = {"frozen": "frozen", "shared": "learning"}


def timed(case: Case, backward: bool) -> Callable[[], None]:
    x = inputs(case)
    return step(functools.partial(fused, case, x), [t for t in x[:3] if t.requires_grad], backward)


def on_threads(run: Callable[[], None], threads: int) -> Callable[[], None]:
    def call() -> None:
        torch.set_num_threads(threads)
        run()

    return call


def speedups(names: Sequence[str], threads: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    rows = []
    for name in names:
        case = CASES[name]
        for which, backward in PASSES.items():
            run = timed(case, backward)
            seconds = alternate({str(count): on_threads(run, count) for count in threads}, repeats)
            found = {count: median_ratio(seconds, str(threads[0]), str(count)) for count in threads}
            missed = [count for count, least in AT_LEAST.items() if found.get(count, least) < least]
            rows.append(
                {
                    "case": name,
                    "N x M x D": f"{case.n:,} x {case.m:,} x {case.d:,}",
                    "pass": which,
                    **{f"{count} threads": ratio for count, ratio in found.items()},
                    "target": None if not AT_LEAST.keys() & found.keys() else "not met" if missed else "met",
                }
            )
            print(".", end="", flush=True)
    return rows


def element_costs(columns: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """Nanoseconds per element for each M: a row for each kind of keys and pass, of fastcl and of the bare products."""
    rows = []
    for kind, keys in KINDS.items():
        for which, backward in PASSES.items():
            cases = {m: Case(N, m, D, kind, keys) for m in columns}
            runs = {f"fastcl {m}": timed(case, backward) for m, case in cases.items()}
            runs |= {f"products {m}": bare_products(case, inputs(case), backward) for m, case in cases.items()}
            seconds = alternate(runs, repeats)
            for name in ("fastcl", "products"):
                ns = {m: statistics.median(seconds[f"{name} {m}"]) * 1e9 / (N * m) for m in columns}
                spread = max(ns.values()) / min(ns.values())
                target = ("met" if spread <= FLAT else "not met") if name == "fastcl" else None
                costs = {f"M = {m:,}": cost for m, cost in ns.items()}
                rows.append({"keys": keys, "pass": which, "of": name, **costs, "spread": spread, "target": target})
            print(".", end="", flush=True)
    return rows


def plot(columns: Sequence[int], rows: Sequence[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    colors = {key: f"C{i}" for i, key in enumerate(dict.fromkeys((row["keys"], row["pass"]) for row in rows))}
    for row in rows:
        ours = row["of"] == "fastcl"
        label = f"{row['keys']} keys, {row['pass']}" if ours else None
        costs = [row[f"M = {m:,}"] for m in columns]
        axes.plot(columns, costs, "o-" if ours else ":", color=colors[row["keys"], row["pass"]], label=label)
    axes.plot([], [], color="gray", linestyle=":", label="the bare products of the same colour")
    axes.set(xscale="log", xlabel="columns M", ylabel=f"ns per element of {N} x M, D = {D}", ylim=(0, None))
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(LARGE))
    parser.add_argument("--threads", type=numbers, default=all_thread_counts())
    parser.add_argument("--columns", type=numbers, default=numbers(COLUMNS), help="values of M")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=Path, help="path without suffix")
    args = parser.parse_args()
    names = chosen(args.only, "--only", CASES, parser)

    by_threads = speedups(names, args.threads, args.repeats)
    torch.set_num_threads(args.threads[0])
    by_columns = element_costs(args.columns, args.repeats)
    print()
    note = f"medians of {args.repeats} alternating repetitions; columns on {args.threads[0]}"
    page = report(by_threads, note) if by_threads else ""
    page += f"\nNanoseconds per element of {N} x M, D = {D}\n\n{markdown(by_columns)}\n"
    facts = {"machine": hardware(), "repeats": args.repeats, "threads": by_threads, "columns": by_columns}
    publish(page, facts, args.output)
    if args.output:
        plot(args.columns, by_columns, args.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
