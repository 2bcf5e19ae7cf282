"""Clicks after a training as test cases: against a loop over the clicks, on the command line, and refusals."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.bench_weeks import between
from fastcl.recsys import (
    Histories,
    Interactions,
    Items,
    LeakageWarning,
    Popularity,
    SASRec,
    evaluate,
    later,
    rank_cases,
    robustness,
)
from fastcl.recsys.cli import main
from fastcl.recsys.data.padded import Padded

pytestmark = pytest.mark.usefixtures("one_thread")


def log(rows: list[tuple[str, str, int]], timed: bool = True) -> Interactions:
    users, items, times = (list(column) for column in zip(*rows, strict=True))
    columns = {"user": users, "item": items} | ({"time": times} if timed else {})
    return Interactions.read(columns, time="time" if timed else None)


def drawn(seed: int) -> tuple[list[tuple[str, str, int]], list[tuple[str, str, int]]]:
    """An earlier and a later log that share rows, users and items, and overlap in time."""
    rng = np.random.default_rng(seed)
    first = [(f"u{rng.integers(9)}", f"i{rng.integers(12)}", int(rng.integers(40))) for _ in range(50)]
    new = [(f"u{rng.integers(12)}", f"i{rng.integers(16)}", int(rng.integers(30, 60))) for _ in range(30)]
    return first, [*new, *first[:5]]


@pytest.mark.parametrize("seed", range(4))
def test_cases_are_those_of_a_loop_over_the_clicks(seed: int) -> None:
    first, new = drawn(seed)
    before, after = log(first), log(new)
    split = before.split("none")
    week = later(split, before, after)
    known_items, known_users = {item for _, item, _ in first}, {user for user, _, _ in first}
    expected, without = [], 0
    for user in {row[0] for row in (*first, *new)}:
        clicks = [(t, 0, n, item) for n, (u, item, t) in enumerate(first) if u == user and (u, item, t) not in new]
        clicks += [(t, 1, n, item) for n, (u, item, t) in enumerate(new) if u == user]
        clicks.sort()
        for nth, (t, is_new, _, item) in enumerate(clicks):
            history = [c[3] for c in clicks[:nth]]
            if not is_new or (user, item, t) in first:
                continue
            if known_items & set(history):
                expected.append((user, tuple(history), item))
            else:
                without += 1
    found = []
    table, test = week.split.items, week.split.test
    for n in range(len(test)):
        case = test.take(np.array([n]))
        history = tuple(table.ids[i - 1] for i in case.history.item)
        found.append((week.split.users[case.user[0]], history, table.ids[case.target[0] - 1]))
    assert sorted(found) == sorted(expected)
    assert table.ids[: len(split.items)] == split.items.ids
    report = week.report
    assert (report.cases, report.no_history, report.again) == (len(expected), without, len(set(new) & set(first)))
    assert report.new_user_cases == sum(user not in known_users for user, _, _ in expected)
    assert report.new_item_cases == sum(item not in known_items for _, _, item in expected)
    assert week.groups["known users and items"].sum() == sum(
        user in known_users and item in known_items for user, _, item in expected
    )
    assert list(map(str, test.history.take(np.arange(len(test))).users)) == [week.split.users[u] for u in test.user]


def test_without_times_what_a_file_repeats_is_no_new_click() -> None:
    before = log([("a", "x", 0), ("a", "y", 0), ("b", "x", 0)], timed=False)
    after = log([("a", "x", 0), ("a", "y", 0), ("a", "z", 0), ("b", "y", 0)], timed=False)
    week = later(before.split("none"), before, after)
    assert (week.report.again, week.report.cases, week.report.before_training_ended) == (2, 2, None)
    assert week.split.test.target.tolist() == [3, 2]
    with pytest.raises(ValueError, match="on: expected times where the data"):
        later(before.split("none"), before, log([("a", "x", 1)]))
    with pytest.raises(ValueError, match="on: expected a new click of a user with a click before it, got none of 1"):
        later(before.split("none"), before, log([("new", "x", 0)], timed=False))


def test_items_that_a_model_lacks_are_passed_over_and_missed() -> None:
    model = SASRec(Items(("a", "b", "c")), dim=8, seed=0).eval()
    more = Items(("a", "b", "c", "new"))
    before = log([("u", "a", 1), ("u", "b", 2), ("v", "c", 3)])
    week = later(before.split("none"), before, log([("u", "new", 4), ("u", "c", 5)]))
    assert week.split.items.ids == more.ids
    cases = week.split.test
    scores = Padded(model, week.split.items).scores(cases.history.take(np.arange(2)))
    own = model.scores(before.log.take(np.array([0, 0])))
    torch.testing.assert_close(scores[:, :4], own)
    assert (scores[:, 4] == -torch.inf).all()
    read: list[Histories] = []
    padded = Padded(model, week.split.items)
    padded.scorer = SimpleNamespace(items=model.items, scores=lambda rows: (read.append(rows), model.scores(rows))[1])
    robustness(padded, cases, ratios=(1.0,))
    assert len(read) == 2
    assert all((rows.lengths > 0).all() and rows.item.max() <= 3 for rows in read)  # none is "new"
    found = rank_cases(Padded(model, week.split.items), cases, k=3)
    assert np.isinf(found.rank).tolist() == [True, False]
    assert evaluate(Popularity(week.split.counts), cases, k=4)["recall@4"] == 1.0


def test_tables_of_the_study_of_weeks_begin_each_other() -> None:
    first, new = drawn(0)
    data = log([*first, *new])
    early, late = (between(data, 0, cut) for cut in (25, 45))
    assert late.items.ids[: len(early.items)] == early.items.ids
    assert len(early.items) < len(late.items)
    for part, begin, end in ((early, 0, 25), (late, 0, 45), (between(data, 25, 45), 25, 45)):
        clicks = []
        for n, user in enumerate(part.users):
            row = part.log.take(np.array([n]))
            assert row.time is not None
            names = [part.items.ids[item - 1] for item in row.item]
            clicks += list(zip([user] * len(names), names, row.time.tolist(), strict=True))
        assert sorted(clicks) == sorted(row for row in (*first, *new) if begin <= row[2] < end)


def call(*words: str | Path) -> int:
    return main.main([str(word) for word in words])


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A log, the next week, features of the items of both, and a run of SASRec and one of CLRec that know the log."""
    monkeypatch.chdir(tmp_path)
    first = [f"u{user},i{(user * 3 + step) % 9},{100 * user + step}" for user in range(9) for step in range(5)]
    week = ["u0,i5,2000", "u0,new,2001", "u1,i2,2002", "stranger,i1,2003", "stranger,i2,2004", *first[:2]]
    for name, rows in (("log", first), ("week", week)):
        Path(f"{name}.csv").write_text("\n".join(["user,item,time", *rows]) + "\n")
    cells = "".join(f"i{n},{'ab'[n % 2]}|all\n" for n in range(9))
    Path("items.csv").write_text(f"item,tags\n{cells}")
    Path("new.csv").write_text("item,tags\nnew,a|unheard\ni1,b\n")
    small = ["--epochs", "1", "--set", "dim=8", "batch=8", "max_len=4"]
    assert call("train", "log.csv", "--model", "sasrec", *small, "--split", "none", "-o", "sasrec") == 0
    features = ["--item-features", "items.csv"]
    assert call("train", "log.csv", "--model", "clrec", *small, "negatives=16", *features, "-o", "clrec") == 0
    return tmp_path


def test_the_next_week_on_the_command_line(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert call("evaluate", "sasrec") == 2
    assert "--on FILE has later clicks" in capsys.readouterr().err
    assert call("evaluate", "sasrec", "--on", "week.csv", "--k", "5") == 0
    told = capsys.readouterr().out
    assert "recall@5 by new and known" in told
    assert "week.csv: 7 clicks: 4 are cases, 1 have no click on a known item before them, 2 are in the earlier" in told
    assert "1 new users with 1 cases, 1 new items with 1 cases" in told
    assert call("evaluate", "sasrec", "--on", "week.csv", "--robustness", "0.9", "--json") == 0
    (lost, swapped) = json.loads(capsys.readouterr().out)["robustness"]["sasrec"]
    assert (lost["kind"], swapped["kind"]) == ("delete", "replace")
    with warnings.catch_warnings():
        warnings.simplefilter("always", LeakageWarning)  # which other tests do not show
        assert call("evaluate", "clrec") == 0
        assert "leaks the future" in capsys.readouterr().err
        assert call("evaluate", "clrec", "--on", "week.csv", "--json") == 0
        shown = capsys.readouterr()
    assert "leaks" not in shown.err  # the split's own cases are not those measured
    plain = json.loads(shown.out)
    assert plain["counted"]["new_item_cases"] == 1
    groups = {row["group"]: row for row in plain["by"]["clrec"]["new and known"]}
    assert {name: row["cases"] for name, row in groups.items()} == {
        "known users and items": 2, "new users": 1, "new items": 1
    }  # fmt: skip
    assert groups["new items"]["recall@10"] == 0.0
    assert call("evaluate", "clrec", "--on", "week.csv", "--items", "new.csv", "--json", "--k", "10") == 0
    with_features = json.loads(capsys.readouterr().out)
    (new,) = [row for row in with_features["by"]["clrec"]["new and known"] if row["group"] == "new items"]
    assert new["recall@10"] == 1.0  # ten items in all, and the score is a number
    for words, text in (
        (["clrec", "--items", "new.csv"], "--items: expected --on FILE with it"),
        (["sasrec", "--on", "week.csv", "--items", "new.csv"], "--items: expected a model that encodes item features"),
        (["clrec", "--on", "week.csv", "--items", "log.csv"], "log.csv: no items column 'tags'"),
        (["clrec", "--on", "week.csv", "--items", "items.csv"], "items.csv: expected an item that the model lacks"),
        (["clrec", "--on", "log.csv"], "click before it, got none of 45, 45 of which are in the earlier data too"),
        (["clrec", "--on", "nothing.csv"], "nothing.csv"),
    ):
        assert call("evaluate", *words) == 2
        assert text in capsys.readouterr().err
