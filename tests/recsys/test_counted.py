"""The floors as models: they score as the floors do after training, saving and loading, and serve like any model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastcl.recsys import (
    MODELS,
    CoOccurrence,
    Histories,
    Interactions,
    PersonalFrequency,
    Popularity,
    evaluate,
    export,
    fit,
    load,
    query_vectors,
    recommend,
    resume,
    similar,
)
from fastcl.recsys.cli import main
from fastcl.recsys.training import tensorfile
from tests.recsys.tiny_runs import write_table

pytestmark = pytest.mark.usefixtures("one_thread")
NAMES = ("popular", "cooccurrence", "frequent")


def log() -> Interactions:
    rng = np.random.default_rng(0)
    rows = 300
    columns = {"user": rng.integers(30, size=rows), "item": rng.integers(15, size=rows) ** 2 // 15, "time": range(rows)}
    return Interactions.read({name: list(values) for name, values in columns.items()})


def floor(name: str, split: Any) -> Any:
    made = {
        "popular": lambda: Popularity(split.counts, split.items),
        "cooccurrence": lambda: CoOccurrence(split.train, len(split.items)),
        "frequent": lambda: PersonalFrequency(split.counts, split.items),
    }
    return made[name]()


@pytest.mark.parametrize("name", NAMES)
def test_a_floor_is_trained_saved_and_served(name: str, tmp_path: Path) -> None:
    split = log().split()
    model = MODELS[name](split.items)
    history = fit(model, split, epochs=1, seen="keep", out=tmp_path / "run", progress=False)
    wanted = floor(name, split)
    assert evaluate(model, split.test, seen="keep") == evaluate(wanted, split.test, seen="keep")
    assert history[0]["recall@10"] == evaluate(wanted, split.valid, seen="keep")["recall@10"]
    assert resume(tmp_path / "run", split, progress=False) == history
    again = load(tmp_path / "run")
    for cases in (split.valid, split.test):
        torch.testing.assert_close(again.scores(cases.history), wanted.scores(cases.history), rtol=0, atol=0)
    ids = [[split.items.ids[0], split.items.ids[2]], ["unknown"]]
    found = recommend(again, ids, k=3)
    known = Histories.from_lists([[1, 3]])
    scores = wanted.scores(known)[0]
    scores[[1, 3]] = -torch.inf
    assert [score for _, score in found[0]] == scores.topk(3).values.tolist()
    assert found.left_out == (1,)
    for call in (lambda: export(again, tmp_path / "vectors"), lambda: query_vectors(again, ids[:1])):
        with pytest.raises(ValueError, match=f"model: expected one with item vectors, got {name}"):
            call()
    if name == "cooccurrence":
        users = [set(split.train.take(np.array([n])).item.tolist()) for n in range(len(split.train))]
        having = {i: {n for n, items in enumerate(users) if i in items} for i in range(1, len(split.items) + 1)}
        cosines = {
            split.items.ids[j - 1]: len(having[1] & having[j]) / (len(having[1]) * len(having[j])) ** 0.5
            for j in having
            if j != 1 and having[1] and having[j]
        }
        near = similar(again, split.items.ids[0], k=3)
        np.testing.assert_allclose([cosine for _, cosine in near], sorted(cosines.values())[::-1][:3], rtol=1e-6)
        assert all(abs(cosines[item] - cosine) < 1e-6 for item, cosine in near)
    else:
        with pytest.raises(ValueError, match="model: expected one with item vectors"):
            similar(again, split.items.ids[0])


@pytest.mark.parametrize("name", NAMES)
def test_what_means_nothing_for_a_floor_is_refused(name: str, tmp_path: Path) -> None:
    split = log().split()
    model = MODELS[name](split.items)
    fit(model, split, epochs=1, out=tmp_path / "run", progress=False)
    for options, message in (
        ({"epochs": 2}, f"epochs: expected 1 for {name}, which counts the clicks in one pass, got 2"),
        ({"epochs": 1, "lr": 0.1}, f"lr: expected none for {name}, which has no weights to learn, got 0.1"),
        ({"epochs": 1, "init": tmp_path / "run"}, f"init: expected none for {name}, which counts the clicks"),
    ):
        with pytest.raises(ValueError, match=message):
            fit(MODELS[name](split.items), split, progress=False, **options)
    with pytest.raises(ValueError, match="epochs: expected 1"):
        resume(tmp_path / "run", split, progress=False, epochs=3)
    assert json.loads((tmp_path / "run" / "config.json").read_text())["epochs"] == 1


def test_a_damaged_file_of_clicks_is_refused(tmp_path: Path) -> None:
    split = log().split()
    fit(MODELS["cooccurrence"](split.items), split, epochs=1, out=tmp_path / "run", progress=False)
    path = tmp_path / "run" / "model.safetensors"
    tensors, facts = tensorfile.read_tensors(path)
    for name, value in (("clicks.item", torch.zeros(3, dtype=torch.int64)), ("clicks.offsets", torch.zeros(0).long())):
        tensorfile.write_tensors(path, {**tensors, name: value}, facts)
        with pytest.raises(ValueError, match="expected the items of each user"):
            load(tmp_path / "run")


def test_settings_change_what_is_counted() -> None:
    split = log().split()
    test = split.test.history.take(np.arange(5))
    model = MODELS["cooccurrence"](split.items, steps=1, mix=0.0, decay=0.9)
    fit(model, split, epochs=1, progress=False)
    wanted = CoOccurrence(split.train, len(split.items), steps=1, mix=0.0, decay=0.9)
    assert torch.equal(model.scores(test), wanted.scores(test))
    recent = MODELS["frequent"](split.items, decay=0.5)
    fit(recent, split, epochs=1, progress=False)
    assert not torch.equal(recent.scores(test), floor("frequent", split).scores(test))
    wrong = (("cooccurrence", {"decay": 0.0}), ("frequent", {"decay": 1.5}), ("cooccurrence", {"steps": 0}))
    for name, options in wrong:
        with pytest.raises(ValueError, match="expected"):
            MODELS[name](split.items, **options)


def test_floors_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_table(tmp_path)
    for name in NAMES:
        assert main.main(["train", "log.csv", "--model", name, "--seen", "keep", "-o", name]) == 0
        assert main.main(["evaluate", name, "--json"]) == 0
        shown = json.loads(capsys.readouterr().out.partition("\n")[2])["results"]
        same = {"popular": "popularity", "cooccurrence": "co-occurrence", "frequent": "personal frequency"}[name]
        assert shown[name] == shown[same]
        assert main.main(["recommend", name, "--history", "i1,i2", "-k", "2"]) == 0
        assert len(capsys.readouterr().out.splitlines()) == 2
    assert main.main(["compare", *NAMES]) == 0
    assert all(name in capsys.readouterr().out for name in ("cooccurrence",))
    assert main.main(["similar", "cooccurrence", "i1", "-k", "2"]) == 0
    assert main.main(["report", *NAMES, "-o", "report"]) == 0
    capsys.readouterr()
    assert main.main(["train", "log.csv", "--model", "popular", "--epochs", "3", "-o", "x"]) == 2
    assert "--epochs: expected 1 for popular" in capsys.readouterr().err
    assert main.main(["export", "popular", "-o", "vectors"]) == 2
    assert "RUN: expected one with item vectors, got popular" in capsys.readouterr().err
