"""fastcl evaluate: test metrics of a run beside the floors."""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from fastcl.recsys.cli.cold import add_items_option, among_new, on_later
from fastcl.recsys.cli.runs import add_run_options, holds_out_items, open_runs, repeats, tell
from fastcl.recsys.data import Scorer, Split
from fastcl.recsys.data.source import is_pipe
from fastcl.recsys.evaluation.cutoffs import cutoffs, cutoffs_in, parted
from fastcl.recsys.evaluation.distance import feature_vectors
from fastcl.recsys.evaluation.groups import GROUPS, apart, by_group, check_groups
from fastcl.recsys.evaluation.measures import DISTANCE, METRICS, measure
from fastcl.recsys.evaluation.ranking import PROTOCOLS, evaluate, metric_names, rank_cases
from fastcl.recsys.evaluation.robustness import check_ratios, robustness
from fastcl.recsys.reporting import tables
from fastcl.recsys.training.threads import add_threads

NEW = "new and known"  # the groups of --on


def add(commands: Any) -> None:
    parser = commands.add_parser("evaluate", help="test metrics of a run beside the floors")
    option = parser.add_argument
    option("folder", metavar="RUN", help="run folder")
    text = "later interactions, such as those of the next week: each is a case, with all that its user did before it"
    option("--on", metavar="FILE", help=f"{text} (default: the test cases of the run)")
    add_items_option(parser)
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
    if not any(parted(metric)[0] == DISTANCE for metric in metrics):
        return None
    if not split.items.features:
        raise ValueError(f"--metrics: {DISTANCE}: expected item features (train --item-features), got a run without")
    return feature_vectors(split.items)


def run(args: argparse.Namespace) -> None:
    protocol = args.protocol or "full"
    metrics, k = asked_metrics(args)
    by = tuple(part.strip() for part in args.by.split(",") if part.strip())
    ratios = _ratios(args.robustness)
    if args.items is not None and args.on is None:
        raise ValueError("--items: expected --on FILE with it, whose cases may be of new items")
    if args.on is not None and args.data is not None and is_pipe(args.data):
        raise ValueError(f"--data: expected a file beside --on, since it is read twice, got the pipe {args.data}")
    (found_run,), split, seen, notes = open_runs([Path(args.folder)], args)
    model = found_run.model
    scorer: Scorer = model
    week = None
    if args.on is not None:
        scorer, week = on_later(found_run, split, args)
        split = week.split
        notes += [note for note in [repeats(split) if seen == "mask" else None] if note]
    check_groups(by, split.items.features)
    vectors = vectors_for(metrics, split)
    tell(notes)
    scorers: dict[str, Scorer] = {**tables.floors(split, seen), model.name: scorer}
    results: dict[str, dict[str, float]] = {}
    groups: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for name, scorer in scorers.items():
        found = rank_cases(scorer, split.test, k=k, seen=seen, protocol=protocol, vectors=vectors)
        results[name] = measure(found, metrics)
        if args.protocol is None and args.metrics is None and split.test.offsets is None:
            sampled = evaluate(scorer, split.test, seen=seen, protocol="pop100")
            results[name]["pop100 hr@10"] = sampled["hr@10"]
        groups[name] = by_group(found, split.test, by)
        if week is not None:
            groups[name] = {NEW: apart(found, week.groups), **groups[name]}
    corrupted = {n: robustness(s, split.test, ratios=ratios, k=k, seen=seen) for n, s in scorers.items() if ratios}
    cold = week is None and holds_out_items(split)
    new = among_new({model.name: model} if model.learns else {}, split, k) if cold else None
    if args.json:
        settings = {"run": args.folder, "k": k, "protocol": protocol, "seen": seen, "notes": notes}
        if week is not None:
            settings |= {"on": args.on, "counted": week.report.to_json()}
        if new is not None:
            settings["cold"] = {"items": int((split.counts[1:] == 0).sum()), "results": new}
        print(json.dumps({**settings, "results": results, "by": groups, "robustness": corrupted}, indent=1))
        return
    counts = results[model.name]
    shown = [tables.result_table(results)]
    for name in groups[model.name]:
        shown.append(tables.group_table(name, {n: g[name] for n, g in groups.items()}, f"recall@{k[0]}"))
    if new is not None:
        count = int((split.counts[1:] == 0).sum())
        shown.append(f"among the {count:,} items without a train click:\n{tables.result_table(new)}")
    if corrupted:
        shown.append(_robustness_table(corrupted, f"recall@{k[0]}"))
    told = f"{counts['cases']:,} cases; {counts['unseen_targets']:,} targets without a train click"
    shown.append(f"{told}, {counts['repeated_targets']:,} in the history of their own case")
    if week is not None:
        shown.append(f"{args.on}: {week.report}")
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
