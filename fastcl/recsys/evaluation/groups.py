"""Who a model serves: metrics by how often the target was clicked, by how long the history is, and by any feature of
the target. Groups of cases that were ranked already; nothing here scores."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from fastcl.recsys.data import Cases, Feature
from fastcl.recsys.evaluation.measures import OF_RANKS, Ranking

# name -> what is counted for each target, and where groups begin: one holds its lower edge and ends before the next.
# Frequency and the bins: ContrastVAE's analysis (Wang et al. 2022, Table 2 and Fig. 2), which calls frequency of an
# item the number of users whose last one it is.
GROUPS: dict[str, tuple[Callable[[Ranking, Cases], np.ndarray], tuple[int, ...]]] = {
    "popularity": (lambda found, cases: found.counts[found.target], (0, 10, 20, 30, 40)),
    "frequency": (lambda found, cases: np.bincount(found.target)[found.target], (0, 10, 20, 30, 40)),
    "length": (lambda found, cases: cases.history.lengths[cases.case], (0, 5, 10, 20, 30, 40)),
}
METRICS = ("recall", "ndcg")
VALUES = 12  # values of a feature that are groups, at most


def by_group(found: Ranking, cases: Cases, by: Sequence[str] = tuple(GROUPS)) -> dict[str, list[dict[str, Any]]]:
    """Recall and NDCG at each cut-off of `found`, in groups of its cases; a group without cases is left out.

    by: "popularity", the target's train clicks: 0-9, 10-19, 20-29, 30-39, 40 and more; "frequency", in the same groups,
        how many of the cases have this target; "length", the interactions in the history: 0-4, 5-9, then in tens, 40
        and more; or a feature of the items: a group for each of the 12 values that most targets have. A case whose
        target has several values is in the group of each; a target without a value is in none.

    Returns: for each of `by`, one dict a group, in rising order (of a feature's values, the most cases first): "group"
        (its name), "cases", and the metrics, which are means over the group. Weighted by "cases" those of popularity,
        frequency and length give the whole's. Where cases have several targets, each of them
        counts as a case with this one alone.

    >>> from fastcl.recsys import Popularity, bundled
    >>> from fastcl.recsys.evaluation.ranking import rank_cases
    >>> split = bundled("purchases").split()
    >>> report = by_group(rank_cases(Popularity(split.counts), split.test, k=(10,)), split.test, by=("popularity",))
    >>> [(row["group"], row["cases"], round(row["recall@10"], 3)) for row in report["popularity"]][-2:]
    [('30-39', 73, 0.0), ('40+', 2079, 0.054)]
    """
    items = cases.history.items
    features = {} if items is None else items.features
    check_groups(by, features)
    if not np.array_equal(found.target, cases.target):
        raise ValueError(f"cases: expected the {len(found.target):,} that were ranked, got {len(cases):,} others")
    report: dict[str, list[dict[str, Any]]] = {}
    for name in by:
        members = _by_number(name, found, cases) if name in GROUPS else _by_value(features[name], cases)
        report[name] = []
        for group, rows in members:
            inside = found.rank[rows]
            values = {f"{m}@{cutoff}": float(OF_RANKS[m](inside, cutoff).mean()) for m in METRICS for cutoff in found.k}
            report[name].append({"group": group, "cases": len(rows), **values})
    return report


def _by_number(name: str, found: Ranking, cases: Cases) -> list[tuple[str, np.ndarray]]:
    """Each group of GROUPS and the numbers of its cases."""
    count, edges = GROUPS[name]
    group = np.searchsorted(edges, count(found, cases), side="right") - 1
    return [(label(edges, int(nth)), np.flatnonzero(group == nth)) for nth in np.unique(group)]


def _by_value(feature: Feature, cases: Cases) -> list[tuple[str, np.ndarray]]:
    """The values of a feature that most targets have, and the numbers of these cases."""
    codes = feature.codes[cases.target]
    row, column = np.nonzero(codes)
    count = np.bincount(codes[row, column], minlength=len(feature.values) + 1)
    largest = np.argsort(-count, kind="stable")[:VALUES]
    found = [(int(code), np.unique(row[codes[row, column] == code])) for code in largest if count[code]]
    return [(feature.values[code - 1], rows) for code, rows in found]


def check_groups(by: Sequence[str], features: Iterable[str] = ()) -> None:
    """Raises where one of `by` is neither among GROUPS nor among the features of the items."""
    if isinstance(by, str):
        raise TypeError(f"by: expected a sequence of names, got the string {by!r}")
    names = [*GROUPS, *(name for name in features if name not in GROUPS)]
    for name in by:
        if name not in names:
            raise ValueError(f"by: expected names among {', '.join(names)}, got {name!r}")


def interval(share: float, cases: int) -> tuple[float, float]:
    """The 95% interval of a share of `cases` cases (Wilson 1927); of recall, which is 0 or 1 in each case.

    >>> low, high = interval(0.5, 100)
    >>> round(low, 3), round(high, 3)
    (0.404, 0.596)
    """
    z = 1.96
    middle = (share + z * z / (2 * cases)) / (1 + z * z / cases)
    half = z / (1 + z * z / cases) * np.sqrt(share * (1 - share) / cases + z * z / (4 * cases * cases))
    return float(middle - half), float(middle + half)


def label(edges: Sequence[int], nth: int) -> str:
    """
    >>> label((0, 10), 0), label((0, 10), 1)
    ('0-9', '10+')
    """
    return f"{edges[nth]}-{edges[nth + 1] - 1}" if nth + 1 < len(edges) else f"{edges[nth]}+"
