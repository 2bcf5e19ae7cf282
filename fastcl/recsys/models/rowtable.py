"""A table of vectors of which a step of training reads and moves some rows only, and when a model's items are kept in
one.

What fetches and moves the rows is training/rowadam.py; nothing here knows what the rows are of.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastcl import pages
from fastcl.recsys.options import above

ROWS_FROM = 100_000  # items from which on a step is cheaper by rows
TABLES = ("auto", "dense", "rows")
TABLE_MEANING = f"""How the item table is trained. "dense": its gradient and the optimiser's step are of all items.
    "rows": of those that a batch reads, with the result of Adam over all of them; several processes share out the rows.
    "auto": rows from {ROWS_FROM:,} items on, where no other setting asks for all items at each step."""
RULES = ("adam", "rowwise-adagrad")
RULE_MEANING = """The optimiser of a table of rows. "adam": that of all other weights. "rowwise-adagrad": Adagrad with
    one sum of squares an item, which keeps a third of Adam's memory."""
RATE_MEANING = """Learning rate of a table of rows, as a multiple of lr. Row-wise Adagrad asks for 10 to 30."""


class Held(NamedTuple):
    """The rows that lookups find while a model trains."""

    ids: Tensor  # int64 [U], distinct and rising
    rows: Tensor  # [U, D]


def of_items(held: Held, items: int) -> Held:
    """Those of the rows that are of the items 1..items: not of padding, which is row 0, nor of a token behind them."""
    first, end = torch.searchsorted(held.ids, held.ids.new_tensor([1, items + 1])).tolist()
    return Held(held.ids[first:end], held.rows[first:end])


class RowTable(nn.Embedding):
    """weight [rows, dim], drawn from N(0, std^2). While a model trains, lookups find the rows that were fetched for the
    batch (`held`), and these have the gradient; at all other times they find `weight`. A loss over all rows has those
    of this process in `own`, with a gradient too.

    rule: of RULES; rate: its learning rate, as a multiple of that of other weights.

    >>> table = RowTable(3, 2, std=0.1)
    >>> table(torch.tensor([2, 0])).shape
    torch.Size([2, 2])
    """

    held: Held | None = None
    own: Held | None = None

    def __init__(
        self, rows: int, dim: int, std: float, rule: str = "adam", rate: float = 1.0, padding_idx: int | None = None
    ) -> None:
        like = torch.empty(0)  # of the default dtype and device
        weight = pages.zeros((rows, dim), like.dtype, like.device).normal_().mul_(std)
        super().__init__(rows, dim, padding_idx=padding_idx, _weight=weight)
        self.weight.requires_grad_(False)
        self.rule, self.rate = rule, rate

    def forward(self, ids: Tensor) -> Tensor:
        if self.held is None:
            return F.embedding(ids, self.weight)
        known, rows = self.held
        place = torch.searchsorted(known, ids)
        found = place.clamp(max=max(len(known) - 1, 0))
        missing = ids != known[found] if len(known) else torch.ones_like(ids, dtype=torch.bool)
        if missing.any():
            raise ValueError(f"reads: expected all rows that the loss looks up, got none of {int(ids[missing][0])}")
        padding = None if self.padding_idx is None or not len(known) or known[0] != self.padding_idx else 0
        return F.embedding(found, rows, padding_idx=padding)


def chosen(table: str, items: int, needs_all: str) -> str:
    """"dense" or "rows" for a setting of TABLES. needs_all: why each step needs all items; "" where none does.

    ValueError where "rows" is asked for and each step needs all items.
    """
    if table == "rows" and needs_all:
        raise ValueError(f"table: expected dense, for {needs_all} reads all items at each step, got rows")
    if table != "auto":
        return table
    return "rows" if items >= ROWS_FROM and not needs_all else "dense"


def embedding(
    table: str, rows: int, dim: int, rule: str, rate: float, padding_idx: int | None = None
) -> nn.Embedding:
    """Of the kind that `chosen` gave; both begin with the same weights."""
    if table == "dense":
        return nn.Embedding(rows, dim, padding_idx=padding_idx)
    return RowTable(rows, dim, 1.0, rule, rate, padding_idx)


def check_table(rate: float) -> None:
    above(0.0, "table_rate", rate)
