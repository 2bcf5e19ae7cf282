"""Whatever carries tensors carries a NegativeQueue whole: copies, files, state dicts, conversions, shared memory.

State dicts that do not fit are in test_queue_states.py, several processes in rank_modules.py, compiled code in
test_queue_compiled.py.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from list_queue import ListQueue, assert_equal_to_model, filled, keys_of, other_queue, push_both
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn, get_swa_avg_fn

import fastcl

Queue = fastcl.NegativeQueue


def _strictly(queue: Queue, folder: Path) -> Queue:
    other = other_queue()
    other.load_state_dict(queue.state_dict())
    return other


def _loosely(queue: Queue, folder: Path) -> Queue:
    other = other_queue()
    assert other.load_state_dict({**queue.state_dict(), "more": torch.zeros(1)}, strict=False).missing_keys == []
    return other


def _assigned(queue: Queue, folder: Path) -> Queue:
    with torch.device("meta"):
        other = Queue(5, 3)
    other.load_state_dict(copy.deepcopy(queue.state_dict()), assign=True)
    return other


def _by_torch_save(queue: Queue, folder: Path) -> Queue:
    torch.save(queue.state_dict(), folder / "queue.pt")
    return _strictly_from(torch.load(folder / "queue.pt", weights_only=True))


def _strictly_from(state: dict[str, Tensor]) -> Queue:
    other = other_queue()
    other.load_state_dict(state)
    return other


def _by_safetensors(queue: Queue, folder: Path) -> Queue:
    safetensors = pytest.importorskip("safetensors.torch", reason="needs the recsys extra (safetensors)")
    safetensors.save_file(queue.state_dict(), folder / "queue.safetensors")
    return _strictly_from(safetensors.load_file(folder / "queue.safetensors"))


def _by_distributed_checkpoint(queue: Queue, folder: Path) -> Queue:
    dcp.save({"model": queue.state_dict()}, checkpoint_id=folder, no_dist=True)
    other = other_queue()
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    other.load_state_dict(state["model"])
    return other


def _whole_module(queue: Queue, folder: Path) -> Queue:
    file = io.BytesIO()
    torch.save(queue, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _to_another_process(queue: Queue, folder: Path) -> Queue:
    """What spawn and torch.multiprocessing queues send: memory that both sides share."""
    return pickle.loads(bytes(ForkingPickler.dumps(queue)))


def _model(queue: Queue) -> torch.nn.ModuleList:
    return torch.nn.ModuleList([queue, torch.nn.Linear(1, 1)])


def _averaged(queue: Queue, folder: Path) -> Queue:
    averaged = AveragedModel(_model(other_queue(queue.capacity)))
    for other in (other_queue(queue.capacity), queue):
        averaged.update_parameters(_model(other))
    return averaged.module[0]


def _through_meta(queue: Queue, folder: Path) -> Queue:
    other = other_queue().to("meta").to_empty(device="cpu")
    assert len(other) == 0
    assert other.newest(5).keys.shape == (0, 3)
    other.load_state_dict(queue.state_dict())
    return other


def _functionally(queue: Queue, folder: Path) -> Queue:
    """A queue whose buffers are another's for the time of a call."""

    class Read(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.queue = other_queue()

        def forward(self) -> Queue:
            return copy.deepcopy(self.queue)

    return torch.func.functional_call(Read(), {f"queue.{name}": t for name, t in queue.named_buffers()}, ())


CARRIERS: dict[str, Callable[[Queue, Path], Queue]] = {
    "state dict": _strictly,
    "state dict, not strictly": _loosely,
    "state dict, assigned to meta": _assigned,
    "torch.save": _by_torch_save,
    "safetensors": _by_safetensors,
    "distributed checkpoint": _by_distributed_checkpoint,
    "deepcopy": lambda queue, folder: copy.deepcopy(queue),
    "pickle": lambda queue, folder: pickle.loads(pickle.dumps(queue)),
    "torch.save of the module": _whole_module,
    "another process": _to_another_process,
    "AveragedModel": _averaged,
    "meta and back": _through_meta,
    "functional_call": _functionally,
    "float64 and back": lambda queue, folder: copy.deepcopy(queue).double().float(),
    "16 bits and back": lambda queue, folder: copy.deepcopy(queue).half().to(torch.bfloat16).float(),
    "share_memory": lambda queue, folder: copy.deepcopy(queue).share_memory(),
    "apply": lambda queue, folder: copy.deepcopy(queue).apply(lambda module: module.requires_grad_(False).train()),
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("sizes", [(), (3,), (5,), (4, 4), (2, 9, 1)], ids=str)
@pytest.mark.parametrize("name", list(CARRIERS))
def test_carries_all_of_a_queue(name: str, sizes: tuple[int, ...], tmp_path: Path) -> None:
    queue, model = filled(5, *sizes)
    carried = CARRIERS[name](queue, tmp_path)
    assert_equal_to_model(carried, model)
    first = sum(sizes)
    if name == "another process":  # both are one queue
        push_both(carried, model, first, 3, True, True)
        assert_equal_to_model(queue, model)
        return
    kept = copy.deepcopy(model)
    push_both(carried, model, first, 3, True, True)  # goes on where the first was
    assert_equal_to_model(queue, kept)


def _push_there(queue: Queue) -> None:
    torch.set_num_threads(1)
    queue.push(keys_of([7.0, 8.0]), torch.tensor([107, 108]))


def test_a_queue_given_to_a_spawned_process_is_one_queue() -> None:
    queue, _ = filled(5, 4)
    process = torch.multiprocessing.get_context("spawn").Process(target=_push_there, args=(queue,))
    process.start()
    process.join(120)
    assert process.exitcode == 0
    assert len(queue) == 5
    assert queue.newest(3).ids.tolist() == [103, 107, 108]
    assert torch.equal(queue.newest(3).keys, keys_of([3.0, 7.0, 8.0]))


def test_a_push_under_another_default_device() -> None:
    (queue, _), keys = filled(5, 4), keys_of([4.0, 5.0])
    with torch.device("meta"):
        evicted = queue.push(keys)
        newest = queue.newest(2)
    assert evicted.keys[:, 0].tolist() == [0.0]
    assert newest.keys[:, 0].tolist() == [4.0, 5.0]
    assert len(queue) == 5


AVERAGES: dict[str, dict[str, Any]] = {
    "SWA": {},
    "SWA, one by one": {"avg_fn": get_swa_avg_fn()},
    "EMA": {"multi_avg_fn": get_ema_multi_avg_fn(0.999)},
    "EMA, one by one": {"avg_fn": get_ema_avg_fn(0.999)},
}


@pytest.mark.parametrize("name", list(AVERAGES))
def test_an_average_of_buffers_is_refused_where_rows_are_mixed(name: str) -> None:
    queue, _ = filled(5, 4)
    averaged = AveragedModel(_model(queue), use_buffers=True, **AVERAGES[name])
    averaged.update_parameters(_model(queue))
    assert torch.equal(averaged.module[0].keys, queue.keys), "the first update copies"
    queue.push(keys_of([9.0]), torch.tensor([20]))
    averaged.update_parameters(_model(queue))
    mixed = averaged.module[0]
    for read in (
        lambda: mixed.keys,
        lambda: len(mixed),
        lambda: mixed.newest(1),
        lambda: mixed.push(keys_of([1.0])),
        lambda: fastcl.infonce(torch.ones(2, 3), torch.ones(2, 3), queue=mixed),
    ):
        with pytest.raises(RuntimeError, match="queue: expected what pushes leave behind, got an average"):
            read()
    repr(averaged)
    again = AveragedModel(_model(other_queue()))
    again.load_state_dict(averaged.state_dict())  # the rest of an averaged model is not to be lost by it
    with pytest.raises(RuntimeError, match="got an average"):
        len(again.module[0])
    mixed.load_state_dict(queue.state_dict())
    assert torch.equal(mixed.keys, queue.keys)


def test_averages_are_told_apart_at_every_weight() -> None:
    queue = Queue(4, 1)
    for weight in (0.5, 0.1, 1e-3, 1e-5):
        for _ in range(50):
            before = queue._counters.clone()
            queue.push(torch.ones(1, 1))
            mixed = copy.deepcopy(queue)
            mixed._counters.copy_((before.double() * (1 - weight) + queue._counters.double() * weight).long())
            with pytest.raises(RuntimeError, match="average"):
                len(mixed)


def test_memory_that_was_never_written_is_no_queue() -> None:
    queue, _ = filled(5, 4)
    queue.to_empty(device="cpu")
    assert len(queue) == 0
    fresh, model = filled(5, 3)
    fresh.reset_parameters()
    assert_equal_to_model(fresh, ListQueue(5))
    push_both(fresh, ListQueue(5), 0, 7, False, False)
    fresh._counters.fill_(77)
    with pytest.raises(RuntimeError, match="memory never written"):
        len(fresh)


def test_conversions_keep_ids_and_log_q() -> None:
    queue = Queue(4, 3)
    ids, log_q = torch.tensor([2**53 + 1, 7]), torch.tensor([-1.0009765625, -17.123])
    queue.push(keys_of([1.0, 2.0]), ids, log_q)
    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.float32):
        queue.to(dtype)
        assert queue.keys.dtype == dtype
        assert torch.equal(queue.ids, ids)
        assert torch.equal(queue.log_q, log_q)


@given(old=st.integers(1, 7), new=st.integers(1, 7), sizes=st.lists(st.integers(0, 9), max_size=4), ids=st.booleans())
@settings(max_examples=60)
def test_another_capacity_keeps_the_newest_that_fit(old: int, new: int, sizes: list[int], ids: bool) -> None:
    queue, model, first = Queue(old, 3), ListQueue(old), 0
    for size in sizes:
        push_both(queue, model, first, size, ids, not ids)
        first += size
    other = other_queue(new)
    other.load_state_dict(queue.state_dict())
    expected = ListQueue(new)
    expected.push(list(model.entries))
    expected.has_ids, expected.has_log_q = model.has_ids, model.has_log_q
    assert_equal_to_model(other, expected)
    push_both(other, expected, first, 2, True, False)


OPERATIONS = st.sampled_from(["push", "push", "push", "load", "copy", "average", "mix", "convert", "torn", "overlap"])


def _operate(queue: Queue, model: ListQueue, operation: str, first: int, draw: Callable[..., Any]) -> Queue:
    if operation == "push":
        push_both(queue, model, first, draw(st.integers(0, 9)), draw(st.booleans()), draw(st.booleans()))
    elif operation == "load":
        other = other_queue(draw(st.integers(1, 7)))
        other.load_state_dict(queue.state_dict())
        model.capacity = other.capacity
        model.push([])
        return other
    elif operation == "copy":
        return draw(st.sampled_from([copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]))(queue)
    elif operation == "average":
        return _averaged(queue, Path())
    elif operation == "mix":
        averaged = AveragedModel(_model(copy.deepcopy(queue)), use_buffers=True)
        averaged.update_parameters(_model(queue))
        queue.push(torch.zeros(0, 3))
        averaged.update_parameters(_model(queue))
        with pytest.raises(RuntimeError, match="average"):
            len(averaged.module[0])
    elif operation == "convert":
        queue.to(draw(st.sampled_from([torch.float64, torch.float32])))
    elif operation == "torn":
        with pytest.raises((TypeError, ValueError)):
            queue.push(torch.ones(3, 3), draw(st.sampled_from([torch.ones(2).long(), torch.ones(3), [1, 2, 3]])))
    elif operation == "overlap" and len(queue):
        rows = slice(draw(st.integers(0, 2)), None, draw(st.integers(1, 2)))
        keys, ids = queue.keys[rows], None if queue.ids is None else queue.ids[rows]
        wanted = keys.clone(), None if ids is None else ids.clone()
        twin = copy.deepcopy(queue)
        queue.push(keys, ids)
        twin.push(*wanted)
        for a, b in zip(queue.newest(9), twin.newest(9), strict=True):
            assert (a is None and b is None) or torch.equal(a, b)
        queue.reset_parameters()
        model.entries.clear()
        model.has_ids = model.has_log_q = False
    return queue


def _play(data: st.DataObject, length: int) -> None:
    capacity = data.draw(st.integers(1, 7))
    queue, model = Queue(capacity, 3), ListQueue(capacity)
    for step, operation in enumerate(data.draw(st.lists(OPERATIONS, max_size=length))):
        queue = _operate(queue, model, operation, 10 * step, data.draw)
        assert_equal_to_model(queue, model)


@given(data=st.data())
@settings(max_examples=40)
def test_any_sequence_of_operations(data: st.DataObject) -> None:
    _play(data, 8)


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=3000)
def test_any_long_sequence_of_operations(data: st.DataObject) -> None:
    _play(data, 25)
