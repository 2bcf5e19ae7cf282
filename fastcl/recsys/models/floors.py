"""Floors: scorers that learn nothing, whose metrics are printed beside those of every model (popularity, co-occurrence,
personal frequency). They read train data only and store nothing of size I x I."""

from __future__ import annotations

import numpy as np
import torch

from fastcl.recsys.data import PAD, Histories, Items

DECAY, STEPS, MIX = 0.6, 5, 1.0  # of co-occurrence


class Popularity:
    """Scores every item by its clicks in train.

    counts: int64 [I+1]. items: the item table that numbers the items. With it, histories of another table are refused
    and recommended lists hold external ids.
    """

    def __init__(self, counts: np.ndarray, items: Items | None = None) -> None:
        self.items = _matching(items, counts)
        self._scores = torch.from_numpy(np.asarray(counts)).float()
        self._scores[PAD] = -torch.inf

    def scores(self, histories: Histories) -> torch.Tensor:
        """float32 [B, I+1], the same row for every history."""
        return self._scores.repeat(len(histories), 1)


class PersonalFrequency:
    """Scores every item by how often it occurs in the history; of equally frequent items, the one with more clicks in
    train is first.

    The floor for logs with repeats, evaluated with seen="keep". counts, items: as in `Popularity`. decay: the weight of
    an occurrence is decay ** (number of later clicks); 1 counts all alike.
    """

    def __init__(self, counts: np.ndarray, items: Items | None = None, decay: float = 1.0) -> None:
        self._decay = decay
        self.items = _matching(items, counts)
        # Ranks among the distinct counts order items as the counts do, but stay below 1 and distinct in float32.
        levels, level = np.unique(counts, return_inverse=True)
        self._tie = torch.from_numpy(level / len(levels)).float()
        self._tie[PAD] = -torch.inf

    def scores(self, histories: Histories) -> torch.Tensor:
        """float32 [B, I+1]: the place of the item's weight among the distinct ones of the history, from 1 for the
        smallest, or 0 for an item that is not in it, + a fraction below 1 that rises with popularity.
        """
        columns = len(self._tie)
        row, age = _row_and_age(histories)
        pair, nth = np.unique(row * columns + histories.item, return_inverse=True)
        weight = np.bincount(nth, self._decay**age, len(pair))
        row, item = np.divmod(pair, columns)
        order = np.lexsort((weight, row))
        row, item, weight = row[order], item[order], weight[order]
        first = np.diff(row, prepend=-1) > 0
        # Weights of items that occur equally often, or at the same ages, may differ by rounding.
        above = first | (np.diff(weight, prepend=0.0) > 1e-12 * weight)
        level = np.cumsum(above)
        begins: np.ndarray = np.maximum.accumulate(np.where(first, level, 0))
        return self._tie + _sparse(row, item, level - begins + 1, (len(histories), columns)).to_dense()


class CoOccurrence:
    """Cosine co-occurrence plus transitions, both counted in train. For a history h_1 ... h_n (newest last)

        score(j) = sum_t 0.6^(n-t) * (cos(h_t, j) + next(h_t, j))
        cos(i, j)  = users with both i and j / sqrt(users with i * users with j)
        next(i, j) = sum over s = 1, ..., 5 of 0.6^(s-1) * times j came s clicks after i / sqrt(clicks of i)

    The weights are the best of 40 variants in validation (benchmarks/choices.py). A variant's figure is its NDCG@10
    divided by that of the data set's best variant, averaged over eight data sets: 0.954 with the weights above, 0.951
    with decay 0.8, 0.934 with decay 0.8 and three steps.

    train: histories. n_items: I. decay, steps, mix: 0.6, the number of steps and the weight of `next` in the formula.
    Scoring multiplies sparse matrices with dense [I, B] or [users, B] ones, so memory is
    O(P + B * (I + users)) and the I x I matrix never exists.
    """

    def __init__(
        self, train: Histories, n_items: int, *, decay: float = DECAY, steps: int = STEPS, mix: float = MIX
    ) -> None:
        self.decay = decay
        self.items = train.items  # the item table, or None where the histories do not know theirs
        users, self._columns = len(train), n_items + 1
        row = np.repeat(np.arange(users), train.lengths)
        pair = np.unique(row * self._columns + train.item)
        user, item = pair // self._columns, pair % self._columns
        norm = 1.0 / np.sqrt(np.maximum(np.bincount(item, minlength=self._columns), 1))
        self._by_user = _sparse(user, item, norm[item], (users, self._columns))
        self._by_item = _sparse(item, user, norm[item], (self._columns, users))
        clicks = np.maximum(np.bincount(train.item, minlength=self._columns), 1)
        source, destination, weight = [], [], []
        for step in range(1, steps + 1):
            same = row[step:] == row[:-step]
            source.append(train.item[:-step][same])
            destination.append(train.item[step:][same])
            weight.append(mix * decay ** (step - 1) / np.sqrt(clicks[source[-1]]))
        shape = (self._columns, self._columns)
        self._next = _sparse(np.concatenate(destination), np.concatenate(source), np.concatenate(weight), shape)

    def scores(self, histories: Histories) -> torch.Tensor:
        """float32 [B, I+1]; 0 for an item that never occurs with an item of the history."""
        weights = _weights(histories, self._columns, self.decay).t().to_dense()
        cosine = torch.sparse.mm(self._by_item, torch.sparse.mm(self._by_user, weights))
        scores = (cosine + torch.sparse.mm(self._next, weights)).t().contiguous()
        scores[:, PAD] = -torch.inf
        return scores

    def cosines(self, item: int) -> torch.Tensor:
        """float32 [I+1], cos(item, j) for each item j; 0 for padding."""
        one = torch.zeros(self._columns, 1, dtype=torch.float32, device=self._by_item.device)
        one[item] = 1.0
        return torch.sparse.mm(self._by_item, torch.sparse.mm(self._by_user, one))[:, 0]


def _matching(items: Items | None, counts: np.ndarray) -> Items | None:
    if items is not None and len(counts) != len(items) + 1:
        rows = len(items) + 1
        raise ValueError(f"counts: expected int64 [{rows}], one for padding and each item, got [{len(counts)}]")
    return items


def _weights(histories: Histories, columns: int, decay: float) -> torch.Tensor:
    """Sparse [B, columns]: for each item the sum over its occurrences of decay^(number of later clicks in the row)."""
    row, age = _row_and_age(histories)
    return _sparse(row, histories.item, decay**age, (len(histories), columns))


def _row_and_age(histories: Histories) -> tuple[np.ndarray, np.ndarray]:
    """Of each click: the row of its history, and the number of later clicks in it."""
    row = np.repeat(np.arange(len(histories)), histories.lengths)
    return row, np.repeat(histories.offsets[1:], histories.lengths) - 1 - np.arange(len(histories.item))


def _sparse(row: np.ndarray, column: np.ndarray, value: np.ndarray, shape: tuple[int, int]) -> torch.Tensor:
    index = torch.from_numpy(np.stack([row, column]))
    return torch.sparse_coo_tensor(index, torch.from_numpy(value).float(), shape, check_invariants=True).coalesce()
