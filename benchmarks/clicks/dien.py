"""DIEN (Zhou et al. 2019, "Deep Interest Evolution Network") as the published program has it, without an auxiliary
loss: a GRU, attention of the target over its states, and a second GRU that changes as much as a state is attended.
"""

import torch
from torch import Tensor, nn

from benchmarks.clicks.model import HIDDEN, Attention, Batch, ClickModel, at


class DIEN(ClickModel):
    def build(self, width: int) -> int:
        self.interest = nn.GRU(width, HIDDEN, batch_first=True)
        self.query = nn.Sequential(nn.Linear(width, HIDDEN), nn.PReLU())
        self.attention = Attention(HIDDEN)
        self.gates = nn.Linear(2 * HIDDEN, 2 * HIDDEN)
        self.change = nn.Linear(2 * HIDDEN, HIDDEN)
        return HIDDEN

    def found(self, steps: Tensor, batch: Batch) -> Tensor:
        states, _ = self.interest(steps)
        weight = self.attention(self.query(at(steps, batch.last)), states, batch.known)
        h = torch.zeros_like(states[:, 0])
        for x, a in zip(states.unbind(1), weight.unbind(1), strict=True):
            keep, reset = self.gates(torch.cat([x, h], -1)).sigmoid().chunk(2, -1)
            new = self.change(torch.cat([x, reset * h], -1)).tanh()
            keep = (1 - a)[:, None] * keep
            h = torch.where((a > 0)[:, None], keep * h + (1 - keep) * new, h)
        return h
