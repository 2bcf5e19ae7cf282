"""Caser as a click model: 32 filters over eight neighbouring items each, of which the largest value counts, and 32
filters over all places, counted back from the target, whose outputs one linear map combines.

The published program also convolves padding, and the vectors of the item's users, which are left out.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.clicks.model import HIDDEN, LONGEST, Batch, ClickModel

HEIGHT, FILTERS = 8, 32


class Caser(ClickModel):
    def build(self, width: int) -> int:
        self.neighbours = nn.Conv1d(width, FILTERS, HEIGHT)
        self.places = nn.Parameter(torch.randn(FILTERS, LONGEST) * LONGEST**-0.5)
        self.combine = nn.Linear(FILTERS * width, HIDDEN)
        return FILTERS + HIDDEN

    def found(self, steps: Tensor, batch: Batch) -> Tensor:
        windows = self.neighbours(F.pad(steps.transpose(1, 2), (HEIGHT - 1, 0)))  # each ends at an item
        most = windows.masked_fill(~batch.known[:, None], -torch.inf).amax(-1)
        back = batch.last[:, None] - torch.arange(steps.shape[1])
        of_place = self.places[:, back.clamp(min=0)]  # [FILTERS, B, T]; where `back` is negative, a step is zero
        over_all = torch.einsum("fbt,btd->bfd", of_place, steps)
        return torch.cat([most, self.combine(over_all.flatten(1))], -1)
