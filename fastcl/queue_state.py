"""The state of a queue: checks of a saved state, and its conversion to another capacity. No push and no loss here.

The state is four tensors, so that all code that handles tensors handles a queue: keys, ids and log q, which have one
row per slot, and the counters.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

# The id of an entry that was pushed without one; no pushed id may have this value.
NO_ID = torch.iinfo(torch.int64).min
# The log q of a slot that was never filled. The bias of its logit, -log q, takes the column out of a sum.
EMPTY = torch.inf
_FORMER = "_extra_state"  # the counters in state dicts of an older layout: four numbers without a seal
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Counters(NamedTuple):
    """The six counters: ints where they can be read, else 0-d int64 tensors on the queue's device. The arithmetic below
    works for both.

    `seal` and `square` tell a queue from an average of its buffers over several steps. Every push changes the seal by a
    large step and stores its square; the square of an average of seals differs from the average of their squares.
    """

    head: Any  # the slot that the next key goes to; filled slots are always the first `size`
    size: Any  # the number of filled slots
    has_ids: Any  # 1 if a push has brought ids, else 0
    has_log_q: Any  # 1 if a push has brought log q, else 0
    seal: Any = 0
    square: Any = 0

    def whole(self) -> bool:
        """Whether the seal shows a queue, not an average or uninitialised memory."""
        return self.seal * self.seal == self.square

    def fit(self, capacity: int) -> bool:
        """Whether pushes into a queue of this capacity can give these counters."""
        head = self.size if self.size < capacity else self.head
        return 0 <= self.head < capacity and 0 <= self.size <= capacity and self.head == head

    def pushed(self, count: int, kept: int, capacity: int, ids: bool, log_q: bool) -> tuple["Counters", "Counters"]:
        """The counters of the evicted entries, and of the queue, after a push of `count` keys of which `kept` stay."""
        has = {"has_ids": self.has_ids | ids, "has_log_q": self.has_log_q | log_q}
        size = at_most(self.size + count, capacity)
        # A linear congruential generator with period 2^24 makes large steps from the first one on.
        seal = (self.seal * 69069 + 5432103) % (1 << 24)
        square = seal * seal + (self.square - self.seal * self.seal)  # invalid counters stay invalid
        head = (self.head + kept) % capacity
        return self._replace(size=self.size + count - size, **has), Counters(
            head, size, **has, seal=seal, square=square
        )

    def tensor(self) -> Tensor:
        """int64 [6]"""
        if isinstance(self.seal, Tensor):
            return torch.stack(self)
        return torch.tensor(self, dtype=torch.int64, device="cpu")


def at_most(x: Any, bound: int) -> Any:
    """min(x, bound) of an int or of a 0-d tensor, without reading its value."""
    over = x - bound
    return x - over * (over > 0)


class State(NamedTuple):
    """A queue's buffers without the underscores of their names."""

    keys: Tensor  # [capacity, D]
    ids: Tensor  # int64 [capacity]
    log_q: Tensor  # [capacity]
    counters: Tensor  # int64 [6]


NAMES = tuple(f"_{name}" for name in State._fields)


def empty(capacity: int, dim: int, dtype: torch.dtype, device: torch.device | None = None) -> State:
    return State(
        torch.zeros(capacity, dim, dtype=dtype, device=device),
        torch.full((capacity,), NO_ID, device=device, dtype=torch.int64),
        torch.full((capacity,), EMPTY, dtype=torch.float32, device=device),
        torch.zeros(len(Counters._fields), dtype=torch.int64, device=device),
    )


def found(entries: Mapping[str, object]) -> tuple[dict[str, object], list[str]]:
    """The entries of a queue's state in the part of a state dict for the queue, and the names of missing entries."""
    held = {name: entries[name] for name in NAMES if name in entries}
    former = entries.get(_FORMER)
    if former is not None and NAMES[-1] not in held:
        held[NAMES[-1]] = former
    return held, [name for name in NAMES if name not in held]


def leftover(entries: Mapping[str, object]) -> list[str]:
    """The names in a state dict that belong to no queue state."""
    return [name for name in entries if name not in (*NAMES, _FORMER)]


def fitted(entries: Mapping[str, object], capacity: int, dim: int) -> tuple[State, Counters | None]:
    """A saved state of any capacity converted to `capacity`, with the newest rows that fit, and its counters as numbers
    where they can be read. ValueError, which says what was expected and what came, for entries that are no queue state.
    """
    saved = _checked(entries, capacity, dim)
    was = saved.keys.shape[0]
    if saved.counters.is_meta:
        if was != capacity:
            raise ValueError(f"expected a state with numbers for another capacity ({was}, here {capacity}), got meta")
        return saved, None
    numbers = Counters(*saved.counters.tolist())
    if not numbers.whole():
        # An average (see NegativeQueue) is loaded as it is, so that the rest of its model loads; reading it raises.
        if was != capacity:
            raise ValueError(f"expected a queue of capacity {capacity}, got one of {was} that was averaged")
        return saved, None
    if not numbers.fit(was):
        raise ValueError(f"expected counters of capacity {was}, got head {numbers.head} and size {numbers.size}")
    count = min(numbers.size, capacity)
    if was == capacity:
        first, head = 0, numbers.head  # slots keep their places, so that a restored queue continues identically
    else:
        first, head = numbers.head - count, count % capacity
    state = empty(capacity, dim, saved.keys.dtype, saved.keys.device)
    rows = (first + torch.arange(count, device=saved.keys.device)) % was
    for new, old in zip(state[:3], saved[:3], strict=True):
        new[:count] = old[rows].to(new)
    numbers = numbers._replace(head=head, size=count)
    state.counters.copy_(torch.tensor(numbers, device=saved.keys.device))
    return state, numbers


def _checked(entries: Mapping[str, object], capacity: int, dim: int) -> State:
    saved: list[Tensor] = []
    for name in NAMES:
        value = entries[name]
        if not isinstance(value, Tensor):
            raise ValueError(f"{name}: expected a tensor, got {type(value).__name__}")
        saved.append(value)
    keys, ids, log_q, counters = saved
    if keys.dim() != 2 or keys.shape[0] < 1 or keys.shape[1] != dim or keys.dtype not in FLOATS:
        raise ValueError(
            f"_keys: expected floating keys of {dim} features (here for a capacity of {capacity}), got shape "
            f"{list(keys.shape)} of {keys.dtype}"
        )
    rows = keys.shape[0]
    for name, value, integer in (("_ids", ids, True), ("_log_q", log_q, False)):
        if value.shape != (rows,) or (value.dtype != torch.int64 if integer else value.dtype not in FLOATS):
            kind = "int64" if integer else "floating"
            raise ValueError(f"{name}: expected {kind} [{rows}], got {value.dtype} {list(value.shape)}")
    if counters.dtype != torch.int64 or counters.shape not in ((len(Counters._fields),), (4,)):
        raise ValueError(
            f"_counters: expected int64 [{len(Counters._fields)}], got {counters.dtype} {list(counters.shape)}"
        )
    return State(keys, ids, log_q, counters)
