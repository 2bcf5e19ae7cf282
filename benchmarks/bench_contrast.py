"""Times fastcl's losses against other forms of the same losses: every shape of cases.py, forward and forward+backward.

    python -m benchmarks.bench_contrast [--only clrec,moco] [--against products,reference] [--passes both]
        [--threads 1,2] [--repeats 15] [--output benchmarks/results/contrast-cpu]

All forms run in one process and take turns. A figure is the median of the ratios of measurements that follow each
other. Columns:
    / products      fastcl's time divided by that of the bare matrix products (torch.mm into preallocated outputs): one
                    product forward, three with backward, two with backward if the keys are frozen
    / plain         cases with 16-bit rows, ids or bias: fastcl's time divided by its time for float32 without them
    reference /     the time of `fastcl.reference`, the textbook form, divided by fastcl's
    compile /       the same for `fastcl.reference` under torch.compile
    lean /          the same for the leanest eager form (one matrix product and cross_entropy, no copies)
    lean compile /  the same for the leanest eager form under torch.compile
    others          the same for the forms in peers.py; fastcl normalises the rows where the other form does
    of the ceiling  the least time that the products can take, by the rates of ceilings.cpp, divided by fastcl's time
A target stands in brackets behind its figure. "-": the form does not compute this loss, or not at this size. With
--output PATH, PATH.json and PATH.md (the table) are written.
"""

import argparse
import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import ceilings
from benchmarks.cases import CASES, Case, Inputs, fused, inputs, lean, textbook
from benchmarks.common import (
    all_thread_counts,
    alternate,
    chosen,
    hardware,
    median_ratio,
    numbers,
    products,
    publish,
    report,
    step,
)
from benchmarks.peers import PEERS, Loss, missing

# Ratios of fastcl's time to the other's, to be at most the bound. All other columns are the inverse, to be at least it.
OVER = ("products", "plain")
BY_HAND: dict[str, Loss] = {"reference": textbook, "lean": lean}
COMPILED: dict[str, Loss] = {"compile": textbook, "lean compile": lean}
COLUMNS = [*OVER, *BY_HAND, *COMPILED, *PEERS]
PASSES = {"forward": False, "both": True}


def bound(case: Case, column: str, backward: bool) -> float | None:
    """The target of a figure, or None. Forward alone must take at most 0.9 of one product, up to 128 features."""
    if column == "products" and column in case.targets and not backward and case.d <= 128:
        return 0.9
    return case.targets.get(column)


def bare_products(case: Case, x: Inputs, backward: bool) -> Callable[[], None]:
    if case.kind in ("views", "dcl"):
        z = torch.cat([x.query, x.positive])
        return products(z, [(z, True)], backward)
    own = [(x.positive, True)] if case.kind == "queue" else []
    return products(x.query, [*own, (x.keys, x.keys.requires_grad)], backward)


def candidates(case: Case, columns: Sequence[str], backward: bool) -> dict[str, Callable[[], None]]:
    """The functions to time, by name: "fastcl", and one for each column. A peer that normalises rows is compared with
    "ours NAME", which normalises them too.
    """

    def timed(loss: Loss, of: Case, x: Inputs) -> Callable[[], None]:
        return step(functools.partial(loss, of, x), [t for t in x[:3] if t.requires_grad], backward)

    torch._dynamo.reset()
    x = inputs(case)
    found = {"fastcl": timed(fused, case, x)}
    for column in columns:
        if column == "products":
            found[column] = bare_products(case, x, backward)
        elif column == "plain" and case != case.plain:
            found[column] = timed(fused, case.plain, inputs(case.plain))
        elif column in BY_HAND:
            found[column] = timed(BY_HAND[column], case, x)
        elif column in COMPILED:
            found[column] = timed(torch.compile(COMPILED[column]), case, x)
        elif column in PEERS and PEERS[column].suits(case) and missing(column) is None:
            found[column] = timed(PEERS[column].loss, case, x)
            if PEERS[column].ours is not fused:
                found[f"ours {column}"] = timed(PEERS[column].ours, case, x)
    return found


def figures(
    case: Case, columns: Sequence[str], seconds: Mapping[str, Sequence[float]], backward: bool
) -> dict[str, Any]:
    """`ratios`: column -> ratio, None (not compared) or the reason why not. `met`: which targets are met."""
    ratios: dict[str, Any] = {}
    failed = []
    for column in columns:
        if column not in seconds:
            ratios[column] = missing(column) if column in PEERS and PEERS[column].suits(case) else None
            continue
        ours = f"ours {column}" if f"ours {column}" in seconds else "fastcl"
        pair = (ours, column) if column in OVER else (column, ours)
        ratios[column] = median_ratio(seconds, *pair)
        limit = bound(case, column, backward)
        if limit is not None and (ratios[column] > limit if column in OVER else ratios[column] < limit):
            failed.append(column)
    compared = [column for column in columns if column in seconds and bound(case, column, backward) is not None]
    met = f"not met: {', '.join(failed)}" if failed else "met" if compared else None
    return {"ratios": ratios, "met": met}


def shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the JSON as a row of the table."""
    case = CASES[row["case"]]
    cells: dict[str, Any] = {
        "case": row["case"],
        "N x M x D": f"{case.n:,} x {case.m:,} x {case.d:,}",
        "threads": row["threads"],
        "pass": row["pass"],
        "fastcl ms": row["ms"],
    }
    for column, ratio in row["ratios"].items():
        limit = row["bounds"][column]
        sign = "<=" if column in OVER else ">="
        cell = f"{ratio:.2f} ({sign} {limit:.2g})" if isinstance(ratio, float) and limit is not None else ratio
        cells[f"/ {column}" if column in OVER else f"{column} /"] = cell
    return cells | {"of the ceiling": row["share"]} | {"target": row["met"]}


def losing(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for every comparison that fastcl loses; the bare products are no loss and do not count."""
    return [
        f"{row['case']}, {row['threads']} threads, {row['pass']}: {column} takes {ratio:.2f} of our time"
        for row in rows
        for column, ratio in row["ratios"].items()
        if isinstance(ratio, float) and column not in OVER and ratio < 1
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(CASES), help="cases, separated by commas")
    parser.add_argument("--against", default=",".join(COLUMNS), help="columns, separated by commas")
    parser.add_argument("--passes", default=",".join(PASSES), help="forward, both (with backward) or forward,both")
    parser.add_argument("--threads", type=numbers, default=all_thread_counts()[:2], help="thread counts, by commas")
    parser.add_argument("--repeats", type=int, default=15, help="measurements of each form (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="path without suffix")
    args = parser.parse_args()
    names = chosen(args.only, "--only", CASES, parser)
    columns = chosen(args.against, "--against", COLUMNS, parser)
    passes = chosen(args.passes, "--passes", PASSES, parser)

    rates = ceilings.measured()
    rows: list[dict[str, Any]] = []
    for threads in args.threads:
        torch.set_num_threads(threads)
        for name in names:
            case = CASES[name]
            for which in passes:
                backward = PASSES[which]
                seconds = alternate(candidates(case, columns, backward), args.repeats)
                taken = statistics.median(seconds["fastcl"])
                rows.append(
                    {
                        "case": name,
                        "shape": [case.n, case.m, case.d],
                        "what": case.what,
                        "threads": threads,
                        "pass": "forward+backward" if backward else "forward",
                        "ms": taken * 1e3,
                        "share": ceilings.share(case, backward, threads, taken, hardware()["isa"], rates),
                        "bounds": {column: bound(case, column, backward) for column in columns},
                        **figures(case, columns, seconds, backward),
                    }
                )
                print(".", end="", flush=True)
    print()
    page = report([shown(row) for row in rows], f"medians of {args.repeats} alternating repetitions")
    page += "\nSlower than a peer:\n\n" + "".join(f"- {line}\n" for line in losing(rows) or ["nowhere"])
    content = {"machine": hardware(), "repeats": args.repeats, "ceilings": rates, "rows": rows}
    publish(page, content, args.output)


if __name__ == "__main__":
    main()
