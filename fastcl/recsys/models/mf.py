"""Matrix factorisation (Rendle et al. 2009; Koren et al. 2009): a table of user vectors and one of item vectors, under
any of the losses for pairs.

The tables only; batches, losses and users from outside the training are collaborative.py's.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastcl.recsys.data import PAD, Histories, Items
from fastcl.recsys.models.base import NamedRows, Reads
from fastcl.recsys.models.collaborative import Batch, Collaborative, CollaborativeConfig, Vectors
from fastcl.recsys.models.layers import seeded
from fastcl.recsys.models.rowtable import RowTable
from fastcl.recsys.settings import settled


@dataclass(frozen=True)
class MFConfig(CollaborativeConfig):
    """Settings of `MF`."""


class MF(Collaborative):
    """Matrix factorisation: the score of a user and an item is the inner product, or cosine, of their two rows.

    A step reads and moves only the rows of its batch (`RowTable`), with the result of Adam over the whole tables.

    Args:
        items: the item table.
        users: the ids of the users in training, in the order of the training rows: `split.users`.
        config: the settings; None: the settings are the keywords `options`.
        seed: seed of the initial weights.

    >>> from fastcl.recsys import MF, Histories, Items
    >>> model = MF(Items(ids=("a", "b", "c")), users=("u", "v"), dim=8, seed=0)
    >>> model.scores(Histories.from_lists([[1, 2], [3]])).shape  # of strangers: folded in from their items
    torch.Size([2, 4])
    """

    name = "mf"
    Config = MFConfig

    def __init__(
        self,
        items: Items,
        config: MFConfig | None = None,
        *,
        users: tuple[str, ...] = (),
        seed: int = 0,
        **options: Any,
    ) -> None:
        config = settled(MFConfig, config, options)
        super().__init__(items, users, config)
        with seeded(seed):
            self.user = RowTable(len(users), config.dim, config.init)
            self.item = RowTable(len(items) + 1, config.dim, config.init)
        with torch.no_grad():
            self.item.weight[PAD] = 0.0

    def vectors(self, user: Tensor, item: Tensor) -> Vectors:
        found = self.user(user), self.item(item)
        return Vectors(*found, rows=found)

    def reads(self, batch: Batch) -> Reads:
        items = ((self.item, batch.target), *(() if batch.negative is None else ((self.item, batch.negative),)))
        return (self.user, batch.user), *items

    def reads_of(self, histories: Histories) -> Reads | None:
        """None with a user who was not in training, whose vector has the mean of all items in it."""
        number = self.numbers(histories)
        return [(self.user, self.tensor(number))] if (number >= 0).all() else None

    def of_users(self, user: Tensor) -> Tensor:
        return self.user(user)

    def vectors_of(self, item: Tensor) -> Tensor:
        return self.scored_vectors(self.item(item))

    def named_rows(self) -> dict[str, NamedRows]:
        return {"user.weight": NamedRows(self.users, 0), "item.weight": NamedRows(self.items.ids)}

    def tables(self) -> tuple[Tensor, Tensor]:
        return self.user.weight, self.item.weight
