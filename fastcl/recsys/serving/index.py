"""A Faiss index that `export` wrote, as `recommend` searches it: opened without being read, with seen items left out.

Nothing here encodes histories or trains.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastcl.recsys import schema
from fastcl.recsys.data import Histories
from fastcl.recsys.data.scoring import kept
from fastcl.recsys.models import Model
from fastcl.recsys.serving.vectors import Search, nearest, require_faiss
from fastcl.recsys.training.modelstate import digest

FEW = 1_000  # items that must not be recommended and that a search makes up for by asking for as many more


@dataclass
class Exported:
    """What export.json tells about its index."""

    file: str
    items: int
    dim: int
    bytes: int
    weights_sha256: str


class ItemIndex(NamedTuple):
    """An index of a model's items; row r is item r + 1."""

    folder: Path
    about: Exported
    search: Search


def open_index(folder: str | Path) -> ItemIndex:
    """The index in a folder that `export(..., to="faiss")` wrote.

    An inverted file ("IVF...") is mapped: opening it reads almost nothing, and several processes share its pages. Other
    kinds are read whole. Raises FileNotFoundError where the folder holds no export, ValueError where it holds another
    kind of file or a damaged one, ImportError where Faiss is missing.

    >>> index = open_index("index")  # doctest: +SKIP
    >>> recommend(model, [["a", "b"]], index=index)  # doctest: +SKIP
    """
    folder = Path(folder)
    faiss = require_faiss()
    path = folder / "export.json"
    if not os.path.isfile(path):  # of a name that is too long False, where Path.is_file raises
        raise FileNotFoundError(f"index: expected a folder that export wrote, got {folder} without export.json")
    found = schema.parse(path.read_bytes(), str(path))
    if isinstance(found, dict) and found.get("file") != "index.faiss":
        kind = schema.short(found.get("file"))
        raise ValueError(f"index: expected a Faiss index (export --to faiss), got {folder} with {kind}")
    schema.fits(found, Exported, str(path))
    about = Exported(**{name: found[name] for name in Exported.__dataclass_fields__})
    file = folder / about.file
    size = file.stat().st_size if file.is_file() else 0
    if size != about.bytes:  # a mapped file that is cut short would end the process when it is searched
        raise ValueError(f"{file}: expected {about.bytes:,} bytes, got {size:,}; export the index again")
    try:
        index = faiss.read_index(str(file), faiss.IO_FLAG_MMAP)
    except RuntimeError as error:
        raise ValueError(f"{file}: damaged ({str(error).strip().splitlines()[0]}); export the index again") from error
    if (index.ntotal, index.d) != (about.items, about.dim):
        got = f"{index.ntotal:,} of {index.d}"
        raise ValueError(f"{file}: expected {about.items:,} vectors of {about.dim}, got {got}; export the index again")
    ivf = faiss.try_extract_index_ivf(index)
    if ivf:
        # Faiss starts 32 threads for each search of a mapped file, which read pages ahead: most of a query's time.
        faiss.downcast_InvertedLists(ivf.invlists).prefetch_nthread = 0
    return ItemIndex(folder, about, index.search)


def check_belongs(index: ItemIndex, model: Model) -> None:
    """ValueError where the index was made of another model, or of other weights; called in a `frozen` block."""
    if index.about.items != len(model.items):
        whose = f"the index of this model's {len(model.items):,} items, got one of {index.about.items:,}"
        raise ValueError(f"index: expected {whose} in {index.folder}; export it with the items that the model has here")
    if index.about.weights_sha256 != kept(
        model, "digest", lambda: digest(model)
    ):
        whose = f"the index of this model's weights, got one of others in {index.folder}"
        raise ValueError(f"index: expected {whose}; export the run again")


def suits(index: ItemIndex | None, allowed: Tensor) -> bool:
    """Whether to search the index: it finds the best of all items, most of which must be among those allowed."""
    return index is not None and 2 * int(allowed.sum()) >= len(allowed)


def top_k_by(
    index: ItemIndex,
    queries: np.ndarray,
    history: Histories,
    k: int,
    seen: str,
    allowed: Tensor,
    exact: Callable[[Histories], tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    """As `top_k`: (items int64 [B, K], scores float32 [B, K]), best first.

    queries: of `encode`, one row a history. The index is asked for as many more items as may have to be left out.
    exact: the same by exact search, for histories of which the index finds too few items.
    """
    items = len(allowed) - 1
    width = min(k, items)
    hidden = np.zeros(0, np.int64)  # row * (items + 1) + item of what must not be recommended
    if seen == "mask":
        row = np.repeat(np.arange(len(history)), history.lengths)
        hidden = np.unique(row * (items + 1) + history.item)
    left_out = np.bincount(hidden // (items + 1), minlength=len(history))
    barred = items - int(allowed.sum())
    scores, rows = nearest(index.search, queries, min(items, width + int(left_out.max()) + min(barred, FEW)))
    item = rows + 1  # 0 where the index found no more
    keys = item + np.arange(len(item))[:, None] * (items + 1)
    good = allowed.numpy()[item] & ~np.isin(keys, hidden)
    first = np.argsort(~good, axis=1, kind="stable")[:, :width]
    found, chosen = np.take_along_axis(good, first, axis=1), np.take_along_axis(item, first, axis=1)
    best = torch.from_numpy(np.where(found, chosen, 0))
    value = torch.from_numpy(np.where(found, np.take_along_axis(scores, first, axis=1), -np.inf).astype(np.float32))
    both = np.bincount(hidden[allowed.numpy()[hidden % (items + 1)]] // (items + 1), minlength=len(history))
    few = np.flatnonzero(found.sum(1) < np.minimum(width, items - barred - both))
    if len(few):
        best[few], value[few] = exact(history.take(few))
    return best, value
