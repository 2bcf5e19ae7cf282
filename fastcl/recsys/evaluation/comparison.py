"""Models side by side: mean and spread over seeds, the relative popularity index, and a paired test over users.

Callers pass loaded models; the command line reads runs and data. The metrics are those of `ranking.evaluate`.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import torch

from fastcl.recsys import latex
from fastcl.recsys.data import Cases, Scorer
from fastcl.recsys.evaluation.cutoffs import Cutoffs, Metrics, cutoffs_in
from fastcl.recsys.evaluation.measures import COUNTS, measure, users_gains
from fastcl.recsys.evaluation.ranking import MEMORY, metric_names, rank_cases, wanted_vectors
from fastcl.recsys.showing import number

DRAWS = 9999
EXACT = 13  # the most users with a difference for whom all 2^n signs are tried
STARS = (0.001, 0.01, 0.05)  # a star for each that a corrected p is below


class Comparison(NamedTuple):
    """rows: one dict per name: "name", "runs", each metric's mean over the runs and, as "METRIC sd", the standard
    deviation over the runs (n - 1 in the denominator; absent for a single run).
    tests: one dict per pair of names, per metric that each user has, and per cut-off.
    """

    rows: list[dict[str, Any]]
    tests: list[dict[str, Any]]

    def to_csv(self) -> str:
        """`rows` as CSV with a header. A cell is empty where the row lacks the value."""
        names = list(dict.fromkeys(name for row in self.rows for name in row))
        text = io.StringIO()
        writer = csv.DictWriter(text, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        return text.getvalue()

    def to_latex(self) -> str:
        """Two tables. The first has a row for each name with means ± standard deviations; the best value of a tested
        metric is bold, with the stars of `best`. The second has a row for each test: the difference, its 95% interval
        and its corrected p with stars (* below 0.05, ** below 0.01, *** below 0.001).
        """
        columns = [c for c in self.rows[0] if c not in ("name", "runs", *COUNTS) and not c.endswith(" sd")]
        best = {column: self.best(column) for column in columns}
        rows = []
        for row in self.rows:
            cells = [_latex_cell(row, column, best[column]) for column in columns]
            rows.append([latex.escaped(row["name"]), str(row["runs"]), *cells])
        parts = [latex.tabular(["", "runs", *map(latex.escaped, columns)], rows, "means over runs")]
        if self.tests:
            lines = [
                [*map(latex.escaped, (test["name"], test["against"], test["metric"])), f"${test['difference']:+.4f}$",
                 f"${test['low']:+.4f}$ to ${test['high']:+.4f}$", f"{test['p holm']:.4f}{stars(test['p holm'])}"]
                for test in self.tests
            ]  # fmt: skip
            head = ["", "against", "metric", "difference", r"95\%", "$p$ (Holm)"]
            caption = f"two-sided paired randomisation tests over users, p corrected for {len(lines)} tests by Holm"
            parts.append(latex.tabular(head, lines, caption))
        return "\n\n".join(parts) + "\n"

    def best(self, metric: str) -> tuple[str, str] | None:
        """The name with the highest value of a tested metric, and stars by the largest of its corrected p-values
        against all other names; None for a metric that is not tested.
        """
        tests = [test for test in self.tests if test["metric"] == metric]
        if not tests:
            return None
        name = max(self.rows, key=lambda row: row[metric])["name"]
        others = [test["p holm"] for test in tests if name in (test["name"], test["against"])]
        return name, stars(max(others)) if others else ""


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

    models: name -> one scorer or several, which differ in their seed alone.
    Other arguments: as in `ranking.evaluate`.

    With "popularity" among the metrics each row also has "popularity index@k": the mean train clicks of a recommended
    item, divided by the largest such mean among the rows (CLRec, Zhou et al. 2021, appendix). The row that recommends
    the most popular items has 1.

    Each pair of names is tested by `paired_test` at every cut-off in recall, hr, ndcg, mrr, map and auc, the metrics
    that each user has; the remaining metrics describe all lists together. A user's value is the mean over the runs of a
    name. A test holds the "name", the name it is "against", the "metric", what `paired_test` returns ("difference" is
    "name" minus "against"), and "p holm", which is p corrected for the number of all tests (Holm 1979): with
    probability 0.95 no test has "p holm" below 0.05 by chance. The order of the names changes no p-value.

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
        raise ValueError("models: expected at least one scorer per name, got none")
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


def stars(p: float) -> str:
    """A star for each of 0.05, 0.01 and 0.001 that p is below.

    >>> stars(0.2), stars(0.049), stars(0.0009)
    ('', '*', '***')
    """
    return "*" * sum(p < level for level in STARS)


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
    """Fisher's paired randomisation test, two-sided, of the mean of a - b over users; a, b: float [U].

    Under the null hypothesis a user's two values are exchangeable, so the difference may have either sign. Where at
    most 13 users differ, p is exact: the share of all patterns of signs whose mean is at least as far from 0 as the
    observed one. Else each draw gives every difference a random sign, and p = (1 + #draws with such a mean) /
    (1 + draws).

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
    if len(moved) <= EXACT:
        signs = (np.arange(2 ** len(moved))[:, None] >> np.arange(len(moved))) & 1
        p = float(_as_far(moved, signs).mean())
    else:
        rng = np.random.default_rng(seed)
        as_far, block = 0, max(1, 2**22 // len(moved))
        for start in range(0, draws, block):
            signs = rng.integers(0, 2, (min(block, draws - start), len(moved)), dtype=np.int8)
            as_far += int(_as_far(moved, signs).sum())
        p = (1 + as_far) / (1 + draws)
    error = float(difference.std(ddof=1) / np.sqrt(len(a))) if len(a) > 1 else float("inf")
    return {"difference": observed, "p": p, "low": observed - 1.96 * error, "high": observed + 1.96 * error}


def _as_far(moved: np.ndarray, signs: np.ndarray) -> np.ndarray:
    """bool [n]: whether the sum of `moved`, with the signs of those turned that are 1 in a row of `signs`, is as far
    from 0 as its sum without turns.
    """
    sums = moved.sum() - 2.0 * (signs @ moved)
    return np.abs(sums) >= abs(moved.sum()) * (1 - 1e-12)


def _latex_cell(row: Mapping[str, Any], column: str, best: tuple[str, str] | None) -> str:
    if column not in row:
        return "--"
    text = number(column, row[column])
    if best is not None and best[0] == row["name"]:
        text = latex.bold(text) + best[1]
    spread = row.get(f"{column} sd")
    return text if spread is None else f"{text} {latex.escaped('±')} {number(column, spread)}"


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
