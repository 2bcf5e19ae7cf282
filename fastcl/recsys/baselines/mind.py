"""MIND (Li et al. 2019, "Multi-Interest Network with Dynamic Routing for Recommendation at Tmall"): a user is several
interests, which are capsules routed from the clicks.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from fastcl.recsys.baselines.nextitem import LOSS_MEANING, Batch, NextItem, NextItemConfig
from fastcl.recsys.data import PAD, Histories
from fastcl.recsys.models.batching import Packed, Prefixes, Spans, newest
from fastcl.recsys.models.layers import POSITIONS, Dropout
from fastcl.recsys.models.losses import Draw
from fastcl.recsys.options import above, at_least
from fastcl.recsys.settings import setting


def soft(fit: Tensor, power: float) -> Tensor:
    """Label-aware attention: softmax over the interests of fit^power; a fit below 0 counts as 0."""
    return fit.clamp(min=0.0).pow(power).softmax(1)


def hard(fit: Tensor, power: float) -> Tensor:
    """1 for the interest that fits the target best."""
    return torch.zeros_like(fit).scatter_(1, fit.argmax(1, keepdim=True), 1.0)


FORMS: dict[str, Callable[[Tensor, float], Tensor]] = {"paper": soft, "official": hard}


@dataclass(frozen=True)
class MINDConfig(NextItemConfig):
    """Settings of `MIND`."""

    interests: int = setting(4, "Interests of a user.")
    rounds: int = setting(3, "Rounds of routing.")
    max_len: int = setting(20, "Clicks of a history that the model reads, the newest ones.")
    dropout: float = setting(0.0, "Dropout rate of the items that are read.")
    batch: int = setting(128, "(history, next click) pairs in a batch.")
    loss: str = setting("popular", LOSS_MEANING, ("bce", "bpr", "softmax", "popular"))
    samples: int = setting(1280, 'Items that loss "popular" draws for each batch.')
    form: str = setting(
        "official",
        """Which interest a target trains. "paper": all, weighted by softmax of (inner product with the target)^power.
        "official": the one with the largest inner product, as in ComiRec's program.""",
        FORMS,
    )
    power: float = setting(2.0, 'Exponent of form "paper".')

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("interests", "rounds"):
            at_least(1, name, getattr(self, name))
        above(0.0, "power", self.power)


class MIND(NextItem):
    """A user is several interests, routed from the clicks; an item's score is that of the interest that fits it best.

    One linear map takes all clicks to all capsules. The routing's logits begin as random numbers, which are drawn with
    the initial weights, one for each interest and age of a click; the published programs draw them at every call, so
    that they give other scores each time. All users have `interests` of them, as in ComiRec's program. Item vectors
    begin with a standard deviation of 1 / sqrt(dim); in that program they begin the smaller, the more items there are.

    Args:
        items: the item table.
        config: the settings; None: the settings are the keywords `options`.
        seed: seed of the initial weights.

    >>> from fastcl.recsys import Histories, Items
    >>> model = MIND(Items(ids=("a", "b", "c")), dim=8, seed=0)
    >>> model.encode(Histories.from_lists([[1, 2], [3]])).shape
    torch.Size([2, 4, 8])
    """

    name = "mind"
    Config = MINDConfig
    start: Tensor  # [max_len, interests], the routing's first logits

    def build(self) -> None:
        config = self.config
        self.item = nn.Embedding(len(self.items) + 1, config.dim, padding_idx=PAD)
        self.capsule = nn.Linear(config.dim, config.dim, bias=False)
        self.feed = nn.Sequential(nn.Linear(config.dim, config.dim), nn.ReLU())
        self.dropout = Dropout(config.dropout)
        nn.init.normal_(self.item.weight, std=config.dim**-0.5)
        self.register_buffer("start", nn.init.trunc_normal_(torch.empty(config.max_len, config.interests)))

    def forward(self, item: Tensor, clicks: Packed) -> Tensor:
        """item [n] -> [B, K, D], the interests of each history."""
        x = clicks.pad(self.capsule(self.dropout(self.item(item))))  # [B, L, D], zeros at padding
        logits = clicks.pad(self.start[POSITIONS["newest"](clicks)])  # [B, L, K]
        fixed = x.detach()
        for _ in range(self.config.rounds - 1):
            interests = squash(logits.softmax(-1).mT @ fixed)
            logits = logits + fixed @ interests.mT
        return self.feed(squash(logits.softmax(-1).mT @ x))

    def encode(self, histories: Histories) -> Tensor:
        """[B, K, D], the interests of each history."""
        clicks, item = self.clicks(histories, newest(histories, self.config.max_len))
        return self(item, clicks)

    def loss(self, batch: Batch) -> Tensor:
        interests = self(batch.item, batch.clicks)
        fit = (interests @ self.item(batch.target)[:, :, None])[:, :, 0]
        weight = FORMS[self.config.form](fit, self.config.power)
        return self.of_states((weight[:, None] @ interests)[:, 0], batch)

    def spans(self, train: Histories) -> Prefixes:
        return Prefixes(train, self.config.max_len)

    def batch(self, train: Histories, spans: Spans, draw: Draw, rng: np.random.Generator) -> Batch:
        clicks, item = self.clicks(train, spans)
        return Batch(clicks, item, self.tensor(train.item[spans.stop]), self.tensor(draw(spans.row)))


def squash(x: Tensor) -> Tensor:
    """|x| / (1 + |x|^2) x: the length of a capsule becomes a number below 1."""
    square = x.square().sum(-1, keepdim=True)
    return square / (1.0 + square) / (square + 1e-9).sqrt() * x
