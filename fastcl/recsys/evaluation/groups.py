"""Who a model serves: metrics by how often the target was clicked and by how long the history is. Groups of
cases that were ranked already; nothing here scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fastcl.recsys.data import Cases
from fastcl.recsys.evaluation.measures import OF_RANKS, Ranking

# name -> what is counted for each case, and where groups begin: a group holds its lower edge and ends before the next.
# Frequency and the bins: ContrastVAE's analysis (Wang et al. 2022, Table 2 and Fig. 2), which calls frequency of an
# item the number of users whose last one it is.
GROUPS: dict[str, tuple[Callable[[Ranking, Cases], np.ndarray], tuple[int, ...]]] = {
    "popularity": (lambda found, cases: found.counts[found.target], (0, 10, 20, 30, 40)),
    "frequency": (lambda found, cases: np.bincount(found.target)[found.target], (0, 10, 20, 30, 40)),
    "length": (lambda found, cases: cases.history.lengths, (0, 5, 10, 20, 30, 40)),
}
METRICS = ("recall", "ndcg")


def by_group(found: Ranking, cases: Cases, by: Sequence[str] = tuple(GROUPS)) -> dict[str, list[dict[str, Any]]]:
    """Recall and NDCG at each cut-off of `found`, in groups of its cases; a group without cases is left out.

    by: "popularity", the target's train clicks: 0-9, 10-19, 20-29, 30-39, 40 and more; "frequency", in the same groups,
        how many of the cases have this target; "length", the interactions in the history: 0-4, 5-9, then in tens, 40
        and more.

    Returns: for each of `by`, one dict a group, in rising order: "group" (its name), "cases", and the metrics, which
    are means over the group, so that weighted by "cases" they give the whole's.

    >>> from fastcl.recsys import Popularity, bundled
    >>> from fastcl.recsys.evaluation.ranking import rank_cases
    >>> split = bundled("purchases").split()
    >>> report = by_group(rank_cases(Popularity(split.counts), split.test, k=(10,)), split.test, by=("popularity",))
    >>> [(row["group"], row["cases"], round(row["recall@10"], 3)) for row in report["popularity"]][-2:]
    [('30-39', 73, 0.0), ('40+', 2079, 0.054)]
    """
    check_groups(by)
    if not np.array_equal(found.target, cases.target):
        raise ValueError(f"cases: expected the {len(found.target):,} that were ranked, got {len(cases):,} others")
    report = {}
    for name in by:
        count, edges = GROUPS[name]
        group = np.searchsorted(edges, count(found, cases), side="right") - 1
        rows = []
        for nth in np.unique(group):
            inside = found.rank[group == nth]
            values = {f"{m}@{cutoff}": float(OF_RANKS[m](inside, cutoff).mean()) for m in METRICS for cutoff in found.k}
            rows.append({"group": label(edges, int(nth)), "cases": len(inside), **values})
        report[name] = rows
    return report


def check_groups(by: Sequence[str]) -> None:
    """Raises where one of `by` is not among GROUPS."""
    if isinstance(by, str):
        raise TypeError(f"by: expected a sequence of names, got the string {by!r}")
    for name in by:
        if name not in GROUPS:
            raise ValueError(f"by: expected names among {', '.join(GROUPS)}, got {name!r}")


def label(edges: Sequence[int], nth: int) -> str:
    """
    >>> label((0, 10), 0), label((0, 10), 1)
    ('0-9', '10+')
    """
    return f"{edges[nth]}-{edges[nth + 1] - 1}" if nth + 1 < len(edges) else f"{edges[nth]}+"
