"""Tables of ContrastVAE by name: augmentations of a sequence, and contrastive losses of two views.

They are functions of index arrays and hidden vectors; model.py has networks and batches.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
from torch import Tensor

import fastcl
from fastcl.registry import LOSSES

CROP, MASK, REORDER = 0.6, 0.3, 0.6  # shares kept, covered, shuffled (CL4SRec, Xie et al. 2022, section 4.1.4)


class Look(NamedTuple):
    """An augmented view of a sequence of n clicks: which clicks it has, in which order, and which are covered."""

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

# (vectors of one view [B, D], of the other view [B, D], temperature) -> mean loss; similarity is the cosine
Contrast = Callable[[Tensor, Tensor, float | Tensor], Tensor]


def _nt_xent(one: Tensor, two: Tensor, temperature: float | Tensor) -> Tensor:
    """Chen et al. 2020, which the authors' program uses: the other sequences of the same view are negatives too."""
    return fastcl.nt_xent(one, two, temperature)


class Contrasts(Mapping[str, Contrast]):
    """`nt_xent`, and every loss of fastcl's family in both directions, those that users add with `fastcl.over_rows`
    among them.
    """

    def __getitem__(self, name: str) -> Contrast:
        if name == "nt_xent":
            return _nt_xent
        loss = LOSSES[name]
        if loss.formula is None:
            raise KeyError(name)
        return lambda one, two, t: loss.function(one, two, temperature=t, symmetric=True)

    def __iter__(self) -> Iterator[str]:
        yield from (name for name, loss in LOSSES.items() if loss.formula is not None)
        yield "nt_xent"

    def __len__(self) -> int:
        return sum(1 for _ in self)


CONTRASTS = Contrasts()
