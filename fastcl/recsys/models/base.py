"""What training, evaluation, serving and run folders ask of a model; a model file fills it in. No layers and no losses
here.
"""

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from fastcl.recsys.data import PAD, Histories, Items, Split
from fastcl.recsys.data.scoring import check_items, frozen, item_table
from fastcl.recsys.settings import with_settings
from fastcl.recsys.showing import brief


def inner_products(queries: Tensor, table: Tensor) -> Tensor:
    """[B, D] or [B, K, D] and [I, D] -> [B, I]; of K vectors a history, the largest of their inner products.

    >>> inner_products(torch.eye(2)[None], torch.tensor([[1.0, 2.0], [4.0, 3.0]])).tolist()
    [[2.0, 4.0]]
    """
    of_each = queries.unbind(1) if queries.ndim == 3 else (queries,)
    # One after the other: together they would take K times the memory.
    return functools.reduce(torch.maximum, (query @ table.T for query in of_each))


class Model(nn.Module, ABC):
    """A sequential recommender: history vectors against item vectors. All its parameters exist after construction,
    which is `Model(items, config=None, *, seed=0, **options)`: with a `Config`, or with its fields as keywords.

    docs/contribute/adding-a-model.md writes one from start to end.
    """

    name: ClassVar[str]
    Config: ClassVar[type]
    # Names of the terms that `parts` gives; metrics.jsonl has the mean of each one where there are several.
    part_names: tuple[str, ...] = ("loss",)
    # (rank, world_size): `batches` yields only this process's slice of each batch. For `batched`.
    share: tuple[int, int] = (0, 1)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        config = cls.__dict__.get("Config")
        if isinstance(config, type) and dataclasses.is_dataclass(config):
            cls.__doc__ = with_settings(cls.__doc__, config)  # what `help` shows

    def __init__(self, items: Items, config: Any) -> None:
        super().__init__()
        self.items = items
        self.config = config

    def __repr__(self) -> str:
        count = sum(parameter.numel() for parameter in self.parameters())
        values = ", ".join(f"{name}={brief(value)}" for name, value in vars(self.config).items())
        return f"{type(self).__name__}({len(self.items):,} items, {count:,} parameters, {values})"

    @abstractmethod
    def encode(self, histories: Histories) -> Tensor:
        """[B, D], one vector a history; or [B, K, D], K of them, and an item's score is its largest one with any."""

    def item_vectors(self) -> Tensor:
        """[I+1, D], one vector an item (row 0 is padding), in the space of `encode`: the score of item i is
        encode(h) @ item_vectors()[i]. A temperature, normalisation or bias is part of the vectors.
        """
        raise ValueError(f"model: expected one with item vectors, got {self.name}, which scores otherwise")

    def scores(self, histories: Histories) -> Tensor:
        """float32 [B, I+1], encode(histories) @ item_vectors().T, the largest of a history's K where it has several
        vectors; the padding column is -inf. Every call encodes the items, but in a `frozen` block the first one alone.
        The model is in eval mode for the time of the call. Raises ValueError for histories of other items.
        """
        check_items(self, histories, "histories")
        with frozen(self):
            scores = inner_products(self.encode(histories), item_table(self))
        scores[:, PAD] = -torch.inf
        return scores

    @abstractmethod
    def loss(self, batch: Any) -> Tensor:
        """The mean loss of a batch, a scalar."""

    def parts(self, batch: Any) -> dict[str, Tensor]:
        """The scalars, one for each of `part_names`, whose sum is the loss: what training calls."""
        return {"loss": self.loss(batch)}

    @abstractmethod
    def batches(self, train: Histories, rng: np.random.Generator) -> Iterator[Any]:
        """One epoch of batches: of each, the part that `share` names, possibly without targets.

        `rng` is at the same state in all processes, and at no other place does the order of the batches come from.
        """

    @abstractmethod
    def steps(self, train: Histories) -> int:
        """How many batches an epoch has."""

    def targets(self, batch: Any) -> int:
        """How many terms `loss` is the mean of: the weight of this batch beside others of the same step."""
        return len(batch.target)

    def after_step(self, batch: Any) -> None:
        """Called after each batch that had targets, for what a model carries from batch to batch: after the optimiser
        step, or where several batches make a step and more are to come, after the batch's backward pass.
        """

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)


class UserModel(Model):
    """A model that has learnt something of each user in training, by the user's id, which is `users[row]`.

    It is constructed as `UserModel(items, config, *, users, seed=0, **options)`; `make` does so for a split.
    """

    def __init__(self, items: Items, users: tuple[str, ...], config: Any) -> None:
        super().__init__(items, config)
        if len(set(users)) != len(users):
            raise ValueError("users: expected distinct ids, got a repeated one")
        self.users = tuple(users)
        self._number = {user: number for number, user in enumerate(self.users)}

    def numbers(self, histories: Histories) -> np.ndarray:
        """int64 [B], the row of each history's user; -1 of one who was not in training, or is not known."""
        if histories.users is None:
            return np.full(len(histories), -1)
        return np.array([self._number.get(user, -1) for user in histories.users], np.int64)

    def check_users(self, train: Histories) -> None:
        """ValueError where row u of `train` is not that of user u."""
        users = () if train.users is None else tuple(train.users)
        if users != self.users:
            raise ValueError(f"split: expected the {len(self.users):,} users of the model, in their order, got others")


def make(model: type[Model], split: Split, **options: Any) -> Any:
    """A model of the class for the items of a split, and where it has users for the split's.

    Any: the class decides which type it is.
    """
    users = {"users": split.users} if issubclass(model, UserModel) else {}
    return model(split.items, **users, **options)
