"""SHAN (Ying et al. 2018, "Sequential Recommender System based on Hierarchical Attention Network"): the target attends
to older clicks, and then to what that found and the last ten clicks.

The published program has the older clicks commented out, attends to users of the item by an argument out of place, and
drops weights in tests too.
"""

import torch
from torch import Tensor

from benchmarks.clicks.model import Attention, Batch, ClickModel, at

SHORT = 10


class SHAN(ClickModel):
    def build(self, width: int) -> int:
        self.long, self.both = Attention(width), Attention(width)
        return 2 * width

    def found(self, steps: Tensor, batch: Batch) -> Tensor:
        target = at(steps, batch.last)
        newest = batch.clicked & (torch.arange(steps.shape[1]) >= batch.last[:, None] - SHORT)
        older = batch.clicked & ~newest
        none = torch.zeros_like(steps[:, :1])  # a place that is always attended, for rows without older clicks
        with_none = torch.cat([none, steps], 1), torch.cat([torch.ones_like(older[:, :1]), older], 1)
        long = (self.long(target, *with_none)[..., None] * with_none[0]).sum(1)
        keys = torch.cat([long[:, None], steps], 1)
        held = torch.cat([older.any(1, keepdim=True), newest], 1)
        return torch.cat([(self.both(target, keys, held)[..., None] * keys).sum(1), target], -1)
