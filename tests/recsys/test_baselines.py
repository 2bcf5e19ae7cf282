"""What all sequence models of fastcl.recsys.baselines promise: loaded on demand, no look at the future, learning by
heart, the same bits after a stop, the same losses in two processes. Their losses are in test_baselines_losses.py.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forks import run_together
from tiny_runs import stopped_after

import fastcl.recsys.models as models
from fastcl.recsys import Cases, Feature, Histories, Interactions, Items, Split, evaluate, fit, load, recommend, resume
from fastcl.recsys.baselines.nextitem import NextItem
from fastcl.recsys.models import LATER, MODELS
from fastcl.recsys.models.base import Model, UserModel, make
from fastcl.recsys.models.batching import newest, pack
from fastcl.recsys.training import processes

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL: dict[str, dict[str, Any]] = {
    "gru4rec": {},
    "caser": {"vertical": 2, "horizontal": 4},
    "stosa": {"heads": 2},
    "dt4sr": {"heads": 2},
    "cl4srec": {"blocks": 1},
    "s3rec": {"blocks": 1, "pretrain": 2, "pretrain_batch": 40},
    "svae": {"state": 24, "hidden": 24, "latent": 8, "kl_steps": 1000},
    "acvae": {"state": 24, "latent": 8},
    "mind": {"interests": 2},
}
FORMS = [("stosa", {"form": "paper"}), ("dt4sr", {"form": "paper"}), ("svae", {"form": "official"})]
STATES = [(name, {}) for name in LATER if name not in ("caser", "mind")] + FORMS  # a state after every click
NAMES = list(LATER)


def split(users: int = 40, length: int = 5, count: int = 90) -> Split:
    """Random histories without repeats, whose every click is to be learned by heart: validation is on train clicks."""
    rng = np.random.default_rng(7)
    lists = [(rng.permutation(count)[:length] + 1).tolist() for _ in range(users)]
    names = tuple(f"u{user}" for user in range(users))
    third = Feature.from_labels([[str(n % 3)] for n in range(count)])
    items = Items(tuple(f"i{n + 1}" for n in range(count)), None, {"third": third})
    train = Histories.from_lists(lists).named(items, np.array(names))
    history = Histories.from_lists([row[:-1] for row in lists]).named(items, np.array(names))
    cases = Cases(np.arange(users), history, np.array([row[-1] for row in lists]))
    return Split(items, names, train, cases, cases, np.bincount(train.item, minlength=count + 1))


def small(name: str, data: Split, **options: Any) -> Model:
    plain = {"dim": 16, "max_len": 6, "batch": 16, "dropout": 0.1}
    return make(MODELS[name], data, seed=0, **plain | SMALL[name] | options)


def test_models_are_loaded_when_they_are_asked_for() -> None:
    program = (
        "import sys, fastcl.recsys as recsys\n"
        "assert 'stosa' in recsys.MODELS and list(recsys.MODELS)[-1] == 'mind' and len(recsys.MODELS) == 19\n"
        "assert not [name for name in sys.modules if 'baselines' in name]\n"
        "assert recsys.MODELS['stosa'].__module__ in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_table_has_every_model_by_its_own_name() -> None:
    package = sys.modules[models.BASELINES]
    assert {name for name in package.__all__ if not name.endswith("Config")} == set(LATER.values())
    for name, of_class in LATER.items():
        assert (MODELS[name].name, MODELS[name]) == (name, getattr(package, of_class))
    with pytest.raises(KeyError):
        MODELS["gru"]


@pytest.mark.parametrize(("name", "options"), STATES)
def test_no_state_sees_a_later_click_and_serving_gives_the_state_of_training(
    name: str, options: dict[str, Any]
) -> None:
    model = small(name, split(), **options).eval()
    assert isinstance(model, NextItem)
    before, after = [[1, 2, 3, 4, 5], [6, 7, 8]], [[1, 2, 3, 30, 31], [6, 7, 33]]
    states = []
    for lists in (before, after):
        data = Histories.from_lists(lists)
        states.append(model(torch.from_numpy(data.item), pack(newest(data, 6))))
    same = torch.tensor([True, True, True, False, False, True, True, False])
    torch.testing.assert_close(states[0][same], states[1][same], atol=1e-6, rtol=0)
    assert (states[0][~same] - states[1][~same]).abs().amax(1).min() > 1e-6
    # A state is the one that is served, where positions of the window do not count: of whole histories.
    served = model.encode(Histories.from_lists(before))
    scale = 2.0 if name in ("stosa", "dt4sr") else 1.0
    torch.testing.assert_close(served[:, : states[0].shape[1]], scale * states[0][[4, 7]], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_batches_read_clicks_before_their_targets_and_cover_the_log(name: str) -> None:
    """On histories of rising items: what is read lies below every target, and the negatives are unclicked."""
    data = split()
    lists = [list(range(1 + 3 * user % 40, 9 + 3 * user % 40)) for user in range(40)]
    train = Histories.from_lists(lists).named(data.items, np.array(data.users))
    bce = {"loss": "bce"} if name in ("gru4rec", "mind") else {}
    model = small(name, data, **bce, **({"pretrain": 0} if name == "s3rec" else {}))
    found = list(model.batches(train, np.random.default_rng(0)))
    assert len(found) == model.steps(train) > 1
    targets = torch.cat([batch.target.flatten() for batch in found])
    assert set(targets.tolist()) - {0} == {item for row in lists for item in (row[1:] if name != "caser" else row[5:])}
    for batch in found:
        if name == "caser":
            first = batch.target[
                :: model.config.following
            ]  # a history of eight clicks: five are read, three are targets
            assert torch.equal(batch.item[:, 1:], first[:, None] + torch.arange(-5, 0))
            assert not batch.item[:, 0].any()
        elif name == "mind":
            assert torch.equal(batch.item[batch.clicks.last] + 1, batch.target)
        else:
            first = batch.target if batch.target.ndim == 1 else batch.target[:, 0]
            assert torch.equal(batch.item + 1, first)
            if name == "svae":  # four targets where the history has them
                left = (torch.arange(4) < (batch.target > 0).sum(1)[:, None]) * (first[:, None] + torch.arange(4))
                assert torch.equal(batch.target, left)
        if name not in ("caser", "mind", "svae", "acvae"):
            for row in range(len(batch.clicks.length)):
                here = batch.clicks.row == row
                clicked = {*batch.item[here].tolist(), *batch.target[here].tolist()}
                assert not clicked & set(batch.negative[here].tolist())


BY_HEART: dict[str, dict[str, Any]] = {
    **{name: {"loss": "softmax"} for name in ("gru4rec", "stosa", "dt4sr", "cl4srec", "s3rec")},
    "caser": {"loss": "softmax", "max_len": 4, "following": 1},
    "mind": {"loss": "softmax", "batch": 32, "dim": 64},
    "svae": {"kl_weight": 0.0},
    "acvae": {},
}


@pytest.mark.parametrize("name", NAMES)
def test_forty_users_are_learned_by_heart(name: str) -> None:
    data, options = split(), BY_HEART[name]
    model = small(name, data, **{"dropout": 0.0, "dim": 32} | options)
    assert evaluate(model, data.test, k=(1,))["recall@1"] < 0.2
    fit(model, data, epochs=60 if name in ("svae", "acvae") else 40, lr=1e-2, progress=False)
    assert evaluate(model, data.test, k=(1,))["recall@1"] > 0.9


@pytest.mark.parametrize("name", NAMES)
def test_a_stopped_run_goes_on_to_the_same_bits_and_is_loaded(name: str, tmp_path: Path) -> None:
    data = split()
    whole = fit(small(name, data), data, epochs=2, out=tmp_path / "whole", progress=False)
    with stopped_after(4):
        fit(small(name, data), data, epochs=2, out=tmp_path / "cut", save_every=0.0, progress=False)
    again = resume(tmp_path / "cut", data, progress=False)
    assert [line["loss"] for line in again] == [line["loss"] for line in whole]
    one, other = (load(tmp_path / run) for run in ("whole", "cut"))
    assert type(one) is MODELS[name]
    assert all(torch.equal(x, other.state_dict()[key]) for key, x in one.state_dict().items())
    users = isinstance(one, UserModel)
    assert (one.users == data.users) if users else not hasattr(one, "users")  # type: ignore[attr-defined]
    assert len(recommend(one, [["i1", "i2"], ["i3"]], k=5)[1]) == 5


@pytest.mark.parametrize(("name", "options"), [(name, {}) for name in NAMES] + FORMS)
def test_every_parameter_learns_from_every_loss(name: str, options: dict[str, Any]) -> None:
    data = split()
    choices = MODELS[name].Config.__dataclass_fields__["loss"].metadata["choices"]
    for loss in choices:
        model = small(name, data, loss=loss, **options).train()
        for batch in model.batches(data.train, np.random.default_rng(0)):
            total = model.loss(batch)
            assert total.ndim == 0
            assert total.isfinite()
            total.backward()
            model.after_update()
        assert [key for key, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


@pytest.mark.parametrize("name", NAMES)
def test_cases_with_several_targets_are_measured(name: str) -> None:
    data = split()
    model = small(name, data)
    target = np.random.default_rng(1).permutation(90)[:80] + 1
    cases = Cases(np.arange(40), data.test.history, target, None, np.arange(0, 81, 2))
    found = evaluate(model, cases, counts=data.counts, k=(20,), seen="keep")["recall@20"]
    best = model.scores(data.test.history).topk(20).indices.numpy()
    hits = [
        len(set(row) & set(pair)) / 2 for row, pair in zip(best.tolist(), target.reshape(40, 2).tolist(), strict=True)
    ]
    assert 0.0 < found == pytest.approx(np.mean(hits))


# Losses without drawn numbers, so that two processes have the terms of one.
TOGETHER = {name: {"loss": "softmax", "dropout": 0.0} for name in ("gru4rec", "caser", "stosa", "dt4sr", "mind")}
TOGETHER |= {"cl4srec": {"dropout": 0.0}, "s3rec": {"dropout": 0.0}, "acvae": {}, "svae": {}}


# One whose loss is exact and one that draws views; the other models, which share their code, in `make check`.
@pytest.mark.parametrize("names", [("gru4rec", "cl4srec"), pytest.param(tuple(TOGETHER), marks=pytest.mark.slow)])
def test_two_processes_train_as_one(names: tuple[str, ...], tmp_path: Path) -> None:
    run_together(2, tmp_path / "store", partial(_train, tmp_path, names))
    data = split(users=37)
    for name in names:
        options = TOGETHER[name]
        alone = fit(small(name, data, **options), data, epochs=2, progress=False)
        both = torch.load(tmp_path / f"{name}.pt")
        exact = options.get("loss") == "softmax"
        for ours, theirs in zip(both, (line["loss"] for line in alone), strict=True):
            # Others draw their own noise, views and negatives, and contrast with their share of a batch alone.
            assert ours == pytest.approx(theirs, abs=1e-5) if exact else ours == pytest.approx(theirs, rel=0.2), name


def _train(out: Path, names: Sequence[str]) -> None:
    data = split(users=37)
    for name in names:
        lines = fit(small(name, data, **TOGETHER[name]), data, epochs=2, progress=False)
        if processes.rank() == 0:
            torch.save([line["loss"] for line in lines], out / f"{name}.pt")


def test_epochs_after_the_pre_training_are_short() -> None:
    train = split().train
    model, without = small("s3rec", split()), small("s3rec", split(), pretrain=0)
    assert model.usual_steps(train) == without.steps(train) == without.usual_steps(train) < model.steps(train)


def test_svae_is_told_items_beyond_its_window() -> None:
    history = Histories.from_lists([[1, 2, 3, 4, 5, 6, 7, 8]])
    data = Interactions(Items(tuple("abcdefgh")), ("u",), history).split("none")
    model: Any = small("svae", data, max_len=3, batch=9)
    (batch,) = model.batches(data.train, np.random.default_rng(0))
    found = dict(zip(batch.item.tolist(), batch.target.tolist(), strict=True))
    assert found == {n: [*range(n + 1, 9), 0, 0, 0, 0][:4] for n in range(1, 8)}


@pytest.mark.parametrize("loss", ["bce", "bpr"])
def test_a_history_with_every_item_has_no_negative(loss: str) -> None:
    data = Interactions(Items(tuple("abcdef")), ("u",), Histories.from_lists([[1, 2, 6, 3, 4, 5]])).split("none")
    model: Any = small("caser", data, loss=loss, max_len=2, following=1)
    (batch,) = model.batches(data.train, np.random.default_rng(0))
    assert not batch.negative.any()
    model.loss(batch).backward()
    pushed = {item for item, grad in enumerate(model.bias.grad.tolist()) if grad}
    assert pushed == (set(batch.target.unique().tolist()) if loss == "bce" else set())
    assert (model.bias.grad <= 0).all()  # none is pushed down
