"""What several ranks check together of a softmax over a table that they share out: value and gradients are those of
`linear_cross_entropy` over the whole table.

ranks.py starts them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_inputs import BF16, F32, F64, SIZES, D, mean_over_ranks
from rank_losses import _Largest
from torch import Tensor

import fastcl
from fastcl import distributed

C = 17


def _problem(sizes: tuple[int, ...], dtype: torch.dtype = F64, classes: int = C) -> dict[str, Any]:
    """The big batch and the whole table, the same on every rank."""
    g = torch.Generator().manual_seed(7)
    n = sum(sizes)
    return {
        "query": torch.randn(n, D, generator=g, dtype=F64).to(dtype),
        "table": torch.randn(classes, D, generator=g, dtype=F64).to(dtype),
        "target": torch.randint(classes, (n,), generator=g),
        "bias": torch.randn(classes, generator=g, dtype=F64).to(dtype),
        "temperature": torch.tensor(0.3, dtype=dtype),
        "rows": (0.2 + torch.rand(n, generator=g, dtype=F64)).to(dtype),
        "row_weight": torch.rand(n, generator=g, dtype=F64).to(dtype),
    }


def _blocks(count: int, world: int) -> list[range]:
    """Uneven shares in a row; the last rank of several has none."""
    cuts = [0, count] if world == 1 else [0, 5, *[count] * (world - 1)]
    return [range(a, b) for a, b in zip(cuts, cuts[1:], strict=False)]


def _assert_equals_the_whole(
    options: str,
    reduction: str = "mean",
    sizes: tuple[int, ...] = SIZES,
    dtype: torch.dtype = F64,
    cut: str = "remainder",
    group: Any = None,
    **rest: Any,
) -> None:
    """options: which of bias, temperature, rows (a temperature a row), row_weight and ignored targets the call has."""
    world, rank, chosen = dist.get_world_size(group), dist.get_rank(group), options.split()
    sizes = sizes[:world]
    big = _problem(sizes, dtype)
    if "ignored" in chosen:
        big["target"][::3] = rest.setdefault("ignore_index", -100)
    start = sum(sizes[:rank])
    here = slice(start, start + sizes[rank])
    blocks = _blocks(C, world)
    columns = torch.arange(rank, C, world) if cut == "remainder" else torch.tensor(list(blocks[rank]), dtype=torch.long)
    named = {} if cut == "remainder" else {"ids": 3 * columns + 1}
    target = big["target"] if cut == "remainder" else torch.where(big["target"] < 0, -100, 3 * big["target"] + 1)

    def leaves(of_table: Any, of_rows: Any) -> dict[str, Tensor]:
        found = {"query": big["query"][of_rows], "table": big["table"][of_table]}
        found |= {"bias": big["bias"][of_table]} if "bias" in chosen else {}
        found |= {"temperature": big["temperature"]} if "temperature" in chosen else {}
        found |= {"temperature": big["rows"][of_rows]} if "rows" in chosen else {}
        found |= {"row_weight": big["row_weight"][of_rows]} if "row_weight" in chosen else {}
        return {name: x.clone().requires_grad_() for name, x in found.items()}

    # An upstream gradient for each row, unlike on any two ranks.
    upstream = torch.arange(1.0, sum(sizes) + 1, dtype=dtype) if reduction == "none" else torch.tensor(1.0, dtype=dtype)
    whole, mine = leaves(slice(None), slice(None)), leaves(columns, here)
    both = {name: whole[name] for name in ("temperature", "row_weight") if name in whole}
    truth = fastcl.linear_cross_entropy(
        whole["query"], whole["table"], big["target"], whole.get("bias"), reduction=reduction, **both, **rest
    )
    wanted = dict(zip(whole, torch.autograd.grad(truth, list(whole.values()), upstream), strict=True))
    own = {name: x for name, x in mine.items() if name not in ("query", "table")}
    value = distributed.sharded_cross_entropy(
        mine["query"], mine["table"], target[here], reduction=reduction, group=group, **own, **named, **rest
    )
    given = upstream[here] if reduction == "none" else upstream
    found = dict(zip(mine, torch.autograd.grad(value, list(mine.values()), given), strict=True))

    tolerance = {F64: 1e-12, F32: 1e-5, BF16: 2e-2}[dtype]
    close = {"rtol": tolerance, "atol": tolerance}
    assert value.dtype == truth.dtype
    factor = world if reduction == "none" else 1  # of what is the mean over the ranks of the sum of the rows
    if reduction == "none":
        torch.testing.assert_close(value, truth[here], **close)
    else:
        torch.testing.assert_close(mean_over_ranks(value, group), truth.detach(), **close)
    torch.testing.assert_close(found["query"] * factor / world, wanted["query"][here], **close)
    torch.testing.assert_close(found["table"] * factor, wanted["table"][columns], **close)
    if "bias" in chosen:
        torch.testing.assert_close(found["bias"] * factor, wanted["bias"][columns], **close)
    if "temperature" in chosen:
        mean = mean_over_ranks(found["temperature"] * factor, group)
        torch.testing.assert_close(mean, wanted["temperature"], **close)
    for option, name in (("rows", "temperature"), ("row_weight", "row_weight")):
        if option in chosen:
            torch.testing.assert_close(found[name] * factor / world, wanted[name][here], **close)


def check_sharded_cross_entropy() -> None:
    for reduction in ("mean", "sum", "none"):
        _assert_equals_the_whole("", reduction)
        _assert_equals_the_whole("bias temperature row_weight ignored", reduction)
        _assert_equals_the_whole("bias rows", reduction, cut="blocks")
    _assert_equals_the_whole("rows ignored", cut="blocks")
    _assert_equals_the_whole("", temperature=0.2)
    _assert_equals_the_whole("ignored", ignore_index=-1)
    for dtype in (F32, BF16):
        _assert_equals_the_whole("bias", dtype=dtype)


def check_sharded_cross_entropy_of_ranks_without_rows() -> None:
    for cut in ("remainder", "blocks"):
        _assert_equals_the_whole("bias rows", sizes=(4, 0, 3), cut=cut)
        _assert_equals_the_whole("bias temperature", sizes=(0, 5, 0), cut=cut)
    rank = dist.get_rank()
    query, shard = torch.ones(0, D, requires_grad=True), torch.ones(2, D, requires_grad=True)
    value = distributed.sharded_cross_entropy(query, shard, torch.ones(0, dtype=torch.long))
    assert value.item() == 0.0
    assert all(not x.any() for x in torch.autograd.grad(value, [query, shard]))
    # All targets are ignored, and the one class of all ranks is on the first one.
    query, shard = torch.ones(2, D, requires_grad=True), torch.ones(int(rank == 0), D, requires_grad=True)
    for target in (-100, 0):
        value = distributed.sharded_cross_entropy(query, shard, torch.full((2,), target))
        assert value.item() == 0.0
        assert all(not x.any() for x in torch.autograd.grad(value, [query, shard]))


def check_sharded_cross_entropy_of_some_ranks() -> None:
    members = [0, dist.get_world_size() - 1]
    group = dist.new_group(members)
    if dist.get_rank() in members:
        _assert_equals_the_whole("bias row_weight", group=group)


def check_sharded_cross_entropy_of_what_does_not_learn() -> None:
    sizes = SIZES[: dist.get_world_size()]
    big, rank, world = _problem(sizes), dist.get_rank(), dist.get_world_size()
    here = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    query, shard, target = big["query"][here], big["table"][rank::world], big["target"][here]
    whole = big["table"].clone().requires_grad_()
    truth = fastcl.linear_cross_entropy(big["query"], whole, big["target"])
    with torch.no_grad():
        value = distributed.sharded_cross_entropy(query, shard, target)
    torch.testing.assert_close(mean_over_ranks(value), truth.detach(), rtol=1e-12, atol=1e-12)
    learning = shard.clone().requires_grad_()
    distributed.sharded_cross_entropy(query, learning, target).backward()
    (wanted,) = torch.autograd.grad(truth, whole)
    torch.testing.assert_close(learning.grad, wanted[rank::world], rtol=1e-12, atol=1e-12)


def check_sharded_cross_entropy_stores_no_table_but_its_own() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    classes = 4001
    big = _problem((2,) * world, classes=classes)
    query = big["query"][2 * rank : 2 * rank + 2].clone().requires_grad_()
    shard = big["table"][rank::world].clone().requires_grad_()
    with _Largest() as mode:
        distributed.sharded_cross_entropy(query, shard, big["target"][2 * rank : 2 * rank + 2]).backward()
    assert shard.numel() <= mode.elements <= -(-classes // world) * D < classes * D


def check_a_mistake_in_a_shard_reaches_all() -> None:
    last = dist.get_world_size() - 1
    mine = dist.get_rank() == last
    good: dict[str, Any] = {"query": torch.ones(2, D), "shard": torch.ones(3, D), "target": torch.tensor([0, 1])}
    for change, error, name in (
        ({"query": torch.ones(2)}, ValueError, "query"),
        ({"shard": torch.ones(3, D + 1)}, ValueError, "shard"),
        ({"shard": None}, TypeError, "shard"),
        ({"target": torch.ones(2)}, TypeError, "target"),
        ({"target": torch.ones(3).long()}, ValueError, "target"),
        ({"bias": torch.ones(2)}, ValueError, "bias"),
        ({"ids": torch.ones(3)}, TypeError, "ids"),
        ({"ids": torch.tensor([3, 4, 4])}, ValueError, "ids: expected distinct numbers in rising order"),
        ({"temperature": 0.0}, ValueError, "temperature"),
        ({"reduction": "max"}, ValueError, "reduction"),
        ({"row_weight": torch.ones(3)}, ValueError, "row_weight"),
        ({"ignore_index": "none"}, TypeError, "ignore_index"),
    ):
        with pytest.raises(error if mine else RuntimeError) as raised:
            distributed.sharded_cross_entropy(**{**good, **(change if mine else {})})
        assert str(raised.value).startswith(name if mine else f"rank {last} refused its arguments"), raised.value
    for change in (
        {"shard": torch.ones(3, D, requires_grad=True)},
        {"bias": torch.ones(3, requires_grad=True)},
        {"ids": torch.arange(3)},
        {"temperature": 0.2},
        {"temperature": torch.tensor(1.0)},
        {"reduction": "sum"},
        {"ignore_index": -1},
    ):
        with pytest.raises(RuntimeError, match=f"rank {last}: expected arguments of the kinds that rank 0 has"):
            distributed.sharded_cross_entropy(**{**good, **(change if mine else {})})
    # What only all ranks together can know is wrong is refused by all of them.
    own = {"ids": torch.arange(3) + 3 * dist.get_rank()}
    for changes, message in (
        ({"target": torch.tensor([0, 999 if mine else 0])}, "target: expected ignore_index.*999, which no ranks have"),
        ({"ids": torch.arange(3)}, f"target: expected ignore_index.*got 0, which {last + 1} ranks have"),
        ({"target": torch.tensor([0, -1])}, "target.*got -1, which no ranks have"),
    ):
        with pytest.raises(ValueError, match=message):
            distributed.sharded_cross_entropy(**{**good, **own, **changes})
    with pytest.raises(ValueError, match=rf"shard: expected the rows r, r \+ {last + 1}, ... of .* on each rank"):
        distributed.sharded_cross_entropy(**{**good, **({"shard": torch.ones(5, D)} if mine else {})})
