"""Fingerprints of a split: what tells that a run goes on with the data that it was begun with."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator

import numpy as np

from fastcl.recsys.data.containers import Histories, Split


def fingerprint(split: Split) -> str:
    """A digest of the clicks that training sees and of the validation cases."""
    if "data" in split.digests:
        return split.digests["data"]
    train, valid = split.train, split.valid
    several = [] if valid.offsets is None else [valid.offsets]
    return _digest([train.offsets, train.item, train.time], _clicks(valid.history), [valid.target, *several])


def cases_fingerprint(split: Split) -> str:
    """A digest of the test cases, which training does not see."""
    if "test" in split.digests:
        return split.digests["test"]
    several = [] if split.test.offsets is None else [split.test.offsets]
    return _digest(_clicks(split.test.history), [split.test.target, *several])


def _clicks(histories: Histories) -> Iterator[np.ndarray]:
    """Offsets and items, some rows at a time: together they may be as large as the log."""
    yield np.concatenate([np.zeros(1, np.int64), np.cumsum(histories.lengths)])
    for part in histories.blocks():
        yield part.item


def _digest(*pieces: Iterable[np.ndarray | None]) -> str:
    digest = hashlib.sha256()
    for array in itertools.chain(*pieces):
        digest.update(b"none" if array is None else np.ascontiguousarray(array).data)
    return digest.hexdigest()
