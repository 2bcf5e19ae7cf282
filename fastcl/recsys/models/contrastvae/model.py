"""ContrastVAE (Wang et al. 2022, "ContrastVAE: Contrastive Variational AutoEncoder for Sequential Recommendation"):
a variational Transformer over a click history, trained on two views of it and a contrastive loss between the views.

This file holds the model alone: encoders, decoder, loss, batches. config.py has the settings, views.py the tables of
augmentations and contrasts, models/losses.py the reconstruction losses, rules.py what the authors' program does
differently.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fastcl.recsys.data import PAD, Histories, Items
from fastcl.recsys.models.base import Model, Reading
from fastcl.recsys.models.batching import Packed, Spans, batch_count, batched, log_shares, newest, pack
from fastcl.recsys.models.contrastvae.config import ALPHAS, VARIATIONAL, ContrastVAEConfig
from fastcl.recsys.models.contrastvae.rules import CLEAN, RULES, Sampler, packed
from fastcl.recsys.models.contrastvae.views import CONTRASTS, SEQUENCE
from fastcl.recsys.models.layers import POSITIONS, Dropout, PostBlock, seeded, short_normal, shortened
from fastcl.recsys.models.losses import ITEM_LOSSES, Draw, scored
from fastcl.recsys.settings import settled


class View(NamedTuple):
    """One view of a batch of sequences: n positions. Only the rules of the authors' program pad, with target 0."""

    clicks: Packed  # all positions
    real: Packed  # the positions without padding
    item: Tensor  # int64 [n], 0..I+1; I+1 is the mask token
    target: Tensor  # int64 [n], 0..I
    negative: Tensor  # int64, the items that the reconstruction loss draws


class ContrastVAE(Model):
    """A variational Transformer over a click history, trained on two views of it and a contrast between them. The loss
    is the paper's ContrastELBO:

        loss = rec(x | z) + rec(x' | z') + w (KL(q(z|x), N(0, I)) + KL(q(z'|x'), N(0, I))) + v contrast(z, z')

    Clicks are embedded by item and position, followed by layer norm and dropout. Two causal Transformers give the mean
    and the log-variance of every position, a third decodes z. Scores are inner products of the decoded newest position
    with the item table. In training z = mu + sigma eps, in the second view under VA z = mu + alpha sigma eps; otherwise
    z = mu. rec and KL (summed over D) are means over real positions; the contrast compares the means of z over each
    sequence's positions. alpha = sigmoid(parameter) begins at 0.5 and costs the KL of variational dropout (Kingma et
    al. 2015, Eq. 14).

    Args:
        items: the item table.
        config: the settings; None: the settings are the keywords `options`.
        seed: seed of the initial weights.

    >>> from fastcl.recsys import ContrastVAE, Histories, Items
    >>> model = ContrastVAE(Items(ids=("a", "b", "c")), dim=8, seed=0)
    >>> model.scores(Histories.from_lists([[1, 2], [3]])).shape
    torch.Size([2, 4])
    """

    name = "contrastvae"
    Config = ContrastVAEConfig
    step: Tensor  # int64 [], optimiser steps so far
    bias: Tensor  # [I], added to the logits of the loss (debias); set by `batches`

    def __init__(self, items: Items, config: ContrastVAEConfig | None = None, *, seed: int = 0, **options: Any) -> None:
        if config is None:
            rules = RULES.get(options.get("compat", "none"), CLEAN)  # the config refuses an unknown name
            options = {**rules.options, **options}
        config = settled(ContrastVAEConfig, config, options)
        super().__init__(items, config)
        self.rules = RULES[config.compat]
        with seeded(seed):
            self.item = nn.Embedding(len(items) + 2, config.dim, padding_idx=PAD)
            self.position = nn.Embedding(config.max_len, config.dim)
            self.norm = nn.LayerNorm(config.dim, eps=1e-12)
            self.dropout = Dropout(config.dropout)
            self.to_mu, self.to_log_variance, self.decoder = (self._transformer() for _ in range(3))
            short_normal(self)
        varied = VARIATIONAL in config.augment
        more = {"contrast": bool(config.augment), "alpha": varied}
        self.part_names = ("reconstruction", "kl", *(name for name, there in more.items() if there))
        self.alpha_logit = nn.Parameter(torch.zeros(ALPHAS[config.alpha](config))) if varied else None
        learned = config.temperature_is == "learned" and config.augment
        self.log_temperature = nn.Parameter(torch.tensor(config.temperature).log()) if learned else None
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))
        self.register_buffer("bias", torch.zeros(len(items)), persistent=False)

    def _transformer(self) -> nn.ModuleList:
        config = self.config
        return nn.ModuleList(
            PostBlock(config.dim, config.heads, config.dropout, config.attention_dropout) for _ in range(config.blocks)
        )

    def embed(self, item: Tensor, clicks: Packed) -> Tensor:
        """Items [n] -> [n, D]: item plus position embedding, then layer norm and dropout."""
        return self._embedded(self.item(item), clicks)

    def _embedded(self, x: Tensor, clicks: Packed) -> Tensor:
        return self.dropout(self.norm(x + self.position(POSITIONS[self.config.positions](clicks))))

    def posterior(
        self, embedded: Tensor, clicks: Packed, masks: Sequence[Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Mean and log-variance of z at each position, [n, D]. masks: as PostBlock takes them."""
        mu = log_variance = embedded
        for block in self.to_mu:
            mu = block(mu, clicks, masks)
        for block in self.to_log_variance:
            log_variance = block(log_variance, clicks, masks)
        return mu, log_variance

    def decode(self, z: Tensor, clicks: Packed) -> Tensor:
        """[n, D] -> [n, D], decoded z of real clicks alone: their states do not depend on padding, whose states are
        never used.
        """
        for block in self.decoder:
            z = block(z, clicks)
        return z

    @property
    def kl_weight(self) -> float:
        return min(self.config.kl_weight, int(self.step) / self.config.kl_steps)

    @property
    def temperature(self) -> Tensor | float:
        return self.config.temperature if self.log_temperature is None else self.log_temperature.exp()

    def encode(self, histories: Histories) -> Tensor:
        """[B, D], the decoder's state at the newest click of each history."""
        item, clicks = self._newest(histories)
        return self.user_vectors([self.item(item)], item, clicks)

    def reading(self) -> Reading:
        return Reading(self.config.max_len)

    def click_tables(self) -> tuple[Tensor, ...]:
        return (self.item.weight[:-1],)

    def user_vectors(self, about: Sequence[Tensor], bucket: Tensor, clicks: Packed) -> Tensor:
        mu, log_variance = self.posterior(self._embedded(about[0], clicks), clicks)
        z = self._sampler(0)(mu, (0.5 * log_variance).exp(), 1.0, self.config.sigma_dropout, self.training)
        return self.decode(z, clicks)[clicks.last]

    def item_vectors(self) -> Tensor:
        """[I+1, D], the item table without the mask token, its rows shortened by `normalize`."""
        return shortened(self.item.weight[:-1], self.config.normalize)

    @torch.no_grad()
    def diagnostics(self, histories: Histories) -> dict[str, float]:
        """Signs of posterior collapse, as means over all positions of the histories: "kl", the divergence of q(z|x)
        from N(0, I) summed over D, and "variance", the mean variance of a latent dimension.
        """
        kl, variance, count = 0.0, 0.0, 0
        for start in range(0, len(histories), 256):
            rows = np.arange(start, min(start + 256, len(histories)))
            item, clicks = self._newest(histories.take(rows))
            mu, log_variance = self.posterior(self.embed(item, clicks), clicks)
            kl += divergence(mu, log_variance).double().sum().item()
            variance += log_variance.exp().mean(-1).double().sum().item()
            count += len(item)
        return {"kl": kl / count, "variance": variance / count}

    def loss(self, batch: tuple[View, ...]) -> Tensor:
        return torch.stack(list(self.parts(batch).values())).sum()

    def parts(self, batch: tuple[View, ...]) -> dict[str, Tensor]:
        """The weighted terms whose sum is the loss: reconstruction and kl of both views, contrast, alpha."""
        config = self.config
        reconstruction, kl, pooled = self.bias.new_zeros(()), self.bias.new_zeros(()), []
        items = scored(self.item.weight[:-1], self.bias, smoothing=config.label_smoothing)
        for nth, (view, embedded) in enumerate(zip(batch, self.rules.embed(self, batch), strict=True)):
            clicks = view.clicks
            mu, log_variance = self.posterior(embedded, clicks, self.rules.masks(clicks, view.item))
            alpha = self._alpha(clicks) if nth else 1.0
            z = self._sampler(nth)(mu, (0.5 * log_variance).exp(), alpha, config.sigma_dropout, self.training)
            real = view.target != PAD
            reconstruction = reconstruction + ITEM_LOSSES[config.reconstruction].loss(
                self.decode(z[real], view.real), items, view.target[real], view.negative
            )
            kl = kl + divergence(mu, log_variance).mean()
            total = z.new_zeros(len(clicks.length), config.dim).index_add(0, clicks.row, z)
            pooled.append(total / clicks.length[:, None])
        parts = {"reconstruction": reconstruction, "kl": self.kl_weight * kl}
        if len(batch) > 1:
            contrast = CONTRASTS[config.contrast](pooled[0], pooled[1], self.temperature)
            parts["contrast"] = config.contrast_weight * contrast
        if self.alpha_logit is not None:
            parts["alpha"] = variational_dropout_kl(self.alpha_logit.sigmoid())
        return parts

    def targets(self, batch: tuple[View, ...]) -> int:
        """The number of positions of the first view that the loss averages."""
        return int((batch[0].target != PAD).sum())

    def after_update(self) -> None:
        self.step += 1

    def steps(self, train: Histories) -> int:
        return batch_count(self.rules.spans(train, self.config.max_len), self.config.batch)

    def batches(self, train: Histories, rng: np.random.Generator) -> Iterator[tuple[View, ...]]:
        """One epoch. A batch is a tuple of one view or two."""
        self.bias.copy_(self.config.debias * log_shares(train, len(self.items)).to(self.device))
        draw = ITEM_LOSSES[self.config.reconstruction].negatives(train, len(self.items), self.config.samples, rng)
        for spans in batched(self.rules.spans(train, self.config.max_len), self.config.batch, rng, self.share):
            lengths = spans.stop - spans.start - 1
            at = np.repeat(spans.start - lengths.cumsum() + lengths, lengths) + np.arange(lengths.sum())
            first = self._view(train.item[at], train.item[at + 1], lengths, spans.row, draw)
            yield (first, *self._second(first, train, spans, draw, rng))

    def _second(
        self, first: View, train: Histories, spans: Spans, draw: Draw, rng: np.random.Generator
    ) -> tuple[View, ...]:
        names = [name for name in self.config.augment if name in SEQUENCE]
        if not names or not len(spans.row):  # a process's slice of a batch may hold no spans
            return (first,) if self.config.augment else ()
        items, targets, lengths = [], [], []
        for start, stop in zip(spans.start, spans.stop, strict=True):
            look = SEQUENCE[names[rng.integers(len(names))]](int(stop - start - 1), rng)
            lengths.append(len(look.order))
            items.append(np.where(look.covered, len(self.items) + 1, train.item[start + look.order]))
            targets.append(train.item[start + self.rules.follow(look.order)])
        return (self._view(np.concatenate(items), np.concatenate(targets), np.array(lengths), spans.row, draw),)

    def _view(
        self,
        item: np.ndarray,
        target: np.ndarray,
        lengths: np.ndarray,
        row: np.ndarray,
        draw: Draw,
    ) -> View:
        clicks = self.rules.lay(lengths, self.config.max_len, self.device)
        real = packed(lengths, self.config.max_len, self.device)
        negative = draw(np.repeat(row, lengths))
        return View(clicks, real, self._placed(item, clicks), self._placed(target, clicks), self.tensor(negative))

    def _newest(self, histories: Histories) -> tuple[Tensor, Packed]:
        """The newest clicks without padding, under all rules: padding slows training and changes no state of a click.
        """
        clicks = pack(newest(histories, self.config.max_len), self.device)
        return self.tensor(histories.item[clicks.source]), clicks

    def _placed(self, values: np.ndarray, clicks: Packed) -> Tensor:
        """The values of the real clicks at their places in `clicks`, 0 at padding."""
        return self.tensor(np.where(clicks.source >= 0, values[clicks.source], PAD))

    def _sampler(self, nth: int) -> Sampler:
        if not self.config.augment:
            return self.rules.alone
        if nth == 0:
            return self.rules.first
        return self.rules.varied if VARIATIONAL in self.config.augment else self.rules.second

    def _alpha(self, clicks: Packed) -> Tensor | float:
        if self.alpha_logit is None:
            return 1.0
        alpha = self.alpha_logit.sigmoid()
        return alpha[clicks.position] if self.config.alpha == "position" else alpha


def divergence(mu: Tensor, log_variance: Tensor) -> Tensor:
    """KL(N(mu, sigma^2) || N(0, I)) = 0.5 sum_d (mu^2 + sigma^2 - 1 - log sigma^2), [n, D] -> [n]."""
    return 0.5 * (mu.square() + log_variance.exp() - 1.0 - log_variance).sum(-1)


def variational_dropout_kl(alpha: Tensor) -> Tensor:
    """Mean of -(0.5 log a + c1 a + c2 a^2 + c3 a^3), the cubic fit of Kingma et al. 2015 (Eq. 14), up to a
    constant.
    """
    c1, c2, c3 = 1.16145124, -1.50204118, 0.58629921
    return -(0.5 * alpha.log() + c1 * alpha + c2 * alpha.square() + c3 * alpha**3).mean()
