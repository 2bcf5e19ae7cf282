"""The study of clicks keeps the rule of its rows, chooses on validation, and its nine models read what they should."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.clicks import contrastive, study, training
from benchmarks.clicks.hpmn import thinned
from benchmarks.clicks.measures import auc, calibration, difference, log_loss, places
from benchmarks.clicks.model import Attention, Batch, ClickModel, batch, batches
from benchmarks.clicks.rows import Data, Rows, every_click, labelled, later_popularity, made, values
from benchmarks.clicks.training import MODELS, Scored
from fastcl.recsys import Feature, Histories, Items

pytestmark = pytest.mark.usefixtures("one_thread")
ITEMS = Items(
    tuple(f"i{n}" for n in range(40)), features={"class": Feature.from_labels([["abcd"[n % 4]] for n in range(40)])}
)


@pytest.fixture(scope="module")
def log() -> Histories:
    rng = np.random.default_rng(0)
    lists = [(1 + rng.choice(40, 2 + n % 12, replace=False)).tolist() for n in range(60)]
    return Histories.from_lists(lists, [[10 * n + m for m in range(len(row))] for n, row in enumerate(lists)])


@pytest.fixture(scope="module")
def data(log: Histories) -> Data:
    return made(ITEMS, log)


def test_a_row_shows_the_last_item_or_one_that_the_user_never_clicked(log: Histories) -> None:
    rows = labelled(ITEMS, log, np.random.default_rng(1))
    last = log.item[log.offsets[1:] - 1]
    assert rows.history.lengths.tolist() == (log.lengths - 1).tolist()
    assert 15 < rows.label.sum() < 45
    assert (rows.target == last)[rows.label].all()
    for user in np.flatnonzero(~rows.label):
        assert rows.target[user] not in log.item[log.offsets[user] : log.offsets[user + 1]]
    assert rows.target.min() >= 1


def test_parts_follow_time_and_training_knows_no_later_click(log: Histories, data: Data) -> None:
    assert [len(part.target) for part in (data.train, data.valid, data.test)] == [35, 7, 18]
    assert data.train.time.max() < data.valid.time.min() < data.valid.time.max() < data.test.time.min()
    train, rows = data.split.train, data.train
    assert train.lengths.tolist() == (rows.history.lengths + rows.label).tolist()
    for user, shown in enumerate(rows.label):
        clicks = log.item[log.offsets[user] : log.offsets[user + 1]].tolist()
        kept = train.item[train.offsets[user] : train.offsets[user + 1]].tolist()
        assert kept == (clicks if shown else clicks[:-1])
    assert train.time is not None
    assert all((np.diff(train.time[a:b]) > 0).all() for a, b in zip(train.offsets, train.offsets[1:], strict=False))
    assert data.split.counts.sum() == len(train.item)


def test_groups_by_time_and_by_the_most_frequent_value(data: Data) -> None:
    # Items 1, 5, 9 have class a, item 2 class b.
    rows = Histories.from_lists([[1, 5, 9, 2], [1, 2, 3, 4], [5, 5]])
    assert values(ITEMS, rows).tolist() == [[0, 3, 1, 0, 0], [0, 1, 1, 1, 1], [0, 2, 0, 0, 0]]
    everything = Items(("x", "y"), features={"f": Feature.from_labels([["all", "p"], ["all", "q"]])})
    assert values(everything, Histories.from_lists([[1, 2]])).tolist() == [[0, 0, 1, 1]], "all items have `all`"
    groups = data.groups
    assert groups["all"].all()
    assert (groups["early"] ^ groups["late"]).all()
    assert (groups["one interest"] ^ groups["mixed interests"]).all()
    assert (groups["mixed and late"] == (groups["late"] & groups["mixed interests"])).all()
    offsets, item = data.test.history.offsets, data.test.history.item
    for n, target in enumerate(data.test.target):  # item i has class i % 4
        known = {i % 4 for i in item[offsets[n] : offsets[n + 1]].tolist()}
        assert groups["category known"][n] == (target % 4 in known)
    shares = [np.bincount(item[a:b] % 4).max() / (b - a) for a, b in zip(offsets, offsets[1:], strict=False)]
    assert groups["mixed interests"].tolist() == [share <= np.median(shares) for share in shares]


def test_every_click_but_the_first_can_be_a_row(data: Data) -> None:
    train, rows = data.split.train, every_click(data)
    n = 0
    for a, b in zip(train.offsets, train.offsets[1:], strict=False):
        for end in range(a + 2, b + 1):
            begin, stop = rows.history.offsets[n : n + 2]
            assert rows.history.item[begin:stop].tolist() == train.item[a : end - 1].tolist()
            assert (rows.target[n] == train.item[end - 1]) == rows.label[n]
            n += 1
    assert n == len(rows.target)


def test_the_later_floor_counts_all_histories_but_no_later_target(log: Histories, data: Data) -> None:
    found = later_popularity(data).scores(Histories.from_lists([[1]]))[0, 1:].numpy()
    kept = np.concatenate([np.arange(a, b) for a, b in zip(log.offsets, log.offsets[1:] - 1, strict=False)])
    expected = np.bincount(log.item[kept], minlength=41)
    expected += np.bincount(data.train.target[data.train.label], minlength=41)
    assert found.tolist() == expected[1:].tolist()


def rows_of(lists: list[list[int]], label: list[bool]) -> Rows:
    """The last number of each list is the target."""
    history = Histories.from_lists([row[:-1] for row in lists])
    return Rows(history, np.array([row[-1] for row in lists]), np.array(label), np.zeros(len(lists)))


def test_a_batch_has_the_newest_clicks_then_the_target_then_padding() -> None:
    long = [1 + n % 40 for n in range(150)]
    found = batch(rows_of([[3, 4], long, [1, 2, 9]], [True, False, True]))
    assert found.length.tolist() == [2, 100, 3]
    assert found.item[0, :3].tolist() == [3, 4, 0]
    assert found.item[1].tolist() == long[-100:]
    assert found.clicked[2, :4].tolist() == [True, True, False, False]
    assert found.known[2, :4].tolist() == [True, True, True, False]


def test_mixed_batches_have_every_row_once(data: Data) -> None:
    seen = [row for part, _ in batches(data.train, 4, np.random.default_rng(0)) for row in part.item.tolist()]
    trimmed = sorted([item for item in row if item] for row in seen)
    whole = batch(data.train).item.tolist()
    assert trimmed == sorted([item for item in row if item] for row in whole)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_reads_order_and_length_but_no_padding(name: str) -> None:
    model = MODELS[name](ITEMS, 0)
    lists = [[5, 6], [7, 8, 9], [1 + n % 40 for n in range(30)], [3, 2, 4, 6, 8]]
    together = training.logits(model, rows_of(lists, [True] * 4))
    alone = [training.logits(model, rows_of([row], [False]))[0] for row in lists]
    np.testing.assert_allclose(together, alone, rtol=1e-4, atol=1e-5)
    assert len(set(np.round(together, 6))) == 4
    with torch.no_grad():
        wide = batch(rows_of(lists, [True] * 4))
        wide = Batch(torch.nn.functional.pad(wide.item, (0, 9)), wide.length)
        np.testing.assert_allclose(model(wide).numpy(), together, rtol=1e-4, atol=1e-5)
    others = [training.logits(model, rows_of([row], [True]))[0] for row in ([5, 7], [9, 6])]
    assert abs(np.array(others) - together[0]).min() > 1e-7, "the target or the history does not matter"
    assert not model.steps.id.weight[0].any()


@pytest.mark.parametrize("name", MODELS)
def test_a_model_learns_rows_by_heart(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name](ITEMS, 0)
    lists = [[1 + (3 * n + m) % 40 for m in range(2 + n % 4)] for n in range(16)]
    rows = rows_of(lists, [n % 3 == 0 for n in range(16)])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    (part, label), *_ = batches(rows, 16)
    for _ in range(25):
        optimizer.zero_grad()
        (torch.nn.functional.binary_cross_entropy_with_logits(model.train()(part), label) + model.penalty()).backward()
        optimizer.step()
    assert auc(training.logits(model, rows), rows.label) == 1.0


def test_svdpp_by_hand() -> None:
    model = MODELS["svd++"](ITEMS, 0)
    with torch.no_grad():
        model.get_parameter("mean").fill_(0.25)
        model.get_parameter("bias.weight")[9] = 0.5
    of = model.steps(torch.tensor([7, 8, 9]))
    expected = 0.75 + of[2] @ (of[0] + of[1]) / 2**0.5
    assert training.logits(model, rows_of([[7, 8, 9]], [True]))[0] == pytest.approx(expected.item(), abs=1e-6)
    assert model.decayed() == [], "it has embeddings and biases alone"


def test_every_second_state_counts_back_from_the_last() -> None:
    states = torch.arange(12.0).view(2, 6, 1)
    found, count = thinned(states, torch.tensor([5, 2]))
    assert count.tolist() == [3, 1]
    assert found[0, :, 0].tolist() == [0.0, 2.0, 4.0]
    assert found[1, 0, 0] == 7.0


def test_attention_weighs_the_held_keys_alone() -> None:
    attention = Attention(3)
    query, keys = torch.randn(2, 3), torch.randn(2, 4, 3)
    held = torch.tensor([[True, True, False, False], [True] * 4])
    weight = attention(query, keys, held)
    x, k = query[0], keys[0, 1]
    other = attention.mlp(torch.cat([x, keys[0, 0], x - keys[0, 0], x * keys[0, 0]]))
    mine = attention.mlp(torch.cat([x, k, x - k, x * k]))
    assert weight[0, 1].item() == pytest.approx(torch.sigmoid(mine - other).item(), abs=1e-6)
    assert weight[0, 2:].tolist() == [0.0, 0.0]
    torch.testing.assert_close(weight.sum(1), torch.ones(2))


def test_weights_decay_but_no_embeddings_and_biases() -> None:
    model = MODELS["gru4rec"](ITEMS, 0)
    names = {name for name, p in model.named_parameters() if any(p is weight for weight in model.decayed())}
    assert names == {"gru.weight_ih_l0", "gru.weight_hh_l0", "head.1.weight", "head.4.weight", "head.7.weight"}


def test_auc_its_difference_and_log_loss_by_hand() -> None:
    label = np.array([True, True, False, False])
    assert [x.tolist() for x in places(np.array([1.0, 3.0]), np.array([1.0, 2.0]))] == [[0.25, 1.0], [0.75, 0.5]]
    assert auc(np.array([1.0, 3.0, 1.0, 2.0]), label) == 0.625
    assert log_loss(np.log([3.0, 1.0, 1.0, 3.0]), label) == pytest.approx(np.log([4 / 3, 2, 2, 4]).mean())
    rng = np.random.default_rng(0)
    label = rng.random(300) < 0.5
    base = rng.normal(size=300) + label
    one, other = (np.stack([base + rng.normal(size=300) * s for _ in range(2)]) for s in (0.5, 2.0))
    mean, error = difference(one, other, label)
    assert mean == pytest.approx(np.mean([auc(a, label) - auc(b, label) for a, b in zip(one, other, strict=True)]))
    again = []
    for _ in range(100):  # the bootstrap of the rows
        rows = rng.integers(0, 300, 300)
        again.append(difference(one[:, rows], other[:, rows], label[rows])[0])
    assert error == pytest.approx(np.std(again), rel=0.2)
    a, b = calibration(5 + 0.1 * base, label)
    p = 1 / (1 + np.exp(-(a + b * (5 + 0.1 * base))))
    assert np.abs([(p - label).sum(), ((p - label) * base).sum()]).max() < 1e-3


class Table:
    """A scorer with the same scores for every history."""

    def scores(self, histories: Histories) -> torch.Tensor:
        row = torch.log(torch.arange(len(ITEMS) + 1.0))
        return row.repeat(len(histories), 1)


def test_a_share_is_comparable_between_users(data: Data) -> None:
    found = contrastive.scorer(Table(), data)(data.test)
    target = data.test.target
    np.testing.assert_allclose(found["score"], np.log(target), rtol=1e-6)
    np.testing.assert_allclose(found["share"], np.log(target / np.arange(41).sum()), rtol=1e-5)
    counts = 1 + data.split.counts[1:]
    popular = np.arange(1, 41) * counts
    np.testing.assert_allclose(found["popular share"], np.log(popular[target - 1] / popular.sum()), rtol=1e-5)


def test_propensities_weigh_the_full_softmax(data: Data) -> None:
    options: dict[str, Any] = {"dim": 8, "hidden": 8, "intents": 2, "batch": 16, "main": 40, "secondary": 10}
    model = contrastive.WeightedMultiCLRec(ITEMS, weight_limit=2.0, time_cuts=(), **options)
    first = next(iter(model.batches(data.split.train, np.random.default_rng(0))))
    share = (1.0 + data.split.counts[1:]) / (1.0 + data.split.counts[1:]).sum()
    user = torch.nn.functional.normalize(torch.randn(len(first.target), 8), dim=-1)
    logits = user @ model.item_vectors()[1:, :8].T
    nll = -logits.log_softmax(1).gather(1, first.target[:, None] - 1)[:, 0]
    weight = torch.from_numpy(np.minimum(2.0, 1 / share / len(ITEMS)))[first.target - 1]
    expected = (weight * nll).sum() / len(first.target)
    found = model.contrast(user, user, first.target)
    torch.testing.assert_close(found.double(), expected.double(), rtol=1e-4, atol=1e-5)


def test_the_best_epoch_and_setting_on_validation_are_tested_once(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    flips = {0.1: [4, 2, 3, 0], 0.2: [1, 2]}  # rows whose score has the wrong sign, by epoch

    def trained(name: str, data: Data, options: Mapping[str, Any], epochs: int, seed: int) -> Iterator[Scored]:
        for epoch, wrong in enumerate(flips[options["lr"]]):
            assert epoch < 3, "a setting that got worse goes on"

            def scored(rows: Rows, wrong: int = wrong) -> dict[str, np.ndarray]:
                sign = np.where(rows.label, 1.0, -1.0)
                sign[:wrong] *= -1
                return {"": sign + wrong / 10}

            yield scored

    monkeypatch.setattr(training, "trained", trained)
    run = {"model": "dnn", "options": None, "plan": {"epochs": 4, "grid": {"lr": [0.1, 0.2]}}, "seed": 0}
    kept = study.search(run, data)[""]
    assert (kept.setting, kept.epoch) == ({"lr": 0.2}, 1)
    assert kept.test.max() == pytest.approx(1.1)


@pytest.mark.parametrize("model", ["popularity", "dnn", "multi_clrec"])
def test_a_run_is_measured(model: str, data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.clicks.rows.read", lambda name, folder: data)
    options = {"dim": 8, "hidden": 8, "intents": 2, "batch": 16, "main": 40, "secondary": 10, "time_cuts": []}
    grid = {"lr": [0.01], "decay": [0.0]} if model == "dnn" else {"polarity": [0.0, 1.0]}
    plan = None if model == "popularity" else {"epochs": 1, "grid": grid}
    run = {"data": "made", "model": model, "options": options, "plan": plan, "seed": 0}
    found = study.measure(run, tmp_path, tmp_path / "run")
    assert {"AUC, all", "AUC, early", "log loss"} <= found["test"].keys()
    assert ("share: AUC, all" in found["test"]) == (model != "dnn")
    assert auc(np.load(tmp_path / "run" / "score.npy"), data.test.label) == found["test"]["AUC, all"]


def test_models_share_their_seed() -> None:
    def weights(model: ClickModel) -> torch.Tensor:
        return torch.cat([p.flatten() for p in model.parameters()])

    for kind in MODELS.values():
        one, two, other = (weights(kind(ITEMS, seed)) for seed in (0, 0, 1))
        assert torch.equal(one, two)
        assert not torch.equal(one, other)
