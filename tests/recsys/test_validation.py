"""Validation on a sample of cases, and over tables that are cut by rows: ranks are those of the whole table, bit for
bit, whatever the number of processes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from forks import ended, forked
from made import made
from torch import Tensor

from fastcl.recsys import MF, Histories, Interactions, Items, SASRec, Split, evaluate, fit, load
from fastcl.recsys.cli import main
from fastcl.recsys.data import Cases
from fastcl.recsys.evaluation.measures import Ranking
from fastcl.recsys.evaluation.ranking import rank_cases
from fastcl.recsys.models import Model
from fastcl.recsys.training import processes, validation
from fastcl.recsys.training.rowadam import RowAdam
from fastcl.recsys.training.state import Settings

pytestmark = pytest.mark.usefixtures("one_thread")

ITEMS = Items(tuple(f"i{n}" for n in range(1, 102)))
USERS = tuple(f"u{n}" for n in range(23))


class Whole(SASRec):
    """Scores are small whole numbers: sums of a history's rows times an item's row. Many are equal, all are exact."""

    def __init__(self) -> None:
        super().__init__(ITEMS, seed=0, dim=4, table="rows", loss="bce")
        numbers = np.random.default_rng(0).integers(-2, 3, (len(ITEMS) + 1, 4))
        self.item.weight.data.copy_(torch.from_numpy(numbers))

    def encode(self, histories: Histories) -> Tensor:
        spans = histories.last(self.config.max_len)
        rows = self.item(self.tensor(spans.item))
        of = torch.repeat_interleave(torch.arange(len(spans)), self.tensor(spans.lengths))
        return rows.new_zeros(len(spans), 4).index_add(0, of, rows)


def some_cases(several: bool = False) -> Cases:
    """35 cases, whose targets may be in their histories."""
    rng = np.random.default_rng(1)
    history = Histories.from_lists([rng.integers(1, 102, rng.integers(1, 90)).tolist() for _ in range(35)])
    sizes = rng.integers(1, 4, 35) if several else np.ones(35, np.int64)
    offsets = np.append(0, sizes.cumsum()) if several else None
    return Cases(np.arange(35), history, rng.integers(1, 102, sizes.sum()), np.ones(102, np.int64), offsets)


def of_processes(count: int, folder: Path, work: Callable[[], Any]) -> list[Any]:
    """What `work` gives in each of so many processes, which are one group."""

    def one(rank: int) -> None:
        options = {"rank": rank, "world_size": count, "timeout": timedelta(seconds=60)}
        dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", **options)
        torch.save(work(), folder / f"{rank}.pt")
        processes.wait()
        dist.destroy_process_group()

    children = [forked(partial(one, rank)) for rank in range(count)]
    assert [ended(child) for child in children] == [0] * count
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(count)]


def shared(model: Model, cases: Cases, seen: str = "mask") -> Ranking:
    optimizer = RowAdam(model, 1e-3, (0.9, 0.98))
    optimizer.share_out()
    counts = np.ones(len(ITEMS) + 1, np.int64)
    return validation.rank_shared(model, optimizer, cases, counts, Settings(1, 1e-3, seen=seen, metric="ndcg@20"))


QUESTIONS: dict[str, Any] = {
    "masked": (some_cases(), "mask"),
    "kept": (some_cases(), "keep"),
    "several targets": (some_cases(several=True), "mask"),
    "fewer cases than processes": (some_cases().take(np.array([4])), "mask"),
}


@pytest.mark.parametrize("count", [1, 2, 3])
def test_ranks_of_a_cut_table_are_those_of_the_whole_one(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Other numbers for the 51 and 52 rows of two processes.
    monkeypatch.setattr(validation, "rows_at_once", lambda items: 363 // items)
    found = of_processes(
        count, tmp_path, lambda: {name: shared(Whole(), *question) for name, question in QUESTIONS.items()}
    )
    tied = np.zeros(0)
    for name, (cases, seen) in QUESTIONS.items():
        truth = rank_cases(Whole(), cases, k=20, seen=seen)
        tied = np.append(tied, truth.rank[np.isfinite(truth.rank)] % 1)
        for theirs in found:
            rank = theirs[name].rank
            if cases.offsets is not None:  # `rank_cases` gives no rank below the list
                rank = np.where(np.isinf(truth.rank), np.inf, rank)
                assert (theirs[name].rank[np.isinf(truth.rank)] > 20).all()
            np.testing.assert_array_equal(rank, truth.rank)
            np.testing.assert_array_equal(theirs[name].candidates, truth.candidates)
    assert (tied > 0).sum() > 20
    masked = rank_cases(Whole(), QUESTIONS["masked"][0], k=20)
    assert np.isinf(masked.rank).any()


REAL: dict[str, dict[str, Any]] = {
    "clrec": {},
    "multi_clrec": {},
    "sasrec": {"loss": "popular"},
    "bert4rec": {"loss": "sampled"},
    "mf": {},
}


def test_every_model_with_cut_tables_ranks_alike(tmp_path: Path) -> None:
    """In float64, where rounding moves no rank."""
    cases = some_cases()
    users = np.array(USERS, dtype=object)
    cases = replace(cases, history=cases.history.named(ITEMS, users[np.arange(len(cases)) % len(users)]))

    def of(name: str) -> Model:
        if name == "mf":
            return MF(ITEMS, users=USERS, seed=0, dim=8, init=1.0).double()
        return made(name, ITEMS, seed=0, dim=8, table="rows", max_len=7, **REAL[name]).double()

    found = of_processes(2, tmp_path, lambda: {name: shared(of(name), cases).rank for name in REAL})
    for name in REAL:
        truth = rank_cases(of(name), cases, k=20).rank
        assert len(np.unique(truth)) > 20
        for theirs in found:
            np.testing.assert_array_equal(theirs[name], truth)


def log() -> Interactions:
    rng = np.random.default_rng(0)
    clicks = [(f"u{user}", f"i{rng.integers(40)}") for user in range(61) for _ in range(6)]
    return Interactions.read({"user": [u for u, _ in clicks], "item": [i for _, i in clicks]}, time=None)


@pytest.mark.parametrize("count", [1, 2])
def test_a_sample_is_measured_and_said(count: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    split = log().split()

    def train() -> None:
        model = SASRec(split.items, seed=0, dim=8, batch=16, max_len=5, loss="bce", table="rows")
        fit(model, split, epochs=2, valid_cases=20, out=tmp_path / "run")

    of_processes(count, tmp_path, train)
    assert capfd.readouterr().err.count("validation is on a random sample of 20 of 61 cases") == 1
    assert json.loads((tmp_path / "run" / "config.json").read_text())["valid_cases"] == 20
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    best = [line for line in lines if line["best"]][-1]
    part = validation.sampled(split.valid, 20)
    assert len(set(part.user.tolist())) == 20
    scores = evaluate(load(tmp_path / "run"), part)
    assert best["ndcg@10"] == pytest.approx(scores["ndcg@10"], rel=1e-12)
    assert best["ndcg@10"] != pytest.approx(evaluate(load(tmp_path / "run"), split.valid)["ndcg@10"], rel=1e-6)


def test_how_many_cases_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    split = log().split()

    def cases(asked: int | None, of: Split = split) -> int | None:
        return validation.with_sample(Settings(1, 1e-3, valid_cases=asked), of).valid_cases

    assert (cases(None), cases(60), cases(61), cases(100)) == (None, 60, None, None)
    drawn = validation.sampled(split.valid, 20).user.tolist()
    assert drawn == validation.sampled(split.valid, 20).user.tolist() == sorted(set(drawn))
    assert drawn[-1] > 40  # of 61 cases, not the first 20
    monkeypatch.setattr(validation, "SCORES", 30 * len(split.items))
    assert cases(None) is None
    monkeypatch.setattr(validation, "FEWEST", 10)
    assert (cases(None), cases(50)) == (30, 50)
    with pytest.raises(ValueError, match="valid_cases: expected none for a split without validation cases, got 5"):
        cases(5, log().split("none"))


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, run = tmp_path / "log.csv", str(tmp_path / "run")
    data.write_text("user,item,time\n" + "".join(f"u{n % 20},i{n % 7},{n}\n" for n in range(100)))
    words = ["train", str(data), "--model", "sasrec", "--epochs", "1", "--set", "dim=8", "--threads", "1", "-o", run]
    assert main.main([*words, "--valid-cases", "0"]) == 2
    assert "--valid-cases: expected at least 1, got 0" in capsys.readouterr().err
    assert main.main([*words, "--valid-cases", "12"]) == 0
    said = capsys.readouterr()
    assert "(12 sampled cases)" in said.out
    assert "a random sample of 12 of 20 cases" in said.err
    assert main.main(["evaluate", run, "--threads", "1"]) == 0
    assert "note: " + run + ": validation is on a random sample of 12 of 20 cases" in capsys.readouterr().err
