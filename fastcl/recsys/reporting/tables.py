"""The text table of results with the floors, and the picture of curves and popularity.

This module formats and draws; every number comes from the caller or from `ranking.evaluate`.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastcl.recsys.data import Cases, Scorer, Split
from fastcl.recsys.evaluation.measures import COUNTS
from fastcl.recsys.evaluation.ranking import evaluate
from fastcl.recsys.models.floors import CoOccurrence, PersonalFrequency, Popularity
from fastcl.recsys.reporting import pictures
from fastcl.recsys.showing import number as number
from fastcl.recsys.writing import write_bytes

# The floors by name; the last one only where seen items are kept.
FLOORS: dict[str, Callable[[Split], Scorer]] = {
    "popularity": lambda split: Popularity(split.counts, split.items),
    "co-occurrence": lambda split: CoOccurrence(split.train, len(split.items)),
    "personal frequency": lambda split: PersonalFrequency(split.counts, split.items),
}


def floors(split: Split, seen: str) -> dict[str, Scorer]:
    """The floors that are shown with every result; personal frequency is one of them where seen items are kept."""
    return {name: made(split) for name, made in FLOORS.items() if seen == "keep" or name != "personal frequency"}


def on_test(scorer: Scorer, split: Split, seen: str, k: tuple[int, ...] = (10,)) -> dict[str, float]:
    """Metrics with all items ranked at each k, and "pop100 hr@10", the hit rate among 100 negatives drawn by popularity
    with a fixed seed.
    """
    full = evaluate(scorer, split.test, k=k, seen=seen)
    sampled = evaluate(scorer, split.test, k=(10,), seen=seen, protocol="pop100")
    return full | {"pop100 hr@10": sampled["hr@10"]}


def on_new_items(scorer: Scorer, split: Split) -> dict[str, float]:
    """ "new items recall@10": of the cases whose target is not in their own history, with the items of the history left
    out for every scorer. What a model adds where most targets are repeats.
    """
    rows = np.flatnonzero(~split.test.repeated)
    test = split.test
    cases = Cases(test.user[rows], test.history.take(rows), test.target[rows], test.counts)
    return {"new items recall@10": evaluate(scorer, cases, metrics=("recall",))["recall@10"]}


def result_table(results: Mapping[str, Mapping[str, float]]) -> str:
    """One row per scorer, one column per metric in the order of the first scorer, and a column "train s" where a scorer
    has "seconds".

    Counts of cases are equal for all scorers and are not shown.
    """
    first = next(iter(results.values()))
    columns = [name for name in first if name not in (*COUNTS, "seconds")]
    timed = any("seconds" in result for result in results.values())
    rows = []
    for name, result in results.items():
        seconds = [f"{result['seconds']:.1f}" if "seconds" in result else "-"] if timed else []
        rows.append([name, *(number(column, result[column]) for column in columns), *seconds])
    return table(["", *columns, *(["train s"] if timed else [])], rows)


def group_table(by: str, reports: Mapping[str, Sequence[Mapping[str, Any]]], column: str) -> str:
    """The metric `column`: one row per scorer, one column per group (with its number of cases). All scorers have the
    same groups.
    """
    first = next(iter(reports.values()))
    header = [f"{column} by {by}", *(f"{row['group']} ({row['cases']:,})" for row in first)]
    return table(header, [[name, *(number(column, row[column]) for row in rows)] for name, rows in reports.items()])


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of plain text: the first is aligned to the left, all others to the right."""
    width = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = [
        "  ".join([row[0].ljust(width[0]), *(c.rjust(w) for c, w in zip(row[1:], width[1:], strict=True))])
        for row in [header, *rows]
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def popularity_shares(items: np.ndarray | torch.Tensor, counts: np.ndarray) -> list[float]:
    """The share of `items` (numbers, any shape) in each bucket of train clicks: 0, 1, 2-3, 4-7, ... (steps of log2)."""
    return shown_shares(np.bincount(np.asarray(items).ravel(), minlength=len(counts)), counts)


def shown_shares(shown: np.ndarray, counts: np.ndarray) -> list[float]:
    """`popularity_shares` where item i was shown shown[i] times."""
    # The exponent of frexp is floor(log2(count)) + 1 for count >= 1, and 0 for count = 0.
    bucket = np.frexp(counts.astype(np.float64))[1]
    tally = np.bincount(bucket, weights=shown, minlength=bucket.max() + 1)
    return [float(share) for share in tally / max(tally.sum(), 1)]


def draw(path: Path, curves: Mapping[str, Sequence[float]], shares: Mapping[str, Sequence[float]]) -> str:
    """Writes the PNG and returns one line with its path, or the line that matplotlib is missing."""
    try:
        figure = pictures.side_by_side(
            lambda axes: pictures.curves(axes, curves, "Validation", "NDCG@10 (full ranking)"),
            lambda axes: pictures.impressions(axes, shares, "What is shown (top 10) and what came next"),
        )
    except ImportError:
        return "no picture: it needs matplotlib (pip install 'fastcl[recsys]')"
    write_bytes(path, pictures.png(figure))
    return f"picture: {path}"
