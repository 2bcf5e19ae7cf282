"""Items without clicks: the split that holds out whole items against a loop, the vectors that features give, and the
commands that take a table of new items.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fastcl.recsys import (
    CLRec,
    Feature,
    Histories,
    Interactions,
    Items,
    MultiCLRec,
    SASRec,
    evaluate,
    fit,
    grown,
    load,
    with_items,
)
from fastcl.recsys.cli import main

pytestmark = pytest.mark.usefixtures("one_thread")
FIRST = Items(("a", "b", "c"), features={"tag": Feature.from_labels([["red"], ["red", "big"], ["blue"]])})
MORE = Items(("d", "b", "e"), features={"tag": Feature.from_labels([["red"], [], ["unheard"]])})


def log(seed: int) -> Interactions:
    rng = np.random.default_rng(seed)
    rows = 200
    columns = {"user": rng.integers(25, size=rows), "item": rng.integers(20, size=rows), "time": rng.permutation(rows)}
    return Interactions.read(columns)


@pytest.mark.parametrize("seed", range(3))
def test_whole_items_are_held_out(seed: int) -> None:
    data = log(seed)
    split = data.split("items", at=0.25, seed=seed)
    held = set(np.flatnonzero(split.counts == 0)[1:].tolist())
    assert 5 <= len(held) <= 6  # a quarter of twenty items, and perhaps one whose one click validates
    tests, valids, trains = [], [], []
    for user in range(len(data.users)):
        clicks = data.log.take(np.array([user])).item.tolist()
        drawn = {item for item in held if item not in split.valid.target}
        kept = [item for item in clicks if item not in drawn]
        for n in reversed(range(len(clicks))):
            history = [item for item in clicks[:n] if item not in drawn]
            if clicks[n] in drawn and history:
                tests.append((user, history, clicks[n]))
                break
        if len(kept) >= 3:
            valids.append((user, kept[:-1], kept[-1]))
            kept = kept[:-1]
        trains.append(kept)

    def listed(cases):  # type: ignore[no-untyped-def]
        rows = (cases.take(np.array([n])) for n in range(len(cases)))
        return [(int(row.user[0]), row.history.item.tolist(), int(row.target[0])) for row in rows]

    assert listed(split.test) == tests
    assert listed(split.valid) == valids
    assert [split.train.take(np.array([n])).item.tolist() for n in range(len(split.train))] == trains
    assert split.report is not None
    assert split.report.test_cases == split.report.unseen_targets == len(tests)
    assert data.split("items", at=0.25, seed=seed + 1).counts.tolist() != split.counts.tolist()


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, 0.001, "many"])
def test_a_share_of_no_items_is_refused(share: object) -> None:
    with pytest.raises(ValueError, match="at: expected a"):
        log(0).split("items", at=share)  # type: ignore[arg-type]


def test_a_new_item_has_the_vector_of_its_features() -> None:
    model = CLRec(FIRST, dim=8, seed=0).eval()
    items = grown(FIRST, MORE)
    assert items.ids == ("a", "b", "c", "d", "e")
    larger = with_items(model, items)
    vectors = larger.item_vectors()
    torch.testing.assert_close(vectors[:4], model.item_vectors())
    ids, bag = model.item.id.weight, model.item.features[0].weight
    red, unheard = (1 + FIRST.features["tag"].values.index("red"), None)
    expected = F.normalize(ids[1:3].mean(0) + bag[red], dim=0) / model.config.temperature
    torch.testing.assert_close(vectors[4], expected)
    assert unheard is None
    assert not vectors[5].any()  # a value that nothing was learned of says nothing
    histories = Histories.from_lists([[1, 3]])
    torch.testing.assert_close(larger.scores(histories)[:, :4], model.scores(histories))
    # Items of the model that nobody clicked are taken as new ones.
    again = with_items(model, FIRST, counts=np.array([0, 5, 0, 1]))
    tag = bag[[red, 1 + FIRST.features["tag"].values.index("big")]].mean(0)
    torch.testing.assert_close(again.item_vectors()[2], F.normalize(ids[1] + tag, dim=0) / model.config.temperature)
    torch.testing.assert_close(again.item_vectors()[1], model.item_vectors()[1])


def test_a_model_that_cannot_encode_new_items_says_so() -> None:
    for model in (SASRec(FIRST, dim=8), CLRec(Items(("a", "b", "c")), dim=8), CLRec(FIRST, dim=8, features="clicks")):
        with pytest.raises(ValueError, match="items: expected a model that encodes item features"):
            with_items(model, grown(model.items, MORE))
    with pytest.raises(ValueError, match="items: expected the 3 items of the model first"):
        with_items(CLRec(FIRST, dim=8), MORE)
    several = MultiCLRec(FIRST, dim=8, intents=2, seed=0).eval()
    torch.testing.assert_close(with_items(several, grown(FIRST, MORE)).item_vectors()[:4], several.item_vectors())


def test_ids_are_left_out_in_training_alone() -> None:
    model = CLRec(FIRST, dim=8, seed=0, id_dropout=0.5)
    every = torch.arange(4)
    both, described = model.item.id(every) + model.item.described(every), model.item.described(every)
    torch.manual_seed(0)
    seen = {tuple(torch.isclose(model.item.train()(every), described).all(1)[1:].tolist()) for _ in range(60)}
    assert len(seen) == 8  # each subset of three items
    torch.testing.assert_close(model.item.eval()(every), both)
    for options, items in (({"features": "clicks"}, FIRST), ({}, Items(("a", "b")))):
        with pytest.raises(ValueError, match="id_dropout: expected 0"):
            CLRec(items, dim=8, id_dropout=0.5, **options)
    # What a follower encodes for the queue is learned by nobody.
    follower = CLRec(FIRST, dim=8, id_dropout=0.5, negatives_from="vectors", momentum=0.9).train().item_follower
    assert follower is not None
    assert all(torch.equal(follower(every), follower(every)) for _ in range(5))


def test_features_find_held_out_items() -> None:
    """Users keep to one of four tags: a model of features finds held-out items of their tag, popularity does not."""
    rng = np.random.default_rng(0)
    users = np.repeat(np.arange(80), 12)
    items = 4 * rng.integers(20, size=len(users)) + users % 4
    table = {"user": users, "item": items, "time": np.arange(len(users))}
    tags = {"item": np.arange(80), "tag": [f"t{n % 4}" for n in range(80)]}
    split = Interactions.read(table, item_features=tags).split("items", at=0.2)
    model = CLRec(split.items, dim=16, batch=64, negatives=256, seed=0, id_dropout=0.3)
    fit(model, split, epochs=6, progress=False)
    found = with_items(model, split.items, split.counts)
    cold = torch.from_numpy(split.counts == 0)

    class Among:
        scorer = found

        def scores(self, histories: Histories) -> torch.Tensor:
            return found.scores(histories).masked_fill(~cold, -torch.inf)

    assert evaluate(Among(), split.test, k=5)["recall@5"] > 0.9  # about four new items have the tag


def test_commands_take_a_table_of_new_items(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [f"u{user},i{(user * 3 + step) % 9},{10 * step}" for user in range(9) for step in range(5)]
    Path("log.csv").write_text("\n".join(["user,item,time", *rows]) + "\n")
    Path("items.csv").write_text("item,tags\n" + "".join(f"i{n},{'ab'[n % 2]}|all\n" for n in range(9)))
    Path("new.csv").write_text("item,tags\nnew,a\ni1,b\n")
    small = ["--epochs", "1", "--set", "dim=8", "batch=8", "negatives=16", "max_len=4"]
    features = ["--item-features", "items.csv"]
    assert main.main(["train", "log.csv", "--model", "clrec", *features, *small, "-o", "run"]) == 0
    asked = ["recommend", "run", "--history", "i1,new", "-k", "10", "--json"]
    capsys.readouterr()
    assert main.main(asked) == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["skipped"] == {"new": 1}
    assert main.main([*asked, "--items", "new.csv", "--seen", "keep"]) == 0
    with_new = json.loads(capsys.readouterr().out)
    listed = {row["item"]: row["score"] for row in with_new["recommendations"][0]["items"]}
    assert with_new["skipped"] == {}
    assert len(listed) == 10
    model = load("run")
    assert set(listed) == {*model.items.ids, "new"}
    assert main.main(["export", "run", "--items", "new.csv", "-o", "vectors"]) == 0
    assert json.loads(Path("vectors/ids.json").read_text()) == [*model.items.ids, "new"]
    assert np.load("vectors/vectors.npy").shape == (10, 8)
    assert main.main(["similar", "run", "new", "--items", "new.csv", "-k", "3"]) == 0
    capsys.readouterr()
    assert main.main(["train", "log.csv", "--model", "clrec", *features, *small, "--split", "items", "-o", "held"]) == 0
    assert main.main(["evaluate", "held", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out.partition("\n")[2])
    assert shown["cold"]["items"] == 1
    assert shown["cold"]["results"]["clrec"]["recall@10"] == 1.0  # it is the only one
    # Scorers that count clicks give all these items the same score, so that they have no place among them.
    assert set(shown["cold"]["results"]) == {"chance", "popularity of the features", "clrec"}
    # Every command takes the held-out items as new ones.
    assert main.main(["compare", "held", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)["rows"][0]
    model, split = load("held"), Interactions.read("log.csv", item_features="items.csv").split("items", at=0.1)
    assert len(split.test) > 1
    assert row["recall@10"] == shown["results"]["clrec"]["recall@10"]
    encoded = evaluate(with_items(model, model.items, split.counts), split.test, k=3)["ndcg@3"]
    assert encoded != evaluate(model, split.test, k=3)["ndcg@3"]
    assert main.main(["compare", "held", "-k", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["ndcg@3"] == encoded
    assert main.main(["recommend", "run", "--history", "i1", "--items", "items.csv"]) == 2
    assert "items.csv: expected an item that the model lacks, got 9 that it knows" in capsys.readouterr().err
