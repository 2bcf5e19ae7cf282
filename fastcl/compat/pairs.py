"""Pairs of rows as pytorch_metric_learning names them: index tensors of anchors and positives, anchors and negatives.

Finding and converting pairs, and sums over them in plain PyTorch. No loss belongs here.
"""

from typing import Any

import torch
from torch import Tensor

from fastcl.arithmetic import compute_dtype, dot
from fastcl.normalize import normalized

# (anchors, positives, negatives), one triplet each, or (anchors, positives, anchors, negatives).
Indices = tuple[Tensor, ...]


def as_integers(labels: Tensor, ref_labels: Tensor) -> tuple[Tensor, Tensor]:
    """Labels of any dtype as integers that are equal where the labels are."""
    if not any(x.is_floating_point() or x.dtype == torch.bool for x in (labels, ref_labels)):
        return labels, ref_labels
    _, codes = torch.cat([labels, ref_labels]).unique(return_inverse=True)
    return codes[: len(labels)], codes[len(labels) :]


def is_cosine(distance: Any) -> bool:
    """Whether a distance of the original package is the cosine itself, and neither a power of it nor of other norms."""
    return type(distance).__name__ == "CosineSimilarity" and (distance.p, distance.power) == (2, 1)


def all_positives(labels: Tensor, ref_labels: Tensor, own: Tensor | None) -> Indices:
    """own: int64 [N], the column in which a row meets itself."""
    same = labels[:, None] == ref_labels
    if own is not None:
        same[torch.arange(len(own), device=own.device), own] = False
    return torch.where(same)


def all_pairs(labels: Tensor, ref_labels: Tensor, own: Tensor | None) -> Indices:
    return (*all_positives(labels, ref_labels, own), *torch.where(labels[:, None] != ref_labels))


def as_pairs(indices: Indices) -> Indices:
    """Triplets as as many positive and negative pairs."""
    return (*indices[:2], indices[0], indices[2]) if len(indices) == 3 else tuple(indices)


def joined(one: Indices, other: Indices) -> Indices:
    if len(one) != len(other):
        one, other = as_pairs(one), as_pairs(other)
    return tuple(torch.cat([a.to(b), b]) for a, b in zip(one, other, strict=True))


def without_self(indices: Indices, own: Tensor) -> Indices:
    """Less the positives (of triplets, the triplets) in which an anchor meets itself."""
    anchor, positive, *negatives = indices
    kept = own[anchor] != positive
    if len(indices) == 3:
        return tuple(x[kept] for x in indices)
    return (anchor[kept], positive[kept], *negatives)


def similarities(distance: Any, x: Tensor, ref: Tensor, *pairs: Indices) -> list[Tensor]:
    """Of each pair: cosines, or what a distance of the original package gives, less where it grows with distance."""
    if distance is None:
        q, k = normalized(x), normalized(ref)
        return [dot(q[anchor], k[other]) for anchor, other in pairs]
    matrix = distance(x, ref).to(compute_dtype(x, ref)) * (1 if distance.is_inverted else -1)
    return [matrix[anchor, other] for anchor, other in pairs]


def lse_by_anchor(logits: Tensor, anchors: Tensor, count: int) -> Tensor:
    """The log-sum-exp of the logits of each anchor: [count], -inf where there is none."""
    top = torch.full((count,), -torch.inf, dtype=logits.dtype, device=logits.device)
    top = top.scatter_reduce(0, anchors, logits.detach(), "amax")
    some = top > -torch.inf
    total = torch.zeros_like(top).index_add(0, anchors, (logits - top[anchors]).exp())
    return torch.where(some, total.masked_fill(~some, 1.0).log() + top.masked_fill(~some, 0.0), -torch.inf)


def mean_by_anchor(values: Tensor, anchors: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The mean of each anchor's values, 0 where there is none, and their number: [count] each."""
    number = torch.zeros(count, dtype=values.dtype, device=values.device).index_add(
        0, anchors, torch.ones_like(values)
    )
    return torch.zeros_like(number).index_add(0, anchors, values) / number.clamp(min=1), number
