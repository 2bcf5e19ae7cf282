"""Serving: ids in and out, unknown items, times, whole files, and vectors kept between calls."""

import csv
import dataclasses
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from made import LEARNED

from fastcl.recsys import (
    MODELS,
    CLRec,
    Histories,
    Interactions,
    Items,
    Model,
    Popularity,
    SASRec,
    fit,
    query_vectors,
    recommend,
    recommend_users,
    save,
    similar,
)
from fastcl.recsys.cli import main
from fastcl.recsys.serving import recommend as serving

pytestmark = pytest.mark.usefixtures("one_thread")
IDS = tuple(f"i{n}" for n in range(1, 41))
ITEMS = Items(IDS)
OPTIONS = {"dim": 16, "max_len": 7}


def made(name: str, seed: int) -> Model:
    """A small model of any kind: some have users and no window."""
    known = {field.name for field in dataclasses.fields(MODELS[name].Config)}
    return MODELS[name](ITEMS, seed=seed, **{key: value for key, value in OPTIONS.items() if key in known})


def call(*arguments: str | Path) -> int:
    return main.main([str(a) for a in arguments])


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Three users; the second clicks on an unknown item, the third on nothing else."""
    path = tmp_path / "log.csv"
    path.write_text("user,item,time\nann,i1,1\nann,i2,2\nbob,new,5\nbob,i3,6\ncy,new,7\ncy,newer,8\n")
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    save(SASRec(ITEMS, seed=0, **OPTIONS), tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize("name", LEARNED)
def test_scores_are_inner_products_with_the_item_vectors(name):
    model = made(name, 3).eval()
    data = Histories.from_lists([[1, 2, 3], [4], [5, 6]])
    with torch.inference_mode():
        expected = best_products(model.encode(data), model.item_vectors())
        torch.testing.assert_close(model.scores(data)[:, 1:], expected[:, 1:])
    query = torch.from_numpy(query_vectors(model, [["i1", "i2", "i3"], ["i4"], ["i5", "i6"]]))
    torch.testing.assert_close(best_products(query, model.item_vectors())[:, 1:], expected[:, 1:])


def best_products(queries: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """One vector a history or several: the largest inner product with any."""
    return (queries.reshape(len(queries), -1, queries.shape[-1]) @ table.T).amax(1)


@pytest.mark.parametrize("name", LEARNED)
def test_kept_item_vectors_follow_the_weights(name):
    """Scores after training, loading or a change by hand are never those of older vectors."""
    data = Histories.from_lists([[1, 2, 3], [4]])
    model, other = (made(name, seed).eval() for seed in (3, 4))

    def check() -> None:
        with torch.no_grad():
            expected = best_products(model.encode(data), model.item_vectors())
            torch.testing.assert_close(model.scores(data)[:, 1:], expected[:, 1:])

    check()
    model.load_state_dict(other.state_dict())
    check()
    with torch.no_grad():
        next(p for n, p in model.named_parameters() if n.startswith("item")).mul_(2.0)
    check()
    optimizer = torch.optim.Adam(model.train().parameters(), lr=0.1, fused=True)  # counts no versions
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    model.eval()
    check()


def test_unknown_items_are_skipped_and_counted():
    model = SASRec(ITEMS, seed=0, **OPTIONS).eval()
    found = recommend(model, [["i3", "new", "i5", "new"], ["newer", "i7"]], k=4)
    assert found == recommend(model, [["i3", "i5"], ["i7"]], k=4)
    assert found.skipped == Counter({"new": 2, "newer": 1})
    assert recommend(model, [["i3"]]).skipped == Counter()
    with pytest.raises(ValueError, match=r"expected known items only \(strict\), got 2 unknown: 'new', 'newer'"):
        recommend(model, [["i3", "new"], ["newer", "i7"]], strict=True)


@pytest.mark.parametrize(
    ("histories", "options", "error", "message"),
    [
        ([[3]], {}, TypeError, "expected ids as strings, got 3 in row 0"),
        ([["i1"]], {"k": 0}, ValueError, "k: expected whole numbers from 1, .* got 0"),
        ([], {"seen": "hide"}, ValueError, "seen: expected one of mask, keep, got 'hide'"),
        ([["i1", "i2"]], {"times": [[1]]}, ValueError, "times: expected as many times as ids"),
        ([["i3"], ["i1", "i2"]], {"times": [[9], [2, 1]]}, ValueError, "numbers that never fall, got 1 in row 1"),
        ([["i1"]], {"times": [[2**70]]}, TypeError, "times: expected numbers, in the unit"),
        ([["i1"], ["i2"]], {"times": [[1.0], [np.nan]]}, ValueError, "never fall, got nan in row 1"),
    ],
)
def test_bad_input_is_refused(histories, options, error, message):
    with pytest.raises(error, match=message):
        recommend(SASRec(ITEMS, **OPTIONS).eval(), histories, **options)


def test_only_and_without_limit_the_lists_and_not_the_scores():
    model = SASRec(ITEMS, seed=0, **OPTIONS).eval()
    whole = recommend(model, [["i3", "i5"], ["i7"]], k=100)
    shop = ["i1", "i2", "i3", "i9", "i30", "sold elsewhere"]
    found = recommend(model, [["i3", "i5"], ["i7"]], k=100, only=shop, without=["i9", "unheard of"])
    assert found == [[entry for entry in row if entry[0] in ("i1", "i2", "i3", "i30")] for row in whole]
    short = recommend(model, [["i3", "i5"], ["i7"]], k=2, only=shop)
    assert short == [[entry for entry in row if entry[0] in shop][:2] for row in whole]
    assert recommend(model, map(list, [["i3", "i5"], ["i7"]]), k=2, only=iter(shop)) == short
    barred = recommend(model, [["i3", "i5"], ["i7"]], k=100, without=(item for item in shop))
    assert barred == [[entry for entry in row if entry[0] not in shop] for row in whole]
    for options, error, message in (
        ({"only": "i1"}, TypeError, "only: expected a sequence of ids as strings, got 'i1'"),
        ({"without": [1]}, TypeError, r"without: expected a sequence of ids as strings, got \[1\]"),
        ({"only": ["x"]}, ValueError, r"only: expected an item that the model knows, got \['x'\]"),
        ({"only": []}, ValueError, r"only: expected an item that the model knows, got \[\]"),
    ):
        with pytest.raises(error, match=message):
            recommend(model, [["i1"]], **options)
        with pytest.raises(error, match=message):
            similar(model, "i1", **options)


def test_a_stranger_gets_the_list_of_the_fallback(monkeypatch, log):
    model = SASRec(ITEMS, seed=0, **OPTIONS).eval()
    popular = Popularity(np.arange(len(ITEMS) + 1), ITEMS)
    found = recommend(model, [["new"], ["i3"], []], k=2, fallback=popular, without=[IDS[-1]])
    assert [item for item, _ in found[0]] == [item for item, _ in found[2]] == [IDS[-2], IDS[-3]]
    assert found[1] == recommend(model, [["i3"]], k=2, without=[IDS[-1]])[0]
    assert found.left_out == (0, 2)
    data = Interactions.read(log)
    monkeypatch.setattr(serving, "MAX_CHUNK", 2)
    rows = dict(recommend_users(model, data, k=2, fallback=popular).rows)
    assert list(rows) == list(data.users)  # in the log's order
    assert rows["cy"] == recommend(model, [[]], k=2, fallback=popular)[0]
    assert rows["ann"] == dict(recommend_users(model, data, k=2).rows)["ann"]
    with pytest.raises(ValueError, match="fallback: expected scores of 40 items, got those of 3"):
        recommend(model, [[]], fallback=Popularity(np.arange(4)))


def test_similar_items_are_the_nearest_vectors(run, capsys):
    model = SASRec(ITEMS, seed=0, **OPTIONS).eval()
    vectors = model.item_vectors().detach().double().numpy()
    cosine = vectors[1:] @ vectors[5] / np.linalg.norm(vectors[1:], axis=1) / np.linalg.norm(vectors[5])
    order = [item for item in np.argsort(-cosine) if item != 4][:3]
    found = similar(model, "i5", k=3)
    assert [item for item, _ in found] == [IDS[item] for item in order]
    assert [score for _, score in found] == pytest.approx(cosine[order], abs=1e-6)
    with pytest.raises(ValueError, match="item: expected an id that the model knows, got 'x'"):
        similar(model, "x")
    assert call("similar", run, "i5", "-k", "3", "--without", found[0][0], "--json") == 0
    shown = json.loads(capsys.readouterr().out)["items"]
    assert [entry["item"] for entry in shown[:2]] == [item for item, _ in found[1:]]
    assert call("similar", run, "x") == 2
    assert "ITEM: expected an id that the model knows, got 'x'" in capsys.readouterr().err


def test_lists_as_json_lines_with_titles_and_limits(tmp_path, log, capsys):
    items = Items(IDS, tuple(f"Title, {item}" for item in IDS))
    run = tmp_path / "titled"
    reading = {"user": "user", "item": "item", "time": "time"}
    save(SASRec(items, seed=0, **OPTIONS), run, {"data": {"path": str(log), **reading}})
    shop = tmp_path / "shop.txt"
    shop.write_text("i1\ni2\ni3\n\ni4\n")
    out = tmp_path / "lists.jsonl"
    more = ("--only", f"@{shop}", "--fallback", "popular", "--seen", "keep")
    assert call("recommend", run, "--users", log, "-k", "9", "-o", out, *more) == 0
    assert "popular items for 1 users without a known item: cy" in capsys.readouterr().err
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["user"] for row in found] == list(Interactions.read(log).users)
    for row in found:
        assert {entry["item"] for entry in row["items"]} == {"i1", "i2", "i3", "i4"}
        assert all(entry["title"] == f"Title, {entry['item']}" for entry in row["items"])
    table = tmp_path / "lists.csv"
    assert call("recommend", run, "--users", log, "-k", "1", "-o", table) == 0
    with open(table, newline="", encoding="utf-8") as file:
        assert all(row["title"] == f"Title, {row['item']}" for row in csv.DictReader(file))
    for command in (("recommend", run, "--history", "i1"), ("similar", run, "i1")):
        capsys.readouterr()
        assert call(*command, "--only", "i2,i3", "--without", "i3,nowhere") == 0
        assert capsys.readouterr().err == "--without: 1 of 2 items are unknown: nowhere\n"
    shop.write_bytes("\ufeffi2\r\ni3\r\n".encode())  # as Notepad writes it
    assert call("similar", run, "i1", "--only", f"@{shop}") == 0
    assert capsys.readouterr().err == ""
    with pytest.raises(SystemExit):
        call("recommend", run, "--history", "i1", "--only", f"@{tmp_path / 'none.txt'}")
    assert "argument --only: expected @FILE with an id a line, got @" in capsys.readouterr().err


def test_times_of_the_history_reach_clrec():
    model = CLRec(ITEMS, seed=0, **OPTIONS).eval()
    ids, times = [["i1", "new", "i2"], ["i5"]], [[0, 10, 10**6], [7]]
    found = recommend(model, ids, k=40, times=times)
    plain = Histories.from_lists([[1, 2], [5]], [[0, 10**6], [7]])
    for row, scores in zip(found, model.scores(plain).tolist(), strict=True):
        assert [score for _, score in row] == pytest.approx([scores[int(item[1:])] for item, _ in row], abs=1e-5)
    assert found[0] != recommend(model, ids, k=40)[0]


def test_all_users_of_a_log_in_chunks(monkeypatch, log):
    model = SASRec(ITEMS, seed=0, **OPTIONS).eval()
    data = Interactions.read(log)
    whole = recommend_users(model, data, k=3)
    rows = dict(whole.rows)
    assert list(rows) == ["ann", "bob"]
    assert whole.left_out == ("cy",)
    assert whole.skipped == Counter({"new": 2, "newer": 1})
    for user, history in (("ann", ["i1", "i2"]), ("bob", ["i3"])):
        (alone,) = recommend(model, [history], k=3)
        assert [item for item, _ in rows[user]] == [item for item, _ in alone]
        assert [score for _, score in rows[user]] == pytest.approx([score for _, score in alone], abs=1e-5)
    scored: list[int] = []
    monkeypatch.setattr(serving, "rows_at_once", lambda items: 1)
    monkeypatch.setattr(SASRec, "encode", lambda self, h, e=SASRec.encode: (scored.append(len(h)), e(self, h))[1])
    assert [user for user, _ in recommend_users(model, data, k=3).rows] == ["ann", "bob"]
    assert scored == [1, 1]
    with pytest.raises(ValueError, match="strict"):
        recommend_users(model, data, strict=True)


def test_an_item_that_training_never_saw_can_be_recommended_and_clicked():
    """Cold items of the table: no failure, and a place in the ranking."""
    log = [["i1", "i2", "i3", "i4"], ["i2", "i3", "i4", "i5"], ["i3", "i4", "i5", "i9"]]
    lists = [[IDS.index(item) + 1 for item in row] for row in log]
    data = Interactions(ITEMS, ("a", "b", "c"), Histories.from_lists(lists))
    split = data.split()
    model = SASRec(ITEMS, seed=0, **OPTIONS)
    fit(model, split, epochs=1, progress=False)
    assert split.counts[9] == 0
    (row,) = recommend(model, [["i9"]], k=100)
    assert {item for item, _ in row} == set(IDS) - {"i9"}


def test_command_for_a_history(run, capsys):
    assert call("recommend", run, "--history", 'i3,"i5",nowhere', "-k", "4", "--json") == 0
    shown = capsys.readouterr()
    document = json.loads(shown.out)
    assert (document["k"], document["seen"], document["skipped"]) == (4, "mask", {"nowhere": 1})
    (entry,) = document["recommendations"]
    model = SASRec(ITEMS, seed=0, **OPTIONS).eval()
    assert [(item["item"], item["score"]) for item in entry["items"]] == recommend(model, [["i3", "i5"]], k=4)[0]
    assert "skipped 1 of 3 clicks, on unknown items: nowhere" in shown.err
    assert call("recommend", run, "--history", "i3,nowhere", "--strict") == 2
    assert "1 unknown: 'nowhere'" in capsys.readouterr().err
    assert call("recommend", run, "--history", "nowhere") == 0
    assert f"note: {run} knows no item of the history: there is nothing to recommend from" in capsys.readouterr().err
    assert call("recommend", run, "--history", "i3,i4", "--times", "5,x") == 2
    assert "--times: expected numbers separated by commas, got 'x'" in capsys.readouterr().err
    assert call("recommend", run, "--history", "i3,i4", "--times", "5,5.5") == 0


def test_command_for_the_users_of_a_file(run, log, tmp_path, capsys):
    out = tmp_path / "out.csv"
    assert call("recommend", run, "--users", log, "-k", "2", "-o", out) == 0
    shown = capsys.readouterr()
    assert shown.out == f"{out}: 4 rows, 2 users\n"
    assert shown.err.splitlines() == [
        f"note: {run} names no data: histories are those of the files alone",
        "skipped 3 of 6 clicks, on unknown items: new, newer",
        "left out 1 users without a known item: cy",
    ]
    with open(out, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(row["user"], row["rank"]) for row in rows] == [("ann", "1"), ("ann", "2"), ("bob", "1"), ("bob", "2")]
    expected = recommend(SASRec(ITEMS, seed=0, **OPTIONS).eval(), [["i1", "i2"], ["i3"]], k=2)
    flat = [entry for row in expected for entry in row]
    assert [row["item"] for row in rows] == [item for item, _ in flat]
    assert [float(row["score"]) for row in rows] == pytest.approx([score for _, score in flat], rel=1e-5)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log.csv", "out.csv", "run"]

    assert call("recommend", run, "--users", log, "-k", "2") == 0
    assert capsys.readouterr().out == out.read_text()
    assert call("recommend", run, "--users", log, "-o", out, "--json") == 0
    assert json.loads(capsys.readouterr().out)["left_out"] == ["cy"]
    before = out.read_bytes()
    assert call("recommend", run, "--users", log, "--strict", "-o", out) == 2
    assert out.read_bytes() == before


@pytest.mark.parametrize("name", list(MODELS))
def test_a_history_without_a_known_item_refuses_no_batch(name):
    """It gets an empty row and a mention; the rows beside it are what they are without it."""
    model = made(name, 3)
    histories = [[], ["i1", "i2"], ["x"], ["i3"], []]
    found = recommend(model, histories, k=4)
    stranger = [] if name != "popular" else found[0]  # everybody has the list of the most clicked items
    assert len(stranger) == (4 if name == "popular" else 0)
    assert found.left_out == (0, 2, 4)
    assert {len(found[row]) for row in found.left_out} == {len(stranger)}
    assert found[1::2] == recommend(model, [["i1", "i2"], ["i3"]], k=4)
    alone = recommend(model, [[]], k=4)
    assert (len(alone[0]), alone.left_out, recommend(model, []).left_out) == (len(stranger), (0,), ())
    with pytest.raises(ValueError, match=r"an item that the model knows in row 0, got \[\]"):
        query_vectors(model, histories)


def test_where_every_item_is_seen_there_is_a_note(run, log, tmp_path, capsys):
    everything = ",".join(IDS)
    assert call("recommend", run, "--history", everything) == 0
    shown = capsys.readouterr()
    assert (shown.out, shown.err.count("the history holds every item, so that nothing is left to recommend")) == ("", 1)
    with open(log, "a") as file:
        file.writelines(f"{user},{item},9\n" for user in ("bob", "dan") for item in IDS)
    for more in ([], ["--json"], ["-o", tmp_path / "out.csv"]):
        assert call("recommend", run, "--users", log, *more) == 0
        assert "note: 2 users have clicked on every item, so that nothing is left" in capsys.readouterr().err
        assert call("recommend", run, "--users", log, "--seen", "keep", *more) == 0
        assert "every item" not in capsys.readouterr().err
