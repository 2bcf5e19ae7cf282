"""Ranking metrics for one target a case: full ranking in chunks, and 100 popularity-drawn negatives. The mask of seen
items lives here and nowhere else; nothing here trains, changes a scorer's mode or loops over users in Python."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from .data import PAD, Cases, Histories, Scorer

NEGATIVES = 100
SEEN = ("mask", "keep")


def evaluate(
    scorer: Scorer,
    cases: Cases,
    *,
    counts: np.ndarray,
    k: tuple[int, ...] = (10,),
    seen: str = "mask",
    protocol: str = "full",
    seed: int = 0,
    chunk: int = 256,
) -> dict[str, float]:
    """Mean metrics over all cases.

    scorer:   has `scores(histories)`, float [B, I+1]; put a model into eval mode before.
    counts:   int64 [I+1], clicks of each item in train (`split.counts`).
    k:        cut-offs. seed: of the negatives ("pop100" only). chunk: cases scored at once; memory is O(chunk * I).
    seen:     "mask" puts the items of a case's history at -inf, its target too if it is a repeat; "keep" ranks them.
    protocol: "full" ranks all items and gives "recall@k", "ndcg@k", "diversity@k" (distinct items in all top-k lists)
              and "popularity@k" (mean train count of a recommended item).
              "pop100" ranks the target among `draw_negatives` and gives "hr@k" and "ndcg@k".

    With one target, recall@k = HR@k = 1 where rank <= k and NDCG@k = 1 / log2(rank + 1) there, else 0. Ties count half:
    rank = 1 + #higher + 0.5 * #equal others, so a constant scorer gets no credit for the order of the ids. A target at
    -inf is never recommended and is a miss at every k, under ties too.

    Raises ValueError for a bad option, no cases, scores of a wrong shape, or a NaN score.

    >>> from fastcl.recsys.data import bundled
    >>> from fastcl.recsys.floors import Popularity
    >>> split = bundled("movies").split()
    >>> round(evaluate(Popularity(split.counts), split.test, counts=split.counts)["recall@10"], 4)
    0.0417
    """
    _check_options(k, seen, chunk)
    if protocol not in _PROTOCOLS:
        raise ValueError(f"protocol: expected one of {', '.join(map(repr, _PROTOCOLS))}, got {protocol!r}")
    counts = np.asarray(counts)
    if counts.ndim != 1 or counts.dtype.kind not in "iu":
        raise ValueError(f"counts: expected an integer vector [I+1], got {counts.dtype} {list(counts.shape)}")
    if not len(cases):
        raise ValueError("cases: expected at least one, got none")
    with torch.inference_mode():
        return _PROTOCOLS[protocol](scorer, cases, counts, k, seen, seed, chunk)


def top_k(scores: torch.Tensor, history: Histories, k: int, seen: str = "mask") -> tuple[torch.Tensor, torch.Tensor]:
    """The k best items of each row: (items int64 [B, K], scores [B, K]), best first, K = min(k, I).

    scores: [B, I+1]. seen: "mask" leaves out the items of the row's history. Where fewer than K items are left, the
    rest of the row is item 0 with score -inf. The order among equal scores is unspecified.

    >>> top_k(torch.tensor([[-torch.inf, 3.0, 2.0, 1.0]]), Histories.from_lists([[1]]), k=2)[0].tolist()
    [[2, 3]]
    """
    _check_options((k,), seen, 1)
    return _best(mask_seen(scores, history, seen), k)


def mask_seen(scores: torch.Tensor, history: Histories, seen: str) -> torch.Tensor:
    """A copy of scores [B, I+1] with padding, and under seen="mask" the items of each row's history, at -inf."""
    if scores.ndim != 2 or len(scores) != len(history):
        raise ValueError(f"scores: expected [{len(history)}, I+1], one row a history, got {list(scores.shape)}")
    if torch.isnan(scores.amax(1)).any():  # a maximum passes NaN on, and is cheaper than a look at every score
        raise ValueError("scores: expected numbers, got NaN")
    masked = scores.clone(memory_format=torch.contiguous_format)
    masked[:, PAD] = -torch.inf
    if seen == "mask":
        masked[_rows(history).to(scores.device), torch.from_numpy(history.item).to(scores.device)] = -torch.inf
    return masked


def draw_negatives(
    history: Histories, target: np.ndarray, counts: np.ndarray, rng: np.random.Generator, seen: str = "mask"
) -> np.ndarray:
    """100 negatives a row: int64 [B, 100], drawn without replacement in proportion to the train counts.

    Never drawn: the target, items without a train click, and under seen="mask" any item of the row's history. Under
    "keep" the history stays eligible, since there it competes with the target too. A row with fewer than 100 eligible
    items gets them all, and 0 in the places left.

    The draw is exact: the 100 smallest of independent exponentials with rates counts[i] are 100 successive draws
    without replacement in proportion to counts (Gumbel-top-k in another scale).
    """
    pool = np.flatnonzero(counts[1:]) + 1
    place = np.full(len(counts), len(pool))  # items without a click: the extra last column, cut off again
    place[pool] = np.arange(len(pool))
    arrival = np.full((len(target), len(pool) + 1), np.inf)
    arrival[:, :-1] = rng.standard_exponential((len(target), len(pool)))
    arrival[:, :-1] /= counts[pool]
    arrival[np.arange(len(target)), place[target]] = np.inf
    if seen == "mask":
        arrival[_rows(history).numpy(), place[history.item]] = np.inf
    n = min(NEGATIVES, len(pool))
    first = np.argpartition(arrival, n, axis=1)[:, :n]
    drawn = np.isfinite(np.take_along_axis(arrival, first, axis=1))
    negatives = np.zeros((len(target), NEGATIVES), np.int64)
    negatives[:, :n] = np.where(drawn, np.append(pool, PAD)[first], PAD)
    return negatives


def _full(
    scorer: Scorer, cases: Cases, counts: np.ndarray, k: tuple[int, ...], seen: str, seed: int, chunk: int
) -> dict[str, float]:
    ranks = torch.empty(len(cases), dtype=torch.float64)
    count = torch.from_numpy(counts).double()
    shown = torch.zeros(len(k), len(counts), dtype=torch.int64)
    for rows in _chunks(len(cases), chunk):
        scores = _masked_scores(scorer, cases, rows, len(counts), seen)
        target = torch.from_numpy(cases.target[rows]).to(scores.device)
        ranks[rows] = _rank(scores.gather(1, target[:, None]), scores, others=-1).cpu()
        items = _best(scores, max(k))[0].cpu()
        for shown_at, cutoff in zip(shown, k, strict=True):
            shown_at += torch.bincount(items[:, :cutoff].flatten(), minlength=len(counts))
    shown[:, PAD] = 0  # places left empty
    diversity = (shown > 0).sum(1)
    popularity = (shown * count).sum(1) / shown.sum(1).clamp(min=1)
    return {
        **_hits("recall", ranks, k),
        **{f"diversity@{cutoff}": float(value) for cutoff, value in zip(k, diversity, strict=True)},
        **{f"popularity@{cutoff}": float(value) for cutoff, value in zip(k, popularity, strict=True)},
    }


def _pop100(
    scorer: Scorer, cases: Cases, counts: np.ndarray, k: tuple[int, ...], seen: str, seed: int, chunk: int
) -> dict[str, float]:
    ranks = torch.empty(len(cases), dtype=torch.float64)
    rng = np.random.default_rng(seed)
    for rows in _chunks(len(cases), chunk):
        scores = _masked_scores(scorer, cases, rows, len(counts), seen)
        target = torch.from_numpy(cases.target[rows]).to(scores.device)
        drawn = draw_negatives(cases.history.take(rows), cases.target[rows], counts, rng, seen)
        negatives = torch.from_numpy(drawn).to(scores.device)  # places left empty are padding: -inf
        ranks[rows] = _rank(scores.gather(1, target[:, None]), scores.gather(1, negatives), others=0).cpu()
    return _hits("hr", ranks, k)


_PROTOCOLS: dict[str, Callable[..., dict[str, float]]] = {"full": _full, "pop100": _pop100}


def _masked_scores(scorer: Scorer, cases: Cases, rows: np.ndarray, columns: int, seen: str) -> torch.Tensor:
    history = cases.history.take(rows)
    scores = scorer.scores(history)
    if scores.shape != (len(rows), columns):
        raise ValueError(f"scores: expected [{len(rows)}, {columns}] (counts has {columns}), got {list(scores.shape)}")
    return mask_seen(scores, history, seen)


def _rank(target: torch.Tensor, candidates: torch.Tensor, others: int) -> torch.Tensor:
    """Rank of target [B, 1] among candidates [B, M]; `others` is -1 where the candidates hold the target itself."""
    higher = (candidates > target).sum(1, dtype=torch.int32)
    equal = (candidates == target).sum(1, dtype=torch.int32) + others
    rank = 1.0 + higher.double() + 0.5 * equal.double()
    return torch.where(target[:, 0] == -torch.inf, torch.inf, rank)


def _hits(name: str, ranks: torch.Tensor, k: tuple[int, ...]) -> dict[str, float]:
    gain = 1.0 / torch.log2(ranks + 1.0)
    hits = {f"{name}@{cutoff}": float((ranks <= cutoff).double().mean()) for cutoff in k}
    return hits | {f"ndcg@{cutoff}": float(torch.where(ranks <= cutoff, gain, 0.0).mean()) for cutoff in k}


def _best(masked: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    scores, items = masked.topk(min(k, masked.shape[1] - 1), dim=1)
    return torch.where(scores == -torch.inf, PAD, items), scores


def _rows(history: Histories) -> torch.Tensor:
    return torch.repeat_interleave(torch.arange(len(history)), torch.from_numpy(history.lengths))


def _chunks(count: int, chunk: int) -> list[np.ndarray]:
    return [np.arange(start, min(start + chunk, count)) for start in range(0, count, chunk)]


def _check_options(k: tuple[int, ...], seen: str, chunk: int) -> None:
    whole = [isinstance(cutoff, int | np.integer) and cutoff >= 1 for cutoff in k]
    if not whole or not all(whole) or len(set(k)) < len(k):
        raise ValueError(f"k: expected different whole numbers from 1, got {k}")
    if seen not in SEEN:
        raise ValueError(f"seen: expected one of {', '.join(map(repr, SEEN))}, got {seen!r}")
    if chunk < 1:
        raise ValueError(f"chunk: expected at least 1, got {chunk}")
