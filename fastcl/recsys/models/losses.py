"""Losses of hidden states over an item table, in one table by name: the full softmax, SCE, a sampled softmax, binary
cross-entropy against an unclicked item, and gBCE.

A loss is a function of tensors, its negatives included. Models choose the loss, hold the weights and draw negatives
with the function that the table has for the loss.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import fastcl
import fastcl.distributed
from fastcl.recsys.data import PAD, Histories
from fastcl.recsys.models.batching import Unclicked, drawing, log_shares

Draw = Callable[[np.ndarray], np.ndarray]  # the row of `train` of each of a batch's positions [n] -> int64 items


class Every(NamedTuple):
    """All items, or those of this process where several share them out."""

    rows: Tensor  # [C, D]
    bias: Tensor  # [C]
    ids: Tensor | None = None  # int64 [C], rising; None: the items 1..I


class Scored(NamedTuple):
    """The items 1..I as a loss sees them: `rows` and `bias` look items up, int64 [n] -> [n, D] and [n], the bias joins
    the logits; `every` gives those of all items. `smoothing` is the share of a target that the full softmax spreads
    evenly over all items; the other losses do not read it.
    """

    total: int  # I
    rows: Callable[[Tensor], Tensor]
    bias: Callable[[Tensor], Tensor]
    every: Callable[[], Every]
    log_share: Tensor | None = None  # [I], log of each item's share of the clicks, where a loss draws by it
    smoothing: float = 0.0


def scored(table: Tensor, bias: Tensor, log_share: Tensor | None = None, smoothing: float = 0.0) -> Scored:
    """Of a whole table [I+1, D], with padding in row 0, and a bias [I] of the items 1..I."""
    rows = functools.partial(F.embedding, weight=table)
    return Scored(len(bias), rows, lambda item: bias[item - 1], lambda: Every(table[1:], bias), log_share, smoothing)


class ItemLoss(NamedTuple):
    """A loss of hidden states [n, D] against their target items [n].

    `loss(hidden, items, target, negative)` is the mean over the n positions; target is int64 [n], 1..I.

    `negatives(train, n_items, samples, rng)` gives the function that draws `negative` for each batch of an epoch.
    `samples` is how many items the sampled softmax and gBCE draw for a whole batch.
    """

    loss: Callable[[Tensor, Scored, Tensor, Tensor], Tensor]
    negatives: Callable[[Histories, int, int, np.random.Generator], Draw]


def as_multiplied(*rows: Tensor) -> tuple[Tensor, ...]:
    """`rows` in the type that a matrix product would read under autocast, which does not reach into custom ops: so that
    a loss over all items has the 16-bit products that a training in 16 bits is for.
    """
    device = rows[0].device.type
    if not torch.is_autocast_enabled(device):
        return rows
    return tuple(x.to(torch.get_autocast_dtype(device)) for x in rows)


def full_softmax(hidden: Tensor, items: Scored, target: Tensor, negative: Tensor) -> Tensor:
    """Cross-entropy over the whole item table; reads no negatives. Several processes that share out the table compute
    it together, each the mean over its own positions (0 over none), without smoothing (ValueError).
    """
    rows, bias, ids = items.every()
    hidden, rows = as_multiplied(hidden, rows)
    if ids is None:
        return fastcl.linear_cross_entropy(
            hidden, rows, target - 1, linear_bias=bias, label_smoothing=items.smoothing
        )
    if items.smoothing:
        raise ValueError(
            f"label_smoothing: expected 0 where processes share out the item table, got {items.smoothing:g}"
        )
    loss = fastcl.distributed.sharded_cross_entropy(hidden, rows, target, ids=ids, bias=bias, reduction="none")
    return loss.sum() / max(1, len(loss))


def scalable(hidden: Tensor, items: Scored, target: Tensor, negative: Tensor) -> Tensor:
    """SCE (Mezentsev et al. 2024) over the whole item table, with the buckets of `fastcl.sce`'s defaults: the mean over
    the positions that are in a bucket; reads no negatives.
    """
    rows, bias, _ = items.every()
    hidden, rows = as_multiplied(hidden, rows)
    return fastcl.sce(hidden, rows, target - 1, linear_bias=bias)


def sampled_softmax(hidden: Tensor, items: Scored, target: Tensor, negative: Tensor) -> Tensor:
    """Cross-entropy over the target and the items `negative` [S], which were drawn for the whole batch: each of them
    stands for 1 / (S q) items, where q is its chance to be drawn, its share of the clicks or else 1 / I.
    """
    log_q = -math.log(items.total) if items.log_share is None else items.log_share[negative - 1]
    weight = items.bias(negative) - log_q - math.log(len(negative))
    return fastcl.sampled_softmax(
        hidden,
        items.rows(target),
        items.rows(negative),
        ids=target,
        negative_ids=negative,
        log_q=-items.bias(target),
        negative_log_q=-weight,
    )


def binary(hidden: Tensor, items: Scored, target: Tensor, negative: Tensor) -> Tensor:
    """-log sigmoid(target) - log(1 - sigmoid(negative)), with an unclicked item `negative` [n] for each position
    (Kang & McAuley 2018, Eq. 6). A history that holds every item has no such item, but padding, which adds nothing.
    """
    up = (hidden * items.rows(target)).sum(-1) + items.bias(target)
    down = (hidden * items.rows(negative)).sum(-1) + items.bias(negative)
    return (F.softplus(-up) + F.softplus(down).masked_fill(negative == PAD, 0.0)).mean()


def generalised_binary(hidden: Tensor, items: Scored, target: Tensor, negative: Tensor) -> Tensor:
    """gBCE (Petrov & Macdonald 2023, gSASRec) at the paper's calibration of 0.75, against the items `negative` [S],
    which were drawn uniformly for the whole batch; a position's own target among them does not count.
    """
    return fastcl.gbce(
        hidden,
        items.rows(target),
        items.rows(negative),
        catalogue=items.total,
        ids=target,
        negative_ids=negative,
        positive_bias=items.bias(target),
        negative_bias=items.bias(negative),
    )


def _none(train: Histories, n_items: int, samples: int, rng: np.random.Generator) -> Draw:
    return lambda row: np.empty(0, np.int64)


def _uniform(train: Histories, n_items: int, samples: int, rng: np.random.Generator) -> Draw:
    return lambda row: rng.integers(1, n_items + 1, samples)


def _by_clicks(train: Histories, n_items: int, samples: int, rng: np.random.Generator) -> Draw:
    source = drawing(log_shares(train, n_items), 1.0, rng)
    return lambda row: source((samples,))


def _unclicked(train: Histories, n_items: int, samples: int, rng: np.random.Generator) -> Draw:
    source = Unclicked(train, n_items)
    return lambda row: source.draw(row, rng)


ITEM_LOSSES: dict[str, ItemLoss] = {
    "softmax": ItemLoss(full_softmax, _none),
    "sce": ItemLoss(scalable, _none),
    "sampled": ItemLoss(sampled_softmax, _uniform),
    "popular": ItemLoss(sampled_softmax, _by_clicks),
    "bce": ItemLoss(binary, _unclicked),
    "gbce": ItemLoss(generalised_binary, _uniform),
}
