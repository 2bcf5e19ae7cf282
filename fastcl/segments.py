"""The sources of negatives that a caller gives, as checked segments of columns. No similarity is computed here."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fastcl.checks import as_ids, check_tensor, matrix
from fastcl.negatives import Columns as QueueColumns


class Queue(Protocol):
    """What a loss reads of a queue; `fastcl.NegativeQueue` is one, which also has `columns`, where empty slots show."""

    @property
    def keys(self) -> Tensor: ...
    @property
    def ids(self) -> Tensor | None: ...
    @property
    def log_q(self) -> Tensor | None: ...


class Negatives(NamedTuple):
    """A caller's sources of negatives, as given."""

    keys: Tensor | None
    in_batch: bool | None
    queue: Queue | None
    ids: Tensor | None
    key_ids: Tensor | None
    log_q: Tensor | None
    key_log_q: Tensor | None


class Segment(NamedTuple):
    """Columns shared by all rows. `own` marks the batch's positives, among which every row meets its own."""

    keys: Tensor  # [M, D]
    ids: Tensor | None  # [M]
    log_q: Tensor | None  # [M]
    source: str = "negative_keys"
    own: bool = False
    held: Tensor | None = None  # [], how many of the M are negatives, where some are empty slots of a queue

    def size(self) -> int | Tensor:
        return self.keys.shape[0] if self.held is None else self.held


def columns_of(queue: Queue, corrected: bool) -> QueueColumns:
    """corrected: whether the positives have a log q."""
    read = getattr(queue, "columns", None)
    if read is None and (isinstance(queue, (Tensor, dict)) or not hasattr(queue, "keys")):
        raise TypeError(f"queue: expected a NegativeQueue, got {type(queue).__name__}; keys of your own: negative_keys")
    return QueueColumns(queue.keys, queue.ids, queue.log_q) if read is None else read(corrected)


def segments_of(positive_key: Tensor, given: Negatives) -> list[Segment]:
    """In any order; none where the caller gives no source."""
    segments = []
    if given.keys is None if given.in_batch is None else given.in_batch:
        segments.append(Segment(positive_key, given.ids, given.log_q, "in_batch", own=True))
    if given.keys is not None and given.keys.dim() == 2:
        segments.append(Segment(given.keys, given.key_ids, given.key_log_q))
    if given.queue is not None:
        segments.append(_queued(given.queue, given.log_q is not None, positive_key))
    return segments


def checked(given: Negatives, n: int, device: torch.device) -> Negatives:
    """`given` with ids as int64."""
    if given.ids is given.key_ids is given.log_q is given.key_log_q is None:
        return given
    per_key = None if given.keys is None else tuple(given.keys.shape[:-1])
    for name, t in (("negative_ids", given.key_ids), ("negative_log_q", given.key_log_q)):
        if t is not None and per_key is None:
            raise ValueError(f"{name}: expected negative_keys to go with it, got none")
    if given.ids is not None:
        given = given._replace(ids=as_ids("ids", given.ids, (n,), device))
    if given.key_ids is not None and per_key is not None:
        if given.ids is None:
            raise ValueError("ids: expected the ids of the positives to compare negative_ids with, got None")
        given = given._replace(key_ids=as_ids("negative_ids", given.key_ids, per_key, device))
    if given.log_q is not None:
        check_tensor("log_q", given.log_q, (n,), device)
    if given.key_log_q is not None and per_key is not None:
        check_tensor("negative_log_q", given.key_log_q, per_key, device)
    return given


def _queued(queue: Queue, corrected: bool, query: Tensor) -> Segment:
    keys, ids, log_q, held = columns_of(queue, corrected)
    matrix("queue", keys, None, query.shape[1], query.device)
    if ids is not None:
        ids = as_ids("queue.ids", ids, (keys.shape[0],), query.device)
    if log_q is not None:
        check_tensor("queue.log_q", log_q, (keys.shape[0],), query.device)
    return Segment(keys.detach(), ids, log_q, "queue", held=held)


def check_corrected(given: Negatives, segments: list[Segment]) -> None:
    """ValueError if only some of the columns have a log q."""
    if given.log_q is given.key_log_q is None and all([s.log_q is None for s in segments]):
        return
    corrected = [given.log_q is not None]
    corrected += [s.log_q is not None for s in segments if s.held is None and s.keys.shape[0]]
    corrected += [given.key_log_q is not None] if given.keys is not None and given.keys.dim() == 3 else []
    if any(corrected) and not all(corrected):
        raise ValueError("log_q: expected for the positive and every source of negatives, or for none, got it for some")
