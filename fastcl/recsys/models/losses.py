"""Losses of hidden states over an item table, in one table by name: the full softmax, a sampled softmax, and binary
cross-entropy against an unclicked item.

A loss is a function of tensors, its negatives included. Models choose the loss, hold the weights and draw negatives
with the function that the table has for the loss.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch.nn.functional as F
from torch import Tensor

import fastcl
from fastcl.recsys.data import Histories
from fastcl.recsys.models.batching import Unclicked

Draw = Callable[[np.ndarray], np.ndarray]  # the row of `train` of each of a batch's positions [n] -> int64 items


class ItemLoss(NamedTuple):
    """A loss of hidden states [n, D] against their target items [n].

    `loss(hidden, table, target, negative, bias)` is the mean over the n positions. table [I+1, D] has padding in row 0;
    target is int64 [n], 1..I; bias [I] is added to the logits of the items 1..I.

    `negatives(train, n_items, samples, rng)` gives the function that draws `negative` for each batch of an epoch.
    `samples` is how many items the sampled softmax draws for a whole batch.
    """

    loss: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    negatives: Callable[[Histories, int, int, np.random.Generator], Draw]


def full_softmax(hidden: Tensor, table: Tensor, target: Tensor, negative: Tensor, bias: Tensor) -> Tensor:
    """Cross-entropy over the whole item table; reads no negatives."""
    return fastcl.linear_cross_entropy(hidden, table[1:], target - 1, linear_bias=bias)


def sampled_softmax(hidden: Tensor, table: Tensor, target: Tensor, negative: Tensor, bias: Tensor) -> Tensor:
    """Cross-entropy over the target and the items `negative` [S], drawn uniformly for the whole batch. Each negative
    stands for I / S items.
    """
    weight = bias[negative - 1] + math.log(len(bias) / len(negative))
    return fastcl.sampled_softmax(
        hidden,
        F.embedding(target, table),
        F.embedding(negative, table),
        ids=target,
        negative_ids=negative,
        log_q=-bias[target - 1],
        negative_log_q=-weight,
    )


def binary(hidden: Tensor, table: Tensor, target: Tensor, negative: Tensor, bias: Tensor) -> Tensor:
    """-log sigmoid(target) - log(1 - sigmoid(negative)), with an unclicked item `negative` [n] for each position
    (Kang & McAuley 2018, Eq. 6).
    """
    up = (hidden * F.embedding(target, table)).sum(-1) + bias[target - 1]
    down = (hidden * F.embedding(negative, table)).sum(-1) + bias[negative - 1]
    return (F.softplus(-up) + F.softplus(down)).mean()


def _none(train: Histories, n_items: int, samples: int, rng: np.random.Generator) -> Draw:
    return lambda row: np.empty(0, np.int64)


def _uniform(train: Histories, n_items: int, samples: int, rng: np.random.Generator) -> Draw:
    return lambda row: rng.integers(1, n_items + 1, samples)


def _unclicked(train: Histories, n_items: int, samples: int, rng: np.random.Generator) -> Draw:
    source = Unclicked(train, n_items)
    return lambda row: source.draw(row, rng)


ITEM_LOSSES: dict[str, ItemLoss] = {
    "softmax": ItemLoss(full_softmax, _none),
    "sampled": ItemLoss(sampled_softmax, _uniform),
    "bce": ItemLoss(binary, _unclicked),
}
