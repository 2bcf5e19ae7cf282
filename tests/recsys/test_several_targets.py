"""Cases with several targets: files split already, LightGCN's convention, and what says so where it is wrong."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from fastcl.recsys import (
    Cases,
    Histories,
    Interactions,
    Items,
    Popularity,
    Split,
    by_group,
    evaluate,
    fit,
    load,
    rank_cases,
)
from fastcl.recsys.cli import main
from fastcl.recsys.data import fingerprints
from fastcl.recsys.evaluation.measures import measure, ndcg_of_several
from fastcl.recsys.reporting.numbers import measured


class Fixed:
    """Scores by the row of the histories' first item."""

    def __init__(self, scores: torch.Tensor) -> None:
        self.table = scores

    def scores(self, histories: Histories) -> torch.Tensor:
        found = self.table[torch.from_numpy(histories.item[histories.offsets[:-1]]) - 1].clone()
        found[:, 0] = -torch.inf
        return found


def cases(users: int = 40, items: int = 60, seed: int = 0) -> Cases:
    rng = np.random.default_rng(seed)
    lists = [rng.permutation(np.arange(41, items + 1))[: 1 + rng.integers(12)].tolist() for _ in range(users)]
    offsets = np.cumsum([0, *map(len, lists)], dtype=np.int64)
    histories = Histories.from_lists([[user + 1] for user in range(users)])
    target = np.array([item for row in lists for item in row], np.int64)
    return Cases(np.arange(users), histories, target, np.ones(items + 1, np.int64), offsets)


def test_metrics_of_several_targets_are_those_of_ir_measures() -> None:
    ir_measures = pytest.importorskip("ir_measures", reason="needs ir_measures (extra test)")
    asked = cases()
    scores = torch.rand(40, 61, generator=torch.Generator().manual_seed(1))
    found = evaluate(Fixed(scores), asked, k=(1, 5, 20), metrics=("recall", "ndcg", "mrr", "map", "hr"), chunk=7)
    run = [
        ir_measures.ScoredDoc(str(user), str(item), float(scores[user, item]))
        for user in range(40)
        for item in range(1, 61)
        if item != user + 1
    ]
    qrels = [ir_measures.Qrel(str(user), str(item), 1) for user, item in zip(asked.case, asked.target, strict=True)]
    names = {"recall": "R", "ndcg": "nDCG", "mrr": "RR", "map": "AP", "hr": "Success"}
    theirs = {f"{our}@{k}": ir_measures.parse_measure(f"{name}@{k}") for our, name in names.items() for k in (1, 5, 20)}
    expected = ir_measures.calc_aggregate(list(theirs.values()), qrels, run)
    for name, their in theirs.items():
        assert found[name] == pytest.approx(expected[their], abs=1e-6), name


def test_by_hand() -> None:
    """Three targets, of which ranks 1 and 3 are found by k = 3; one of another user that is not."""
    scores = torch.tensor([[0.0, 0.0, 9.0, 8.0, 7.0, 1.0], [0.0, 5.0, 0.0, 4.0, 3.0, 2.0]])
    asked = Cases(
        np.arange(2),
        Histories.from_lists([[1], [2]]),
        np.array([2, 4, 5, 5]),
        np.ones(6, np.int64),
        np.array([0, 3, 4]),
    )
    found = rank_cases(Fixed(scores), asked, k=(3,))
    assert found.rank.tolist() == [1.0, 3.0, math.inf, math.inf]
    dcg, best = 1 + 1 / 2, 1 + 1 / math.log2(3) + 1 / 2
    values = measure(found, ("recall", "ndcg"))
    assert values["recall@3"] == pytest.approx((2 / 3 + 0) / 2)
    assert values["ndcg@3"] == pytest.approx(dcg / best / 2)
    assert values["cases"] == 2
    # Each target by itself in groups of targets.
    rows = by_group(found, asked, by=("popularity", "length"))
    assert [(row["cases"], row["recall@3"]) for row in rows["popularity"]] == [(4, 0.5)]
    assert sum(row["cases"] for row in rows["length"]) == 4


def test_ties_of_several_targets_count_half_also_at_the_cut() -> None:
    """A constant scorer: every target has the mean rank of the five items that are not seen."""
    asked = Cases(
        np.zeros(1, np.int64), Histories.from_lists([[1]]), np.array([2, 6]), np.ones(7, np.int64), np.array([0, 2])
    )
    found = rank_cases(Fixed(torch.zeros(1, 7)), asked, k=(2,))
    assert found.rank.tolist() == [3.0, 3.0]
    scores = torch.tensor([[0.0, 0.0, 3.0, 2.0, 2.0, 2.0, 1.0]])
    asked = Cases(asked.user, asked.history, np.array([3, 5, 6]), asked.counts, np.array([0, 3]))
    # Items 3, 4 and 5 share the places 2 to 4, of which a list of two has room for one.
    assert rank_cases(Fixed(scores), asked, k=(2,)).rank.tolist() == [3.0, 3.0, math.inf]


def test_a_cut_off_beyond_all_items_takes_no_memory() -> None:
    rank, offsets = np.array([2.0, 1.0, 11.0]), np.array([0, 2, 3])
    assert np.array_equal(ndcg_of_several(rank, offsets, 10**15), ndcg_of_several(rank, offsets, 50))


def test_one_target_a_case_is_the_same_either_way() -> None:
    one = cases()
    first = Cases(one.user, one.history, one.target[one.offsets[:-1]], one.counts)
    again = Cases(first.user, first.history, first.target, first.counts, np.arange(len(first) + 1))
    scorer = Fixed(torch.rand(40, 61, generator=torch.Generator().manual_seed(2)))
    metrics = ("recall", "hr", "ndcg", "mrr", "map")
    assert evaluate(scorer, first, k=(3, 10), metrics=metrics) == evaluate(scorer, again, k=(3, 10), metrics=metrics)


def test_what_has_no_meaning_for_several_targets_is_refused() -> None:
    scorer = Popularity(np.arange(61))
    with pytest.raises(ValueError, match="protocol: expected 'full' where cases have several targets, got 'pop100'"):
        evaluate(scorer, cases(), protocol="pop100")
    with pytest.raises(ValueError, match="metrics: expected none without a cut-off .* got 'auc'"):
        evaluate(scorer, cases(), metrics=("auc",))
    with pytest.raises(ValueError, match="offsets: expected to rise from 0 to 3"):
        Cases(np.arange(2), Histories.from_lists([[1], [2]]), np.array([1, 2, 3]), None, np.array([0, 0, 3]))
    taken = cases().take(np.array([5, 2]))
    assert np.diff(taken.offsets).tolist() == np.diff(cases().offsets)[[5, 2]].tolist()


# Files


TRAIN, TEST = "0 5 6 7 8 9\n1 5 9\n2 7\n", "1 6 7\n0 1 2 3\n"


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("train.txt").write_text(TRAIN)
    Path("test.txt").write_text(TEST)
    return tmp_path


def rows(histories: Histories, items: Items) -> list[list[str]]:
    ends = zip(histories.offsets, histories.offsets[1:], strict=False)
    return [[items.ids[item - 1] for item in histories.item[a:b]] for a, b in ends]


def held(asked: Cases, split: Split) -> dict[str, set[str]]:
    assert asked.offsets is not None
    targets = rows(Histories(asked.offsets, asked.target), split.items)
    return {split.users[user]: set(row) for user, row in zip(asked.user, targets, strict=True)}


def test_files_that_are_split_already(files: Path) -> None:
    split = Interactions.presplit("train.txt", None, "test.txt", targets="all")
    assert rows(split.train, split.items) == [["5", "6", "7", "8", "9"], ["5", "9"], ["7"]]
    assert held(split.test, split) == {"0": {"1", "2", "3"}, "1": {"6", "7"}}
    assert len(split.valid) == 0
    assert split.report is not None
    assert (split.report.not_evaluated, split.report.held_out_unused, split.report.unseen_targets) == (1, 0, 3)
    assert split.test.history.users.tolist() == ["0", "1"]
    first = Interactions.presplit("train.txt", None, "test.txt")
    assert first.test.offsets is None
    assert fingerprints.cases_fingerprint(first) != fingerprints.cases_fingerprint(split)


def test_a_share_of_train_validates(files: Path) -> None:
    split = Interactions.presplit("train.txt", None, "test.txt", targets="all", hold_out=0.4, seed=3)
    assert split.train.lengths.tolist() == [3, 2, 1]  # of 5 rows 2, of 2 rows none
    trained, valid = rows(split.train, split.items)[0], held(split.valid, split)
    assert valid.keys() == {"0"}
    assert sorted([*trained, *valid["0"]]) == ["5", "6", "7", "8", "9"]
    assert split.counts.sum() == 6
    assert rows(split.valid.history, split.items) == [trained]
    # What is held out is seen all the same when the test is asked.
    assert sorted(rows(split.test.history, split.items)[0]) == ["5", "6", "7", "8", "9"]
    again = Interactions.presplit("train.txt", None, "test.txt", targets="all", hold_out=0.4, seed=3)
    assert fingerprints.fingerprint(again) == fingerprints.fingerprint(split)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("test.txt", "0 1\n1\n", r"test\.txt:2: user '1' has no items"),
        ("train.txt", "0 1 2\n\n1 \n", r"train\.txt:3: user '1' has no items"),
        ("test.txt", "", r"test\.txt: no interactions|expected users with a history and a test row, got none"),
        ("test.txt", "7 1\n", "expected users with a history and a test row, got none"),
    ],
)
def test_faults_in_the_files_are_named_by_file_and_line(files: Path, file: str, text: str, message: str) -> None:
    Path(file).write_text(text)
    with pytest.raises(ValueError, match=message):
        Interactions.presplit("train.txt", None, "test.txt", targets="all", format="sequence")


def test_options_that_do_not_go_together(files: Path) -> None:
    for options, message in (
        ({"targets": "some"}, "targets: expected one of first, all, got 'some'"),
        ({"hold_out": 1.0}, "hold_out: expected at least 0 and below 1, got 1.0"),
        ({"valid": "test.txt", "hold_out": 0.1}, "hold_out: expected 0 with a valid file, got 0.1"),
    ):
        valid = options.pop("valid", None)
        with pytest.raises(ValueError, match=message):
            Interactions.presplit("train.txt", valid, "test.txt", **options)


def test_the_command_line(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.txt").write_text("\n".join(f"{u} " + " ".join(str((u + n) % 9) for n in range(5)) for u in range(9)))
    Path("test.txt").write_text("\n".join(f"{u} {(u + 5) % 9} {(u + 6) % 9}" for u in range(9)))
    small = ["--model", "mf", "--set", "dim=4", "batch=16", "count=5", "--epochs", "2", "--threads", "1"]
    own = ["train.txt", "--test", "test.txt", "--targets", "all", "--hold-out", "0.2", "--split-seed", "4"]
    own += ["--format", "sequence"]
    assert main.main(["train", *own, *small, "-o", "run"]) == 0
    assert main.main(["evaluate", "run"]) == 0
    assert main.main(["evaluate", "run", "--by", "popularity,length", "--metrics", "recall,ndcg", "--k", "2"]) == 0
    assert capsys.readouterr().out.count("9 cases") == 2
    split = Interactions.presplit("train.txt", None, "test.txt", targets="all", format="sequence")
    for example in measured({"mf": load("run")}, split, seen="mask", ratios=(0.5,), by=())["examples"]:
        user = int(example["user"])
        assert sorted(example["next"]) == sorted({str((user + 5) % 9), str((user + 6) % 9)})
    Path("later.txt").write_text(Path("train.txt").read_text() + " 4\n")  # one of the two targets of user 8
    assert main.main(["evaluate", "run", "--data", "later.txt"]) == 0
    told = capsys.readouterr()
    assert "0 of its 18 test targets were among these" in told.err
    assert "1 in the history of their own case" in told.out
    assert main.main(["resume", "run"]) == 0
    message = "metric: expected one with a cut-off where cases have several targets, got 'auc'"
    assert main.main(["train", *own, *small, "--metric", "auc", "-o", "none"]) == 2
    assert f"error: --{message}" in capsys.readouterr().err
    assert not Path("none").exists()
    of_trials = ["--model", "mf", "--set", "dim=4,8", "count=5", "--metric", "auc", "-o", "none"]
    assert main.main(["tune", *own, *of_trials]) == 2
    assert f"error: --{message}" in capsys.readouterr().err
    assert not Path("none").exists()
    parted = Interactions.presplit("train.txt", None, "test.txt", targets="all", hold_out=0.2, format="sequence")
    with pytest.raises(ValueError, match=message):
        fit(load("run"), parted, epochs=1, metric="auc", out="none", progress=False)
    assert not Path("none").exists()
    one = Interactions.presplit("train.txt", None, "test.txt", targets="all", format="sequence")
    assert fit(load("run"), one, epochs=1, metric="auc", progress=False)  # nothing validates
    config = Path("run/config.json")
    config.write_text(config.read_text().replace('"metric": "ndcg@10"', '"metric": "auc"'))
    assert main.main(["resume", "run"]) == 2
    assert f"error: {message}" in capsys.readouterr().err
    for options, message in (
        (["train.txt", "--targets", "all"], "--targets: expected --test FILE with it, got none"),
        (["train.txt", "--hold-out", "0.1"], "--hold-out: expected --test FILE with it, got none"),
        (["train.txt", "--valid", "test.txt"], "--valid: expected --test FILE with it, got none"),
    ):
        assert main.main(["train", *options, *small, "-o", "none"]) == 2
        assert message in capsys.readouterr().err


def test_repeats_are_found_case_by_case_with_one_target_or_several() -> None:
    rng = np.random.default_rng(0)
    rows = [rng.integers(1, 30, size=n).tolist() for n in rng.integers(0, 9, size=200)]
    target = rng.integers(1, 30, size=200)
    history, user = Histories.from_lists(rows), np.arange(200)
    expected = [item in row for item, row in zip(target.tolist(), rows, strict=True)]
    assert 0 < sum(expected) < 200
    for offsets in (None, np.arange(201)):
        assert Cases(user, history, target, offsets=offsets).repeated.tolist() == expected
