"""A world in which it is known what users like and what they were shown, which no log tells.

Preference, exposure and clicks only; which models learn from the clicks is bench_debias.py's business.
"""

from typing import NamedTuple

import numpy as np

from fastcl.recsys import Feature, Histories, Items

Policy = np.ndarray  # float64 [U, I], row u: the probability that an impression of user u is of item 1..I


class World(NamedTuple):
    """Items belong to intents, users are interested in a few of these. An item's quality and its popularity, the share
    of the impressions that it gets, are drawn apart: what is popular is not what is good.

    intent: int64 [I]. quality: float64 [I], from 0 to 1. interest: float64 [U, H], rows add up to 1. popularity:
    float64 [I], adds up to 1.
    """

    intent: np.ndarray
    quality: np.ndarray
    interest: np.ndarray
    popularity: np.ndarray

    @property
    def items(self) -> Items:
        """The item table; the one feature, the intent, is what a shop knows as the category."""
        ids = tuple(f"item {n}" for n in range(1, len(self.intent) + 1))
        return Items(ids, features={"intent": Feature.from_labels([[f"{h:02d}"] for h in self.intent])})

    def preference(self) -> np.ndarray:
        """p(click | user, item), [U, I]: 0.01 + 0.99 * interest of the user in the item's intent * quality."""
        return 0.01 + 0.99 * self.interest[:, self.intent] * self.quality

    def policy(self, personal: float) -> Policy:
        """(1 - personal) * popularity + personal * popularity(item | intent) * interest of the user in the intent: with
        0 all users are shown the same, with 1 an intent as often as it interests.
        """
        of_intent = np.bincount(self.intent, weights=self.popularity, minlength=self.interest.shape[1])
        within = self.popularity / of_intent[self.intent]
        return (1.0 - personal) * self.popularity + personal * self.interest[:, self.intent] * within


def world(users: int, items: int, intents: int, rng: np.random.Generator, skew: float = 1.0) -> World:
    """Zipf popularity, the n-th item's share proportional to n ** -skew; quality uniform from 0.05 to 1; interests from
    a Dirichlet(0.3) distribution: two or three intents make up most of them.
    """
    popularity = rng.permutation(1.0 / np.arange(1, items + 1) ** skew)
    return World(
        intent=rng.permutation(np.arange(items) % intents),
        quality=rng.uniform(0.05, 1.0, items),
        interest=rng.dirichlet(np.full(intents, 0.3), users),
        popularity=popularity / popularity.sum(),
    )


class Shown(NamedTuple):
    """clicks: Histories of all users, in the order of the impressions. impressions: int64 [I+1], of each item."""

    clicks: Histories
    impressions: np.ndarray


def show(policy: Policy, preference: np.ndarray, clicks: int, rng: np.random.Generator) -> Shown:
    """Impressions drawn from the policy, clicked with the probability of the preference, until every user has made so
    many clicks.
    """
    users, items = policy.shape
    reach = policy.cumsum(1)
    reach /= reach[:, -1:]
    impressions = np.zeros(items + 1, np.int64)
    made: list[list[int]] = [[] for _ in range(users)]
    waiting = np.arange(users)
    while len(waiting):
        item = (reach[waiting] < rng.random((len(waiting), 1))).sum(1)
        impressions += np.bincount(item + 1, minlength=items + 1)
        clicked = rng.random(len(waiting)) < preference[waiting, item]
        for user, number in zip(waiting[clicked], item[clicked] + 1, strict=True):
            made[user].append(int(number))
        waiting = waiting[[len(made[user]) < clicks for user in waiting]]
    return Shown(Histories.from_lists(made), impressions)


def joined(earlier: Histories, later: Histories) -> Histories:
    """Row by row, the later clicks behind the earlier ones."""
    both = np.concatenate([earlier.item, later.item])
    row = np.concatenate([np.repeat(np.arange(len(h)), h.lengths) for h in (earlier, later)])
    return Histories(earlier.offsets + later.offsets, both[np.argsort(row, kind="stable")])


def divergence(preference: np.ndarray, logits: np.ndarray) -> float:
    """Mean over the users of KL(p || softmax(logits)) in nats; p is the preference, made to add up to 1: what a user
    clicks where everything is shown alike (Zhou et al. 2021, Eq. 14).

    >>> round(divergence(np.array([[0.2, 0.6]]), np.log([[1.0, 3.0]])), 6)
    0.0
    """
    p = preference / preference.sum(1, keepdims=True)
    top = logits.max(1, keepdims=True)
    log_q = logits - top - np.log(np.exp(logits - top).sum(1, keepdims=True))
    return float((p * (np.log(p) - log_q)).sum(1).mean())


def rank_correlation(preference: np.ndarray, logits: np.ndarray) -> float:
    """Mean over the users of Spearman's correlation between preference and logits (no ties: both are continuous).

    >>> rank_correlation(np.array([[0.1, 0.2, 0.3]]), np.array([[5.0, 6.0, 9.0]]))
    1.0
    """
    a, b = (np.argsort(np.argsort(x, 1), 1).astype(np.float64) for x in (preference, logits))
    a, b = (x - x.mean(1, keepdims=True) for x in (a, b))
    return float(((a * b).sum(1) / np.sqrt((a**2).sum(1) * (b**2).sum(1))).mean())
