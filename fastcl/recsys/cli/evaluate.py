"""fastcl evaluate: test metrics of a run beside the floors."""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from fastcl.recsys.cli.runs import add_run_options, open_runs, tell
from fastcl.recsys.data import Scorer, Split
from fastcl.recsys.evaluation.cutoffs import cutoffs, cutoffs_in, parted
from fastcl.recsys.evaluation.distance import feature_vectors
from fastcl.recsys.evaluation.groups import GROUPS, by_group, check_groups
from fastcl.recsys.evaluation.measures import DISTANCE, METRICS, measure
from fastcl.recsys.evaluation.ranking import PROTOCOLS, evaluate, metric_names, rank_cases
from fastcl.recsys.evaluation.robustness import check_ratios, robustness
from fastcl.recsys.reporting import tables
from fastcl.recsys.training.threads import add_threads


def add(commands: Any) -> None:
    parser = commands.add_parser("evaluate", help="test metrics of a run beside the floors")
    option = parser.add_argument
    option("folder", metavar="RUN", help="run folder")
    add_run_options(parser)
    add_metric_options(parser)
    by = f"also in groups of cases: {', '.join(GROUPS)}, or a feature of the items"
    option("--by", metavar="GROUPS", default="", help=by)
    option(
        "--robustness", metavar="RATIOS", help="also with these shares of each history deleted, and replaced: 0.1,0.3"
    )
    add_threads(parser)
    option("--json", action="store_true", help="print everything as JSON")
    parser.set_defaults(run=run, names={"ratios": "--robustness", "format": "--data", "columns": "--data"})


def add_metric_options(parser: Any) -> None:
    option = parser.add_argument
    option("-k", "--k", default="10", metavar="NUMBERS", help="cut-offs, separated by commas (default: %(default)s)")
    option(
        "--protocol",
        choices=list(PROTOCOLS),
        help="rank all items, or the target among 100 drawn negatives (default: full)",
    )
    names = f"metrics, separated by commas, each at every cut-off of -k, or recall@50 at its own: {', '.join(METRICS)}"
    option("--metrics", metavar="NAMES", help=names)


def asked_metrics(args: argparse.Namespace) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The metrics that -k, --protocol and --metrics ask for, each with its cut-off, and all cut-offs."""
    k = cutoffs(args.k, "-k")
    names = metric_names(args.metrics, k, args.protocol or "full", vectors=True)
    return names, cutoffs_in(names) or k


def vectors_for(metrics: tuple[str, ...], split: Split) -> torch.Tensor | None:
    """The item features as vectors where a metric is the intra-list distance, else None."""
    return feature_vectors(split.items) if any(parted(metric)[0] == DISTANCE for metric in metrics) else None


def run(args: argparse.Namespace) -> None:
    protocol = args.protocol or "full"
    metrics, k = asked_metrics(args)
    by = tuple(part.strip() for part in args.by.split(",") if part.strip())
    ratios = _ratios(args.robustness)
    (found_run,), split, seen, notes = open_runs([Path(args.folder)], args)
    check_groups(by, split.items.features)
    vectors = vectors_for(metrics, split)
    tell(notes)
    model = found_run.model
    scorers: dict[str, Scorer] = {**tables.floors(split, seen), model.name: model}
    results: dict[str, dict[str, float]] = {}
    groups: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for name, scorer in scorers.items():
        found = rank_cases(scorer, split.test, k=k, seen=seen, protocol=protocol, vectors=vectors)
        results[name] = measure(found, metrics)
        if args.protocol is None and args.metrics is None and split.test.offsets is None:
            sampled = evaluate(scorer, split.test, seen=seen, protocol="pop100")
            results[name]["pop100 hr@10"] = sampled["hr@10"]
        groups[name] = by_group(found, split.test, by)
    corrupted = {n: robustness(s, split.test, ratios=ratios, k=k, seen=seen) for n, s in scorers.items() if ratios}
    if args.json:
        settings = {"run": args.folder, "k": k, "protocol": protocol, "seen": seen, "notes": notes}
        print(json.dumps({**settings, "results": results, "by": groups, "robustness": corrupted}, indent=1))
        return
    counts = results[model.name]
    shown = [tables.result_table(results)]
    for name in by:
        shown.append(tables.group_table(name, {n: g[name] for n, g in groups.items()}, f"recall@{k[0]}"))
    if corrupted:
        shown.append(_robustness_table(corrupted, f"recall@{k[0]}"))
    told = f"{counts['cases']:,} cases; {counts['unseen_targets']:,} with a target that has no train click"
    shown.append(f"{told}, {counts['repeated_targets']:,} with one that is in their own history")
    print("\n\n".join(shown))


def _ratios(text: str | None) -> tuple[float, ...]:
    if text is None:
        return ()
    try:
        ratios = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--robustness: expected numbers separated by commas, got {text!r}") from None
    check_ratios(ratios)
    return ratios


def _robustness_table(reports: dict[str, list[dict[str, Any]]], column: str) -> str:
    first = next(iter(reports.values()))
    header = [f"{column} under noise", *(f"{row['kind']} {row['ratio']:g}" for row in first)]
    return tables.table(header, [[name, *(f"{row[column]:.4f}" for row in rows)] for name, rows in reports.items()])
