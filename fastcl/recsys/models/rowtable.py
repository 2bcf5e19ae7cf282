"""A table of vectors of which a training step reads and updates some rows only; training/rowadam.py updates them."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RowTable(nn.Module):
    """weight [rows, dim], drawn from N(0, std^2). The gradient of a lookup is sparse: it holds the rows that were read.

    before: a function that the optimiser sets to update rows that are about to be read; None outside of training.

    >>> table = RowTable(3, 2, std=0.1)
    >>> table(torch.tensor([2, 0])).shape
    torch.Size([2, 2])
    """

    before: Callable[[Tensor], None] | None = None

    def __init__(self, rows: int, dim: int, std: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, dim) * std)

    def forward(self, ids: Tensor) -> Tensor:
        if self.before is not None:
            self.before(ids)
        return F.embedding(ids, self.weight, sparse=True)
