"""Recommendations for a few histories or for all users of a log, with external ids as input and output.

`ranking.top_k` ranks and masks seen items. Nothing here trains.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from fastcl.recsys.data import PAD, Histories, Interactions, Items, Scorer
from fastcl.recsys.data.containers import number_array
from fastcl.recsys.data.ids import Ids
from fastcl.recsys.data.scoring import check_items, frozen
from fastcl.recsys.evaluation.cutoffs import Cutoffs, cutoff
from fastcl.recsys.evaluation.ranking import SEEN, rows_at_once, top_k
from fastcl.recsys.models import Model
from fastcl.recsys.models.base import check_model
from fastcl.recsys.options import one_of
from fastcl.recsys.serving.index import ItemIndex, check_belongs, open_index, suits, top_k_by

MAX_CHUNK = 256  # histories that are encoded or looked up at once

Row = list[tuple[str, float]]  # (external id, score), best first


class Recommendations(list[Row]):
    """One row per history. skipped: how often each id was skipped because the model does not know it. left_out: the
    indices of the histories without an item that the model knows; their rows are empty or those of a fallback.
    """

    skipped: Counter[str]
    left_out: tuple[int, ...]


class UserRecommendations(NamedTuple):
    """rows: yields (user, row) as rows are computed. left_out: the users without an item that the model knows."""

    rows: Iterator[tuple[str, Row]]
    skipped: Counter[str]
    left_out: tuple[str, ...]


def recommend(
    model: Model,
    histories: Sequence[Sequence[str]],
    k: Cutoffs = 10,
    seen: str = "mask",
    *,
    times: Sequence[Sequence[float]] | None = None,
    strict: bool = False,
    only: Sequence[str] | None = None,
    without: Sequence[str] = (),
    fallback: Scorer | None = None,
    index: str | Path | ItemIndex | None = None,
) -> Recommendations:
    """The k best items for each history (external ids, oldest first), as (external id, score), best first. Threads may
    share a model: it is only read.

    No user id is needed. A row is shorter than k where fewer items remain. A history without an item that the model
    knows gets the row of `fallback`; without `fallback` its row is empty, except that of `Popular`.

    Args:
        model: any `Model`. Scores are comparable within a row only.
        histories: sequences of ids. Ids that the model does not know are skipped and counted in the result's `skipped`.
        k: length of a row, >= 1.
        seen: "mask" recommends nothing from the history itself, "keep" may.
        times: one number per id, never falling, in the unit of the training data. CLRec and Multi-CLRec read them;
            without times they take all clicks as made at the same moment.
        strict: whether an unknown id in a history is an error.
        only: ids of the items that may be recommended (in stock, of one category, ...); None: all items. Ids that the
            model does not know are ignored.
        without: ids of items that must not be recommended.
        fallback: a scorer of the same items that ranks for histories without a known item, such as
            `Popularity(split.counts, split.items)`.
        index: a Faiss index of this model's items, or the folder of one (`export`, `open_index`): it is searched in
            place of scoring all items, so that the lists are those of exact search up to the index's recall, and scores
            those of its vectors. It is asked for more than k items, seen ones are left out, and a history of which it
            finds too few gets exact search, as all do where `only` allows less than half of the items. Each call checks
            that the index was made of the model's weights, in a `frozen` block the first one does.

    Raises TypeError for ids that are no strings, for a model or a fallback that is none; ValueError for a bad option,
    for times that do not match the histories, where the model knows no item of `only`, for an index of another model or
    of other weights, and under `strict` for an unknown id in a history.

    >>> from fastcl.recsys import Items, SASRec
    >>> model = SASRec(Items(ids=("a", "b", "c")), dim=8, seed=0).eval()
    >>> found = recommend(model, [["a", "new"]], k=5)
    >>> sorted(item for item, score in found[0]), found.skipped
    (['b', 'c'], Counter({'new': 1}))
    """
    k = cutoff(k)
    one_of(SEEN, "seen", seen)
    fallback = _fallback(model, fallback)
    allowed = _allowed(model.items, only, without)
    opened = _opened(index, model)
    histories = list(histories)
    known, skipped = encode_ids(model.items, histories, times, strict)
    found = Recommendations([] for _ in histories)
    found.skipped, found.left_out = skipped, tuple(np.flatnonzero(known.lengths == 0).tolist())
    for scorer, served in ((model, np.flatnonzero(known.lengths)), (fallback, np.array(found.left_out, np.int64))):
        if scorer is None or not len(served):
            continue
        ranked = _ranked(scorer, known.take(served), k, seen, allowed, opened if scorer is model else None)
        for nth, row in zip(served, (row for best in ranked for row in _rows(model.items, *best)), strict=True):
            found[nth] = row
    return found


def similar(
    model: Model, item: str, k: Cutoffs = 10, *, only: Sequence[str] | None = None, without: Sequence[str] = ()
) -> Row:
    """The k items whose vectors have the largest cosines with that of `item`, as (external id, cosine), best first. Of
    CoOccurring, which has no vectors, the cosines are those of the items' users.

    item: an external id that the model knows; it is never in its own list. only, without: as in `recommend`. Threads
    may share a model. Raises ValueError for an unknown id, a bad option, or a model without item vectors.

    >>> from fastcl.recsys import Items, SASRec
    >>> model = SASRec(Items(ids=("a", "b", "c")), dim=8, seed=0).eval()
    >>> sorted(other for other, cosine in similar(model, "a"))
    ['b', 'c']
    """
    k = cutoff(k)
    check_model(model)
    if not isinstance(item, str):
        raise TypeError(f"item: expected an id as a string, got {item!r}")
    (number,) = model.items.encode([item])
    if number == PAD:
        raise ValueError(f"item: expected an id that the model knows, got {item!r}")
    allowed = _allowed(model.items, only, without)
    with torch.inference_mode(), frozen(model):
        cosine = model.neighbours(int(number))[None]
        (row,) = _rows(model.items, *top_k(cosine, Histories.from_lists([[int(number)]]), k, "mask", allowed))
    return row


def recommend_users(
    model: Model,
    data: Interactions,
    k: Cutoffs = 10,
    seen: str = "mask",
    *,
    strict: bool = False,
    only: Sequence[str] | None = None,
    without: Sequence[str] = (),
    fallback: Scorer | None = None,
    index: str | Path | ItemIndex | None = None,
) -> UserRecommendations:
    """The k best items for every user of a log, in the order of the log; arguments and errors as in `recommend`. Memory
    does not grow with the number of users.

    Items are matched by external id, so that the log need not be the one that was trained on. Clicks in other logs are
    unknown, so that their items may be recommended; `merge` puts logs together. The result names the users without an
    item that the model knows; they have no row unless `fallback` ranks for them.

    >>> from fastcl.recsys import SASRec, bundled
    >>> data = bundled("purchases")
    >>> found = recommend_users(SASRec(data.items, dim=8, seed=0).eval(), data, k=3)
    >>> user, row = next(found.rows)
    >>> user == data.users[0], len(row)
    (True, 3)
    """
    k = cutoff(k)
    one_of(SEEN, "seen", seen)
    fallback = _fallback(model, fallback)
    if not isinstance(data, Interactions):
        what = f"data: expected Interactions, got {type(data).__name__}"
        raise TypeError(f"{what}; Interactions.read(FILE) reads a log" if isinstance(data, str | Path) else what)
    known, skipped = known_histories(model.items, data)
    _refuse(skipped, strict)
    allowed = _allowed(model.items, only, without)
    opened = _opened(index, model)
    strangers = np.flatnonzero(known.lengths == 0)
    left_out = tuple(data.users[user] for user in strangers.tolist())

    def rows() -> Iterator[tuple[str, Row]]:
        for start in range(0, len(known), MAX_CHUNK):
            users = np.arange(start, min(start + MAX_CHUNK, len(known)))
            met = known.lengths[users] > 0
            found: dict[int, Row] = {}
            for scorer, served in ((model, users[met]), (fallback, users[~met])):
                if scorer is None:
                    continue
                ranked = _ranked(scorer, known.take(served), k, seen, allowed, opened if scorer is model else None)
                found |= dict(zip(served, (r for best in ranked for r in _rows(model.items, *best)), strict=True))
            yield from ((data.users[user], found[user]) for user in users.tolist() if user in found)

    return UserRecommendations(rows(), skipped, left_out)


def query_vectors(
    model: Model,
    histories: Sequence[Sequence[str]],
    *,
    times: Sequence[Sequence[float]] | None = None,
    strict: bool = False,
) -> np.ndarray:
    """float32 [B, D], queries for an index of item vectors that `export` wrote: inner products are the model's scores.

    A model with K vectors per history (MultiCLRec) gives [B, K, D]; its score is the largest of K inner products, and
    `fastcl.recsys.nearest` searches with such queries. Threads may share a model. Arguments and errors as in
    `recommend`; a history without an item that the model knows has no vector and is a ValueError.

    >>> from fastcl.recsys import Items, SASRec
    >>> query_vectors(SASRec(Items(ids=("a", "b", "c")), dim=8, seed=0).eval(), [["a", "b"]]).shape
    (1, 8)
    """
    check_model(model)
    histories = list(histories)
    known, _ = encode_ids(model.items, histories, times, strict)
    if len(known) and not known.lengths.all():
        row = int(known.lengths.argmin())
        got = list(histories[row])[:5]
        raise ValueError(f"histories: expected an item that the model knows in row {row}, got {got}")
    with torch.inference_mode(), frozen(model):
        return model.encode(known).float().numpy(force=True)


def encode_ids(
    items: Items, histories: Sequence[Sequence[str]], times: Sequence[Sequence[float]] | None, strict: bool
) -> tuple[Histories, Counter[str]]:
    """The histories without unknown ids, some perhaps empty, and how often each unknown id was left out."""
    for row, history in enumerate(histories):
        if isinstance(history, str):
            raise TypeError(f"histories: expected sequences of ids, got the string {history!r} in row {row}")
        for item in history:
            if not isinstance(item, str):
                raise TypeError(f"histories: expected ids as strings, got {item!r} in row {row}")
    ids = [item for history in histories for item in history]
    number = items.encode(ids)
    skipped = Counter(item for item, n in zip(ids, number.tolist(), strict=True) if n == PAD)
    _refuse(skipped, strict)
    offsets = np.cumsum([0, *map(len, histories)], dtype=np.int64)
    known = _known(items, offsets, number, None if times is None else _times(times, offsets))
    return known, skipped


def known_histories(items: Items, data: Interactions) -> tuple[Histories, Counter[str]]:
    """A log's histories in the numbers of `items`, some perhaps empty, and how often each unknown id was left out."""
    number = np.append(PAD, items.encode(data.items.ids))
    clicks = np.bincount(data.log.item, minlength=len(number))
    unknown = np.flatnonzero((number[1:] == PAD) & (clicks[1:] > 0))
    skipped = Counter({data.items.ids[item]: int(clicks[item + 1]) for item in unknown.tolist()})
    return _known(items, data.log.offsets, number[data.log.item], data.log.time, data.log.users), skipped


def rank(
    scorer: Scorer, histories: Histories, k: int, seen: str, chunk: int = MAX_CHUNK
) -> tuple[torch.Tensor, torch.Tensor]:
    """`top_k` of a scorer over one or more histories: (items int64 [B, K], scores [B, K]), memory O(chunk * I)."""
    parts = list(_chunks(scorer, histories, k, seen, chunk))
    return torch.cat([items for items, _ in parts]), torch.cat([scores for _, scores in parts])


def _fallback(model: Model, fallback: Scorer | None) -> Scorer | None:
    """What ranks for histories without a known item. TypeError where one of the two is none of its kind."""
    check_model(model)
    if fallback is None:
        return model if getattr(model, "serves_strangers", False) else None
    if not callable(getattr(fallback, "scores", None)):
        what = "a scorer such as Popularity(split.counts, split.items)"
        raise TypeError(f"fallback: expected {what}, got {fallback!r}")
    if isinstance(fallback, Model) and fallback.learns:
        raise ValueError(f"fallback: expected a scorer that needs no history, got {fallback.name}")
    return fallback


def _opened(index: str | Path | ItemIndex | None, model: Model) -> ItemIndex | None:
    if index is None:
        return None
    opened = index if isinstance(index, ItemIndex) else open_index(index)
    with torch.inference_mode(), frozen(model):
        check_belongs(opened, model)
    return opened


def _ranked(
    scorer: Scorer,
    histories: Histories,
    k: int,
    seen: str,
    allowed: torch.Tensor,
    index: ItemIndex | None = None,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    if index is not None and isinstance(scorer, Model) and suits(index, allowed):
        return _found(index, scorer, histories, k, seen, allowed)
    return _chunks(scorer, histories, k, seen, rows_at_once(len(allowed)), allowed)


def _allowed(items: Items, only: Sequence[str] | None, without: Sequence[str]) -> torch.Tensor:
    """bool [I+1], the items that may be recommended."""
    allowed = np.ones(len(items) + 1, bool)
    for name, ids in (("only", only), ("without", without)):
        if ids is None:
            continue
        ids = ids if isinstance(ids, str) else list(ids)
        if isinstance(ids, str) or not all(isinstance(item, str) for item in ids):
            raise TypeError(f"{name}: expected a sequence of ids as strings, got {ids!r}")
        numbers = items.encode(ids)
        if name == "without":
            allowed[numbers[numbers != PAD]] = False
        elif not numbers.any():
            raise ValueError(f"only: expected an item that the model knows, got {ids[:5]}")
        else:
            allowed[:] = False
            allowed[numbers] = True
    allowed[PAD] = False
    return torch.from_numpy(allowed)


def _chunks(
    scorer: Scorer, histories: Histories, k: int, seen: str, chunk: int, allowed: torch.Tensor | None = None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    check_items(scorer, histories, "histories")
    for start in range(0, len(histories), chunk):
        rows = histories.take(np.arange(start, min(start + chunk, len(histories))))
        with torch.inference_mode(), frozen(scorer):  # ends before the yield, which hands control to the caller
            scores = scorer.scores(rows)
            if allowed is not None and scores.shape[1] != len(allowed):
                what = f"scores of {len(allowed) - 1:,} items, got those of {scores.shape[1] - 1:,}"
                raise ValueError(f"fallback: expected {what}")
            best = top_k(scores, rows, k, seen, allowed)
        yield best


def _found(
    index: ItemIndex, model: Model, histories: Histories, k: int, seen: str, allowed: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    check_items(model, histories, "histories")

    def exact(some: Histories) -> tuple[torch.Tensor, torch.Tensor]:
        parts = list(_ranked(model, some, k, seen, allowed))
        return torch.cat([items for items, _ in parts]), torch.cat([scores for _, scores in parts])

    for start in range(0, len(histories), MAX_CHUNK):
        rows = histories.take(np.arange(start, min(start + MAX_CHUNK, len(histories))))
        with torch.inference_mode(), frozen(model):
            queries = model.encode(rows).float().numpy(force=True)
        yield top_k_by(index, queries, rows, k, seen, allowed, exact)


def _rows(items: Items, found: torch.Tensor, scores: torch.Tensor) -> list[Row]:
    return [
        [(items.ids[item - 1], score) for item, score in zip(*row, strict=True) if item != PAD]
        for row in zip(found.tolist(), scores.tolist(), strict=True)
    ]


def _known(
    items: Items,
    offsets: np.ndarray,
    number: np.ndarray,
    time: np.ndarray | None,
    users: np.ndarray | Ids | None = None,
) -> Histories:
    """Histories without the unknown items, whose number is 0."""
    keep = number != PAD
    before = np.append(0, np.cumsum(keep))
    return Histories(before[offsets].astype(np.int64), number[keep], None if time is None else time[keep], items, users)


def _times(times: Sequence[Sequence[float]], offsets: np.ndarray) -> np.ndarray:
    if [len(row) for row in times] != np.diff(offsets).tolist():
        raise ValueError("times: expected as many times as ids in each row, got other lengths")
    try:
        time = number_array([moment for row in times for moment in row])
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"times: expected numbers, in the unit of the training data ({error})") from error
    falls = np.flatnonzero(~(time[1:] >= time[:-1])) + 1
    falls = falls[~np.isin(falls, offsets)]  # a row's first time may be less than the last time of the row above
    if not np.isfinite(time).all() or len(falls):
        at = int(falls[0]) if len(falls) else int(np.isfinite(time).argmin())
        row = int(np.searchsorted(offsets, at, side="right")) - 1
        raise ValueError(f"times: expected numbers that never fall, got {time[at]} in row {row}")
    return time


def _refuse(skipped: Counter[str], strict: bool) -> None:
    if strict and skipped:
        named = ", ".join(map(repr, list(skipped)[:5])) + (", ..." if len(skipped) > 5 else "")
        raise ValueError(f"histories: expected known items only (strict), got {len(skipped)} unknown: {named}")
