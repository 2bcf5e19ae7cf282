"""LightGCN (He et al. 2020): vectors of users and items, averaged over walks on the graph of who clicked what, with any
of the losses for pairs.

This file holds the graph and the products with it; collaborative.py has batches, losses and users outside of training.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastcl.recsys.data import PAD, Histories, Items
from fastcl.recsys.models.base import NamedRows
from fastcl.recsys.models.collaborative import LOSS_MEANING, Batch, Collaborative, CollaborativeConfig, Vectors
from fastcl.recsys.models.layers import seeded
from fastcl.recsys.models.pair_losses import LOSSES
from fastcl.recsys.models.ragged import Ragged
from fastcl.recsys.options import at_least
from fastcl.recsys.settings import setting, settled


@dataclass(frozen=True)
class LightGCNConfig(CollaborativeConfig):
    """Settings of `LightGCN`."""

    loss: str = setting("sampled_softmax", LOSS_MEANING, LOSSES)  # corrects for how often items are in batches
    layers: int = setting(1, "Steps of the longest walk; more of them cost as many products with the graph.")
    negatives: str = setting(
        "batch",
        """Where negatives come from: all items alike, items in proportion to their train clicks, or the other items of
        the batch.""",
        ("uniform", "popularity", "batch"),
    )
    batch: int = setting(2048, "Clicks in a batch.")

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, "layers", self.layers)


class Side(NamedTuple):
    """A sparse matrix by rows, such as the edges of all users or items: row b has the columns
    column[offsets[b]:offsets[b+1]], with weights.
    """

    offsets: Tensor  # int64 [rows + 1]
    column: Tensor  # int64 [edges]
    weight: Tensor  # float32 [edges], 1 / sqrt(degree of the row * degree of the column)

    def times(self, table: Tensor) -> Tensor:
        """[rows, D], the product with `table` [columns, D]."""
        # Sums of bags take a third of the time of a product with torch's sparse matrices on a processor.
        return F.embedding_bag(
            self.column,
            table,
            self.offsets,
            mode="sum",
            per_sample_weights=self.weight.to(table),
            include_last_offset=True,
        )

    def take(self, which: Tensor) -> "Side":
        """The rows `which` alone."""
        first, count = self.offsets[which], self.offsets[which + 1] - self.offsets[which]
        ends = F.pad(count.cumsum(0), (1, 0))
        edge = torch.arange(int(ends[-1]), device=which.device) + torch.repeat_interleave(first - ends[:-1], count)
        return Side(ends, self.column[edge], self.weight[edge])

    def transposed(self, columns: int) -> "Side":
        """The same edges by columns, of which there are so many."""
        count = self.offsets.diff()
        row = torch.repeat_interleave(torch.arange(len(count), device=count.device), count)
        order = torch.argsort(self.column, stable=True)
        ends = F.pad(torch.bincount(self.column, minlength=columns).cumsum(0), (1, 0))
        return Side(ends, row[order], self.weight[order])


class Product(torch.autograd.Function):
    """side.times(x), with a gradient for x alone. transposed: the transposed side, by which the gradient is a product
    as well.
    """

    @staticmethod
    def forward(ctx: Any, side: Side, transposed: Side, x: Tensor) -> Tensor:
        ctx.transposed = transposed
        return side.times(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, Tensor]:
        return None, None, ctx.transposed.times(grads[0].contiguous())


def of_rows(rows: Side, table: Tensor) -> Tensor:
    """rows.times(table), with a gradient for `table`."""
    return Product.apply(rows, rows.transposed(len(table)), table)


class Graph(Ragged):
    """Which user has clicked which items: each user's distinct items in rising order. The graph is part of the model's
    state, with any number of edges; it has none before training.
    """

    def __init__(self, users: int, items: int) -> None:
        super().__init__(items, users)
        self._sides: tuple[Tensor, Side, Side] | None = None

    def fill(self, train: Histories) -> None:
        """Sets the graph to the clicks of `train`, each pair of user and item once."""
        row = np.repeat(np.arange(len(train)), train.lengths)
        pair = np.unique(row * (self.items + 1) + train.item)
        row, item = np.divmod(pair, self.items + 1)
        self.set(np.append(0, np.bincount(row, minlength=len(train)).cumsum()), item)

    def sides(self) -> tuple[Side, Side]:
        """The edges of the users [U] and of the items [I+1]."""
        if self._sides is None or self._sides[0] is not self.item:
            degree = self.offsets.diff(), torch.bincount(self.item, minlength=self.items + 1)
            user = torch.repeat_interleave(torch.arange(len(self.offsets) - 1, device=self.item.device), degree[0])
            weight = (degree[0][user] * degree[1][self.item]).double().rsqrt().float()
            of_users = Side(self.offsets, self.item, weight)
            self._sides = self.item, of_users, of_users.transposed(self.items + 1)
        return self._sides[1:]


class LightGCN(Collaborative):
    """LightGCN: the mean of A^k E over k = 0..layers. E are the tables; A holds a click in train between a user and an
    item as 1 / sqrt(degree of the user * degree of the item).

    In training the last product is computed for the rows of the batch alone, and so is the first one of the backward
    pass: a step takes layers - 1 products with the whole graph in either direction.

    Args:
        items: the item table.
        config: the settings; None: the settings are the keywords `options`.
        users: the ids of the users in training, in the order of the training rows: `split.users`.
        seed: seed of the initial weights.

    >>> from fastcl.recsys import Histories, Items, LightGCN
    >>> model = LightGCN(Items(ids=("a", "b", "c")), users=("u", "v"), dim=8, seed=0)
    >>> model.scores(Histories.from_lists([[1, 2], [3]])).shape  # of strangers: folded in from their items
    torch.Size([2, 4])
    """

    name = "lightgcn"
    Config = LightGCNConfig
    config: LightGCNConfig

    def __init__(
        self,
        items: Items,
        config: LightGCNConfig | None = None,
        *,
        users: tuple[str, ...] = (),
        seed: int = 0,
        **options: Any,
    ) -> None:
        config = settled(LightGCNConfig, config, options)
        super().__init__(items, users, config)
        with seeded(seed):
            self.user = nn.Parameter(torch.randn(len(users), config.dim) * config.init)
            self.item = nn.Parameter(torch.randn(len(items) + 1, config.dim) * config.init)
        with torch.no_grad():
            self.item[PAD] = 0.0
        self.graph = Graph(len(users), len(items))

    def _walks(self, last: int) -> Iterator[tuple[Tensor, Tensor]]:
        """A^k E of users and items, k = 0..last."""
        of_users, of_items = self.graph.sides()
        user, item = self.user, self.item
        yield user, item
        for _ in range(last):
            user, item = Product.apply(of_users, of_items, item), Product.apply(of_items, of_users, user)
            yield user, item

    def vectors(self, user: Tensor, item: Tensor) -> Vectors:
        of_users, of_items = self.graph.sides()
        whose, user = torch.unique(user, return_inverse=True)
        which, item = torch.unique(item, return_inverse=True)
        walks = list(self._walks(self.config.layers - 1))
        users = [F.embedding(whose, table) for table, _ in walks]
        items = [F.embedding(which, table) for _, table in walks]
        last_users, last_items = walks[-1]
        mean_user = torch.stack([*users, of_rows(of_users.take(whose), last_items)]).mean(0)
        mean_item = torch.stack([*items, of_rows(of_items.take(which), last_users)]).mean(0)
        rows = F.embedding(user, users[0]), F.embedding(item, items[0])
        return Vectors(F.embedding(user, mean_user), F.embedding(item, mean_item), rows)

    def named_rows(self) -> dict[str, NamedRows]:
        return {"user": NamedRows(self.users, 0), "item": NamedRows(self.items.ids)}

    def tables(self) -> tuple[Tensor, Tensor]:
        users, items = zip(*self._walks(self.config.layers), strict=True)
        return torch.stack(users).mean(0), torch.stack(items).mean(0)

    def batches(self, train: Histories, rng: np.random.Generator) -> Iterator[Batch]:
        """One epoch: every click once, in random order. The graph is that of `train`."""
        self.graph.fill(train)
        return super().batches(train, rng)
