"""BERT4Rec (Sun et al. 2019, "BERT4Rec: Sequential Recommendation with Bidirectional Encoder Representations from
Transformer"): a Transformer that sees both sides of a click and learns to predict clicks that are covered by a mask
token.

This file holds the model alone: config, encoding, loss, batches.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastcl.recsys.data import PAD, Histories, Items
from fastcl.recsys.models.base import Model, NamedRows, Reading, Reads
from fastcl.recsys.models.batching import Packed, Spans, batch_count, batched, newest, pack, windows
from fastcl.recsys.models.layers import GELU, Dropout, PostBlock, seeded, short_normal
from fastcl.recsys.models.losses import ITEM_LOSSES, Every, Scored, scored
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
from fastcl.recsys.options import above, at_least, between
from fastcl.recsys.settings import check_choices, setting, settled

LOSSES = ("softmax", "sampled")


@dataclass(frozen=True)
class BERT4RecConfig:
    """Settings of `BERT4Rec`."""

    dim: int = setting(64, "Width of the item vectors and of every layer; a multiple of heads.")
    blocks: int = setting(2, "Number of Transformer blocks.")
    heads: int = setting(2, "Attention heads of each block.")
    max_len: int = setting(
        50,
        """Clicks of a window, at least 2. When serving, the mask token behind the newest max_len - 1 clicks is one of
        them.""",
    )
    dropout: float = setting(0.2, "Dropout rate of embeddings and blocks.")
    attention_dropout: float = setting(0.2, "Dropout rate of the attention weights.")
    batch: int = setting(64, "Windows in a batch.")
    mask_rate: float = setting(
        0.2,
        """Share of a window's clicks that are covered by the mask token, at least one click. The paper's best are 0.2
        on MovieLens-1M and 0.6 on Amazon Beauty.""",
    )
    last_only: float = setting(
        0.1, "Share of the windows in which only the newest click is covered, which is what serving asks for."
    )
    loss: str = setting(
        "softmax",
        """Training loss. "softmax": cross-entropy over all items, as in the paper; several processes share out its
        table and work with table "rows". "sampled": cross-entropy over the target and `samples` items.""",
        LOSSES,
    )
    samples: int = setting(512, 'Items that loss "sampled" draws for each batch, uniformly.')
    lr: float = setting(1e-3, "Learning rate of the first step.")
    table: str = setting("auto", TABLE_MEANING, TABLES)
    table_rule: str = setting("adam", RULE_MEANING, RULES)
    table_rate: float = setting(1.0, RATE_MEANING)

    def __post_init__(self) -> None:
        for name in ("dim", "blocks", "heads", "batch", "samples"):
            at_least(1, name, getattr(self, name))
        at_least(2, "max_len", self.max_len)
        for name in ("dropout", "attention_dropout"):
            between(0.0, 1.0, name, getattr(self, name))
        for name in ("mask_rate", "lr"):
            above(0.0, name, getattr(self, name))
        for name in ("mask_rate", "last_only"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name}: expected a share from 0 to 1, got {getattr(self, name)}")
        check_table(self.table_rate)
        check_choices(self)
        if self.dim % self.heads:
            raise ValueError(f"dim: expected a multiple of heads={self.heads}, got {self.dim}")


class Batch(NamedTuple):
    clicks: Packed
    item: Tensor  # int64 [n], the mask token where covered
    covered: Tensor  # int64 [m], which of the n clicks are covered, rising
    target: Tensor  # int64 [m], the items under the cover
    negative: Tensor  # int64 [samples], items for the sampled loss; [0] for a loss that reads none


class BERT4Rec(Model):
    """Bidirectional Transformer over a click history. The state at a mask token behind the history is scored against
    the item table by inner products and one bias per item.

    Blocks are post-LN with GELU. Before the table comes LN(GELU(W h + b)) (the paper's Eq. 7, with the normalisation of
    the authors' code). Row I+1 of the table is the mask token, which is never scored. Attention leaves padding out; all
    other layers see real clicks only. Positions count back from the newest click, so that the position that serving
    predicts is the one trained most often; the authors' code counts from the oldest click. Long histories train as
    windows that share one click with their neighbour.

    Args:
        items: the item table.
        config: the settings; None: the settings are the keywords `options`.
        seed: seed of the initial weights.

    >>> from fastcl.recsys import BERT4Rec, Histories, Items
    >>> model = BERT4Rec(Items(ids=("a", "b", "c")), dim=8, seed=0)
    >>> model.scores(Histories.from_lists([[1, 2], [3]])).shape
    torch.Size([2, 4])
    """

    name = "bert4rec"
    Config = BERT4RecConfig

    def __init__(self, items: Items, config: BERT4RecConfig | None = None, *, seed: int = 0, **options: Any) -> None:
        config = settled(BERT4RecConfig, config, options)
        table = "dense" if config.loss == "softmax" and config.table == "auto" else config.table
        config = replace(config, table=chosen(table, len(items), ""))
        super().__init__(items, config)
        self.mask = len(items) + 1
        with seeded(seed):
            about = config.table_rule, config.table_rate
            self.item = embedding(config.table, len(items) + 2, config.dim, *about, PAD)
            self.position = nn.Embedding(config.max_len, config.dim)
            self.norm = nn.LayerNorm(config.dim, eps=1e-12)
            self.dropout = Dropout(config.dropout)
            self.blocks = nn.ModuleList(
                PostBlock(config.dim, config.heads, config.dropout, config.attention_dropout)
                for _ in range(config.blocks)
            )
            self.head = nn.Sequential(nn.Linear(config.dim, config.dim), GELU(), nn.LayerNorm(config.dim, eps=1e-12))
            short_normal(self)
            by_rows = config.table == "rows"
            plain = nn.Parameter(torch.zeros(0 if by_rows else len(items) + 1))
            self.bias = RowTable(len(items) + 1, 1, 0.0, *about) if by_rows else plain

    def forward(self, item: Tensor, clicks: Packed) -> Tensor:
        """item [n] -> the state of each click, [n, D]."""
        return self._states(self.item(item), clicks)

    def _states(self, x: Tensor, clicks: Packed) -> Tensor:
        age = clicks.length[clicks.row] - 1 - clicks.position
        x = self.dropout(self.norm(x + self.position(age)))
        masks = [torch.arange(width, device=x.device) < length[:, None, None, None] for length, width in clicks.blocks]
        for block in self.blocks:
            x = block(x, clicks, masks)
        return x

    def encode(self, histories: Histories) -> Tensor:
        """[B, D+1], the state at a mask token behind the newest max_len - 1 clicks, then a 1 for the items' biases."""
        spans = newest(histories, self.config.max_len - 1)
        clicks = pack(spans._replace(stop=spans.stop + 1), self.device)
        item = self.tensor(np.append(histories.item, self.mask)[clicks.source])
        item[clicks.last] = self.mask
        return self.user_vectors([self.item(item)], item, clicks)

    def reading(self) -> Reading:
        return Reading(self.config.max_len - 1, token=self.mask)

    def click_tables(self) -> tuple[Tensor, ...]:
        return (self.item.weight,)

    def user_vectors(self, about: Sequence[Tensor], bucket: Tensor, clicks: Packed) -> Tensor:
        return F.pad(self.head(self._states(about[0], clicks)[clicks.last]), (0, 1), value=1.0)

    def item_vectors(self) -> Tensor:
        """[I+1, D+1], the item table without the mask token, and each item's bias."""
        bias = self.bias.weight if isinstance(self.bias, RowTable) else self.bias[:, None]
        return torch.cat([self.item.weight[:-1], bias], 1)

    def vectors_of(self, item: Tensor) -> Tensor:
        bias = self.bias(item) if isinstance(self.bias, RowTable) else self.bias[item, None]
        return torch.cat([self.item(item), bias], 1)

    def loss(self, batch: Batch) -> Tensor:
        # Without a click, as a process has none of a batch that is smaller than the processes are many: no state.
        states = self(batch.item, batch.clicks)[batch.covered] if len(batch.item) else self.item(batch.item)
        hidden = self.head(states)
        return ITEM_LOSSES[self.config.loss].loss(hidden, self._scored(), batch.target, batch.negative)

    def _scored(self) -> Scored:
        bias = self.bias
        if isinstance(bias, RowTable):
            return Scored(len(self.items), self.item, lambda item: bias(item)[:, 0], self._every)
        return scored(self.item.weight[:-1], bias[1:])

    def _every(self) -> Every:
        """Of tables of rows, of which a loss over all items has this process's own."""
        assert isinstance(self.item, RowTable)
        assert isinstance(self.bias, RowTable)
        if self.item.own is None or self.bias.own is None:
            return Every(self.item.weight[1:-1], self.bias.weight[1:, 0])
        ids, rows = of_items(self.item.own, len(self.items))
        bias = of_items(self.bias.own, len(self.items)).rows[:, 0]
        return Every(rows, bias, ids if len(ids) < len(self.items) else None)

    def named_rows(self) -> dict[str, NamedRows]:
        bias = "bias.weight" if isinstance(self.bias, RowTable) else "bias"
        return {name: NamedRows(self.items.ids) for name in ("item.weight", bias)}

    def reads(self, batch: Batch) -> Reads:
        if self.config.loss == "softmax" and isinstance(self.bias, RowTable):
            return [(self.item, batch.item), (self.item, None), (self.bias, None)]
        items = [(self.item, ids) for ids in (batch.item, batch.target, batch.negative)]
        biases = [(self.bias, ids) for ids in (batch.target, batch.negative) if isinstance(self.bias, RowTable)]
        return [*items, *biases]

    def reads_of(self, histories: Histories) -> Reads:
        return [(self.item, self.tensor(np.append(histories.last(self.config.max_len).item, self.mask)))]

    def steps(self, train: Histories) -> int:
        return batch_count(self._windows(train), self.config.batch)

    def batches(self, train: Histories, rng: np.random.Generator) -> Iterator[Batch]:
        """One epoch: every window once, with clicks to cover drawn anew."""
        draw = ITEM_LOSSES[self.config.loss].negatives(train, len(self.items), self.config.samples, rng)
        for spans in batched(self._windows(train), self.config.batch, rng, self.share):
            clicks = pack(spans, self.device)
            covered = np.flatnonzero(cover(clicks, self.config.mask_rate, self.config.last_only, rng))
            item = train.item[clicks.source]
            target = item[covered]
            item[covered] = self.mask
            negative = draw(spans.row)
            yield Batch(clicks, *(self.tensor(array) for array in (item, covered, target, negative)))

    def _windows(self, histories: Histories) -> Spans:
        return windows(histories, self.config.max_len - 1)


def cover(clicks: Packed, rate: float, last_only: float, rng: np.random.Generator) -> np.ndarray:
    """bool [n], the covered clicks: max(1, round(rate * length)) random clicks of each span or, in a share last_only
    (0..1) of the spans, the newest click alone.
    """
    row, length = clicks.row.numpy(force=True), clicks.length.numpy(force=True)
    first = length.cumsum() - length
    # The order is by row and random within a row, so the first k places of a row hold k random clicks.
    order = np.lexsort((rng.random(len(row)), row))
    drawn = np.empty(len(row), np.int64)
    drawn[order] = np.arange(len(row)) - first[row]
    covered = drawn < np.maximum(1, np.rint(rate * length))[row]
    newest_alone = rng.random(len(length)) < last_only
    covered[newest_alone[row]] = False
    covered[(first + length - 1)[newest_alone]] = True
    return covered
