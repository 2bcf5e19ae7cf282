"""Histories that are parts of another log's rows: the histories of validation and test cases are almost the whole log
twice more, and are looked at a batch at a time. Nothing here reads files."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from fastcl.recsys.data.containers import Histories


class Views(Histories):
    """Row b is log.item[starts[b] : starts[b] + lengths[b]].

    `take`, `last` and `blocks` copy the clicks of their rows alone; `offsets`, `item` and `time`, which are those of a
    packed copy of all rows, make it when they are first asked for.
    """

    def __init__(self, log: Histories, starts: np.ndarray, lengths: np.ndarray) -> None:
        vars(self).update(_log=log, _starts=starts, _lengths=lengths, items=log.items, users=None)

    def __repr__(self) -> str:
        return f"Views(rows={len(self)}, clicks={int(self.lengths.sum())})"

    def __len__(self) -> int:
        return len(self._starts)

    @property
    def lengths(self) -> np.ndarray:
        return self._lengths

    def take(self, rows: np.ndarray) -> Histories:
        rows = np.asarray(rows, np.int64)
        taken = self._log.slice(self._starts[rows], self._lengths[rows])
        return taken.named(self.items, None if self.users is None else self.users[rows])

    def last(self, n: int) -> Histories:
        if n < 1:
            raise ValueError(f"n: expected at least 1, got {n}")
        lengths = np.minimum(self._lengths, n)
        return Views(self._log, self._starts + self._lengths - lengths, lengths).named(self.items, self.users)

    def packed(self) -> Histories:
        """All rows, copied."""
        return self._log.slice(self._starts, self._lengths)

    @cached_property
    def _packed(self) -> Histories:
        return self.packed()

    @property
    def timed(self) -> np.dtype | None:
        """The type of the times; None where there are none."""
        return None if self._log.time is None else self._log.time.dtype

    @property
    def places(self) -> tuple[np.ndarray, np.ndarray]:
        """starts and lengths."""
        return self._starts, self._lengths

    _log: Histories
    _starts: np.ndarray
    _lengths: np.ndarray
    offsets: Any = property(lambda self: self._packed.offsets)
    item: Any = property(lambda self: self._packed.item)
    time: Any = property(lambda self: self._packed.time if self._log.time is not None else None)
