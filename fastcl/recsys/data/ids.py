"""Ids and titles in arrays instead of Python strings, so that a catalogue in a mapped file costs no memory until it is
looked at. Nothing here opens files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np

_BLOCK = 1 << 16  # ids that are decoded together


def digest_of(ids: Sequence[str]) -> str:
    """The same for two sequences of the same texts."""
    digest = hashlib.sha256()
    for text in ids:
        name = text.encode("utf-8", "surrogatepass")
        digest.update(b"%d:%b" % (len(name), name))
    return digest.hexdigest()


class Ids(Sequence[str]):
    """A sequence of texts that decodes each one when it is asked for; equal to any sequence of the same texts.

    data: uint8, the texts in UTF-8 one behind the other. bounds: int64 [N+1]; text k is data[bounds[k]:bounds[k+1]].
    rows: the texts that are meant, by number; None: all N. digest: that of `Items`, where it is known.

    >>> ids = Ids.of(["a", "bc", "é"])
    >>> len(ids), ids[1], list(ids[np.array([2, 0])]), ids == ("a", "bc", "é")
    (3, 'bc', ['é', 'a'], True)
    """

    def __init__(
        self, data: np.ndarray, bounds: np.ndarray, rows: np.ndarray | None = None, digest: str | None = None
    ) -> None:
        self.data, self.bounds, self.rows, self.digest = data, bounds, rows, digest

    @classmethod
    def of(cls, texts: Sequence[str]) -> Ids:
        """The texts, copied."""
        pieces = [text.encode("utf-8", "surrogatepass") for text in texts]
        bounds = np.zeros(len(pieces) + 1, np.int64)
        np.cumsum(np.fromiter(map(len, pieces), np.int64, len(pieces)), out=bounds[1:])
        return cls(np.frombuffer(b"".join(pieces), np.uint8), bounds)

    def __len__(self) -> int:
        return len(self.bounds) - 1 if self.rows is None else len(self.rows)

    @overload
    def __getitem__(self, k: int) -> str: ...
    @overload
    def __getitem__(self, k: slice | np.ndarray) -> Ids: ...
    def __getitem__(self, k: Any) -> Any:
        if isinstance(k, slice | np.ndarray):
            if self.rows is not None:
                rows = self.rows[k]
            elif isinstance(k, slice):
                rows = np.arange(*k.indices(len(self)))
            else:
                rows = np.arange(len(self))[k] if k.dtype == bool else k
            return Ids(self.data, self.bounds, rows)
        k = range(len(self))[k]  # IndexError; from the end where it is negative
        row = k if self.rows is None else int(self.rows[k])
        return self.data[self.bounds[row] : self.bounds[row + 1]].tobytes().decode("utf-8", "surrogatepass")

    def __iter__(self) -> Iterator[str]:
        if self.rows is not None:
            yield from map(self.__getitem__, range(len(self)))
            return
        for begin in range(0, len(self), _BLOCK):
            bounds = self.bounds[begin : begin + _BLOCK + 1].tolist()
            text = self.data[bounds[0] : bounds[-1]].tobytes()
            for start, stop in zip(bounds, bounds[1:], strict=False):
                yield text[start - bounds[0] : stop - bounds[0]].decode("utf-8", "surrogatepass")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        shown = ", ".join(map(repr, self[:3]))
        return f"Ids({shown}, ... {len(self):,} in all)" if len(self) > 3 else f"Ids({shown})"
