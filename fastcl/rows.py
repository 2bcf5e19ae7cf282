"""From a batch to `Rows`, what a formula sees of it, and the refusal of wrong arguments.

This is what all losses share around the op. No loss formula belongs here. The calls of the op are in batch.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastcl.adjust import NOTHING, Adjustments
from fastcl.arithmetic import compute_dtype, dot
from fastcl.batch import Batch
from fastcl.both_ways import both_ways, from_one_product
from fastcl.checks import (
    check_reduction,
    check_temperature,
    in_memory,
    is_tensor,
    on_device,
)
from fastcl.columns import Columns, Match, Shared, counted, mean_logit
from fastcl.normalize import normalized_together
from fastcl.ops import Expected, packs, takes_frozen
from fastcl.segments import Negatives, Segment, check_corrected, checked, segments_of

Pairs = tuple[tuple[Tensor, Tensor], ...]


@dataclass(slots=True, eq=False)  # not frozen: that would cost a microsecond a call
class Rows:
    """What a formula sees of the batch: two numbers per row, and what some formulas ask for besides."""

    pos: Tensor  # [N]
    lse: Tensor  # [N], over all segments; -inf where there is nothing to contrast with
    count: Callable[[], Tensor]  # () -> [N], the number of columns in each row's sum
    mean: Callable[[], Tensor]  # () -> [N], the mean of the logits of the positive and of the row's columns
    lse_at: Callable[[float], Tensor]  # factor -> [N], lse with every similarity times `factor`; one more pass each
    pairs_of: Callable[[], Pairs]  # () -> pairs
    scale: float | Tensor  # 1 / temperature: a number, [] or [N]
    log_q: bool  # whether logits are corrected by a log q
    hardness: bool = False  # whether negatives have weights of their own

    @property
    def pairs(self) -> Pairs:
        """(query, positive_key), each [N, D] and normalised if the loss normalises. A symmetric loss has a second pair,
        the first exchanged, and all that is [N] here is [2N]: the rows of the one direction, then those of the other.
        """
        return self.pairs_of()


def _mean(per_row: Tensor) -> Tensor:
    """The mean, and 0 over no rows: a batch whose rows were all filtered out adds nothing."""
    return per_row.mean() if per_row.shape[0] else per_row.sum()


REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"mean": _mean, "sum": torch.sum, "none": lambda loss: loss}


def rows_of(
    query: Tensor,
    positive_key: Tensor,
    temperature: float | Tensor,
    given: Negatives,
    expected: Expected | None = None,
    adjust: Adjustments = NOTHING,
    normalize: bool = False,
) -> Rows:
    """`expected`: of a loss over all negatives of the row, log q not yet in it. normalize: divide the rows of query,
    positive_key and negative_keys by their length."""
    scale = inverse(temperature, query, positive_key)
    n, device = query.shape[0], query.device
    given = checked(given, n, device)
    # Those that learn last: the last one's gradient may be summed on the way, once the others' sums are known.
    segments = segments_of(positive_key, given)
    if len(segments) > 1:
        segments.sort(key=_learns)
    private = given.keys if given.keys is not None and given.keys.dim() == 3 else None
    if private is not None:  # torch's own products: what the compiled part checks is checked here
        for name, t in (("query", query), ("positive_key", positive_key), ("negative_keys", private)):
            in_memory(name, t)
    if not segments and private is None:
        raise _no_source()
    check_corrected(given, segments)

    matches: list[Match] = []
    for segment in segments:
        row_id, col_id = given.ids, segment.ids
        if segment.own and row_id is None:
            row_id = col_id = torch.arange(n, device=device)
        matches.append((None, None) if row_id is None or col_id is None else (row_id, col_id))

    raw = Batch(query, positive_key, private, segments, matches, given, adjust)

    batch: Batch | None = None if normalize else raw.limited()

    def ready() -> Batch:  # made when it is asked for, since the op can normalise for itself
        nonlocal batch
        batch = raw.normalised().limited() if batch is None else batch
        return batch

    pos: Tensor | None
    if adjust is NOTHING:
        if expected is not None and given.log_q is not None:
            expected = expected._replace(row_shift=-given.log_q)
        beside = len(segments) == 2 and not _learns(segments[0]) and takes_frozen(query)
        # The op leaves out pairs by one set of ids of the rows: where the first segment has ids, so must the last.
        beside = beside and (matches[0][0] is None or matches[1][0] is not None)
        if private is None and (beside or len(segments) == 1):
            in_op = normalize and packs(query)
            pos, lse = (raw if in_op else ready()).at_once(scale, expected, in_op)
        else:
            pos, lse = ready().merged(scale, ready().positive_key, expected)
        if pos is None:
            pos = dot(ready().query, ready().positive_key) * scale
        if given.log_q is not None:
            pos = pos - given.log_q.to(pos)
    else:  # the kernel's own `pos` would have the scale of its segment, and no margin
        pos = adjust.moved(dot(ready().query, ready().positive_key)) * scale
        if given.log_q is not None:
            pos = pos - given.log_q.to(pos)
        _, lse = ready().merged(scale, None, None if expected is None else expected.with_positive(pos))

    return Rows(
        pos,
        lse,
        count=lambda: counted(raw.columns(scale), n, device),
        mean=lambda: mean_logit(ready().columns(scale), ready().query, scale, pos),
        lse_at=lambda factor: ready().merged(scale * factor, None)[1],
        pairs_of=lambda: ((ready().query, ready().positive_key),),
        scale=scale,
        log_q=given.log_q is not None,
        hardness=adjust.hardness is not None,
    )


def rows_both_ways(
    query: Tensor,
    positive_key: Tensor,
    temperature: float | Tensor,
    given: Negatives,
    expected: Expected | None = None,
    adjust: Adjustments = NOTHING,
    normalize: bool = False,
) -> Rows:
    """`rows_of` the batch, and behind them those of the batch with query and positive_key exchanged."""
    check_symmetric(given, temperature)
    if adjust is not NOTHING or not from_one_product(query, positive_key):
        swapped = ((query, positive_key), (positive_key, query))
        each = [rows_of(*pair, temperature, given, expected, adjust, normalize) for pair in swapped]
        return Rows(
            torch.cat([rows.pos for rows in each]),
            torch.cat([rows.lse for rows in each]),
            count=lambda: torch.cat([rows.count() for rows in each]),
            mean=lambda: torch.cat([rows.mean() for rows in each]),
            lse_at=lambda factor: torch.cat([rows.lse_at(factor) for rows in each]),
            pairs_of=lambda: each[0].pairs + each[1].pairs,
            scale=each[0].scale,
            log_q=False,
            hardness=each[0].hardness,
        )
    scale = inverse(temperature, query, positive_key)
    n, device = query.shape[0], query.device
    given = checked(given, n, device)
    if given.in_batch is False:
        raise _no_source()
    pos, lse = both_ways(query, positive_key, scale, given.ids, normalize)

    units: tuple[Tensor, ...] = () if normalize else (query, positive_key)

    def pairs() -> Pairs:
        nonlocal units
        units = units or normalized_together(query, positive_key)
        q, k = units
        return (q, k), (k, q)

    def columns(keys: Tensor) -> list[Columns]:
        ids = torch.arange(n, device=device) if given.ids is None else given.ids
        return [Shared(keys, None, (ids, ids), n)]

    def mean() -> Tensor:
        sides = zip(pairs(), pos.chunk(2), strict=True)
        return torch.cat([mean_logit(columns(keys), rows, scale, own) for (rows, keys), own in sides])

    return Rows(
        pos,
        lse,
        count=lambda: counted(columns(positive_key), n, device).repeat(2),
        mean=mean,
        lse_at=lambda factor: both_ways(query, positive_key, scale * factor, given.ids, normalize)[1],
        pairs_of=pairs,
        scale=scale,
        log_q=False,
    )


def _learns(segment: Segment) -> bool:
    return segment.keys.requires_grad or (segment.log_q is not None and segment.log_q.requires_grad)


def _no_source() -> ValueError:
    return ValueError("in_batch: expected True, negative_keys or a queue, got no source of negatives")


def inverse(temperature: float | Tensor, *inputs: Tensor) -> float | Tensor:
    """1 / temperature; a 16-bit one is widened first, or its reciprocal would be rounded once more."""
    return 1.0 / (temperature.to(compute_dtype(*inputs)) if isinstance(temperature, Tensor) else temperature)


def reduced(per_row: Tensor, reduction: str, weight: Tensor | None) -> Tensor:
    """The losses times their weights, reduced; a mean divides by the number of rows, whatever the weights."""
    return REDUCTIONS[reduction](per_row if weight is None else weight.to(per_row) * per_row)


def check_batch(
    query: Any,
    positive_key: Any,
    negative_keys: Any,
    temperature: Any,
    reduction: Any,
    negative_mode: Any,
    names: tuple[str, str] = ("query", "positive_key"),  # what the caller's arguments are called
) -> None:
    is_tensor(names[0], query)
    is_tensor(names[1], positive_key)
    if query.dim() != 2:
        raise ValueError(f"{names[0]}: expected shape [N, D], got {list(query.shape)}")
    on_device(names[1], positive_key, query.device)
    if positive_key.shape != query.shape:
        raise ValueError(
            f"{names[1]}: expected shape {list(query.shape)} (that of {names[0]}), got {list(positive_key.shape)}"
        )
    if negative_mode not in (None, "unpaired", "paired"):
        raise ValueError(f"negative_mode: expected None, 'unpaired' or 'paired', got {negative_mode!r}")
    if negative_keys is not None:
        check_negatives(negative_keys, query, negative_mode)
    check_reduction(reduction)
    check_temperature(temperature, query.shape[0], query.device)


def check_negatives(negative_keys: Any, query: Tensor, negative_mode: str | None = None) -> None:
    if isinstance(negative_keys, (int, float)):
        raise TypeError(
            f"negative_keys: expected a tensor, got {type(negative_keys).__name__}; a temperature is given by name, "
            f"temperature={negative_keys}"
        )
    is_tensor("negative_keys", negative_keys)
    on_device("negative_keys", negative_keys, query.device)
    n, d = query.shape
    shared = negative_keys.dim() == 2 and negative_keys.shape[1] == d and negative_mode != "paired"
    private = negative_keys.dim() == 3 and negative_keys.shape[::2] == (n, d) and negative_mode != "unpaired"
    if not (shared or private):
        wanted = {None: f"[M, {d}] or [{n}, K, {d}]", "unpaired": f"[M, {d}]", "paired": f"[{n}, K, {d}]"}[
            negative_mode
        ]
        raise ValueError(f"negative_keys: expected shape {wanted}, got {list(negative_keys.shape)}")


def check_symmetric(given: Negatives, temperature: float | Tensor) -> None:
    for name, value in (("negative_keys", given.keys), ("queue", given.queue), ("log_q", given.log_q)):
        if value is not None:
            raise ValueError(f"symmetric: expected no {name}, which has no other direction, got {name} as well")
    if isinstance(temperature, Tensor) and temperature.dim():
        raise ValueError(f"symmetric: expected a single temperature, got one a row {list(temperature.shape)}")


