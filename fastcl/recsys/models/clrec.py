"""CLRec (Zhou et al. 2021, "Contrastive Learning for Debiased Candidate Generation in Large-Scale Recommender
Systems"), single queue.

The model only, after the paper's Appendix B: config, loss, batches. Its encoders are a table in clrec_encoders.py, its
queue is `fastcl.NegativeQueue`; data, metrics and the training loop live in their own files.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastcl
from fastcl.recsys.batching import Packed, Spans, batch_count, bucketed, newest, pack, time_buckets
from fastcl.recsys.data import Histories, Items
from fastcl.recsys.models.base import Model
from fastcl.recsys.models.clrec_encoders import ENCODERS, ItemEncoder
from fastcl.recsys.options import above, at_least, between, one_of

# What to do with other clicks of the same item among the negatives: the ids passed to the loss decide.
DUPLICATES: dict[str, Callable[[Tensor], Tensor | None]] = {
    "keep": lambda target: None,
    "exclude": lambda target: target,
}

_MINUTE, _HOUR, _DAY = 60.0, 3600.0, 86400.0


@dataclass(frozen=True)
class CLRecConfig:
    """`negatives` are the newest clicks, those of the batch among them: the queue fills up what a batch has too few.

    encoder: "pooling", the paper's, or "sasrec", the Transformer of its public tables (max_len 50 and duplicates of
        its own in the paper's code).
    batch: spans a batch. With "pooling" a span is a (history, next click) pair; with "sasrec" it is a window of at most
        max_len clicks, each of which predicts the next one.
    max_len: 20, as in the paper's production code. heads: with "sasrec" dim must be a multiple of it. hidden: width of
        the attention MLP ("pooling"). blocks: depth ("sasrec").
    duplicates: "keep" leaves further clicks of the positive's item in the sum, as the paper and its Theorem 1 have it,
        and only the clicks of the same window out of it; "exclude" leaves out the clicks of the positive's item.
    time_cuts: rising limits of the time buckets ("pooling"), in the data's unit (here seconds, a minute to four years);
        empty for data without times.
    """

    encoder: str = "pooling"
    dim: int = 64
    heads: int = 4
    hidden: int = 64
    blocks: int = 2
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
        for name in ("dim", "heads", "hidden", "blocks", "max_len", "batch"):
            at_least(1, name, getattr(self, name))
        at_least(self.batch + 1, "negatives", self.negatives)
        between(0.0, 1.0, "dropout", self.dropout)
        for name in ("temperature", "lr"):
            above(0.0, name, getattr(self, name))
        one_of(ENCODERS, "encoder", self.encoder)
        one_of(DUPLICATES, "duplicates", self.duplicates)
        if list(self.time_cuts) != sorted(set(self.time_cuts)):
            raise ValueError(f"time_cuts: expected rising limits, got {self.time_cuts}")
        ENCODERS[self.encoder].check(self)


class Batch(NamedTuple):
    clicks: Packed
    item: Tensor  # int64 [n]
    bucket: Tensor  # int64 [n]
    target: Tensor  # int64 [N], the click after each history, or with "sasrec" after each click


class CLRec(Model):
    """A user encoder over a click history, scored against encoded items by cosine / temperature.

    An item is its id embedding plus the concatenation of its features' embeddings (means over several values). A user
    is several weighted sums of the past clicks, themselves summed by weight, or the last state of a Transformer. In the
    first, a click adds its time bucket (of the time up to the history's newest click, so nothing of the target is
    known) and its backward position (the earliest click at zero). Negatives are the batch's other positives and the
    queue of earlier ones (the paper's variant c, which caches vectors), so they appear as often as they are clicked. No
    log q correction: the optimum is preference over exposure.

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
            self.user = ENCODERS[config.encoder](config)
            for module in self.modules():
                # Normal everywhere (appendix B.2), so that normalised vectors start evenly spread over the sphere.
                for name, parameter in module.named_parameters(recurse=False):
                    if name.endswith("bias"):
                        nn.init.zeros_(parameter)
                    elif not isinstance(module, nn.LayerNorm):
                        nn.init.normal_(parameter, std=config.dim**-0.5)
        self.queue = fastcl.NegativeQueue(config.negatives - config.batch, config.dim)
        self._positives = torch.empty(0, config.dim)  # of the last loss, on their way into the queue

    def forward(self, item: Tensor, table: Tensor, bucket: Tensor, clicks: Packed) -> Tensor:
        """Rows item [n] of encoded items table [U, D], with their buckets [n], to normalised users [N, D]."""
        return F.normalize(self.user(F.embedding(item, table), bucket, clicks), dim=-1)

    def encode(self, histories: Histories) -> Tensor:
        """[B, D], the normalised user vector of each history."""
        clicks, item, bucket = self._clicks(histories, newest(histories, self.config.max_len))
        distinct, place = item.unique(return_inverse=True)
        return self.user.served(self(place, self.item(distinct), bucket, clicks), clicks)

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
        if ids is None:
            # A window's own clicks are no sample of what was shown to all. Below zero: no item's number.
            ids = -1 - batch.clicks.row[self.user.trained(batch.clicks)]
        few = min(n, self.config.negatives)
        column = torch.arange(few, device=ids.device) * n // few  # all, or evenly out of too many
        return fastcl.infonce(
            user,
            positive,
            positive[column],
            temperature=self.config.temperature,
            normalize=False,
            queue=self.queue.newest(self.config.negatives - few),
            ids=ids,
            negative_ids=ids[column],
        )

    def after_step(self, batch: Batch) -> None:
        """The batch's encoded positives, as the loss computed them, join the queue."""
        self.queue.push(self._positives, ids=batch.target)

    def steps(self, train: Histories) -> int:
        return batch_count(self.user.spans(train, self.config.max_len), self.config.batch)

    def batches(self, train: Histories, rng: np.random.Generator) -> Iterator[Batch]:
        """One epoch: every click but a history's first is a target once."""
        spans = self.user.spans(train, self.config.max_len)
        for part in bucketed(spans, self.config.batch, rng, self.share):
            clicks, item, bucket = self._clicks(train, part)
            follows = clicks.source[self.user.trained(clicks).numpy(force=True)] + 1
            yield Batch(clicks, item, bucket, self.tensor(train.item[follows]))

    def _clicks(self, histories: Histories, spans: Spans) -> tuple[Packed, Tensor, Tensor]:
        clicks = pack(spans, self.device)
        bucket = time_buckets(histories, spans, clicks, self.config.time_cuts)
        return clicks, self.tensor(histories.item[clicks.source]), self.tensor(bucket)
