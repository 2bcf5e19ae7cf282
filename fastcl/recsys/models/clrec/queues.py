"""Where CLRec's negatives from earlier batches come from (Zhou et al. 2021, Fig. 1), in a table by name: nowhere (a),
a queue of items that are encoded again each step (b), a queue of vectors kept as they were (c).

Queues only; what is pushed, and when, is the model's, in model.py.
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
    """`entry` is made of the vectors [N, D] and the numbers [N] of a batch's positives. `read` gives the numbers of the
    items to encode again [M], and the vectors that stay.
    """

    queue: Callable[[int, int], NegativeQueue | None]  # of capacity and dim
    entry: Callable[[Tensor, Tensor], Tensor] = lambda vectors, item: vectors
    read: Callable[[NegativeQueue, int], tuple[Tensor, Evicted | None]] = _vectors


SOURCES: dict[str, Source] = {
    "batch": Source(lambda size, dim: None),
    "ids": Source(
        # An item's number, exact in float64, is what its features are found by.
        lambda size, dim: NegativeQueue(size, 1, torch.float64),
        lambda vectors, item: item[:, None].double(),
        _numbers,
    ),
    "vectors": Source(NegativeQueue),
}


def follower(encoder: M) -> M:
    """What `momentum_update` moves after `encoder`: the same weights, which no gradient reaches."""
    return copy.deepcopy(encoder).requires_grad_(False)
