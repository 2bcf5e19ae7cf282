"""The 1 + H queues of Multi-CLRec and the contrastive loss over them (Zhou et al. 2021, Eq. 13 and the update rules
below it).

Callers say which intent an item belongs to. Nothing here learns.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fastcl.arithmetic import logaddexp, softplus
from fastcl.negatives import NegativeQueue
from fastcl.ops import Expected, contrast, contrast_expecting
from fastcl.recsys.models.clrec.queues import SOURCES


class Queued(NamedTuple):
    """The content of a queue as a loss takes it."""

    keys: Tensor  # [M, D]
    ids: Tensor | None  # [M]; None for a queue without ids so far


class IntentQueues(nn.Module):
    """A main queue, and one queue per intent for what the main queue evicts. What the intents' queues evict is dropped.

    kept: what the queues keep of an item: its vector ("vectors"), or its number ("ids"), encoded anew for each loss.

    >>> queues = IntentQueues(intents=2, main=2, secondary=3, dim=1, kept="vectors")
    >>> for keys in torch.arange(6.0).view(3, 2, 1):
    ...     queues.push(keys, keys[:, 0].long(), route=lambda items: items % 2)
    >>> [queue.keys[:, 0].tolist() for queue in queues.all]
    [[4.0, 5.0], [0.0, 2.0], [1.0, 3.0]]
    """

    def __init__(self, intents: int, main: int, secondary: int, dim: int, kept: str) -> None:
        super().__init__()
        self.source = SOURCES[kept]
        self.main, *others = (self.source.queue(size, dim) for size in (main, *[secondary] * intents))
        self.secondary = nn.ModuleList(queue for queue in others if queue is not None)

    @property
    def all(self) -> list[NegativeQueue]:
        """The main queue, then the queues of the intents."""
        return [queue for queue in (self.main, *self.secondary) if isinstance(queue, NegativeQueue)]

    def push(self, vectors: Tensor, items: Tensor, route: Callable[[Tensor], Tensor]) -> None:
        """Pushes vectors [B, D] of items [B] into the main queue. route: evicted items [E] -> their intents [E]."""
        main, *secondary = self.all
        evicted = main.push(self.source.entry(vectors, items), items)
        assert evicted.ids is not None
        for intent, rows in _groups(route(evicted.ids), len(secondary)):
            secondary[intent].push(evicted.keys[rows], evicted.ids[rows])

    def again(self) -> Tensor:
        """int64 [M], the items of all queues that are to be encoded anew; empty where the queues keep vectors."""
        return torch.cat([self.source.read(queue, len(queue))[0] for queue in self.all])

    def evictable(self) -> Tensor:
        """int64 [M], the items in the main queue."""
        main = self.all[0]
        ids = main.newest(len(main)).ids
        return ids if ids is not None else torch.zeros(0, dtype=torch.int64, device=main.keys.device)

    def ready(self, vectors: Tensor) -> list[Queued]:
        """The content of all queues, given the vectors [M, D] of the items that `again` named."""
        held = [self.source.read(queue, len(queue)) for queue in self.all]
        fresh = vectors.split([len(anew) for anew, _ in held])  # the gradient of each slice would have the size of all
        return [
            Queued(new, anew) if kept is None else Queued(kept.keys, kept.ids)
            for (anew, kept), new in zip(held, fresh, strict=True)
        ]


def infonce(
    query: Tensor,
    positive: Tensor,
    queues: Sequence[Queued],
    intent: Tensor,
    temperature: float,
    ids: Tensor | None,
) -> Tensor:
    """Eq. 13, the mean over rows of -log of the positive's share among the batch, the main queue and the queue of the
    positive's intent.

    query, positive: [N, D], normalised. queues: the main queue, then one per intent. intent: int64 [N], the intent of
    each positive. ids: int64 [N], the items of the positives, to leave out their further clicks; None keeps these. The
    rows are grouped by intent, so that no keys are gathered for a single row.

    The paper enqueues a batch before its loss. Here the batch is a segment of its own that is pushed after the loss, so
    that a main queue of `capacity` corresponds to one of capacity + N in the paper.
    """
    scale = 1.0 / temperature
    groups = _groups(intent, len(queues) - 1)
    parts = [_lse(query[r], queues[1 + h], scale, None if ids is None else ids[r]) for h, r in groups]
    order = torch.cat([rows for _, rows in groups])
    main = _lse(query, queues[0], scale, ids)
    rest = logaddexp(main, torch.empty_like(main).index_copy(0, order, torch.cat(parts)))
    own = torch.arange(len(query), device=query.device) if ids is None else ids
    expected = Expected(shift=0.0, rest=rest)
    pos, lse = contrast_expecting(expected, query, positive, positive, scale=scale, row_id=own, col_id=own)
    assert pos is not None
    return softplus(logaddexp(rest, lse) - pos).mean()


def _lse(query: Tensor, queue: Queued, scale: float, ids: Tensor | None) -> Tensor:
    row_id, col_id = (None, None) if ids is None or queue.ids is None else (ids, queue.ids)
    return contrast(query, queue.keys, scale=scale, row_id=row_id, col_id=col_id)[1]


def _groups(intent: Tensor, intents: int) -> list[tuple[int, Tensor]]:
    """(intent, its rows in order) for every intent that occurs in `intent` [N]."""
    order = intent.argsort(stable=True)
    rows = order.split(torch.bincount(intent, minlength=intents).tolist())
    return [(h, part) for h, part in enumerate(rows) if len(part)]
