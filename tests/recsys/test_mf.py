"""Matrix factorisation: batches and negatives, leakage, users in training and strangers, learning, runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pairs_twin import TWINS
from tiny_runs import stopped_after

from fastcl.recsys import (
    MF,
    Histories,
    Interactions,
    Items,
    MFConfig,
    Split,
    evaluate,
    fit,
    load,
    recommend,
    recommend_users,
    resume,
)
from fastcl.recsys.models.pair_losses import LOSSES, Constants, Pairs

pytestmark = pytest.mark.usefixtures("one_thread")


def log(users: int = 50, items: int = 40, clicks: int = 12, seed: int = 0) -> Interactions:
    """Users like every second, or every third, item of a run of them."""
    rng = np.random.default_rng(seed)
    rows = [
        (f"u{user}", f"i{(start + (2 + user % 2) * step) % items}")
        for user, start in enumerate(rng.integers(0, items, users))
        for step in rng.permutation(clicks)
    ]
    return Interactions.read({"user": [u for u, _ in rows], "item": [i for _, i in rows]}, time=None)


@pytest.fixture(scope="module")
def split() -> Split:
    return log().split()


def small(split: Split, **options: Any) -> MF:
    return MF(split.items, users=split.users, seed=0, **{"dim": 8, "batch": 64, "count": 20, "init": 0.1} | options)


def test_an_epoch_has_every_train_click_once_and_nothing_else(split: Split) -> None:
    model = small(split)
    batches = list(model.batches(split.train, np.random.default_rng(0)))
    assert len(batches) == model.steps(split.train) == -(-500 // 64)
    pairs = torch.stack([torch.cat([b.user for b in batches]), torch.cat([b.target for b in batches])], 1).tolist()
    train = [
        [user, item]
        for user in range(len(split.users))
        for item in split.train.item[split.train.offsets[user] : split.train.offsets[user + 1]].tolist()
    ]
    assert sorted(pairs) == sorted(train)
    held = {
        (int(u), int(t)) for cases in (split.valid, split.test) for u, t in zip(cases.user, cases.target, strict=True)
    }
    assert not held & set(map(tuple, pairs))


def test_users_are_drawn_alike_whatever_their_clicks() -> None:
    items = Items(ids=tuple(map(str, range(1, 43))))
    users = ("two", "none", "forty")
    train = dataclasses.replace(Histories.from_lists([[1, 2], [], list(range(3, 43))]), users=users)
    model = MF(items, users=users, sampling="users", batch=8, count=3, seed=0)
    rng = np.random.default_rng(0)
    batches = [batch for _ in range(50) for batch in model.batches(train, rng)]
    assert len(batches) == 50 * model.steps(train)
    user, item = torch.cat([b.user for b in batches]), torch.cat([b.target for b in batches])
    assert len(user) == 50 * 42
    assert torch.equal(user == 0, item <= 2)
    assert torch.equal(user == 2, item > 2)
    share = 50 * 42 / 2
    assert abs(int((user == 0).sum()) - share) < 5 * (share / 2) ** 0.5  # five standard deviations
    assert abs(int((item == 1).sum()) - share / 2) < 5 * (share / 2) ** 0.5
    assert len(item.unique()) == 42


def test_log_q_of_items_in_the_batch_is_that_of_how_users_are_drawn() -> None:
    users = ("two", "none", "four")
    train = dataclasses.replace(Histories.from_lists([[1, 2], [], [2, 3, 4, 5]]), users=users)
    expected = {"clicks": [1, 2, 1, 1, 1], "users": [1.5, 1.5 + 0.75, 0.75, 0.75, 0.75]}  # of an epoch of six
    for sampling, often in expected.items():
        options: dict[str, Any] = {"loss": "sampled_softmax", "negatives": "batch", "sampling": sampling}
        model = MF(Items(tuple("abcde")), users=users, seed=0, **options)
        next(iter(model.batches(train, np.random.default_rng(0))))
        counts = 1 + torch.tensor(often)
        torch.testing.assert_close(model.log_q[1:], (counts / counts.sum()).log())


@pytest.mark.parametrize("options", [{}, {"per": "row"}, {"negatives": "batch"}], ids=str)
def test_the_decay_does_not_grow_with_the_processes(options: dict[str, Any], split: Split) -> None:
    found = []
    for processes in (1, 4):
        total = 0.0
        for rank in range(processes):
            decayed, plain = (small(split, decay=decay, **options) for decay in (0.5, 0.0))
            decayed.share = plain.share = rank, processes
            batch = next(iter(decayed.batches(split.train, np.random.default_rng(1))))
            next(iter(plain.batches(split.train, np.random.default_rng(1))))
            total += float(decayed.loss(batch) - plain.loss(batch)) * len(batch.target) / 64
        found.append(total)
    assert found[1] == pytest.approx(found[0], rel=1e-4)


def test_processes_share_out_the_same_batches(split: Split) -> None:
    row = {"per": "row", "count": 3}
    for options in ({}, row, {"negatives": "popularity", **row}, {"sampling": "users", **row}):
        model = small(split, **options)
        whole = next(iter(model.batches(split.train, np.random.default_rng(1))))
        model.share = (1, 2)
        part = next(iter(model.batches(split.train, np.random.default_rng(1))))
        assert torch.equal(part.user, whole.user[1::2])
        assert torch.equal(part.negative, whole.negative[1::2] if options else whole.negative)


def test_negatives_are_drawn_as_asked(split: Split) -> None:
    def drawn(**options: Any) -> tuple[torch.Tensor | None, Any]:
        model = small(split, **options)
        batches = list(model.batches(split.train, np.random.default_rng(2)))
        return torch.cat([b.negative for b in batches]) if batches[0].negative is not None else None, (model, batches)

    assert drawn(negatives="batch")[0] is None
    assert drawn(loss="directau")[0] is None
    shared, _ = drawn(count=2000)
    assert shared.shape == (8 * 2000,)
    assert shared.unique().tolist() == list(range(1, len(split.items) + 1))
    counts = torch.bincount(shared)[1:].double()
    assert float((counts / counts.mean() - 1).abs().max()) < 0.3
    popular, (model, _) = drawn(count=2000, negatives="popularity")
    share = torch.bincount(popular, minlength=len(split.items) + 1)[1:].double() / len(popular)
    expected = torch.from_numpy(split.counts[1:] + 1.0)
    torch.testing.assert_close(share, expected / expected.sum(), rtol=0.3, atol=2e-3)
    torch.testing.assert_close(model.log_q[1:].double().exp(), expected / expected.sum(), rtol=1e-5, atol=0)
    of_rows, (_, batches) = drawn(per="row", count=5)
    clicked = [
        set(split.train.item[a:b].tolist()) for a, b in zip(split.train.offsets, split.train.offsets[1:], strict=False)
    ]
    users = torch.cat([b.user for b in batches])
    assert of_rows.shape == (500, 5)
    assert not any(set(row) & clicked[user] for user, row in zip(users.tolist(), of_rows.tolist(), strict=True))


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.parametrize("name", list(LOSSES))
def test_the_loss_of_a_batch_is_the_twins_on_the_tables(name: str, similarity: str, split: Split) -> None:
    model = small(split, loss=name, similarity=similarity, decay=0.3, batch=16, per="row", count=3, negatives="uniform")
    batch = next(iter(model.batches(split.train, np.random.default_rng(3))))
    user, item = model.user.weight.detach().double(), model.item.weight.detach().double()
    rows = [user[batch.user], item[batch.target]] + ([] if batch.negative is None else [item[batch.negative]])
    u, i, *n = (F.normalize(x, dim=-1) if similarity == "cosine" else x for x in rows)
    pairs = Pairs(
        u, i, n[0] if n else None, batch.user, batch.target, batch.negative,
        torch.zeros(16).double(), torch.zeros(16, 3).double(),
    )  # fmt: skip
    expected = TWINS[name](pairs, Constants()) + 0.15 * sum(x.square().sum() for x in rows) / 16
    torch.testing.assert_close(model.loss(batch).double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"loss": "infonce_plus", "negatives": "batch", "lam": 0.9},
        {"loss": "bpr", "similarity": "dot", "per": "row", "count": 1, "temperature": 1.0},
        pytest.param({"loss": "sampled_softmax", "negatives": "popularity"}, marks=pytest.mark.slow),
        pytest.param({"loss": "directau"}, marks=pytest.mark.slow),
        pytest.param({"loss": "ccl", "margin": 0.3, "weight": 5.0}, marks=pytest.mark.slow),
    ],
)
def test_fifty_users_are_learnt_by_heart(options: dict[str, Any], split: Split) -> None:
    """Trained on everything: of the items that a user clicked, nearly all are at the top of the user's list."""
    data = log()
    everything = data.split("none")
    model = small(everything, **options)
    fit(model, everything, epochs=60, lr=2e-2, progress=False)
    liked = [set(data.log.item[a:b].tolist()) for a, b in zip(data.log.offsets, data.log.offsets[1:], strict=False)]
    scores = model.scores(everything.train)
    top = scores.topk(12, dim=1)[1].tolist()
    found = np.mean([len(liked[user] & set(row)) / 12 for user, row in enumerate(top)])
    assert found > 0.9, found  # chance: 12 of 40


def test_users_are_known_by_their_ids_and_strangers_by_their_items(split: Split) -> None:
    model = small(split)
    own = model.encode(split.test.history)
    torch.testing.assert_close(own, F.normalize(model.user.weight, dim=-1)[split.test.user])
    # The same histories without ids, and of other people, in any mixture.
    bare = split.test.history.named(split.items, None)
    table = F.normalize(model.item.weight, dim=-1) / model.config.temperature
    mean = torch.stack([table[bare.item[a:b]].mean(0) for a, b in zip(bare.offsets, bare.offsets[1:], strict=False)])
    folded = F.normalize(mean - 1.1 * table[1:].mean(0), dim=-1)  # lam, since the loss has it
    torch.testing.assert_close(model.encode(bare), folded)
    names = split.test.history.users.copy()
    names[::2] = "somebody"
    mixed = model.encode(bare.named(split.items, names))
    torch.testing.assert_close(mixed, torch.where((torch.arange(len(names)) % 2 == 0)[:, None], folded, own))
    with pytest.raises(ValueError, match="expected at least one click of a user not in training, got none in row 1"):
        model.encode(Histories.from_lists([[1], [], [2]]))


def test_strangers_are_served_nearly_as_well_as_users_of_the_training() -> None:
    """The same users by their ids, and as strangers, folded in from their items."""
    split = log(users=150).split()
    model = small(split, lam=1.0, temperature=0.2)
    fit(model, split, epochs=20, lr=2e-2, progress=False)
    own = evaluate(model, split.test, metrics=("recall",))["recall@10"]
    strangers = dataclasses.replace(
        split.test, history=split.test.history.named(split.items, np.array(["?"] * len(split.test), object))
    )
    folded = evaluate(model, strangers, metrics=("recall",))["recall@10"]
    assert folded > 0.75 * own > 0.3, (folded, own)


def test_a_run_is_the_same_bit_for_bit_when_it_is_resumed(
    split: Split, tmp_path: Path
) -> None:
    """Stopped within an epoch, where rows are late."""
    options: dict[str, Any] = {"epochs": 3, "lr": 1e-2, "progress": False, "save_every": 0.0}
    fit(small(split, dropout=0.2), split, out=tmp_path / "whole", **options)
    with stopped_after(5):
        fit(small(split, dropout=0.2), split, out=tmp_path / "stopped", **options)
    resume(tmp_path / "stopped", split, progress=False)
    whole, stopped = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "stopped"))
    assert whole == stopped
    loaded = load(tmp_path / "stopped")
    assert loaded.users == split.users
    assert torch.equal(loaded.scores(split.test.history), load(tmp_path / "whole").scores(split.test.history))


def test_recommending_by_history_and_by_user(split: Split) -> None:
    model = small(split).eval()
    history = [split.items.ids[item - 1] for item in split.test.history.take(np.array([0])).item]
    (row,) = recommend(model, [history], k=3)
    assert len(row) == 3
    assert not {item for item, _ in row} & set(history)
    data = log()
    found = dict(recommend_users(model, data, k=3).rows)
    scores = model.scores(data.log)
    best = split.items.ids[int(scores[0].index_fill(0, torch.from_numpy(data.log.item[:12]), -torch.inf).argmax()) - 1]
    assert found["u0"][0][0] == best


def test_models_of_other_users_are_refused(split: Split) -> None:
    model = MF(split.items, users=split.users[::-1], dim=8)
    with pytest.raises(ValueError, match="split: expected the 50 users of the model, in their order, got others"):
        fit(model, split, epochs=1, progress=False)
    with pytest.raises(ValueError, match="users: expected distinct ids"):
        MF(Items(("a",)), users=("u", "u"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "hinge"}, "loss: expected one of mine_plus, .*, bsl, got 'hinge'"),
        ({"similarity": "l2"}, "similarity: expected one of cosine, dot, got 'l2'"),
        ({"negatives": "hard"}, "negatives: expected one of uniform, popularity, batch, got 'hard'"),
        ({"per": "user"}, "per: expected one of batch, row, got 'user'"),
        ({"count": 0}, "count: expected at least 1, got 0"),
        ({"temperature": 0.0}, "temperature: expected a finite number above 0"),
        ({"lam": 0.0}, "lam: expected a finite number above 0"),
        ({"decay": -1.0}, "decay: expected at least 0"),
        ({"dropout": 1.0}, "dropout: expected at least 0 and below 1"),
    ],
)
def test_bad_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MFConfig(**options)
