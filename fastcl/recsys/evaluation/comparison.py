"""Models side by side: mean and spread over seeds, the relative popularity index, and a paired test over users.

Models come in loaded; reading runs and data is the command's work, and the metrics are those of ranking.evaluate.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import torch

from fastcl.recsys.data import Cases, Scorer
from fastcl.recsys.evaluation.cutoffs import Cutoffs, Metrics, cutoffs_in
from fastcl.recsys.evaluation.measures import COUNTS, measure, users_gains
from fastcl.recsys.evaluation.ranking import MEMORY, metric_names, rank_cases, wanted_vectors

DRAWS = 9999


class Comparison(NamedTuple):
    """rows: one dict a name, "name", "runs" and for each metric its mean over the runs and, as "METRIC sd", their
    standard deviation (n - 1; absent for a single run). tests: one dict for each two names and each metric that users
    have, at each cut-off.
    """

    rows: list[dict[str, Any]]
    tests: list[dict[str, Any]]

    def to_csv(self) -> str:
        """`rows` as CSV with a header; empty where a row has no such value."""
        names = list(dict.fromkeys(name for row in self.rows for name in row))
        text = io.StringIO()
        writer = csv.DictWriter(text, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        return text.getvalue()


def compare(
    models: Mapping[str, Sequence[Scorer]],
    cases: Cases,
    *,
    k: Cutoffs = 10,
    seen: str = "mask",
    protocol: str = "full",
    metrics: Metrics | None = None,
    vectors: torch.Tensor | None = None,
    seed: int = 0,
    memory: int = MEMORY,
) -> Comparison:
    """Evaluates every scorer on the same cases.

    models: name -> the scorers of that name, which differ by their seed alone; at least one each.
    Other arguments: as in `ranking.evaluate`.

    With "popularity" among the metrics each row also has "popularity index@k", the mean train clicks of a recommended
    item over the largest such mean among the rows (CLRec, Zhou et al. 2021, appendix): 1 is the most popular taste.

    Every two names are tested in every metric that each user has (recall, hr, ndcg, mrr, map and auc; the others are of
    all lists together) at every cut-off, by `paired_test` of each user's mean over the runs of a name. A test has the
    "name", what it is "against", the "metric", what `paired_test` returns ("difference" is that of the name minus that
    of the other), and "p holm": p corrected for the number of all these tests (Holm 1979), so that with probability
    0.95 none of those below 0.05 is there by chance. The order of the names changes no p-value.

    >>> from fastcl.recsys import CoOccurrence, Popularity, bundled
    >>> split = bundled("purchases").split()
    >>> floors = {"popular": [Popularity(split.counts)], "co": [CoOccurrence(split.train, len(split.items))]}
    >>> found = compare(floors, split.test, seen="keep")
    >>> [(row["name"], row["runs"], round(row["popularity index@10"], 2)) for row in found.rows]
    [('popular', 1, 1.0), ('co', 1, 0.95)]
    >>> [(test["metric"], test["p holm"] < 0.05) for test in found.tests]
    [('recall@10', True), ('ndcg@10', True)]
    """
    if not models or not all(len(runs) for runs in models.values()):
        raise ValueError("models: expected at least one scorer a name, got none")
    names = metric_names(metrics, k, protocol, vectors is not None)
    vectors, k = wanted_vectors(vectors, names), cutoffs_in(names) or k
    rows, gains = [], {}
    for name, runs in models.items():
        results, of_users = [], []
        for scorer in runs:
            found = rank_cases(
                scorer, cases, k=k, seen=seen, protocol=protocol, vectors=vectors, seed=seed, memory=memory
            )
            results.append(measure(found, names))
            of_users.append(users_gains(found, names))
        rows.append({"name": name, "runs": len(runs), **_over_runs(results)})
        gains[name] = {metric: np.mean([gain[metric] for gain in of_users], axis=0) for metric in of_users[0]}
    for name in names:
        if name.startswith("popularity@"):
            _add_index(rows, name)
    tests: list[dict[str, Any]] = [
        {"name": name, "against": other, "metric": metric, **paired_test(gains[name][metric], gains[other][metric])}
        for other, name in combinations(gains, 2)
        for metric in gains[name]
    ]
    corrected = holm([test["p"] for test in tests])
    return Comparison(rows, [{**test, "p holm": p} for test, p in zip(tests, corrected, strict=True)])


def holm(p: Sequence[float]) -> list[float]:
    """p-values corrected for their number by Holm's step-down rule (1979), in the same order.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    corrected, highest = [0.0] * len(p), 0.0
    for place, n in enumerate(sorted(range(len(p)), key=lambda n: p[n])):
        highest = max(highest, min(1.0, (len(p) - place) * p[n]))
        corrected[n] = highest
    return corrected


def paired_test(a: np.ndarray, b: np.ndarray, draws: int = DRAWS, seed: int = 0) -> dict[str, float]:
    """Paired randomisation test (Fisher), two-sided, of the mean of a - b over users, float [U] each.

    Under the null hypothesis the two names of a user are exchangeable, so each difference may as well have the other
    sign: p = (1 + #draws at least as far from 0 as what was observed) / (1 + draws), over random signs.

    Returns "difference", "p", and "low" and "high", the 95% interval of the difference by the normal approximation.

    >>> found = paired_test(np.array([1.0, 0.5, 1.0, 0.7]), np.array([0.5, 0.5, 0.5, 0.1]), draws=999)
    >>> round(found["difference"], 2), found["p"] > 0.05  # four users decide nothing
    (0.4, True)
    """
    if a.shape != b.shape or a.ndim != 1 or not len(a):
        raise ValueError(f"a, b: expected two equally long vectors of users, got {list(a.shape)} and {list(b.shape)}")
    difference = a - b
    observed = float(difference.mean())
    moved = difference[difference != 0.0]  # a sign changes nothing at 0
    rng = np.random.default_rng(seed)
    as_far, block = 0, max(1, 2**22 // max(len(moved), 1))
    for start in range(0, draws, block):
        bits = rng.integers(0, 2, (min(block, draws - start), len(moved)), dtype=np.int8)
        sums = moved.sum() - 2.0 * (bits @ moved)
        as_far += int((np.abs(sums) >= abs(moved.sum()) * (1 - 1e-12)).sum())
    error = float(difference.std(ddof=1) / np.sqrt(len(a))) if len(a) > 1 else float("inf")
    p = (1 + as_far) / (1 + draws)
    return {"difference": observed, "p": p, "low": observed - 1.96 * error, "high": observed + 1.96 * error}


def _over_runs(results: Sequence[Mapping[str, float]]) -> dict[str, float]:
    row: dict[str, float] = {}
    for name in results[0]:
        if name in COUNTS:
            row[name] = results[0][name]
            continue
        values = np.array([result[name] for result in results])
        row[name] = float(values.mean())
        if len(values) > 1:
            row[f"{name} sd"] = float(values.std(ddof=1))
    return row


def _add_index(rows: list[dict[str, Any]], metric: str) -> None:
    """metric: "popularity@k"."""
    most = max(row[metric] for row in rows)
    for row in rows:
        row[metric.replace("@", " index@")] = row[metric] / most if most else 0.0
