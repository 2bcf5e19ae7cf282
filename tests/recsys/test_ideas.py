"""The study of ideas for SASRec: each idea is what its name says, a training that was cut off goes on to the same
result, and what is in the results is not trained again. No figure of a result is looked at.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_runs import write_sequences

from benchmarks import ideas, study, tables_quality
from benchmarks.sources import last_one
from fastcl.recsys import Histories, Items, SASRec
from fastcl.recsys.data import Split
from fastcl.recsys.models.batching import newest

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL: dict[str, Any] = {"dim": 8, "heads": 1, "blocks": 1, "max_len": 6, "batch": 16, "debias": 0.15}
BASE = {"options": SMALL, "plan": {"epochs": 60, "patience": 60}}
ITEMS = Items(ids=tuple(map(str, range(30))))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data")
    write_sequences(path, users=40, items=30, length=8)
    return path


@pytest.fixture(scope="module")
def parts(folder: Path) -> Split:
    return last_one("tiny", folder).split


def batch(model: SASRec, parts: Split) -> Any:
    return next(iter(model.batches(parts.train, np.random.default_rng(0))))


def made(idea: str) -> Any:
    return ideas.IDEAS[idea].model(ITEMS, seed=0, **{**SMALL, "dropout": 0.0, **ideas.IDEAS[idea].options})


def test_the_manifest_has_the_base_of_every_set() -> None:
    for name in ideas.SETS:
        found = ideas.base(name)
        SASRec(ITEMS, **found["options"])
        study.Plan(**found["plan"])


def test_the_filter_gives_the_last_value_of_a_window_without_high_frequencies() -> None:
    x, matrix = torch.randn(50, dtype=torch.float64), ideas.low_pass(50, 5).double()
    for at in (0, 6, 49):
        waves = torch.fft.rfft(F.pad(x[: at + 1], (49 - at, 0)))
        waves[3:] = 0
        torch.testing.assert_close((matrix @ x)[at], torch.fft.irfft(waves, n=50)[-1], rtol=1e-5, atol=1e-6)


def states(model: SASRec, clicks: list[int]) -> torch.Tensor:
    histories = Histories.from_lists([clicks, [7]])
    packed, item = model._clicks(histories, newest(histories, 6))
    return model.eval()(item, packed)


def test_a_filtered_state_does_not_see_later_clicks() -> None:
    model = made("frequency filter, alpha 0.7")
    torch.testing.assert_close(states(model, [1, 2, 3, 4])[:2], states(model, [1, 2, 9])[:2])


def test_alpha_is_the_share_of_the_filter() -> None:
    plain, none, whole = SASRec(ITEMS, **SMALL), *(ideas.Filtered(ITEMS, alpha=a, **SMALL) for a in (0.0, 1.0))
    torch.testing.assert_close(states(none, [1, 2, 3]), states(plain, [1, 2, 3]), rtol=0, atol=1e-6)
    before = states(whole, [1, 2, 3])
    assert not torch.allclose(before, states(plain, [1, 2, 3]), atol=1e-2)
    whole.blocks[0].out.bias.data[0] += 1
    torch.testing.assert_close(states(whole, [1, 2, 3]), before)


@pytest.mark.parametrize("idea", ["cosines, temperature 0.1", "label smoothing 0.1"])
def test_a_changed_loss_is_that_of_torch(idea: str, parts: Split) -> None:
    model = made(idea)
    given = batch(model, parts)
    hidden, rows = model(given.item, given.clicks), model.item.weight[1:]
    if idea.startswith("cosines"):
        hidden, rows = F.normalize(hidden, dim=-1), F.normalize(rows, dim=-1) / 0.1
    smoothing = 0.0 if idea.startswith("cosines") else 0.1
    logits = hidden @ rows.T + model.bias
    assert model.bias.std() > 0
    expected = F.cross_entropy(logits, given.target - 1, label_smoothing=smoothing)
    torch.testing.assert_close(model.loss(given), expected)
    if idea.startswith("cosines"):
        scores = model.scores(Histories.from_lists([[1, 2], [3]]))[:, 1:]
        assert 0.0 < scores.abs().max() <= 10.001
        torch.testing.assert_close(model.vectors_of(torch.arange(1, 31)), model.item_vectors()[1:])


def test_validation_reads_the_average_and_training_the_weights() -> None:
    model = made("average of weights, decay 0.99")
    weight = model.item.weight
    average = weight.detach().clone()
    for step in range(1, 4):
        with torch.no_grad():
            weight += step
        model.after_step(None)
        kept = (1 + step) / (10 + step)
        average = kept * average + (1 - kept) * weight.detach()
    trained = weight.detach().clone()
    for _ in range(2):
        torch.testing.assert_close(model.eval().item.weight.detach(), average)
        torch.testing.assert_close(model.train().item.weight.detach(), trained, rtol=0, atol=0)


class Stop(Exception):
    """Ends a training as a signal would."""


@pytest.mark.parametrize("idea", list(ideas.IDEAS)[:6])
def test_a_training_that_was_cut_off_goes_on_to_the_same_result(
    idea: str, parts: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(log: dict[str, Any]) -> None:
        raise Stop

    about = (ideas.IDEAS[idea], BASE, 2, 0, parts)
    whole = ideas.measured(*about, tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(ideas, "_say", stop)
        with pytest.raises(Stop):
            ideas.measured(*about, tmp_path / "cut")
    found = ideas.measured(*about, tmp_path / "cut")
    assert len(whole["curve"]) == 2
    for name in ("curve", "valid", "last", "best_epoch", "plan", "options"):
        assert found[name] == whole[name], name


def test_decay_is_decoupled(parts: Split, tmp_path: Path) -> None:
    """A step multiplies the weights by 1 - rate * decay, whatever their gradients are."""
    lengths = []
    for decay in (0.0, 300.0):
        model = SASRec(parts.items, seed=0, lr=1e-3, **SMALL)
        assert model.steps(parts.train) == 3
        study.train(model, study.Plan(1, 1, decay=decay), 0, parts, tmp_path / str(decay), lambda log: None)
        lengths.append(model.item.weight.detach().norm().item())
    assert lengths[1] / lengths[0] == pytest.approx(0.7 * 0.8 * 0.9, rel=0.05)


def test_finished_trainings_are_not_repeated(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ideas, "SETS", {"Office": "tiny"})
    monkeypatch.setattr(ideas, "base", lambda name: BASE)
    output = tmp_path / "ideas.json"
    asked = ["ideas", "--data", str(folder), "--states", str(tmp_path), "--output", str(output), "--epochs", "1"]
    for seeds in ("0", "0,1", "0,1"):
        monkeypatch.setattr(sys, "argv", [*asked, "--only", "as it is", "dropout 0.4", "--seeds", seeds])
        ideas.main()
        monkeypatch.setattr(study.loop, "epoch", study.loop.epoch if seeds == "0" else None)
    rows = json.loads(output.read_text())["rows"]
    assert [(row["idea"], row["seed"]) for row in rows] == [
        ("as it is", 0),
        ("dropout 0.4", 0),
        ("as it is", 1),
        ("dropout 0.4", 1),
    ]
    assert [row["options"].get("dropout") for row in rows] == [None, 0.4, None, 0.4]
    assert all("test" not in row for row in rows)


def test_differences_are_between_the_same_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"as it is": (0.10, 0.12, 0.14), "good": (0.11,), "bad": (0.05, 0.12)}
    rows = [
        {"set": "Office", "idea": idea, "seed": seed, "epochs planned": 9}
        | {"valid": {"recall@20": 0.2, "ndcg@20": value}}
        for idea, values in found.items()
        for seed, value in enumerate(values)
    ]
    monkeypatch.setattr(tables_quality, "results", lambda name: {"rows": rows})
    lines = tables_quality.ideas("Office").splitlines()
    assert lines[0] == "Office, 9 epochs:"
    assert lines[4:] == [
        "| as it is | 3 | 0.2000 (0.0000) | 0.1200 (0.0200) |  |  |",
        "| good | 1 | 0.2000 | 0.1100 | +0.0100 (+10.0%) | +0.5 |",
        "| bad | 2 | 0.2000 (0.0000) | 0.0850 (0.0495) | -0.0250 (-22.7%) | -1.2 |",
    ]
