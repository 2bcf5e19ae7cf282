"""Multi-CLRec (Zhou et al. 2021, "Contrastive Learning for Debiased Candidate Generation in Large-Scale Recommender
Systems", section 3.2): several intents per user, and a queue of negatives for each intent.

This file holds the model alone: user encoder, loss, batches. config.py has the settings, parts.py the parts of the
network, queues.py the queues. The model follows the paper; the program that the authors published is of a predecessor.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastcl.normalize import normalized
from fastcl.recsys.data import Histories, Items
from fastcl.recsys.models.base import Model, NamedRows, Reading, Reads
from fastcl.recsys.models.batching import (
    TOGETHER,
    Packed,
    Prefixes,
    Spans,
    batch_count,
    batched,
    newest,
    pack,
    time_buckets,
)
from fastcl.recsys.models.clrec.model import Batch
from fastcl.recsys.models.clrec.objectives import DUPLICATES
from fastcl.recsys.models.clrec.times import check_unit, cuts_in
from fastcl.recsys.models.layers import Dropout, glorot_normal, seeded
from fastcl.recsys.models.multi_clrec.config import MultiCLRecConfig
from fastcl.recsys.models.multi_clrec.parts import (
    CategoryItems,
    balance,
    mlp,
    polarity,
    routing,
    separation,
    straight_through,
)
from fastcl.recsys.models.multi_clrec.queues import IntentQueues, Queued, infonce
from fastcl.recsys.models.rowtable import chosen, embedding
from fastcl.recsys.options import one_of
from fastcl.recsys.settings import settled


class Encoded(NamedTuple):
    """B users: their intention vectors z [B, H, D], and how well each vector fits its user, w [B, H] (Eq. 8, 9)."""

    intention: Tensor
    fit: Tensor


class MultiCLRec(Model):
    """A user is one vector for each of H intents, which are clusters of item categories. The loss uses the intent that
    fits best, with negatives that all users share and negatives of the target's intent.

    An item's category is routed to the intents by its cosine to their prototypes (Eq. 7). An MLP of a click's item,
    category, time bucket and position gives its weight (Eq. 6). The time is that up to the history's newest click, and
    not up to the target as in the paper, since serving does not know the target's time. Clicks pooled by weight and
    routing give the intention vectors z_h (Eq. 8); a straight-through choice gives the user's z (Eq. 9). The loss is

        -log share of the target among main queue and its intent's queue (Eq. 13)  +  polarity * Eq. 10
            + separation * Eq. 11  +  balance * Eq. 12

    with cosines / temperature throughout. Unlike in the paper, the output of an MLP is added to its input vector, and,
    unless `clicks` is "own", an intention vector also has the clicks of the other intents.

    An item's score is its cosine / temperature with the intent that fits best. With `served` above 1, it is the largest
    of cosine / temperature + log softmax(w)_h over the `served` best intents, the log probability of the intent and
    then the item. The paper retrieves items for each intent and does not say how to merge them. Cosines alone have no
    common scale, since items lie close to intents that do not fit the user too.

    An item without a value of the category feature is a category of its own, routed by its id's embedding; so is every
    item where there is no feature.

    Args:
        items: the item table with its features.
        config: the settings; None: the settings are the keywords `options`.
        seed: seed of the initial weights.

    Raises ValueError for a category that is no item feature.

    >>> from fastcl.recsys import Histories, Items, MultiCLRec
    >>> model = MultiCLRec(Items(ids=("a", "b", "c")), dim=8, intents=4, served=2, seed=0)
    >>> histories = Histories.from_lists([[1, 2], [3]])
    >>> model.encode(histories).shape, model.scores(histories).shape
    (torch.Size([2, 2, 9]), torch.Size([2, 4]))
    """

    name = "multi_clrec"
    Config = MultiCLRecConfig
    part_names = ("contrast", "polarity", "separation", "balance")

    def __init__(self, items: Items, config: MultiCLRecConfig | None = None, *, seed: int = 0, **options: Any) -> None:
        config = settled(MultiCLRecConfig, config, options)
        config = replace(config, table=chosen(config.table, len(items), ""))
        super().__init__(items, config)
        if config.category:
            one_of(items.features, "category", config.category)
        self.category = config.category or next(iter(items.features), "")
        with seeded(seed):
            dim, hidden = config.dim, config.hidden
            ids = embedding(config.table, len(items) + 1, dim, config.table_rule, config.table_rate)
            self.item = CategoryItems(items, self.category, hidden, ids)
            self.position = nn.Embedding(config.max_len, dim)
            self.bucket = nn.Embedding(len(config.time_cuts) + 1, dim) if config.time_cuts else None
            self.dropout = Dropout(config.dropout)
            self.importance = mlp((4 if config.time_cuts else 3) * dim, hidden, 1)
            self.prototype, self.beta = (nn.Embedding(config.intents, dim) for _ in range(2))
            self.intention = mlp(2 * dim, hidden, dim)
            self.choice = mlp(dim, hidden, dim)
            glorot_normal(self)
        self.cuts = cuts_in(config.time_unit, config.time_cuts)
        sizes = config.intents, config.main - config.batch, config.secondary
        self.queues = IntentQueues(*sizes, dim, config.negatives_from)
        self._positives = torch.empty(0, dim)  # vectors that the last loss encoded; `after_step` pushes them

    def forward(self, item: Tensor, category: Tensor, routing: Tensor, bucket: Tensor, clicks: Packed) -> Encoded:
        """Encoded items [n, D], their categories [n, D] and routing [n, H], buckets [n] -> the B users."""
        about = [item, category, self.position(clicks.position)]
        if self.bucket is not None:
            about.append(self.bucket(bucket))
        importance = clicks.pad(self.importance(torch.cat(about, -1)), fill=-torch.inf).softmax(1)  # [B, L, 1]
        pooled = (importance * clicks.pad(routing)).transpose(1, 2) @ clicks.pad(self.dropout(item))
        # A click's routing sums to 1, so that the sum over intents is the sum of the clicks weighted by importance.
        whole = pooled.sum(1, keepdim=True)
        z = pooled + self.intention(torch.cat([pooled, self.beta.weight.expand_as(pooled)], -1))
        if self.config.clicks == "all":
            z = z + whole
        m = whole + self.choice(whole)
        return Encoded(z, (normalized(m) * normalized(z)).sum(-1) / self.config.temperature)

    def users(self, histories: Histories) -> Encoded:
        """The intention vectors of each history, and how well each fits it."""
        clicks, item, bucket = self._clicks(histories, newest(histories, self.config.max_len))
        distinct, place = item.unique(return_inverse=True)
        return self(*(F.embedding(place, table) for table in self._about(distinct)), bucket, clicks)

    def _about(self, item: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The vectors [n, D], categories [n, D] and routing [n, H] of items [n]."""
        vectors, categories = self.item(item)
        return vectors, categories, self._routing(categories).exp()

    def reading(self) -> Reading:
        return Reading(self.config.max_len, cuts=self.cuts)

    def click_tables(self) -> tuple[Tensor, ...]:
        return self._about(torch.arange(len(self.items) + 1, device=self.device))

    def user_vectors(self, about: Sequence[Tensor], bucket: Tensor, clicks: Packed) -> Tensor:
        return self._best(self(*about, bucket, clicks))

    def encode(self, histories: Histories) -> Tensor:
        """[B, K, D+1], K = `served`: the normalised intention vectors that fit each history best, best first, each
        followed by the log of its intent's share.
        """
        return self._best(self.users(histories))

    def _best(self, encoded: Encoded) -> Tensor:
        z, fit = encoded
        share, best = fit.log_softmax(1).topk(self.config.served, dim=1)
        vectors = normalized(z.gather(1, best[:, :, None].expand(-1, -1, self.config.dim)))
        return torch.cat([vectors, share[:, :, None].to(vectors)], -1)

    def item_vectors(self) -> Tensor:
        """[I+1, D+1], normalised encoded items / temperature, followed by a 1 that multiplies the log share."""
        return self.vectors_of(torch.arange(len(self.items) + 1, device=self.device))

    def vectors_of(self, item: Tensor) -> Tensor:
        vectors = normalized(self.item(item)[0])
        return F.pad(vectors / self.config.temperature, (0, 1), value=1.0)

    def intents(self, item: Tensor) -> Tensor:
        """float32 [n, H], p_{h|t} of items [n]: the shares of the intents in each item's category (Eq. 7)."""
        return self._routing(self.item(item)[1]).exp()

    def _routing(self, category: Tensor) -> Tensor:
        return routing(category, self.prototype.weight, self.config.temperature)

    def loss(self, batch: Batch) -> Tensor:
        return torch.stack(list(self.parts(batch).values())).sum()

    def parts(self, batch: Batch) -> dict[str, Tensor]:
        """The weighted terms whose sum is the loss."""
        config = self.config
        # Each distinct item of the batch is encoded once.
        everything = torch.cat([batch.target, batch.item, self.queues.again()])
        distinct, place = everything.unique(return_inverse=True)
        vectors, categories = self.item(distinct)
        log_routed = self._routing(categories)
        of_target, of_click, of_queued = place.tensor_split((len(batch.target), len(batch.target) + len(batch.item)))
        tables = (vectors, categories, log_routed.exp())
        z, fit = self(*(F.embedding(of_click, table) for table in tables), batch.bucket, batch.clicks)
        user = normalized((straight_through(fit)[:, None] @ z)[:, 0])
        unit = normalized(vectors)
        positive = F.embedding(of_target, unit)
        self._positives = positive.detach()
        log_routed_target = F.embedding(of_target, log_routed)
        intent = log_routed_target.argmax(1)
        queued = self.queues.ready(F.embedding(of_queued, unit))
        cosine = (normalized(z) @ positive[:, :, None])[:, :, 0]
        return {
            "contrast": self.contrast(user, positive, batch.target, queued, intent),
            "polarity": config.polarity * polarity(log_routed_target),
            "separation": config.separation * separation(cosine, intent, config.temperature),
            "balance": config.balance * balance(F.embedding(torch.cat([of_target, of_click]), log_routed)),
        }

    def contrast(self, user: Tensor, positive: Tensor, target: Tensor, queued: list[Queued], intent: Tensor) -> Tensor:
        """Eq. 13 of normalised users [N, D] and targets [N, D], which are items `target` [N] of intents `intent` [N]. A
        model with another loss for the same encoder overrides it.
        """
        ids = DUPLICATES[self.config.duplicates](target)
        return infonce(user, positive, queued, intent, self.config.temperature, ids)

    def named_rows(self) -> dict[str, NamedRows]:
        values = enumerate(self.items.features.values())
        of_features = {f"item.features.{nth}.weight": NamedRows(feature.values) for nth, feature in values}
        return {"item.id.weight": NamedRows(self.items.ids), **of_features}

    @property
    def encodes_features(self) -> bool:
        return bool(self.items.features)

    def reads(self, batch: Batch) -> Sequence[tuple[nn.Embedding, Tensor]]:
        return [(self.item.id, ids) for ids in (batch.target, batch.item, self.queues.again())]

    def reads_of(self, histories: Histories) -> Reads:
        return [(self.item.id, self.tensor(histories.last(self.config.max_len).item))]

    def reads_after(self, batch: Batch) -> Sequence[tuple[nn.Embedding, Tensor]]:
        """What the main queue may evict is routed."""
        return [(self.item.id, ids) for ids in (batch.target, self.queues.evictable())]

    @torch.no_grad()
    def after_step(self, batch: Batch) -> None:
        """Pushes the batch's encoded positives into the main queue, whose evictions go to the queues of the intents."""
        self.queues.push(self._positives, batch.target, route=lambda ids: self.intents(ids).argmax(1))

    def steps(self, train: Histories) -> int:
        return batch_count(Prefixes(train, self.config.max_len), self.config.batch)

    def batches(self, train: Histories, rng: np.random.Generator) -> Iterator[Batch]:
        """One epoch: every click but a history's first is a target once."""
        check_unit(train, self.config.time_unit, self.cuts)
        for spans in batched(Prefixes(train, self.config.max_len), self.config.batch, rng, self.share, TOGETHER):
            yield Batch(*self._clicks(train, spans), self.tensor(train.item[spans.stop]))

    def _clicks(self, histories: Histories, spans: Spans) -> tuple[Packed, Tensor, Tensor]:
        clicks = pack(spans, self.device)
        bucket = time_buckets(histories, spans, clicks, self.cuts)
        return clicks, self.tensor(histories.item[clicks.source]), self.tensor(bucket)
