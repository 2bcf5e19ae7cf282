"""Walks over a log some rows at a time, so that no temporary array is as large as the log."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np


def ranges(lengths: np.ndarray, clicks: int = 1 << 20) -> Iterator[tuple[int, int]]:
    """Spans (begin, end) of rows in order, each of one row or of at most so many clicks.

    >>> list(ranges(np.array([1, 1, 5, 0, 2]), clicks=2))
    [(0, 2), (2, 3), (3, 5)]
    """
    ends = np.cumsum(lengths)
    begin = 0
    while begin < len(ends):
        before = ends[begin - 1] if begin else 0
        end = max(begin + 1, int(np.searchsorted(ends, before + clicks, side="right")))
        yield begin, end
        begin = end
