"""What STOSA and DT4SR share: an item, and the state after a click, is a normal distribution with diagonal covariance,
and the score falls with the squared Wasserstein distance of the two,

    D = |m - m'|^2 + |sqrt(c) - sqrt(c')|^2.

With x = [m, sqrt(c)] of a state and y that of an item, D = |x|^2 - (2 x.y - |y|^2). The first part is the same for all
items of a state, so that the inner product of [2x, 1] and [y, -|y|^2] ranks exactly as -D does, and has the same
softmax and the same differences. Nothing here encodes clicks.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastcl.recsys.baselines.nextitem import LOSS_MEANING, NextItem, NextItemConfig
from fastcl.recsys.data import Histories
from fastcl.recsys.models.losses import Every, Scored
from fastcl.recsys.settings import setting


@dataclass(frozen=True)
class GaussianConfig(NextItemConfig):
    """Settings that STOSA and DT4SR share."""

    loss: str = setting("bpr", LOSS_MEANING, ("bpr", "softmax", "popular"))


def joined(mean: Tensor, covariance: Tensor) -> Tensor:
    """[m, sqrt(c)], two [..., D] -> [..., 2D]."""
    return torch.cat([mean, covariance.clamp(min=1e-24).sqrt()], -1)


class Gaussian(NextItem):
    """`forward` gives joined states [n, 2D]; `item` and `item_covariance` are the tables of the items."""

    item_covariance: nn.Embedding

    def rows(self, item: Tensor) -> Tensor:
        """int64 [n] -> [n, 2D], the items' joined means and covariances."""
        return joined(self.item(item), F.elu(self.item_covariance(item)) + 1.0)

    def every(self) -> Tensor:
        """[I+1, 2D]"""
        return joined(self.item.weight, F.elu(self.item_covariance.weight) + 1.0)

    def encode(self, histories: Histories) -> Tensor:
        """[B, 2D+1], twice the state after the newest click, then a 1."""
        return F.pad(2.0 * super().encode(histories), (0, 1), value=1.0)

    def item_vectors(self) -> Tensor:
        """[I+1, 2D+1], [y, -|y|^2]."""
        y = self.every()
        return torch.cat([y, -y.square().sum(-1, keepdim=True)], -1)

    def scored(self) -> Scored:
        def every() -> Every:
            y = self.every()[1:]
            return Every(y, -y.square().sum(-1))

        def bias(item: Tensor) -> Tensor:
            return -self.rows(item).square().sum(-1)

        return Scored(len(self.items), self.rows, bias, every, self.log_share)

    def loss(self, batch: Any) -> Tensor:
        return self.of_states(2.0 * self(batch.item, batch.clicks), batch)
