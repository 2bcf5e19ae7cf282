"""GRU4Rec (Hidasi et al. 2016, "Session-based Recommendations with Recurrent Neural Networks"; Hidasi & Karatzoglou
2018): a GRU over the clicks, whose state is scored against the table of the items that it reads.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastcl.recsys.baselines.nextitem import LOSS_MEANING, NAMES, NextItem, NextItemConfig
from fastcl.recsys.data import PAD, Histories
from fastcl.recsys.models.batching import Packed
from fastcl.recsys.models.layers import Dropout
from fastcl.recsys.models.losses import Scored, scored
from fastcl.recsys.options import at_least, between
from fastcl.recsys.settings import setting


@dataclass(frozen=True)
class GRU4RecConfig(NextItemConfig):
    """Settings of `GRU4Rec`."""

    dim: int = setting(64, "Width of the item vectors and of the state.")
    dropout: float = setting(0.4, "Dropout rate of the state.")
    item_dropout: float = setting(0.0, "Dropout rate of the items that are read.")
    layers: int = setting(1, "Layers of the GRU.")
    loss: str = setting("popular", LOSS_MEANING, NAMES)

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, "layers", self.layers)
        between(0.0, 1.0, "item_dropout", self.item_dropout)


class GRU4Rec(NextItem):
    """A GRU over the clicks, scored against the table that it reads, with one bias per item.

    The loss "popular" is the cross-entropy of the 2018 paper: shared negatives drawn by popularity, less log q.
    Training differentiates through a whole window; the authors' program goes back a single click and takes the targets
    of the batch's other sessions as negatives too.

    Args:
        items: the item table.
        config: the settings; None: the settings are the keywords `options`.
        seed: seed of the initial weights.

    >>> from fastcl.recsys import Histories, Items
    >>> model = GRU4Rec(Items(ids=("a", "b", "c")), dim=8, seed=0)
    >>> model.scores(Histories.from_lists([[1, 2], [3]])).shape
    torch.Size([2, 4])
    """

    name = "gru4rec"
    Config = GRU4RecConfig
    item_tables = ("item.weight", "bias")

    def build(self) -> None:
        config = self.config
        self.item = nn.Embedding(len(self.items) + 1, config.dim, padding_idx=PAD)
        nn.init.xavier_uniform_(self.item.weight)
        self.bias = nn.Parameter(torch.zeros(len(self.items) + 1))
        self.gru = nn.GRU(config.dim, config.dim, config.layers, batch_first=True)
        self.item_dropout, self.dropout = Dropout(config.item_dropout), Dropout(config.dropout)

    def forward(self, item: Tensor, clicks: Packed) -> Tensor:
        """item [n] -> [n, D], the state after each click."""
        x = self.item_dropout(self.item(item))
        return self.dropout(clicks.by_length(x, lambda block, _: self.gru(block)[0]))

    def encode(self, histories: Histories) -> Tensor:
        """[B, D+1], the state after the newest click, then a 1 for the items' biases."""
        return F.pad(super().encode(histories), (0, 1), value=1.0)

    def item_vectors(self) -> Tensor:
        """[I+1, D+1], the item table and each item's bias."""
        return torch.cat([self.item.weight, self.bias[:, None]], 1)

    def scored(self) -> Scored:
        return scored(self.item.weight, self.bias[1:], self.log_share)
