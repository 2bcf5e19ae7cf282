"""Caser (Tang & Wang 2018, "Personalized Top-N Sequential Recommendation via Convolutional Sequence Embedding"):
convolutions over the newest few clicks, beside a vector of the user.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fastcl.recsys.baselines.nextitem import LOSS_MEANING, LOSSES, NAMES, NextItemConfig
from fastcl.recsys.data import PAD, Histories, Items
from fastcl.recsys.models.base import NamedRows, UserModel
from fastcl.recsys.models.batching import Spans, batch_count, batched, log_shares, newest
from fastcl.recsys.models.layers import Dropout, seeded
from fastcl.recsys.models.losses import scored
from fastcl.recsys.options import at_least
from fastcl.recsys.settings import setting, settled


@dataclass(frozen=True)
class CaserConfig(NextItemConfig):
    """Settings of `Caser`."""

    dim: int = setting(50, "Width of the vectors of users and of the items that are read.")
    max_len: int = setting(5, "Clicks that the model reads, the newest ones.")
    following: int = setting(3, "Clicks behind those of a window that are its targets.")
    vertical: int = setting(4, "Filters over all clicks of a window, one dimension at a time.")
    horizontal: int = setting(16, "Filters of each height, over all dimensions of 1, 2, ..., max_len clicks.")
    batch: int = setting(512, "Windows in a batch.")
    loss: str = setting("bce", LOSS_MEANING, NAMES)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("following", "vertical", "horizontal"):
            at_least(1, name, getattr(self, name))


class Batch(NamedTuple):
    user: Tensor  # int64 [B], rows of the user table
    item: Tensor  # int64 [B, max_len], padding (0) in front
    window: Tensor  # int64 [m], the window of each target
    target: Tensor  # int64 [m]
    negative: Tensor  # int64, the items that the loss draws


class Caser(UserModel):
    """Convolutions over the newest clicks, beside a vector of the user, scored against a table of its own.

    A window of max_len clicks has the next `following` clicks as targets, and windows slide by one click, so that of a
    history no longer than the two together only the last clicks are targets, as in the authors' program. It draws three
    negatives for the three targets of a window; here each target has its own. A user who was not in training has the
    mean of all users' vectors.

    Args:
        items: the item table.
        users: the ids of the users in training, in the order of the training rows: `split.users`.
        config: the settings; None: the settings are the keywords `options`.
        seed: seed of the initial weights.

    >>> from fastcl.recsys import Histories, Items
    >>> model = Caser(Items(ids=("a", "b", "c")), users=("u", "v"), dim=8, seed=0)
    >>> model.scores(Histories.from_lists([[1, 2], [3]])).shape
    torch.Size([2, 4])
    """

    name = "caser"
    Config = CaserConfig
    item_tables = ("item.weight", "out.weight", "bias")
    log_share: Tensor  # [I], log of each item's share of the train clicks; set by `batches`

    def __init__(
        self, items: Items, config: CaserConfig | None = None, *, users: tuple[str, ...] = (), seed: int = 0,
        **options: Any,
    ) -> None:  # fmt: skip
        config = settled(CaserConfig, config, options)
        super().__init__(items, users, config)
        dim, length = config.dim, config.max_len
        with seeded(seed):
            self.item, self.user = nn.Embedding(len(items) + 1, dim, padding_idx=PAD), nn.Embedding(len(users), dim)
            self.vertical = nn.Linear(length, config.vertical)
            self.horizontal = nn.ModuleList(
                nn.Linear(dim * height, config.horizontal) for height in range(1, length + 1)
            )
            self.dense = nn.Linear(dim * config.vertical + config.horizontal * length, dim)
            self.out = nn.Embedding(len(items) + 1, 2 * dim)
            self.bias = nn.Parameter(torch.zeros(len(items) + 1))
            for table in (self.item, self.user, self.out):
                nn.init.normal_(table.weight, std=1.0 / table.embedding_dim)
        with torch.no_grad():
            self.item.weight[PAD] = 0.0
        self.dropout = Dropout(config.dropout)
        self.register_buffer("log_share", torch.zeros(len(items)), persistent=False)

    def forward(self, item: Tensor) -> Tensor:
        """item [B, max_len], padding in front -> [B, dim]."""
        x = self.item(item)
        found = [self.vertical(x.mT).flatten(1)]
        for height, filters in enumerate(self.horizontal, start=1):
            windows = x.unfold(1, height, 1).flatten(2)  # [B, L - height + 1, dim * height]
            found.append(filters(windows).relu().amax(1))
        return self.dense(self.dropout(torch.cat(found, 1))).relu()

    def encode(self, histories: Histories) -> Tensor:
        """[B, 2 dim + 1]: what the convolutions find, the user's vector, and a 1 for the items' biases."""
        spans = newest(histories, self.config.max_len)
        z = self(self._read(histories, spans.start, spans.stop))
        number = self.tensor(self.numbers(histories))
        anyone = self.user.weight.mean(0) if len(self.users) else self.user.weight.new_zeros(self.config.dim)
        user = torch.cat([self.user.weight, anyone[None]])[number]  # -1 is the last row
        return torch.cat([z, user, z.new_ones(len(z), 1)], 1)

    def item_vectors(self) -> Tensor:
        """[I+1, 2 dim + 1], the items as targets and their biases."""
        return torch.cat([self.out.weight, self.bias[:, None]], 1)

    def loss(self, batch: Batch) -> Tensor:
        hidden = torch.cat([self(batch.item), self.user(batch.user)], 1)[batch.window]
        items = scored(self.out.weight, self.bias[1:], self.log_share)
        return LOSSES[self.config.loss].loss(hidden, items, batch.target, batch.negative)

    def named_rows(self) -> dict[str, NamedRows]:
        return {**super().named_rows(), "user.weight": NamedRows(self.users, 0)}

    def steps(self, train: Histories) -> int:
        return batch_count(self._windows(train), self.config.batch)

    def batches(self, train: Histories, rng: np.random.Generator) -> Iterator[Batch]:
        """One epoch: every window once, in random order."""
        self.check_users(train)
        self.log_share.copy_(log_shares(train, len(self.items)))
        draw = LOSSES[self.config.loss].negatives(train, len(self.items), self.config.samples, rng)
        for spans in batched(self._windows(train), self.config.batch, rng, self.share):
            begin = np.maximum(train.offsets[:-1][spans.row] + 1, spans.stop - self.config.following)
            at = begin[:, None] + np.arange(self.config.following)
            window, nth = np.nonzero(at < spans.stop[:, None])
            target, negative = train.item[at[window, nth]], draw(spans.row[window])
            read = self._read(train, spans.start, begin)
            yield Batch(self.tensor(spans.row), read, *map(self.tensor, (window, target, negative)))

    def _windows(self, train: Histories) -> Spans:
        """The clicks of each window and its targets."""
        length = self.config.max_len + self.config.following
        count = np.where(train.lengths > 1, np.maximum(train.lengths - length + 1, 1), 0)
        row = np.repeat(np.arange(len(train)), count)
        stop = train.offsets[1:][row] - (np.arange(len(row)) - np.repeat(count.cumsum() - count, count))
        return Spans(np.maximum(train.offsets[:-1][row], stop - length), stop, row)

    def _read(self, histories: Histories, start: np.ndarray, stop: np.ndarray) -> Tensor:
        """int64 [B, max_len], the newest clicks of start..stop, with padding in front."""
        at = stop[:, None] + np.arange(-self.config.max_len, 0)
        return self.tensor(np.where(at >= start[:, None], histories.item[np.maximum(at, 0)], PAD))
