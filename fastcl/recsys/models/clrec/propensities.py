"""Propensities q(y|x) for the inverse propensity weighted loss (Zhou et al. 2021, Eq. 4), in a table by name: estimates
from clicks of how likely the system that made the log was to show an item.

A propensity is a module from (the click before each target [N], the targets [N], log of each item's share of the train
clicks [I]) to log q [N]. A propensity that learns is trained by maximum likelihood beside the model's loss, in which q
is a constant.
"""

import torch
from torch import Tensor, nn

import fastcl


class Popularity(nn.Module):
    """q(y): the item's share of the train clicks."""

    def __init__(self, n_items: int) -> None:
        super().__init__()

    def forward(self, before: Tensor, target: Tensor, log_share: Tensor) -> Tensor:
        return log_share[target - 1]


class Learned(nn.Module):
    """q(y|x): a multinomial model of the next click, of rank `DIM`, from the click before it and the share."""

    DIM = 16

    def __init__(self, n_items: int) -> None:
        super().__init__()
        self.before = nn.Embedding(n_items + 1, self.DIM)
        self.after = nn.Embedding(n_items, self.DIM)
        self.bias = nn.Parameter(torch.zeros(n_items))
        nn.init.normal_(self.before.weight, std=self.DIM**-0.5)
        nn.init.zeros_(self.after.weight)  # q begins as the item's share of the clicks

    def forward(self, before: Tensor, target: Tensor, log_share: Tensor) -> Tensor:
        bias = log_share + self.bias
        query = self.before(before)
        return -fastcl.linear_cross_entropy(query, self.after.weight, target - 1, linear_bias=bias, reduction="none")


PROPENSITIES: dict[str, type[nn.Module]] = {"popularity": Popularity, "learned": Learned}
