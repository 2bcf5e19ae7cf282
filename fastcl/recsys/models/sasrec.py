"""SASRec (Kang & McAuley 2018, "Self-Attentive Sequential Recommendation"): a causal Transformer that predicts every
next click.

The model only: config, encoding, losses, batches. Data, metrics and the training loop live in their own files.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastcl
from fastcl.recsys.data import PAD, Histories, Items
from fastcl.recsys.models.base import Model
from fastcl.recsys.models.batching import (
    Packed,
    Spans,
    Unclicked,
    batch_count,
    batched,
    log_shares,
    newest,
    pack,
    windows,
)
from fastcl.recsys.models.layers import POSITIONS, CausalBlock, Dropout
from fastcl.recsys.options import above, at_least, between, one_of


def full_softmax(hidden: Tensor, table: Tensor, target: Tensor, negative: Tensor, bias: Tensor | None = None) -> Tensor:
    """Cross-entropy over the whole item table; bias [I] joins the logits."""
    return fastcl.linear_cross_entropy(hidden, table[1:], target - 1, bias=bias)


def binary(hidden: Tensor, table: Tensor, target: Tensor, negative: Tensor, bias: Tensor) -> Tensor:
    """The paper's loss (its Eq. 6): -log sigmoid(target) - log(1 - sigmoid(negative)), one unclicked item a click."""
    up = (hidden * F.embedding(target, table)).sum(-1) + bias[target - 1]
    down = (hidden * F.embedding(negative, table)).sum(-1) + bias[negative - 1]
    return (F.softplus(-up) + F.softplus(down)).mean()


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]] = {"softmax": full_softmax, "bce": binary}


@dataclass(frozen=True)
class SASRecConfig:
    """dim must be a multiple of heads; `batch` counts windows of at most max_len clicks; loss is "softmax" or "bce".

    positions: counted from the "oldest" click of a window, so that every step of training serves a history of that
        length, or from the "newest", as the paper has it.
    debias: adds debias * log(share of the train clicks) to the logits in training alone, so that this part of an
        item's popularity need not be learned and is left out of the scores (logit adjustment, Menon et al. 2021).
    """

    dim: int = 64
    blocks: int = 2
    heads: int = 2
    max_len: int = 50
    positions: str = "oldest"
    dropout: float = 0.2
    batch: int = 128
    loss: str = "softmax"
    debias: float = 0.0
    lr: float = 1e-3

    def __post_init__(self) -> None:
        for name in ("dim", "blocks", "heads", "max_len", "batch"):
            at_least(1, name, getattr(self, name))
        between(0.0, 1.0, "dropout", self.dropout)
        above(0.0, "lr", self.lr)
        between(0.0, math.inf, "debias", self.debias)
        one_of(POSITIONS, "positions", self.positions)
        one_of(LOSSES, "loss", self.loss)
        if self.dim % self.heads:
            raise ValueError(f"dim: expected a multiple of heads={self.heads}, got {self.dim}")


class Batch(NamedTuple):
    clicks: Packed
    item: Tensor  # int64 [n]
    target: Tensor  # int64 [n], the click after each of them
    negative: Tensor  # int64 [n], an item its user never clicked; [0] for a loss that reads none


class SASRec(Model):
    """Transformer over a click history, scored against the item table by inner products.

    Positions count from the oldest click of the window by default: what was trained as the n-th step of a window is
    what serves a history of n clicks, and a later click never moves an earlier one. Longer histories are cut to the
    newest max_len. Training cuts long histories into windows, so every click but a history's first is a target once an
    epoch (the paper drops all but the newest window).

    Args:
        items: the item table; the ids outside belong to it.
        seed: of the initial weights.
        options: fields of `SASRecConfig`.

    >>> from fastcl.recsys import Histories, Items, SASRec
    >>> model = SASRec(Items(ids=("a", "b", "c")), dim=8, seed=0)
    >>> model.scores(Histories.from_lists([[1, 2], [3]])).shape
    torch.Size([2, 4])
    """

    name = "sasrec"
    Config = SASRecConfig
    bias: Tensor  # [I], joins the logits of the loss; set by `batches`

    def __init__(self, items: Items, *, seed: int = 0, **options: Any) -> None:
        config = SASRecConfig(**options)
        super().__init__(items, config)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.item = nn.Embedding(len(items) + 1, config.dim, padding_idx=PAD)
            self.position = nn.Embedding(config.max_len, config.dim)
            self.dropout = Dropout(config.dropout)
            self.blocks = nn.ModuleList(
                CausalBlock(config.dim, config.heads, config.dropout) for _ in range(config.blocks)
            )
            self.norm = nn.LayerNorm(config.dim)
            for module in self.modules():
                if isinstance(module, nn.Linear | nn.Embedding):
                    nn.init.normal_(module.weight, std=0.02)
                if isinstance(module, nn.Linear):
                    nn.init.zeros_(module.bias)
        with torch.no_grad():
            self.item.weight[PAD] = 0.0
        self.register_buffer("bias", torch.zeros(len(items)), persistent=False)

    def forward(self, item: Tensor, clicks: Packed) -> Tensor:
        """item [n] -> hidden [n, D], the state after each click."""
        x = self.dropout(self.item(item) + self.position(POSITIONS[self.config.positions](clicks)))
        for block in self.blocks:
            x = block(x, clicks)
        return self.norm(x)

    def encode(self, histories: Histories) -> Tensor:
        """[B, D], the state after the newest click of each history."""
        clicks, item = self._clicks(histories, newest(histories, self.config.max_len))
        return self(item, clicks)[clicks.last]

    def item_vectors(self) -> Tensor:
        """[I+1, D], the item table."""
        return self.item.weight

    def loss(self, batch: Batch) -> Tensor:
        hidden = self(batch.item, batch.clicks)
        return LOSSES[self.config.loss](hidden, self.item.weight, batch.target, batch.negative, self.bias)

    def steps(self, train: Histories) -> int:
        return batch_count(windows(train, self.config.max_len), self.config.batch)

    def batches(self, train: Histories, rng: np.random.Generator) -> Iterator[Batch]:
        """One epoch."""
        self.bias.copy_(self.config.debias * log_shares(train, len(self.items)).to(self.device))
        unclicked = Unclicked(train, len(self.items)) if LOSSES[self.config.loss] is binary else None
        for spans in batched(windows(train, self.config.max_len), self.config.batch, rng, self.share):
            clicks, item = self._clicks(train, spans._replace(stop=spans.stop - 1))
            row = spans.row[clicks.row.numpy(force=True)]
            negative = np.zeros(0, np.int64) if unclicked is None else unclicked.draw(row, rng)
            yield Batch(clicks, item, self.tensor(train.item[clicks.source + 1]), self.tensor(negative))

    def _clicks(self, histories: Histories, spans: Spans) -> tuple[Packed, Tensor]:
        clicks = pack(spans, self.device)
        return clicks, self.tensor(histories.item[clicks.source])
