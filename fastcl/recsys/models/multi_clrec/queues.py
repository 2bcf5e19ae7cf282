"""The 1 + H queues of Multi-CLRec and the contrastive loss over them (Zhou et al. 2021, Eq. 13 and the update rules
under it).

Which intent an item belongs to is the caller's; nothing here learns.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fastcl.arithmetic import softplus
from fastcl.negatives import NegativeQueue
from fastcl.ops import Expected, contrast, contrast_expecting
from fastcl.recsys.models.clrec.queues import SOURCES
from fastcl.rows import logaddexp


class Queued(NamedTuple):
    """What a queue holds, ready for a loss."""

    keys: Tensor  # [M, D]
    ids: Tensor | None  # [M]; None where there are none yet


class IntentQueues(nn.Module):
    """A main queue, and one queue an intent for what the main one evicts; what these evict is gone.

    kept: what they keep of an item: its vector ("vectors"), or its number ("ids"), to encode it anew for every loss.

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
        """The main queue, then those of the intents."""
        return [queue for queue in (self.main, *self.secondary) if isinstance(queue, NegativeQueue)]

    def push(self, vectors: Tensor, items: Tensor, route: Callable[[Tensor], Tensor]) -> None:
        """Vectors [B, D] of items [B] join the main queue. route: the items [E] that fall out of it to intents [E]."""
        main, *secondary = self.all
        evicted = main.push(self.source.entry(vectors, items), items)
        assert evicted.ids is not None
        for intent, rows in _groups(route(evicted.ids), len(secondary)):
            secondary[intent].push(evicted.keys[rows], evicted.ids[rows])

    def again(self) -> Tensor:
        """int64 [M], the items of all queues to encode anew; none where vectors are kept."""
        return torch.cat([self.source.read(queue, len(queue))[0] for queue in self.all])

    def ready(self, vectors: Tensor) -> list[Queued]:
        """What all queues hold, given the vectors [M, D] of the items that `again` named."""
        held = [self.source.read(queue, len(queue)) for queue in self.all]
        fresh = vectors.split([len(anew) for anew, _ in held])  # at once: slices would each fill a gradient of all
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
    """Eq. 13, the mean over rows of -log of the positive's share among batch, main queue and the intent's queue.

    query, positive: [N, D], normalised. queues: the main one, then one an intent. intent: int64 [N], of the positive.
    ids: int64 [N] to leave out further clicks of the positive, None to keep them. There is a call for each intent among
    the rows, so that no row has keys of its own gathered.

    The paper enqueues a batch before its loss; here the batch is a segment of its own, and is pushed after the loss. A
    main queue of `capacity` then serves as the paper's of capacity + N.
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
    """(intent, its rows in their order) for every intent of [N] that has rows."""
    order = intent.argsort(stable=True)
    rows = order.split(torch.bincount(intent, minlength=intents).tolist())
    return [(h, part) for h, part in enumerate(rows) if len(part)]
