"""NegativeQueue: a ring buffer of encoded keys that serve as negatives. It computes no loss and no gradient."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

# The id of an entry pushed without one; no other id may take this value.
NO_ID = torch.iinfo(torch.int64).min
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Evicted(NamedTuple):
    """Entries of a queue, oldest first: what a push drove out, or a copy of the newest ones. `ids` and `log_q` are None
    where the queue holds none.
    """

    keys: Tensor  # [E, D]
    ids: Tensor | None  # [E]
    log_q: Tensor | None  # [E]


class NegativeQueue(nn.Module):
    """The newest `capacity` keys pushed, as frozen negatives (MoCo, He et al. 2020; CLRec, Zhou et al. 2021).

    Starts empty: slots that were never filled are no negatives. Losses read the queue and never push; push in the
    training step, after the loss (the batch's own keys are already in it) or before. Pushing between forward and
    backward changes no gradient, because frozen keys take no part in backward. Everything is in the state dict, as
    tensors, and restored exactly.

    MoCo's keys come from a second encoder that follows the first: `fastcl.momentum.momentum_update`. With several
    processes, `fastcl.distributed.push` keeps the ranks' queues alike, and `fastcl.distributed.keep_local` keeps
    DistributedDataParallel away from queues that each rank fills itself.

    Args:
        capacity: number of keys held at most, >= 1.
        dim: features per key, >= 1.
        dtype: float64, float32, bfloat16 or float16; pushed keys are converted to it.

    >>> import torch
    >>> queue = NegativeQueue(capacity=3, dim=2)
    >>> _ = queue.push(torch.arange(4.0).reshape(2, 2))
    >>> evicted = queue.push(torch.arange(4.0, 8.0).reshape(2, 2))
    >>> len(queue), evicted.keys.tolist()
    (3, [[0.0, 1.0]])
    """

    def __init__(self, capacity: int, dim: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for name, value in (("capacity", capacity), ("dim", dim)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
            if value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")
        if dtype not in _FLOATS:
            raise TypeError(f"dtype: expected float64, float32, bfloat16 or float16, got {dtype}")
        self.register_buffer("_keys", torch.zeros(capacity, dim, dtype=dtype))
        self.register_buffer("_ids", torch.full((capacity,), NO_ID))
        self.register_buffer("_log_q", torch.zeros(capacity))
        self._keys: Tensor
        self._ids: Tensor
        self._log_q: Tensor
        # Plain numbers, not buffers: reading them on a GPU would wait for it. They travel as the state dict's extra
        # state.
        self._head = 0  # where the next key goes; valid rows are always the first `_size`
        self._size = 0
        self._has_ids = False
        self._has_log_q = False

    @property
    def capacity(self) -> int:
        return self._keys.shape[0]

    @property
    def dim(self) -> int:
        return self._keys.shape[1]

    def __len__(self) -> int:
        return self._size

    @property
    def keys(self) -> Tensor:
        """[len, D], a view of the valid rows in no particular order."""
        return self._keys[: self._size]

    @property
    def ids(self) -> Tensor | None:
        """[len], int64, a view; None until a push brought ids. Entries without one hold `NO_ID` and match nothing."""
        return self._ids[: self._size] if self._has_ids else None

    @property
    def log_q(self) -> Tensor | None:
        """[len], float32, a view; None until a push brought log sampling probabilities. Entries without one hold 0."""
        return self._log_q[: self._size] if self._has_log_q else None

    @torch.no_grad()
    def push(self, keys: Tensor, ids: Tensor | None = None, log_q: Tensor | None = None) -> Evicted:
        """Appends keys [B, D] (any B, also above the capacity), ids [B] (int64) and log_q [B]; returns what fell out.

        Of a batch larger than the capacity the first keys pass straight through and are returned among the evicted.
        """
        self._check(keys, ids, log_q)
        self._has_ids |= ids is not None
        self._has_log_q |= log_q is not None
        new_ids = self._ids.new_full((len(keys),), NO_ID) if ids is None else ids
        new_log_q = self._log_q.new_zeros(len(keys)) if log_q is None else log_q
        through = max(0, len(keys) - self.capacity)
        out = max(0, self._size + len(keys) - self.capacity) - through
        first = (self._head - self._size) % self.capacity
        evicted = [
            torch.cat([*_ring(buffer, first, out), new[:through].to(buffer)])
            for buffer, new in ((self._keys, keys), (self._ids, new_ids), (self._log_q, new_log_q))
        ]
        for buffer, new in ((self._keys, keys), (self._ids, new_ids), (self._log_q, new_log_q)):
            start = 0
            for part in _ring(buffer, self._head, len(keys) - through):
                part.copy_(new[through + start : through + start + len(part)])
                start += len(part)
        self._head = (self._head + len(keys) - through) % self.capacity
        self._size = min(self.capacity, self._size + len(keys))
        return Evicted(evicted[0], evicted[1] if self._has_ids else None, evicted[2] if self._has_log_q else None)

    def newest(self, count: int) -> Evicted:
        """Copies of the newest `count` entries, of all where there are fewer: losses take them in a queue's place."""
        if isinstance(count, bool) or not isinstance(count, int):
            raise TypeError(f"count: expected an int, got {type(count).__name__}")
        if count < 0:
            raise ValueError(f"count: expected at least 0, got {count}")
        count = min(count, self._size)
        first = (self._head - count) % self.capacity
        keys, ids, log_q = (
            torch.cat([buffer[:0], *_ring(buffer, first, count)]) for buffer in (self._keys, self._ids, self._log_q)
        )
        return Evicted(keys, ids if self._has_ids else None, log_q if self._has_log_q else None)

    def _check(self, keys: Tensor, ids: Tensor | None, log_q: Tensor | None) -> None:
        if not isinstance(keys, Tensor) or not keys.is_floating_point():
            raise TypeError(f"keys: expected a floating tensor, got {getattr(keys, 'dtype', type(keys).__name__)}")
        if keys.dim() != 2 or keys.shape[1] != self.dim:
            raise ValueError(f"keys: expected shape [*, {self.dim}], got {list(keys.shape)}")
        if ids is not None:
            if not isinstance(ids, Tensor) or ids.dtype != torch.int64:
                raise TypeError(f"ids: expected an int64 tensor, got {getattr(ids, 'dtype', type(ids).__name__)}")
            if ids.shape != (len(keys),):
                raise ValueError(f"ids: expected shape [{len(keys)}], got {list(ids.shape)}")
        if log_q is not None:
            if not isinstance(log_q, Tensor) or not log_q.is_floating_point():
                raise TypeError(
                    f"log_q: expected a floating tensor, got {getattr(log_q, 'dtype', type(log_q).__name__)}"
                )
            if log_q.shape != (len(keys),):
                raise ValueError(f"log_q: expected shape [{len(keys)}], got {list(log_q.shape)}")

    def get_extra_state(self) -> Tensor:
        return torch.tensor([self._head, self._size, self._has_ids, self._has_log_q], dtype=torch.int64)

    def set_extra_state(self, state: Tensor) -> None:
        head, size, has_ids, has_log_q = state.tolist()
        if not (0 <= head < self.capacity and 0 <= size <= self.capacity):
            raise ValueError(
                f"queue state: expected head and size within capacity {self.capacity}, got {head} and {size}"
            )
        self._head, self._size, self._has_ids, self._has_log_q = head, size, bool(has_ids), bool(has_log_q)

    def extra_repr(self) -> str:
        return f"capacity={self.capacity}, dim={self.dim}, len={self._size}, dtype={self._keys.dtype}"


def _ring(buffer: Tensor, start: int, count: int) -> list[Tensor]:
    """Views of `count` slots (at most all) from `start` on, in ring order: one piece, or two where they wrap."""
    first = min(count, len(buffer) - start)
    pieces = [buffer[start : start + first], buffer[: count - first]]
    return [piece for piece in pieces if len(piece)]
