"""The 1 + H queues of Multi-CLRec and the contrastive loss over them (Zhou et al. 2021, Eq. 13 and the update rules
under it).

Which intent an item belongs to is the caller's; nothing here learns.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fastcl.losses import softplus
from fastcl.negatives import NegativeQueue
from fastcl.ops import Expected, contrast
from fastcl.rows import logaddexp


class IntentQueues(nn.Module):
    """A main queue, and one queue an intent for what the main one evicts; what these evict is gone.

    >>> queues = IntentQueues(intents=2, main=2, secondary=3, dim=1)
    >>> for keys in torch.arange(6.0).view(3, 2, 1):
    ...     queues.push(keys, ids=keys[:, 0].long(), route=lambda ids: ids % 2)
    >>> queues.main.keys[:, 0].tolist(), [queue.keys[:, 0].tolist() for queue in queues.secondary]
    ([4.0, 5.0], [[0.0, 2.0], [1.0, 3.0]])
    """

    def __init__(self, intents: int, main: int, secondary: int, dim: int) -> None:
        super().__init__()
        self.main = NegativeQueue(main, dim)
        self.secondary = nn.ModuleList(NegativeQueue(secondary, dim) for _ in range(intents))

    def push(self, keys: Tensor, ids: Tensor, route: Callable[[Tensor], Tensor]) -> None:
        """Keys [B, D] with ids [B] join the main queue. route: the ids [E] of what falls out to their intents [E]."""
        evicted = self.main.push(keys, ids)
        assert evicted.ids is not None
        for intent, rows in _groups(route(evicted.ids), len(self.secondary)):
            self._of(intent).push(evicted.keys[rows], evicted.ids[rows])

    def lse(self, query: Tensor, intent: Tensor, scale: float, ids: Tensor | None) -> Tensor:
        """[N], log-sum-exp of scale <q_i, k> over the main queue and that of the row's intent [N]; entries of the row's
        id are left out where `ids` [N] are given. -inf where there is no entry.

        A call for each intent among the rows, so that no row has keys of its own gathered.
        """
        rest = _lse(query, self.main, scale, ids)
        groups = _groups(intent, len(self.secondary))
        parts = [_lse(query[r], self._of(h), scale, None if ids is None else ids[r]) for h, r in groups]
        order = torch.cat([rows for _, rows in groups])
        return logaddexp(rest, torch.empty_like(rest).index_copy(0, order, torch.cat(parts)))

    def _of(self, intent: int) -> NegativeQueue:
        queue = self.secondary[intent]
        assert isinstance(queue, NegativeQueue)
        return queue


def infonce(
    query: Tensor, positive: Tensor, queues: IntentQueues, intent: Tensor, temperature: float, ids: Tensor | None
) -> Tensor:
    """Eq. 13, the mean over rows of -log of the positive's share among batch, main queue and the intent's queue.

    query, positive: [N, D], normalised. intent: int64 [N], of the positive. ids: int64 [N] to leave out further clicks
    of the positive, None to keep them. The paper enqueues a batch before its loss; here the batch is a segment of its
    own, whose keys learn, and is pushed after the loss. A main queue of `capacity` then serves as the paper's of
    capacity + N.
    """
    scale = 1.0 / temperature
    rest = queues.lse(query, intent, scale, ids)
    own = torch.arange(len(query), device=query.device) if ids is None else ids
    expected = Expected(shift=0.0, rest=rest)
    pos, lse = contrast(query, positive, positive, scale=scale, row_id=own, col_id=own, expected=expected)
    assert pos is not None
    return softplus(logaddexp(rest, lse) - pos).mean()


def _lse(query: Tensor, queue: NegativeQueue, scale: float, ids: Tensor | None) -> Tensor:
    row_id, col_id = (None, None) if ids is None or queue.ids is None else (ids, queue.ids)
    return contrast(query, queue.keys, scale=scale, row_id=row_id, col_id=col_id)[1]


def _groups(intent: Tensor, intents: int) -> list[tuple[int, Tensor]]:
    """(intent, its rows in their order) for every intent of [N] that has rows."""
    order = intent.argsort(stable=True)
    rows = order.split(torch.bincount(intent, minlength=intents).tolist())
    return [(h, part) for h, part in enumerate(rows) if len(part)]
