"""NegativeQueue: a ring buffer of encoded keys that serve as negatives. It computes no loss and no gradient.

All state of a queue is in its buffers and none in Python numbers, so that code which copies, sends, shares or captures
tensors handles the whole queue. There are two ways to read a queue, with equal values:
- On the CPU, outside code that is compiled, traced or transformed, the counters are read as numbers, and a loss sees
  the filled slots.
- Elsewhere reading a number would wait for the device or make the number a constant of a graph. A loss then sees every
  slot; an empty slot has log q = inf, hence the bias -inf, which takes it out of the sum.
"""

import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastcl.checks import INTEGERS
from fastcl.checks import readable as _at_hand
from fastcl.queue_state import (
    EMPTY,
    FLOATS,
    NAMES,
    NO_ID,
    Counters,
    State,
    at_most,
    empty,
    fitted,
    found,
    leftover,
)

_SIZE, _SEAL = (Counters._fields.index(name) for name in ("size", "seal"))


class Columns(NamedTuple):
    """The columns that a loss reads from a queue."""

    keys: Tensor  # [M, D]
    ids: Tensor | None  # [M]
    log_q: Tensor | None  # [M]
    held: Tensor | None = None  # [], how many of the M columns are entries; all others have log q inf. None: all M


class Evicted:
    """Entries of a queue, oldest first: those that a push evicted, or copies of the newest. Losses take them in place
    of a queue. `ids` and `log_q` are None where the queue holds none.

    The number of entries is on the queue's device: reading keys, ids, log_q or the length waits for a GPU, but passing
    the entries to a loss does not.
    """

    def __init__(self, rows: State, source: "NegativeQueue") -> None:
        self._rows = rows  # the entries are the last `size` rows
        self._source = source

    def _entries(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        keys, ids, log_q, counters = self._rows
        numbers = Counters(*counters.tolist())
        first = keys.shape[0] - numbers.size
        return keys[first:], ids[first:] if numbers.has_ids else None, log_q[first:] if numbers.has_log_q else None

    @property
    def keys(self) -> Tensor:
        """[E, D]"""
        return self._entries()[0]

    @property
    def ids(self) -> Tensor | None:
        """[E], int64"""
        return self._entries()[1]

    @property
    def log_q(self) -> Tensor | None:
        """[E], float32"""
        return self._entries()[2]

    def __iter__(self) -> Iterator[Tensor | None]:
        return iter(self._entries())

    def __len__(self) -> int:
        return self.keys.shape[0]

    def columns(self, corrected: bool) -> Columns:
        """As `NegativeQueue.columns`."""
        keys, ids, log_q, counters = self._rows
        if _at_hand(counters):
            return Columns(*self._entries())
        self._source._refuse_log_q(corrected)
        return Columns(keys, ids, log_q, counters[_SIZE])


class NegativeQueue(nn.Module):
    """The newest `capacity` keys pushed, as frozen negatives (MoCo, He et al. 2020; CLRec, Zhou et al. 2021).

    A queue begins empty, and slots that were never filled are no negatives. Losses read the queue and never push. Push
    in the training step, after the loss (which has the batch's own keys already) or before it. A push between forward
    and backward changes no gradient, since frozen keys take no part in the backward pass.

    All state is in buffers, so that copies, state dicts, DistributedDataParallel's broadcasts, shared memory and
    captured graphs hold the whole queue. Losses and pushes never wait for a GPU; `len`, `keys`, `ids` and `log_q` do.
    Loading a state dict of another capacity keeps the newest rows that fit. A state dict that differs otherwise raises
    RuntimeError and leaves the queue as it was. Under torch.compile losses and pushes need one graph for all fillings.
    An average of a queue's buffers over several steps (`AveragedModel(use_buffers=True)`) is no queue: reading it is a
    RuntimeError, and in compiled code and on a GPU its loss is NaN.

    In MoCo keys come from a second encoder that follows the first (`fastcl.momentum.momentum_update`). With several
    processes, `fastcl.distributed.push` keeps the queues of all ranks equal, and `fastcl.distributed.keep_local` keeps
    DistributedDataParallel from overwriting queues that each rank fills itself.

    Args:
        capacity: the most keys that the queue holds, >= 1.
        dim: features per key, >= 1.
        dtype: float64, float32, bfloat16 or float16; pushed keys are converted to it.

    >>> import torch
    >>> queue = NegativeQueue(capacity=3, dim=2)
    >>> _ = queue.push(torch.arange(4.0).reshape(2, 2))
    >>> evicted = queue.push(torch.arange(4.0, 8.0).reshape(2, 2))
    >>> len(queue), evicted.keys.tolist()
    (3, [[0.0, 1.0]])
    """

    _keys: Tensor
    _ids: Tensor
    _log_q: Tensor
    _counters: Tensor

    def __init__(self, capacity: int, dim: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for name, value in (("capacity", capacity), ("dim", dim)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
            if value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")
        if dtype not in FLOATS:
            raise TypeError(f"dtype: expected float64, float32, bfloat16 or float16, got {dtype}")
        for name, buffer in zip(NAMES, empty(capacity, dim, dtype), strict=True):
            self.register_buffer(name, buffer)
        # Whether this process has pushed with log q and without it. Only error checks use these flags, where the
        # counters cannot be read; no value depends on them.
        self._with_log_q = self._without_log_q = False

    def reset_parameters(self) -> None:
        """Empties the queue. Module initialisers call a method of this name after `to_empty`."""
        for buffer, value in zip(self._state(), (0.0, NO_ID, EMPTY, 0), strict=True):
            buffer.fill_(value)
        self._with_log_q = self._without_log_q = False

    @property
    def capacity(self) -> int:
        return self._keys.shape[0]

    @property
    def dim(self) -> int:
        return self._keys.shape[1]

    def __len__(self) -> int:
        return self._numbers().size

    @property
    def keys(self) -> Tensor:
        """[len, D], a view of the filled slots in no particular order."""
        return self._keys[: self._numbers().size]

    @property
    def ids(self) -> Tensor | None:
        """[len], int64, a view; None until a push brings ids. Entries without one hold `NO_ID`, which equals no id."""
        numbers = self._numbers()
        return self._ids[: numbers.size] if numbers.has_ids else None

    @property
    def log_q(self) -> Tensor | None:
        """[len], float32, log sampling probabilities, a view; None until a push brings some. Entries without hold 0."""
        numbers = self._numbers()
        return self._log_q[: numbers.size] if numbers.has_log_q else None

    def columns(self, corrected: bool) -> Columns:
        """The columns that a loss reads: the entries where the counters can be read, else every slot. corrected:
        whether the loss has a log q for its positives; ValueError where pushes are known to have differed in that.
        """
        if _at_hand(self._counters):
            numbers = self._numbers()
            keys, ids, log_q = (buffer[: numbers.size] for buffer in (self._keys, self._ids, self._log_q))
            return Columns(keys, ids if numbers.has_ids else None, log_q if numbers.has_log_q else None)
        self._refuse_log_q(corrected)
        return Columns(self._keys, self._ids, self._whole_log_q(), self._counters[_SIZE])

    @torch.no_grad()
    def push(self, keys: Tensor, ids: Tensor | None = None, log_q: Tensor | None = None) -> Evicted:
        """Appends keys [B, D] (B may exceed the capacity), ids [B] (any integer dtype) and log_q [B]; returns the
        evicted entries.

        Of a batch larger than the capacity the first keys are returned among the evicted entries. Arguments may be
        views of the queue's own rows. TypeError and ValueError leave the queue as it was.
        """
        self._check(keys, ids, log_q)
        before = self._counted()
        count, capacity = keys.shape[0], self.capacity
        new = [
            buffer.new_full((count,), missing) if given is None else given.detach().to(buffer, copy=True)
            for buffer, given, missing in ((self._keys, keys, 0.0), (self._ids, ids, NO_ID), (self._log_q, log_q, 0.0))
        ]
        # No error is raised from here on, so that a refused push leaves the queue as it was.
        kept = capacity if count > capacity else count  # min() would leave a guard in a graph for any B
        slots = (torch.arange(kept, device=self._keys.device) + before.head) % capacity
        # The slots to be written are first the free ones, then those of the oldest entries.
        evicted = [buffer.index_select(0, slots) for buffer in (self._keys, self._ids, self._whole_log_q())]
        if count > kept:
            evicted = [torch.cat([old, x[: count - kept]]) for old, x in zip(evicted, new, strict=True)]
        left, after = before.pushed(count, kept, capacity, ids is not None, log_q is not None)
        out = State(evicted[0], evicted[1], evicted[2], left.tensor())
        for buffer, x in zip((self._keys, self._ids, self._log_q), new, strict=True):
            buffer.index_copy_(0, slots, x[count - kept :])
        self._counters.copy_(after.tensor())
        if log_q is not None:
            self._with_log_q = True
        else:
            self._without_log_q = True
        return Evicted(out, self)

    @torch.no_grad()
    def newest(self, count: int) -> Evicted:
        """Copies of the newest `count` entries, or of all of fewer entries. Losses take them in place of a queue."""
        if isinstance(count, bool) or not isinstance(count, int):
            raise TypeError(f"count: expected an int, got {type(count).__name__}")
        if count < 0:
            raise ValueError(f"count: expected at least 0, got {count}")
        numbers = self._counted()
        count = min(count, self.capacity)
        slots = (torch.arange(count, device=self._keys.device) + (numbers.head - count)) % self.capacity
        keys, ids, log_q = (x.index_select(0, slots) for x in (self._keys, self._ids, self._whole_log_q()))
        held = numbers._replace(size=at_most(numbers.size, count))
        return Evicted(State(keys, ids, log_q, held.tensor()), self)

    def _state(self) -> State:
        return State(self._keys, self._ids, self._log_q, self._counters)

    def _counted(self) -> Counters:
        """The counters as ints where they can be read (RuntimeError for buffers of no valid queue), else as tensors."""
        return self._numbers() if _at_hand(self._counters) else Counters(*self._counters.unbind())

    def _numbers(self) -> Counters:
        numbers = Counters(*self._counters.tolist())
        if not (numbers.whole() and numbers.fit(self.capacity)):
            raise RuntimeError(
                "queue: expected what pushes leave behind, got an average or memory never written "
                "(AveragedModel(use_buffers=True) mixes rows and ids of several moments, to_empty() fills nothing); "
                "load a queue's state dict or call reset_parameters()"
            )
        return numbers

    def _whole_log_q(self) -> Tensor:
        """log q of every slot; NaN where the buffers are no valid queue, which cannot be raised as an error here."""
        if _at_hand(self._counters):
            return self._log_q
        seal, square = self._counters[_SEAL:].unbind()
        return torch.where(seal * seal == square, self._log_q, torch.nan)

    def _refuse_log_q(self, corrected: bool) -> None:
        """The check of rows.py for a log q that only some columns have, where the columns cannot be inspected."""
        # The order of the tests matters: a correct program reads no flag that changes, which would need another graph.
        lacks = corrected and self._without_log_q and not self._with_log_q
        if lacks or (not corrected and self._with_log_q):
            raise ValueError(
                "log_q: expected for the positive and every source of negatives, or for none, got it for some"
            )

    def _check(self, keys: Tensor, ids: Tensor | None, log_q: Tensor | None) -> None:
        if not isinstance(keys, Tensor) or not keys.is_floating_point():
            raise TypeError(f"keys: expected a floating tensor, got {getattr(keys, 'dtype', type(keys).__name__)}")
        if keys.dim() != 2 or keys.shape[1] != self.dim:
            raise ValueError(f"keys: expected shape [*, {self.dim}], got {list(keys.shape)}")
        rows = keys.shape[0]
        if ids is not None:
            if not isinstance(ids, Tensor) or ids.dtype not in INTEGERS:
                came = getattr(ids, "dtype", type(ids).__name__)
                raise TypeError(f"ids: expected a tensor of an integer dtype, got {came}")
            if ids.shape != (rows,):
                raise ValueError(f"ids: expected shape [{rows}], got {list(ids.shape)}")
        if log_q is not None:
            if not isinstance(log_q, Tensor) or not log_q.is_floating_point():
                raise TypeError(
                    f"log_q: expected a floating tensor, got {getattr(log_q, 'dtype', type(log_q).__name__)}"
                )
            if log_q.shape != (rows,):
                raise ValueError(f"log_q: expected shape [{rows}], got {list(log_q.shape)}")
        for name, t in (("keys", keys), ("ids", ids), ("log_q", log_q)):
            if t is not None and t.layout != torch.strided:
                raise TypeError(f"{name}: expected a dense tensor, got layout {t.layout}")
            if t is not None and t.is_meta and not self._keys.is_meta:
                raise ValueError(f"{name}: expected a device with content, got meta")

    def _apply(self, fn: Any, recurse: bool = True) -> "NegativeQueue":
        log_q, counters = self._log_q, self._counters
        super()._apply(fn, recurse)
        if self._log_q.dtype != torch.float32:
            self._log_q = log_q.to(self._log_q.device)  # stays float32 whatever dtype the keys are converted to
        moved = self._counters
        if moved is counters or moved.is_meta or type(moved) is not Tensor:
            return self
        if counters.is_meta or not torch.equal(counters.to(moved.device), moved):
            self.reset_parameters()  # after to_empty the memory is uninitialised
        return self

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        for hook in self._load_state_dict_pre_hooks.values():
            hook(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        entries = {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}
        held, missing = found(entries)
        missing_keys += [prefix + name for name in missing]
        unexpected_keys += [prefix + name for name in leftover(entries)]
        if missing:
            return  # a part of a state cannot be loaded; the missing names are reported
        try:
            state, numbers = fitted(held, self.capacity, self.dim)
        except ValueError as error:
            error_msgs.append(f"{prefix.removesuffix('.') or 'queue'}: {error}")
            return
        assign = local_metadata.get("assign_to_params_buffers", False)
        if self._keys.is_meta and not assign:
            warnings.warn(f"{prefix}: a queue on the meta device takes a state by assign=True only", stacklevel=2)
        # Without gradient, whatever the state dict's tensors have: a queue is no part of a graph.
        with torch.no_grad():
            for name, buffer, value in zip(NAMES, self._state(), state, strict=True):
                if assign:
                    setattr(self, name, value.detach())
                else:
                    buffer.copy_(value)
        self._with_log_q = bool(numbers and numbers.has_log_q)
        self._without_log_q = bool(numbers and numbers.size and not numbers.has_log_q)

    def extra_repr(self) -> str:
        held = f"len={Counters(*self._counters.tolist()).size}, " if _at_hand(self._counters) else ""
        return f"capacity={self.capacity}, dim={self.dim}, {held}dtype={self._keys.dtype}"
