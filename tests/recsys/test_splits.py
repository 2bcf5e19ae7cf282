"""Splits: which rows train, validate and test, that no target leaks, and that what is left out is counted.

Numbers in comments are explained in test_reading.py.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from logs import lists, named, times, write

from fastcl.recsys import evaluate, load
from fastcl.recsys.cli import main
from fastcl.recsys.data import Histories, Interactions, Items, LeakageWarning
from fastcl.recsys.models import MODELS, Model
from fastcl.recsys.models.base import UserModel, make
from fastcl.recsys.training.fit import fit, resume

# The models that learn of a click what comes after it.
SEQUENTIAL = [model for model in MODELS.values() if model.learns and not issubclass(model, UserModel)]


@given(
    st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=7), min_size=1, max_size=8).filter(
        lambda r: max(map(len, r)) >= 3
    )
)
def test_split_holds_out_the_last_two_and_leaks_nothing(rows: list[list[int]]) -> None:
    items = Items(tuple("abcdef"))
    users = tuple(f"u{u}" for u in range(len(rows)))
    clock = [list(range(len(row))) for row in rows]
    split = Interactions(items, users, Histories.from_lists(rows, clock)).split()
    held = [u for u, row in enumerate(rows) if len(row) >= 3]
    assert lists(split.train) == [row[:-2] if u in held else row for u, row in enumerate(rows)]
    assert times(split.train) == [row[:-2] if u in held else row for u, row in enumerate(clock)]
    for cases, back in ((split.valid, 2), (split.test, 1)):
        assert cases.user.tolist() == held
        assert lists(cases.history) == [rows[u][:-back] for u in held]
        assert times(cases.history) == [clock[u][:-back] for u in held]
        assert cases.target.tolist() == [rows[u][-back] for u in held]
    flat = [item for row in lists(split.train) for item in row]
    assert split.counts.tolist() == [flat.count(item) for item in range(7)]
    assert (split.items, split.users) == (items, users)


def test_split_refuses_what_it_cannot_do() -> None:
    data = Interactions(Items(("a",)), ("u",), Histories.from_lists([[1, 1]]))
    with pytest.raises(ValueError, match="at least 3 interactions, the longest has 2"):
        data.split()
    with pytest.raises(ValueError, match="how: expected one of last-one, time, none, items, got 'first-one'"):
        data.split("first-one")


# 6, 7: rows at equal times keep the order of the source, or a random one where asked; nothing sorts them by item.
def test_ties_in_the_order_of_the_source_or_a_random_one() -> None:
    order = list("cabfed")
    log = {"user": ["u"] * 8 + ["v"] * 6, "item": ["x", *order, "y", *order], "time": [1] + [5] * 6 + [9] + [5] * 6}
    data = Interactions.read(log)
    assert named(data) == {"u": ["x", *order, "y"], "v": order}
    assert data.report is not None
    assert (data.report.ties, data.report.tied_ends) == (10, 1)
    splits = [data.split(ties="random", seed=seed) for seed in range(8)]
    whole = [
        [data.items.ids[i - 1] for i in [*lists(s.test.history)[0], s.test.target[0]]] for s in splits
    ]  # fmt: skip
    assert all(row[0] == "x" and row[-1] == "y" and sorted(row[1:-1]) == sorted(order) for row in whole)
    assert len({tuple(row) for row in whole}) > 4
    assert len({int(s.test.target[1]) for s in splits}) > 2
    again = data.split(ties="random", seed=3)
    assert (again.test.history.item == splits[3].test.history.item).all()
    assert again.report is not None
    assert (again.report.ties, again.report.seed) == ("random", 3)
    untimed = Interactions.read(log, time=None)
    with pytest.raises(ValueError, match='ties: expected a log with times for "random"'):
        untimed.split(ties="random")
    with pytest.raises(ValueError, match="ties: expected one of input, random, got 'item'"):
        data.split(ties="item")


# 7: of an unsorted log the last in time is the test target, not the last in the file.
def test_unsorted_logs() -> None:
    data = Interactions.read({"user": list("uvuvuv"), "item": list("cCbBaA"), "time": [3, 3, 2, 2, 1, 1]})
    split = data.split()
    assert [data.items.ids[i - 1] for i in split.test.target] == ["c", "C"]
    assert data.report is not None
    assert data.report.unsorted == 4


# 9: users with one or two rows train; that they have no case is counted.
def test_short_users_train_and_are_counted() -> None:
    data = Interactions.read({"user": list("abbccc"), "item": list("xxyxyz")}, time=None)
    split = data.split()
    assert lists(split.train) == [[1], [1, 2], [1]]
    assert [data.users[u] for u in split.test.user] == ["c"]
    assert data.report is not None
    assert split.report is not None
    assert (data.report.short_users, split.report.not_evaluated) == (2, 2)


LOGS = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from("xyz"), st.integers(0, 9)), min_size=2, max_size=25
)  # fmt: skip


@given(LOGS, st.integers(1, 9))
def test_a_cut_in_time_parts_what_comes_before_from_what_comes_after(log: list[tuple[str, str, int]], at: int) -> None:
    users, items, clock = (list(column) for column in zip(*log, strict=True))
    data = Interactions.read({"user": users, "item": items, "time": clock})
    before = {u: [i for v, i, t in sorted(log, key=lambda row: row[2]) if v == u and t < at] for u in data.users}
    after = {u: [i for v, i, t in sorted(log, key=lambda row: row[2]) if v == u and t >= at] for u in data.users}
    tested = [u for u in data.users if before[u] and after[u]]
    validated = [u for u in data.users if len(before[u]) > 1]
    if not tested or not validated:
        with pytest.raises(ValueError, match="at: expected a time inside the log|split: expected users with"):
            data.split("time", at)
        return
    split = data.split("time", at)

    def names(histories: Histories) -> list[list[str]]:
        return [[data.items.ids[i - 1] for i in row] for row in lists(histories)]

    assert names(split.train) == [before[u][:-1] if len(before[u]) > 1 else before[u] for u in data.users]
    assert [data.users[u] for u in split.test.user] == tested
    assert names(split.test.history) == [before[u] for u in tested]
    assert [data.items.ids[i - 1] for i in split.test.target] == [after[u][0] for u in tested]
    assert [data.users[u] for u in split.valid.user] == validated
    assert names(split.valid.history) == [before[u][:-1] for u in validated]
    assert [data.items.ids[i - 1] for i in split.valid.target] == [before[u][-1] for u in validated]
    report = split.report
    assert report is not None
    assert report.at == at
    assert report.later_in_train == 0
    assert report.held_out_unused == sum(map(len, after.values())) - len(tested)
    assert report.train_rows + report.valid_cases + report.test_cases + report.held_out_unused == len(log)
    shown = {item for row in names(split.train) for item in row}
    assert report.unseen_targets == sum(after[u][0] not in shown for u in tested)


def test_a_cut_may_be_a_date() -> None:
    clock = [1_506_816_000_000 + 3_600_000 * k for k in range(-3, 3)]
    data = Interactions.read({"user": ["u"] * 6, "item": list("abcdef"), "time": clock})
    split = data.split("time", at="2017-10-01T01:00Z")
    assert (lists(split.test.history), split.test.target.tolist()) == ([[1, 2, 3, 4]], [5])
    assert str(split.report).startswith("split time at 2017-10-01 01:00:00 UTC: ")
    for at, message in (
        (None, "at: expected a number or an ISO date"),
        ("soon", "at: expected a number in the unit of the times or an ISO date"),
        ("1999-01-01", "at: expected a time inside the log"),
        (True, "at: expected a number in the unit"),
    ):
        with pytest.raises(ValueError, match=message):
            data.split("time", at)
    with pytest.raises(ValueError, match='at: expected none with "last-one"'):
        data.split("last-one", at=3)
    with pytest.raises(ValueError, match='split: expected a log with times for "time"'):
        Interactions.read({"user": ["u"] * 3, "item": list("abc")}, time=None).split("time", at=3)


def test_leave_one_out_says_how_much_of_the_future_it_leaks() -> None:
    # u ends at 3, before v's train rows (10, 11); v ends last.
    log = {"user": list("uuuvvvv"), "item": list("abcabcd"), "time": [1, 2, 3, 10, 11, 12, 13]}
    data = Interactions.read(log)
    with pytest.warns(LeakageWarning, match="leaks the future: for 1 of 2 test cases") as caught:
        split = data.split()
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert split.report is not None
    assert split.report.later_in_train == 1
    assert "1 test targets are earlier than some row of train" in str(split.report)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data.split("time", at=11.5)
        untimed = Interactions.read(log, time=None).split().report
    assert untimed is not None
    assert untimed.later_in_train is None


# 13: files that are split already: items that only the test has stay targets, and are counted.
def test_files_that_are_split_already(tmp_path: Path) -> None:
    head = "user,item,time\n"
    train = write(tmp_path / "train.csv", head + "a,x,1\na,y,2\nb,x,1\nc,x,9\n")
    valid = write(tmp_path / "valid.csv.gz", head + "a,z,3\nb,y,2\nnew,x,1\n")
    test = write(tmp_path / "test.csv", head + "b,only-here,3\na,x,5\na,y,4\nnew,y,2\nlate,x,1\n")
    split = Interactions.presplit(train, valid, test)
    ids = split.items.ids
    assert ids == ("x", "y", "z", "only-here")
    assert split.users == ("a", "b", "c", "new", "late")
    assert lists(split.train) == [[1, 2], [1], [1], [], []]
    assert split.counts.tolist() == [0, 3, 1, 0, 0]
    assert [(split.users[u], ids[t - 1]) for u, t in zip(split.valid.user, split.valid.target, strict=True)] == [
        ("a", "z"), ("b", "y")
    ]  # fmt: skip
    assert [(split.users[u], ids[t - 1]) for u, t in zip(split.test.user, split.test.target, strict=True)] == [
        ("a", "y"), ("b", "only-here"), ("new", "y")
    ]  # fmt: skip
    assert lists(split.test.history) == [[1, 2, 3], [1, 2], [1]]
    assert split.report is not None
    assert (split.report.how, split.report.unseen_targets) == ("files", 1)
    assert (split.report.not_evaluated, split.report.held_out_unused) == (2, 3)
    swapped = write(tmp_path / "swapped.csv.gz", "user,time,item\na,z,3\n")
    with pytest.raises(ValueError, match=r"swapped\.csv\.gz:2: time 'z' is not"):
        Interactions.presplit(train, swapped, test)
    with pytest.raises(ValueError, match="sources: expected that all have times or none has, got both"):
        Interactions.presplit(train, valid, write(tmp_path / "test.txt", "a x\n"))


@pytest.mark.parametrize("model_class", SEQUENTIAL, ids=lambda model: model.name)
def test_a_split_with_nothing_to_train_on_is_refused(model_class: type[Model], tmp_path: Path) -> None:
    """Three clicks a user, of which train gets one: no model has a target, and the folder stays as it was."""
    log = Interactions.read({"user": list("aaabbb"), "item": list("xyzyxz"), "time": [1, 2, 3, 1, 2, 3]})
    model = model_class(log.items, dim=8)
    for out in (None, tmp_path / "run"):
        with pytest.raises(ValueError, match="split: nothing to train on: expected a train history of at least 2 clic"):
            fit(model, log.split(), epochs=1, out=out, progress=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if model.learns])
def test_a_split_of_nothing_trains_on_everything_and_keeps_the_last_epoch(name: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    lists_ = [rng.integers(1, 10, 7).tolist() for _ in range(30)]
    data = Interactions(Items(tuple("abcdefghi")), tuple(map(str, range(30))), Histories.from_lists(lists_))
    split = data.split("none")
    assert lists(split.train) == lists_
    assert (len(split.valid), len(split.test), split.counts.sum()) == (0, 0, 210)
    assert str(split.report) == "split none: 210 train rows; nothing is held out, so nothing can be evaluated"
    options = {"dim": 8, "max_len": 5} | ({"time_cuts": ()} if "clrec" in name else {})
    less = {"clrec": {"batch": 16, "negatives": 32}, "multi_clrec": {"batch": 16, "main": 32}, "s3rec": {"pretrain": 1}}
    options = {"dim": 8} if issubclass(MODELS[name], UserModel) else options | less.get(name, {})
    model = make(MODELS[name], split, **options)
    last = {}
    step = model.after_step

    def after_step(batch: Any) -> None:
        step(batch)
        last.update({name: tensor.clone() for name, tensor in model.state_dict().items()})

    model.after_step = after_step  # type: ignore[method-assign]
    history = fit(model, split, epochs=3, out=tmp_path / "run", progress=False)
    told = [(line["epoch"], line["best"], "ndcg@10" in line) for line in history]
    assert told == [(n, True, False) for n in (1, 2, 3)]
    for kept in (model, load(tmp_path / "run")):
        assert all(torch.equal(tensor, last[name]) for name, tensor in kept.state_dict().items())
    assert resume(tmp_path / "run", split) == history
    for cases in (split.valid, split.test):
        with pytest.raises(ValueError, match=r'cases: expected at least one, got none \(the split "none" holds'):
            evaluate(model, cases)
    with pytest.raises(ValueError, match="patience: expected none for a split without validation cases, got 2"):
        fit(model, split, epochs=3, patience=2, progress=False)
    with pytest.raises(ValueError, match="schedule: expected linear or constant without validation .*, got plateau"):
        fit(model, split, epochs=3, schedule="plateau", progress=False)
    with pytest.raises(ValueError, match='at: expected none with "none", got 5'):
        data.split("none", at=5)


def test_a_command_with_nothing_to_train_on_leaves_an_earlier_run_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, run = tmp_path / "log.csv", tmp_path / "run"

    def train(*more: str) -> int:
        command = ["train", str(log), "--model", "sasrec", "--epochs", "1", "--set", "dim=8"]
        return main.main([*command, "-o", str(run), *more])

    log.write_text("user,item,time\n" + "".join(f"u{u},i{(u + t) % 9},{t}\n" for u in range(20) for t in range(3)))
    assert train() == 2
    assert "nothing to train on: expected a train history of at least 2 clicks, got 1" in capsys.readouterr().err
    assert not (run / "config.json").exists()
    whole = "user,item,time\n" + "".join(f"u{u},i{(u + t) % 4},{t}\n" for u in range(20) for t in range(9))
    few = log.read_text()
    log.write_text(whole)
    assert train() == 0
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    log.write_text(few)
    assert train("--force") == 2
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before


def test_many_repeated_targets_get_a_note_that_names_the_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, run = tmp_path / "log.csv", str(tmp_path / "run")
    log.write_text("user,item,time\n" + "".join(f"u{u},i{(u + t) % 4},{t}\n" for u in range(20) for t in range(9)))
    chosen = ["--set", "dim=8", "dropout=0.2", "positions=oldest", "lr=0.001"]  # so that no note tells of settings
    note = "note: 20 of 20 test targets (100%) are in their user's own history, sure misses under --seen mask; --seen"
    train = ["train", str(log), "--model", "sasrec", "--epochs", "1", "-o", run]
    assert main.main([*train, *chosen]) == 0
    assert note in capsys.readouterr().err
    for command in (["evaluate", run], ["compare", run]):
        assert main.main(command) == 0
        assert note in capsys.readouterr().err
        assert main.main([*command, "--seen", "keep"]) == 0
        assert "note" not in capsys.readouterr().err
    assert main.main(["evaluate", run, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {result["repeated_targets"] for result in found["results"].values()} == {20}
    assert main.main([*train, *chosen, "--seen", "keep", "--force"]) == 0
    assert "note" not in capsys.readouterr().err


def test_commands_on_a_run_that_was_trained_on_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, run = tmp_path / "log.csv", str(tmp_path / "run")
    log.write_text("user,item,time\n" + "".join(f"u{u},i{(u + t) % 9},{t}\n" for u in range(20) for t in range(4)))
    train = ["train", str(log), "--model", "sasrec", "--epochs", "2", "--set", "dim=8", "--split", "none"]
    assert main.main([*train, "--patience", "3", "-o", run]) == 2
    assert not Path(run).exists()
    assert main.main([*train, "-o", run]) == 0
    shown = capsys.readouterr()
    assert shown.out == f"{run}: trained without validation, 2 epochs; the last one counts\n"
    assert "no validation" in shown.err
    for command in (["evaluate", run], ["compare", run], ["report", run, "-o", str(tmp_path / "pictures")]):
        assert main.main(command) == 2
        assert "trained with --split none, which holds nothing out; there is no test case" in capsys.readouterr().err
    assert main.main(["recommend", run, "--users", str(log), "-k", "3"]) == 0
    assert main.main(["export", run, "-o", str(tmp_path / "vectors")]) == 0
    assert main.main(["resume", run]) == 0


def test_targets_that_are_repeats_are_counted() -> None:
    log = Interactions.read({"user": list("aaaabbbbcccc"), "item": list("xyzxxyzwzzyy"), "time": [1, 2, 3, 4] * 3})
    split = log.split()
    assert split.test.repeated.tolist() == [True, False, True]
    assert split.report is not None
    assert split.report.repeated_targets == 2
    assert "2 test targets are in their user's history" in str(split.report)


# 11: histories longer than a model's max_len are cut to the newest, by the model's own length and nothing else; and a
# split may leave users without a train history.
@pytest.mark.parametrize("model_class", SEQUENTIAL, ids=lambda model: model.name)
def test_models_take_long_and_empty_histories(model_class: type[Model]) -> None:
    log = [(f"u{u}", f"i{(u + step) % 9}", 100 * u + step) for u in range(12) for step in range(40)]
    log += [(f"late{u}", f"i{u}", 5000 + u) for u in range(4)]
    users, items, clock = (list(column) for column in zip(*log, strict=True))
    split = Interactions.read({"user": users, "item": items, "time": clock}).split("time", at=1120)
    assert (split.train.lengths == 0).any()
    few = {"clrec": {"negatives": 32}, "s3rec": {"pretrain": 1}}
    options = {"dim": 8, "max_len": 3, "batch": 16} | few.get(model_class.name, {})
    model = model_class(split.items, seed=0, **options)
    fit(model, split, epochs=1, progress=False)
    whole = model.scores(split.test.history)
    assert torch.isfinite(whole[:, 1:]).all()
    assert torch.equal(whole, model.scores(split.test.history.last(3)))
