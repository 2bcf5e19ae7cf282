"""The optima of the losses that bench_debias.py trains by, computed from the simulated world: what each could reach if
the history told everything about a user and every item had many clicks. Nothing is trained here.
"""

import numpy as np

from benchmarks.debias_methods import Log

SECONDARY = (0.25, 1.0, 4.0)  # negatives of the intent's queue of Multi-CLRec, for each one of the main queue
NEAR = 1e-6  # the iteration ends when no score changes by more


def optima(log: Log) -> dict[str, np.ndarray]:
    """log p(item | user) [U, I], up to a constant, at the optimum of each kind of loss. By theorem 1 of CLRec, whose
    negatives are impressions, and its variant for negatives (or estimated propensities) that follow the clicks.
    """
    truth = log.world.preference()
    clicked = np.log(truth * log.policy)
    of_items = np.bincount(log.clicks.item, minlength=len(log.impressions))
    shares = [np.log(n[1:] + 0.5) for n in (of_items, log.impressions)]
    found = {
        "p(click): the truth": np.log(truth),
        "clicks (both softmaxes)": clicked,
        "clicks over known propensities (IPW)": clicked - np.log(log.policy),
        "clicks over impressions of the item": clicked - shares[1],
        "clicks over clicks of the item (CLRec)": clicked - shares[0],
    }
    for ratio in SECONDARY:
        found[f"Multi-CLRec, queues 1 : {ratio:g}"] = with_intent_queues(clicked, shares[0], log.world.intent, ratio)
    return found


def with_intent_queues(clicked: np.ndarray, shares: np.ndarray, intent: np.ndarray, ratio: float) -> np.ndarray:
    """Scores [U, I] at the optimum of Multi-CLRec's loss (Eq. 13), up to a constant of each user, if its intents are
    the world's.

    clicked [U, I], shares [I]: logarithms, up to constants, of what a user clicks and of an item's clicks. intent [I].
    ratio: the size of an intent's queue, if that of the main queue is 1.

    A target of intent h has the negatives q(y) + ratio * q(y | h). Where the gradient of the loss is zero,

        exp s(y) = p(y) / (q(y) * sum_h p_h / Z_h + ratio * q(y | h(y)) * p_h(y) / Z_h(y))
        Z_h = sum_y (q(y) + ratio * q(y | h)) * exp s(y)

    with p_h the share of a user's clicks on intent h. The loss is convex in s; the equations are iterated.
    """
    p, q = np.exp(clicked), np.exp(shares)
    p, q = p / p.sum(1, keepdims=True), q / q.sum()
    member = np.eye(intent.max() + 1)[intent]  # [I, H]
    within = q / (q @ member)[intent]
    of_intent = p @ member
    score = clicked - shares
    moved = np.inf
    while moved > NEAR:
        e = np.exp(score - score.max(1, keepdims=True))
        z = (e @ q)[:, None] + ratio * (e * within) @ member
        rate = of_intent / z
        new = np.log(p / (q * rate.sum(1, keepdims=True) + ratio * within * rate[:, intent]))
        new = (score + new - new.mean(1, keepdims=True) + score.mean(1, keepdims=True)) / 2
        moved, score = np.abs(new - score).max(), new
    return score
