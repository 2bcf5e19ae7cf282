"""What ContrastVAE is put together from, in tables by name: augmentations of a sequence, reconstruction losses,
contrasts of two views.

Functions over index arrays and hidden vectors only; networks and batches are the model's, in contrastvae.py.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch.nn.functional as F
from torch import Tensor

import fastcl
from fastcl.recsys.models.batching import Unclicked

CROP, MASK, REORDER = 0.6, 0.3, 0.6  # what is kept, hidden, shuffled (CL4SRec, Xie et al. 2022, section 4.1.4)


class Look(NamedTuple):
    """How an augmented view looks at a sequence of n clicks: which of them, in which order, and which ones covered."""

    order: np.ndarray  # int64 [m], 1 <= m <= n, each of 0..n-1 at most once
    covered: np.ndarray  # bool [m]


def crop(n: int, rng: np.random.Generator) -> Look:
    """A random contiguous piece of 60% of the clicks, at least one."""
    kept = max(1, int(CROP * n))
    start = rng.integers(n - kept + 1)
    return Look(np.arange(start, start + kept), np.zeros(kept, bool))


def mask(n: int, rng: np.random.Generator) -> Look:
    """Each click is covered with probability 0.3."""
    return Look(np.arange(n), rng.random(n) < MASK)


def reorder(n: int, rng: np.random.Generator) -> Look:
    """The clicks of a random window of 60% of the length in random order."""
    order = np.arange(n)
    width = int(REORDER * n)
    start = rng.integers(n - width + 1)
    rng.shuffle(order[start : start + width])
    return Look(order, np.zeros(n, bool))


SEQUENCE: dict[str, Callable[[int, np.random.Generator], Look]] = {"crop": crop, "mask": mask, "reorder": reorder}


class Reconstruction(NamedTuple):
    """`draw(unclicked, row, n_items, samples, rng)` gives the negatives of a batch whose positions [n] belong to
    histories `row`; `loss(hidden, table, target, negative, bias)` the mean over positions. table [I+1, D] has padding
    in row 0; bias [I] is added to the logits of items 1..I.
    """

    draw: Callable[[Unclicked, np.ndarray, int, int, np.random.Generator], np.ndarray]
    loss: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def _logit(hidden: Tensor, table: Tensor, item: Tensor, bias: Tensor) -> Tensor:
    return (hidden * F.embedding(item, table)).sum(-1) + bias[item - 1]


def binary(hidden: Tensor, table: Tensor, target: Tensor, negative: Tensor, bias: Tensor) -> Tensor:
    """The paper's: -log sigmoid(target) - log(1 - sigmoid(negative)), one unclicked item a position."""
    up, down = _logit(hidden, table, target, bias), _logit(hidden, table, negative, bias)
    return (F.softplus(-up) + F.softplus(down)).mean()


def sampled(hidden: Tensor, table: Tensor, target: Tensor, negative: Tensor, bias: Tensor) -> Tensor:
    """Softmax over the target and items drawn uniformly for the whole batch, each counting for I / samples others."""
    weight = bias[negative - 1] + float(np.log(len(bias) / len(negative)))
    return fastcl.sampled_softmax(
        hidden,
        F.embedding(target, table),
        F.embedding(negative, table),
        ids=target,
        negative_ids=negative,
        log_q=-bias[target - 1],
        negative_log_q=-weight,
    )


def full_softmax(hidden: Tensor, table: Tensor, target: Tensor, negative: Tensor, bias: Tensor) -> Tensor:
    """Softmax over the whole item table."""
    return fastcl.linear_cross_entropy(hidden, table[1:], target - 1, bias=bias)


RECONSTRUCTIONS: dict[str, Reconstruction] = {
    "bce": Reconstruction(lambda unclicked, row, n_items, samples, rng: unclicked.draw(row, rng), binary),
    "sampled": Reconstruction(
        lambda unclicked, row, n_items, samples, rng: rng.integers(1, n_items + 1, samples), sampled
    ),
    "softmax": Reconstruction(lambda unclicked, row, n_items, samples, rng: np.empty(0, np.int64), full_softmax),
}

# Two views' sequence vectors [B, D], and a temperature, to the mean loss; similarity is the cosine. NT-Xent (Chen et
# al. 2020), the authors' form, also takes the other sequences of a view's own side as negatives.
CONTRASTS: dict[str, Callable[[Tensor, Tensor, float | Tensor], Tensor]] = {
    "infonce": lambda one, two, t: fastcl.infonce(one, two, temperature=t, symmetric=True),
    "dcl": lambda one, two, t: fastcl.dcl(one, two, temperature=t, symmetric=True),
    "mine_plus": lambda one, two, t: fastcl.mine_plus(one, two, temperature=t, symmetric=True),
    "nt_xent": lambda one, two, t: fastcl.nt_xent(one, two, t),
}
