"""Intra-list distance: how far apart the items of a recommended list are, measured with item vectors that the caller
chooses. Nothing here ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fastcl.recsys.data import PAD, Items


def feature_vectors(items: Items) -> torch.Tensor:
    """float32 [I+1, V]: 1 for each feature value that an item has. These vectors do not depend on any model.

    Raises ValueError where the items have no features.

    >>> from fastcl.recsys.data import Feature
    >>> feature_vectors(Items(("a", "b"), features={"genre": Feature.from_labels([["x", "y"], ["y"]])})).tolist()
    [[0.0, 0.0], [1.0, 1.0], [0.0, 1.0]]
    """
    if not items.features:
        raise ValueError("items: expected item features to measure distances by, got none")
    parts = []
    for feature in items.features.values():
        codes = torch.from_numpy(feature.codes)
        hot = torch.zeros(len(codes), len(feature.values) + 1, device="cpu", dtype=torch.float32)
        parts.append(hot.scatter_(1, codes, 1.0)[:, 1:])
    return torch.cat(parts, 1)


class MeanDistance:
    """Mean intra-list distance of all added lists. A list's distance is the mean of 1 - cosine over its item pairs.

    vectors: float [I+1, D]; row 0 is ignored, and a zero vector is at distance 1 from everything. rows: I+1.
    Lists are int64 [B, k], 0 for an empty place. Lists with fewer than two items do not count; without a list that
    counts the mean is 0.

    >>> mean = MeanDistance(torch.tensor([[0.0, 0.0], [1.0, 0.0], [2.0, 0.0], [0.0, 1.0]]), rows=4)
    >>> mean.add(torch.tensor([[1, 2, 3], [1, 0, 0]]))
    >>> round(mean.value, 4)  # pairs (1, 2), (1, 3), (2, 3): 0, 1, 1
    0.6667
    """

    def __init__(self, vectors: torch.Tensor, rows: int) -> None:
        vectors = torch.as_tensor(vectors, device="cpu").detach()
        if vectors.ndim != 2 or len(vectors) != rows or not vectors.is_floating_point():
            raise ValueError(f"vectors: expected float [{rows}, D], got {vectors.dtype} {list(vectors.shape)}")
        if not vectors[1:].isfinite().all():
            raise ValueError("vectors: expected finite numbers, got NaN or infinity")
        self._unit = F.normalize(vectors.double(), dim=1)
        self._unit[PAD] = 0.0
        self._square = self._unit.square().sum(1)
        self._total, self._count = 0.0, 0

    def add(self, items: torch.Tensor) -> None:
        found = self.of(items)
        self._total += float(found.nansum())
        self._count += int((~found.isnan()).sum())

    def of(self, items: torch.Tensor) -> torch.Tensor:
        """float64 [B], the distance of each list; NaN for a list with fewer than two items."""
        n = (items != PAD).sum(1)
        whole = F.embedding_bag(items, self._unit, mode="sum").square().sum(1)
        # The sum of the cosines over ordered pairs of unit vectors is |sum of the vectors|^2 - sum of |vector|^2.
        similarity = (whole - self._square[items].sum(1)) / (n * (n - 1)).clamp(min=1)
        return (1.0 - similarity).masked_fill(n < 2, torch.nan)

    @property
    def value(self) -> float:
        return self._total / max(self._count, 1)
