"""Losses of user vectors against item vectors, in a table by name, for matrix factorisation and LightGCN.

A loss is a function of a batch of pairs and of constants. Callers pass the vectors as they are scored, normalised or
not, and choose and draw the negatives.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

import fastcl


class Pairs(NamedTuple):
    """B users, each with one item that the user has clicked, and the negatives."""

    user: Tensor  # [B, D]
    item: Tensor  # [B, D]
    negative: Tensor | None  # [M, D], shared by all rows, or [B, N, D], of each row; None: the items of the batch
    user_id: Tensor  # int64 [B]
    item_id: Tensor  # int64 [B]
    negative_id: Tensor | None  # int64 [M] or [B, N]
    log_q: Tensor | None  # [B], log probability that each item is drawn as a negative; None: equal for all items
    negative_log_q: Tensor | None  # [M] or [B, N]

    @property
    def against(self) -> Tensor:
        """The negatives for losses in which a row's own item among them changes nothing or little, so that no ids are
        needed.
        """
        return self.item if self.negative is None else self.negative

    @property
    def ids(self) -> dict[str, Any]:
        """The arguments with which a loss leaves a row's own item out of its negatives."""
        return {"ids": self.item_id, "negative_ids": self.negative_id}


class Constants(NamedTuple):
    """temperature: divides inner products in every loss but ccl and directau. lam, epsilon: those of MINE+ and
    InfoNCE+. margin, weight: those of the negatives in ccl. gamma: weight of the uniformity in directau.
    positive_temperature: temperature of the positives in bsl.
    """

    temperature: float = 0.1
    lam: float = 1.1
    epsilon: float = 0.0
    margin: float = 0.8
    weight: float = 150.0
    gamma: float = 1.0
    positive_temperature: float = 0.1


def bpr(pairs: Pairs, c: Constants) -> Tensor:
    """Rendle et al. 2009: softplus((negative - positive) / T), the mean over the negatives.

    The row's own item does not count: where the batch's items are the negatives, its term, which is log 2 without a
    gradient, is subtracted.
    """
    query, against = pairs.user / c.temperature, pairs.against
    total = fastcl.bpr(query, pairs.item, against)
    if pairs.negative is None:
        return (total - math.log(2.0)) / max(len(pairs.item) - 1, 1)
    return total / against.shape[-2]


def infonce(pairs: Pairs, c: Constants) -> Tensor:
    """van den Oord et al. 2018: the sampled softmax without a correction for how negatives are drawn."""
    return fastcl.infonce(
        pairs.user, pairs.item, pairs.negative, temperature=c.temperature, normalize=False, **pairs.ids
    )


def sampled_softmax(pairs: Pairs, c: Constants) -> Tensor:
    """Bengio & Senecal 2008: infonce with log q subtracted from every logit. With equal q it equals infonce."""
    log_q: dict[str, Any] = {"log_q": pairs.log_q, "negative_log_q": pairs.negative_log_q}
    return fastcl.sampled_softmax(
        pairs.user, pairs.item, pairs.negative, temperature=c.temperature, **pairs.ids, **log_q
    )


def dcl(pairs: Pairs, c: Constants) -> Tensor:
    """Yeh et al. 2022."""
    return fastcl.dcl(pairs.user, pairs.item, pairs.negative, temperature=c.temperature, normalize=False, **pairs.ids)


def infonce_plus(pairs: Pairs, c: Constants) -> Tensor:
    """Li et al. 2023."""
    return fastcl.infonce_plus(
        pairs.user, pairs.item, pairs.negative, temperature=c.temperature, normalize=False, epsilon=c.epsilon,
        lam=c.lam, **pairs.ids,
    )  # fmt: skip


def mine(pairs: Pairs, c: Constants) -> Tensor:
    """Belghazi et al. 2018."""
    return fastcl.mine(pairs.user, pairs.item, pairs.negative, temperature=c.temperature, normalize=False, **pairs.ids)


def mine_plus(pairs: Pairs, c: Constants) -> Tensor:
    """Li et al. 2023."""
    return fastcl.mine_plus(
        pairs.user, pairs.item, pairs.negative, temperature=c.temperature, normalize=False, lam=c.lam, **pairs.ids
    )


def ccl(pairs: Pairs, c: Constants) -> Tensor:
    """Mao et al. 2021, SimpleX."""
    negative_ids = pairs.item_id if pairs.negative_id is None else pairs.negative_id
    return fastcl.ccl(
        pairs.user, pairs.item, pairs.against, margin=c.margin, negative_weight=c.weight, ids=pairs.item_id,
        negative_ids=negative_ids,
    )  # fmt: skip


def directau(pairs: Pairs, c: Constants) -> Tensor:
    """Wang et al. 2022; reads no negatives."""
    return fastcl.directau(pairs.user, pairs.item, c.gamma)


def bsl(pairs: Pairs, c: Constants) -> Tensor:
    """Wu et al. 2024; a group is a user."""
    return fastcl.bsl(
        pairs.user, pairs.item, pairs.negative, temperature=c.temperature, normalize=False, group=pairs.user_id,
        positive_temperature=c.positive_temperature, **pairs.ids,
    )  # fmt: skip


LOSSES: dict[str, Callable[[Pairs, Constants], Tensor]] = {
    "mine_plus": mine_plus,
    "infonce_plus": infonce_plus,
    "infonce": infonce,
    "sampled_softmax": sampled_softmax,
    "dcl": dcl,
    "mine": mine,
    "bpr": bpr,
    "ccl": ccl,
    "directau": directau,
    "bsl": bsl,
}
WITHOUT_NEGATIVES = (directau,)
WITH_LAM = (mine_plus, infonce_plus)
