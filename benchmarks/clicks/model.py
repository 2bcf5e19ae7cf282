"""What the nine click models have in common: batches of rows, vectors of a row's items, and the head that makes a
probability of a click of what a model found. The models are in the files beside this one, training.py trains them.

The models are those of the program of HPMN (Ren et al. 2019), whose figures table 9 of Zhou et al. 2021 has. Where that
program differs from what it means to do, the model here does what is meant:
- Padding has a number of its own; there it is that of the first item.
- Users have no vectors; there each user has one, which no row of training trains for a user who is tested.
- Batch normalisation learns its mean and variance, and normalises by them in tests; there both stay 0 and 1.
- Dropout is off in tests, and padding does not change a probability.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.clicks.rows import Rows
from fastcl.recsys.data import PAD, Items

DIM, HIDDEN, LONGEST = 16, 32, 100  # width of an embedding, of a state; items of a row that are read, the newest ones


class Batch(NamedTuple):
    """item: int64 [B, T], a row's history, its target, then padding. length: int64 [B], with the target, 2 or more."""

    item: Tensor
    length: Tensor

    @property
    def last(self) -> Tensor:
        """int64 [B], the place of the target."""
        return self.length - 1

    @property
    def clicked(self) -> Tensor:
        """bool [B, T], which places hold the history."""
        return torch.arange(self.item.shape[1]) < self.last[:, None]

    @property
    def known(self) -> Tensor:
        """bool [B, T], which places hold the history or the target."""
        return torch.arange(self.item.shape[1]) < self.length[:, None]


def batch(rows: Rows) -> Batch:
    history = rows.history.last(LONGEST - 1)
    length = history.lengths + 1
    item = np.zeros((len(length), int(length.max(initial=1))), np.int64)
    item[np.arange(item.shape[1]) < length[:, None] - 1] = history.item
    item[np.arange(len(length)), length - 1] = rows.target
    return Batch(torch.from_numpy(item), torch.from_numpy(length))


def batches(rows: Rows, size: int, rng: np.random.Generator | None = None) -> Iterator[tuple[Batch, Tensor]]:
    """Batches with their labels, float32 [B]. rng: mixes the rows; of the next eight batches those of equal length stay
    together, so that few places are padding. None: in order.
    """
    order = np.arange(len(rows.target)) if rng is None else rng.permutation(len(rows.target))
    for begin in range(0, len(order), 8 * size):
        part = order[begin : begin + 8 * size]
        if rng is not None:
            part = part[np.argsort(rows.history.lengths[part], kind="stable")]
        cuts = np.arange(0, len(part), size)
        for cut in cuts if rng is None else rng.permutation(cuts):
            found = rows.take(part[cut : cut + size])
            yield batch(found), torch.from_numpy(found.label.astype(np.float32))


class Steps(nn.Module):
    """The vectors of items, [...] -> [..., width]: the embedding of the item and the mean of those of its categories.
    Padding has zeros.
    """

    def __init__(self, items: Items) -> None:
        super().__init__()
        self.id = nn.Embedding(len(items) + 1, DIM, padding_idx=PAD)
        self.bags = nn.ModuleList()
        for nth, feature in enumerate(items.features.values()):
            self.bags.append(nn.EmbeddingBag(len(feature.values) + 1, DIM, mode="mean", padding_idx=PAD))
            self.register_buffer(f"codes_{nth}", torch.from_numpy(feature.codes), persistent=False)
        self.width = DIM * (1 + len(self.bags))
        for table in (self.id, *self.bags):
            with torch.no_grad():
                table.weight.normal_(std=0.1)[PAD] = 0

    def forward(self, item: Tensor) -> Tensor:
        flat = item.flatten()
        bags = [bag(self.get_buffer(f"codes_{nth}")[flat]) for nth, bag in enumerate(self.bags)]
        return torch.cat([self.id(flat), *bags], -1).unflatten(0, item.shape)


class Head(nn.Sequential):
    """[B, width] -> logits [B, 1]."""

    def __init__(self, width: int) -> None:
        hidden = [nn.Linear(width, 200), nn.Tanh(), nn.Dropout(0.2), nn.Linear(200, 80), nn.Tanh(), nn.Dropout(0.2)]
        super().__init__(nn.BatchNorm1d(width), *hidden, nn.Linear(80, 1))


class ClickModel(nn.Module, ABC):
    """A probability of a click for each row. A model has its parts made by `build`, given the width of an item's
    vector; what `found` finds has the width that `build` returns.
    """

    def __init__(self, items: Items, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.steps = Steps(items)
            self.head: nn.Module = Head(self.build(self.steps.width))

    @abstractmethod
    def build(self, width: int) -> int: ...

    @abstractmethod
    def found(self, steps: Tensor, batch: Batch) -> Tensor:
        """[B, T, width], vectors of the items of a batch -> [B, found]."""

    def forward(self, batch: Batch) -> Tensor:
        """The logits [B]."""
        return self.head(self.found(self.steps(batch.item), batch))[:, 0]

    def penalty(self) -> Tensor:
        """What training adds to the loss, beside the decay of the weights."""
        return torch.zeros(())

    def decayed(self) -> list[Tensor]:
        """The weights that decay: all but those of embeddings, biases and normalisations."""
        tables = {id(m.weight) for m in self.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
        return [p for p in self.parameters() if p.ndim > 1 and id(p) not in tables]


def at(steps: Tensor, place: Tensor) -> Tensor:
    """[B, T, D] and int64 [B] -> [B, D], the vector at a place of each row."""
    return steps[torch.arange(len(steps)), place]


class Attention(nn.Module):
    """Weights of keys [B, K, D] for queries [B, D] of one width: the softmax of an MLP of [q, k, q - k, q * k] (Zhou et
    al. 2018, "Deep Interest Network").
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(4 * width, 80), nn.ReLU(), nn.Linear(80, 40), nn.ReLU(), nn.Linear(40, 1))

    def forward(self, query: Tensor, keys: Tensor, held: Tensor | None = None) -> Tensor:
        """[B, K]. held: bool [B, K], the keys that have a weight; None: all."""
        q = query[:, None].expand_as(keys)
        score = self.mlp(torch.cat([q, keys, q - keys, q * keys], -1))[..., 0]
        return (score if held is None else score.masked_fill(~held, -torch.inf)).softmax(1)
