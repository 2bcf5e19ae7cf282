"""Tables that are trained by rows: the weights and learning curves of Adam over whole tables, whatever rows a step
reads; what a run keeps of them, and what is refused."""

from __future__ import annotations

import json
import mmap
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import stopped_after
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fastcl.late import LateAdam
from fastcl.recsys import (
    MF,
    BERT4Rec,
    CLRec,
    Histories,
    Interactions,
    Items,
    Model,
    MultiCLRec,
    SASRec,
    Split,
    bundled,
    fit,
    load,
    resume,
)
from fastcl.recsys.models import rowtable
from fastcl.recsys.models.base import make
from fastcl.recsys.models.rowtable import RowTable
from fastcl.recsys.training import checkpoint, loop, rowshare, state
from fastcl.recsys.training.rowadam import RowAdam
from fastcl.recsys.training.state import Settings

pytestmark = pytest.mark.usefixtures("one_thread")
F64 = torch.float64
SMALL: dict[type[Model], dict[str, Any]] = {
    CLRec: {"dim": 8, "max_len": 6, "batch": 32, "negatives": 80, "time_cuts": ()},
    MultiCLRec: {"dim": 8, "max_len": 6, "batch": 32, "main": 50, "secondary": 20, "intents": 3, "time_cuts": ()},
    SASRec: {"dim": 8, "max_len": 6, "batch": 16, "loss": "popular", "samples": 30},
    BERT4Rec: {"dim": 8, "max_len": 6, "batch": 16, "loss": "sampled", "samples": 30},
    MF: {"dim": 8, "batch": 64, "count": 20},
}


@pytest.fixture(scope="module")
def split() -> Split:
    """Some 250 items of very different popularity, of which a batch reads a part."""
    rng = np.random.default_rng(0)
    share = 1 / np.arange(1, 301) ** 0.9
    clicks = [
        (f"u{user}", f"i{item}")
        for user in range(70)
        for item in rng.choice(300, size=8, replace=False, p=share / share.sum())
    ]
    return Interactions.read({"user": [u for u, _ in clicks], "item": [i for _, i in clicks]}, time=None).split()


def small(kind: type[Model], split: Split, table: str, **options: Any) -> Model:
    """In float64. MF has no setting of a table: the dense one is put in."""
    asked = {} if kind is MF else {"table": table}
    model: Model = make(kind, split, seed=1, **(SMALL[kind] | asked | options)).double()
    if kind is MF and table == "dense":
        for name in ("user", "item"):
            setattr(model, name, nn.Embedding.from_pretrained(getattr(model, name).weight.detach(), freeze=False))
    assert any(isinstance(module, RowTable) for module in model.modules()) == (table == "rows")
    return model


def trained(
    model: Model, split: Split, epochs: int = 2, eps: float = 1e-13, **options: Any
) -> list[dict[str, float]]:
    """The losses of its epochs. eps is small: late steps are exact to its first order."""
    run = loop.new_run(model, split, Settings(epochs, 1e-2, **options))
    run.optimizer = RowAdam(model, 1e-2, (0.9, 0.98), eps=eps)
    losses = []
    for _ in range(epochs):
        losses.append(loop.epoch(run))
        run.progress = state.Progress([*run.progress.history, {"best": True}])
    return losses


# No loss depends on a number that is added to all logits of a softmax: its gradient is rounding, whatever the table.
IDLE = ("user.attention.mlp.2.bias", "importance.2.bias")


def assert_alike(one: Model, other: Model, tolerance: float) -> None:
    first, second = (
        {name.removesuffix(".weight"): x for name, x in model.named_parameters() if name not in IDLE}
        for model in (one, other)
    )
    assert first.keys() == second.keys()
    for name, mine in first.items():
        assert (mine - second[name].view_as(mine)).abs().max() < tolerance, name


@pytest.mark.parametrize("kind", SMALL)
def test_a_model_learns_by_rows_what_it_learns_with_whole_tables(kind: type[Model], split: Split) -> None:
    start, dense, rows = (small(kind, split, table) for table in ("rows", "dense", "rows"))
    assert_alike(dense, start, 1e-15)
    losses = [trained(model, split) for model in (dense, rows)]
    assert losses[0] == [pytest.approx(line, abs=1e-9) for line in losses[1]]
    assert_alike(dense, rows, 1e-7)
    table = start.item if hasattr(start.item, "weight") else start.item.id
    moved = rows.item.weight if hasattr(rows.item, "weight") else rows.item.id.weight
    assert (moved - table.weight).abs().max() > 0.02


@pytest.mark.parametrize(("kind", "accumulate"), [(SASRec, 1), (SASRec, 3), (BERT4Rec, 1)])
def test_a_loss_over_all_items_moves_all_rows(kind: type[Model], accumulate: int, split: Split) -> None:
    options: dict[str, Any] = {"debias": 0.5} if kind is SASRec else {}
    dense, rows = (small(kind, split, table, loss="softmax", **options) for table in ("dense", "rows"))
    # No step is late, so that eps may be large; then less of the rounding of a gradient near zero becomes a step.
    losses = [trained(model, split, eps=1e-6, accumulate=accumulate) for model in (dense, rows)]
    assert losses[0] == [pytest.approx(line, abs=1e-11) for line in losses[1]]
    assert_alike(dense, rows, 1e-10)


def test_several_batches_a_step_read_one_after_the_other(split: Split) -> None:
    dense, rows = (small(CLRec, split, table) for table in ("dense", "rows"))
    for model in (dense, rows):
        trained(model, split, accumulate=3)
    assert_alike(dense, rows, 1e-7)


class Sizes(TorchDispatchMode):
    """The largest new tensor of any operation."""

    def __init__(self, known: set[int]) -> None:
        super().__init__()
        self.known, self.largest = known, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, tuple | list) else (found,):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in self.known:
                self.largest = max(self.largest, tensor.numel())
        return found


@pytest.mark.parametrize(("table", "least", "most"), [("rows", 1, 0.2), ("dense", 1, 10)])
def test_no_step_makes_a_tensor_of_the_size_of_the_table(table: str, least: int, most: float, split: Split) -> None:
    items = Items(tuple(f"i{n}" for n in range(20_000)))
    model = CLRec(items, seed=0, table=table, **SMALL[CLRec])
    optimizer = RowAdam(model, 1e-2, (0.9, 0.98))
    batches = model.batches(Histories.from_lists([[1 + n % 90 for n in range(200)]]), np.random.default_rng(0))
    size = model.item.id.weight.numel()
    run = loop.Run(model, split, Settings(1, 1e-2), None, optimizer, state.Progress(), lambda done: 1.0)
    with optimizer.reading():
        loop.step(run, [next(batches)])
        rules = optimizer.rules.values()
        known = {t.untyped_storage().data_ptr() for rule in rules for t in (rule.weight, rule.first, rule.second)}
        with Sizes(known | {model.item.id.weight.untyped_storage().data_ptr()}) as sizes:
            loop.step(run, [next(batches)])
    assert sizes.largest < most * size
    assert (sizes.largest >= size) == (table == "dense")
    assert sizes.largest >= least


def test_a_save_makes_no_tensor_of_the_size_of_the_table(split: Split, tmp_path: Path) -> None:
    items = Items(tuple(f"i{n}" for n in range(20_000)))
    model = SASRec(items, seed=0, table="rows", **SMALL[SASRec])
    optimizer = RowAdam(model, 1e-2, (0.9, 0.98))
    optimizer.share_out()
    tensors = [*model.state_dict().values(), *optimizer.row_state().values()]
    with Sizes({tensor.untyped_storage().data_ptr() for tensor in tensors}) as sizes:
        state.save(tmp_path, model, optimizer, state.Progress())
        checkpoint.save_weights(model, tmp_path, cut=optimizer.cut_weights)
    assert 0 < sizes.largest < 0.1 * model.item.weight.numel()
    assert load_file(tmp_path / "last.safetensors")["rows/item/second"].shape == model.item.weight.shape


@pytest.mark.parametrize(
    ("kind", "options"),
    [(MultiCLRec, {}), (BERT4Rec, {"table_rule": "rowwise-adagrad", "table_rate": 10.0})],
    ids=["adam", "rowwise-adagrad"],
)
def test_a_run_is_the_same_bit_for_bit_when_it_is_resumed_while_rows_are_late(
    kind: type[Model], options: dict[str, Any], split: Split, tmp_path: Path
) -> None:
    asked: dict[str, Any] = {"epochs": 3, "lr": 1e-2, "progress": False, "save_every": 0.0}
    models = [make(kind, split, seed=0, table="rows", **SMALL[kind], **options) for _ in range(2)]
    fit(models[0], split, out=tmp_path / "whole", **asked)
    with stopped_after(14):
        fit(models[1], split, out=tmp_path / "stopped", **asked)
    kept = load_file(tmp_path / "stopped" / "last.safetensors")
    late = [name for name, at in kept.items() if name.endswith("/at") and at.min() < at.max()]
    assert bool(late) == (not options)
    resume(tmp_path / "stopped", split, progress=False)
    whole, stopped = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "stopped"))
    assert whole == stopped
    assert json.loads((tmp_path / "whole" / "config.json").read_text())["config"]["table"] == "rows"
    assert torch.equal(load(tmp_path / "stopped").scores(split.test.history), models[0].scores(split.test.history))


def test_auto_becomes_rows_where_items_are_many_and_no_step_needs_all(monkeypatch: pytest.MonkeyPatch) -> None:
    items = Items(tuple("abcdef"))
    assert CLRec(items, dim=8).config.table == "dense"
    monkeypatch.setattr(rowtable, "ROWS_FROM", 6)
    assert CLRec(items, dim=8).config.table == "rows"
    assert SASRec(items, dim=8, loss="bce").config.table == "rows"
    for model in (
        CLRec(items, dim=8, objective="full_softmax"),
        CLRec(items, dim=8, negatives_from="vectors", momentum=0.9),
        SASRec(items, dim=8),
        SASRec(items, dim=8, loss="sce"),
        BERT4Rec(items, dim=8),
        CLRec(items, dim=8, table="dense"),
    ):
        assert model.config.table == "dense"
        assert not any(isinstance(module, RowTable) for module in model.modules())


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (CLRec, {"objective": "ipw"}, "dense, for objective=ipw reads all items at each step, got rows"),
        (CLRec, {"negatives_from": "vectors", "momentum": 0.9}, "table: expected dense, for momentum reads all items"),
        (SASRec, {"loss": "sce"}, "table: expected dense, for loss=sce reads all items"),
        (CLRec, {"table_rate": 0.0}, "table_rate: expected a finite number above 0, got 0.0"),
        (CLRec, {"table_rule": "sgd"}, "table_rule: expected one of adam, rowwise-adagrad, got 'sgd'"),
    ],
)
def test_what_rows_are_refused_for(kind: type[Model], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(Items(tuple("abc")), dim=8, table="rows", **options)


def test_rows_that_nobody_has_read_are_not_looked_up() -> None:
    table = RowTable(5, 2, std=0.1)
    optimizer = RowAdam(table, 1e-2, (0.9, 0.98))
    with optimizer.reading():
        with pytest.raises(ValueError, match="reads: expected all rows that the loss looks up, got none of 3"):
            table(torch.tensor([3]))
        optimizer.read([(table, torch.tensor([[1, 4], [1, 1]]))])
        assert torch.equal(table(torch.tensor([4, 1])), table.weight[[4, 1]])
        with pytest.raises(ValueError, match="got none of 2"):
            table(torch.tensor([1, 2]))
        for ids in ([5], [-1, 2]):
            with pytest.raises(ValueError, match=rf"reads: expected rows 0 to 4, got {ids[0]}"):
                optimizer.read([(table, torch.tensor(ids))])
    assert torch.equal(table(torch.tensor([3])), table.weight[[3]])


def asks_for_large_pages(tensor: Tensor) -> bool:
    """Whether its memory is marked for them, whether or not the system has given any."""
    marked, here = False, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            here = int(span[1], 16) <= tensor.data_ptr() < int(span[2], 16)
        elif here and line.startswith("VmFlags:"):
            marked = "hg" in line.split()
    return marked


def _memory(rows: int) -> list[Tensor]:
    table = RowTable(rows, 2, std=0.1)
    optimizer = RowAdam(table, 1e-2, (0.9, 0.98))
    optimizer.share_out()
    (rule,) = optimizer.rules.values()
    assert isinstance(rule, LateAdam)
    return [table.weight, rowshare.own(table.weight), rule.first, rule.second, rule.at]


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system has no large pages")
def test_large_tables_and_their_state_ask_for_large_pages() -> None:
    assert all(asks_for_large_pages(tensor) for tensor in _memory(2**20))


def test_small_tables_have_no_mapping_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The marks of their memory say nothing: it may have been that of a large array of numpy, which marks its own."""

    def mapped(*args: Any, **options: Any) -> Any:
        raise AssertionError("a mapping was made")

    monkeypatch.setattr(mmap, "mmap", mapped)
    assert all(tensor.isfinite().all() for tensor in _memory(100))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with pytest.raises(AssertionError, match="a mapping was made"):
            _memory(2**20)


def test_padding_stays_where_it_is() -> None:
    table = RowTable(5, 2, std=0.1, padding_idx=0)
    before, optimizer = table.weight.detach().clone(), RowAdam(table, 1e-2, (0.9, 0.98))
    with optimizer.reading():
        optimizer.read([(table, torch.tensor([0, 2]))])
        table(torch.tensor([0, 2, 0])).sum().backward()
        optimizer.step_rows()
    assert torch.equal((table.weight != before).any(1), torch.tensor([False, False, True, False, False]))


def test_state_of_another_table_is_refused() -> None:
    def taken(rows: int = 5) -> tuple[RowAdam, dict[str, Tensor]]:
        model = nn.ModuleDict({"table": RowTable(rows, 2, std=0.1)})
        optimizer = RowAdam(model, 1e-2, (0.9, 0.98))
        with optimizer.reading():
            optimizer.read([(model["table"], torch.tensor([1]))])
            optimizer.step_rows()
            return optimizer, {name: tensor.clone() for name, tensor in optimizer.row_state().items()}

    optimizer, kept = taken()
    optimizer.load_rows(kept)
    wrong = [
        (taken(rows=6)[1], r"expected finite torch.\w+ \[5"),
        ({name: tensor for name, tensor in kept.items() if name != "table/at"}, "differs in table/at"),
        (kept | {"table/second": torch.full((5, 2), torch.nan)}, "table/second: expected finite torch.float32"),
        (kept | {"table/at": kept["table/at"] + 1}, "table/counts: expected steps that fit"),
        (kept | {"table/counts": torch.tensor([3, 0])}, "table/counts: expected steps that fit"),
    ]
    for given, message in wrong:
        with pytest.raises(ValueError, match=message):
            optimizer.load_rows(given, "last.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "epochs"), [(CLRec, 2), (SASRec, 4)])
def test_curves_on_real_data_are_those_of_whole_tables(kind: type[Model], epochs: int) -> None:
    """On larger data and with two seeds: benchmarks/bench_curves.py."""
    split = bundled("movies").split()
    options = {"loss": "popular", "samples": 500} if kind is SASRec else {}
    curves = []
    for table in ("dense", "rows"):
        lines = fit(make(kind, split, seed=1, table=table, **options), split, epochs=epochs, seed=1, progress=False)
        curves.append([line["ndcg@10"] for line in lines])
    assert curves[0] == pytest.approx(curves[1], abs=3e-4)
    by_chance = sum(1 / np.log2(np.arange(2, 12))) / len(split.items)
    assert max(curves[0]) > 20 * by_chance  # the curves are of models that learn


@pytest.mark.parametrize("table", ["rows", "dense"])
def test_a_stage_begins_with_new_moments(table: str, split: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    anew, kept, fresh = models = [small(SASRec, split, table) for _ in range(3)]
    first, second = ([batch] for batch in list(anew.batches(split.train, np.random.default_rng(0)))[:2])
    for model in (kept, fresh):
        next(iter(model.batches(split.train, np.random.default_rng(0))))  # counts the clicks of the items
    runs = [loop.new_run(model, split, Settings(2, 1e-2)) for model in models]

    def step(run: loop.Run, batches: list[Any]) -> None:
        torch.manual_seed(0)  # of dropout
        with run.optimizer.reading():
            loop.step(run, batches)

    for run in runs[:2]:
        step(run, first)
    fresh.load_state_dict(anew.state_dict())
    monkeypatch.setattr(anew, "begins_stage", lambda batch: batch is second[0])
    for run in runs:
        step(run, second)
    assert_alike(anew, fresh, 1e-12)
    with pytest.raises(AssertionError):
        assert_alike(kept, fresh, 1e-4)
