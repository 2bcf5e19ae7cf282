"""CL4SRec (Xie et al. 2022, "Contrastive Learning for Sequential Recommendation"): a Transformer that learns the next
item, and that two changed views of a sequence belong together.

This file has the views and the contrast; transformer.py has the network.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

import fastcl
from fastcl.recsys.baselines.transformer import Transformer, TransformerConfig
from fastcl.recsys.data import Histories
from fastcl.recsys.models.batching import Packed, Spans, pack
from fastcl.recsys.models.contrastvae.views import MASK, Look, crop, reorder
from fastcl.recsys.models.losses import Draw
from fastcl.recsys.options import above, between
from fastcl.recsys.settings import setting


def cover(n: int, rng: np.random.Generator) -> Look:
    """Three tenths of the clicks, rounded down, are covered."""
    covered = np.zeros(n, bool)
    covered[rng.permutation(n)[: int(MASK * n)]] = True
    return Look(np.arange(n), covered)


OPERATORS: tuple[Callable[[int, np.random.Generator], Look], ...] = (crop, cover, reorder)


def dot(one: Tensor, other: Tensor, temperature: float) -> Tensor:
    """NT-Xent over inner products: the negatives of a view are both views of all other sequences."""
    views, partners = torch.cat([one, other]), torch.cat([other, one])
    sequence = torch.arange(len(one), device=one.device).repeat(2)
    return fastcl.infonce(
        views, partners, views, temperature=temperature, normalize=False, ids=sequence, negative_ids=sequence
    )


SIMILARITIES: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {"dot": dot, "cosine": fastcl.nt_xent}


@dataclass(frozen=True)
class CL4SRecConfig(TransformerConfig):
    """Settings of `CL4SRec`."""

    contrast_weight: float = setting(0.1, "Weight of the contrast in the loss.")
    temperature: float = setting(1.0, "Temperature of the contrast.")
    similarity: str = setting(
        "dot", "Similarity of two views: inner product (dot), as in the paper, or cosine.", SIMILARITIES
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        above(0.0, "temperature", self.temperature)
        between(0.0, float("inf"), "contrast_weight", self.contrast_weight)


class Batch(NamedTuple):
    clicks: Packed
    item: Tensor  # int64 [n]
    target: Tensor  # int64 [n]
    negative: Tensor
    views: Packed  # of B sequences: B first views, then B second ones
    viewed: Tensor  # int64, the items of the views, the mask token where covered


class CL4SRec(Transformer):
    """A causal Transformer, trained on the next item and on two views of each sequence.

    The views are made by two different ones of crop (60% of the clicks), mask (30%) and reorder (60%); a view is the
    state of its newest click. The loss is the next item's plus `contrast_weight` times NT-Xent between the views. The
    authors published no program; the public ones write their changes into the training data, and this one copies.

    Args:
        items: the item table.
        config: the settings; None: the settings are the keywords `options`.
        seed: seed of the initial weights.

    >>> from fastcl.recsys import Histories, Items
    >>> model = CL4SRec(Items(ids=("a", "b", "c")), dim=8, seed=0)
    >>> model.scores(Histories.from_lists([[1, 2], [3]])).shape
    torch.Size([2, 4])
    """

    name = "cl4srec"
    Config = CL4SRecConfig
    part_names = ("next", "contrast")

    def loss(self, batch: Batch) -> Tensor:
        return torch.stack(list(self.parts(batch).values())).sum()

    def parts(self, batch: Batch) -> dict[str, Tensor]:
        """The weighted terms whose sum is the loss."""
        one, other = self(batch.viewed, batch.views)[batch.views.last].chunk(2)
        contrast = SIMILARITIES[self.config.similarity](one, other, self.config.temperature)
        return {"next": super().loss(batch), "contrast": self.config.contrast_weight * contrast}

    def batch(self, train: Histories, spans: Spans, draw: Draw, rng: np.random.Generator) -> Batch:
        read = spans._replace(stop=spans.stop - 1)
        first: list[np.ndarray] = []
        second: list[np.ndarray] = []
        for start, stop in zip(read.start, read.stop, strict=True):
            for changed, which in zip((first, second), rng.permutation(len(OPERATORS)), strict=False):
                look = OPERATORS[which](int(stop - start), rng)
                changed.append(np.where(look.covered, self.mask, train.item[start + look.order]))
        both = first + second
        ends = np.cumsum([0, *map(len, both)])
        views = pack(Spans(ends[:-1], ends[1:], np.arange(len(both))), self.device)
        viewed = self.tensor(np.concatenate([np.empty(0, np.int64), *both]))
        plain = super().batch(train, spans, draw, rng)
        return Batch(plain.clicks, plain.item, plain.target, plain.negative, views, viewed)
