"""The sources of CLRec's negatives from earlier batches (Zhou et al. 2021, Fig. 1), in a table by name: none (a), a
queue of items that are encoded again at each step (b), a queue of vectors as they were encoded (c).

model.py decides what is pushed into the queues and when.
"""

import copy
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from fastcl.negatives import Evicted, NegativeQueue

M = TypeVar("M", bound=nn.Module)


def _numbers(queue: NegativeQueue, count: int) -> tuple[Tensor, None]:
    return queue.newest(count).keys[:, 0].long(), None


def _vectors(queue: NegativeQueue, count: int) -> tuple[Tensor, Evicted]:
    return torch.empty(0, dtype=torch.int64, device=queue.keys.device), queue.newest(count)


class Source(NamedTuple):
    """`entry` makes queue entries from the vectors [N, D] and the numbers [N] of a batch's positives. `read` returns
    the numbers [M] of the items to encode again, and the vectors that are used as they are.
    """

    queue: Callable[[int, int], NegativeQueue | None]  # (capacity, dim) -> the queue
    entry: Callable[[Tensor, Tensor], Tensor] = lambda vectors, item: vectors
    read: Callable[[NegativeQueue, int], tuple[Tensor, Evicted | None]] = _vectors


SOURCES: dict[str, Source] = {
    "batch": Source(lambda size, dim: None),
    "ids": Source(
        # The entries are item numbers, which float64 holds exactly.
        lambda size, dim: NegativeQueue(size, 1, torch.float64),
        lambda vectors, item: item[:, None].double(),
        _numbers,
    ),
    "vectors": Source(NegativeQueue),
}


def follower(encoder: M) -> M:
    """A copy of `encoder` without gradients, which `momentum_update` moves after it."""
    return copy.deepcopy(encoder).requires_grad_(False)
