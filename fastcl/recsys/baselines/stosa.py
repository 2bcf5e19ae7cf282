"""STOSA (Fan et al. 2022, "Sequential Recommendation via Stochastic Self-Attention"): clicks are normal distributions,
and attention falls with their Wasserstein distance.

This file has the attention and the model; gaussian.py has the scores.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastcl.recsys.baselines.gaussian import Gaussian, GaussianConfig, joined
from fastcl.recsys.baselines.nextitem import Batch, check_heads
from fastcl.recsys.models.batching import Packed
from fastcl.recsys.models.layers import POSITIONS, Dropout, merged
from fastcl.recsys.options import at_least, between
from fastcl.recsys.settings import setting

FORMS = ("official", "paper")


@dataclass(frozen=True)
class STOSAConfig(GaussianConfig):
    """Settings of `STOSA`."""

    dropout: float = setting(0.3, "Dropout rate of embeddings and blocks.")
    blocks: int = setting(1, "Number of attention blocks.")
    heads: int = setting(4, "Attention heads of each block.")
    attention_dropout: float = setting(0.0, "Dropout rate of the attention weights.")
    apart: float = setting(
        0.005,
        """Weight of the term that keeps negatives away from positives: the mean of max(0, D(state, positive) -
        D(positive, negative)). It needs a negative for each position, so that only loss "bpr" has it.""",
    )
    form: str = setting(
        "official",
        """"paper": blocks change mean and covariance. "official": blocks change the covariance alone, and the mean of a
        state is that of its newest click, as in the authors' program, which drops the mean that a block computes.""",
        FORMS,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, "blocks", self.blocks)
        check_heads(self)
        between(0.0, 1.0, "attention_dropout", self.attention_dropout)
        between(0.0, float("inf"), "apart", self.apart)


class Stream(nn.Module):
    """The weights of one of the two: values, output, FFN and the norm behind it."""

    def __init__(self, dim: int, dropout: float) -> None:
        super().__init__()
        self.value, self.out = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.feed = nn.Sequential(nn.Linear(dim, 4 * dim), nn.ELU(), nn.Linear(4 * dim, dim))
        self.norm, self.dropout = nn.LayerNorm(dim, eps=1e-12), Dropout(dropout)

    def forward(self, x: Tensor, context: Tensor, norm: nn.Module) -> Tensor:
        x = norm(x + self.dropout(self.out(context)))
        return self.norm(x + self.dropout(self.feed(x)))


class WassersteinBlock(nn.Module):
    """Attention with softmax_j(-D(query_i, key_j) / sqrt(D/heads)), causal; means are summed with these weights,
    covariances with their squares. Both streams share the layer norm behind it.
    """

    def __init__(self, config: STOSAConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.means, self.covariances = (nn.Linear(config.dim, 2 * config.dim) for _ in range(2))  # queries and keys
        self.norm = nn.LayerNorm(config.dim, eps=1e-12)
        self.covariance = Stream(config.dim, config.dropout)
        self.mean = Stream(config.dim, config.dropout) if config.form == "paper" else None
        self.dropout = Dropout(config.attention_dropout)

    def forward(self, mean: Tensor, covariance: Tensor, clicks: Packed) -> tuple[Tensor, Tensor]:  # [n, D] each
        values = [F.elu(self.covariance.value(covariance)) + 1.0]
        if self.mean is not None:
            values.append(self.mean.value(mean))
        spread = F.elu(self.covariances(covariance)) + 1.0
        contexts = clicks.by_length(torch.cat([self.means(mean), spread, *values], -1), self._mixed)
        of_covariance, *of_mean = contexts.chunk(len(values), -1)
        if self.mean is not None:
            mean = self.mean(mean, of_mean[0], self.norm)
        return mean, F.elu(self.covariance(covariance, of_covariance, self.norm)) + 1.0

    def _mixed(self, x: Tensor, block: int) -> Tensor:
        """[b, L, 5D or 6D], queries and keys of means, of covariances, then values -> [b, L, D or 2D], contexts."""
        parts = x.split(self.means.in_features, -1)
        mean_q, mean_k, spread_q, spread_k, *values = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in parts)
        query, key = joined(mean_q, spread_q), joined(mean_k, spread_k)
        # -D up to the query's own square, which the softmax does not see.
        logits = (2.0 * query @ key.mT - key.square().sum(-1)[..., None, :]) / mean_q.shape[-1] ** 0.5
        later = torch.ones(logits.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        weight = self.dropout(logits.masked_fill(later, -torch.inf).softmax(-1))
        contexts = [weight.square() @ values[0], *(weight @ value for value in values[1:])]
        return torch.cat([merged(context) for context in contexts], -1)


class STOSA(Gaussian):
    """Clicks and items are normal distributions; attention and scores fall with the squared Wasserstein distance

        D = |m - m'|^2 + |sqrt(c) - sqrt(c')|^2

    of means m and diagonal covariances c. The loss "bpr" is -log sigmoid(D(state, negative) - D(state, target)), and
    `apart` times the paper's second term; "softmax" has the logits -D. Vectors of states and items are 2 dim + 1 wide.

    Args:
        items: the item table.
        config: the settings; None: the settings are the keywords `options`.
        seed: seed of the initial weights.

    >>> from fastcl.recsys import Histories, Items
    >>> model = STOSA(Items(ids=("a", "b", "c")), dim=8, seed=0)
    >>> model.scores(Histories.from_lists([[1, 2], [3]])).shape
    torch.Size([2, 4])
    """

    name = "stosa"
    Config = STOSAConfig
    item_tables = ("item.weight", "item_covariance.weight")

    def build(self) -> None:
        config = self.config
        self.item, self.item_covariance = (nn.Embedding(len(self.items) + 1, config.dim) for _ in range(2))
        self.position, self.position_covariance = (nn.Embedding(config.max_len, config.dim) for _ in range(2))
        self.norm, self.dropout = nn.LayerNorm(config.dim, eps=1e-12), Dropout(config.dropout)
        self.blocks = nn.ModuleList(WassersteinBlock(config) for _ in range(config.blocks))
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, 0.01, 0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(self, item: Tensor, clicks: Packed) -> Tensor:
        """item [n] -> [n, 2D], the joined mean and covariance of the state after each click."""
        age = POSITIONS["newest"](clicks)
        mean = F.elu(self.dropout(self.norm(self.item(item) + self.position(age))))
        covariance = self.item_covariance(item) + self.position_covariance(age)
        covariance = F.elu(self.dropout(self.norm(covariance))) + 1.0
        for block in self.blocks:
            mean, covariance = block(mean, covariance, clicks)
        return joined(mean, covariance)

    def loss(self, batch: Batch) -> Tensor:
        state = self(batch.item, batch.clicks)
        loss = self.of_states(2.0 * state, batch)
        if self.config.loss != "bpr" or not self.config.apart:
            return loss
        positive, negative = self.rows(batch.target), self.rows(batch.negative)
        closer = (state - positive).square().sum(-1) - (positive - negative).square().sum(-1)
        return loss + self.config.apart * closer.relu().mean()
