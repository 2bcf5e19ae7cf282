"""Rows of numbers of any length as a part of a model's state. Nothing here scores or trains."""

from typing import Any

import numpy as np
import torch
from torch import nn

from fastcl.recsys.data import Histories


class Ragged(nn.Module):
    """offsets [R+1], item [P], int64: row r is item[offsets[r]:offsets[r+1]], numbers from 1 to `items`. There are no
    numbers before `set`. A state dict brings rows of any lengths, and any number of rows where `rows` is None.
    """

    offsets: torch.Tensor
    item: torch.Tensor

    def __init__(self, items: int, rows: int | None = None) -> None:
        super().__init__()
        self.items, self.rows = items, rows
        self.register_buffer("offsets", torch.zeros(1 + (rows or 0), dtype=torch.int64))
        self.register_buffer("item", torch.zeros(0, dtype=torch.int64))

    def set(self, offsets: np.ndarray, item: np.ndarray) -> None:
        """Replaces the rows, unless they are the same ones."""
        same = np.array_equal(offsets, self.offsets.numpy(force=True))
        if not same or not np.array_equal(item, self.item.numpy(force=True)):
            self.offsets = torch.from_numpy(offsets).to(self.offsets.device)
            self.item = torch.from_numpy(item).to(self.item.device)

    @property
    def histories(self) -> Histories:
        """The rows as histories without times."""
        return Histories(self.offsets.numpy(force=True), self.item.numpy(force=True))

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *others: Any) -> None:
        missing, errors = others[2], others[4]
        names = [f"{prefix}{name}" for name in ("offsets", "item")]
        missing += [name for name in names if name not in state]
        if missing:
            return
        offsets, item = (state[name].detach().clone().to(self.item.device) for name in names)
        whole = (
            offsets.dtype == item.dtype == torch.int64
            and offsets.ndim == item.ndim == 1
            and len(offsets) == (len(offsets) or 1 if self.rows is None else self.rows + 1)
            and int(offsets[0]) == 0
            and int(offsets[-1]) == len(item)
            and bool((offsets.diff() >= 0).all())
            and (not len(item) or 1 <= int(item.min()) <= int(item.max()) <= self.items)
        )
        if not whole:
            errors.append(f"{', '.join(names)}: expected the items of each user, 1..{self.items}, got others")
            return
        self.offsets, self.item = offsets, item
