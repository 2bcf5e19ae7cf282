"""LightGCN: the graph and the walks on it against dense matrices, learning, runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_runs import stopped_after
from torch import Tensor

from fastcl.recsys import Histories, Interactions, Items, LightGCN, LightGCNConfig, Split, evaluate, fit, load, resume
from fastcl.recsys.models import lightgcn

pytestmark = pytest.mark.usefixtures("one_thread")


def log(users: int = 50, items: int = 40, clicks: int = 12, seed: int = 0) -> Interactions:
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


def small(split: Split, **options: Any) -> LightGCN:
    return LightGCN(split.items, users=split.users, seed=0, **{"dim": 8, "batch": 64} | options)


def dense(train: Histories, items: int) -> Tensor:
    """D^-1/2 A D^-1/2 of users, then items 0..I, float64: He et al. 2020, Eq. 8."""
    users = len(train)
    a = torch.zeros(users + items + 1, users + items + 1, dtype=torch.float64)
    for user in range(users):
        for item in train.item[train.offsets[user] : train.offsets[user + 1]].tolist():
            a[user, users + item] = a[users + item, user] = 1.0
    degree = a.sum(1)
    root = torch.where(degree > 0, degree.clamp(min=1).rsqrt(), 0.0)
    return root[:, None] * a * root


def averaged(model: LightGCN, a: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    walk, total = table, table
    for _ in range(model.config.layers):
        walk = a @ walk
        total = total + walk
    return (total / (model.config.layers + 1)).split([len(model.user), len(model.item)])


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_vectors_and_gradients_are_those_of_dense_matrices(layers: int) -> None:
    """Of users without clicks and items without users too, and of pairs that are clicked twice."""
    items = Items(tuple(f"i{n}" for n in range(12)))
    lists = [[1, 2, 2, 5], [5], [], [7, 1, 3, 1], [2, 9]]
    data = Interactions(items, tuple("abcde"), Histories.from_lists(lists)).split("none")
    model = small(data, layers=layers, similarity="dot").double()
    next(model.batches(data.train, np.random.default_rng(0)))
    a = dense(data.train, 12)
    table = torch.cat([model.user, model.item]).detach().requires_grad_()
    users, products = averaged(model, a, table)
    for ours, theirs in zip(model.tables(), (users, products), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)
    user, item = torch.tensor([3, 0, 3, 2, 1]), torch.tensor([2, 12, 9, 2, 5])
    found = model.vectors(user, item)
    torch.testing.assert_close(found.user, users[user], rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(found.item, products[item], rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(found.rows[0], model.user[user])
    torch.testing.assert_close(found.rows[1], model.item[item])
    ((found.user * found.item).sum(1).sin().sum()).backward()
    ((users[user] * products[item]).sum(1).sin().sum()).backward()
    expected = table.grad.split([5, 13])
    for ours, theirs in zip((model.user.grad, model.item.grad), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)


def test_a_step_takes_one_product_less_than_layers_in_either_direction(
    split: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    edges: list[int] = []
    times = lightgcn.Side.times

    def counted(side: lightgcn.Side, table: Tensor) -> Tensor:
        edges.append(len(side.column))
        return times(side, table)

    monkeypatch.setattr(lightgcn.Side, "times", counted)
    for layers in (1, 3):
        model = small(split, layers=layers, batch=8)
        batch = next(iter(model.batches(split.train, np.random.default_rng(0))))
        whole = len(model.graph.item)
        edges.clear()
        loss = model.loss(batch)
        forward = list(edges)
        edges.clear()
        loss.backward()
        for products in (forward, edges):  # of users and of items
            parts, wholes = sorted(products)[:2], sorted(products)[2:]
            assert wholes == [whole] * 2 * (layers - 1)
            assert len(parts) == 2
            assert max(parts) < whole / 2


def test_the_graph_has_the_train_clicks_and_nothing_else(split: Split) -> None:
    model = small(split)
    next(iter(model.batches(split.train, np.random.default_rng(0))))
    user = np.repeat(np.arange(50), np.diff(model.graph.offsets.numpy()))
    edges = set(zip(user.tolist(), model.graph.item.tolist(), strict=True))
    row = np.repeat(np.arange(50), split.train.lengths)
    assert edges == set(zip(row.tolist(), split.train.item.tolist(), strict=True))
    for cases in (split.valid, split.test):
        assert not edges & set(zip(cases.user.tolist(), cases.target.tolist(), strict=True))


@pytest.mark.parametrize(
    "options",
    [
        {"loss": "infonce_plus", "lam": 0.9, "temperature": 0.2},
        pytest.param({"loss": "bpr", "similarity": "dot", "layers": 3, "lr": 0.05}, marks=pytest.mark.slow),
    ],
)
def test_fifty_users_are_learnt_by_heart(options: dict[str, Any]) -> None:
    data = log()
    everything = data.split("none")
    model = small(everything, **options)
    fit(model, everything, epochs=60, lr=2e-2, progress=False)
    liked = [set(data.log.item[a:b].tolist()) for a, b in zip(data.log.offsets, data.log.offsets[1:], strict=False)]
    top = model.scores(everything.train).topk(12, dim=1)[1].tolist()
    assert np.mean([len(liked[user] & set(row)) / 12 for user, row in enumerate(top)]) > 0.85  # chance: 12 of 40


def test_a_run_is_the_same_bit_for_bit_when_it_is_resumed_and_needs_no_data_to_serve(
    split: Split, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"epochs": 2, "lr": 1e-2, "progress": False, "save_every": 0.0}
    fit(small(split, layers=2), split, out=tmp_path / "whole", **options)
    with stopped_after(5):
        fit(small(split, layers=2), split, out=tmp_path / "stopped", **options)
    resume(tmp_path / "stopped", split, progress=False)
    whole, stopped = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "stopped"))
    assert whole == stopped
    loaded = load(tmp_path / "stopped")
    assert torch.equal(loaded.graph.item, small_graph(split))
    assert evaluate(loaded, split.test) == evaluate(load(tmp_path / "whole"), split.test)


def small_graph(split: Split) -> Tensor:
    model = small(split)
    model.graph.fill(split.train)
    return model.graph.item


def test_a_damaged_graph_is_refused(split: Split, tmp_path: Path) -> None:
    fit(small(split), split, epochs=1, out=tmp_path / "run", progress=False)
    path = tmp_path / "run" / "model.safetensors"
    tensors = load_file(path)
    model = small(split)
    for name, change in (
        ("graph.item", lambda t: t + 40),
        ("graph.item", lambda t: t[:-1]),
        ("graph.item", lambda t: t.float()),
        ("graph.offsets", lambda t: t.flip(0)),
        ("graph.offsets", lambda t: t[:-1]),
    ):
        with pytest.raises(RuntimeError, match="expected the items of each user, 1..40, got others"):
            model.load_state_dict({**tensors, name: change(tensors[name])})
    with pytest.raises(RuntimeError, match=r"Missing key.*graph\.item"):
        model.load_state_dict({name: tensor for name, tensor in tensors.items() if name != "graph.item"})
    with safe_open(path, "pt") as file:
        facts = file.metadata()
    save_file({**tensors, "graph.item": tensors["graph.item"] + 40}, path, facts)
    with pytest.raises(ValueError, match=r"model\.safetensors: damaged"):  # by its checksum
        load(tmp_path / "run")


def test_strangers_are_folded_in_from_the_vectors_of_their_items(split: Split) -> None:
    model = small(split, loss="mine_plus")
    model.graph.fill(split.train)
    bare = split.test.history.named(split.items, None)
    table = F.normalize(model.tables()[1], dim=-1)
    mean = torch.stack([table[bare.item[a:b]].mean(0) for a, b in zip(bare.offsets, bare.offsets[1:], strict=False)])
    expected = F.normalize(mean - 1.1 * table[1:].mean(0), dim=-1)  # lam, since the loss has it
    torch.testing.assert_close(model.encode(bare), expected, rtol=1e-4, atol=1e-5)
    own = F.normalize(model.tables()[0], dim=-1)[split.test.user]
    torch.testing.assert_close(model.encode(split.test.history), own)


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="layers: expected at least 1, got 0"):
        LightGCNConfig(layers=0)


@pytest.mark.parametrize(("scored_by", "cosine"), [("dot", False), ("cosine", True), ("similarity", True)])
def test_scores_are_of_the_kind_asked_for_whatever_the_training_has(
    scored_by: str, cosine: bool, split: Split
) -> None:
    """Of users of the training and of strangers; the loss is that of the cosine all the same."""
    model = small(split, loss="mine_plus", similarity="cosine", scored_by=scored_by, temperature=0.5)
    batch = next(model.batches(split.train, np.random.default_rng(0)))
    user, item = model.tables()
    lengths = item.norm(dim=1)[1:]
    for histories in (split.valid.history, Histories.from_lists([[1, 2], [3]])):
        row = model.scores(histories)[0][1:]
        x = model.encode(histories)[0]
        assert (x.norm().sub(1.0).abs() < 1e-5) == cosine
        torch.testing.assert_close(row, (item[1:] @ x) / 0.5 / (lengths if cosine else 1.0))
    other = small(split, loss="mine_plus", similarity="cosine", temperature=0.5)
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(model.loss(batch), other.loss(batch))


def test_the_default_keeps_popularity_in_the_scores_against_negatives_of_the_batch() -> None:
    """Users click by popularity alone. MINE+ leaves it out of the cosine, so that its scores follow it less."""
    rng = np.random.default_rng(0)
    share = 1.0 / np.arange(1, 41)
    rows = [(f"u{u}", f"i{i}") for u in range(150) for i in rng.choice(40, 8, replace=False, p=share / share.sum())]
    split = Interactions.read({"user": [u for u, _ in rows], "item": [i for _, i in rows]}, time=None).split("none")
    counts = np.bincount(split.train.item, minlength=len(split.items) + 1)[1:]
    follows = {}
    choices: dict[str, dict[str, Any]] = {"default": {}, "mine_plus": {"loss": "mine_plus"}}
    for name, options in choices.items():
        model = small(split, batch=256, **options)
        fit(model, split, epochs=8, lr=1e-2, seed=0, progress=False)
        mean = model.scores(split.train).detach().mean(0)[1:].numpy()
        follows[name] = np.corrcoef(mean, np.log(counts))[0, 1]
    assert follows["default"] > 0.85 > follows["mine_plus"]
