"""CLRec (Zhou et al. 2021, "Contrastive Learning for Debiased Candidate Generation in Large-Scale Recommender
Systems"), single queue.

This file holds the model alone, after the paper's appendix B: encoding, loss, batches. config.py has the settings,
encoders.py the table of encoders, objectives.py the losses that the paper compares, propensities.py their propensities.
The queue is `fastcl.NegativeQueue`.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastcl.library import absent
from fastcl.momentum import momentum_update
from fastcl.negatives import NegativeQueue
from fastcl.recsys.data import Histories, Items
from fastcl.recsys.models.base import Model, NamedRows, Reading, Reads, short
from fastcl.recsys.models.batching import (
    Packed,
    Spans,
    batch_count,
    batched,
    drawing,
    log_shares,
    newest,
    pack,
    time_buckets,
)
from fastcl.recsys.models.clrec.config import CLRecConfig
from fastcl.recsys.models.clrec.encoders import ENCODERS, FEATURES, ItemEncoder, UserEncoder
from fastcl.recsys.models.clrec.objectives import OBJECTIVES, Pairs, correction
from fastcl.recsys.models.clrec.propensities import PROPENSITIES, Learned
from fastcl.recsys.models.clrec.queues import SOURCES, follower
from fastcl.recsys.models.clrec.tasks import Later, later, pick, u2u
from fastcl.recsys.models.clrec.times import check_unit, cuts_in
from fastcl.recsys.models.layers import glorot_normal, seeded
from fastcl.recsys.models.rowtable import chosen, embedding
from fastcl.recsys.settings import settled

_NONE = absent(torch.int64)
FOR_SHORT: dict[str, Any] = {"encoder": "sasrec", "dropout": 0.5, "max_len": 50, "lr": 2e-3}


class Batch(NamedTuple):
    """A batch of clicks and targets. Fields after `target` are empty where the settings do not use them."""

    clicks: Packed
    item: Tensor  # int64 [n]
    bucket: Tensor  # int64 [n]
    target: Tensor  # int64 [N], the click after each history, or with "sasrec" after each click
    at: Tensor = _NONE  # int64 [N], the packed row that each target follows
    row: Tensor = _NONE  # int64 [N], the row of `train` that each target belongs to
    drawn: Tensor = _NONE  # int64 [M] or [N, K], the items that the objective draws
    later: Later | None = None


class CLRec(Model):
    """A user encoder over a click history, scored against encoded items by cosine / temperature.

    An item's vector is its id embedding plus the concatenated embeddings of its features (means over several values). A
    user's vector is a weighted sum of several weighted sums of the past clicks ("pooling"), or the last state of a
    Transformer ("sasrec"). With "pooling" each click adds the embedding of its time bucket and of its position, the
    earliest click at zero. The bucket is that of the time up to the history's newest click, which tells nothing about
    the target. Negatives are the batch's other positives and a queue of earlier ones, so that items are negatives as
    often as they are clicked, which divides the optimum by the share of the clicks. The correction `log_q` takes this
    division back: the whole of it by default, and none with log_q=0, which is the paper's CLRec.

    Args:
        items: the item table with its features.
        config: the settings; None: the settings are the keywords `options`.
        seed: seed of the initial weights.

    >>> from fastcl.recsys import CLRec, Histories, Items
    >>> model = CLRec(Items(ids=("a", "b", "c")), dim=8, seed=0)
    >>> model.scores(Histories.from_lists([[1, 2], [3]])).shape
    torch.Size([2, 4])
    """

    name = "clrec"
    Config = CLRecConfig
    log_share: Tensor  # [I], log of each item's share of the train clicks; set by `batches`

    def __init__(self, items: Items, config: CLRecConfig | None = None, *, seed: int = 0, **options: Any) -> None:
        config = settled(CLRecConfig, config, options)
        objective = OBJECTIVES[config.objective]
        needs_all = f"objective={config.objective}" if objective.every else "momentum" if config.momentum else ""
        config = replace(config, table=chosen(config.table, len(items), needs_all))
        super().__init__(items, config)
        if config.id_dropout and not items.features:
            raise ValueError(f"id_dropout: expected 0 for items without features, got {config.id_dropout}")
        self.objective = objective
        with seeded(seed):
            ids = embedding(config.table, len(items) + 1, config.dim, config.table_rule, config.table_rate)
            self.item = ItemEncoder(items, config.dim, ids, config.id_dropout)
            self.user = ENCODERS[config.encoder](config)
            glorot_normal(self)
            self.propensity = PROPENSITIES[config.propensity](len(items)) if self.objective.weighs else None
        learns = self.propensity is not None and any(True for _ in self.propensity.parameters())
        names = (*config.tasks, *(["propensity"] if learns else []))
        self.part_names = names if len(names) > 1 else ("loss",)
        self.cuts = cuts_in(config.time_unit, config.time_cuts)
        self.source, self.features = SOURCES[config.negatives_from], FEATURES[config.features]
        size = config.negatives - config.batch
        self.queue = self.source.queue(size, config.dim) if self.objective.queue else None
        both = "u2u" in config.tasks
        self.later_queue = NegativeQueue(size, config.dim) if both and config.negatives_from != "batch" else None
        self.item_follower = follower(self.item) if config.momentum else None
        if self.item_follower is not None:
            self.item_follower.id_dropout = 0.0
        self.user_follower = follower(self.user) if config.momentum and both else None
        self.register_buffer("log_share", torch.zeros(len(items)), persistent=False)
        # Vectors that the last loss encoded; `after_step` pushes them into the queues.
        self._positives, self._later = torch.empty(0, config.dim), torch.empty(0, config.dim)

    @classmethod
    def suited(cls, train: Histories, chosen: Collection[str] = ()) -> dict[str, Any]:
        """With less than 20 clicks a user: encoder "sasrec" over 50 clicks, dropout 0.5 and lr 2e-3; none of them where
        the encoder is chosen.

        >>> from fastcl.recsys import CLRec, Histories
        >>> CLRec.suited(Histories.from_lists([[1, 2, 3]])), CLRec.suited(Histories.from_lists([[1] * 50]))
        ({'encoder': 'sasrec', 'dropout': 0.5, 'max_len': 50, 'lr': 0.002}, {})
        """
        return dict(FOR_SHORT) if short(train) and "encoder" not in chosen else {}

    def forward(self, x: Tensor, bucket: Tensor, clicks: Packed) -> Tensor:
        """Encoded clicks x [n, D] with their buckets [n] to normalised users [N, D]."""
        return F.normalize(self.user(x, bucket, clicks), dim=-1)

    def encode(self, histories: Histories) -> Tensor:
        """[B, D], the normalised user vector of each history."""
        clicks, item, bucket = self._clicks(histories, newest(histories, self.config.max_len))
        return self._served(self.item, self.user, clicks, item, bucket)

    def reading(self) -> Reading:
        reads_times = getattr(self.user, "bucket", None) is not None
        return Reading(self.config.max_len, cuts=self.cuts if reads_times else ())

    def click_tables(self) -> tuple[Tensor, ...]:
        every = torch.arange(len(self.items) + 1, device=self.device)
        return (self.features.both(self.item, every, every[:0])[0],)

    def user_vectors(self, about: Sequence[Tensor], bucket: Tensor, clicks: Packed) -> Tensor:
        return _newest_state(self.user, about[0], bucket, clicks)

    def _served(self, items: ItemEncoder, users: UserEncoder, clicks: Packed, item: Tensor, bucket: Tensor) -> Tensor:
        x, _ = self.features.both(items, item, item[:0])
        return _newest_state(users, x, bucket, clicks)

    def item_vectors(self) -> Tensor:
        """[I+1, D], normalised encoded items / temperature: a score is cosine / temperature."""
        return self.vectors_of(torch.arange(len(self.items) + 1, device=self.device))

    def vectors_of(self, item: Tensor) -> Tensor:
        return self._encoded(item) / self.config.temperature

    def _encoded(self, item: Tensor) -> Tensor:
        return F.normalize(self.features.scored(self.item, item), dim=-1)

    def loss(self, batch: Batch) -> Tensor:
        return torch.stack(list(self.parts(batch).values())).sum()

    def parts(self, batch: Batch) -> dict[str, Tensor]:
        pairs = self._pairs(batch)
        self._positives = pairs.positive.detach()
        parts = [self.objective.loss(pairs, self.config)]
        if batch.later is not None:
            parts.append(self._u2u(pairs.user, batch.later))
        if "propensity" in self.part_names:
            parts.append(-pairs.log_q.mean())
        return dict(zip(self.part_names, parts, strict=True))

    def _u2u(self, user: Tensor, later: Later) -> Tensor:
        after = self._served(self.item, self.user, later.clicks, later.item, later.bucket)
        self._later = after.detach()
        queued = None if self.later_queue is None else self.later_queue.newest(self.config.negatives - len(after))
        return u2u(user[later.pair], after, later.row, queued, self.config.temperature)

    def _pairs(self, batch: Batch) -> Pairs:
        drawn, queued = batch.drawn, None
        if self.queue is not None:
            drawn, queued = self.source.read(self.queue, max(0, self.config.negatives - len(batch.target)))
        x, scored = self.features.both(self.item, batch.item, torch.cat([batch.target, drawn.flatten()]))
        positive, keys = F.normalize(scored, dim=-1).split([len(batch.target), drawn.numel()])
        log_q = x.new_empty(0)
        if self.propensity is not None:
            log_q = self.propensity(batch.item[batch.at], batch.target, self.log_share)
        return Pairs(
            user=self(x, batch.bucket, batch.clicks),
            positive=positive,
            target=batch.target,
            window=batch.clicks.row[batch.at],
            drawn=drawn,
            keys=keys.unflatten(0, drawn.shape),
            queued=queued,
            items=lambda: self._encoded(torch.arange(1, len(self.items) + 1, device=self.device)),
            log_share=self.log_share,
            log_q=log_q,
        )

    def named_rows(self) -> dict[str, NamedRows]:
        found = self.item.named_rows(self.items, "item.")
        if self.item_follower is not None:
            found |= self.item_follower.named_rows(self.items, "item_follower.")
        if isinstance(self.propensity, Learned):
            ids = self.items.ids
            found |= {"propensity.before.weight": NamedRows(ids), "propensity.after.weight": NamedRows(ids, 0)}
            found |= {"propensity.bias": NamedRows(ids, 0)}
        return found

    @property
    def encodes_features(self) -> bool:
        return bool(self.items.features) and self.config.features == "everywhere"

    def reads(self, batch: Batch) -> Sequence[tuple[nn.Embedding, Tensor]]:
        drawn = batch.drawn
        if self.queue is not None:
            drawn, _ = self.source.read(self.queue, max(0, self.config.negatives - len(batch.target)))
        later = () if batch.later is None else (batch.later.item,)
        return [(self.item.id, ids) for ids in (batch.item, batch.target, drawn, *later)]

    def reads_of(self, histories: Histories) -> Reads:
        return [(self.item.id, self.tensor(histories.last(self.config.max_len).item))]

    def after_step(self, batch: Batch) -> None:
        """Pushes the batch's positives into the queues, as the loss encoded them or as the followers encode them."""
        positives, after = self._positives, self._later
        if self.item_follower is not None:
            momentum_update(self.item_follower, self.item, self.config.momentum)
            positives = F.normalize(self.features.scored(self.item_follower, batch.target), dim=-1)
        if self.item_follower is not None and self.user_follower is not None and batch.later is not None:
            momentum_update(self.user_follower, self.user, self.config.momentum)
            with torch.no_grad():
                after = self._served(self.item_follower, self.user_follower, *batch.later[:3])
        if self.queue is not None:
            log_q = correction(self.log_share, batch.target, self.config)
            self.queue.push(self.source.entry(positives, batch.target), ids=batch.target, log_q=log_q)
        if self.later_queue is not None and batch.later is not None:
            self.later_queue.push(after, ids=batch.later.row)

    def steps(self, train: Histories) -> int:
        return batch_count(self.user.spans(train, self.config.max_len), self.config.batch)

    def batches(self, train: Histories, rng: np.random.Generator) -> Iterator[Batch]:
        """One epoch: every click but a history's first is a target once."""
        check_unit(train, self.config.time_unit, self.cuts)
        self.log_share.copy_(log_shares(train, len(self.items)))
        draw = drawing(self.log_share, self.objective.power, rng)
        spans = self.user.spans(train, self.config.max_len)
        for part in batched(spans, self.config.batch, rng, self.share, self.user.sorted_together):
            clicks, item, bucket = self._clicks(train, part)
            at = self.user.trained(clicks)
            follows = clicks.source[at.numpy(force=True)] + 1
            row = part.row[clicks.row[at].numpy(force=True)]
            target = self.tensor(train.item[follows])
            drawn = draw(self.objective.shape(len(at), self.config))
            then = self._later_clicks(train, follows, row, clicks.row[at], rng) if "u2u" in self.config.tasks else None
            yield Batch(clicks, item, bucket, target, at, self.tensor(row), self.tensor(drawn), then)

    def _later_clicks(
        self, train: Histories, follows: np.ndarray, row: np.ndarray, window: Tensor, rng: np.random.Generator
    ) -> Later:
        pair = pick(window.numpy(force=True), rng)
        clicks, item, bucket = self._clicks(train, later(train, follows[pair], row[pair], self.config.max_len))
        return Later(clicks, item, bucket, self.tensor(pair), self.tensor(row[pair]))

    def _clicks(self, histories: Histories, spans: Spans) -> tuple[Packed, Tensor, Tensor]:
        clicks = pack(spans, self.device)
        bucket = time_buckets(histories, spans, clicks, self.cuts)
        return clicks, self.tensor(histories.item[clicks.source]), self.tensor(bucket)


def _newest_state(users: UserEncoder, x: Tensor, bucket: Tensor, clicks: Packed) -> Tensor:
    """[B, D], the normalised vector after the newest click of each span."""
    return F.normalize(users.served(users(x, bucket, clicks), clicks), dim=-1)
