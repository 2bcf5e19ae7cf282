"""Where ContrastVAE's paper and its authors' program part: two `Rules`, CLEAN and PAPER_CODE, and the functions that
they name. Everything that `compat` changes is here.

No network and no batching: the model asks its rules wherever the two differ.
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

    spans: Callable[[Histories, int], Spans]  # what of the histories trains, in pieces of at most max_len + 1
    lay: Callable[[np.ndarray, int, torch.device], Packed]  # lengths [B], max_len -> positions; source -1 is padding
    masks: Callable[[Packed, Tensor], list[Tensor] | None]  # additive, as PostBlock takes them; None: causal, no more
    embed: Callable[[Any, tuple[Any, ...]], Iterator[Tensor]]  # (model, views) -> what the encoders get of each view
    alone: Sampler  # z where there is one view (AVAE)
    first: Sampler  # z of the first of two views
    second: Sampler  # z of the second one
    varied: Sampler  # z of the second one under variational augmentation
    follow: Callable[[np.ndarray], np.ndarray]  # order [m] of an augmented view -> clicks it predicts, 0..n
    options: Mapping[str, Any]  # defaults of the config that differ


def packed(lengths: np.ndarray, max_len: int, device: torch.device) -> Packed:
    """Real clicks only."""
    stop = lengths.cumsum()
    return pack(Spans(stop - lengths, stop, np.arange(len(lengths))), device)


def left_padded(lengths: np.ndarray, max_len: int, device: torch.device) -> Packed:
    """max_len positions a row, the newest click in the last one, padding (source -1) in front."""
    start = max_len - lengths
    place = np.tile(np.arange(max_len), len(lengths))
    first = np.repeat(lengths.cumsum() - lengths - start, max_len)
    clicks = packed(np.full(len(lengths), max_len), max_len, device)
    return clicks._replace(source=np.where(place >= np.repeat(start, max_len), first + place, -1))


def newest_window(histories: Histories, length: int) -> Spans:
    """The newest window of each history, where it has one: older clicks of a long history never train."""
    spans = windows(histories, length)
    return spans.take(np.flatnonzero(spans.stop == histories.offsets[1:][spans.row]))


def causal(clicks: Packed, item: Tensor) -> None:
    """Padding lies behind the real clicks, out of a causal mask's reach."""


def causal_and_real(clicks: Packed, item: Tensor) -> list[Tensor]:
    """-10,000 on later positions and on padding; a padding position, all of whose keys are hidden, looks at them
    all.
    """
    real = clicks.pad(item) != PAD  # [B, L]
    seen = real[:, None, None, :] & torch.ones(clicks.width, clicks.width, dtype=torch.bool, device=item.device).tril()
    return [(~seen).float() * -1e4]  # all rows are max_len long: one block


# Both draw the dropout of a view just before its encoders draw theirs: what is drawn when is part of a seed's result.
def each_view(model: Any, views: tuple[Any, ...]) -> Iterator[Tensor]:
    """Every view with dropout of its own."""
    for view in views:
        yield model.embed(view.item, view.clicks)


def each_sequence(model: Any, views: tuple[Any, ...]) -> Iterator[Tensor]:
    """Two views of one sequence share its embedding and its dropout; an augmented sequence is embedded by itself."""
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
    """The view's own next click, and after its last one what followed its newest click in the history."""
    return np.append(order[1:], order.max() + 1)


def original_next(order: np.ndarray) -> np.ndarray:
    """The click that followed this place in the history, whatever stands in it now."""
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

# Left out: their sampled negatives avoid a user's validation and test items too, of which training knows nothing here,
# and may be the mask token.
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
        "positions": "newest",  # theirs count from the oldest of max_len positions, padding included: the same reversed
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
