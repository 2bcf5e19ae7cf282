"""Paired randomisation tests over users, and Holm's correction for many of them.

A test gets numbers or a function of who is swapped; it knows no models and no metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product

import numpy as np

DRAWS = 9999
SWAPS = 999  # draws of `swap_test`, each of which computes its figures anew
EXACT = 13  # the most users with a difference for whom all 2^n signs are tried
STARS = (0.001, 0.01, 0.05)  # a star for each that a corrected p is below


def stars(p: float) -> str:
    """A star for each of 0.05, 0.01 and 0.001 that p is below.

    >>> stars(0.2), stars(0.049), stars(0.0009)
    ('', '*', '***')
    """
    return "*" * sum(p < level for level in STARS)


def holm(p: Sequence[float]) -> list[float]:
    """p-values corrected for their number by Holm's step-down rule (1979), in the same order.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    corrected, highest = [0.0] * len(p), 0.0
    for place, n in enumerate(sorted(range(len(p)), key=lambda n: p[n])):
        highest = max(highest, min(1.0, (len(p) - place) * p[n]))
        corrected[n] = highest
    return corrected


def paired_test(a: np.ndarray, b: np.ndarray, draws: int = DRAWS, seed: int = 0) -> dict[str, float]:
    """Fisher's paired randomisation test, two-sided, of the mean of a - b over users; a, b: float [U].

    Under the null hypothesis a user's two values are exchangeable, so the difference may have either sign. Where at
    most 13 users differ, p is exact: the share of all patterns of signs whose mean is at least as far from 0 as the
    observed one. Else each draw gives every difference a random sign, and p = (1 + #draws with such a mean) /
    (1 + draws).

    Returns "difference", "p", and "low" and "high", the 95% interval of the difference by the normal approximation,
    where there is more than one user.

    >>> found = paired_test(np.array([1.0, 0.5, 1.0, 0.7]), np.array([0.5, 0.5, 0.5, 0.1]), draws=999)
    >>> round(found["difference"], 2), found["p"] > 0.05  # four users decide nothing
    (0.4, True)
    """
    if a.shape != b.shape or a.ndim != 1 or not len(a):
        raise ValueError(f"a, b: expected two equally long vectors of users, got {list(a.shape)} and {list(b.shape)}")
    difference = a - b
    observed = float(difference.mean())
    moved = difference[difference != 0.0]  # a sign changes nothing at 0
    if len(moved) <= EXACT:
        signs = (np.arange(2 ** len(moved))[:, None] >> np.arange(len(moved))) & 1
        p = float(_as_far(moved, signs).mean())
    else:
        rng = np.random.default_rng(seed)
        as_far, block = 0, max(1, 2**22 // len(moved))
        for start in range(0, draws, block):
            signs = rng.integers(0, 2, (min(block, draws - start), len(moved)), dtype=np.int8)
            as_far += int(_as_far(moved, signs).sum())
        p = (1 + as_far) / (1 + draws)
    found = {"difference": observed, "p": p}
    if len(a) == 1:  # has no interval
        return found
    error = float(difference.std(ddof=1) / np.sqrt(len(a)))
    return {**found, "low": observed - 1.96 * error, "high": observed + 1.96 * error}


def _as_far(moved: np.ndarray, signs: np.ndarray) -> np.ndarray:
    """bool [n]: whether the sum of `moved`, with the signs of those turned that are 1 in a row of `signs`, is as far
    from 0 as its sum without turns.
    """
    sums = moved.sum() - 2.0 * (signs @ moved)
    return np.abs(sums) >= abs(moved.sum()) * (1 - 1e-12)


def swap_test(
    difference: Callable[[np.ndarray], Mapping[str, float]], users: int, draws: int = SWAPS, seed: int = 0
) -> dict[str, dict[str, float]]:
    """The same test of differences that are no means over users, such as that of the number of distinct items in all
    lists: under the null hypothesis what two models give a user is exchangeable.

    difference: from bool [users], who is swapped, to the differences between the two models by name, where each has
        the other's lists for these users. Without a swap it gives the observed differences.

    Where 2^users is at most draws + 1, p is exact: the share of all ways to swap that give a difference at least as far
    from 0 as the observed one. Else users are swapped at random `draws` times, and p = (1 + #draws with such a
    difference) / (1 + draws).

    Returns "difference" and "p" for each name.

    >>> a, b = np.array([1.0, 0.5, 1.0, 0.7]), np.array([0.5, 0.5, 0.5, 0.1])
    >>> found = swap_test(lambda swapped: {"mean": np.where(swapped, b - a, a - b).mean()}, users=4)
    >>> round(found["mean"]["difference"], 2), found["mean"]["p"] == paired_test(a, b)["p"]
    (0.4, True)
    """
    observed = dict(difference(np.zeros(users, bool)))
    exact = 2**users <= draws + 1
    as_far = dict.fromkeys(observed, 0 if exact else 1)
    tried = 0 if exact else 1
    for swapped in _swaps(users, exact, draws, seed):
        tried += 1
        for name, value in difference(swapped).items():
            as_far[name] += abs(value) >= abs(observed[name]) * (1 - 1e-12)
    return {name: {"difference": float(observed[name]), "p": float(as_far[name] / tried)} for name in observed}


def _swaps(users: int, exact: bool, draws: int, seed: int) -> Iterator[np.ndarray]:
    if exact:
        yield from (np.array(swapped) for swapped in product((False, True), repeat=users))
        return
    rng = np.random.default_rng(seed)
    yield from (rng.random(users) < 0.5 for _ in range(draws))
