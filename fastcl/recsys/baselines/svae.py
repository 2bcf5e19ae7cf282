"""SVAE (Sachdeva et al. 2019, "Sequential Variational Autoencoders for Collaborative Filtering"): a GRU gives a latent
variable after each click, which is decoded to the next few items.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastcl
from fastcl.recsys.baselines.nextitem import LOSS_MEANING, NextItem, NextItemConfig
from fastcl.recsys.data import PAD, Histories
from fastcl.recsys.models.batching import Packed, Spans
from fastcl.recsys.models.layers import Dropout
from fastcl.recsys.models.losses import Draw
from fastcl.recsys.options import at_least, between
from fastcl.recsys.settings import setting


class Form(NamedTuple):
    """deviation: log-variance s [n, D] -> sigma. likelihood: (of each position [n], targets of each position [n],
    clicks) -> the loss.
    """

    deviation: Callable[[Tensor], Tensor]
    likelihood: Callable[[Tensor, Tensor, Packed], Tensor]


def of_sequences(nll: Tensor, count: Tensor, clicks: Packed) -> Tensor:
    """The mean over sequences of the sum over time, divided by the number of targets of the first position."""
    first = count[clicks.last - clicks.length + 1]
    return (nll / first[clicks.row]).sum() / len(clicks.length)


FORMS = {
    "paper": Form(lambda s: (0.5 * s).exp(), lambda nll, count, clicks: nll.mean()),
    "official": Form(torch.exp, of_sequences),
}


@dataclass(frozen=True)
class SVAEConfig(NextItemConfig):
    """Settings of `SVAE`."""

    dim: int = setting(256, "Width of the vectors of the items that are read.")
    state: int = setting(200, "Width of the GRU's state.")
    hidden: int = setting(150, "Width of the layers before and behind the latent variable.")
    latent: int = setting(64, "Width of the latent variable.")
    following: int = setting(4, "Items after a click that its latent variable is to tell.")
    kl_weight: float = setting(0.2, "Weight of the KL divergence, once it has risen to it.")
    kl_steps: int = setting(
        6_250,
        """The weight of the KL divergence is min(kl_weight, optimiser steps / kl_steps). The paper's 200,000 are steps
        of one window each, 32 times as many.""",
    )
    decay: float = setting(0.0, "Weight decay: decay / 2 times the sum of all squared weights; the paper's is 0.005.")
    dropout: float = setting(0.0, "Dropout rate of the items that are read.")
    batch: int = setting(32, "Windows in a batch.")
    loss: str = setting("softmax", LOSS_MEANING, ("softmax",))
    form: str = setting(
        "paper",
        """"paper": the likelihood is a mean over positions and sigma = exp(s / 2) for the log-variance s. "official":
        as in the authors' program, the likelihood is a sum over the positions of a window, divided by the number of
        targets, so that the KL divergence weighs less in long windows, and sigma = exp(s).""",
        FORMS,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("state", "hidden", "latent", "following", "kl_steps"):
            at_least(1, name, getattr(self, name))
        for name in ("kl_weight", "decay"):
            between(0.0, float("inf"), name, getattr(self, name))


class Batch(NamedTuple):
    clicks: Packed
    item: Tensor  # int64 [n]
    target: Tensor  # int64 [n, following], the items after each click; padding (0) behind the last


class SVAE(NextItem):
    """A GRU gives mean and log-variance after each click; the decoded latent variable is to tell the next few items.

    The loss is -sum over these items of log softmax plus the KL divergence to N(0, I), averaged over positions, with a
    weight that rises. Scores decode the mean; the authors' program draws the latent variable for its test too.

    Args:
        items: the item table.
        config: the settings; None: the settings are the keywords `options`.
        seed: seed of the initial weights.

    >>> from fastcl.recsys import Histories, Items
    >>> model = SVAE(Items(ids=("a", "b", "c")), dim=8, seed=0)
    >>> model.scores(Histories.from_lists([[1, 2], [3]])).shape
    torch.Size([2, 4])
    """

    name = "svae"
    Config = SVAEConfig
    item_tables = ("item.weight", "out.weight", "bias")
    part_names = ("reconstruction", "kl", "decay")
    step: Tensor  # int64 [], optimiser steps so far

    def build(self) -> None:
        config = self.config
        self.item = nn.Embedding(len(self.items) + 1, config.dim, padding_idx=PAD)
        self.gru = nn.GRU(config.dim, config.state, batch_first=True)
        self.encoder = nn.Sequential(nn.Linear(config.state, config.hidden), nn.Tanh())
        self.mean, self.log_variance = (nn.Linear(config.hidden, config.latent) for _ in range(2))
        self.decoder = nn.Sequential(nn.Linear(config.latent, config.hidden), nn.Tanh())
        self.out = nn.Embedding(len(self.items) + 1, config.hidden, padding_idx=PAD)
        self.bias = nn.Parameter(torch.zeros(len(self.items) + 1))
        for layer in self.modules():
            if isinstance(layer, nn.Linear) or layer is self.out:
                nn.init.xavier_normal_(layer.weight)
        self.dropout = Dropout(config.dropout)
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))

    def posterior(self, item: Tensor, clicks: Packed) -> tuple[Tensor, Tensor]:
        """item [n] -> mean and log-variance after each click, [n, latent] each."""
        x = self.dropout(self.item(item))
        h = self.encoder(clicks.by_length(x, lambda block, _: self.gru(block)[0]))
        return self.mean(h), self.log_variance(h)

    def forward(self, item: Tensor, clicks: Packed) -> Tensor:
        """item [n] -> [n, hidden], the decoded mean after each click."""
        return self.decoder(self.posterior(item, clicks)[0])

    def encode(self, histories: Histories) -> Tensor:
        """[B, hidden+1], the decoded mean after the newest click, then a 1 for the items' biases."""
        return F.pad(super().encode(histories), (0, 1), value=1.0)

    def item_vectors(self) -> Tensor:
        """[I+1, hidden+1], the rows of the decoder's last layer and their biases."""
        return torch.cat([self.out.weight, self.bias[:, None]], 1)

    def loss(self, batch: Batch) -> Tensor:
        return torch.stack(list(self.parts(batch).values())).sum()

    def parts(self, batch: Batch) -> dict[str, Tensor]:
        form = FORMS[self.config.form]
        mean, s = self.posterior(batch.item, batch.clicks)
        hidden = self.decoder(mean + form.deviation(s) * torch.randn_like(s) if self.training else mean)
        kl = 0.5 * (mean.square() + s.exp() - 1.0 - s).sum(-1)
        weight = min(self.config.kl_weight, int(self.step) / self.config.kl_steps)
        count = (batch.target != PAD).sum(1)
        reconstruction = form.likelihood(self.unlikely(hidden, batch.target), count, batch.clicks)
        size = sum(weights.square().sum() for weights in self.parameters()) if self.config.decay else kl.new_zeros(())
        return {"reconstruction": reconstruction, "kl": weight * kl.mean(), "decay": 0.5 * self.config.decay * size}

    def unlikely(self, hidden: Tensor, target: Tensor) -> Tensor:
        """[n], -sum of log softmax over the targets of each position; the softmax's sum is computed once for each."""
        rows = self.out(target)  # [n, following, hidden]
        logits = (rows * hidden[:, None]).sum(-1) + self.bias[target]
        first = fastcl.linear_cross_entropy(
            hidden, self.out.weight[1:], target[:, 0] - 1, linear_bias=self.bias[1:], reduction="none"
        )
        real = target != PAD
        return ((first + logits[:, 0])[:, None] - logits).mul(real).sum(1)

    def after_update(self) -> None:
        self.step += 1

    def targets(self, batch: Batch) -> int:
        """The number of positions or, with form "official", of sequences."""
        return len(batch.clicks.length) if self.config.form == "official" else len(batch.item)

    def batch(self, train: Histories, spans: Spans, draw: Draw, rng: np.random.Generator) -> Batch:
        clicks, item = self.clicks(train, spans._replace(stop=spans.stop - 1))
        at = clicks.source[:, None] + np.arange(1, self.config.following + 1)
        end = train.offsets[spans.row + 1][clicks.row.numpy(force=True)][:, None]
        target = np.where(at < end, train.item[np.minimum(at, len(train.item) - 1)], PAD)
        return Batch(clicks, item, self.tensor(target))
