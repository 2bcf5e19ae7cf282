"""Models side by side: mean and spread over seeds, the relative popularity index, and a paired test over users.

Models come in loaded; reading runs and data is the command's work, and the metrics are those of metrics.evaluate.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from .data import Cases, Scorer
from .measures import COUNTS, DISTANCE, OF_RANKS, measure
from .metrics import MEMORY, metric_names, rank_cases

DRAWS = 9999
TESTED = "ndcg"


class Comparison(NamedTuple):
    """rows: one dict a name, "name", "runs" and for each metric its mean over the runs and, as "METRIC sd", their
    standard deviation (n - 1; absent for a single run). tests: one dict a later name and cut-off, against the first.
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
    k: tuple[int, ...] = (10,),
    seen: str = "mask",
    protocol: str = "full",
    metrics: Sequence[str] | None = None,
    vectors: torch.Tensor | None = None,
    seed: int = 0,
    memory: int = MEMORY,
) -> Comparison:
    """Evaluates every scorer on the same cases.

    models: name -> the scorers of that name, which differ by their seed alone; at least one each. The first name is
        what the others are tested against.
    Other arguments: as in `metrics.evaluate`.

    With "popularity" among the metrics each row also has "popularity index@k", the mean train clicks of a recommended
    item over the largest such mean among the rows (CLRec, Zhou et al. 2021, appendix): 1 is the most popular taste.

    The test is of NDCG@k, each user's mean over the runs of a name, by `paired_test`; "difference" is the later name's
    mean minus the first's. Its p-values are not corrected for the number of tests.

    >>> from fastcl.recsys import CoOccurrence, Popularity, bundled
    >>> split = bundled("purchases").split()
    >>> floors = {"popular": [Popularity(split.counts)], "co": [CoOccurrence(split.train, len(split.items))]}
    >>> found = compare(floors, split.test, seen="keep")
    >>> [(row["name"], row["runs"], round(row["popularity index@10"], 2)) for row in found.rows]
    [('popular', 1, 1.0), ('co', 1, 0.96)]
    >>> found.tests[0]["p"] < 0.05
    True
    """
    if not models or not all(len(runs) for runs in models.values()):
        raise ValueError("models: expected at least one scorer a name, got none")
    names = metric_names(metrics, protocol, vectors is not None)
    wanted = vectors if DISTANCE in names else None
    rows, gains = [], {}
    for name, runs in models.items():
        results, of_users = [], []
        for scorer in runs:
            found = rank_cases(
                scorer, cases, k=k, seen=seen, protocol=protocol, vectors=wanted, seed=seed, memory=memory
            )
            results.append(measure(found, names))
            of_users.append([OF_RANKS[TESTED](found.rank, cutoff) for cutoff in k])
        rows.append({"name": name, "runs": len(runs), **_over_runs(results)})
        gains[name] = np.mean(of_users, axis=0)
    if "popularity" in names:
        _add_index(rows, k)
    first, *later = gains
    tests = [
        {"name": name, "against": first, "metric": f"{TESTED}@{cutoff}", **paired_test(gains[name][n], gains[first][n])}
        for name in later
        for n, cutoff in enumerate(k)
    ]
    return Comparison(rows, tests)


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


def _add_index(rows: list[dict[str, Any]], k: tuple[int, ...]) -> None:
    for cutoff in k:
        most = max(row[f"popularity@{cutoff}"] for row in rows)
        for row in rows:
            row[f"popularity index@{cutoff}"] = row[f"popularity@{cutoff}"] / most if most else 0.0
