"""HPMN (Ren et al. 2019, "Lifelong Sequential Modeling with Personalized Memorization"): GRUs over each other, of which
the higher read every second state of the lower, and the target attends to their last states in three hops.

Layers count back from the target, so that padding is never read; the published program pads in front and reads it.
"""

import torch
from torch import Tensor, nn

from benchmarks.clicks.model import HIDDEN, Attention, Batch, ClickModel, at

LAYERS, STRIDE, HOPS, COVARIANCE = 3, 2, 3, 1e-5


class HPMN(ClickModel):
    memory: Tensor  # [B, LAYERS, HIDDEN] of the last batch

    def build(self, width: int) -> int:
        self.layers = nn.ModuleList(nn.GRU(n, HIDDEN, batch_first=True) for n in (width, *[HIDDEN] * (LAYERS - 1)))
        self.query = nn.Linear(width, HIDDEN)
        self.hops = nn.ModuleList(Attention(HIDDEN) for _ in range(HOPS))
        self.turn = nn.Linear(HIDDEN, HIDDEN, bias=False)
        return HIDDEN + width

    def found(self, steps: Tensor, batch: Batch) -> Tensor:
        slots, x, length = [], steps, batch.length
        for layer in self.layers:
            states, _ = layer(x)
            slots.append(at(states, length - 1))
            x, length = thinned(states, length)
        self.memory = torch.stack(slots, 1)
        target = at(steps, batch.last)
        query = self.query(target)
        for hop in self.hops:
            query = self.turn(query) + (hop(query, self.memory)[..., None] * self.memory).sum(1)
        return torch.cat([query, target], -1)

    def penalty(self) -> Tensor:
        """Slots that vary together hold the same."""
        apart = self.memory - self.memory.mean(-1, keepdim=True)
        covariance = apart @ apart.transpose(1, 2) / HIDDEN
        others = covariance * (1 - torch.eye(LAYERS))
        return COVARIANCE * (others.square().sum((1, 2)) + 1e-12).sqrt().sum()


def thinned(states: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    """Every second state of [B, T, D], the last one of each row among them, and how many there are."""
    count = (length + STRIDE - 1) // STRIDE
    place = torch.arange(int(count.max()))
    place = (length - 1)[:, None] - STRIDE * (count[:, None] - 1 - place)
    return states[torch.arange(len(states))[:, None], place.clamp(max=states.shape[1] - 1)], count
