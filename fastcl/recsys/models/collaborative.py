"""What the models with user ids share: settings, batches of pairs with negatives, the loss, and vectors for users who
were not in training.

pair_losses.py has the losses; mf.py and lightgcn.py make the vectors.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fastcl.normalize import normalized
from fastcl.recsys.data import PAD, Histories, Items
from fastcl.recsys.data.scoring import item_table, kept
from fastcl.recsys.models.base import UserModel
from fastcl.recsys.models.batching import Unclicked, log_shares
from fastcl.recsys.models.pair_losses import LOSSES, WITH_LAM, WITHOUT_NEGATIVES, Constants, Pairs
from fastcl.recsys.options import above, at_least, between
from fastcl.recsys.settings import check_choices, setting

SIMILARITIES: dict[str, Callable[[Tensor], Tensor]] = {
    "cosine": normalized,
    "dot": lambda x: x,
}
LOSS_MEANING = """Training loss of a user's vector with a clicked item and with negatives. "infonce" is the sampled
    softmax without a correction for how negatives are drawn, "sampled_softmax" the one with it."""
SCORED_BY = ("similarity", *SIMILARITIES)
NEGATIVES = ("uniform", "popularity", "batch")


def every_click(train: Histories, rng: np.random.Generator) -> np.ndarray:
    return rng.permutation(len(train.item))


def of_random_users(train: Histories, rng: np.random.Generator) -> np.ndarray:
    row = rng.choice(np.flatnonzero(train.lengths), len(train.item))
    return train.offsets[row] + rng.integers(train.lengths[row])


def often_of_users(train: Histories) -> np.ndarray:
    found: np.ndarray = len(train.item) / np.count_nonzero(train.lengths) / np.repeat(train.lengths, train.lengths)
    return found


class Sampling(NamedTuple):
    """order: the clicks of an epoch in their order, int64 indices of train.item, as many as there are. often: how often
    each click is among them on average, [P]; None: once.
    """

    order: Callable[[Histories, np.random.Generator], np.ndarray]
    often: Callable[[Histories], np.ndarray | None]


SAMPLING = {
    "clicks": Sampling(every_click, lambda train: None),
    "users": Sampling(of_random_users, often_of_users),
}
PER = ("batch", "row")


@dataclass(frozen=True)
class CollaborativeConfig:
    """Settings that `MF` and `LightGCN` share."""

    dim: int = setting(64, "Width of the vectors of users and items.")
    loss: str = setting("mine_plus", LOSS_MEANING, LOSSES)
    similarity: str = setting("cosine", "What a score is in training: cosine, or inner product (dot).", SIMILARITIES)
    scored_by: str = setting(
        "similarity",
        """What a score is after training: that of the training (similarity), cosine, or inner product (dot). Negatives
        from the batch are drawn by popularity, so that a cosine trained against them leaves popularity out of the
        score, unless the loss is sampled_softmax; the lengths of LightGCN's vectors, which inner products count, bring
        popularity back in.""",
        SCORED_BY,
    )
    temperature: float = setting(0.1, "Scores are divided by it in every loss but ccl and directau.")
    lam: float = setting(1.1, "Weight of the negatives' part of mine_plus and infonce_plus.")
    epsilon: float = setting(0.0, "Weight of the positive in the denominator of infonce_plus.")
    margin: float = setting(0.8, "Score above which ccl pushes a negative away.")
    weight: float = setting(150.0, "Weight of ccl's negatives.")
    gamma: float = setting(1.0, "Weight of directau's uniformity.")
    positive_temperature: float = setting(0.1, "Of bsl's positives; temperature is that of its negatives.")
    negatives: str = setting(
        "uniform",
        """Where negatives come from: all items alike, items in proportion to their train clicks, or the other items of
        the batch.""",
        NEGATIVES,
    )
    count: int = setting(800, "Negatives that are drawn for a batch or a row.")
    per: str = setting(
        "batch",
        """What so many negatives are drawn for: a whole batch, whose rows share them, or each row by itself. Uniform
        ones of a row are never items that its user has clicked; shared ones may be.""",
        PER,
    )
    sampling: str = setting(
        "clicks",
        """What an epoch has. "clicks": every train click once (Rendle et al. 2009). "users": as many rows as there are
        clicks, each a user, all alike, with one of the user's clicks, as in LightGCN's program, so that a click of a
        user with few clicks weighs more.""",
        SAMPLING,
    )
    dropout: float = setting(0.0, "Dropout rate of the users' vectors.")
    decay: float = setting(
        0.0,
        """Weight decay of the table rows that a batch reads: decay / 2 times the sum of their squares, divided by
        batch, is added to the loss.""",
    )
    init: float = setting(0.01, "Standard deviation of the initial tables.")
    batch: int = setting(1024, "Clicks in a batch.")
    lr: float = setting(1e-3, "Learning rate of the first step.")

    def __post_init__(self) -> None:
        for name in ("dim", "count", "batch"):
            at_least(1, name, getattr(self, name))
        for name in ("temperature", "positive_temperature", "lam", "init", "lr"):
            above(0.0, name, getattr(self, name))
        for name in ("epsilon", "weight", "gamma", "decay"):
            between(0.0, float("inf"), name, getattr(self, name))
        between(-1.0, float("inf"), "margin", self.margin)
        between(0.0, 1.0, "dropout", self.dropout)
        check_choices(self)


class Batch(NamedTuple):
    user: Tensor  # int64 [B], rows of the user table
    target: Tensor  # int64 [B], an item that each user has clicked
    negative: Tensor | None  # int64 [M] or [B, N]; None: the batch's items


class Vectors(NamedTuple):
    """Of a batch, as they are scored; and the rows of the tables that they come from, for the decay."""

    user: Tensor  # [B, D]
    item: Tensor  # [n, D]
    rows: tuple[Tensor, ...]


class Collaborative(UserModel):
    """A vector for every user of the training and for every item; the score is their inner product or cosine (the
    settings `similarity` in training, `scored_by` after it).

    A user who was not in training is folded in: the vector is the mean vector of the history's items minus the mean
    vector of all items, times lam if the loss has one. A contrastive loss with uniform negatives first moves an
    untrained user in this direction. `evaluate` and `recommend_users` know users by their ids; `recommend` gets
    histories alone and folds all users in.
    """

    config: CollaborativeConfig
    log_q: Tensor  # [I+1], log probability that an item is drawn as a negative, up to a constant; set by `batches`

    def __init__(self, items: Items, users: tuple[str, ...], config: CollaborativeConfig) -> None:
        super().__init__(items, users, config)
        self.constants = Constants(**{name: getattr(config, name) for name in Constants._fields})
        self.dropout = torch.nn.Dropout(config.dropout)
        self.register_buffer("log_q", torch.zeros(len(items) + 1), persistent=False)

    @abstractmethod
    def vectors(self, user: Tensor, item: Tensor) -> Vectors:
        """The vectors of users (rows of the user table) and items, before the similarity is applied."""

    @abstractmethod
    def tables(self) -> tuple[Tensor, Tensor]:
        """[U, D] and [I+1, D], the vectors of all users and items, before the similarity is applied."""

    def item_vectors(self) -> Tensor:
        """[I+1, D], the vectors of all items as they are scored, divided by the temperature."""
        return self.scored_vectors(kept(self, "tables", self.tables)[1])

    def scored_vectors(self, item: Tensor) -> Tensor:
        """[n, D], vectors of items [n, D] as they are scored."""
        return self._scored(item) / self.config.temperature

    def _scored(self, x: Tensor) -> Tensor:
        config = self.config
        return SIMILARITIES[config.similarity if config.scored_by == "similarity" else config.scored_by](x)

    def encode(self, histories: Histories) -> Tensor:
        """[B, D], the vector of each user; users who were not in training are folded in."""
        number = self.numbers(histories)
        known = torch.from_numpy(number >= 0).to(self.device)
        users = self.of_users(self.tensor(number[number >= 0]))
        found = users.new_empty(len(histories), self.config.dim)
        found[known] = users
        if not known.all():
            found[~known] = self._folded(histories.take(np.flatnonzero(number < 0)))
        return self._scored(found)

    def of_users(self, user: Tensor) -> Tensor:
        """[n, D], the rows user [n] of the first of `tables`."""
        return kept(self, "tables", self.tables)[0][user]

    def _folded(self, histories: Histories) -> Tensor:
        if not histories.lengths.all():
            row = int(histories.lengths.argmin())
            raise ValueError(f"histories: expected at least one click of a user not in training, got none in row {row}")
        table = item_table(self)
        offsets, item = self.tensor(histories.offsets[:-1]), self.tensor(histories.item)
        push = self.config.lam if LOSSES[self.config.loss] in WITH_LAM else 1.0
        return F.embedding_bag(item, table, offsets, mode="mean") - push * table[1:].mean(0)

    def loss(self, batch: Batch) -> Tensor:
        config, similarity = self.config, SIMILARITIES[self.config.similarity]
        size = len(batch.target)
        item = batch.target if batch.negative is None else torch.cat([batch.target, batch.negative.flatten()])
        found = self.vectors(batch.user, item)
        user, items = self.dropout(similarity(found.user)), similarity(found.item)
        negative, log_q = None, None
        if batch.negative is not None:
            negative, log_q = items[size:].unflatten(0, batch.negative.shape), self.log_q[batch.negative]
        pairs = Pairs(
            user, items[:size], negative, batch.user, batch.target, batch.negative, self.log_q[batch.target], log_q
        )
        total = LOSSES[config.loss](pairs, self.constants)
        if config.decay:
            user_rows, item_rows = found.rows
            squares = user_rows.square().sum() + item_rows[:size].square().sum()
            # Negatives of the whole batch are read by all processes, which add their parts up.
            among = self.share[1] if batch.negative is not None and batch.negative.ndim == 1 else 1
            squares = squares + item_rows[size:].square().sum() / among
            total = total + 0.5 * config.decay / size * squares
        return total

    def steps(self, train: Histories) -> int:
        return -(-len(train.item) // self.config.batch)

    def batches(self, train: Histories, rng: np.random.Generator) -> Iterator[Batch]:
        """One epoch of clicks in random order, by `sampling`."""
        self.check_users(train)
        config = self.config
        draw = self._sampler(train, rng)
        row = np.repeat(np.arange(len(train)), train.lengths)
        order = SAMPLING[config.sampling].order(train, rng)
        first, step = self.share
        for begin in range(0, len(order), config.batch):
            clicks = order[begin : begin + config.batch]
            negative = draw(row[clicks])
            if negative is not None and negative.ndim == 2:
                negative = negative[first::step]
            clicks = clicks[first::step]
            user, target = self.tensor(row[clicks]), self.tensor(train.item[clicks])
            yield Batch(user, target, None if negative is None else self.tensor(negative))

    def _sampler(self, train: Histories, rng: np.random.Generator) -> Callable[[np.ndarray], np.ndarray | None]:
        """A function that draws a batch's negatives, given the rows of its users. Sets `log_q`."""
        config, items = self.config, len(self.items)
        if config.negatives != "uniform":
            often = SAMPLING[config.sampling].often(train) if config.negatives == "batch" else None
            self.log_q[1:] = log_shares(train, items, often).to(self.device)
        if config.negatives == "batch" or LOSSES[config.loss] in WITHOUT_NEGATIVES:
            return lambda row: None
        if config.negatives == "popularity":
            upto = np.cumsum(np.bincount(train.item, minlength=items + 1) + (np.arange(items + 1) > PAD))
            return lambda row: np.searchsorted(upto, rng.random(self._shape(row)) * upto[-1], side="right")
        if config.per == "batch":
            return lambda row: rng.integers(1, items + 1, config.count)
        unclicked = Unclicked(train, items)
        return lambda row: unclicked.draw(np.repeat(row, config.count), rng).reshape(-1, config.count)

    def _shape(self, row: np.ndarray) -> tuple[int, ...]:
        return (self.config.count,) if self.config.per == "batch" else (len(row), self.config.count)
