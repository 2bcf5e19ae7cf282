"""The losses CLRec is compared with (Zhou et al. 2021, sections 2.2 and B.3), and where its own negatives come from: in
tables by name.

Functions of encoded (history, next click) pairs; encoders, queues and batches are the model's, in model.py.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

import fastcl
from fastcl.negatives import Evicted
from fastcl.recsys.models.clrec.config import CLRecConfig


class Pairs(NamedTuple):
    """N histories, each with its next click, and M items beside them; all vectors normalised.

    Similarity is the cosine / temperature, so a loss of inner products divides one side by the temperature.
    """

    user: Tensor  # [N, D]
    positive: Tensor  # [N, D], of the next clicks
    target: Tensor  # int64 [N], their item numbers
    window: Tensor  # int64 [N], which span of the batch a pair belongs to
    drawn: Tensor  # int64 [M] or [N, K], items to be told apart from
    keys: Tensor  # [M, D] or [N, K, D], their vectors
    queued: Evicted | None  # vectors kept from earlier batches
    items: Callable[[], Tensor]  # () -> [I, D], all items' vectors
    log_share: Tensor  # [I], log of each item's share of the train clicks
    log_q: Tensor  # [N], log propensity of the next clicks; empty where no objective asks for it


# What to do with other clicks of the same item among the negatives: the ids passed to the loss decide.
DUPLICATES: dict[str, Callable[[Tensor], Tensor | None]] = {
    "keep": lambda target: None,
    "exclude": lambda target: target,
}


def contrastive(pairs: Pairs, config: CLRecConfig) -> Tensor:
    """Eq. 3 without log q: the negatives are the newest clicks, so they come as often as they are clicked."""
    ids = DUPLICATES[config.duplicates](pairs.target)
    if ids is None:
        # A window's own clicks are no sample of what was shown to all. Below zero: no item's number.
        ids = -1 - pairs.window
    column = in_batch(len(ids), config, ids.device)
    return fastcl.infonce(
        pairs.user,
        pairs.positive,
        torch.cat([pairs.positive[column], pairs.keys]),
        temperature=config.temperature,
        normalize=False,
        queue=pairs.queued,
        ids=ids,
        negative_ids=torch.cat([ids[column], pairs.drawn]),
    )


def in_batch(n: int, config: CLRecConfig, device: torch.device) -> Tensor:
    """Which of a batch's n positives serve as negatives: all, or `negatives` of them, evenly, where there are more."""
    few = min(n, config.negatives)
    return torch.arange(few, device=device) * n // few


def sampled_softmax(pairs: Pairs, config: CLRecConfig) -> Tensor:
    """Eq. 2: explicit negatives with log q, which make it an estimate of the full softmax."""
    return fastcl.sampled_softmax(
        pairs.user,
        pairs.positive,
        pairs.keys,
        ids=pairs.target,
        negative_ids=pairs.drawn,
        log_q=pairs.log_share[pairs.target - 1],
        negative_log_q=pairs.log_share[pairs.drawn - 1],
        temperature=config.temperature,
    )


def negative_sampling(pairs: Pairs, config: CLRecConfig) -> Tensor:
    """A binary decision a pair (Mikolov et al. 2013); the keys decide whether negatives are shared."""
    return fastcl.negative_sampling(pairs.user / config.temperature, pairs.positive, pairs.keys)


def full_softmax(pairs: Pairs, config: CLRecConfig) -> Tensor:
    """Eq. 1: maximum likelihood over all items."""
    return fastcl.linear_cross_entropy(pairs.user, pairs.items(), pairs.target - 1, temperature=config.temperature)


def inverse_propensity(pairs: Pairs, config: CLRecConfig) -> Tensor:
    """Eq. 4: the full softmax, a pair counting 1 / q(y|x), here over the number of items so that equal propensities
    count 1, and at most `weight_limit`.
    """
    table = pairs.items()
    weight = torch.exp(-pairs.log_q.detach()) / len(table)
    return fastcl.linear_cross_entropy(
        pairs.user,
        table,
        pairs.target - 1,
        temperature=config.temperature,
        row_weight=weight.clamp(max=config.weight_limit),
    )


class Objective(NamedTuple):
    """`shape(n, config)` is that of the items drawn for n pairs, each in proportion to clicks ** power (B.3: 0.75)."""

    loss: Callable[[Pairs, CLRecConfig], Tensor]
    shape: Callable[[int, CLRecConfig], tuple[int, ...]] = lambda n, config: (0,)
    power: float = 1.0
    queue: bool = False  # whether it takes its negatives from earlier batches
    weighs: bool = False  # whether it asks for a propensity


OBJECTIVES: dict[str, Objective] = {
    "clrec": Objective(contrastive, queue=True),
    "sampled_softmax": Objective(sampled_softmax, lambda n, config: (config.negatives,)),
    "negative_sampling": Objective(negative_sampling, lambda n, config: (n, config.samples), power=0.75),
    "shared_negatives": Objective(negative_sampling, lambda n, config: (config.negatives,), power=0.75),
    "full_softmax": Objective(full_softmax),
    "ipw": Objective(inverse_propensity, weighs=True),
}


Draw = Callable[[tuple[int, ...]], np.ndarray]


def drawing(log_share: Tensor, power: float, rng: np.random.Generator) -> Draw:
    """A function from shapes to int64 items in proportion to share ** power. All items' powers are summed at the first
    shape that is not empty: at ten million items the sums take as long as several batches.
    """
    upto = functools.cache(lambda: np.cumsum(np.exp(power * log_share.double().numpy(force=True))))

    def draw(shape: tuple[int, ...]) -> np.ndarray:
        if 0 in shape:
            return np.zeros(shape, np.int64)
        return 1 + np.searchsorted(upto()[:-1], rng.random(shape) * upto()[-1], side="right")

    return draw
