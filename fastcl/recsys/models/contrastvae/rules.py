"""The differences between ContrastVAE's paper and its authors' program: two `Rules`, CLEAN and PAPER_CODE, and the
functions in them. Everything that the setting `compat` changes is here.

The model calls its rules wherever paper and program differ. Networks and batching are elsewhere.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fastcl.recsys.data import PAD, Histories
from fastcl.recsys.models.batching import Packed, Spans, pack, windows

# (mu, sigma, alpha, dropout rate, training) -> z, all [n, D] but alpha, which broadcasts
Sampler = Callable[[Tensor, Tensor, Tensor | float, float, bool], Tensor]


class Rules(NamedTuple):
    """The choices in which the paper's mathematics and the authors' program differ."""

    spans: Callable[[Histories, int], Spans]  # the spans of the histories that train, of at most max_len + 1 clicks
    lay: Callable[[np.ndarray, int, torch.device], Packed]  # lengths [B], max_len -> positions; source -1 is padding
    masks: Callable[[Packed, Tensor], list[Tensor] | None]  # additive masks for PostBlock; None: the causal mask alone
    embed: Callable[[Any, tuple[Any, ...]], Iterator[Tensor]]  # (model, views) -> the encoders' input for each view
    alone: Sampler  # z where there is one view (AVAE)
    first: Sampler  # z of the first of two views
    second: Sampler  # z of the second view
    varied: Sampler  # z of the second view under variational augmentation
    follow: Callable[[np.ndarray], np.ndarray]  # order [m] of an augmented view -> the clicks it predicts, 0..n
    options: Mapping[str, Any]  # defaults of the config that differ from CLEAN


def packed(lengths: np.ndarray, max_len: int, device: torch.device) -> Packed:
    """Positions of real clicks only."""
    stop = lengths.cumsum()
    return pack(Spans(stop - lengths, stop, np.arange(len(lengths))), device)


def left_padded(lengths: np.ndarray, max_len: int, device: torch.device) -> Packed:
    """max_len positions per row, with the newest click in the last and padding (source -1) in front."""
    start = max_len - lengths
    place = np.tile(np.arange(max_len), len(lengths))
    first = np.repeat(lengths.cumsum() - lengths - start, max_len)
    clicks = packed(np.full(len(lengths), max_len), max_len, device)
    return clicks._replace(source=np.where(place >= np.repeat(start, max_len), first + place, -1))


def newest_window(histories: Histories, length: int) -> Spans:
    """The newest window of each history of at least two clicks. Older clicks of a long history never train."""
    spans = windows(histories, length)
    return spans.take(np.flatnonzero(spans.stop == histories.offsets[1:][spans.row]))


def causal(clicks: Packed, item: Tensor) -> None:
    """None: the causal mask suffices, since padding lies behind the real clicks."""


def causal_and_real(clicks: Packed, item: Tensor) -> list[Tensor]:
    """Masks with -10,000 at later positions and at padding. A padding position, whose keys are all masked alike,
    attends to all of them.
    """
    real = clicks.pad(item) != PAD  # [B, L]
    seen = real[:, None, None, :] & torch.ones(clicks.width, clicks.width, dtype=torch.bool, device=item.device).tril()
    return [(~seen).float() * -1e4]  # all rows are max_len long: one block


# Both functions draw the dropout of a view just before its encoders draw theirs; the order decides what a seed gives.
def each_view(model: Any, views: tuple[Any, ...]) -> Iterator[Tensor]:
    """Every view with dropout of its own."""
    for view in views:
        yield model.embed(view.item, view.clicks)


def each_sequence(model: Any, views: tuple[Any, ...]) -> Iterator[Tensor]:
    """Two views of one sequence share its embedding and its dropout; an augmented sequence has an embedding of its own.
    """
    first = model.embed(views[0].item, views[0].clicks)
    for view in views:
        yield first if view is views[0] else model.embed(view.item, view.clicks)


def sampled(mu: Tensor, sigma: Tensor, alpha: Tensor | float, rate: float, training: bool) -> Tensor:
    """mu + alpha sigma eps in training, the mean mu otherwise."""
    return mu + alpha * sigma * torch.randn_like(sigma) if training else mu


def sampled_else_above(mu: Tensor, sigma: Tensor, alpha: Tensor | float, rate: float, training: bool) -> Tensor:
    """mu + sigma eps in training, mu + sigma otherwise."""
    return mu + sigma * torch.randn_like(sigma) if training else mu + sigma


def above(mu: Tensor, sigma: Tensor, alpha: Tensor | float, rate: float, training: bool) -> Tensor:
    """mu + sigma, never any noise."""
    return mu + sigma


def dropped(mu: Tensor, sigma: Tensor, alpha: Tensor | float, rate: float, training: bool) -> Tensor:
    """mu + dropout(sigma)."""
    return mu + F.dropout(sigma, rate, training)


def own_next(order: np.ndarray) -> np.ndarray:
    """Each click predicts the next click of the view; the last one predicts what followed the view's newest click in
    the history.
    """
    return np.append(order[1:], order.max() + 1)


def original_next(order: np.ndarray) -> np.ndarray:
    """Each place predicts the click that followed it in the history, whatever click the view has put there."""
    return 1 + np.arange(len(order))


CLEAN = Rules(
    spans=windows,
    lay=packed,
    masks=causal,
    embed=each_view,
    alone=sampled,
    first=sampled,
    second=sampled,
    varied=sampled,
    follow=own_next,
    options={},
)

# Two differences are not reproduced: the program's sampled negatives avoid a user's validation and test items, which
# training must not know, and may be the mask token.
PAPER_CODE = Rules(
    spans=newest_window,
    lay=left_padded,
    masks=causal_and_real,
    embed=each_sequence,
    alone=sampled_else_above,
    first=above,
    second=dropped,
    varied=lambda mu, sigma, alpha, rate, training: sampled(mu, sigma, alpha, rate, True),
    follow=original_next,
    options={
        "dim": 128,
        "heads": 4,
        "positions": "newest",  # the program counts up to the newest of max_len padded positions: the same, reversed
        "dropout": 0.3,
        "batch": 256,
        "reconstruction": "bce",
        "debias": 0.0,
        "contrast": "nt_xent",
        "contrast_weight": 0.3,
        "temperature": 0.5,
        "kl_weight": 0.3,
        "kl_steps": 10_000,
        "lr": 1e-3,
    },
)

RULES: dict[str, Rules] = {"none": CLEAN, "paper-code": PAPER_CODE}
