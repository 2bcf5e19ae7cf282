"""Batches of a packed click log: spans as packed rows, and a map into padded blocks of spans of about equal lengths,
for layers that need padding.

Vectorised bookkeeping over integer arrays. Models decide what the rows mean; all randomness comes from the generator
that is passed in.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastcl.recsys.data import Histories

NARROW = 8  # all spans up to this length share one block; a block of longer spans is at most half padding
TOGETHER = 32  # a value of batched's sorted_together: a larger one means less padding and less mixing


class Spans(NamedTuple):
    """Pieces log.item[start:stop] of a packed log; `row` is the history that each piece is cut from."""

    start: np.ndarray  # int64 [S]
    stop: np.ndarray  # int64 [S]
    row: np.ndarray  # int64 [S]

    @property
    def total(self) -> int:
        return len(self.start)

    def take(self, which: np.ndarray) -> "Spans":
        return Spans(self.start[which], self.stop[which], self.row[which])


class Block(NamedTuple):
    """A group of b spans, padded to the longest of them."""

    length: Tensor  # int64 [b]
    width: int


class Packed(NamedTuple):
    """n clicks of B spans back to back, and the place of each click in padded blocks that lie back to back: one block
    [B, L], or several, in each of which the lengths beyond NARROW differ by less than a factor of two.
    """

    source: np.ndarray  # int64 [n], into the packed log
    row: Tensor  # int64 [n], 0..B-1
    position: Tensor  # int64 [n], 0 for the oldest click of its span
    length: Tensor  # int64 [B], each >= 1
    place: Tensor  # int64 [n], in the blocks
    blocks: tuple[Block, ...]

    @property
    def width(self) -> int:
        """L, the longest span."""
        return int(self.length.max())

    @property
    def last(self) -> Tensor:
        """[B], the packed row of each span's newest click."""
        return self.length.cumsum(0) - 1

    def pad(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """[n, ...] -> [B, L, ...], with `fill` behind the last click of each shorter span."""
        block = x.new_full((len(self.length) * self.width, *x.shape[1:]), fill)
        at = self.row * self.width + self.position
        return block.index_copy_(0, at, x).unflatten(0, (len(self.length), self.width))

    def by_length(self, x: Tensor, f: Callable[[Tensor, int], Tensor]) -> Tensor:
        """[n, ...] -> [n, ...] by a function f of one padded block [b, L, ...] and its number; f keeps b and L."""
        sizes = [len(block.length) * block.width for block in self.blocks]
        parts = x.new_zeros(sum(sizes), *x.shape[1:]).index_copy_(0, self.place, x).split(sizes)
        done = [
            f(part.unflatten(0, (-1, block.width)), nth).flatten(0, 1)
            for nth, (part, block) in enumerate(zip(parts, self.blocks, strict=True))
        ]
        return torch.cat(done).index_select(0, self.place)


class Padded(Packed):
    """Clicks [B, L] with padding behind the newest click of each row, as B * L packed clicks in one block: the form in
    which a user encoder becomes a graph, whose shapes must not depend on lengths. What is computed at padding is never
    read; its position is that of the newest click, so that tables of positions are long enough.
    """

    @classmethod
    def of(cls, length: Tensor, width: int) -> "Padded":
        """length: int64 [B], 1..width."""
        rows = length.shape[0]  # never len(), which would fix the number of rows in a graph
        count = functools.partial(torch.arange, device=length.device)
        position = torch.minimum(count(width), length[:, None] - 1).flatten()
        row = count(rows)[:, None].expand(-1, width).flatten()
        return cls(np.empty(0, np.int64), row, position, length, count(rows * width), (Block(length, width),))

    @property
    def width(self) -> int:
        return self.blocks[0].width

    @property
    def last(self) -> Tensor:
        return torch.arange(self.length.shape[0], device=self.length.device) * self.width + self.length - 1

    def pad(self, x: Tensor, fill: float = 0.0) -> Tensor:
        block = x.unflatten(0, (self.length.shape[0], self.width))
        padding = torch.arange(self.width, device=x.device) >= self.length[:, None]
        return block.masked_fill(padding.unflatten(1, (self.width, *[1] * (x.dim() - 1))), fill)

    def by_length(self, x: Tensor, f: Callable[[Tensor, int], Tensor]) -> Tensor:
        return f(x.unflatten(0, (self.length.shape[0], self.width)), 0).flatten(0, 1)


def pack(spans: Spans, device: torch.device | str = "cpu") -> Packed:
    def there(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device)

    length = spans.stop - spans.start
    row = np.repeat(np.arange(len(length)), length)
    position = np.arange(len(row)) - np.repeat(length.cumsum() - length, length)
    kind = np.ceil(np.log2(np.maximum(length, NARROW)))
    order = np.argsort(kind, kind="stable")
    count = np.unique(kind, return_counts=True)[1]
    width = np.maximum.reduceat(length[order], count.cumsum() - count)
    wide = np.repeat(width, count)
    start = np.empty_like(length)
    start[order] = wide.cumsum() - wide
    place = there(np.repeat(start, length) + position)
    blocks = map(Block, there(length[order]).split(count.tolist()), width.tolist())
    return Packed(spans.start[row] + position, there(row), there(position), there(length), place, tuple(blocks))


def newest(histories: Histories, length: int) -> Spans:
    """The newest `length` clicks of every history; ValueError where a history is empty."""
    if (histories.lengths < 1).any():
        raise ValueError(
            f"histories: expected at least one click each, got none in row {int(histories.lengths.argmin())}"
        )
    stop = histories.offsets[1:]
    return Spans(np.maximum(histories.offsets[:-1], stop - length), stop, np.arange(len(histories)))


def time_buckets(histories: Histories, spans: Spans, clicks: Packed, cuts: Sequence[float]) -> np.ndarray:
    """int64 [n], how many of the rising `cuts` are at most the time from a click to the newest click of its span. All
    are 0 where the histories have no times.
    """
    if histories.time is None:
        return np.zeros(len(clicks.source), np.int64)
    latest = np.repeat(histories.time[spans.stop - 1], spans.stop - spans.start)
    return np.searchsorted(cuts, latest - histories.time[clicks.source], side="right")


def windows(histories: Histories, length: int) -> Spans:
    """Every history cut from its end into spans of at most length + 1 clicks that share one click with their neighbour.

    A span of n + 1 clicks holds n pairs (input, next click), so that every click but a history's first is a target
    exactly once.
    """
    targets = np.maximum(histories.lengths - 1, 0)
    count = -(-targets // length)
    row = np.repeat(np.arange(len(histories)), count)
    nth = np.arange(len(row)) - np.repeat(count.cumsum() - count, count)
    stop = histories.offsets[1:][row] - nth * length
    return Spans(np.maximum(histories.offsets[:-1][row], stop - length - 1), stop, row)


class Prefixes:
    """For every click but a history's first, a span of the newest `length` clicks before it; the click is at `stop`.
    Spans are made when they are taken: of fifty million clicks they would fill gigabytes.
    """

    def __init__(self, histories: Histories, length: int) -> None:
        self._offsets, self._length = histories.offsets, length
        self._upto = np.maximum(histories.lengths - 1, 0).cumsum()  # spans up to and with each history

    @property
    def total(self) -> int:
        return int(self._upto[-1]) if len(self._upto) else 0

    def take(self, which: np.ndarray) -> Spans:
        row = np.searchsorted(self._upto, which, side="right")
        stop = self._offsets[row + 1] - self._upto[row] + which
        return Spans(np.maximum(self._offsets[row], stop - self._length), stop, row)

    def all(self) -> Spans:
        return self.take(np.arange(self.total))


def batched(
    spans: Spans | Prefixes,
    batch: int,
    rng: np.random.Generator,
    share: tuple[int, int] = (0, 1),
    sorted_together: int = 1,
) -> Iterator[Spans]:
    """All spans once, in random batches.

    share: (r, n) keeps part r of n of each batch. Parts differ by at most one span in size and little in total length.
        The parts that generators of the same state give in n processes make up the batch. A part may be empty.
    sorted_together: the number of batches whose spans are sorted by length as one group, which saves padding. It is for
        spans with one target each. Where every click is a target, the mean over a batch of short spans would weigh
        each target more than the mean over a batch of long spans.
    """
    total = spans.total
    order = np.arange(total, dtype=np.int32 if total < 2**31 else np.int64)
    rng.shuffle(order)
    group = batch * sorted_together
    sorted_ = np.zeros(-(-total // group), bool)  # a group is sorted when its first batch is taken
    first, step = share
    for nth in rng.permutation(-(-total // batch)):
        begin = nth * batch // group * group
        if not sorted_[begin // group]:
            chunk = order[begin : begin + group]
            some = spans.take(chunk)
            order[begin : begin + group] = chunk[np.argsort(some.stop - some.start, kind="stable")]
            sorted_[begin // group] = True
        yield spans.take(order[nth * batch : (nth + 1) * batch][first::step])


def batch_count(spans: Spans | Prefixes, batch: int) -> int:
    """The number of batches that `batched` yields, whatever sorted_together is."""
    return -(-spans.total // batch)


def log_shares(train: Histories, n_items: int, weight: np.ndarray | None = None) -> Tensor:
    """float32 [I], the log of each item's share of the clicks, with one click added to every item.

    weight: [P], what each click counts; None: 1.
    """
    counts = 1.0 + np.bincount(train.item, weight, n_items + 1)[1:]
    return torch.from_numpy(np.log(counts / counts.sum())).float()


def drawing(log_share: Tensor, power: float, rng: np.random.Generator) -> Callable[[tuple[int, ...]], np.ndarray]:
    """A function from shapes to int64 items in proportion to share ** power. All items' powers are summed at the first
    shape that is not empty: at ten million items the sums take as long as several batches.
    """
    upto = functools.cache(lambda: np.cumsum(np.exp(power * log_share.double().numpy(force=True))))

    def draw(shape: tuple[int, ...]) -> np.ndarray:
        if 0 in shape:
            return np.zeros(shape, np.int64)
        return 1 + np.searchsorted(upto()[:-1], rng.random(shape) * upto()[-1], side="right")

    return draw


class Unclicked:
    """Draws uniformly from the items that a history does not contain. It rejects no draw, so that its cost does not
    depend on the length of the history.
    """

    def __init__(self, histories: Histories, n_items: int) -> None:
        row = np.repeat(np.arange(len(histories)), histories.lengths)
        clicked = np.unique(row * (n_items + 1) + histories.item)  # sorted by row, then item
        row, item = np.divmod(clicked, n_items + 1)
        self._count = np.bincount(row, minlength=len(histories))
        self._first = self._count.cumsum() - self._count
        # For each clicked item, how many unclicked items of its row lie below it. A multiple of I + 1 keeps the rows
        # apart, so that one search serves all rows.
        self._below = row * (n_items + 1) + item - 1 - (np.arange(len(row)) - self._first[row])
        self._n_items = n_items

    def draw(self, row: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """One item for each entry of row [n]; padding (0) where a history holds every item."""
        free = self._n_items - self._count[row]
        rank = (rng.random(len(row)) * free).astype(np.int64)  # which of the unclicked items, from 0
        skipped = np.searchsorted(self._below, row * (self._n_items + 1) + rank, side="right") - self._first[row]
        return np.where(free > 0, rank + skipped + 1, 0)
