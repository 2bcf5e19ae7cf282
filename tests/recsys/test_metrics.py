"""Ranking metrics against hand-computed cases, a slow oracle and an independent library, and the draw of negatives."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastcl.recsys.data import Cases, Histories
from fastcl.recsys.evaluation.measures import COUNTS
from fastcl.recsys.evaluation.ranking import draw_negatives, evaluate, how_many, rank_cases, top_k

INF = math.inf


class Table:
    """A scorer that reads its scores off a table, row by row over the calls."""

    def __init__(self, table: list[list[float]] | np.ndarray) -> None:
        self.table, self.at = torch.tensor(table, dtype=torch.float32), 0

    def scores(self, histories: Histories) -> torch.Tensor:
        self.at += len(histories)
        return self.table[self.at - len(histories) : self.at]


def cases_of(histories: list[list[int]], targets: list[int]) -> Cases:
    return Cases(np.arange(len(targets)), Histories.from_lists(histories), np.array(targets))


def metrics(
    table: list[list[float]], histories: list[list[int]], targets: list[int], *,
    k: tuple[int, ...] = (1, 2), seen: str = "mask", counts: list[int] | None = None,
) -> dict[str, float]:  # fmt: skip
    weights = np.array(counts if counts is not None else [0] + [1] * (len(table[0]) - 1))
    return evaluate(Table(table), cases_of(histories, targets), counts=weights, k=k, seen=seen)


def test_hand_computed_ranks() -> None:
    # Row 1: item 2 is seen, target 3 is best of the rest (rank 1). Row 2: target 1 is second (rank 2).
    table = [[9.0, 1.0, 8.0, 5.0, 2.0], [9.0, 3.0, 4.0, 1.0, 2.0]]
    result = metrics(table, [[2], [4]], [3, 1], counts=[0, 10, 20, 30, 40])
    assert result["recall@1"] == 0.5
    assert result["recall@2"] == 1.0
    assert result["ndcg@1"] == 0.5
    assert result["ndcg@2"] == pytest.approx((1 + 1 / math.log2(3)) / 2)
    # Lists: [3, 4] and [2, 1]; the padding column's 9.0 is never shown.
    assert (result["diversity@1"], result["diversity@2"]) == (2.0, 4.0)
    assert result["popularity@1"] == pytest.approx((30 + 20) / 2)
    assert result["popularity@2"] == pytest.approx((30 + 40 + 20 + 10) / 4)


def test_keep_ranks_seen_items_too() -> None:
    table = [[0.0, 1.0, 8.0, 5.0, 2.0]]
    assert metrics(table, [[2]], [3], seen="keep")["recall@1"] == 0.0
    assert metrics(table, [[2]], [3], seen="mask")["recall@1"] == 1.0
    assert metrics(table, [[2]], [2], seen="keep")["recall@1"] == 1.0
    assert metrics(table, [[2]], [2], seen="mask", k=(4,))["recall@4"] == 0.0


def test_ties_count_half() -> None:
    # All 4 items equal: rank = 1 + 3 / 2 = 2.5.
    result = metrics([[0.0] * 5], [[]], [1], k=(2, 3))
    assert (result["recall@2"], result["recall@3"]) == (0.0, 1.0)
    assert result["ndcg@3"] == pytest.approx(1 / math.log2(3.5))
    # One seen item leaves the tie: rank 2.
    assert metrics([[0.0] * 5], [[4]], [1])["recall@2"] == 1.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_scores_are_counted_exactly_in_every_type(dtype: torch.dtype) -> None:
    scores = torch.randint(0, 4, (3, 5_000)).to(dtype)  # more equal scores than 16-bit types can count
    scores[0, :7] = -torch.inf
    for compared in (torch.gt, torch.eq):
        for value in (scores[:, 10:11], -torch.inf):
            assert how_many(compared, scores, value).tolist() == compared(scores, value).sum(1).tolist()


def test_a_target_at_minus_infinity_is_a_miss() -> None:
    assert metrics([[0.0, -INF, -INF, -INF]], [[]], [1], k=(3,)) == {
        "recall@3": 0.0, "ndcg@3": 0.0, "diversity@3": 0.0, "popularity@3": 0.0,
        "cases": 1, "unseen_targets": 0, "repeated_targets": 0,
    }  # fmt: skip


def test_refused_inputs() -> None:
    good = {"counts": np.array([0, 1, 1])}
    cases = cases_of([[1]], [2])
    for table, message in (
        ([[0.0, math.nan, 1.0]], "scores: expected numbers, got NaN"),
        ([[0.0, 1.0]], r"scores: expected \[1, 3\]"),
    ):
        with pytest.raises(ValueError, match=message):
            evaluate(Table(table), cases, **good)
    for options, message in (
        ({"k": (0,)}, "k: expected whole numbers from 1"),
        ({"k": (5, 5)}, "k: expected"),
        ({"k": ()}, "k: expected"),
        ({"seen": "drop"}, "seen: expected one of 'mask', 'keep', got 'drop'"),
        ({"protocol": "uniform"}, "protocol: expected one of 'full', 'uniform100', 'pop100', got 'uniform'"),
        ({"chunk": 0}, "chunk: expected at least 1"),
        ({"counts": np.ones(3)}, "counts: expected an integer vector"),
    ):
        with pytest.raises(ValueError, match=message):
            evaluate(Table([[0.0, 1.0, 2.0]]), cases, **{**good, **options})
    with pytest.raises(ValueError, match="cases: expected at least one"):
        evaluate(Table([[0.0, 1.0, 2.0]]), cases_of([], []), **good)


def oracle(
    scores: np.ndarray, histories: list[list[int]], targets: list[int], k: int, seen: str
) -> tuple[float, float]:
    recall, ndcg = 0.0, 0.0
    for row, history, target in zip(scores.tolist(), histories, targets, strict=True):
        banned = set(history) if seen == "mask" else set()
        if target in banned:
            continue
        others = [score for item, score in enumerate(row) if item not in banned | {0, target}]
        rank = 1 + sum(s > row[target] for s in others) + 0.5 * sum(s == row[target] for s in others)
        if rank <= k:
            recall, ndcg = recall + 1, ndcg + 1 / math.log2(rank + 1)
    return recall / len(targets), ndcg / len(targets)


@given(
    st.integers(0, 10**6), st.integers(1, 12), st.integers(2, 15), st.sampled_from(["mask", "keep"]), st.integers(1, 5)
)
@settings(deadline=None)
def test_full_ranking_matches_the_oracle(seed: int, users: int, n_items: int, seen: str, chunk: int) -> None:
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, 6, (users, n_items + 1)).astype(np.float32)  # few values: many ties
    histories = [rng.integers(1, n_items + 1, rng.integers(0, 6)).tolist() for _ in range(users)]
    targets = rng.integers(1, n_items + 1, users).tolist()
    counts = rng.integers(0, 9, n_items + 1)
    cases = cases_of(histories, targets)
    result = evaluate(Table(scores), cases, counts=counts, k=(1, 3, 20), seen=seen, chunk=chunk)
    for k in (1, 3, 20):
        assert (result[f"recall@{k}"], result[f"ndcg@{k}"]) == pytest.approx(
            oracle(scores, histories, targets, k, seen)
        )
    shown: Counter[int] = Counter()
    lists = top_k(torch.from_numpy(scores), cases.history, 20, seen)[0]
    for row, history in zip(lists[:, :3].tolist(), histories, strict=True):
        kept = [item for item in row if item]
        assert len(kept) == min(3, n_items - (len(set(history)) if seen == "mask" else 0))
        assert seen == "keep" or not set(kept) & set(history)
        shown.update(kept)
    assert result["diversity@3"] == len(shown)
    mean = sum(counts[item] * times for item, times in shown.items()) / max(sum(shown.values()), 1)
    assert result["popularity@3"] == pytest.approx(mean)


def test_top_k_fills_up_with_padding_and_leaves_its_input_alone() -> None:
    scores = torch.tensor([[5.0, 3.0, 2.0, 4.0]])
    items, best = top_k(scores, Histories.from_lists([[3, 3]]), k=9)
    assert items.tolist() == [[1, 2, 0]]
    assert best.tolist() == [[3.0, 2.0, -INF]]
    assert scores.tolist() == [[5.0, 3.0, 2.0, 4.0]]
    assert top_k(scores[:0], Histories.from_lists([]), k=2)[0].shape == (0, 2)
    with pytest.raises(ValueError, match=r"scores: expected \[2, I\+1\]"):
        top_k(scores, Histories.from_lists([[1], [2]]), k=1)


@given(st.integers(0, 10**6), st.sampled_from(["mask", "keep"]), st.integers(1, 160))
@settings(deadline=None, max_examples=50)
def test_negatives_are_eligible_distinct_and_complete(seed: int, seen: str, n_items: int) -> None:
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 4, n_items + 1)
    counts[0] = 0
    histories = [rng.integers(1, n_items + 1, rng.integers(0, 30)).tolist() for _ in range(5)]
    targets = rng.integers(1, n_items + 1, 5)
    drawn = draw_negatives(Histories.from_lists(histories), targets, counts, rng, seen)
    assert drawn.shape == (5, 100)
    for row, history, target in zip(drawn.tolist(), histories, targets.tolist(), strict=True):
        eligible = {i for i in range(1, n_items + 1) if counts[i]} - {target} - set(history if seen == "mask" else [])
        chosen = [item for item in row if item]
        assert len(chosen) == len(set(chosen)) == min(100, len(eligible))
        assert set(chosen) <= eligible


def test_negatives_follow_the_counts() -> None:
    # 101 eligible items, one too many: the 98 heavy ones come first, then two of the items 1, 2, 3 at 1 : 2 : 4.
    counts = np.array([0, 1, 2, 4, *[10**9] * 98, 1])
    targets = np.full(4000, len(counts) - 1)
    drawn = draw_negatives(Histories.from_lists([[]] * len(targets)), targets, counts, np.random.default_rng(0))
    missing = np.array([sum(item not in row for row in drawn.tolist()) for item in (1, 2, 3)]) / len(targets)
    w = {1: 1.0, 2: 2.0, 3: 4.0}
    for item, share in zip((1, 2, 3), missing, strict=True):
        a, b = (w[other] for other in w if other != item)
        total = 7.0
        exact = a / total * b / (total - a) + b / total * a / (total - b)
        assert share == pytest.approx(exact, abs=4 * math.sqrt(exact * (1 - exact) / len(targets)))


def test_pop100_is_seeded_and_independent_of_the_chunk() -> None:
    rng = np.random.default_rng(3)
    counts = np.append(0, rng.integers(1, 50, 400))
    histories = [rng.integers(1, 401, 8).tolist() for _ in range(60)]
    cases = cases_of(histories, rng.integers(1, 401, 60).tolist())
    scores = rng.normal(size=(60, 401))

    def run(seed: int, chunk: int) -> dict[str, float]:
        return evaluate(Table(scores), cases, counts=counts, protocol="pop100", seed=seed, chunk=chunk)

    assert set(run(0, 7)) == {"hr@10", "ndcg@10", *COUNTS}
    assert run(0, 7) == run(0, 60)
    assert run(0, 7) != run(1, 7)


def test_pop100_ranks_among_the_drawn_items_only() -> None:
    rng = np.random.default_rng(4)
    counts = np.append(0, rng.integers(1, 50, 300))
    histories = [rng.integers(1, 301, 5).tolist() for _ in range(40)]
    targets = rng.integers(1, 301, 40)
    cases = cases_of(histories, targets.tolist())
    scores = rng.normal(size=(40, 301)).astype(np.float32)
    drawn = draw_negatives(cases.history, targets, counts, np.random.default_rng(9))
    ranks = [1 + sum(scores[c, item] > scores[c, targets[c]] for item in drawn[c]) for c in range(40)]
    hits = [rank <= 10 and targets[c] not in histories[c] for c, rank in enumerate(ranks)]
    result = evaluate(Table(scores), cases, counts=counts, protocol="pop100", seed=9)
    assert result["hr@10"] == pytest.approx(np.mean(hits))
    gains = [hit / math.log2(rank + 1) for hit, rank in zip(hits, ranks, strict=True)]
    assert result["ndcg@10"] == pytest.approx(np.mean(gains))


def test_ranks_agree_with_an_independent_library() -> None:
    ir_measures = pytest.importorskip("ir_measures", reason="needs ir_measures (extra test)")
    rng = np.random.default_rng(5)
    users, n_items = 80, 60
    scores = rng.permutation(users * (n_items + 1)).reshape(users, -1).astype(np.float32)  # no ties: theirs differ
    histories = [rng.integers(1, n_items + 1, 6).tolist() for _ in range(users)]
    targets = [int(rng.choice(np.setdiff1d(np.arange(1, n_items + 1), history))) for history in histories]
    cases = cases_of(histories, targets)
    ours = evaluate(
        Table(scores), cases, counts=np.ones(n_items + 1, np.int64), k=(1, 5, 20),
        metrics=("recall", "ndcg", "mrr", "map"),
    )  # fmt: skip
    run = [
        ir_measures.ScoredDoc(str(user), str(item), float(scores[user, item]))
        for user, history in enumerate(histories)
        for item in range(1, n_items + 1)
        if item not in history
    ]
    qrels = [ir_measures.Qrel(str(user), str(target), 1) for user, target in enumerate(targets)]
    names = {"recall": "R", "ndcg": "nDCG", "mrr": "RR", "map": "AP"}
    pairs = [(our, their, k) for our, their in names.items() for k in (1, 5, 20)]
    theirs = {f"{our}@{k}": ir_measures.parse_measure(f"{their}@{k}") for our, their, k in pairs}
    found = ir_measures.calc_aggregate(list(theirs.values()), qrels, run)
    assert {name: ours[name] for name in theirs} == pytest.approx({name: found[m] for name, m in theirs.items()})


@given(st.integers(0, 10**6), st.sampled_from(["mask", "keep"]))
@settings(deadline=None, max_examples=30)
def test_auc_counts_pairs(seed: int, seen: str) -> None:
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, 5, (6, 9)).astype(np.float32)
    histories = [rng.integers(1, 9, 3).tolist() for _ in range(6)]
    targets = rng.integers(1, 9, 6).tolist()
    pairs = []
    for row, history, target in zip(scores, histories, targets, strict=True):
        banned = set(history) if seen == "mask" else set()
        others = [row[item] for item in range(1, 9) if item not in banned | {target}]
        won = [float(row[target] > other) + 0.5 * float(row[target] == other) for other in others]
        pairs.append(0.0 if target in banned else float(np.mean(won)))
    result = evaluate(
        Table(scores), cases_of(histories, targets), counts=np.ones(9, np.int64), seen=seen, metrics=("auc",)
    )
    assert result["auc"] == pytest.approx(np.mean(pairs))


def test_metrics_of_lists_by_hand() -> None:
    # Lists at k=2: [1, 2], [1, 3]; at k=1: [1], [1].
    table = [[0.0, 9.0, 8.0, 1.0, 0.0], [0.0, 9.0, 1.0, 8.0, 0.0]]
    vectors = torch.tensor([[9.0, 9.0], [1.0, 0.0], [0.0, 2.0], [3.0, 0.0], [1.0, 1.0]])
    result = evaluate(
        Table(table), cases_of([[], []], [4, 2]), counts=np.array([0, 4, 2, 2, 0]), k=(1, 2), vectors=vectors,
        metrics=("coverage", "gini", "novelty", "distance"),
    )  # fmt: skip
    assert (result["coverage@1"], result["coverage@2"]) == (0.25, 0.75)  # a cut-off has its own coverage
    assert result["gini@1"] == 0.75
    assert result["gini@2"] == pytest.approx(sum(abs(a - b) for a in (0, 1, 1, 2) for b in (0, 1, 1, 2)) / (2 * 16 * 1))
    assert result["novelty@2"] == pytest.approx((1 + 2 + 1 + 2) / 4)
    assert result["distance@1"] == 0.0  # no pairs
    assert result["distance@2"] == pytest.approx((1.0 + 0.0) / 2)
    assert (result["cases"], result["unseen_targets"]) == (2, 1)


def test_options_are_checked_before_anything_is_scored() -> None:
    class Untouchable:
        def scores(self, histories: Histories) -> torch.Tensor:
            raise AssertionError("scored")

    cases, counts = cases_of([[1]], [2]), np.array([0, 1, 1])
    for options, message in (
        ({"metrics": ("recal",)}, "metrics: expected names among .*, got 'recal'"),
        ({"metrics": ("gini",), "protocol": "pop100"}, "'gini' needs whole lists; expected protocol 'full'"),
        ({"metrics": ("distance",)}, "'distance' needs vectors"),
        ({"metrics": ("distance",), "vectors": torch.ones(2, 4)}, r"vectors: expected float \[3, D\]"),
        ({"metrics": ("distance",), "vectors": torch.tensor([[1.0], [math.nan], [1.0]])}, "vectors: expected finite"),
        ({"memory": 0}, "memory: expected at least 1 byte"),
        ({"counts": None}, "counts: expected the train clicks of each item, got none"),
    ):
        with pytest.raises(ValueError, match=message):
            evaluate(Untouchable(), cases, **{"counts": counts, **options})
    with pytest.raises(TypeError, match="metrics: expected names such as recall"):
        evaluate(Untouchable(), cases, counts=counts, metrics=(10,))


def test_memory_bounds_the_rows_scored_at_once() -> None:
    class Counting(Table):
        most = 0

        def scores(self, histories: Histories) -> torch.Tensor:
            self.most = max(self.most, len(histories))
            return super().scores(histories)

    rng = np.random.default_rng(0)
    scores, counts = rng.normal(size=(50, 101)), np.ones(101, np.int64)
    cases = cases_of([[1]] * 50, rng.integers(2, 101, 50).tolist())
    roomy, tight, least = Counting(scores), Counting(scores), Counting(scores)
    results = [
        evaluate(scorer, cases, counts=counts, memory=memory)
        for scorer, memory in ((roomy, 2**28), (tight, 101 * 16 * 7), (least, 1))
    ]
    assert (roomy.most, tight.most, least.most) == (50, 7, 1)
    assert results[0] == results[1] == results[2]


def test_uniform100_draws_items_alike_whatever_their_clicks() -> None:
    counts = np.append(0, np.where(np.arange(400) < 200, 10**6, 0))
    scores = np.tile(np.arange(401, dtype=np.float32), (300, 1))  # a target of 201 is ranked below 199 of 399 others
    cases = cases_of([[]] * 300, [201] * 300)
    uniform = rank_cases(Table(scores), cases, counts=counts, protocol="uniform100")
    assert uniform.candidates.tolist() == [101] * 300
    assert uniform.rank.mean() == pytest.approx(1 + 100 * 199 / 399, abs=1.5)
    by_clicks = rank_cases(Table(scores), cases, counts=counts, protocol="pop100")
    assert by_clicks.rank.tolist() == [1.0] * 300  # only the items of 200 and less have clicks


def test_evaluation_agrees_with_recommendation() -> None:
    rng = np.random.default_rng(2)
    scores = rng.permutation(30 * 41).reshape(30, 41).astype(np.float32)
    histories = [rng.integers(1, 41, 4).tolist() for _ in range(30)]
    cases = cases_of(histories, rng.integers(1, 41, 30).tolist())
    lists = top_k(torch.from_numpy(scores), cases.history, 10)[0].numpy()
    recall = evaluate(Table(scores), cases, counts=np.ones(41, np.int64), k=(1, 5, 10))
    for k in (1, 5, 10):
        assert recall[f"recall@{k}"] == pytest.approx((lists[:, :k] == cases.target[:, None]).any(1).mean())
    assert recall["recall@1"] <= recall["recall@5"] <= recall["recall@10"]
