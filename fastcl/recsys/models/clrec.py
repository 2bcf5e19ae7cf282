"""CLRec (Zhou et al. 2021, "Contrastive Learning for Debiased Candidate Generation in Large-Scale Recommender
Systems"), single queue.

The model only, after the paper's Appendix B: item encoder, user encoder, loss, batches. Data, metrics and the
training loop live in their own files, the queue in `fastcl.NegativeQueue`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastcl
from fastcl.recsys.batching import Packed, Spans, batch_count, bucketed, newest, pack, prefixes, time_buckets
from fastcl.recsys.data import PAD, Histories, Items
from fastcl.recsys.layers import MultiAtt, WeightedHeads
from fastcl.recsys.models.base import Model
from fastcl.recsys.options import above, at_least, between, one_of

# What to do with other clicks of the same item among the negatives: the ids passed to the loss decide.
DUPLICATES: dict[str, Callable[[Tensor], Tensor | None]] = {
    "keep": lambda target: None,
    "exclude": lambda target: target,
}

_MINUTE, _HOUR, _DAY = 60.0, 3600.0, 86400.0


@dataclass(frozen=True)
class CLRecConfig:
    """`batch` counts (history, next click) pairs, `negatives` the in-batch and queued ones together.

    max_len: 20, as in the paper's production code. hidden: width of the attention MLP. duplicates: "keep" leaves
        further clicks of the positive in the sum, as the paper and its Theorem 1 have it, "exclude" leaves them out.
        time_cuts: rising limits of the time buckets, in the data's unit (here seconds, a minute to four years); empty
        for data without times.
    """

    dim: int = 64
    heads: int = 4
    hidden: int = 64
    max_len: int = 20
    dropout: float = 0.2
    batch: int = 256
    negatives: int = 2560
    temperature: float = 0.07
    duplicates: str = "keep"
    lr: float = 3e-3
    time_cuts: tuple[float, ...] = (
        *(_MINUTE, 5 * _MINUTE, 15 * _MINUTE, _HOUR, 4 * _HOUR, 12 * _HOUR),
        *(_DAY, 2 * _DAY, 4 * _DAY, 7 * _DAY, 14 * _DAY, 30 * _DAY),
        *(60 * _DAY, 120 * _DAY, 240 * _DAY, 365 * _DAY, 730 * _DAY, 1461 * _DAY),
    )

    def __post_init__(self) -> None:
        for name in ("dim", "heads", "hidden", "max_len", "batch"):
            at_least(1, name, getattr(self, name))
        at_least(self.batch + 1, "negatives", self.negatives)
        between(0.0, 1.0, "dropout", self.dropout)
        for name in ("temperature", "lr"):
            above(0.0, name, getattr(self, name))
        one_of(DUPLICATES, "duplicates", self.duplicates)
        if list(self.time_cuts) != sorted(set(self.time_cuts)):
            raise ValueError(f"time_cuts: expected rising limits, got {self.time_cuts}")


class Batch(NamedTuple):
    clicks: Packed
    item: Tensor  # int64 [n]
    bucket: Tensor  # int64 [n]
    target: Tensor  # int64 [B], the click after each history


class CLRec(Model):
    """Multi-head pooling of a click history, scored against encoded items by cosine / temperature.

    An item is its id embedding plus the concatenation of its features' embeddings (means over several values). A past
    click adds its time bucket (of the time up to the history's newest click, so nothing of the target is known) and
    its backward position (the earliest click at zero). Negatives are the batch's other positives and the queue of
    earlier ones (the paper's variant c, which caches vectors), so they appear as often as they are clicked. No log q
    correction: the optimum is preference over exposure.

    Args:
        items: the item table with its features; the ids outside belong to it.
        seed: of the initial weights.
        options: fields of `CLRecConfig`.

    >>> from fastcl.recsys import CLRec, Histories, Items
    >>> model = CLRec(Items(ids=("a", "b", "c")), dim=8, seed=0)
    >>> model.scores(Histories.from_lists([[1, 2], [3]])).shape
    torch.Size([2, 4])
    """

    name = "clrec"
    Config = CLRecConfig

    def __init__(self, items: Items, *, seed: int = 0, **options: Any) -> None:
        config = CLRecConfig(**options)
        super().__init__(items, config)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.item = ItemEncoder(items, config.dim)
            self.position = nn.Embedding(config.max_len, config.dim)
            self.bucket = nn.Embedding(len(config.time_cuts) + 1, config.dim) if config.time_cuts else None
            self.dropout = nn.Dropout(config.dropout)
            self.attention = MultiAtt(config.dim, config.hidden, config.heads)
            self.aggregate = WeightedHeads(config.dim)
            for name, parameter in self.named_parameters():
                # Normal everywhere (appendix B.2), so that normalised vectors start evenly spread over the sphere.
                if name.endswith("bias"):
                    nn.init.zeros_(parameter)
                else:
                    nn.init.normal_(parameter, std=config.dim**-0.5)
        self.queue = fastcl.NegativeQueue(config.negatives - config.batch, config.dim)
        self._positives = torch.empty(0, config.dim)  # of the last loss, on their way into the queue

    def forward(self, item: Tensor, table: Tensor, bucket: Tensor, clicks: Packed) -> Tensor:
        """Rows item [n] of encoded items table [U, D], with their buckets [n], to normalised users [B, D]."""
        x = F.embedding(item, table) + self.position(clicks.position)
        if self.bucket is not None:
            x = x + self.bucket(bucket)
        heads = F.normalize(self.attention(self.dropout(x), clicks), dim=-1)
        return F.normalize(self.aggregate(heads), dim=-1)

    def encode(self, histories: Histories) -> Tensor:
        """[B, D], the normalised user vector of each history."""
        clicks, item, bucket = self._clicks(histories, newest(histories, self.config.max_len))
        distinct, place = item.unique(return_inverse=True)
        return self(place, self.item(distinct), bucket, clicks)

    def item_vectors(self) -> Tensor:
        """[I+1, D], normalised encoded items / temperature: a score is cosine / temperature."""
        every = torch.arange(len(self.items) + 1, device=self.device)
        return F.normalize(self.item(every), dim=-1) / self.config.temperature

    def loss(self, batch: Batch) -> Tensor:
        # Each distinct item of the batch is encoded once.
        distinct, place = torch.cat([batch.target, batch.item]).unique(return_inverse=True)
        table = self.item(distinct)
        n = len(batch.target)
        user = self(place[n:], table, batch.bucket, batch.clicks)
        positive = F.normalize(F.embedding(place[:n], table), dim=-1)
        self._positives = positive.detach()
        ids = DUPLICATES[self.config.duplicates](batch.target)
        return fastcl.infonce(
            user,
            positive,
            temperature=self.config.temperature,
            normalize=False,
            in_batch=True,
            queue=self.queue,
            ids=ids,
        )

    def after_step(self, batch: Batch) -> None:
        """The batch's encoded positives, as the loss computed them, join the queue."""
        self.queue.push(self._positives, ids=batch.target)

    def steps(self, train: Histories) -> int:
        return batch_count(prefixes(train, self.config.max_len), self.config.batch)

    def batches(self, train: Histories, rng: np.random.Generator) -> Iterator[Batch]:
        """One epoch: every click but a history's first is a target once."""
        for spans in bucketed(prefixes(train, self.config.max_len), self.config.batch, rng, self.share):
            yield Batch(*self._clicks(train, spans), self.tensor(train.item[spans.stop]))

    def _clicks(self, histories: Histories, spans: Spans) -> tuple[Packed, Tensor, Tensor]:
        clicks = pack(spans, self.device)
        bucket = time_buckets(histories, spans, clicks, self.config.time_cuts)
        return clicks, self.tensor(histories.item[clicks.source]), self.tensor(bucket)


class ItemEncoder(nn.Module):
    """g(y): id embedding + concatenation of the features' embeddings, whose widths share out `dim`; items without a
    value add zeros.
    """

    def __init__(self, items: Items, dim: int) -> None:
        super().__init__()
        count = len(items.features)
        if count > dim:
            raise ValueError(f"dim: expected at least the number of item features ({count}), got {dim}")
        self.id = nn.Embedding(len(items) + 1, dim)
        self.features = nn.ModuleList()
        for nth, feature in enumerate(items.features.values()):
            width = dim // count + (nth < dim % count)
            self.features.append(nn.EmbeddingBag(len(feature.values) + 1, width, mode="mean", padding_idx=PAD))
            # Not in the state dict: the item table is stored beside the weights.
            self.register_buffer(f"codes_{nth}", torch.from_numpy(feature.codes), persistent=False)

    def forward(self, item: Tensor) -> Tensor:  # int64 [U] -> [U, D]
        x = self.id(item)
        if len(self.features):
            values = [bag(self.get_buffer(f"codes_{nth}")[item]) for nth, bag in enumerate(self.features)]
            x = x + torch.cat(values, -1)
        return x
