"""What formulas ask of a row's columns beside their log-sum-exp: how many there are, and the sum of their logits.

Both follow from ids and from sums of keys. No similarity of a row and a column of all rows is computed here.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fastcl.arithmetic import compute_dtype, dot

# Ids of rows [N] and of columns [M], of which equal ones exclude each other; or neither.
Match = tuple[Tensor | None, Tensor | None]


@dataclass(slots=True, eq=False, repr=False)  # each method is compiled at import
class Shared:
    """Columns that all rows have, less those excluded by `match`."""

    keys: Tensor  # [M, D]
    log_q: Tensor | None  # [M]; +inf marks empty slots of a queue
    match: Match
    size: int | Tensor  # how many of the M are negatives, where some are empty slots

    def count(self) -> Tensor | int:
        row_id, col_id = self.match
        if row_id is None or col_id is None:
            return self.size
        ordered = col_id.sort().values  # counting by search keeps memory at N + M
        return self.size - (torch.searchsorted(ordered, row_id, right=True) - torch.searchsorted(ordered, row_id))

    def total(self, query: Tensor, scale: float | Tensor) -> Tensor:
        """[N], the sum of the logits: linear in the keys, so that sums of keys will do."""
        wide = compute_dtype(query, self.keys)
        keys = self.keys.to(wide)
        key, log_q = self._sums(keys), None
        if self.log_q is not None:
            empty = self.log_q == torch.inf
            key = self._sums(keys.masked_fill(empty[:, None], 0.0))
            log_q = self._sums(self.log_q.to(wide).masked_fill(empty, 0.0)[:, None])[:, 0]
        total = dot(query, key) * scale
        return total if log_q is None else total - log_q

    def _sums(self, x: Tensor) -> Tensor:
        """[N or 1, ...], the sums of the rows of x [M, ...] that each row has."""
        row_id, col_id = self.match
        everything = x.sum(0, keepdim=True)
        if row_id is None or col_id is None or not len(x):
            return everything
        # The columns of one id are summed at the first place of the id among the sorted ids.
        ordered = col_id.sort().values
        m = ordered.shape[0]
        of_id = torch.zeros_like(torch.cat([x, x[:1]])).index_add(0, torch.searchsorted(ordered, col_id), x)
        place = torch.searchsorted(ordered, row_id)
        met = ordered[place.clamp(max=m - 1)] == row_id
        return everything - of_id[torch.where(met, place, m)]


@dataclass(slots=True, eq=False, repr=False)  # each method is compiled at import
class Private:
    """Columns that each row has of its own."""

    size: int
    excluded: Tensor | None  # bool [N, K]
    logits: Callable[[], Tensor]  # () -> [N, K]

    def count(self) -> Tensor | int:
        return self.size if self.excluded is None else self.size - self.excluded.sum(1)

    def total(self, query: Tensor, scale: float | Tensor) -> Tensor:
        logits = self.logits()
        return (logits if self.excluded is None else logits.masked_fill(self.excluded, 0.0)).sum(1)


Columns = Shared | Private


def counted(columns: list[Columns], n: int, device: torch.device) -> Tensor:
    """int64 [n], how many columns each row has."""
    total = torch.zeros(n, dtype=torch.int64, device=device)
    for each in columns:
        total = total + each.count()
    return total


def mean_logit(columns: list[Columns], query: Tensor, scale: float | Tensor, pos: Tensor) -> Tensor:
    """[N], the mean of the logits of a row's positive and of its columns."""
    total = pos
    for each in columns:
        total = total + each.total(query, scale).to(pos)
    return total / (1 + counted(columns, query.shape[0], query.device))
