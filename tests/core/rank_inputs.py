"""The big batch that is divided among ranks for their checks, and the comparison of its loss with theirs (ranks.py)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fastcl
from fastcl import distributed

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
FORMS = {"gathered": distributed.gathered, "ring": distributed.ring}
SIZES = (5, 3, 6)  # rows of each rank
D = 4


def own_rows(x: Tensor, group: Any = None, of_ranks: tuple[int, ...] = SIZES) -> Tensor:
    """This rank's rows of a big batch, or of a matrix with other numbers of rows on the ranks."""
    sizes = of_ranks[: dist.get_world_size(group)]
    start = sum(sizes[: dist.get_rank(group)])
    return x[start : start + sizes[dist.get_rank(group)]]


def big_batch(group: Any = None, dtype: torch.dtype = F64) -> dict[str, Tensor]:
    """The same on every rank."""
    g = torch.Generator().manual_seed(5)
    n = sum(SIZES[: dist.get_world_size(group)])
    query = torch.randn(n, D, generator=g, dtype=F64)
    key = query + 0.7 * torch.randn(n, D, generator=g, dtype=F64)
    return {
        "query": query.to(dtype),
        "positive_key": key.to(dtype),
        "temperature": torch.tensor(0.3, dtype=dtype),
        "ids": torch.randint(n - 3, (n,), generator=g),
        "log_q": (torch.randn(n, generator=g, dtype=F64) - 2).to(dtype),
        "weight": torch.rand(n, generator=g, dtype=F64).to(dtype),
        "rows": (0.2 + torch.rand(n, generator=g, dtype=F64)).to(dtype),
    }


def small_queue(dtype: torch.dtype, ids: bool, log_q: bool) -> fastcl.NegativeQueue:
    g = torch.Generator().manual_seed(6)
    queue = fastcl.NegativeQueue(8, D, dtype)
    keys = torch.randn(5, D, generator=g)
    queue.push(keys, torch.arange(5) if ids else None, torch.randn(5, generator=g) if log_q else None)
    return queue


def mean_over_ranks(x: Tensor, group: Any = None) -> Tensor:
    total = x.detach().clone()
    dist.all_reduce(total, group=group)
    return total / dist.get_world_size(group)


def assert_equals_the_big_batch(
    form: str, loss: Callable[..., Tensor], options: str, dtype: torch.dtype = F64, group: Any = None, **rest: Any
) -> None:
    """`options`: which of ids, log_q, weight, queue and rows (a temperature for each row) the call has."""
    tol = {"rtol": 1e-10, "atol": 1e-10} if dtype == F64 else {"rtol": 1e-5, "atol": 1e-5}
    big, chosen = big_batch(group, dtype), options.split()
    if "queue" in chosen:
        rest["queue"] = small_queue(dtype, "ids" in chosen or "queue_ids" in chosen, "log_q" in chosen)
    temperature = "rows" if "rows" in chosen else "temperature"
    learn = ["query", "positive_key", *(x for x in ("log_q", "weight") if x in chosen)]

    def run(loss: Callable[..., Tensor], own: Callable[[Tensor], Tensor]) -> tuple[Tensor, list[Tensor]]:
        inputs = {name: own(big[name]).clone().requires_grad_() for name in learn}
        t = big[temperature].clone() if temperature == "temperature" else own(big["rows"]).clone()
        constants = {"ids": own(big["ids"])} if "ids" in chosen else {}
        value = loss(**inputs, temperature=t.requires_grad_(), **constants, **rest)
        return value, list(torch.autograd.grad(value.sum(), [*inputs.values(), t]))

    own = functools.partial(own_rows, group=group)
    for reduction in ("mean", "sum", "none"):
        rest["reduction"] = reduction
        truth, wanted = run(loss, lambda x: x)
        value, found = run(FORMS[form](loss, group), own)
        assert value.dtype == truth.dtype == dtype
        if reduction == "none":
            torch.testing.assert_close(value, own(truth), **tol)
            # Unscaled rows: gradients are those of the sum over all ranks, without the factor for averaging.
            factor = 1.0
        else:
            torch.testing.assert_close(mean_over_ranks(value, group), truth.detach(), **tol)
            factor = 1.0 / dist.get_world_size(group)
        for a, b in zip(found, wanted, strict=True):
            if b.dim() == 0:
                torch.testing.assert_close(mean_over_ranks(a, group) * factor * dist.get_world_size(group), b, **tol)
            else:
                torch.testing.assert_close(a * factor, own(b), **tol)
