"""AUC and log loss of scored rows, and the standard error of the difference of two AUCs on the same rows."""

import numpy as np


def places(positive: np.ndarray, negative: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each score of `positive` the share of `negative` below it, and for each of `negative` the share of `positive`
    above it; equal scores count half. The mean of either is the AUC.

    >>> [x.tolist() for x in places(np.array([1.0, 3.0]), np.array([1.0, 2.0]))]
    [[0.25, 1.0], [0.75, 0.5]]
    """

    def below(value: np.ndarray, other: np.ndarray) -> np.ndarray:
        ranked = np.sort(other)
        return (np.searchsorted(ranked, value, "left") + np.searchsorted(ranked, value, "right")) / (2 * len(other))

    return below(positive, negative), 1 - below(negative, positive)


def auc(score: np.ndarray, label: np.ndarray) -> float:
    return float(places(score[label], score[~label])[0].mean())


def log_loss(logit: np.ndarray, label: np.ndarray) -> float:
    """Mean of -log of the probability of the label, in nats, where sigmoid(logit) is the probability of label 1."""
    return float(np.logaddexp(0, np.where(label, -logit, logit)).mean())


def calibration(score: np.ndarray, label: np.ndarray) -> tuple[float, float]:
    """(a, b) with the smallest log loss of a + b * score, by Newton's method."""
    centre, unit = score.mean(), score.std() or 1.0
    x = np.stack([np.ones_like(score), (score - centre) / unit], 1).astype(np.float64)
    weight = np.zeros(2)
    for _ in range(30):
        p = 1 / (1 + np.exp(-x @ weight))
        curvature = x.T @ (x * (p * (1 - p))[:, None]) + 1e-6 * np.eye(2)
        weight = weight - np.linalg.solve(curvature, x.T @ (p - label))
    return float(weight[0] - weight[1] * centre / unit), float(weight[1] / unit)


def difference(one: np.ndarray, other: np.ndarray, label: np.ndarray) -> tuple[float, float]:
    """AUC of the first less that of the second, and its standard error over the rows (DeLong et al. 1988). one, other:
    scores [S, N] of S seeds, over whose AUCs the mean is taken.
    """
    sides = []
    for part in (0, 1):
        of = [np.mean([places(s[label], s[~label])[part] for s in scores], 0) for scores in (one, other)]
        sides.append(of[0] - of[1])
    variance = sum(side.var(ddof=1) / len(side) for side in sides)
    return float(sides[0].mean()), float(variance**0.5)
