"""What has become of a model's intents, counted by hand, and the command that shows it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from test_models import histories, items
from test_multi_clrec import OPTIONS

from fastcl.recsys import CLRec, Histories, Items, MultiCLRec, intents, save
from fastcl.recsys.cli import main

pytestmark = pytest.mark.usefixtures("one_thread")


def test_intents_are_counted_by_hand() -> None:
    model = MultiCLRec(items(), seed=3, **OPTIONS).eval()
    data = histories(rows=300)
    found = intents(model, data, k=4, seen="keep")
    routed = model.intents(torch.arange(1, 41)).detach().double().numpy()
    genre = model.items.features["genre"]
    for row, code in zip(found["categories"], (1, 2, 3), strict=True):
        having = [item for item in range(1, 41) if code in genre.codes[item]]
        assert (found["category"], row["category"], row["items"]) == ("genre", genre.values[code - 1], len(having))
        expected = [np.mean([routed[item - 1, h] for item in having]) for h in range(5)]
        assert row["intents"] == pytest.approx(expected, rel=1e-4)
        assert sum(row["intents"]) == pytest.approx(1.0, rel=1e-5)
    largest = routed.argmax(1)
    assert found["items"] == [int((largest == h).sum()) for h in range(5)]
    pi = routed.mean(0)
    assert found["balance"] == pytest.approx(-sum(p * math.log(p) for p in pi) / math.log(5), rel=1e-4)
    assert found["polarity"] == pytest.approx(np.mean([row.max() for row in routed]), rel=1e-4)
    fits = model.users(data).fit.argmax(1)
    assert found["users"] == pytest.approx([float((fits == h).float().mean()) for h in range(5)])
    assert found["top_intent"] == max(found["users"]) < 1.0
    lists = [largest[row - 1] for row in model.scores(data).topk(4).indices.numpy()]
    assert found["list_share"] == pytest.approx(np.mean([max(np.bincount(row)) / 4 for row in lists]))
    assert found["list_intents"] == pytest.approx(np.mean([len(set(row)) for row in lists]))


def test_intents_of_items_that_are_their_own_categories() -> None:
    found = intents(
        MultiCLRec(Items(tuple("abcde")), seed=1, **OPTIONS).eval(), Histories.from_lists([[1], [2, 3]]), k=9
    )
    assert (found["category"], found["categories"], sum(found["items"])) == ("", [], 5)
    with pytest.raises(TypeError, match="model: expected one with intents"):
        intents(CLRec(items()), histories())
    with pytest.raises(ValueError, match="histories: expected at least one, got none"):
        intents(MultiCLRec(items(), **OPTIONS), Histories.from_lists([]))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, features = tmp_path / "log.csv", tmp_path / "items.csv"
    lines = [f"u{user},i{(user + step) % 12},{step}" for user in range(20) for step in range(6)]
    log.write_text("\n".join(["user,item,time", *lines]) + "\n")
    features.write_text("item,aisle\n" + "".join(f"i{n},{'fruit' if n % 2 else 'bread'}\n" for n in range(12)))
    settings = ["--set", "dim=8", "batch=16", "main=32", "secondary=8", "intents=3", "served=2"]
    options = ["--item-features", str(features), "--epochs", "2", *settings, "-o", str(tmp_path / "run")]
    assert main.main(["train", str(log), "--model", "multi_clrec", *options]) == 0
    capsys.readouterr()
    assert main.main(["intents", str(tmp_path / "run"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["category"] for row in found["categories"]] == ["bread", "fruit"]
    assert main.main(["intents", str(tmp_path / "run")]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in shown[2:5]] == [str(items) for items in found["items"]]
    assert any("fruit" in line for line in shown)
    assert f"balance      {found['balance']:.3f}" in shown
    save(CLRec(Items(tuple("abc"))), tmp_path / "other", {"data": {"path": str(log)}})
    assert main.main(["intents", str(tmp_path / "other"), "--data", str(log)]) == 2
