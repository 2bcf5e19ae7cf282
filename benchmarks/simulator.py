"""A simulated world with known preferences of its users and known exposure of its items, which a log does not tell.

Only preferences, exposure and clicks are here; bench_debias.py trains models on the clicks.
"""

from typing import NamedTuple

import numpy as np

from fastcl.recsys import Feature, Histories, Items

Policy = np.ndarray  # float64 [U, I]; element [u, i - 1]: the probability that an impression of user u shows item i


class World(NamedTuple):
    """Each item belongs to an intent, and a user is interested in a few intents. The quality of an item and its
    popularity, which is its share of the impressions, are independent.

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
        """(1 - personal) * popularity + personal * popularity(item | intent) * interest of the user in the intent.

        With 0 all users see the same items; with 1 a user sees an intent as often as the interest in it says.
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
    """Draws impressions from the policy, and a click on each with the probability of the preference, until every user
    has `clicks` clicks.
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
    """The histories of both, each user's later clicks behind the earlier ones."""
    both = np.concatenate([earlier.item, later.item])
    row = np.concatenate([np.repeat(np.arange(len(h)), h.lengths) for h in (earlier, later)])
    return Histories(earlier.offsets + later.offsets, both[np.argsort(row, kind="stable")])


def divergence(preference: np.ndarray, logits: np.ndarray) -> float:
    """Mean over the users of KL(p || softmax(logits)) in nats. p is the preference normalised over the items: the
    distribution of a user's clicks if all items are shown equally often (Zhou et al. 2021, Eq. 14).

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
