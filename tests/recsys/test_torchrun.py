"""Several real processes train as one does: same losses, every case once, a queue each, exact resume."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import refuse_ranks
import torch
from forks import ended, forked
from safetensors.torch import load_file
from train_ranks import OPTIONS

from fastcl.recsys import (
    MF,
    BERT4Rec,
    CLRec,
    ContrastVAE,
    Histories,
    Interactions,
    Items,
    LightGCN,
    MultiCLRec,
    SASRec,
    evaluate,
    fit,
    load,
)
from fastcl.recsys.models.batching import TOGETHER, Spans, batched
from fastcl.recsys.training import loop
from fastcl.recsys.training.state import Settings

pytestmark = pytest.mark.usefixtures("one_thread")


def torchrun(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run([*launcher, *map(str, arguments)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """61 users, so that the validation cases do not divide by two, on walks of several speeds around 40 items."""
    rng = np.random.default_rng(0)
    lines = ["who,what,when"]
    for user in range(61):
        start = rng.integers(40)
        steps = range(3 + user % 9)
        lines += [f"u{user},i{(start + step * (1 + user % 3)) % 40},{1000 * user + 60 * step}" for step in steps]
    path = tmp_path_factory.mktemp("data") / "log.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def runs(table: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs")
    done = torchrun(Path(__file__).with_name("train_ranks.py"), table, out)
    (out / "stdout").write_text(done.stdout)
    (out / "stderr").write_text(done.stderr)
    return out


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_one_process_is_told_each_epoch_and_ends_the_training_for_all(runs: Path) -> None:
    assert [path.name for path in runs.glob("told-*")] == ["told-0"]
    assert (runs / "told-0").read_text() == "1 False\n2 False\n3 True\n"
    assert len(lines(runs / "halted")) == 1


@pytest.mark.parametrize("kind", [MF, LightGCN])
def test_models_with_users_train_as_in_one_process(kind: type, table: Path, runs: Path) -> None:
    split = Interactions.read(table, user="who", item="what", time="when").split()
    model = kind(split.items, users=split.users, seed=0, **OPTIONS[kind])
    alone = fit(model, split, epochs=3, progress=False)
    losses = [line["loss"] for line in lines(runs / kind.name)]
    assert losses == pytest.approx([line["loss"] for line in alone], abs=1e-5)
    assert alone[2]["loss"] < alone[0]["loss"] - 0.01
    theirs = load(runs / kind.name)
    assert theirs.users == split.users
    torch.testing.assert_close(theirs.scores(split.test.history), model.scores(split.test.history), rtol=0, atol=2e-2)


def test_the_loss_curve_is_that_of_one_process(table: Path, runs: Path) -> None:
    split = Interactions.read(table, user="who", item="what", time="when").split()
    alone = fit(SASRec(split.items, seed=0, **OPTIONS[SASRec]), split, epochs=3, progress=False)
    together = lines(runs / "sasrec")
    assert len(together) == 3
    assert alone[2]["loss"] < alone[0]["loss"] - 0.01
    for ours, theirs in zip(together, alone, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
    # Each case of validation was counted once: the best weights score alone what both scored together.
    best = [line for line in together if line["best"]][-1]
    scores = evaluate(load(runs / "sasrec"), split.valid, counts=split.counts)
    assert len(split.valid) % 2 == 1
    for name in ("recall@10", "ndcg@10"):
        assert best[name] == pytest.approx(scores[name], rel=1e-12)


def test_parts_of_the_loss_are_those_of_one_process(table: Path, runs: Path) -> None:
    split = Interactions.read(table, user="who", item="what", time="when").split()
    alone = fit(ContrastVAE(split.items, seed=0, **OPTIONS[ContrastVAE]), split, epochs=3, progress=False)
    for ours, theirs in zip(lines(runs / "contrastvae"), alone, strict=True):
        assert ours["loss"] == sum(ours["loss_parts"].values())
        assert list(ours["loss_parts"]) == ["reconstruction", "kl", "contrast", "alpha"]
        # Each process draws its own noise, and contrasts its own share of a batch: fewer negatives, a lower loss.
        assert ours["loss_parts"].pop("contrast") < theirs["loss_parts"].pop("contrast")
        assert ours["loss_parts"] == pytest.approx(theirs["loss_parts"], rel=0.05)


@pytest.mark.parametrize(
    ("name", "queues"),
    [
        ("clrec", {"queue": 29, "later_queue": 29}),
        ("multi_clrec", {"queues.main": 10, "queues.secondary.0": 9, "queues.secondary.1": 9, "queues.secondary.2": 9}),
    ],
)
def test_every_process_has_its_own_queues_and_all_are_kept(name: str, queues: dict[str, int], runs: Path) -> None:
    tensors = load_file(runs / name / "last.safetensors")
    for queue, capacity in queues.items():
        keys = [tensors[f"process/{rank}/buffer/{queue}._keys"] for rank in (0, 1)]
        assert not torch.equal(*keys)
        assert all(key.norm(dim=1).allclose(torch.ones(capacity), atol=1e-5) for key in keys), "a queue was not filled"


@pytest.mark.parametrize("model", ["clrec", "multi_clrec"])
def test_resume_of_several_processes_is_exact(model: str, runs: Path) -> None:
    stopped_run = runs / f"stopped-{model}"
    for name in ("last.safetensors", "model.safetensors"):
        whole, stopped = load_file(runs / model / name), load_file(stopped_run / name)
        assert whole.keys() == stopped.keys()
        for key, tensor in whole.items():
            assert torch.equal(tensor, stopped[key]), key
    whole_lines, stopped_lines = lines(runs / model), lines(stopped_run)
    assert [line["loss"] for line in whole_lines] == [line["loss"] for line in stopped_lines]
    assert [line["ndcg@10"] for line in whole_lines] == [line["ndcg@10"] for line in stopped_lines]


def test_the_command(runs: Path) -> None:
    (printed,) = (runs / "stdout").read_text().splitlines()
    assert json.loads(printed)["epochs"] == 3
    said = (runs / "stderr").read_text()
    assert said.count("epoch 3/3") == 1
    assert said.count("fastcl: note:") == 1
    assert [line["loss"] for line in lines(runs / "command")] == [line["loss"] for line in lines(runs / "sasrec")]
    assert json.loads((runs / "command" / "config.json").read_text())["processes"] == 2


def test_what_one_process_refuses_all_refuse_at_once(table: Path, tmp_path: Path) -> None:
    """In a group of one's own, which nothing else ends: without agreement the others would wait for its time-out."""
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("")
    started = [forked(partial(refuse_ranks.main, rank, tmp_path / "store", table, tmp_path)) for rank in (0, 1)]
    assert [ended(child) for child in started] == [0, 0]
    said = [[json.loads(line) for line in (tmp_path / f"said{rank}").read_text().splitlines()] for rank in (0, 1)]
    expected = [
        ("out", "FileExistsError", 0, "exists and is not empty"),
        ("split", "AttributeError", 1, "has no attribute"),
        ("options", "ValueError", 1, "epochs: expected at least 1"),
        ("settings", "ValueError", None, "lr: expected the same in all processes, got 0.1 in process 0 and 0.2"),
        ("models", "ValueError", None, "model: expected the same in all processes"),
        ("record", "ValueError", 1, "expected what JSON can hold"),
        ("full", "OSError", 0, "no space"),
        ("resume", "FileNotFoundError", None, "not a run folder"),
        ("end", "none", None, ""),
    ]
    for rank in (0, 1):
        for (case, kind, seconds, text), (name, wanted, culprit, words) in zip(said[rank], expected, strict=True):
            assert (case, kind) == (name, wanted), text
            assert words in text
            assert seconds < 50  # the group's time-out is 60
            if culprit is not None:
                assert (f"(in process {culprit} of 2)" in text) == (rank != culprit)


@pytest.mark.parametrize(
    ("model_class", "options"),
    [
        (SASRec, {}),
        (CLRec, {"time_cuts": ()}),
        (CLRec, {"encoder": "sasrec", "tasks": ("u2i", "u2u"), "objective": "negative_sampling"}),
        (MultiCLRec, {"time_cuts": ()}),
        (BERT4Rec, {}),
        (ContrastVAE, {}),
        (ContrastVAE, {"augment": ("crop", "reorder")}),
    ],
)
def test_an_empty_share_of_a_batch_has_no_targets(model_class: Any, options: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    train = Histories.from_lists([rng.integers(1, 31, 3).tolist() for _ in range(9)])
    counts = []
    for rank in range(3):
        model = model_class(Items(tuple(f"i{n}" for n in range(30))), dim=8, batch=4, **options).train()
        model.share = rank, 3
        counts.append([model.targets(batch) for batch in model.batches(train, np.random.default_rng(0))])
    assert len({len(share) for share in counts}) == 1
    assert min(min(share) for share in counts) == 0 < min(map(sum, zip(*counts, strict=True)))


def test_a_process_counts_a_step_without_targets_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which the other process has, so that both go on with the same weight of the KL divergence."""
    rows = np.random.default_rng(0).integers(1, 31, (9, 4)).tolist()
    items = Items(tuple(f"i{n}" for n in range(30)))
    split = Interactions(items, tuple(map(str, range(9))), Histories.from_lists(rows)).split()
    model = ContrastVAE(items, dim=8, batch=4)
    run = loop.new_run(model, split, Settings(1, 1e-3))
    batch = next(iter(model.batches(split.train, np.random.default_rng(0))))
    others = {"count": lambda: 2, "add": lambda sums: sums + 1.0, "add_gradients": lambda parameters: None}
    for name, function in others.items():
        monkeypatch.setattr(loop.processes, name, function)
    monkeypatch.setattr(model, "targets", lambda batch: 0)
    loop.step(run, [batch])
    assert model.step == 1


@pytest.mark.parametrize("together", [1, TOGETHER])
@pytest.mark.parametrize("processes", [2, 3, 8])
def test_the_shares_of_a_batch_make_it_up(processes: int, together: int) -> None:
    lengths = np.random.default_rng(1).integers(1, 30, 101)
    stop = lengths.cumsum()
    spans = Spans(stop - lengths, stop, np.arange(101))

    def batches(share: tuple[int, int]) -> list[Spans]:
        return list(batched(spans, 10, np.random.default_rng(2), share, together))

    whole = batches((0, 1))
    shares = [batches((rank, processes)) for rank in range(processes)]
    assert any(len(part.row) == 0 for share in shares for part in share)  # of the last batch, which has one span
    for batch, *parts in zip(whole, *shares, strict=True):
        assert sorted(np.concatenate([part.row for part in parts])) == sorted(batch.row)
        assert max(len(part.row) for part in parts) - min(len(part.row) for part in parts) <= 1
        # Of about equal lengths: the nth longest spans of the parts are neighbours in the batch's order by length.
        dealt = [lengths[part.row[nth]] for nth in range(len(parts[0].row)) for part in parts if nth < len(part.row)]
        assert dealt == sorted(lengths[batch.row])
