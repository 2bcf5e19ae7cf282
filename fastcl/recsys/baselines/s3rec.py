"""S3-Rec (Zhou et al. 2020, "S3-Rec: Self-Supervised Learning for Sequential Recommendation with Mutual Information
Maximization"): a Transformer that is trained to know covered items, attributes and segments first, and the next item
then.

This file has the four pre-training losses and their batches; transformer.py has the network.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastcl.recsys.baselines.nextitem import Batch
from fastcl.recsys.baselines.transformer import Transformer, TransformerConfig
from fastcl.recsys.data import Histories
from fastcl.recsys.models.base import NamedRows
from fastcl.recsys.models.batching import Packed, Prefixes, Spans, Unclicked, batch_count, batched, pack
from fastcl.recsys.models.layers import short_normal
from fastcl.recsys.options import at_least, between
from fastcl.recsys.settings import setting

WEIGHTS = {"attributes": 0.2, "items": 1.0, "covered_attributes": 1.0, "segments": 0.5}


@dataclass(frozen=True)
class S3RecConfig(TransformerConfig):
    """Settings of `S3Rec`."""

    pretrain: int = setting(
        100, "Pre-training passes over the histories, all within the first epoch; 0: no pre-training."
    )
    pretrain_batch: int = setting(100, "Prefixes of histories in a batch of the pre-training.")
    mask_rate: float = setting(0.2, "Chance of a click of a prefix to be covered; the newest one always is.")

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(2, "max_len", self.max_len)
        at_least(0, "pretrain", self.pretrain)
        at_least(1, "pretrain_batch", self.pretrain_batch)
        between(0.0, 1.0, "mask_rate", self.mask_rate)


class Pretraining(NamedTuple):
    """B prefixes of n clicks in all, four times each: with covered clicks, with a covered segment, with nothing but the
    segment, and with nothing but a segment of other histories in its place.
    """

    clicks: Packed  # 4B sequences
    item: Tensor  # int64 [4n], the mask token where covered
    covered: Tensor  # int64 [m], the covered ones of the first n clicks
    target: Tensor  # int64 [m], the items under the cover
    negative: Tensor  # int64 [m], an unclicked item for each
    plain: Tensor  # int64 [n - m], the other ones of the first n clicks


class First(Batch):
    """The first batch after the pre-training."""


class S3Rec(Transformer):
    """A Transformer that learns covered items, attributes and segments before it learns the next item.

    The first epoch begins with `pretrain` passes over all prefixes of the histories, in which each click sees both
    sides. Its four losses are sums over a prefix, as in the authors' program: the attributes of the visible clicks'
    items, the covered clicks' items against one unclicked item each, the covered clicks' attributes, and the segment
    that is missing against one of other histories. Attributes are the values of all item features; without features
    the two losses of attributes are 0. Then the same weights learn the next item, causally. The optimiser's moments
    begin anew there: those of sums over prefixes are too large for a mean over positions, and would hold back thousands
    of its steps. In the pre-training a click that stands alone is left out.

    Args:
        items: the item table with its features.
        config: the settings; None: the settings are the keywords `options`.
        seed: seed of the initial weights.

    >>> from fastcl.recsys import Histories, Items
    >>> model = S3Rec(Items(ids=("a", "b", "c")), dim=8, seed=0)
    >>> model.scores(Histories.from_lists([[1, 2], [3]])).shape
    torch.Size([2, 4])
    """

    name = "s3rec"
    Config = S3RecConfig
    part_names = ("next", *WEIGHTS)
    pretrained: Tensor  # int64 [], 1 from the end of the first epoch on
    codes: Tensor  # int64 [I+1, W], the attributes of each item from 1 on, filled up with 0

    def build(self) -> None:
        super().build()
        dim, features = self.config.dim, list(self.items.features.values())
        before = np.cumsum([0, *(len(feature.values) for feature in features)])
        codes = [np.where(f.codes > 0, f.codes + at, 0) for f, at in zip(features, before, strict=False)]
        empty = np.zeros((len(self.items) + 1, 0), np.int64)
        self.register_buffer("codes", torch.from_numpy(np.concatenate([empty, *codes], 1)), persistent=False)
        self.attribute = nn.Embedding(int(before[-1]), dim)
        self.to_attribute, self.to_item, self.to_covered, self.to_segment = (nn.Linear(dim, dim) for _ in range(4))
        short_normal(self)
        self.register_buffer("pretrained", torch.zeros((), dtype=torch.int64))

    def loss(self, batch: Any) -> Tensor:
        return torch.stack(list(self.parts(batch).values())).sum()

    def parts(self, batch: Any) -> dict[str, Tensor]:
        """The weighted terms whose sum is the loss: `next`, or the others in the pre-training."""
        none = self.log_share.new_zeros(())
        if not isinstance(batch, Pretraining):
            return dict.fromkeys(self.part_names, none) | {"next": super().loss(batch)}
        clicks = batch.clicks
        both_sides = [torch.arange(width, device=none.device) < n[:, None, None, None] for n, width in clicks.blocks]
        states = self(batch.item, clicks, both_sides)
        covered, plain = states[batch.covered], states[batch.plain]
        query = self.to_item(covered)
        up, down = ((query * self.item(item)).sum(-1) for item in (batch.target, batch.negative))
        context, positive, negative = states[clicks.last].chunk(4)[1:]
        missing = self.to_segment(context)
        sums = {
            "attributes": self._attributes(self.to_attribute(plain), batch.item[batch.plain]),
            "items": apart(up, down),
            "covered_attributes": self._attributes(self.to_covered(covered), batch.target),
            "segments": apart((missing * positive).sum(-1), (missing * negative).sum(-1)),
        }
        rows = len(context)
        return {"next": none} | {name: WEIGHTS[name] * total / rows for name, total in sums.items()}

    def named_rows(self) -> dict[str, NamedRows]:
        values = [f"{name} {value}" for name, feature in self.items.features.items() for value in feature.values]
        return {**super().named_rows(), "attribute.weight": NamedRows(values, 0)}

    def _attributes(self, query: Tensor, item: Tensor) -> Tensor:
        """Binary cross-entropy of all attributes of the items [n] by the queries [n, D], summed."""
        logits = query @ self.attribute.weight.T
        has = logits.new_zeros(len(item), logits.shape[1] + 1).scatter_(1, self.codes[item], 1.0)[:, 1:]
        return F.binary_cross_entropy_with_logits(logits, has, reduction="sum")

    def targets(self, batch: Any) -> int:
        """The number of positions or, in the pre-training, of prefixes."""
        return len(batch.clicks.length) // 4 if isinstance(batch, Pretraining) else len(batch.target)

    def steps(self, train: Histories) -> int:
        steps = super().steps(train)
        if not steps or self.pretrained:
            return steps
        return steps + self.config.pretrain * batch_count(self._prefixes(train), self.config.pretrain_batch)

    def usual_steps(self, train: Histories) -> int:
        return super().steps(train)

    def batches(self, train: Histories, rng: np.random.Generator) -> Iterator[Any]:
        """One epoch: every window once, in random order; before them, in the first epoch, the pre-training."""
        # Processes draw other numbers for their own batches, and must agree on the order of the next pass.
        orders = [np.random.default_rng(seed) for seed in rng.integers(2**63, size=self.config.pretrain + 1)]
        if not self.pretrained:
            unclicked = Unclicked(train, len(self.items))
            for order in orders[:-1]:
                for spans in batched(self._prefixes(train), self.config.pretrain_batch, order, self.share):
                    yield self._pretraining(train, spans, unclicked, rng)
        following = super().batches(train, orders[-1])
        if self.config.pretrain and not self.pretrained:
            yield from (First(*batch) for batch in itertools.islice(following, 1))
        yield from following
        # Not before the last batch is trained: a run that is resumed within the first epoch draws that epoch again.
        self.pretrained.fill_(1)

    def begins_stage(self, batch: Any) -> bool:
        return isinstance(batch, First)

    def _prefixes(self, train: Histories) -> Spans:
        spans = Prefixes(train, self.config.max_len - 1).all()
        return spans._replace(stop=spans.stop + 1)

    def _pretraining(
        self, train: Histories, spans: Spans, unclicked: Unclicked, rng: np.random.Generator
    ) -> Pretraining:
        one = pack(spans)
        row, position, length = (x.numpy() for x in (one.row, one.position, one.length))
        item = train.item[one.source]
        hidden = (rng.random(len(item)) < self.config.mask_rate) | (position == length[row] - 1)
        wide = rng.integers(1, length // 2 + 1)
        start = rng.integers(0, length - wide + 1)
        inside = (position >= start[row]) & (position < (start + wide)[row])
        elsewhere = rng.integers(0, len(train.item) - wide + 1)
        other = train.item[np.where(inside, elsewhere[row] + position - start[row], 0)]
        views = [np.where(hidden, self.mask, item), np.where(inside, self.mask, item)]
        views += [np.where(inside, segment, self.mask) for segment in (item, other)]
        negative = unclicked.draw(spans.row[row[hidden]], rng)
        four = pack(Spans(*(np.tile(x, 4) for x in spans)), self.device)
        arrays = np.concatenate(views), np.flatnonzero(hidden), item[hidden], negative, np.flatnonzero(~hidden)
        return Pretraining(four, *map(self.tensor, arrays))


def apart(up: Tensor, down: Tensor) -> Tensor:
    """-log softmax of the target's of two mutual informations, which are sigmoids (Eq. 6), summed."""
    return F.softplus(down.sigmoid() - up.sigmoid()).sum()
