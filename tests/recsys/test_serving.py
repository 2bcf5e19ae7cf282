"""Models are scored as they are: in eval mode, by the weights of the moment, on the items that they were trained on."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from made import made
from torch import nn

from benchmarks.paper_ranking import RANKINGS
from fastcl.recsys import (
    MODELS,
    CoOccurrence,
    Histories,
    Interactions,
    Items,
    Model,
    MultiCLRec,
    PersonalFrequency,
    Popularity,
    Split,
    compare,
    evaluate,
    export,
    fit,
    frozen,
    intents,
    query_vectors,
    rank_cases,
    recommend,
    recommend_users,
    robustness,
)
from fastcl.recsys.reporting.numbers import measured, queue_replay

pytestmark = pytest.mark.usefixtures("one_thread")
OPTIONS: dict[str, Any] = {"dim": 16, "max_len": 7}
WIDTH = 12


def log(order: int = 0, items: int = 40) -> Interactions:
    """120 users with 4 clicks each; `order` shuffles the numbers of the items, not what was clicked."""
    rng = np.random.default_rng(1)
    clicks = [[f"i{i}" for i in rng.integers(0, items, 4)] for _ in range(120)]
    table = [f"i{i}" for i in np.random.default_rng(order).permutation(items)]
    number = {item: k + 1 for k, item in enumerate(table)}
    histories = Histories.from_lists([[number[item] for item in row] for row in clicks])
    return Interactions(Items(tuple(table)), tuple(f"u{u}" for u in range(120)), histories)


def small(name: str, items: Items) -> Model:
    sizes = {"clrec": {"batch": 16, "negatives": 48}, "multi_clrec": {"batch": 16, "main": 32, "secondary": 8}}
    times = {"time_cuts": ()} if "clrec" in name else {}
    return made(name, items, seed=3, **OPTIONS, **sizes.get(name, {}), **times)


# What a model and data of other items meet in: every public function that takes both.
MEETINGS: dict[str, Callable[[Any, Split, Interactions, Any], Any]] = {
    "evaluate": lambda m, s, d, p: evaluate(m, s.test),
    "evaluate sampled": lambda m, s, d, p: evaluate(m, s.valid, protocol="pop100"),
    "rank_cases": lambda m, s, d, p: rank_cases(m, s.test),
    "rank_cases inputs": lambda m, s, d, p: rank_cases(m, log().split().test, inputs=s.test.history),
    "compare": lambda m, s, d, p: compare({"one": [m]}, s.test),
    "robustness": lambda m, s, d, p: robustness(m, s.test, ratios=(0.1,)),
    "report": lambda m, s, d, p: measured({"one": m}, s, seen="mask", ratios=(0.1,)),
    "fit": lambda m, s, d, p: fit(m, s, epochs=1, progress=False),
    "fit into a folder": lambda m, s, d, p: fit(m, s, epochs=1, out=p / "run", progress=False),
    "export": lambda m, s, d, p: export(m, p / "vectors", queries=s.test.history),
    "export a log": lambda m, s, d, p: export(m, p / "vectors", queries=d.log),
}


@pytest.mark.parametrize("meeting", list(MEETINGS))
@pytest.mark.parametrize("items", [40, 39, 41])
def test_a_split_of_other_items_is_refused(meeting: str, items: int, tmp_path: Any) -> None:
    """Permuted, fewer or more items: never a number, never an error about an index."""
    model = small("sasrec", log().items)
    other = log(order=1, items=items)
    weights = copy.deepcopy(model.state_dict())
    got = "got the same in another order" if items == 40 else f"40 of them, got {items}"
    with pytest.raises(ValueError, match=f"expected the items of the model, {got}"):
        MEETINGS[meeting](model, other.split(), other, tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
    MEETINGS[meeting](model, log().split(), log(), tmp_path)  # read again: equal, not the same object


def test_what_models_of_one_kind_meet_is_checked_too() -> None:
    split = log(order=1).split()
    with pytest.raises(ValueError, match="expected the items of the model"):
        intents(small("multi_clrec", log().items), split.test.history)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected the items of the model"):
        queue_replay(small("clrec", log().items), split.train, seed=0)  # type: ignore[arg-type]
    model = MODELS["contrastvae"](log().items, dim=8, compat="paper-code", augment=())
    with pytest.raises(ValueError, match="expected the items of the model"):
        RANKINGS["paper-code"].evaluate(model, split.test, counts=split.counts, k=(10,))


def test_items_travel_with_histories_and_floors_need_none() -> None:
    data = log()
    split = data.split()
    parts = (data.log, data.log.last(2), split.train.take(np.arange(3)), split.valid.history, split.test.history)
    assert all(part.items is split.items for part in parts)
    other = log(order=1).split()

    class Own:
        def scores(self, histories: Histories) -> torch.Tensor:
            return torch.zeros(len(histories), 41)

    assert evaluate(Own(), split.test)["recall@10"] == evaluate(Own(), other.test)["recall@10"]
    counts = split.counts
    popular = Popularity(counts, split.items)
    for floor in (CoOccurrence(split.train, 40), popular, PersonalFrequency(counts, split.items)):
        with pytest.raises(ValueError, match="expected the items of the model"):  # a floor that knows its items
            evaluate(floor, other.test)
    assert evaluate(popular, split.test) == evaluate(Popularity(counts), split.test)
    most = split.items.ids[int(counts[1:].argmax())]
    assert recommend(popular, [["nobody's", split.items.ids[0]]], k=1, seen="keep")[0] == [(most, counts.max())]
    with pytest.raises(ValueError, match=r"counts: expected int64 \[41\], .*, got \[40\]"):
        Popularity(counts[1:], split.items)
    by_hand = Histories.from_lists([[41]])
    with pytest.raises(ValueError, match=r"expected items 1\.\.40 of the model, got 41"):
        export(small("sasrec", data.items), "nowhere", queries=by_hand)


class Wrapped:
    """A scorer of one's own around models, which says nothing of their items or modes."""

    def __init__(self, model: Model) -> None:
        self.scores = model.scores


@pytest.mark.parametrize("name", list(MODELS))
def test_a_models_own_scores_are_checked_too(name: str) -> None:
    split = log().split()
    model = small(name, split.items)
    means = [evaluate(Wrapped(model), split.test, seen="keep") for _ in range(2)]
    assert model.training
    assert means == [evaluate(model, split.test, seen="keep")] * 2  # no dropout
    for call in (lambda cases: model.scores(cases.history), lambda cases: evaluate(Wrapped(model), cases)):
        with pytest.raises(ValueError, match="expected the items of the model, got the same in another order"):
            call(log(order=1).split().test)


def test_no_training_in_a_block_that_keeps_item_vectors() -> None:
    """Every epoch would be validated with the vectors of the first one, and the wrong epoch's weights kept."""
    split = log().split()
    model = small("clrec", split.items)
    with frozen(model), pytest.raises(ValueError, match="expected one whose weights may change"):
        fit(model, split, epochs=2, progress=False)
    fit(model, split, epochs=1, progress=False)


def test_a_digest_tells_tables_apart() -> None:
    tables = [("ab", "c"), ("a", "bc"), ("c", "ab"), ("ab", "c", "d"), ("ab",), (), ("2:ab",), ("\udc80",)]
    assert len({Items(ids).digest for ids in tables}) == len(tables)
    assert Items(("ab", "c")).digest == Items(("ab", "c"), titles=("x", "y")).digest


@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if model.learns])
def test_no_dropout_while_scoring_and_every_module_back_in_its_mode(name: str, tmp_path: Any) -> None:
    data = log()
    split = data.split()
    model = small(name, data.items)
    kept = small(name, data.items).eval()
    mixed = [module for module in model.modules() if module is not model][::2]
    for module in mixed:
        module.training = False
    modes = [module.training for module in model.modules()]
    ids = [[data.items.ids[3], data.items.ids[4]], [data.items.ids[9]]]
    calls: dict[str, Callable[[Model], Any]] = {
        "evaluate": lambda m: evaluate(m, split.test, seen="keep"),
        "recommend": lambda m: recommend(m, ids, k=5),
        "recommend_users": lambda m: list(recommend_users(m, data, k=5).rows),
        "query_vectors": lambda m: query_vectors(m, ids).tolist(),
        "robustness": lambda m: robustness(m, split.test, ratios=(0.5,)),
        "compare": lambda m: compare({"one": [m]}, split.test),
        "export": lambda m: (export(m, tmp_path), (tmp_path / "vectors.npy").read_bytes()),
    }
    if isinstance(model, MultiCLRec):
        calls["intents"] = lambda m: intents(m, split.test.history)
    for call in calls.values():
        assert call(model) == call(kept)
        assert [module.training for module in model.modules()] == modes
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    with pytest.raises(ValueError, match="NaN"):
        evaluate(model, split.test)
    assert [module.training for module in model.modules()] == modes


def test_a_module_with_an_attribute_named_scorer_is_itself_what_scores() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scorer = nn.Linear(2, 2)

    own = Own()
    around = SimpleNamespace(scorer=SimpleNamespace(scorer=own))
    for given in (own, around):
        with frozen(given):
            assert not own.training
        assert own.training


def changes(model: Model, other: Model) -> dict[str, Callable[[], Any]]:
    """Every way of changing weights that torch has."""

    def each(change: Callable[[torch.Tensor, torch.Tensor], Any]) -> Callable[[], None]:
        def run() -> None:
            for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
                change(mine, theirs)

        return run

    def step() -> None:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=True)
        for weight in model.parameters():
            weight.grad = torch.ones_like(weight)
        optimizer.step()

    def replaced() -> None:
        for module, theirs in zip(model.modules(), other.modules(), strict=True):
            for name, parameter in theirs.named_parameters(recurse=False):
                setattr(module, name, torch.nn.Parameter(parameter.detach().clone()))

    return {
        "data.mul_": each(lambda mine, theirs: mine.data.mul_(1.5)),
        "data.copy_": each(lambda mine, theirs: mine.data.copy_(theirs.data)),
        "copy_": torch.no_grad()(each(lambda mine, theirs: mine.copy_(theirs * 0.5))),
        "set_": torch.no_grad()(each(lambda mine, theirs: mine.set_((theirs * 2.0).detach()))),
        "numpy": each(lambda mine, theirs: np.add(mine.detach().numpy(), 0.01, out=mine.detach().numpy())),
        "load_state_dict": lambda: model.load_state_dict(other.state_dict()),
        "optimiser": step,
        "replaced": replaced,
    }


@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if model.learns])
def test_scores_are_those_of_the_weights_of_the_moment(name: str) -> None:
    """Buffers too: a model of one's own may keep part of its items there."""
    data = Histories.from_lists([[1, 2, 3], [4]])
    model, other = (made(name, log().items, seed=seed, similarity="dot", **OPTIONS).eval() for seed in (3, 4))
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.fill_(0.1)
    split = log().split()
    for change in changes(model, other).values():
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                before = model.scores(data)
                evaluate(model, split.test)
        change()
        fresh = copy.deepcopy(model)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                after = model.scores(data)
                torch.testing.assert_close(after, fresh.scores(data))
                assert not torch.equal(after, before)
        assert evaluate(model, split.test) == evaluate(fresh, split.test)


def test_item_vectors_are_computed_once_a_block_and_not_beyond(monkeypatch: pytest.MonkeyPatch) -> None:
    data = log()
    model = small("clrec", data.items)
    count = [0]
    encode = type(model).item_vectors

    def counted(self: Model) -> torch.Tensor:
        count[0] += 1
        return encode(self)  # type: ignore[no-any-return]

    monkeypatch.setattr(type(model), "item_vectors", counted)
    ids = [[item] for item in data.items.ids]
    alone = [recommend(model, [history], k=3) for history in ids]
    assert count[0] == 40
    with frozen(model), frozen(model):
        assert [recommend(model, [history], k=3) for history in ids] == alone
    assert (count[0], model.training) == (41, True)
    evaluate(model, data.split().test, chunk=7)
    assert count[0] == 42

    def serve() -> None:
        with frozen(model):
            found.extend(recommend(model, [history], k=3) == one for history, one in zip(ids, alone, strict=True))

    found: list[bool] = []
    threads = [threading.Thread(target=serve) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(found), all(found), model.training) == (120, True, True)
    with frozen(model):  # gradients reach the items through a block, twice
        for _ in range(2):
            model.scores(Histories.from_lists([[1]]))[:, 1:].sum().backward()
