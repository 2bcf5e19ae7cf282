"""GRU4Rec and LSTM as click models: the last state of a recurrent network that reads the history and then the target.
GRU4Rec is not the recommender of that name, which fastcl.recsys has.
"""

import torch
from torch import Tensor, nn

from benchmarks.clicks.model import HIDDEN, Batch, ClickModel, at


class GRU4Rec(ClickModel):
    def build(self, width: int) -> int:
        self.gru = nn.GRU(width, HIDDEN, batch_first=True)
        return HIDDEN

    def found(self, steps: Tensor, batch: Batch) -> Tensor:
        # Padding comes behind the target, whose state does not see it.
        return at(self.gru(steps)[0], batch.last)


class LSTM(ClickModel):
    """Reads its cell beside its state, as the published program does."""

    def build(self, width: int) -> int:
        self.lstm = nn.LSTM(width, HIDDEN, batch_first=True)
        return 2 * HIDDEN

    def found(self, steps: Tensor, batch: Batch) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(steps, batch.length, batch_first=True, enforce_sorted=False)
        _, (state, cell) = self.lstm(packed)
        return torch.cat([state[0], cell[0]], -1)
