"""ACVAE (Xie et al. 2021, "Adversarial and Contrastive Variational Autoencoder for Sequential Recommendation"): a
latent variable after each click that an adversary holds to the prior and a contrast ties to its own sequence.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastcl
from fastcl.recsys.baselines.nextitem import LOSS_MEANING, Batch, NextItem, NextItemConfig
from fastcl.recsys.data import PAD, Histories
from fastcl.recsys.models.batching import Packed
from fastcl.recsys.models.layers import GELU, Dropout
from fastcl.recsys.options import at_least, between
from fastcl.recsys.settings import setting

REACH = 5  # clicks that the causal convolution sees


@dataclass(frozen=True)
class ACVAEConfig(NextItemConfig):
    """Settings of `ACVAE`."""

    dim: int = setting(128, "Width of the vectors of the items that are read, and of the decoder.")
    state: int = setting(100, "Width of the GRU's state and of the encoder.")
    latent: int = setting(64, "Width of the latent variable.")
    kl_weight: float = setting(0.05, "Weight of the adversary's estimate of the KL divergence to N(0, I).")
    contrast_weight: float = setting(0.1, "Weight of the contrast with the latent variables of another sequence.")
    batch: int = setting(64, "Windows in a batch.")
    loss: str = setting("softmax", LOSS_MEANING, ("softmax",))

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("state", "latent"):
            at_least(1, name, getattr(self, name))
        for name in ("kl_weight", "contrast_weight"):
            between(0.0, float("inf"), name, getattr(self, name))


class Encoder(nn.Module):
    """States of the GRU and noise -> z: what is drawn has no mean and no variance of its own."""

    def __init__(self, state: int, latent: int, dropout: float) -> None:
        super().__init__()
        self.noise = nn.Linear(state, state)
        self.first, self.wide = nn.Linear(state, state), nn.Linear(REACH * state, 2 * state)
        self.narrow, self.out = nn.Linear(2 * state, state), nn.Linear(state, latent)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, clicks: Packed) -> Tensor:  # [n, state] -> [n, latent]
        y = F.softplus(self.first(self._noisy(x)))
        seen = clicks.by_length(self._noisy(y), self._reach)
        y = F.softplus(self.narrow(F.softplus(self.wide(seen))))
        return self.out(self.dropout(x + y))

    def _noisy(self, x: Tensor) -> Tensor:
        return x + self.noise(torch.randn_like(x) if self.training else torch.zeros_like(x)).tanh()

    def _reach(self, block: Tensor, _nth: int) -> Tensor:
        """[b, L, D] -> [b, L, 5D], each click beside the four before it."""
        return F.pad(block, (0, 0, REACH - 1, 0)).unfold(1, REACH, 1).flatten(2)


class Adversary(nn.Module):
    """T(x, z), whose optimum is the log of how much likelier z is after x than under N(0, I)."""

    def __init__(self, dim: int, latent: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(dim + latent, dim), nn.Linear(dim, latent)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, dim), nn.Linear(dim, dim)) for _ in range(2)
        )
        self.dropout = Dropout(0.2)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:  # [n, dim], [n, latent] -> [n, latent]
        y = self.dropout(self.first(torch.cat([x, z], -1)))
        for block in self.blocks:
            y = F.elu(y + block(y))
        return self.dropout(self.last(y)) + 0.5 * z.square()


def of_next(clicks: Packed) -> Tensor:
    """int64 [n], the packed row of the click at the same place of the next window, of its newest if it is shorter."""
    after = (clicks.row + 1) % len(clicks.length)
    return clicks.last[after] - (clicks.length[after] - 1 - clicks.position).clamp(min=0)


class ACVAE(NextItem):
    """A GRU and a noisy encoder draw a latent variable after each click, which is decoded to the next item.

    All terms of the loss are sums over a window's positions, averaged over windows: -log softmax of the next item;
    `kl_weight` times the adversary's T(x, z); `contrast_weight` times how well a critic tells a window's latent
    variables from those of another one of the batch; and the adversary's own loss, to tell z from draws of N(0, I),
    of which only the adversary learns. One Adam trains everything, without weight decay; the authors' program steps
    its encoder by AdamW and SGD and its adversary by SGD, with it. Scores use no noise; the authors' program draws it
    for its test too. Where the other window of the contrast is shorter, its newest latent variable stands in; the
    authors' program takes what its networks give for the padding there.

    Args:
        items: the item table.
        config: the settings; None: the settings are the keywords `options`.
        seed: seed of the initial weights.

    >>> from fastcl.recsys import Histories, Items
    >>> model = ACVAE(Items(ids=("a", "b", "c")), dim=8, seed=0)
    >>> model.scores(Histories.from_lists([[1, 2], [3]])).shape
    torch.Size([2, 4])
    """

    name = "acvae"
    Config = ACVAEConfig
    item_tables = ("item.weight", "out.weight", "bias")
    part_names = ("reconstruction", "kl", "contrast", "adversary")

    def build(self) -> None:
        config = self.config
        self.item = nn.Embedding(len(self.items) + 1, config.dim, padding_idx=PAD)
        self.gru = nn.GRU(config.dim, config.state, batch_first=True)
        self.encoder = Encoder(config.state, config.latent, config.dropout)
        self.decoder = nn.Sequential(nn.Linear(config.latent, config.dim), nn.Tanh())
        self.out = nn.Embedding(len(self.items) + 1, config.dim, padding_idx=PAD)
        nn.init.xavier_normal_(self.out.weight)
        self.bias = nn.Parameter(torch.zeros(len(self.items) + 1))
        self.adversary = Adversary(config.dim, config.latent)
        self.critic = nn.GRU(config.dim + config.latent, config.dim, batch_first=True)
        self.verdict = nn.Sequential(GELU(), nn.Linear(config.dim, 1))
        self.dropout = Dropout(config.dropout)

    def latent(self, x: Tensor, clicks: Packed) -> Tensor:
        """Vectors of the items that are read [n, dim] -> z after each click, [n, latent]."""
        states = clicks.by_length(self.dropout(x), lambda block, _: self.gru(block)[0])
        return self.encoder(states, clicks)

    def forward(self, item: Tensor, clicks: Packed) -> Tensor:
        """item [n] -> [n, dim], z after each click, decoded."""
        return self.decoder(self.latent(self.item(item), clicks))

    def encode(self, histories: Histories) -> Tensor:
        """[B, dim+1], z after the newest click, decoded, then a 1 for the items' biases."""
        return F.pad(super().encode(histories), (0, 1), value=1.0)

    def item_vectors(self) -> Tensor:
        """[I+1, dim+1], the rows of the decoder's last layer and their biases."""
        return torch.cat([self.out.weight, self.bias[:, None]], 1)

    def loss(self, batch: Batch) -> Tensor:
        return torch.stack(list(self.parts(batch).values())).sum()

    def parts(self, batch: Batch) -> dict[str, Tensor]:
        """The weighted terms whose sum is the loss."""
        config, clicks = self.config, batch.clicks
        x = self.item(batch.item)
        z = self.latent(x, clicks)
        reconstruction = fastcl.linear_cross_entropy(
            self.decoder(z), self.out.weight[1:], batch.target - 1, linear_bias=self.bias[1:], reduction="sum"
        )
        # The encoder learns from the adversary's verdict and must not move the adversary.
        held = {name: weights.detach() for name, weights in self.adversary.named_parameters()}
        far = torch.func.functional_call(self.adversary, held, (x, z)).mean(-1).sum()
        contrast = F.softplus(-self._critic(x, z, clicks)) + F.softplus(self._critic(x, z[of_next(clicks)], clicks))
        drawn = self.adversary(x.detach(), torch.randn_like(z))
        told = F.softplus(-self.adversary(x.detach(), z.detach())) + F.softplus(drawn)
        sums = reconstruction, config.kl_weight * far, config.contrast_weight * contrast.sum(), told.mean(-1).sum()
        return {name: total / len(clicks.length) for name, total in zip(self.part_names, sums, strict=True)}

    def _critic(self, x: Tensor, z: Tensor, clicks: Packed) -> Tensor:
        """[n], how well z goes with x and what came before."""
        states = clicks.by_length(torch.cat([x, z], -1), lambda block, _: self.critic(block)[0])
        return self.verdict(states)[:, 0]

    def targets(self, batch: Batch) -> int:
        """The number of windows."""
        return len(batch.clicks.length)
