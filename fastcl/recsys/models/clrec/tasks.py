"""CLRec's second task (Zhou et al. 2021, appendix B.4): u2u, which tells a user's later clicks from those of other
users.

This file cuts the later sequences and has the task's loss; model.py encodes the sequences and queues their vectors.
"""

from typing import NamedTuple

import numpy as np
from torch import Tensor

import fastcl
from fastcl.negatives import Evicted
from fastcl.recsys.data import Histories
from fastcl.recsys.models.batching import Packed, Spans

LONGEST = 9  # clicks of a later sequence: "less than ten"


class Later(NamedTuple):
    """One later sequence for each span of a batch: the clicks that follow the history of one of its pairs."""

    clicks: Packed
    item: Tensor  # int64 [m]
    bucket: Tensor  # int64 [m], times up to the sequence's own newest click
    pair: Tensor  # int64 [B], 0..N-1
    row: Tensor  # int64 [B], the row of `train` that each sequence belongs to


def pick(window: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """[B], a random pair of each span. window [N]: the span of each pair, rising; every span 0..B-1 has a pair."""
    count = np.bincount(window)
    return count.cumsum() - count + (rng.random(len(count)) * count).astype(np.int64)


def later(train: Histories, begin: np.ndarray, row: np.ndarray, length: int) -> Spans:
    """Spans of at most `length` and at most `LONGEST` clicks from `begin` [B] on, within histories `row` [B]."""
    return Spans(begin, np.minimum(begin + min(length, LONGEST), train.offsets[row + 1]), row)


def u2u(before: Tensor, after: Tensor, row: Tensor, queued: Evicted | None, temperature: float) -> Tensor:
    """InfoNCE of earlier sequences [B, D] against later ones [B, D]. Negatives are the batch's other later sequences,
    without those of the same user (`row`), and queued ones.
    """
    return fastcl.infonce(before, after, temperature=temperature, normalize=False, in_batch=True, queue=queued, ids=row)
