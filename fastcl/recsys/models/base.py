"""The base class of models: the methods that training, evaluation, serving and run folders call. It has no layers and
no losses.
"""

import dataclasses
import functools
import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fastcl.recsys.data import PAD, Histories, Items, Split
from fastcl.recsys.data.scoring import check_items, frozen, item_table
from fastcl.recsys.models.batching import Packed
from fastcl.recsys.settings import with_settings
from fastcl.recsys.showing import brief

Reads = Sequence[tuple[nn.Embedding, Tensor | None]]
SHORT = 20  # clicks of a user, on average


class Reading(NamedTuple):
    """What the user encoder of a model reads of a history: the newest so many clicks, then perhaps a token."""

    clicks: int
    token: int | None = None  # the number of an item that stands behind the newest click and is none of the items
    cuts: Sequence[float] = ()  # limits of time buckets, rising, in the unit of the data; empty: it reads no times


def inner_products(queries: Tensor, table: Tensor) -> Tensor:
    """[B, D] or [B, K, D] and [I, D] -> [B, I]: inner products, for K vectors per history the largest of the K.

    >>> inner_products(torch.eye(2)[None], torch.tensor([[1.0, 2.0], [4.0, 3.0]])).tolist()
    [[2.0, 4.0]]
    """
    of_each = queries.unbind(1) if queries.ndim == 3 else (queries,)
    # Computing the K products together would take K times the memory.
    return functools.reduce(torch.maximum, (query @ table.T for query in of_each))


def short(train: Histories) -> bool:
    """Whether the histories have less than SHORT clicks on average."""
    return len(train.item) < SHORT * len(train)


def check_model(model: object) -> None:
    """TypeError for what is no `Model` and no scorer that knows its items, such as the path of a run folder."""
    if not hasattr(model, "items"):
        hint = f"; load({str(model)!r}) opens a run folder" if isinstance(model, str | os.PathLike) else ""
        raise TypeError(f"model: expected a Model, got {type(model).__name__}{hint}")


class NamedRows(NamedTuple):
    """names: the ids that rows `first`, first + 1, ... of a tensor belong to."""

    names: Sequence[str]
    first: int = 1


class Model(nn.Module, ABC):
    """A recommender that scores vectors of histories against vectors of items.

    A model is made by `Model(items, config=None, *, seed=0, **options)`, with a `Config` or with its fields as
    keywords. All of its parameters exist after construction. docs/contribute/adding-a-model.md writes a model from
    start to end.
    """

    name: ClassVar[str]
    Config: ClassVar[type]
    # Names of the terms that `parts` gives; metrics.jsonl holds the mean of each where there are several.
    part_names: tuple[str, ...] = ("loss",)
    # The tensors of the state dict whose row i is that of item i.
    item_tables: ClassVar[tuple[str, ...]] = ("item.weight",)
    # Whether training has steps of an optimiser. A model that only counts the clicks (counted.py) has one epoch.
    learns: ClassVar[bool] = True
    # Whether a history without a known item has a list too, as of a model that gives everybody the same one.
    serves_strangers: ClassVar[bool] = False
    # (rank, world_size): `batches` yields only this process's slice of each batch. An argument of `batched`.
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

    @classmethod
    def suited(cls, train: Histories, chosen: Collection[str] = ()) -> dict[str, Any]:
        """Settings that depend on how much there is to learn from, where they differ from the config's defaults. The
        commands train and tune begin with them; in Python a model is made with them by
        `Model(split.items, **Model.suited(split.train))`. chosen: names of settings that the user has chosen.
        """
        return {}

    @abstractmethod
    def encode(self, histories: Histories) -> Tensor:
        """[B, D], one vector per history; or [B, K, D], K per history, where a score is the largest over the K."""

    # `encode` in the three steps of an exported graph (serving/graph.py). A model without them trains and serves too.
    def reading(self) -> Reading:
        """What `encode` reads of a history."""
        raise ValueError(f"model: expected one whose user encoder can be a graph, got {self.name}")

    def click_tables(self) -> tuple[Tensor, ...]:
        """[I+1, ...] each, all that `encode` reads of an item, by its number; one row more where there is a token."""
        raise NotImplementedError

    def user_vectors(self, about: Sequence[Tensor], bucket: Tensor, clicks: Packed) -> Tensor:
        """[B, D] or [B, K, D], `encode` of clicks. about: the rows of `click_tables` for each click, [n, ...] each.
        bucket: int64 [n], the time bucket of each click.
        """
        raise NotImplementedError

    def item_vectors(self) -> Tensor:
        """[I+1, D], one vector per item (row 0 is padding): the score of item i is encode(h) @ item_vectors()[i]. The
        vectors include temperature, normalisation and bias.
        """
        raise ValueError(f"model: expected one with item vectors, got {self.name}, which scores otherwise")

    def vectors_of(self, item: Tensor) -> Tensor:
        """[n, D], the rows item [n] of `item_vectors`."""
        return self.item_vectors()[item]

    def scores(self, histories: Histories) -> Tensor:
        """float32 [B, I+1], encode(histories) @ item_vectors().T, or the largest over a history's K vectors. The
        padding column is -inf. Every call encodes the items; in a `frozen` block only the first call does. The model is
        in eval mode during the call. Raises ValueError for histories of another item table.
        """
        check_items(self, histories, "histories")
        with frozen(self):
            scores = inner_products(self.encode(histories), item_table(self))
        scores[:, PAD] = -torch.inf
        return scores

    def neighbours(self, item: int) -> Tensor:
        """float32 [I+1], how near each item is to item `item` (1..I): here the cosine of their vectors."""
        vectors = nn.functional.normalize(item_table(self).float(), dim=1)
        return vectors @ vectors[item]

    @abstractmethod
    def loss(self, batch: Any) -> Tensor:
        """The mean loss of a batch, a scalar."""

    def parts(self, batch: Any) -> dict[str, Tensor]:
        """One scalar for each of `part_names`; their sum is the loss. Training calls this method."""
        return {"loss": self.loss(batch)}

    @abstractmethod
    def batches(self, train: Histories, rng: np.random.Generator) -> Iterator[Any]:
        """One epoch of batches. Each is this process's slice (`share`), which may hold no targets.

        The order of the batches must depend on `rng` alone, which has the same state in all processes.
        """

    @abstractmethod
    def steps(self, train: Histories) -> int:
        """The number of batches in an epoch."""

    def reads(self, batch: Any) -> Reads:
        """Of a model with tables of rows (`RowTable`): which rows of which table `loss` looks up for this batch, int64
        [n] in any order, repeated or not; more than these is allowed, less is an error. None in place of rows: all, of
        which each process gets its own in `RowTable.own`; every process then computes the loss, also of a batch without
        targets. Other tables are passed over.
        """
        return ()

    def reads_after(self, batch: Any) -> Reads:
        """The same of `after_step`, of which no row has a gradient."""
        return ()

    def named_rows(self) -> Mapping[str, NamedRows]:
        """The tensors of the state dict that have a row for each item, user or value of a feature. A training that
        begins with the weights of an earlier one (`fit(init=...)`) finds these rows by their names. Here they are
        those of `item_tables`.
        """
        return {name: NamedRows(self.items.ids) for name in self.item_tables}

    @property
    def encodes_features(self) -> bool:
        """Whether item vectors are made of item features too, so that an item without clicks has one (`with_items`)."""
        return False

    def reads_of(self, histories: Histories) -> Reads | None:
        """The same of `encode`; `vectors_of` then looks up the rows of its items and no others. None: `encode` or
        `item_vectors` may read any row, so that several processes gather the tables to validate.
        """
        return None

    def targets(self, batch: Any) -> int:
        """The number of terms that `loss` averages, which weighs this batch against others of the same step."""
        return len(batch.target)

    def usual_steps(self, train: Histories) -> int:
        """The number of batches of any epoch but the first, which may have a pre-training too."""
        return self.steps(train)

    def begins_stage(self, batch: Any) -> bool:
        """Whether another stage of the training, whose loss has another scale, begins with this batch. The optimiser
        then forgets its moments.
        """
        return False

    def after_update(self) -> None:
        """Counts optimiser steps. Training calls it after each of them, in all processes, also where one's share of the
        batch is empty.
        """

    def after_step(self, batch: Any) -> None:
        """Updates what a model carries from batch to batch, such as a queue. Training calls it after each batch with
        targets: after the optimiser step or, for all but the last of several batches of a step, after backward.
        """

    @classmethod
    def learning_rate(cls, config: Any, asked: float | None) -> float:
        """The rate that training begins with: `asked`, or that of the config. ValueError where one is asked of a model
        that learns no weights, whose rate is recorded as 1.
        """
        if cls.learns:
            return float(config.lr) if asked is None else asked
        if asked is not None:
            raise ValueError(f"lr: expected none for {cls.name}, which has no weights to learn, got {asked}")
        return 1.0

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)


class UserModel(Model):
    """A model with parameters for each user in training; `users[row]` is the id of the user of a row.

    It is constructed as `UserModel(items, config, *, users, seed=0, **options)`; `make` does so for a split.
    """

    def __init__(self, items: Items, users: tuple[str, ...], config: Any) -> None:
        super().__init__(items, config)
        if len(set(users)) != len(users):
            raise ValueError("users: expected distinct ids, got a repeated one")
        self.users = tuple(users)
        self._number = {user: number for number, user in enumerate(self.users)}

    def numbers(self, histories: Histories) -> np.ndarray:
        """int64 [B], the row of each history's user; -1 where the user was not in training or is unknown."""
        if histories.users is None:
            return np.full(len(histories), -1)
        return np.array([self._number.get(user, -1) for user in histories.users], np.int64)

    def check_users(self, train: Histories) -> None:
        """ValueError unless row u of `train` belongs to user u."""
        users = () if train.users is None else tuple(train.users)
        if users != self.users:
            raise ValueError(f"split: expected the {len(self.users):,} users of the model, in their order, got others")


def make(model: type[Model], split: Split, **options: Any) -> Any:
    """A model of the class for the items of a split and, for a UserModel, for its users. Where the split has no times,
    a model that reads times has no time cuts unless `options` has some.

    The return type is Any because the class decides it.
    """
    users = {"users": split.users} if issubclass(model, UserModel) else {}
    if split.train.time is None and any(one.name == "time_cuts" for one in dataclasses.fields(model.Config)):
        options.setdefault("time_cuts", ())
    return model(split.items, **users, **options)
