"""RUM (Chen et al. 2018, "Sequential Recommendation with User Memory Networks") as a click model: slots that each item
of the history writes to, and what the target reads from them.

Keys of the slots are learned. An item's address is the attention of the item over the keys.
"""

import torch
from torch import Tensor, nn

from benchmarks.clicks.model import Attention, Batch, ClickModel, at

SLOTS, OVERLAP = 3, 3e-6


class RUM(ClickModel):
    def build(self, width: int) -> int:
        self.keys = nn.Parameter(torch.randn(SLOTS, width) * 0.1)
        self.attention = Attention(width)
        self.erase, self.gate, self.add = (nn.Linear(2 * width, width) for _ in range(3))
        return 2 * width

    def found(self, steps: Tensor, batch: Batch) -> Tensor:
        b, t, width = steps.shape
        keys = self.keys.expand(b * t, -1, -1)
        address = self.attention(steps.reshape(b * t, width), keys).view(b, t, SLOTS, 1)
        memory = steps.new_zeros(b, SLOTS, width)
        writes = batch.clicked[:, :, None, None]
        for n in range(t - 1):
            x, z = steps[:, n], address[:, n] * writes[:, n]
            about = torch.cat([x, (address[:, n] * memory).sum(1)], -1)
            added = self.gate(about).sigmoid() * self.add(about).tanh()
            memory = memory * (1 - z * self.erase(about).sigmoid()[:, None]) + z * added[:, None]
        read = (at(address, batch.last) * memory).sum(1)
        return torch.cat([read, at(steps, batch.last)], -1)

    def penalty(self) -> Tensor:
        """Keys that overlap address the same slots."""
        products = self.keys @ self.keys.T
        return OVERLAP * (products - products.diag().diag()).square().sum()
