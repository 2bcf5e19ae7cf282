"""NegativeQueue where its counters cannot be read: in compiled code, and on a device that reading would wait for.

One graph serves all fillings, the values are those of plain Python, and nothing is read back.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from list_queue import ListQueue, push_both
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fastcl
from fastcl import negatives

pytestmark = pytest.mark.usefixtures("one_thread")

Loss = Callable[..., Tensor]


def _elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queues do as if their counters were on a GPU, whose numbers are there for the tests alone."""
    monkeypatch.setattr(negatives, "_at_hand", lambda counters: False)


def _batch(n: int, seed: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        "query": torch.randn(n, 4, generator=g).double(),
        "key": torch.randn(n, 4, generator=g).double(),
        "ids": torch.randint(6, (n,), generator=g),
        "log_q": -torch.rand(n, generator=g).double(),
    }


def _step(loss: Loss, queue: fastcl.NegativeQueue, batch: dict[str, Tensor], given: str, push: bool, **options: Any):
    extra = {name: batch[name] for name in given.split()}
    value = loss(batch["query"], batch["key"], queue=queue, **extra, **options)
    if push:
        queue.push(batch["key"].detach(), **extra)
    return value


def _assert_one_graph(
    loss: Loss,
    given: str = "",
    sizes: tuple[int, ...] = (6,),
    inside: bool = True,
    **options: Any,
) -> None:
    """14 steps, a push after each, into a queue that is empty first and full at last."""
    torch._dynamo.reset()
    compiled = torch.compile(_step, fullgraph=True, backend="eager")
    ours, plain = (fastcl.NegativeQueue(41, 4, torch.float64) for _ in range(2))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step in range(14):
            batch = _batch(sizes[step % len(sizes)], step)
            found = []
            for call, queue in ((compiled, ours), (_step, plain)):
                leaf = batch["query"].clone().requires_grad_()
                inputs = {**batch, "query": leaf}
                if len(sizes) > 1:
                    for x in inputs.values():
                        torch._dynamo.mark_dynamic(x, 0)
                value = call(loss, queue, inputs, given, inside, **options)
                found.append((value.detach(), *torch.autograd.grad(value, leaf)))
                if not inside:
                    _push(queue, batch, given)
            for a, b in zip(*found, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
            for name, buffer in ours.named_buffers():
                assert torch.equal(buffer, plain.get_buffer(name)), name
    assert len(ours) == 41


def _push(queue: fastcl.NegativeQueue, batch: dict[str, Tensor], given: str) -> None:
    queue.push(batch["key"], **{name: batch[name] for name in given.split()})


@pytest.mark.parametrize("inside", [True, False], ids=["push inside", "push outside"])
@pytest.mark.parametrize("given", ["", "ids log_q"])
def test_one_graph_for_all_fillings(given: str, inside: bool) -> None:
    _assert_one_graph(fastcl.infonce, given, inside=inside, in_batch=not inside)


@pytest.mark.parametrize("loss", [fastcl.mine, fastcl.debiased_infonce], ids=lambda f: f.__name__)
def test_one_graph_for_other_formulas(loss: Loss) -> None:
    options = {"beta": 0.5} if loss is fastcl.debiased_infonce else {}
    _assert_one_graph(loss, "ids", in_batch=False, **options)


def test_one_graph_for_all_fillings_and_batches() -> None:
    _assert_one_graph(fastcl.infonce, "ids", sizes=(6, 5, 8), in_batch=True)


def test_one_graph_with_the_newest_and_with_what_was_driven_out() -> None:
    def step(queue: fastcl.NegativeQueue, second: fastcl.NegativeQueue, x: Tensor) -> Tensor:
        value = fastcl.infonce(x, x, queue=queue.newest(7), in_batch=False)
        return value + fastcl.mine(x, x, queue=queue.push(x), in_batch=False)

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="eager")
    ours, plain = fastcl.NegativeQueue(9, 4), fastcl.NegativeQueue(9, 4)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for n in range(8):
            x = _batch(4, n)["query"]
            torch.testing.assert_close(compiled(ours, ours, x), step(plain, plain, x))


def test_evicted_entries_come_out_of_compiled_code() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda queue, x, ids: queue.push(x, ids), fullgraph=True, backend="eager")
    ours, plain = fastcl.NegativeQueue(5, 4), fastcl.NegativeQueue(5, 4)
    for n in range(5):
        batch = _batch(3, n)
        found, wanted = compiled(ours, batch["key"], batch["ids"]), plain.push(batch["key"], batch["ids"])
        assert len(found) == len(wanted)
        assert torch.equal(found.keys, wanted.keys)
        assert torch.equal(found.ids, wanted.ids)
        assert found.log_q is None


PUSHES = st.lists(st.tuples(st.integers(0, 9), st.booleans(), st.booleans()), max_size=5)


@pytest.mark.parametrize("loss", [fastcl.infonce, fastcl.mine, fastcl.debiased_infonce], ids=lambda f: f.__name__)
@given(capacity=st.integers(1, 7), pushes=PUSHES, ids=st.booleans(), count=st.integers(0, 8))
@settings(max_examples=40)
def test_values_are_those_of_the_entries_alone(
    loss: Loss, capacity: int, pushes: list[tuple[int, bool, bool]], ids: bool, count: int
) -> None:
    queue, model, first = fastcl.NegativeQueue(capacity, 3), ListQueue(capacity), 0
    with pytest.MonkeyPatch.context() as patch:
        _elsewhere(patch)
        for size, with_ids, _ in pushes:
            push_both(queue, model, first, size, with_ids, False)
            first += size
    x = _batch(6, first)["query"][:, :3]
    options: dict[str, Any] = {"ids": 100 + torch.arange(6) if ids else None, "reduction": "none"}
    for in_batch in (False, True):
        for read in (queue, queue.newest(count)):
            leaves = [x.clone().requires_grad_() for _ in range(2)]
            here = loss(leaves[0], x, queue=read, in_batch=in_batch, **options)
            with pytest.MonkeyPatch.context() as patch:
                _elsewhere(patch)
                there = loss(leaves[1], x, queue=read, in_batch=in_batch, **options)
            torch.testing.assert_close(there, here, rtol=1e-6, atol=1e-6)
            gradients = [torch.autograd.grad(y.sum(), leaf)[0] for y, leaf in zip((here, there), leaves, strict=True)]
            torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-6, atol=1e-6)


def test_a_traced_graph_follows_the_filling() -> None:
    queue, x = fastcl.NegativeQueue(5, 4), torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    queue.push(x[:1] + 1)
    traced = make_fx(lambda x: fastcl.infonce(x, x, queue=queue))(x)
    for _ in range(3):
        queue.push(x[:2] - 1)
        torch.testing.assert_close(traced(x), fastcl.infonce(x, x, queue=queue))


def test_vmap_over_queues_of_other_fillings() -> None:
    class Read(torch.nn.Module):
        def __init__(self, held: int) -> None:
            super().__init__()
            self.queue = fastcl.NegativeQueue(5, 4)
            self.queue.push(_batch(held, held)["key"])

        def forward(self, x: Tensor) -> Tensor:
            return fastcl.infonce(x, x, queue=self.queue)

    models, x = [Read(held) for held in (0, 2, 7)], _batch(3, 1)["query"]
    _, buffers = torch.func.stack_module_state(models)
    found = torch.func.vmap(lambda state: torch.func.functional_call(models[0], state, (x,)))(buffers)
    torch.testing.assert_close(found, torch.stack([model(x) for model in models]))


def test_neither_loss_nor_push_asks_a_device_for_a_number() -> None:
    # A meta tensor has none to give.
    queue = fastcl.NegativeQueue(7, 4).to("meta")
    x, ids = torch.empty(3, 4, device="meta"), torch.empty(3, dtype=torch.int64, device="meta")
    for _ in range(4):
        for loss in (fastcl.infonce, fastcl.mine, fastcl.debiased_infonce):
            assert loss(x, x, queue=queue, ids=ids).is_meta
            assert loss(x, x, queue=queue.newest(5), in_batch=False).is_meta
        assert loss(x, x, queue=queue.push(x, ids)).is_meta
    with pytest.raises((RuntimeError, NotImplementedError)):
        len(queue)


def test_log_q_for_some_sources_is_refused_where_the_counters_are_not_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    _elsewhere(monkeypatch)
    x, log_q = torch.ones(2, 4), torch.zeros(2)
    for of_queue, of_loss in ((None, log_q), (log_q, None)):
        queue = fastcl.NegativeQueue(7, 4)
        queue.push(x, log_q=of_queue)
        other = fastcl.NegativeQueue(7, 4)
        other.load_state_dict(queue.state_dict())
        for read in (queue, queue.newest(1), copy.deepcopy(queue), other):
            fastcl.infonce(x, x, queue=read, log_q=of_queue)
            with pytest.raises(ValueError, match="log_q: expected for the positive and every source of negatives"):
                fastcl.infonce(x, x, queue=read, log_q=of_loss)
        queue.reset_parameters()
        fastcl.infonce(x, x, queue=queue, log_q=of_loss)


def test_a_queue_that_is_none_gives_nan_where_nothing_can_be_said(monkeypatch: pytest.MonkeyPatch) -> None:
    _elsewhere(monkeypatch)
    queue, x = fastcl.NegativeQueue(7, 4), torch.ones(2, 4)
    queue.push(x)
    queue._counters[4] += 1
    assert fastcl.infonce(x, x, queue=queue).isnan()
    queue.push(x)
    assert fastcl.infonce(x, x, queue=queue).isnan(), "a push does not make it one"
    assert fastcl.infonce(x, x, queue=queue.newest(3)).isnan()
    queue.reset_parameters()
    assert not fastcl.infonce(x, x, queue=queue).isnan()
