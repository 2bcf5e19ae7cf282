"""Metrics by groups of cases, ranking from corrupted histories, and item features as vectors."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastcl.recsys.data import Cases, Feature, Histories, Interactions, Items
from fastcl.recsys.evaluation.distance import feature_vectors
from fastcl.recsys.evaluation.groups import by_group, check_groups
from fastcl.recsys.evaluation.measures import measure
from fastcl.recsys.evaluation.ranking import evaluate, rank_cases
from fastcl.recsys.evaluation.robustness import delete, replace, robustness
from fastcl.recsys.models.floors import Popularity

INF = math.inf


def test_a_split_carries_the_counts_and_groups_add_up() -> None:
    rng = np.random.default_rng(3)
    log = Histories.from_lists([rng.choice(np.arange(1, 90), size=rng.integers(3, 60)).tolist() for _ in range(200)])
    split = Interactions(Items(tuple(map(str, range(1, 90)))), tuple(map(str, range(200))), log).split()
    popularity = Popularity(split.counts)
    assert evaluate(popularity, split.test) == evaluate(popularity, split.test, counts=split.counts)
    found = rank_cases(popularity, split.test, k=(5, 20))
    whole = measure(found, ("recall", "ndcg"))
    target = split.test.target
    counted = {
        "popularity": split.counts[target],
        "frequency": (target[:, None] == target).sum(1),
        "length": split.test.history.lengths,
    }
    for by, value in counted.items():
        rows = by_group(found, split.test)[by]
        assert sum(row["cases"] for row in rows) == 200
        for row in rows:
            low, _, high = row["group"].rstrip("+").partition("-")
            inside = (value >= int(low)) & (value <= (int(high) if high else 10**9))
            assert inside.sum() == row["cases"]
            assert row["recall@20"] == pytest.approx((found.rank[inside] <= 20).mean())
        for name in ("recall@5", "ndcg@20"):
            assert sum(row[name] * row["cases"] for row in rows) / 200 == pytest.approx(whole[name])
    with pytest.raises(ValueError, match="by: expected names among popularity, frequency, length, got 'age'"):
        by_group(found, split.test, by=("age",))


def test_groups_by_a_feature_of_the_targets() -> None:
    """A case is in the group of each value of its target, and in none where its target has no value."""
    labels = [["red", "big"], ["red"], [], ["blue", "big"], ["red"]]
    items = Items(tuple("abcde"), None, {"look": Feature.from_labels(labels)})
    lists = [[1, 2, 3], [3, 2, 1], [1, 3, 4], [4, 1, 5], [2, 1, 3]]
    split = Interactions(items, tuple("uvwxy"), Histories.from_lists(lists)).split()
    found = rank_cases(Popularity(split.counts), split.test, k=(1, 2))
    (rows,) = by_group(found, split.test, by=("look",)).values()
    targets = [row[-1] for row in lists]
    assert [(row["group"], row["cases"]) for row in rows] == [("big", 2), ("red", 2), ("blue", 1)]
    for row in rows:
        inside = [row["group"] in labels[target - 1] for target in targets]
        assert row["recall@2"] == pytest.approx((found.rank[inside] <= 2).mean())
    with pytest.raises(ValueError, match="by: expected names among popularity, frequency, length, look, got 'age'"):
        by_group(found, split.test, by=("age",))


@given(st.integers(0, 10**6), st.floats(0.0, 1.0))
@settings(deadline=None, max_examples=60)
def test_corrupted_histories(seed: int, ratio: float) -> None:
    rng = np.random.default_rng(seed)
    lists = [rng.integers(1, 8, rng.integers(0, 12)).tolist() for _ in range(6)]
    histories = Histories.from_lists(lists, [[float(t) for t in range(len(row))] for row in lists])
    fewer = delete(histories, ratio, 7, np.random.default_rng(seed))
    other = replace(histories, ratio, 7, np.random.default_rng(seed))
    kept = [len(row) - min(math.floor(ratio * len(row) + 1e-9), max(len(row) - 1, 0)) for row in lists]
    assert fewer.lengths.tolist() == kept
    assert fewer.time is not None
    assert other.lengths.tolist() == histories.lengths.tolist()
    for row, items in enumerate(lists):
        at = fewer.time[fewer.offsets[row] : fewer.offsets[row + 1]].astype(int)  # the times name the places
        assert (np.diff(at) > 0).all()
        assert fewer.item[fewer.offsets[row] : fewer.offsets[row + 1]].tolist() == [items[place] for place in at]
        changed = sum(a != b for a, b in zip(items, other.item[other.offsets[row] :].tolist(), strict=False))
        assert changed == math.floor(ratio * len(items) + 1e-9)
    assert len(other.item) == 0 or (other.item.min() >= 1 and other.item.max() <= 7)


def test_more_corruption_includes_less() -> None:
    histories = Histories.from_lists([list(range(1, 21))] * 5)
    few, many = (set(np.flatnonzero(replace(histories, r, 99, np.random.default_rng(0)).item != histories.item))
                 for r in (0.2, 0.5))  # fmt: skip
    assert few < many


def test_robustness_reads_noise_and_masks_the_truth() -> None:
    class Echo:
        """Recommends the history it reads, newest first."""

        def scores(self, histories: Histories) -> torch.Tensor:
            table = torch.zeros(len(histories), 31)
            table[:, 0] = -INF
            for row in range(len(histories)):
                table[row, histories.item[histories.offsets[row] : histories.offsets[row + 1]]] = 1.0
            return table

    lists = [[1 + (user + step) % 30 for step in range(10)] for user in range(30)]
    targets = np.array([row[4] for row in lists])
    cases = Cases(np.arange(30), Histories.from_lists(lists), targets, np.ones(31, np.int64))
    kept = robustness(Echo(), cases, ratios=(0.0, 0.5), kinds=("delete",), seen="keep", k=(10,))
    assert kept[0]["recall@10"] == 1.0
    assert 0.2 < kept[1]["recall@10"] < 0.8
    masked = robustness(Echo(), cases, ratios=(0.0, 0.9), k=(30,))
    assert [row["recall@30"] for row in masked] == [0.0] * 4  # a deleted item is still a seen one
    assert kept == robustness(Echo(), cases, ratios=(0.0, 0.5), kinds=("delete",), seen="keep", k=(10,))
    with pytest.raises(ValueError, match="ratios: expected numbers from 0 to 1"):
        robustness(Echo(), cases, ratios=(1.5,))


def test_feature_vectors_need_features() -> None:
    with pytest.raises(ValueError, match="items: expected item features"):
        feature_vectors(Items(("a",)))
    vectors = feature_vectors(Items(("a", "b"), features={"f": Feature.from_labels([["x"], []])}))
    assert vectors.tolist() == [[0.0], [1.0], [0.0]]


def test_a_feature_with_the_name_of_a_group_is_refused() -> None:
    with pytest.raises(ValueError, match="by: expected one meaning, got 'length'"):
        check_groups(["length"], ["length"])
    check_groups(["length", "brand"], ["popularity", "brand"])


def test_frequency_is_that_of_contrastvaes_table_2(data_dir: Path) -> None:
    split = Interactions.read(data_dir / "amazon/Office_Products.txt.gz", format="sequence").split()
    found = rank_cases(Popularity(split.counts), split.test)
    assert [row["cases"] for row in by_group(found, split.test)["frequency"]] == [3150, 1028, 547, 97, 83]
