"""The forms in which cut-offs (10, (10, 50), "10,50") and metrics ("recall", "recall@10") may be given anywhere.

This module parses names; measures.py says which metrics exist.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

Cutoffs = int | str | Sequence[int]
Metrics = str | Sequence[str]


def cutoffs(k: Cutoffs, option: str = "k") -> tuple[int, ...]:
    """Cut-offs as a tuple of whole numbers.

    Raises ValueError, which names `option`, for anything but whole numbers from 1, for repeated ones and for none.

    >>> cutoffs(10), cutoffs([10, 50]), cutoffs("10,50")
    ((10,), (10, 50), (10, 50))
    """
    parts: list[Any] = []
    with contextlib.suppress(ValueError):
        parts = [int(part) for part in k.split(",")] if isinstance(k, str) else [*k] if isinstance(k, Iterable) else [k]
    if not parts or not all(map(_whole, parts)):
        raise ValueError(f"{option}: expected whole numbers from 1, such as 10 or 10,50, got {k!r}")
    if len(set(parts)) < len(parts):
        raise ValueError(f"{option}: expected different cut-offs, got {k!r}")
    return tuple(map(int, parts))


def cutoff(k: Cutoffs, option: str = "k") -> int:
    """The one cut-off of a function that takes a single list length.

    >>> cutoff(10), cutoff("10"), cutoff((10,))
    (10, 10, 10)
    """
    found = cutoffs(k, option)
    if len(found) > 1:
        raise ValueError(f"{option}: expected one whole number, got {k!r}")
    return found[0]


def parted(metric: str, option: str = "metrics") -> tuple[str, int | None]:
    """A metric's name and its cut-off; None for a metric that is named without a cut-off.

    >>> parted("recall@10"), parted("auc")
    (('recall', 10), ('auc', None))
    """
    if not isinstance(metric, str):
        raise TypeError(f"{option}: expected names such as recall or recall@10, got {metric!r}")
    name, at, k = metric.partition("@")
    try:
        return name, cutoff(k) if at else None
    except ValueError:
        raise ValueError(f"{option}: expected a whole number from 1 after the @, got {metric!r}") from None


def listed(metrics: Metrics) -> tuple[str, ...]:
    """Names of metrics as a tuple.

    >>> listed("recall@10, auc"), listed(["recall"])
    (('recall@10', 'auc'), ('recall',))
    """
    return tuple(part.strip() for part in metrics.split(",")) if isinstance(metrics, str) else tuple(metrics)


def at_cutoffs(metrics: Metrics, k: Cutoffs, without: Sequence[str] = ()) -> tuple[str, ...]:
    """Every metric with a cut-off: its own where it names one, else each of `k`. without: metrics that take no cut-off.

    >>> at_cutoffs("recall@50,ndcg,auc", (5, 10), without=("auc",))
    ('recall@50', 'ndcg@5', 'ndcg@10', 'auc')
    """
    found: list[str] = []
    for metric in listed(metrics):
        name, own = parted(metric)
        if name in without:
            if own is not None:
                raise ValueError(f"metrics: {name} has no cut-off, got {metric!r}")
            found.append(name)
        else:
            found += [f"{name}@{each}" for each in (cutoffs(k) if own is None else (own,))]
    return tuple(dict.fromkeys(found))


def cutoffs_in(metrics: Sequence[str]) -> tuple[int, ...]:
    """The cut-offs that the metrics name, in rising order; () where no metric names one.

    >>> cutoffs_in(("recall@50", "ndcg@10", "recall@10", "auc"))
    (10, 50)
    """
    return tuple(sorted({k for metric in metrics if (k := parted(metric)[1]) is not None}))


def _whole(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and 1 <= int(value) < 2**63
