"""CLRec's loss and the losses that it is compared with (Zhou et al. 2021, sections 2.2 and B.3), in a table by name.

They are functions of encoded pairs (history, next click). model.py has the encoders, queues and batches.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

import fastcl
from fastcl.negatives import Evicted
from fastcl.recsys.models.clrec.config import CLRecConfig
from fastcl.recsys.models.losses import as_multiplied


class Pairs(NamedTuple):
    """N histories with the next click of each, and M items to be told apart from the next clicks.

    All vectors are normalised. Similarity is cosine / temperature, so that a loss of inner products divides one side by
    the temperature.
    """

    user: Tensor  # [N, D]
    positive: Tensor  # [N, D], the vectors of the next clicks
    target: Tensor  # int64 [N], the items of the next clicks
    window: Tensor  # int64 [N], the span of the batch that each pair belongs to
    drawn: Tensor  # int64 [M] or [N, K], the items to be told apart from
    keys: Tensor  # [M, D] or [N, K, D], the vectors of `drawn`
    queued: Evicted | None  # vectors kept from earlier batches
    items: Callable[[], Tensor]  # () -> [I, D], all items' vectors
    log_share: Tensor  # [I], log of each item's share of the train clicks
    log_q: Tensor  # [N], log propensity of the next clicks; empty where no objective asks for it


# The ids that are passed to the loss for the setting `duplicates`: equal ids are left out of the negatives.
DUPLICATES: dict[str, Callable[[Tensor], Tensor | None]] = {
    "keep": lambda target: None,
    "exclude": lambda target: target,
}


def contrastive(pairs: Pairs, config: CLRecConfig) -> Tensor:
    """Eq. 3, and with `log_q` a part of Eq. 2's correction. The negatives are the newest clicks, so that items occur as
    often as they are clicked.
    """
    ids = DUPLICATES[config.duplicates](pairs.target)
    if ids is None:
        # A window's own clicks are no sample of what was shown to all users. Negative ids equal no item's number.
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
        log_q=correction(pairs.log_share, pairs.target, config),
        negative_log_q=correction(pairs.log_share, torch.cat([pairs.target[column], pairs.drawn]), config),
    )


def correction(log_share: Tensor, item: Tensor, config: CLRecConfig) -> Tensor | None:
    """[n], what is subtracted from the scores of items [n] as positives or negatives; None for nothing."""
    return config.log_q * log_share[item - 1] if config.log_q else None


def in_batch(n: int, config: CLRecConfig, device: torch.device) -> Tensor:
    """int64, the indices of the n positives that serve as negatives: all, or `negatives` evenly spaced ones of more."""
    few = min(n, config.negatives)
    return torch.arange(few, device=device) * n // few


def sampled_softmax(pairs: Pairs, config: CLRecConfig) -> Tensor:
    """Eq. 2: drawn negatives with a log q correction, with which the loss estimates the full softmax."""
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
    """A binary decision for each pair (Mikolov et al. 2013). All pairs share the negatives where `keys` is [M, D]."""
    return fastcl.negative_sampling(pairs.user / config.temperature, pairs.positive, pairs.keys)


def full_softmax(pairs: Pairs, config: CLRecConfig) -> Tensor:
    """Eq. 1: maximum likelihood over all items."""
    user, table = as_multiplied(pairs.user, pairs.items())
    return fastcl.linear_cross_entropy(user, table, pairs.target - 1, temperature=config.temperature)


def inverse_propensity(pairs: Pairs, config: CLRecConfig) -> Tensor:
    """Eq. 4: the full softmax, each pair weighted by 1 / q(y|x). The weights are divided by the number of items, so
    that equal propensities have weight 1, and are at most `weight_limit`.
    """
    user, table = as_multiplied(pairs.user, pairs.items())
    weight = torch.exp(-pairs.log_q.detach()) / len(table)
    return fastcl.linear_cross_entropy(
        user,
        table,
        pairs.target - 1,
        temperature=config.temperature,
        row_weight=weight.clamp(max=config.weight_limit),
    )


class Objective(NamedTuple):
    """An objective and the items that it draws: `shape(n, config)` items for n pairs, in proportion to clicks ** power
    (0.75 in appendix B.3).
    """

    loss: Callable[[Pairs, CLRecConfig], Tensor]
    shape: Callable[[int, CLRecConfig], tuple[int, ...]] = lambda n, config: (0,)
    power: float = 1.0
    queue: bool = False  # whether it takes negatives from earlier batches
    weighs: bool = False  # whether it needs a propensity
    every: bool = False  # whether each step reads all items


OBJECTIVES: dict[str, Objective] = {
    "clrec": Objective(contrastive, queue=True),
    "sampled_softmax": Objective(sampled_softmax, lambda n, config: (config.negatives,)),
    "negative_sampling": Objective(negative_sampling, lambda n, config: (n, config.samples), power=0.75),
    "shared_negatives": Objective(negative_sampling, lambda n, config: (config.negatives,), power=0.75),
    "full_softmax": Objective(full_softmax, every=True),
    "ipw": Objective(inverse_propensity, weighs=True, every=True),
}

