"""From a batch to `Rows`: the sources of negatives, the merging of their sums, the refusal of wrong arguments.

This is what all losses share around the op. No loss formula belongs here. Similarities are computed by the op, except
those with negatives private to a query, which are too few for a kernel.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fastcl.adjust import NOTHING, Adjustments, Harder, graded
from fastcl.arithmetic import compute_dtype, dot, logaddexp
from fastcl.both_ways import both_ways, from_one_product
from fastcl.checks import (
    as_ids,
    check_reduction,
    check_temperature,
    check_tensor,
    in_memory,
    is_tensor,
    matrix,
    on_device,
)
from fastcl.columns import Columns, Private, Shared, counted, mean_logit
from fastcl.negatives import Columns as QueueColumns
from fastcl.ops import Expected, contrast_checked
from fastcl.private import private_similarity


class Queue(Protocol):
    """What a loss reads of a queue; `fastcl.NegativeQueue` is one, which also has `columns`, where empty slots show."""

    @property
    def keys(self) -> Tensor: ...
    @property
    def ids(self) -> Tensor | None: ...
    @property
    def log_q(self) -> Tensor | None: ...


@dataclass(slots=True)  # not frozen: that would cost a microsecond a call
class Rows:
    """What a formula sees of the batch: two numbers per row, and what some formulas ask for besides."""

    pos: Tensor  # [N]
    lse: Tensor  # [N], over all segments; -inf where there is nothing to contrast with
    count: Callable[[], Tensor]  # () -> [N], the number of columns in each row's sum
    mean: Callable[[], Tensor]  # () -> [N], the mean of the logits of the positive and of the row's columns
    lse_at: Callable[[float], Tensor]  # factor -> [N], lse with every similarity times `factor`; one more pass each
    # (query, positive_key), each [N, D] and normalised if the loss normalises. A symmetric loss has a second pair, the
    # first exchanged, and all that is [N] here is [2N]: the rows of the one direction, then those of the other.
    pairs: tuple[tuple[Tensor, Tensor], ...]
    scale: float | Tensor  # 1 / temperature: a number, [] or [N]
    log_q: bool  # whether logits are corrected by a log q
    hardness: bool = False  # whether negatives have weights of their own


def _mean(per_row: Tensor) -> Tensor:
    """The mean, and 0 over no rows: a batch whose rows were all filtered out adds nothing."""
    return per_row.mean() if per_row.shape[0] else per_row.sum()


REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"mean": _mean, "sum": torch.sum, "none": lambda loss: loss}


class Negatives(NamedTuple):
    """A caller's sources of negatives, as given."""

    keys: Tensor | None
    in_batch: bool | None
    queue: Queue | None
    ids: Tensor | None
    key_ids: Tensor | None
    log_q: Tensor | None
    key_log_q: Tensor | None


class _Segment(NamedTuple):
    """Columns shared by all rows. `own` marks the batch's positives, among which every row meets its own."""

    keys: Tensor  # [M, D]
    ids: Tensor | None  # [M]
    log_q: Tensor | None  # [M]
    source: str = "negative_keys"
    own: bool = False
    held: Tensor | None = None  # [], how many of the M are negatives, where some are empty slots of a queue

    def size(self) -> int | Tensor:
        return self.keys.shape[0] if self.held is None else self.held


def columns_of(queue: Queue, corrected: bool) -> QueueColumns:
    """corrected: whether the positives have a log q."""
    read = getattr(queue, "columns", None)
    if read is None and (isinstance(queue, (Tensor, dict)) or not hasattr(queue, "keys")):
        raise TypeError(f"queue: expected a NegativeQueue, got {type(queue).__name__}; keys of your own: negative_keys")
    return QueueColumns(queue.keys, queue.ids, queue.log_q) if read is None else read(corrected)


def _segments(positive_key: Tensor, given: Negatives) -> list[_Segment]:
    segments = []
    if given.keys is None if given.in_batch is None else given.in_batch:
        segments.append(_Segment(positive_key, given.ids, given.log_q, "in_batch", own=True))
    if given.keys is not None and given.keys.dim() == 2:
        segments.append(_Segment(given.keys, given.key_ids, given.key_log_q))
    if given.queue is not None:
        segments.append(_queued(given.queue, given.log_q is not None, positive_key))
    return segments


def rows_of(
    query: Tensor,
    positive_key: Tensor,
    temperature: float | Tensor,
    given: Negatives,
    expected: Expected | None = None,
    adjust: Adjustments = NOTHING,
) -> Rows:
    """`expected`: of a loss over all negatives of the row, log q not yet in it."""
    scale = inverse(temperature, query, positive_key)
    n = query.shape[0]
    given = _checked(given, n, query.device)
    # Those that learn last: the last one's gradient may be summed on the way, once the others' sums are known.
    segments = sorted(_segments(positive_key, given), key=lambda segment: segment.keys.requires_grad)
    private = given.keys if given.keys is not None and given.keys.dim() == 3 else None
    if private is not None:  # torch's own products: what the compiled part checks is checked here
        for name, t in (("query", query), ("positive_key", positive_key), ("negative_keys", private)):
            in_memory(name, t)
    if not segments and private is None:
        raise _no_source()
    _check_corrected(given, segments)

    matches: list[tuple[Tensor | None, Tensor | None]] = []
    for segment in segments:
        row_id, col_id = given.ids, segment.ids
        if segment.own and row_id is None:
            row_id = col_id = torch.arange(n, device=query.device)
        matches.append((None, None) if row_id is None or col_id is None else (row_id, col_id))

    limit = None if adjust.cap is None else adjust.limit(dot(query, positive_key))

    def merged(
        scale: float | Tensor, positive: Tensor | None, expected: Expected | None = None
    ) -> tuple[Tensor | None, Tensor]:
        pos: Tensor | None = None
        total = None
        if private is not None:
            total = _private_lse(query, private, scale, given, adjust.hardness_of("negative_keys"), limit)
        for nth, (segment, (row_id, col_id)) in enumerate(zip(segments, matches, strict=True), start=1):
            bias = None if segment.log_q is None else -segment.log_q
            at, share = scale, None
            if beta := adjust.hardness_of(segment.source):
                at, bias, share = Harder.of(scale, bias, beta)
            last = nth == len(segments)
            wanted = expected if last else None
            if wanted is not None:
                wanted = wanted.beside(total, share)
            pos, lse = contrast_checked(
                wanted,
                query,
                segment.keys,
                positive if last else None,
                at,
                bias,
                row_id,
                col_id,
                None if limit is None else limit * at,
            )
            if share is not None:
                lse = graded(lse, share)
            total = lse if total is None else logaddexp(total, lse)
        assert total is not None
        return pos, total

    if adjust is NOTHING:
        if expected is not None and given.log_q is not None:
            expected = expected._replace(row_shift=-given.log_q)
        pos, lse = merged(scale, positive_key, expected)
        if pos is None:
            pos = dot(query, positive_key) * scale
        if given.log_q is not None:
            pos = pos - given.log_q.to(pos)
    else:  # the kernel's own `pos` would have the scale of its segment, and no margin
        pos = adjust.moved(dot(query, positive_key)) * scale
        if given.log_q is not None:
            pos = pos - given.log_q.to(pos)
        _, lse = merged(scale, None, None if expected is None else expected.with_positive(pos))

    def columns() -> list[Columns]:
        if limit is not None:
            raise ValueError("cap: expected none with a loss that averages over its negatives, got one")
        found: list[Columns] = [
            Shared(segment.keys, segment.log_q, match, segment.size())
            for segment, match in zip(segments, matches, strict=True)
        ]
        if private is not None:
            excluded: Tensor | None = None
            if given.ids is not None and given.key_ids is not None:
                excluded = given.key_ids == given.ids[:, None]
            found.append(Private(private.shape[1], excluded, lambda: _private_logits(query, private, scale, given)))
        return found

    return Rows(
        pos,
        lse,
        count=lambda: counted(columns(), n, query.device),
        mean=lambda: mean_logit(columns(), query, scale, pos),
        lse_at=lambda factor: merged(scale * factor, None)[1],
        pairs=((query, positive_key),),
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
) -> Rows:
    """`rows_of` the batch, and behind them those of the batch with query and positive_key exchanged."""
    check_symmetric(given, temperature)
    pairs = ((query, positive_key), (positive_key, query))
    if adjust is not NOTHING or not from_one_product(query, positive_key):
        each = [rows_of(*pair, temperature, given, expected, adjust) for pair in pairs]
        return Rows(
            torch.cat([rows.pos for rows in each]),
            torch.cat([rows.lse for rows in each]),
            count=lambda: torch.cat([rows.count() for rows in each]),
            mean=lambda: torch.cat([rows.mean() for rows in each]),
            lse_at=lambda factor: torch.cat([rows.lse_at(factor) for rows in each]),
            pairs=pairs,
            scale=each[0].scale,
            log_q=False,
            hardness=each[0].hardness,
        )
    scale = inverse(temperature, query, positive_key)
    n, device = query.shape[0], query.device
    given = _checked(given, n, device)
    if given.in_batch is False:
        raise _no_source()
    pos, lse = both_ways(query, positive_key, scale, given.ids)

    def columns(keys: Tensor) -> list[Columns]:
        ids = torch.arange(n, device=device) if given.ids is None else given.ids
        return [Shared(keys, None, (ids, ids), n)]

    def mean() -> Tensor:
        sides = zip(pairs, pos.chunk(2), strict=True)
        return torch.cat([mean_logit(columns(keys), rows, scale, own) for (rows, keys), own in sides])

    return Rows(
        pos,
        lse,
        count=lambda: counted(columns(positive_key), n, device).repeat(2),
        mean=mean,
        lse_at=lambda factor: both_ways(query, positive_key, scale * factor, given.ids)[1],
        pairs=pairs,
        scale=scale,
        log_q=False,
    )


def _no_source() -> ValueError:
    return ValueError("in_batch: expected True, negative_keys or a queue, got no source of negatives")


def _private_lse(
    query: Tensor, keys: Tensor, scale: float | Tensor, given: Negatives, beta: float, limit: Tensor | None
) -> Tensor:
    """The sum over keys [N, K, D] of which each row has its own: N * K logits are no more than the keys themselves."""
    similarity = private_similarity(query, keys)
    logits = _private_logits(query, keys, scale, given, similarity)
    if beta:
        logits = logits + beta * similarity.detach()
    if given.ids is not None and given.key_ids is not None:
        logits = logits.masked_fill(given.key_ids == given.ids[:, None], -torch.inf)
    if limit is not None:
        logits = logits.masked_fill(similarity > limit[:, None], -torch.inf)
    # The gradient of logsumexp in a row of -inf alone is NaN; such a row gets a constant instead.
    empty = (logits == -torch.inf).all(1)
    return torch.logsumexp(logits.masked_fill(empty[:, None], 0.0), 1).masked_fill(empty, -torch.inf)


def _private_logits(
    query: Tensor, keys: Tensor, scale: float | Tensor, given: Negatives, similarity: Tensor | None = None
) -> Tensor:
    similarity = private_similarity(query, keys) if similarity is None else similarity
    logits = similarity * (scale[:, None] if isinstance(scale, Tensor) and scale.dim() else scale)
    return logits if given.key_log_q is None else logits - given.key_log_q.to(logits)


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


def _checked(given: Negatives, n: int, device: torch.device) -> Negatives:
    """`given` with ids as int64."""
    per_key = None if given.keys is None else tuple(given.keys.shape[:-1])
    for name, t in (("negative_ids", given.key_ids), ("negative_log_q", given.key_log_q)):
        if t is not None and per_key is None:
            raise ValueError(f"{name}: expected negative_keys to go with it, got none")
    if given.ids is not None:
        given = given._replace(ids=as_ids("ids", given.ids, (n,), device))
    if given.key_ids is not None and per_key is not None:
        if given.ids is None:
            raise ValueError("ids: expected the ids of the positives to compare negative_ids with, got None")
        given = given._replace(key_ids=as_ids("negative_ids", given.key_ids, per_key, device))
    if given.log_q is not None:
        check_tensor("log_q", given.log_q, (n,), device)
    if given.key_log_q is not None and per_key is not None:
        check_tensor("negative_log_q", given.key_log_q, per_key, device)
    return given


def _queued(queue: Queue, corrected: bool, query: Tensor) -> _Segment:
    keys, ids, log_q, held = columns_of(queue, corrected)
    matrix("queue", keys, None, query.shape[1], query.device)
    if ids is not None:
        ids = as_ids("queue.ids", ids, (keys.shape[0],), query.device)
    if log_q is not None:
        check_tensor("queue.log_q", log_q, (keys.shape[0],), query.device)
    return _Segment(keys.detach(), ids, log_q, "queue", held=held)


def _check_corrected(given: Negatives, segments: list[_Segment]) -> None:
    corrected = [given.log_q is not None]
    corrected += [s.log_q is not None for s in segments if s.held is None and s.keys.shape[0]]
    corrected += [given.key_log_q is not None] if given.keys is not None and given.keys.dim() == 3 else []
    if any(corrected) and not all(corrected):
        raise ValueError("log_q: expected for the positive and every source of negatives, or for none, got it for some")
