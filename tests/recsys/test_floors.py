"""The floors against their formulas, and on Amazon data against independent figures."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import choices
from fastcl.recsys import CoOccurringConfig, MultiCLRecConfig
from fastcl.recsys.data import Histories, Interactions
from fastcl.recsys.evaluation.ranking import evaluate, top_k
from fastcl.recsys.models.floors import CoOccurrence, PersonalFrequency, Popularity

INF = math.inf


def test_popularity_and_personal_frequency() -> None:
    counts = np.array([0, 5, 0, 5_000_000, 5_000_001])
    history = Histories.from_lists([[1, 2, 2], []])
    popularity = Popularity(counts).scores(history)
    assert popularity.dtype == torch.float32
    assert popularity.tolist() == [[-INF, 5.0, 0.0, 5_000_000.0, 5_000_001.0]] * 2
    frequency = PersonalFrequency(counts).scores(history)
    assert frequency.dtype == torch.float32
    # 2 twice, 1 once, then by popularity; a user without history gets popularity.
    assert top_k(frequency, history, 4, "keep")[0].tolist() == [[2, 1, 4, 3], [4, 3, 1, 2]]
    assert (frequency[:, 0] == -INF).all()


@pytest.mark.parametrize("decay", [1.0, 0.7, 0.1])
def test_items_of_the_history_come_first_by_weight_then_by_clicks(decay: float) -> None:
    rng = np.random.default_rng(0)
    counts = np.append(0, rng.integers(0, 5, 12))
    rows = [rng.integers(1, 13, n).tolist() for n in rng.integers(0, 20, 60)]
    found = PersonalFrequency(counts, decay=decay).scores(Histories.from_lists(rows)).tolist()
    for row, scores in zip(rows, found, strict=True):
        weight = [sum(Fraction(decay) ** age for age, i in enumerate(reversed(row)) if i == item) for item in range(13)]
        order = sorted(range(1, 13), key=lambda item: (weight[item], counts[item]))
        for lower, upper in itertools.pairwise(order):
            alike = (weight[lower], counts[lower]) == (weight[upper], counts[upper])
            assert scores[lower] == scores[upper] if alike else scores[lower] < scores[upper]


def co_occurrence_oracle(train: list[list[int]], history: list[int], n_items: int) -> list[float]:
    users = {i: {u for u, row in enumerate(train) if i in row} for i in range(1, n_items + 1)}
    clicks = Counter(item for row in train for item in row)
    scores = []
    for j in range(1, n_items + 1):
        total = 0.0
        for age, i in enumerate(reversed(history)):
            if users[i] and users[j]:
                total += 0.6**age * len(users[i] & users[j]) / math.sqrt(len(users[i]) * len(users[j]))
            for row in train:
                for at, item in enumerate(row):
                    for step in (1, 2, 3, 4, 5):
                        if item == i and row[at + step : at + step + 1] == [j]:
                            total += 0.6**age * 0.6 ** (step - 1) / math.sqrt(clicks[i])
        scores.append(total)
    return scores


@given(
    st.lists(st.lists(st.integers(1, 5), max_size=6), min_size=1, max_size=5),
    st.lists(st.lists(st.integers(1, 5), max_size=5), min_size=1, max_size=3),
)
@settings(deadline=None)
def test_co_occurrence_matches_its_formula(train: list[list[int]], histories: list[list[int]]) -> None:
    scores = CoOccurrence(Histories.from_lists(train), 5).scores(Histories.from_lists(histories))
    assert scores.dtype == torch.float32
    assert scores[:, 0].tolist() == [-INF] * len(histories)
    for row, history in zip(scores[:, 1:].tolist(), histories, strict=True):
        assert row == pytest.approx(co_occurrence_oracle(train, history, 5), rel=1e-5, abs=1e-6)


def test_floors_on_amazon_are_near_the_independent_ones(data_dir: Path) -> None:
    """Recall@20 and NDCG@20 computed earlier by other code (ties broken by item number, nearly these weights)."""
    split = Interactions.read(data_dir / "amazon" / "Office_Products.txt.gz").split()
    for floor, recall, ndcg in (
        (Popularity(split.counts), 0.0055, 0.0015),
        (CoOccurrence(split.train, len(split.items), decay=0.8, steps=3), 0.1258, 0.0652),
    ):
        result = evaluate(floor, split.test, counts=split.counts, k=(20,))
        assert result["recall@20"] == pytest.approx(recall, rel=0.1)
        assert result["ndcg@20"] == pytest.approx(ndcg, rel=0.1)


def test_weights_are_those_that_validation_prefers() -> None:
    """Of the figures that benchmarks/choices.py measured, none of them on test cases."""
    measured = json.loads(choices.RESULTS.read_text())["rows"]
    rows = [row for row in measured if row["choice"] == "separation"]
    assert len(rows) == len(choices.EPOCHS) * len(choices.SEPARATION) * len(choices.SEEDS) == 4
    assert choices.standing(rows, ("separation",))[0][1] == {"separation": MultiCLRecConfig().separation}
    rows = [row for row in measured if row["choice"] == "floor"]
    assert len({row["set"] for row in rows}) == len(choices.SETS) == 8
    assert len(rows) == 8 * 40
    best = choices.standing(rows, tuple(choices.FLOOR))[0][1]
    assert best == {name: getattr(CoOccurringConfig(), name) for name in choices.FLOOR}
