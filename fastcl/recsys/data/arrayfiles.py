"""Arrays on their way to files and back, a piece at a time: columns that wait on disk, and files that are mapped."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fastcl.recsys.data.budget import Budget
from fastcl.recsys.data.ids import Ids
from fastcl.recsys.data.prepared import File, mapped


class Spool:
    """The pieces of a column, in a file; they come back as they went in."""

    def __init__(self, place: Path, budget: Budget) -> None:
        self._path = place / f"spool-{secrets.token_hex(4)}"
        self._file = open(self._path, "wb")  # noqa: SIM115  open for as long as the object is written to
        self._pieces: list[tuple[int, np.dtype]] = []
        self._budget = budget

    def append(self, piece: np.ndarray) -> None:
        self._budget.check("the ids")
        self._file.write(np.ascontiguousarray(piece).data)
        self._pieces.append((len(piece), piece.dtype))

    def __iter__(self) -> Iterator[np.ndarray]:
        self._file.flush()
        with open(self._path, "rb") as file:
            for count, dtype in self._pieces:
                yield np.frombuffer(file.read(count * dtype.itemsize), dtype)

    def close(self) -> None:
        self._file.close()

    def remove(self) -> None:
        self.close()
        self._path.unlink()


class Writer:
    """One array on its way to a file; `close` notes in `written` what it became."""

    def __init__(self, path: Path, kind: np.dtype, written: dict[str, File]) -> None:
        self._path, self._kind, self._written = path, kind, written
        self._file = open(path, "xb")  # noqa: SIM115  until `close`
        self._digest, self._rows = hashlib.sha256(), 0

    def write(self, piece: np.ndarray) -> None:
        data = np.ascontiguousarray(piece, self._kind)
        self._file.write(data.data)
        self._digest.update(data.data)
        self._rows += len(data)

    def close(self, columns: int | None = None) -> np.ndarray:
        """The array, mapped."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        shape = (self._rows,) if columns is None else (self._rows, columns)
        self._written[self._path.name] = found = File(self._kind.str, [*shape], self._digest.hexdigest())
        return mapped(self._path, found)


class ArrayFiles:
    """Writes arrays to files and notes what was written."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.written: dict[str, File] = {}

    def open(self, name: str, dtype: Any = np.int64) -> Writer:
        return Writer(self.place / f"{name}.bin", np.dtype(dtype).newbyteorder("<"), self.written)

    def add(
        self, name: str, pieces: Iterable[np.ndarray], dtype: Any = np.int64, columns: int | None = None
    ) -> np.ndarray:
        """The pieces, one behind the other, as a mapped array."""
        writer = self.open(name, dtype)
        for piece in pieces:
            writer.write(piece)
        return writer.close(columns)

    def add_ids(self, name: str, texts: Sequence[str]) -> Ids:
        ids = Ids.of(texts)
        return Ids(self.add(name, [ids.data], np.uint8), self.add(f"{name}-bounds", [ids.bounds]))
