"""Textbook twins of the losses for pairs (models/pair_losses.py): one loop a formula, in float64, nothing shared with
them. A row's own item is never among its negatives.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fastcl.recsys.models.pair_losses import Constants, Pairs


def negatives(pairs: Pairs, row: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """[n, D], int64 [n] and [n]: vectors, ids and log q of what row `row` is contrasted with."""
    if pairs.negative is None:
        vectors, ids, log_q = pairs.item, pairs.item_id, pairs.log_q
    elif pairs.negative.ndim == 2:
        vectors, ids, log_q = pairs.negative, pairs.negative_id, pairs.negative_log_q
    else:
        vectors, ids = pairs.negative[row], pairs.negative_id[row]
        log_q = None if pairs.negative_log_q is None else pairs.negative_log_q[row]
    keep = ids != pairs.item_id[row]
    return vectors[keep], ids[keep], None if log_q is None else log_q[keep]


def rowwise(formula: Callable[..., Tensor]) -> Callable[[Pairs, Constants], Tensor]:
    """The mean of formula(positive score, negative scores, constants) over the rows."""

    def loss(pairs: Pairs, c: Constants) -> Tensor:
        total = pairs.user.new_zeros(())
        for row in range(len(pairs.user)):
            vectors, _, _ = negatives(pairs, row)
            total = total + formula(pairs.user[row] @ pairs.item[row], vectors @ pairs.user[row], c)
        return total / len(pairs.user)

    return loss


@rowwise
def bpr(up: Tensor, down: Tensor, c: Constants) -> Tensor:
    return -torch.sigmoid((up - down) / c.temperature).log().mean()


@rowwise
def infonce(up: Tensor, down: Tensor, c: Constants) -> Tensor:
    up, down = (up / c.temperature).exp(), (down / c.temperature).exp()
    return -(up / (up + down.sum())).log()


@rowwise
def dcl(up: Tensor, down: Tensor, c: Constants) -> Tensor:
    return -((up / c.temperature).exp() / (down / c.temperature).exp().sum()).log()


@rowwise
def infonce_plus(up: Tensor, down: Tensor, c: Constants) -> Tensor:
    denominator = c.epsilon * (up / c.temperature).exp() + (down / c.temperature).exp().sum()
    return c.lam * denominator.log() - up / c.temperature


@rowwise
def mine(up: Tensor, down: Tensor, c: Constants) -> Tensor:
    return (down / c.temperature).exp().mean().log() - up / c.temperature


@rowwise
def mine_plus(up: Tensor, down: Tensor, c: Constants) -> Tensor:
    return c.lam * (down / c.temperature).exp().mean().log() - up / c.temperature


@rowwise
def ccl(up: Tensor, down: Tensor, c: Constants) -> Tensor:
    return (1 - up) + c.weight * torch.maximum(down - c.margin, torch.zeros_like(down)).mean()


def sampled_softmax(pairs: Pairs, c: Constants) -> Tensor:
    assert pairs.log_q is not None
    total = pairs.user.new_zeros(())
    for row in range(len(pairs.user)):
        vectors, _, log_q = negatives(pairs, row)
        assert log_q is not None
        up = (pairs.user[row] @ pairs.item[row] / c.temperature).exp() / pairs.log_q[row].exp()
        down = (vectors @ pairs.user[row] / c.temperature).exp() / log_q.exp()
        total = total - (up / (up + down.sum())).log()
    return total / len(pairs.user)


def directau(pairs: Pairs, c: Constants) -> Tensor:
    def uniformity(x: Tensor) -> Tensor:
        terms = [(-2 * (a - b).square().sum()).exp() for i, a in enumerate(x) for j, b in enumerate(x) if i != j]
        return torch.stack(terms).mean().log()

    together = (pairs.user - pairs.item).square().sum(1).mean()
    return together + c.gamma * (uniformity(pairs.user) + uniformity(pairs.item)) / 2


def bsl(pairs: Pairs, c: Constants) -> Tensor:
    total = pairs.user.new_zeros(())
    for row in range(len(pairs.user)):
        same = pairs.user_id == pairs.user_id[row]
        up = (pairs.user[same] * pairs.item[same]).sum(1) / c.positive_temperature
        down = negatives(pairs, row)[0] @ pairs.user[row] / c.temperature
        total = total - c.positive_temperature * up.exp().mean().log() + c.temperature * down.exp().mean().log()
    return total / len(pairs.user) / c.temperature


TWINS: dict[str, Callable[[Pairs, Constants], Tensor]] = {
    "bpr": bpr,
    "infonce": infonce,
    "sampled_softmax": sampled_softmax,
    "dcl": dcl,
    "infonce_plus": infonce_plus,
    "mine": mine,
    "mine_plus": mine_plus,
    "ccl": ccl,
    "directau": directau,
    "bsl": bsl,
}
