"""SASRec (Kang & McAuley 2018, "Self-Attentive Sequential Recommendation"): a causal Transformer that predicts every
next click.

This file holds the model alone: config, encoding, loss, batches.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fastcl.recsys.data import PAD, Histories, Items
from fastcl.recsys.models.base import Model, Reading, Reads, short
from fastcl.recsys.models.batching import (
    Packed,
    Spans,
    batch_count,
    batched,
    log_shares,
    newest,
    pack,
    windows,
)
from fastcl.recsys.models.layers import (
    NORMALIZE_MEANING,
    POSITIONS,
    SMOOTHING_MEANING,
    CausalBlock,
    Dropout,
    seeded,
    short_normal,
    shortened,
)
from fastcl.recsys.models.losses import ITEM_LOSSES, Every, Scored
from fastcl.recsys.models.rowtable import (
    RATE_MEANING,
    RULE_MEANING,
    RULES,
    TABLE_MEANING,
    TABLES,
    RowTable,
    check_table,
    chosen,
    embedding,
    of_items,
)
from fastcl.recsys.options import above, at_least, between, up_to
from fastcl.recsys.settings import check_choices, setting, settled

LOSSES = ("softmax", "sce", "popular", "gbce", "bce")
FOR_SHORT: dict[str, Any] = {"dropout": 0.5, "positions": "newest", "lr": 2e-3}


@dataclass(frozen=True)
class SASRecConfig:
    """Settings of `SASRec`."""

    dim: int = setting(64, "Width of the item vectors and of every layer; a multiple of heads.")
    blocks: int = setting(2, "Number of Transformer blocks.")
    heads: int = setting(2, "Attention heads of each block.")
    max_len: int = setting(
        50,
        """Clicks of a history that the model reads: the newest ones when serving. Training cuts longer histories into
        windows of at most this many clicks.""",
    )
    positions: str = setting(
        "oldest",
        """Which end of a window its positions are counted from. "oldest": the n-th click of every window has the same
        position, so that each step of training serves a history of that length. "newest": the last click always has the
        same position, as in the paper.""",
        POSITIONS,
    )
    dropout: float = setting(0.2, "Dropout rate of embeddings and blocks.")
    batch: int = setting(128, "Windows in a batch.")
    loss: str = setting(
        "softmax",
        """Training loss. "softmax": cross-entropy over all items, whose table and work several processes share out with
        table "rows". "sce": SCE (Mezentsev et al. 2024), which estimates it from the items that score highest along
        random directions, and computes no other logits. "popular": cross-entropy over the target and
        `samples` items drawn by their clicks, each weighted by 1 / (samples * its chance to be drawn), an estimate of
        "softmax" for catalogues of any size. "gbce": gBCE (Petrov & Macdonald 2023, gSASRec; calibration 0.75) against
        `samples` items drawn uniformly for the batch. "bce": binary cross-entropy of the next item against one item
        that the user never clicked, as in the paper.""",
        LOSSES,
    )
    samples: int = setting(2560, 'Items that loss "popular" or "gbce" draws for each batch.')
    debias: float = setting(
        0.0,
        """Strength of logit adjustment (Menon et al. 2021). Training adds debias * log(share of the train clicks) to
        each item's logit and scoring does not, so that the scores leave out this part of an item's popularity.""",
    )
    label_smoothing: float = setting(0.0, SMOOTHING_MEANING)
    normalize: float = setting(0.0, NORMALIZE_MEANING)
    lr: float = setting(1e-3, "Learning rate of the first step.")
    table: str = setting("auto", TABLE_MEANING, TABLES)
    table_rule: str = setting("adam", RULE_MEANING, RULES)
    table_rate: float = setting(1.0, RATE_MEANING)

    def __post_init__(self) -> None:
        for name in ("dim", "blocks", "heads", "max_len", "batch", "samples"):
            at_least(1, name, getattr(self, name))
        between(0.0, 1.0, "dropout", self.dropout)
        up_to(1.0, "label_smoothing", self.label_smoothing)
        if self.label_smoothing and self.loss != "softmax":
            raise ValueError(f"label_smoothing: expected 0 with loss={self.loss}, got {self.label_smoothing}")
        up_to(1.0, "normalize", self.normalize)
        above(0.0, "lr", self.lr)
        between(0.0, math.inf, "debias", self.debias)
        check_table(self.table_rate)
        check_choices(self)
        if self.dim % self.heads:
            raise ValueError(f"dim: expected a multiple of heads={self.heads}, got {self.dim}")


class Batch(NamedTuple):
    clicks: Packed
    item: Tensor  # int64 [n]
    target: Tensor  # int64 [n], the click after each click
    negative: Tensor  # int64 [n], unclicked items; [samples], items drawn for the batch; [0] for a loss that reads none


class SASRec(Model):
    """Transformer over a click history, scored against the item table by inner products.

    Positions count from the oldest click of the window by default, so that the n-th step of a window is trained for
    serving a history of n clicks, and a later click never changes an earlier position. Serving reads the newest max_len
    clicks. Training cuts long histories into windows, so that every click but a history's first is a target once per
    epoch; the paper trains on the newest window alone.

    Args:
        items: the item table.
        config: the settings; None: the settings are the keywords `options`.
        seed: seed of the initial weights.

    >>> from fastcl.recsys import Histories, Items, SASRec
    >>> model = SASRec(Items(ids=("a", "b", "c")), dim=8, seed=0)
    >>> model.scores(Histories.from_lists([[1, 2], [3]])).shape
    torch.Size([2, 4])
    """

    name = "sasrec"
    Config = SASRecConfig
    bias: Tensor  # [I], added to the logits of the loss (debias); set by `batches`
    log_share: Tensor  # [I], log of each item's share of the train clicks; set by `batches`

    def __init__(self, items: Items, config: SASRecConfig | None = None, *, seed: int = 0, **options: Any) -> None:
        config = settled(SASRecConfig, config, options)
        table = "dense" if config.loss == "softmax" and config.table == "auto" else config.table
        needs_all = "loss=sce" if config.loss == "sce" else ""
        config = replace(config, table=chosen(table, len(items), needs_all))
        super().__init__(items, config)
        with seeded(seed):
            about = config.table_rule, config.table_rate, PAD
            self.item = embedding(config.table, len(items) + 1, config.dim, *about)
            self.position = nn.Embedding(config.max_len, config.dim)
            self.dropout = Dropout(config.dropout)
            self.blocks = nn.ModuleList(
                CausalBlock(config.dim, config.heads, config.dropout) for _ in range(config.blocks)
            )
            self.norm = nn.LayerNorm(config.dim)
            short_normal(self)
        self.register_buffer("bias", torch.zeros(len(items)), persistent=False)
        self.register_buffer("log_share", torch.zeros(len(items)), persistent=False)

    @classmethod
    def suited(cls, train: Histories, chosen: Collection[str] = ()) -> dict[str, Any]:
        """With less than 20 clicks a user: dropout 0.5, lr 2e-3, and positions that count from the newest click.

        >>> from fastcl.recsys import Histories, SASRec
        >>> SASRec.suited(Histories.from_lists([[1, 2, 3]])), SASRec.suited(Histories.from_lists([[1] * 50]))
        ({'dropout': 0.5, 'positions': 'newest', 'lr': 0.002}, {})
        """
        return dict(FOR_SHORT) if short(train) else {}

    def forward(self, item: Tensor, clicks: Packed) -> Tensor:
        """item [n] -> hidden [n, D], the state after each click."""
        return self._states(self.item(item), clicks)

    def _states(self, x: Tensor, clicks: Packed) -> Tensor:
        x = self.dropout(x + self.position(POSITIONS[self.config.positions](clicks)))
        for block in self.blocks:
            x = block(x, clicks)
        return self.norm(x)

    def encode(self, histories: Histories) -> Tensor:
        """[B, D], the state after the newest click of each history."""
        clicks, item = self._clicks(histories, newest(histories, self.config.max_len))
        return self.user_vectors([self.item(item)], item, clicks)

    def reading(self) -> Reading:
        return Reading(self.config.max_len)

    def click_tables(self) -> tuple[Tensor, ...]:
        return (self.item.weight,)

    def user_vectors(self, about: Sequence[Tensor], bucket: Tensor, clicks: Packed) -> Tensor:
        return self._states(about[0], clicks)[clicks.last]

    def item_vectors(self) -> Tensor:
        """[I+1, D], the item table, its rows shortened by `normalize`."""
        return shortened(self.item.weight, self.config.normalize)

    def vectors_of(self, item: Tensor) -> Tensor:
        return shortened(self.item(item), self.config.normalize)

    def loss(self, batch: Batch) -> Tensor:
        # Without a click, as a process has none of a batch that is smaller than the processes are many: no state.
        hidden = self(batch.item, batch.clicks) if len(batch.item) else self.norm(self.item(batch.item))
        bias, smoothing = lambda item: self.bias[item - 1], self.config.label_smoothing
        items = Scored(len(self.items), self.item, bias, self._every, self.log_share, smoothing)
        return ITEM_LOSSES[self.config.loss].loss(hidden, items, batch.target, batch.negative)

    def _every(self) -> Every:
        own = self.item.own if isinstance(self.item, RowTable) else None
        if own is None:
            return Every(self.item.weight[1:], self.bias)
        ids, rows = of_items(own, len(self.items))
        return Every(rows, self.bias[ids - 1], ids if len(ids) < len(self.items) else None)

    def reads(self, batch: Batch) -> Reads:
        if self.config.loss == "softmax":
            return [(self.item, batch.item), (self.item, None)]
        return [(self.item, ids) for ids in (batch.item, batch.target, batch.negative)]

    def reads_of(self, histories: Histories) -> Reads:
        return [(self.item, self.tensor(histories.last(self.config.max_len).item))]

    def steps(self, train: Histories) -> int:
        return batch_count(windows(train, self.config.max_len), self.config.batch)

    def batches(self, train: Histories, rng: np.random.Generator) -> Iterator[Batch]:
        """One epoch: every window once, in random order."""
        self.log_share.copy_(log_shares(train, len(self.items)))
        self.bias.copy_(self.config.debias * self.log_share)
        draw = ITEM_LOSSES[self.config.loss].negatives(train, len(self.items), self.config.samples, rng)
        for spans in batched(windows(train, self.config.max_len), self.config.batch, rng, self.share):
            clicks, item = self._clicks(train, spans._replace(stop=spans.stop - 1))
            negative = draw(spans.row[clicks.row.numpy(force=True)])
            yield Batch(clicks, item, self.tensor(train.item[clicks.source + 1]), self.tensor(negative))

    def _clicks(self, histories: Histories, spans: Spans) -> tuple[Packed, Tensor]:
        clicks = pack(spans, self.device)
        return clicks, self.tensor(histories.item[clicks.source])
