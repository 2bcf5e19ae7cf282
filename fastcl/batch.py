"""A batch with its segments of columns, and the calls of the op that give pos and lse of its rows.

No loss formula belongs here. Similarities are computed by the op, except those with negatives private to a query, which
are too few for a kernel.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from fastcl.adjust import Adjustments, Harder, graded
from fastcl.arithmetic import dot, logaddexp
from fastcl.columns import Columns, Match, Private, Shared
from fastcl.normalize import normalized, normalized_together
from fastcl.ops import Expected, Frozen, contrast_checked
from fastcl.private import private_similarity
from fastcl.segments import Negatives, Segment


@dataclass(slots=True, eq=False, repr=False)  # each method is compiled at import
class Batch:
    """A batch as similarities are taken of it: its rows have length 1 where the loss normalises."""

    query: Tensor  # [N, D]
    positive_key: Tensor  # [N, D]
    private: Tensor | None  # [N, K, D]
    segments: list[Segment]
    matches: list[Match]
    given: Negatives
    adjust: Adjustments
    limit: Tensor | None = None  # [N], the adjustments' cap

    def normalised(self) -> "Batch":
        more = [] if self.given.keys is None or self.given.keys is self.query else [self.given.keys]
        query, positive_key, *more = normalized_together(self.query, self.positive_key, *more)
        rows = {"in_batch": positive_key, "negative_keys": more[0] if more else query}
        segments = [each._replace(keys=rows.get(each.source, each.keys)) for each in self.segments]
        private = None if self.private is None else more[0]
        return Batch(query, positive_key, private, segments, self.matches, self.given, self.adjust)

    def limited(self) -> "Batch":
        if self.adjust.cap is not None:
            self.limit = self.adjust.limit(dot(self.query, self.positive_key))
        return self

    def at_once(
        self, scale: float | Tensor, expected: Expected | None, unit_rows: bool
    ) -> tuple[Tensor | None, Tensor]:
        """pos and lse by one call: of the last segment, and of a frozen one beside it. unit_rows: it normalises."""
        last, (row_id, col_id), frozen = self.segments[-1], self.matches[-1], None
        if len(self.segments) == 2:
            beside, (other_row_id, other_id) = self.segments[0], self.matches[0]
            keys = normalized(beside.keys) if unit_rows and beside.source != "queue" else beside.keys
            frozen = Frozen(keys, None if beside.log_q is None else -beside.log_q, other_id)
            row_id = other_row_id if row_id is None else row_id
        return contrast_checked(
            expected,
            self.query,
            last.keys,
            self.positive_key,
            scale,
            None if last.log_q is None else -last.log_q,
            row_id,
            col_id,
            None,
            frozen,
            unit_rows,
            unit_rows and last.source != "queue",
        )

    def merged(
        self, scale: float | Tensor, positive: Tensor | None, expected: Expected | None = None
    ) -> tuple[Tensor | None, Tensor]:
        """pos, if `positive` is given, and lse over all segments, one call each."""
        pos: Tensor | None = None
        total = None
        if self.private is not None:
            hardness = self.adjust.hardness_of("negative_keys")
            total = _private_lse(self.query, self.private, scale, self.given, hardness, self.limit)
        for nth, (segment, (row_id, col_id)) in enumerate(zip(self.segments, self.matches, strict=True), start=1):
            bias = None if segment.log_q is None else -segment.log_q
            at, share = scale, None
            if beta := self.adjust.hardness_of(segment.source):
                at, bias, share = Harder.of(scale, bias, beta)
            last = nth == len(self.segments)
            wanted = expected if last else None
            if wanted is not None:
                wanted = wanted.beside(total, share)
            pos, lse = contrast_checked(
                wanted,
                self.query,
                segment.keys,
                positive if last else None,
                at,
                bias,
                row_id,
                col_id,
                None if self.limit is None else self.limit * at,
            )
            if share is not None:
                lse = graded(lse, share)
            total = lse if total is None else logaddexp(total, lse)
        assert total is not None
        return pos, total

    def columns(self, scale: float | Tensor) -> list[Columns]:
        if self.adjust.cap is not None:
            raise ValueError("cap: expected none with a loss that averages over its negatives, got one")
        found: list[Columns] = [
            Shared(segment.keys, segment.log_q, match, segment.size())
            for segment, match in zip(self.segments, self.matches, strict=True)
        ]
        private, given = self.private, self.given
        if private is not None:
            excluded: Tensor | None = None
            if given.ids is not None and given.key_ids is not None:
                excluded = given.key_ids == given.ids[:, None]
            logits = functools.partial(_private_logits, self.query, private, scale, given)
            found.append(Private(private.shape[1], excluded, logits))
        return found


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
    lse = torch.logsumexp(logits.masked_fill(empty[:, None], 0.0), 1).masked_fill(empty, -torch.inf)
    return graded(lse, 1.0) if beta else lse


def _private_logits(
    query: Tensor, keys: Tensor, scale: float | Tensor, given: Negatives, similarity: Tensor | None = None
) -> Tensor:
    similarity = private_similarity(query, keys) if similarity is None else similarity
    logits = similarity * (scale[:, None] if isinstance(scale, Tensor) and scale.dim() else scale)
    return logits if given.key_log_q is None else logits - given.key_log_q.to(logits)
