"""Models side by side: mean and spread over seeds, the relative popularity index, and paired tests over users.

Callers pass loaded models; the command line reads runs and data. The metrics are those of `ranking.evaluate`.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import torch

from fastcl.recsys import latex
from fastcl.recsys.data import PAD, Cases, Scorer
from fastcl.recsys.evaluation.cutoffs import Cutoffs, Metrics, cutoffs_in, parted
from fastcl.recsys.evaluation.distance import MeanDistance
from fastcl.recsys.evaluation.measures import COUNTS, DISTANCE, OF_LISTS, OF_RANKS, WITHOUT_K, measure, users_gains
from fastcl.recsys.evaluation.paired import holm, paired_test, stars, swap_test
from fastcl.recsys.evaluation.ranking import MEMORY, metric_names, rank_cases, wanted_vectors
from fastcl.recsys.showing import number


class Comparison(NamedTuple):
    """rows: one dict per name: "name", "runs", each metric's mean over the runs and, as "METRIC sd", the standard
    deviation over the runs (n - 1 in the denominator; absent for a single run).
    tests: one dict per pair of names, per metric that is tested, and per cut-off.
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
        """Two tables. The first has a row for each name with means ± standard deviations; the best value of a metric
        that has one is bold, with the stars of `best`. The second has a row for each test: the difference, its 95%
        interval where there is one, and its corrected p with stars (* below 0.05, ** below 0.01, *** below 0.001).
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
                 f"${test['low']:+.4f}$ to ${test['high']:+.4f}$" if "low" in test else "--",
                 f"{test['p holm']:.4f}{stars(test['p holm'])}"]
                for test in self.tests
            ]  # fmt: skip
            head = ["", "against", "metric", "difference", r"95\%", "$p$ (Holm)"]
            caption = f"two-sided paired randomisation tests over users, p corrected for {len(lines)} tests by Holm"
            parts.append(latex.tabular(head, lines, caption))
        return "\n\n".join(parts) + "\n"

    def best(self, metric: str) -> tuple[str, str] | None:
        """The name with the highest value of a tested metric, and stars by the largest of its corrected p-values
        against all other names; None for a metric that is not tested and for one of all lists together, whose highest
        value is not the best.
        """
        tests = [test for test in self.tests if test["metric"] == metric]
        if not tests or parted(metric)[0] not in (*OF_RANKS, *WITHOUT_K):
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

    Each pair of names is tested at every cut-off in recall, hr, ndcg, mrr, map and auc, the metrics that each user has,
    by `paired_test`; a user's value is the mean over the runs of a name. Where `metrics` names some that describe all
    lists together (diversity, coverage, popularity, gini, novelty, distance), these are tested by `swap_test`, whose
    users swap their whole lists; they have no interval. A test holds the "name", the name it is "against", the
    "metric", what the test returns ("difference" is "name" minus "against"), and "p holm", which is p corrected for the
    number of all tests (Holm 1979): with probability 0.95 no test has "p holm" below 0.05 by chance. The order of the
    names changes no p-value.

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
    of_lists = [n for n in names if metrics is not None and parted(n)[0] in (*OF_LISTS, DISTANCE)]
    rows, gains = [], {}
    lists: dict[str, list[np.ndarray]] = {}
    for name, runs in models.items():
        results, of_users = [], []
        lists[name] = []
        for scorer in runs:
            parts: list[torch.Tensor] = []
            found = rank_cases(
                scorer, cases, k=k, seen=seen, protocol=protocol, vectors=vectors, seed=seed, memory=memory,
                on_lists=parts.append if of_lists else None,
            )  # fmt: skip
            lists[name] += [torch.cat(parts).numpy()] if of_lists else []
            results.append(measure(found, names))
            of_users.append(users_gains(found, names))
        rows.append({"name": name, "runs": len(runs), **_over_runs(results)})
        gains[name] = {metric: np.mean([gain[metric] for gain in of_users], axis=0) for metric in of_users[0]}
    for name in names:
        if name.startswith("popularity@"):
            _add_index(rows, name)
    tests: list[dict[str, Any]] = []
    for other, name in combinations(gains, 2):
        tested = {metric: paired_test(of, gains[other][metric]) for metric, of in gains[name].items()}
        if of_lists:
            tested |= swap_test(_swapping(lists[name], lists[other], of_lists, found.counts, vectors), len(cases))
        tests += [{"name": name, "against": other, "metric": m, **tested[m]} for m in names if m in tested]
    corrected = holm([test["p"] for test in tests])
    return Comparison(rows, [{**test, "p holm": p} for test, p in zip(tests, corrected, strict=True)])


def _swapping(
    a: Sequence[np.ndarray],
    b: Sequence[np.ndarray],
    names: Sequence[str],
    counts: np.ndarray,
    vectors: torch.Tensor | None,
) -> Callable[[np.ndarray], dict[str, float]]:
    """What `swap_test` calls: the differences in `names`, metrics of all lists at a cut-off, between two models.

    a, b: for each run of a model its lists, int64 [C, K]. The runs of both models are paired, each as often as any
    other one of its model, and a difference is the mean over the pairs.
    """
    pairs = [(a[n % len(a)], b[n % len(b)]) for n in range(math.lcm(len(a), len(b)))]
    wanted = [(name, *parted(name)) for name in names]
    apart: dict[tuple[int, int | None], np.ndarray] = {}
    if vectors is not None:
        mean = MeanDistance(vectors, len(counts))
        cuts = {k for _, metric, k in wanted if metric == DISTANCE}
        apart = {(id(lists), k): mean.of(torch.from_numpy(lists[:, :k])).numpy() for lists in (*a, *b) for k in cuts}

    def value(metric: str, k: int | None, swapped: np.ndarray, own: np.ndarray, others: np.ndarray) -> float:
        if metric == DISTANCE:
            found = np.where(swapped, apart[id(others), k], apart[id(own), k])
            return float(np.nansum(found) / max(np.count_nonzero(~np.isnan(found)), 1))
        mixed = np.where(swapped[:, None], others[:, :k], own[:, :k])
        shown = np.bincount(mixed.ravel(), minlength=len(counts))
        shown[PAD] = 0
        return OF_LISTS[metric](shown, counts)

    def differences(swapped: np.ndarray) -> dict[str, float]:
        return {
            name: float(np.mean([value(metric, k, swapped, x, y) - value(metric, k, swapped, y, x) for x, y in pairs]))
            for name, metric, k in wanted
        }

    return differences


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
