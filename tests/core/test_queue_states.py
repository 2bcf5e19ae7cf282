"""State dicts that a NegativeQueue of this size did not write: with an extra state, damaged, of another size, in parts.

What fits is carried whole: test_queue_carriers.py.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from list_queue import assert_equal_to_model, filled, keys_of, other_queue, push_both
from torch import Tensor

import fastcl

Queue = fastcl.NegativeQueue


def _former(head: int, size: int, capacity: int, has_ids: bool = True) -> dict[str, Tensor]:
    """A state dict with its counters in an extra state, and rows of zeros where nothing was pushed."""
    keys, ids = torch.zeros(capacity, 3), torch.full((capacity,), fastcl.negatives.NO_ID)
    keys[:size], ids[:size] = keys_of([float(x) for x in range(size)]), torch.arange(size)
    extra = torch.tensor([head, size, has_ids, False], dtype=torch.int64)
    return {"_keys": keys, "_ids": ids, "_log_q": torch.zeros(capacity), "_extra_state": extra}


@pytest.mark.parametrize("capacity", [3, 5, 8])
@pytest.mark.parametrize(("head", "size"), [(0, 0), (2, 2), (3, 5)])
def test_state_dicts_with_an_extra_state_are_loaded(head: int, size: int, capacity: int) -> None:
    other = other_queue(capacity)
    other.load_state_dict(_former(head, size, 5))
    order = [(head - size + x) % 5 for x in range(size)][-capacity:]
    assert other.newest(capacity).keys[:, 0].tolist() == order
    assert other.newest(capacity).ids.tolist() == order
    assert other.log_q is None
    assert (other._log_q == torch.inf).sum() == capacity - len(order), "empty slots are marked"


GOOD = filled(4, 6)[0].state_dict()
DAMAGED: dict[str, dict[str, Any]] = {
    "a size above the capacity": {"_counters": torch.tensor([1, 5, 1, 1, 0, 0])},
    "a negative head": {"_counters": torch.tensor([-1, 4, 1, 1, 0, 0])},
    "a head that no push leads to": {"_counters": torch.tensor([3, 2, 1, 1, 0, 0])},
    "counters of another length": {"_counters": torch.zeros(3, dtype=torch.int64)},
    "counters of another type": {"_counters": torch.zeros(6)},
    "another dim": {"_keys": torch.zeros(4, 2)},
    "keys that are integers": {"_keys": torch.zeros(4, 3, dtype=torch.int64)},
    "fewer ids": {"_ids": torch.zeros(3, dtype=torch.int64)},
    "ids that are floats": {"_ids": torch.zeros(4)},
    "more log q": {"_log_q": torch.zeros(5)},
    "a list": {"_keys": [[0.0] * 3] * 4},
    "former counters beyond": {"_counters": None, "_extra_state": torch.tensor([0, 8, 0, 0])},
}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", list(DAMAGED))
def test_a_damaged_state_is_refused_and_changes_nothing(name: str, strict: bool) -> None:
    queue, model = filled(5, 3)
    state = {key: value for key, value in {**GOOD, **DAMAGED[name]}.items() if value is not None}
    with pytest.raises(RuntimeError, match=r"queue: (_\w+: )?expected .*, got "):
        queue.load_state_dict(state, strict=strict)
    assert_equal_to_model(queue, model)
    push_both(queue, model, 3, 4, True, False)


def test_another_dim_names_both_shapes() -> None:
    with pytest.raises(RuntimeError, match=r"memory: .*3 features .*capacity of 5.*\[8, 2\]"):
        torch.nn.ModuleDict({"memory": Queue(5, 3)}).load_state_dict(
            {f"memory.{name}": t for name, t in Queue(8, 2).state_dict().items()}
        )


@pytest.mark.parametrize("part", [*GOOD, "fitting"])
def test_a_part_of_a_state_is_missing_and_changes_nothing(part: str) -> None:
    queue, model = filled(5, 3)
    own = queue.state_dict()
    if part == "fitting":  # what helpers that skip other shapes pass on
        state = {key: value for key, value in GOOD.items() if own[key].shape == value.shape}
    else:
        state = {key: value for key, value in GOOD.items() if key != part}
    missing = sorted(GOOD.keys() - state.keys())
    assert sorted(queue.load_state_dict(state, strict=False).missing_keys) == missing
    assert_equal_to_model(queue, model)
    with pytest.raises(RuntimeError, match=f"Missing key.*{missing[0]}"):
        queue.load_state_dict(state)
    assert_equal_to_model(queue, model)


def test_keys_that_no_queue_has_are_unexpected() -> None:
    queue, _ = filled(4, 3)
    with pytest.raises(RuntimeError, match='Unexpected key.*"_more"'):
        queue.load_state_dict({**GOOD, "_more": torch.zeros(1)})
    assert queue.load_state_dict({**GOOD, "_more": torch.zeros(1)}, strict=False).unexpected_keys == ["_more"]


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_with_gradients_leaves_none_in_the_queue(assign: bool) -> None:
    state = {name: x.clone().requires_grad_(x.is_floating_point()) for name, x in GOOD.items()}
    state["_keys"] = state["_keys"] * 1.0
    queue = other_queue(4)
    queue.load_state_dict(state, assign=assign)
    assert not any(buffer.requires_grad for buffer in queue.buffers())
    assert torch.equal(copy.deepcopy(queue)._keys, GOOD["_keys"])
