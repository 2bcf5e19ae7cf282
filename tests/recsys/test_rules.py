"""The rules of evaluation against plain Python, on random problems with ties, repeats, -inf, unseen targets and empty
histories, in every protocol and metric; and what numbering items otherwise must not change.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from made import LEARNED, made

from fastcl.recsys import (
    Cases,
    Histories,
    Interactions,
    Items,
    by_group,
    evaluate,
    export,
    rank_cases,
    recommend,
    robustness,
)
from fastcl.recsys.evaluation.measures import OF_LISTS, OF_RANKS
from fastcl.recsys.evaluation.ranking import PROTOCOLS, SEEN, draw_negatives

pytestmark = pytest.mark.usefixtures("one_thread")
COUNTS = [60, pytest.param(5_000, marks=pytest.mark.slow)]
INF = math.inf


class Problem(NamedTuple):
    table: np.ndarray  # a row of scores a case
    histories: list[list[int]]
    targets: list[int]
    counts: np.ndarray
    k: tuple[int, ...]

    @property
    def cases(self) -> Cases:
        user = np.arange(len(self.targets))
        return Cases(user, Histories.from_lists(self.histories), np.array(self.targets), self.counts)


class Rows:
    """Scores row after row of a table, as far as they are asked for."""

    def __init__(self, table: np.ndarray) -> None:
        self.table, self.at = torch.from_numpy(table), 0

    def scores(self, histories: Histories) -> torch.Tensor:
        self.at += len(histories)
        return self.table[self.at - len(histories) : self.at]


def problem(seed: int) -> Problem:
    rng = np.random.default_rng(seed)
    users, items = int(rng.integers(1, 9)), int(rng.integers(2, 160 if seed % 7 == 0 else 14))
    values = np.array([-INF, -1.5, 0.0, 0.5, 2.0, INF]) if seed % 3 == 0 else rng.normal(size=[2, 5, 500][seed % 3])
    table = rng.choice(values, (users, items + 1)).astype([np.float32, np.float64][seed % 2])
    histories = [rng.integers(1, items + 1, rng.integers(0, 6)).tolist() for _ in range(users)]
    targets = [
        int(rng.choice(row)) if row and rng.random() < 0.3 else int(rng.integers(1, items + 1)) for row in histories
    ]
    counts = rng.integers(0, 4, items + 1)
    k = tuple(sorted({int(rng.integers(1, items + 3)) for _ in range(2)}))
    return Problem(table, histories, targets, counts, k)


def expected(p: Problem, seen: str, protocol: str, seed: int) -> dict[str, float]:
    """One target after the other."""
    drawn_by = PROTOCOLS[protocol]
    negatives = None
    if drawn_by is not None:
        rng = np.random.default_rng(seed)
        histories = Histories.from_lists(p.histories)
        negatives = draw_negatives(histories, np.array(p.targets), drawn_by(p.counts), rng, seen).tolist()
    found: dict[str, list[float]] = {}
    for nth, (history, target) in enumerate(zip(p.histories, p.targets, strict=True)):
        hidden = set(history) if seen == "mask" else set()
        row = p.table[nth].tolist()
        allowed = [i for i in range(1, len(row)) if i not in hidden and i != target]
        if negatives is not None:
            assert all(i in allowed and drawn_by is not None and drawn_by(p.counts)[i] for i in negatives[nth] if i)
            allowed = [i for i in negatives[nth] if i]
        others = [row[i] for i in allowed if row[i] > -INF]
        missed = target in hidden or row[target] == -INF
        rank = 1 + sum(x > row[target] for x in others) + sum(x == row[target] for x in others) / 2
        for k in p.k:
            hit = not missed and rank <= k
            for name in ("recall", "hr"):
                found.setdefault(f"{name}@{k}", []).append(float(hit))
            for name in ("mrr", "map"):
                found.setdefault(f"{name}@{k}", []).append(1 / rank if hit else 0.0)
            found.setdefault(f"ndcg@{k}", []).append(1 / math.log2(rank + 1) if hit else 0.0)
        below = len(others) - (rank - 1)
        found.setdefault("auc", []).append(0.0 if missed else below / len(others) if others else 1.0)
    means = {name: sum(values) / len(values) for name, values in found.items()}
    pairs = list(zip(p.histories, p.targets, strict=True))
    return means | {
        "cases": len(pairs),
        "unseen_targets": sum(p.counts[target] == 0 for target in p.targets),
        "repeated_targets": sum(target in history for history, target in pairs),
    }


@pytest.mark.parametrize("count", COUNTS)
def test_every_rank_metric_in_every_protocol_is_what_plain_loops_find(count: int) -> None:
    tried = 0
    for seed in range(count):
        p = problem(seed)
        for seen in SEEN:
            for protocol in PROTOCOLS:
                options: dict[str, Any] = {"k": p.k, "seen": seen, "protocol": protocol, "seed": seed}
                found = evaluate(
                    Rows(p.table), p.cases, metrics=(*OF_RANKS, "auc"), chunk=1 + seed % 4, counts=p.counts, **options
                )
                assert found == pytest.approx(expected(p, seen, protocol, seed), abs=1e-12), (seed, seen, protocol)
                tried += 1
    print(f"{tried:,} evaluations")


@pytest.mark.parametrize("count", COUNTS)
def test_lists_hold_the_best_items_and_their_metrics_are_what_plain_loops_find(count: int) -> None:
    for seed in range(count):
        p = problem(seed)
        for seen in SEEN:
            options: dict[str, Any] = {"k": p.k, "seen": seen}
            ranking = rank_cases(Rows(p.table), p.cases, chunk=3, **options)
            assert ranking.shown is not None
            found = evaluate(Rows(p.table), p.cases, metrics=tuple(OF_LISTS), chunk=3, **options)
            for k, shown in zip(p.k, ranking.shown.tolist(), strict=True):
                sure, possible, places = [0] * len(shown), [0] * len(shown), 0
                for row, history in zip(p.table.tolist(), p.histories, strict=True):
                    hidden = set(history) if seen == "mask" else set()
                    free = [i for i in range(1, len(row)) if i not in hidden and row[i] > -INF]
                    places += min(k, len(free))
                    for i in free:  # ties are in any order
                        sure[i] += sum(row[j] >= row[i] for j in free) <= k
                        possible[i] += sum(row[j] > row[i] for j in free) < k
                assert sum(shown) == places, seed
                assert all(a <= b <= c for a, b, c in zip(sure, shown, possible, strict=True)), seed
                clicks = [item for item, times in enumerate(shown) for _ in range(times)]
                n, total = len(shown) - 1, max(int(p.counts.sum()), 1)
                bits = [-math.log2(max(int(p.counts[i]), 1) / total) for i in clicks]
                differences = sum(abs(a - b) for a in shown[1:] for b in shown[1:])
                assert {name: found[f"{name}@{k}"] for name in OF_LISTS} == pytest.approx({
                    "diversity": len(set(clicks)),
                    "coverage": len(set(clicks)) / n,
                    "popularity": sum(int(p.counts[i]) for i in clicks) / max(len(clicks), 1),
                    "novelty": sum(bits) / max(len(bits), 1),
                    "gini": differences / (2 * n * max(sum(shown), 1)),
                })  # fmt: skip


@pytest.mark.parametrize("count", COUNTS)
def test_groups_and_noise_add_up_to_the_whole(count: int) -> None:
    for seed in range(0, count, 4):
        p = problem(seed)
        whole = evaluate(Rows(p.table), p.cases, k=p.k)
        for rows in by_group(rank_cases(Rows(p.table), p.cases, k=p.k), p.cases).values():
            for name in (f"{metric}@{k}" for metric in ("recall", "ndcg") for k in p.k):
                mean = sum(row["cases"] * row[name] for row in rows) / len(p.targets)
                assert mean == pytest.approx(whole[name])
        clean = robustness(Rows(p.table), p.cases, ratios=(0.0,), kinds=("delete",), k=p.k)
        assert {name: value for name, value in clean[0].items() if "@" in name}.items() <= whole.items()


@pytest.mark.parametrize("seed", range(20))
def test_numbering_items_otherwise_changes_no_figure(seed: int) -> None:
    p = problem(3 * seed + 1)  # distinct scores: ties may be shown in any order
    rng = np.random.default_rng(seed)
    p = p._replace(table=rng.permuted(np.tile(np.arange(p.table.shape[1], dtype=float), (len(p.table), 1)), axis=1))
    new = np.append(0, 1 + rng.permutation(p.table.shape[1] - 1))  # old number -> new one
    old = np.argsort(new)
    turned = Problem(
        np.ascontiguousarray(p.table[:, old]),
        [new[row].tolist() for row in p.histories],
        new[p.targets].tolist(),
        p.counts[old],
        p.k,
    )
    metrics = (*OF_RANKS, *OF_LISTS, "auc")
    one, two = (evaluate(Rows(q.table), q.cases, k=p.k, metrics=metrics) for q in (p, turned))
    assert one == pytest.approx(two)


@pytest.mark.parametrize("name", LEARNED)
def test_a_model_whose_items_are_numbered_otherwise_gives_the_same_figures(name: str, tmp_path: Any) -> None:
    rng = np.random.default_rng(0)
    clicks = [[f"i{i}" for i in rng.integers(0, 37, 6)] for _ in range(40)]
    figures, lists, vectors = [], [], []
    weights: dict[str, dict[str, torch.Tensor]] = {}
    for order in (0, 1):
        ids = tuple(f"i{i}" for i in np.random.default_rng(order).permutation(37))
        items = Items(ids)
        log = Histories.from_lists([items.encode(row).tolist() for row in clicks])
        split = Interactions(items, tuple(f"u{u}" for u in range(40)), log).split()
        model = made(name, items, dim=8, max_len=6, seed=5)
        tables = {key: t for key, t in model.state_dict().items() if t.ndim > 0 and len(t) in (38, 39)}
        assert tables
        for key, table in tables.items():
            by_id = weights.setdefault(key, {item: table[n + 1].clone() for n, item in enumerate(ids)})
            for n, item in enumerate(ids):
                table[n + 1] = by_id[item]
        metrics = ("recall", "ndcg", "auc", "diversity", "popularity")
        figures.append(evaluate(model, split.test, metrics=metrics, k=(5,)))
        lists.append([[item for item, _ in row] for row in recommend(model, clicks[:10], k=4)])
        export(model, tmp_path / str(order))
        table = np.load(tmp_path / str(order) / "vectors.npy")
        vectors.append(np.stack([table[ids.index(f"i{i}")] for i in range(37)]))
    assert figures[0] == pytest.approx(figures[1])
    assert lists[0] == lists[1]
    np.testing.assert_allclose(vectors[0], vectors[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("protocol", list(PROTOCOLS))
def test_an_unseen_target_is_ranked_and_counted_and_documents_say_so(protocol: str) -> None:
    counts = np.array([0, 3, 2, 0, 1])
    cases = Cases(np.arange(3), Histories.from_lists([[1], [2], [4]]), np.array([3, 3, 1]), counts)
    scorer = Rows(np.tile([0.0, 1.0, 2.0, 9.0, 3.0], (3, 1)))
    found = evaluate(scorer, cases, k=(1,), metrics=("hr",), protocol=protocol)
    assert (found["hr@1"], found["unseen_targets"], found["cases"]) == (pytest.approx(2 / 3), 2, 3)
    page = (Path(__file__).parents[2] / "docs" / "guide" / "evaluation.md").read_text()
    assert "A target that never occurs in the training data is ranked like any other item" in page


def test_numbers_that_mean_no_item_are_refused_not_counted_as_misses() -> None:
    counts = np.array([0, 3, 2, 1])
    history = Histories.from_lists([[1], [2]])
    scorer = Rows(np.zeros((2, 4)))
    with pytest.raises(ValueError, match=r"target: expected numbers from 1 \(0 is padding\), got 0"):
        Cases(np.arange(2), history, np.array([3, 0]), counts)
    for histories, targets in (([[1], [2]], [3, 4]), ([[1], [4]], [3, 3])):
        cases = Cases(np.arange(2), Histories.from_lists(histories), np.array(targets), counts)
        with pytest.raises(ValueError, match=r"cases: expected items 1\.\.3 \(counts has 4\), got 4"):
            evaluate(scorer, cases)
    cases = Cases(np.arange(2), history, np.array([3, 3]), counts)
    with pytest.raises(ValueError, match=r"scores: expected floating-point numbers, got torch\.int64"):
        evaluate(Rows(np.zeros((2, 4), np.int64)), cases)
    found = rank_cases(Rows(np.zeros((2, 4))), cases)
    with pytest.raises(ValueError, match="cases: expected the 2 ranked cases, got 2 others"):
        by_group(found, Cases(np.arange(2), history, np.array([3, 1]), counts))
