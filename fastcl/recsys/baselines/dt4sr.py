"""DT4SR (Fan et al. 2021, "Modeling Sequences as Distributions with Uncertainty for Sequential Recommendation"): one
Transformer gives the mean and another the variance of the state after each click.

This file has the Transformers; gaussian.py has the scores.
"""

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastcl.recsys.baselines.gaussian import Gaussian, GaussianConfig, joined
from fastcl.recsys.baselines.nextitem import check_heads
from fastcl.recsys.models.batching import Packed
from fastcl.recsys.models.layers import POSITIONS, Dropout, attention, merged, split
from fastcl.recsys.options import at_least
from fastcl.recsys.settings import setting

FORMS = ("official", "paper")
Norm = functools.partial(nn.LayerNorm, eps=1e-8)


@dataclass(frozen=True)
class DT4SRConfig(GaussianConfig):
    """Settings of `DT4SR`."""

    dropout: float = setting(0.5, "Dropout rate of embeddings and attention weights.")
    batch: int = setting(128, "Windows in a batch.")
    blocks: int = setting(1, "Blocks of each of the two Transformers.")
    heads: int = setting(2, "Attention heads of each block.")
    form: str = setting(
        "official",
        """"official": ELU behind queries, keys, values and both layers of the FFN, as in the authors' program. "paper":
        linear queries, keys and values, and an FFN whose second layer is linear.""",
        FORMS,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, "blocks", self.blocks)
        check_heads(self)


class Block(nn.Module):
    """Causal attention whose queries alone are normalised and are what the residual adds; then an FFN. The sum of each
    with its residual is normalised. Dropout is that of the attention weights alone.
    """

    def __init__(self, config: DT4SRConfig) -> None:
        super().__init__()
        dim, official = config.dim, config.form == "official"
        self.heads = config.heads
        self.query, self.key, self.value = (nn.Linear(dim, dim) for _ in range(3))
        last = [nn.ELU()] if official else []
        self.feed = nn.Sequential(nn.Linear(dim, dim), nn.ELU(), nn.Linear(dim, dim), *last)
        self.norm_query, self.norm_attention, self.norm_feed = (Norm(dim) for _ in range(3))
        self.active: nn.Module = nn.ELU() if official else nn.Identity()
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor, clicks: Packed) -> Tensor:  # [n, D]
        def mixed(qkv: Tensor, block: int) -> Tensor:  # [b, L, 3D] -> [b, L, D]
            return merged(attention(*split(qkv, self.heads), None, self.dropout))

        query = self.norm_query(x)
        qkv = self.active(torch.cat([self.query(query), self.key(x), self.value(x)], -1))
        x = self.norm_attention(query + clicks.by_length(qkv, mixed))
        return self.norm_feed(x + self.feed(x))


class Stack(nn.Module):
    """A Transformer with its own position table."""

    def __init__(self, config: DT4SRConfig) -> None:
        super().__init__()
        self.position, self.dropout = nn.Embedding(config.max_len, config.dim), Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.blocks))
        self.norm = Norm(config.dim)

    def forward(self, item: Tensor, clicks: Packed) -> Tensor:  # [n, D]
        x = item * item.shape[-1] ** 0.5 + self.position(POSITIONS["newest"](clicks))
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x, clicks)
        return self.norm(x)


class DT4SR(Gaussian):
    """Two Transformers give mean m and variances c of a state; scores fall with its squared Wasserstein distance to an
    item,

        D = |m - m'|^2 + |sqrt(c) - sqrt(c')|^2.

    The loss "bpr" is -log sigmoid(D(state, negative) - D(state, target)); "softmax" has the logits -D. Vectors of
    states and items are 2 dim + 1 wide.

    Args:
        items: the item table.
        config: the settings; None: the settings are the keywords `options`.
        seed: seed of the initial weights.

    >>> from fastcl.recsys import Histories, Items
    >>> model = DT4SR(Items(ids=("a", "b", "c")), dim=8, seed=0)
    >>> model.scores(Histories.from_lists([[1, 2], [3]])).shape
    torch.Size([2, 4])
    """

    name = "dt4sr"
    Config = DT4SRConfig
    item_tables = ("item.weight", "item_covariance.weight")

    def build(self) -> None:
        config = self.config
        self.item, self.item_covariance = (nn.Embedding(len(self.items) + 1, config.dim) for _ in range(2))
        self.mean, self.variance = Stack(config), Stack(config)
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.trunc_normal_(module.weight, 0.01, 0.02, -0.03, 0.05)
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)

    def forward(self, item: Tensor, clicks: Packed) -> Tensor:
        """item [n] -> [n, 2D], the joined mean and variance of the state after each click."""
        variance = F.elu(self.variance(self.item_covariance(item), clicks)) + 1.0
        return joined(self.mean(self.item(item), clicks), variance)
