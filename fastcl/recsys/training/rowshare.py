"""Rows of a table that is cut over several processes: row r lives in process r % P, at place r // P.

Ids and rows travel by all-to-all, gradients the same way back. Placement is by remainder, since numbers by first
appearance put the popular items first. Every function here is a collective, and right for a process that is alone.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fastcl import pages
from fastcl.recsys.training import processes


class Route(NamedTuple):
    """One fetch: what was asked of whom, and what of this process."""

    order: Tensor  # [U], the asked ids by owner
    sent: list[int]
    received: list[int]
    places: Tensor  # [R], distinct places of this process's rows
    which: Tensor  # [sum of received], into places


def own(whole: Tensor) -> Tensor:
    """This process's rows of [rows, ...], a copy."""
    rows = whole[processes.rank() :: processes.count()]
    return pages.zeros(tuple(rows.shape), whole.dtype, whole.device).copy_(rows)


def whole(own_rows: Tensor, rows: int) -> Tensor:
    """[rows, ...] of each process's own."""
    count = processes.count()
    if count == 1:
        return own_rows
    found = own_rows.new_empty(rows, *own_rows.shape[1:])
    for rank in range(count):  # one process's rows at a time beside the whole
        place = found[rank::count]
        if not place.numel():
            continue
        part = own_rows.contiguous() if rank == processes.rank() else torch.empty_like(place).contiguous()
        dist.broadcast(part, src=rank)
        place.copy_(part)
    return found


def fetch(ids: Tensor, rows: int, read: Callable[[Tensor], Tensor]) -> tuple[Tensor, Route]:
    """The rows ids [U], distinct and rising, of a table of `rows`; each is read by its owner.

    read: distinct places int64 [R] of this process's own rows -> [R, D]. ValueError for an id that is not in the table,
    in all processes.
    """
    count = processes.count()
    odd = ids[(ids < 0) | (ids >= rows)]
    if count == 1:
        _check(odd, rows)
        return read(ids), Route(ids, [], [], ids, ids)
    owner = ids % count
    order = owner.argsort(stable=True)
    counts = torch.bincount(owner, minlength=count) if not len(odd) else owner.new_full((count,), -1)
    numbers = torch.empty_like(counts)
    dist.all_to_all_single(numbers, counts)
    _check(odd, rows)
    received = numbers.tolist()
    if min(received) < 0:
        raise ValueError(f"reads: expected rows 0 to {rows - 1}, got others in process {received.index(-1)} of {count}")
    sent = counts.tolist()
    asked = _swap(ids[order] // count, sent, received)
    places, which = asked.unique(return_inverse=True)
    sought = read(places).index_select(0, which)
    found = sought.new_empty(len(ids), *sought.shape[1:])
    found[order] = _swap(sought, received, sent)
    return found, Route(order, sent, received, places, which)


def give_back(route: Route, grad: Tensor) -> Tensor:
    """The gradients [R, D] of the places of `route`, summed over the processes, which have [U, D] each."""
    if processes.count() == 1:
        return grad
    arrived = _swap(grad.index_select(0, route.order), route.sent, route.received)
    return arrived.new_zeros(len(route.places), *grad.shape[1:]).index_add_(0, route.which, arrived)


def _swap(x: Tensor, sent: list[int], received: list[int]) -> Tensor:
    found = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(found, x.contiguous(), received, sent)
    return found


def _check(odd: Tensor, rows: int) -> None:
    if len(odd):
        raise ValueError(f"reads: expected rows 0 to {rows - 1}, got {int(odd[0])}")
