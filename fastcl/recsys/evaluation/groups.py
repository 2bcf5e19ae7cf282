"""Metrics by groups of cases: by how often the target was clicked, how long the history is, or a feature of the target.
The cases have been ranked before; nothing here scores."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from fastcl.recsys.data import Cases, Feature
from fastcl.recsys.evaluation.measures import OF_RANKS, Ranking

# name -> (what is counted for each target, the lowest count of each group).
# "frequency" and the groups are those of ContrastVAE's analysis (Wang et al. 2022, Table 2 and Fig. 2), where an item's
# frequency is the number of users whose last item it is.
GROUPS: dict[str, tuple[Callable[[Ranking, Cases], np.ndarray], tuple[int, ...]]] = {
    "popularity": (lambda found, cases: found.counts[found.target], (0, 10, 20, 30, 40)),
    "frequency": (lambda found, cases: np.bincount(found.target)[found.target], (0, 10, 20, 30, 40)),
    "length": (lambda found, cases: cases.history.lengths[cases.case], (0, 5, 10, 20, 30, 40)),
}
METRICS = ("recall", "ndcg")
VALUES = 12  # the most groups that a feature makes


def by_group(found: Ranking, cases: Cases, by: Sequence[str] = tuple(GROUPS)) -> dict[str, list[dict[str, Any]]]:
    """Recall and NDCG at each cut-off of `found`, in groups of its cases. Groups without cases are left out.

    by: any of
        "popularity": the target's train clicks: 0-9, 10-19, 20-29, 30-39, 40 and more;
        "frequency": how many cases have the same target, in the same groups;
        "length": the number of interactions in the history: 0-4, 5-9, 10-19, 20-29, 30-39, 40 and more;
        a feature of the items: one group for each of the 12 values that most targets have. A case whose target has
        several values is in several groups; a case whose target has no value is in none.

    Returns: for each of `by`, one dict per group: "group" (its name), "cases", and the metrics as means over the group.
        Groups of numbers rise; groups of a feature begin with the one of most cases. The mean over the groups of
        popularity, frequency or length, weighted by "cases", is the metric of all cases. Where cases have several
        targets, each target counts as a case of its own.

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
        raise ValueError(f"cases: expected the {len(found.target):,} ranked cases, got {len(cases):,} others")
    report: dict[str, list[dict[str, Any]]] = {}
    for name in by:
        members = _by_number(name, found, cases) if name in GROUPS else _by_value(features[name], cases)
        report[name] = _measured(found, members)
    return report


def apart(found: Ranking, groups: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    """The same of groups that are given as bool [T], the targets of each; empty groups are left out."""
    return _measured(found, [(name, np.flatnonzero(inside)) for name, inside in groups.items() if inside.any()])


def _measured(found: Ranking, members: Iterable[tuple[str, np.ndarray]]) -> list[dict[str, Any]]:
    report = []
    for group, rows in members:
        inside = found.rank[rows]
        values = {f"{m}@{cutoff}": float(OF_RANKS[m](inside, cutoff).mean()) for m in METRICS for cutoff in found.k}
        report.append({"group": group, "cases": len(rows), **values})
    return report


def _by_number(name: str, found: Ranking, cases: Cases) -> list[tuple[str, np.ndarray]]:
    """Each group of `GROUPS[name]` and the indices of its cases."""
    count, edges = GROUPS[name]
    group = np.searchsorted(edges, count(found, cases), side="right") - 1
    return [(label(edges, int(nth)), np.flatnonzero(group == nth)) for nth in np.unique(group)]


def _by_value(feature: Feature, cases: Cases) -> list[tuple[str, np.ndarray]]:
    """Each of the feature's values that most targets have, and the indices of its cases."""
    codes = feature.codes[cases.target]
    row, column = np.nonzero(codes)
    count = np.bincount(codes[row, column], minlength=len(feature.values) + 1)
    largest = np.argsort(-count, kind="stable")[:VALUES]
    found = [(int(code), np.unique(row[codes[row, column] == code])) for code in largest if count[code]]
    return [(feature.values[code - 1], rows) for code, rows in found]


def check_groups(by: Sequence[str], features: Iterable[str] = ()) -> None:
    """TypeError for a bare string; ValueError for a name that is neither in GROUPS nor a feature of the items."""
    if isinstance(by, str):
        raise TypeError(f"by: expected a sequence of names, got the string {by!r}")
    features = list(features)
    names = [*GROUPS, *(name for name in features if name not in GROUPS)]
    for name in by:
        if name not in names:
            raise ValueError(f"by: expected names among {', '.join(names)}, got {name!r}")
        if name in GROUPS and name in features:
            raise ValueError(f"by: expected one meaning, got {name!r}, which is also a feature of the items")


def interval(share: float, cases: int) -> tuple[float, float]:
    """The 95% interval of a share (0..1) of `cases` cases (Wilson 1927), such as recall, which is 0 or 1 in each case.

    >>> low, high = interval(0.5, 100)
    >>> round(low, 3), round(high, 3)
    (0.404, 0.596)
    """
    z = 1.96
    middle = (share + z * z / (2 * cases)) / (1 + z * z / cases)
    half = z / (1 + z * z / cases) * np.sqrt(share * (1 - share) / cases + z * z / (4 * cases * cases))
    return float(middle - half), float(middle + half)


def label(edges: Sequence[int], nth: int) -> str:
    """The name of the nth group.

    >>> label((0, 10), 0), label((0, 10), 1)
    ('0-9', '10+')
    """
    return f"{edges[nth]}-{edges[nth + 1] - 1}" if nth + 1 < len(edges) else f"{edges[nth]}+"
