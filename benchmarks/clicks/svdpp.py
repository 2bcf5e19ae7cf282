"""SVD++ (Koren 2008): the target's vector times the sum of the history's, divided by the root of their number, plus a
bias of the target. It has no head.

The published program divides by the root of a matrix norm, has the target in the sum and has no bias.
"""

import torch
from torch import Tensor, nn

from benchmarks.clicks.model import Batch, ClickModel, at
from fastcl.recsys.data import Items


class SVDpp(ClickModel):
    def build(self, width: int) -> int:
        return 1

    def __init__(self, items: Items, seed: int) -> None:
        super().__init__(items, seed)
        self.bias = nn.Embedding(len(items) + 1, 1)
        nn.init.zeros_(self.bias.weight)
        self.mean = nn.Parameter(torch.zeros(()))
        self.head = nn.Sequential()

    def found(self, steps: Tensor, batch: Batch) -> Tensor:
        user = (steps * batch.clicked[..., None]).sum(1) / batch.last[:, None] ** 0.5
        target = batch.item.gather(1, batch.last[:, None])[:, 0]
        score = (at(steps, batch.last) * user).sum(-1, keepdim=True)
        return self.mean + self.bias(target) + score
