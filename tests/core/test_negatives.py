"""NegativeQueue against a plain list: contents, eviction order, state, and what a push may not disturb.

How losses use a queue's rows is tested in test_losses.py.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from list_queue import ListQueue, assert_equal_to_model, keys_of, push_both
from torch import Tensor

import fastcl

PUSHES = st.lists(st.tuples(st.integers(0, 16), st.booleans(), st.booleans()), max_size=12)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def test_newest_are_copies_of_a_number_that_makes_sense() -> None:
    queue = fastcl.NegativeQueue(2, 3)
    queue.push(keys_of([1.0, 2.0]))
    copied = queue.newest(2).keys
    queue.push(keys_of([3.0, 4.0]))
    assert torch.equal(copied, keys_of([1.0, 2.0]))
    with pytest.raises(ValueError, match="count: expected at least 0, got -1"):
        queue.newest(-1)
    with pytest.raises(TypeError, match="count: expected an int, got float"):
        queue.newest(1.0)  # type: ignore[arg-type]


@given(capacity=st.integers(1, 7), pushes=PUSHES)
def test_behaves_like_a_list(capacity: int, pushes: list[tuple[int, bool, bool]]) -> None:
    queue, model = fastcl.NegativeQueue(capacity, 3), ListQueue(capacity)
    assert queue.capacity == capacity
    assert_equal_to_model(queue, model)
    first = 0
    for size, ids, log_q in pushes:
        push_both(queue, model, first, size, ids, log_q)
        first += size


@given(capacity=st.integers(1, 7), before=PUSHES, after=PUSHES)
def test_state_dict_restores_exactly_and_continues_alike(
    capacity: int, before: list[tuple[int, bool, bool]], after: list[tuple[int, bool, bool]]
) -> None:
    queue, model, first = fastcl.NegativeQueue(capacity, 3), ListQueue(capacity), 0
    for size, ids, log_q in before:
        push_both(queue, model, first, size, ids, log_q)
        first += size
    restored = fastcl.NegativeQueue(capacity, 3)
    restored.push(keys_of([-5.0]))  # loading replaces whatever was there
    state = queue.state_dict()
    assert all(isinstance(x, Tensor) for x in state.values())
    restored.load_state_dict(copy.deepcopy(state))
    other = copy.deepcopy(model)
    assert torch.equal(restored.keys, queue.keys)
    assert_equal_to_model(restored, other)
    for size, ids, log_q in after:
        push_both(queue, model, first, size, ids, log_q)
        push_both(restored, other, first, size, ids, log_q)
        first += size
    assert torch.equal(restored.keys, queue.keys)


def test_state_survives_files(tmp_path: Path) -> None:
    queue, model = fastcl.NegativeQueue(4, 3), ListQueue(4)
    push_both(queue, model, 0, 3, True, False)
    push_both(queue, model, 3, 3, False, True)
    torch.save(queue.state_dict(), tmp_path / "queue.pt")
    restored = fastcl.NegativeQueue(4, 3)
    restored.load_state_dict(torch.load(tmp_path / "queue.pt", weights_only=True))
    assert_equal_to_model(restored, model)
    push_both(restored, copy.deepcopy(model), 6, 3, True, True)


def test_state_survives_safetensors(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch", reason="needs the recsys extra (safetensors)")
    queue, model = fastcl.NegativeQueue(4, 3, torch.bfloat16), ListQueue(4)
    push_both(queue, model, 0, 6, True, False)
    safetensors.save_file(queue.state_dict(), tmp_path / "queue.safetensors")
    restored = fastcl.NegativeQueue(4, 3, torch.bfloat16)
    restored.load_state_dict(safetensors.load_file(tmp_path / "queue.safetensors"))
    assert_equal_to_model(restored, model)
    push_both(restored, model, 6, 3, True, True)


def test_is_part_of_a_model_and_of_its_state() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(3, 3)
            self.queue = fastcl.NegativeQueue(4, 3)

    model, twin = Model(), Model()
    model.queue.push(keys_of([1.0, 2.0]))
    assert len(list(model.parameters())) == 2
    twin.load_state_dict(model.state_dict())
    assert len(twin.queue) == 2
    assert torch.equal(twin.queue.keys, model.queue.keys)


def test_deepcopy_is_independent() -> None:
    queue, model = fastcl.NegativeQueue(4, 3), ListQueue(4)
    push_both(queue, model, 0, 3, True, True)
    twin, other = copy.deepcopy(queue), copy.deepcopy(model)
    push_both(queue, model, 3, 3, True, True)
    assert_equal_to_model(twin, other)
    push_both(twin, other, 3, 2, False, True)
    assert_equal_to_model(queue, model)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pushed", DTYPES, ids=str)
def test_keys_are_stored_in_the_queues_type(dtype: torch.dtype, pushed: torch.dtype) -> None:
    queue = fastcl.NegativeQueue(2, 3, dtype)
    keys = torch.tensor([[0.1, 0.2, 0.3], [1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], dtype=pushed)
    evicted = queue.push(keys)
    assert queue.keys.dtype == evicted.keys.dtype == dtype
    assert torch.equal(evicted.keys, keys[:1].to(dtype))
    assert torch.equal(queue.keys[queue.keys[:, 0].argsort()], keys[1:].to(dtype))


def test_module_conversion_keeps_ids() -> None:
    queue = fastcl.NegativeQueue(4, 3)
    ids = torch.tensor([2**53 + 1, 7])
    queue.push(keys_of([1.0, 2.0]), ids)
    queue.to(torch.bfloat16)
    assert queue.keys.dtype == torch.bfloat16
    assert queue.ids is not None
    assert sorted(queue.ids.tolist()) == sorted(ids.tolist())


def test_stored_keys_take_no_part_in_any_graph() -> None:
    queue = fastcl.NegativeQueue(2, 3)
    keys = keys_of([1.0, 2.0, 3.0]).requires_grad_()
    evicted = queue.push(keys * 2)
    assert not queue.keys.requires_grad
    assert not evicted.keys.requires_grad


def test_evicted_rows_are_copies() -> None:
    queue = fastcl.NegativeQueue(2, 3)
    queue.push(keys_of([1.0, 2.0]))
    evicted = queue.push(keys_of([3.0]))
    queue.push(keys_of([4.0, 5.0, 6.0, 7.0]))
    assert torch.equal(evicted.keys, keys_of([1.0]))


def test_reading_makes_no_copy() -> None:
    queue = fastcl.NegativeQueue(4, 3)
    queue.push(keys_of([1.0, 2.0, 3.0]), torch.tensor([1, 2, 3]), torch.zeros(3))
    assert queue.keys.data_ptr() == queue.keys.data_ptr() == queue.state_dict()["_keys"].data_ptr()


@pytest.mark.parametrize("loss", ["infonce", "dcl", "infonce_plus", "mine", "mine_plus"])
def test_a_push_between_forward_and_backward_changes_no_gradient(loss: str) -> None:
    def gradients(push_between: bool) -> tuple[Tensor, ...]:
        g = torch.Generator().manual_seed(0)
        queue = fastcl.NegativeQueue(16, 8)
        queue.push(torch.randn(16, 8, generator=g), torch.arange(16), torch.randn(16, generator=g))
        query, key = (torch.randn(5, 8, generator=g).requires_grad_() for _ in range(2))
        temperature = torch.tensor(0.2, requires_grad=True)
        log_q = torch.zeros(5, requires_grad=True)
        options: dict[str, Any] = {"temperature": temperature, "ids": torch.arange(5), "log_q": log_q}
        value = getattr(fastcl, loss)(query, key, queue=queue, **options)
        if push_between:
            queue.push(torch.full((16, 8), 50.0), torch.arange(16, 32), torch.full((16,), -9.0))
        return torch.autograd.grad(value, [query, key, temperature, log_q])

    for a, b in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(a, b)


def test_losses_never_push() -> None:
    queue = fastcl.NegativeQueue(4, 8)
    for loss in (fastcl.infonce, fastcl.mine_plus):
        loss(torch.randn(3, 8), torch.randn(3, 8), queue=queue)
    assert len(queue) == 0


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0, 3), ValueError, "capacity.*0"),
        ((-2, 3), ValueError, "capacity.*-2"),
        ((2.0, 3), TypeError, "capacity.*float"),
        ((True, 3), TypeError, "capacity.*bool"),
        ((2, 0), ValueError, "dim.*0"),
        ((2, None), TypeError, "dim.*None"),
        ((2, 3, torch.int64), TypeError, "dtype.*int64"),
    ],
)
def test_refused_construction(arguments: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        fastcl.NegativeQueue(*arguments)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"keys": [[1.0, 2.0, 3.0]]}, TypeError, "keys.*list"),
        ({"keys": torch.ones(2, 3).long()}, TypeError, "keys.*int64"),
        ({"keys": torch.ones(2, 4)}, ValueError, r"keys.*3.*\[2, 4\]"),
        ({"keys": torch.ones(3)}, ValueError, r"keys.*3.*\[3\]"),
        ({"ids": torch.ones(3).long()}, ValueError, r"ids.*2.*\[3\]"),
        ({"ids": torch.ones(2, 1).long()}, ValueError, r"ids.*2.*\[2, 1\]"),
        ({"ids": torch.ones(2)}, TypeError, "ids.*integer.*float32"),
        ({"ids": [1, 2]}, TypeError, "ids.*integer.*list"),
        ({"log_q": torch.ones(3)}, ValueError, r"log_q.*2.*\[3\]"),
        ({"log_q": torch.ones(2).long()}, TypeError, "log_q.*int64"),
        ({"log_q": 0.5}, TypeError, "log_q.*float"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_a_refused_push_leaves_the_queue_as_it_was(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    queue, model = fastcl.NegativeQueue(4, 3), ListQueue(4)
    push_both(queue, model, 0, 3, False, False)
    with pytest.raises(error, match=message):
        queue.push(**{"keys": torch.ones(2, 3), **arguments})
    assert_equal_to_model(queue, model)


@pytest.mark.parametrize("rows", [slice(1, None), slice(0, None, 2), slice(2, 4), slice(None)], ids=str)
@pytest.mark.parametrize("filled", [2, 5, 8])
def test_a_push_of_the_queues_own_rows(rows: slice, filled: int) -> None:
    queue = fastcl.NegativeQueue(5, 3)
    queue.push(keys_of([float(x) for x in range(filled)]), torch.arange(filled), -torch.arange(float(filled)))
    twin = copy.deepcopy(queue)
    own = queue.keys[rows], queue.ids[rows], queue.log_q[rows]
    wanted = twin.push(*(x.clone() for x in own))
    for a, b in zip(queue.push(*own), wanted, strict=True):
        assert torch.equal(a, b)
    for name, buffer in queue.named_buffers():
        assert torch.equal(buffer, twin.get_buffer(name))


@pytest.mark.parametrize(
    "keys",
    [
        torch.full((3, 3), float("nan")),
        torch.arange(9.0).reshape(3, 3).T,
        torch.arange(18.0).reshape(3, 6)[:, ::2],
        torch.ones(1, 3).expand(3, 3),
        torch.ones(3, 3, requires_grad=True),
        torch.ones(0, 3),
        torch.ones(3, 3, dtype=torch.float8_e4m3fn),
    ],
    ids=["NaN", "transposed", "strided", "expanded", "learning", "none", "float8"],
)
def test_any_kind_of_keys(keys: Tensor) -> None:
    queue = fastcl.NegativeQueue(4, 3)
    queue.push(keys_of([1.0, 2.0]))
    queue.push(keys)
    torch.testing.assert_close(queue.newest(len(keys)).keys, keys.detach().float(), equal_nan=True)
    assert not queue.keys.requires_grad


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"keys": torch.ones(2, 3, device="meta")}, ValueError, "keys: expected a device with content, got meta"),
        ({"ids": torch.ones(2, device="meta").long()}, ValueError, "ids: expected a device with content, got meta"),
        ({"keys": torch.ones(2, 3).to_sparse()}, TypeError, "keys: expected a dense tensor.*sparse"),
        ({"keys": torch.ones(2, 3, dtype=torch.complex64)}, TypeError, "keys.*complex64"),
    ],
    ids=["meta", "meta ids", "sparse", "complex"],
)
def test_a_refusal_by_kind_leaves_the_queue_as_it_was(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    queue, model = fastcl.NegativeQueue(4, 3), ListQueue(4)
    push_both(queue, model, 0, 3, False, False)
    with pytest.raises(error, match=message):
        queue.push(**{"keys": torch.ones(2, 3), **arguments})
    assert_equal_to_model(queue, model)
    assert queue.ids is None
