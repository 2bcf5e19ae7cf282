"""What the sequence models of this folder share: settings, batches in which every click of a window is a target, and
losses over the item table.

A model says how clicks become states (`forward`), and where its items' vectors are. Nothing here is of one model.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastcl.recsys.data import PAD, Histories, Items
from fastcl.recsys.models.base import Model
from fastcl.recsys.models.batching import (
    Packed,
    Prefixes,
    Spans,
    batch_count,
    batched,
    log_shares,
    newest,
    pack,
    windows,
)
from fastcl.recsys.models.layers import seeded
from fastcl.recsys.models.losses import ITEM_LOSSES, Draw, ItemLoss, Scored, scored
from fastcl.recsys.options import above, at_least, between
from fastcl.recsys.settings import check_choices, setting, settled


def pairwise(hidden: Tensor, items: Scored, target: Tensor, negative: Tensor) -> Tensor:
    """softplus(score of the negative - score of the target) with an unclicked item for each position, the mean (Rendle
    et al. 2009); 0 where the history holds every item, so that the negative is padding.
    """
    up = (hidden * items.rows(target)).sum(-1) + items.bias(target)
    down = (hidden * items.rows(negative)).sum(-1) + items.bias(negative)
    return F.softplus(down - up).masked_fill(negative == PAD, 0.0).mean()


LOSSES: dict[str, ItemLoss] = ITEM_LOSSES | {"bpr": ItemLoss(pairwise, ITEM_LOSSES["bce"].negatives)}
LOSS_MEANING = """Training loss. "bce": binary cross-entropy of the next item against one item that the user never
    clicked. "bpr": the logistic loss of their difference. "softmax": cross-entropy over all items. "popular":
    cross-entropy over the target and `samples` items drawn by their clicks, with log q."""
NAMES = ("bce", "bpr", "softmax", "popular")


@dataclass(frozen=True)
class NextItemConfig:
    """Settings that the sequence models share."""

    dim: int = setting(64, "Width of the item vectors and of every layer.")
    max_len: int = setting(
        50,
        """Clicks of a history that the model reads: the newest ones when serving. Training cuts longer histories into
        windows of at most this many clicks.""",
    )
    dropout: float = setting(0.5, "Dropout rate of embeddings and layers.")
    batch: int = setting(256, "Windows in a batch.")
    loss: str = setting("bce", LOSS_MEANING, NAMES)
    samples: int = setting(2560, 'Items that loss "popular" draws for each batch.')
    lr: float = setting(1e-3, "Learning rate of the first step.")

    def __post_init__(self) -> None:
        for name in ("dim", "max_len", "batch", "samples"):
            at_least(1, name, getattr(self, name))
        between(0.0, 1.0, "dropout", self.dropout)
        above(0.0, "lr", self.lr)
        check_choices(self)


def check_heads(config: Any) -> None:
    at_least(1, "heads", config.heads)
    if config.dim % config.heads:
        raise ValueError(f"dim: expected a multiple of heads={config.heads}, got {config.dim}")


class Batch(NamedTuple):
    clicks: Packed
    item: Tensor  # int64 [n]
    target: Tensor  # int64 [n], the click after each
    negative: Tensor  # int64, the items that the loss draws


class NextItem(Model):
    """A state after every click, scored against the item table by inner products.

    Made by `Model(items, config=None, *, seed=0, **options)`; `build` makes the layers, with the seed's weights.
    """

    item: nn.Embedding  # [I+1, D] or longer
    log_share: Tensor  # [I], log of each item's share of the train clicks; set by `batches`

    def __init__(self, items: Items, config: Any = None, *, seed: int = 0, **options: Any) -> None:
        super().__init__(items, settled(type(self).Config, config, options))
        self.register_buffer("log_share", torch.zeros(len(items)), persistent=False)
        with seeded(seed):
            self.build()

    def build(self) -> None:
        raise NotImplementedError

    def table(self, rows: int, dim: int) -> nn.Embedding:
        return nn.Embedding(rows, dim, padding_idx=PAD)

    def forward(self, item: Tensor, clicks: Packed) -> Tensor:
        """item [n] -> [n, D], the state after each click."""
        raise NotImplementedError

    def encode(self, histories: Histories) -> Tensor:
        """[B, D], the state after the newest click of each history."""
        clicks, item = self.clicks(histories, newest(histories, self.config.max_len))
        return self(item, clicks)[clicks.last]

    def item_vectors(self) -> Tensor:
        """[I+1, D], the item table."""
        return self.item.weight[: len(self.items) + 1]

    def scored(self) -> Scored:
        """The items as the loss sees them."""
        return scored(self.item_vectors(), torch.zeros_like(self.log_share), self.log_share)

    def loss(self, batch: Any) -> Tensor:
        return self.of_states(self(batch.item, batch.clicks), batch)

    def of_states(self, hidden: Tensor, batch: Any) -> Tensor:
        """The loss `config.loss` of states [n, D]."""
        return LOSSES[self.config.loss].loss(hidden, self.scored(), batch.target, batch.negative)

    def steps(self, train: Histories) -> int:
        return batch_count(self.spans(train), self.config.batch)

    def spans(self, train: Histories) -> Spans | Prefixes:
        """The pieces of the histories that train, each with one click more than is read."""
        return windows(train, self.config.max_len)

    def batches(self, train: Histories, rng: np.random.Generator) -> Iterator[Any]:
        """One epoch: every span once, in random order."""
        self.log_share.copy_(log_shares(train, len(self.items)))
        draw = LOSSES[self.config.loss].negatives(train, len(self.items), self.config.samples, rng)
        for spans in batched(self.spans(train), self.config.batch, rng, self.share):
            yield self.batch(train, spans, draw, rng)

    def batch(self, train: Histories, spans: Spans, draw: Draw, rng: np.random.Generator) -> Any:
        clicks, item = self.clicks(train, spans._replace(stop=spans.stop - 1))
        negative = draw(spans.row[clicks.row.numpy(force=True)])
        return Batch(clicks, item, self.tensor(train.item[clicks.source + 1]), self.tensor(negative))

    def clicks(self, histories: Histories, spans: Spans) -> tuple[Packed, Tensor]:
        clicks = pack(spans, self.device)
        return clicks, self.tensor(histories.item[clicks.source])
