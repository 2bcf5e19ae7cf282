"""What several ranks check together of ranks without rows, and of mistakes of one rank.

ranks.py starts them.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_inputs import F32, F64, FORMS, SIZES, D, big_batch, mean_over_ranks, small_queue

import fastcl
from fastcl import distributed


def check_a_rank_without_rows() -> None:
    big = big_batch()
    empty = dist.get_world_size() - 1
    sizes = [*SIZES[:empty], 0]
    start, n = sum(sizes[: dist.get_rank()]), sizes[dist.get_rank()]
    for form in FORMS.values():
        for loss, options in ((fastcl.infonce, {}), (fastcl.infonce, {"symmetric": True}), (fastcl.mine, {})):
            whole = [big[name][: sum(sizes)].clone().requires_grad_() for name in ("query", "positive_key")]
            truth = loss(*whole, **options)
            wanted = torch.autograd.grad(truth, whole)
            mine = [x.detach()[start : start + n].clone().requires_grad_() for x in whole]
            value = form(loss)(*mine, **options)
            torch.testing.assert_close(mean_over_ranks(value), truth.detach(), rtol=1e-10, atol=1e-10)
            assert n or value.item() == 0.0
            for a, b in zip(torch.autograd.grad(value, mine), wanted, strict=True):
                torch.testing.assert_close(a / dist.get_world_size(), b[start : start + n], rtol=1e-10, atol=1e-10)
    queue = fastcl.NegativeQueue(8, D, F64)
    distributed.push(queue, big["query"][start : start + n])
    assert torch.equal(queue.newest(8).keys, big["query"][: sum(sizes)][-8:])


def check_options_of_a_rank_without_rows() -> None:
    big = big_batch()
    empty = dist.get_world_size() - 1
    sizes = [*SIZES[:empty], 0]
    start, n = sum(sizes[: dist.get_rank()]), sizes[dist.get_rank()]
    learn = ("query", "positive_key", "log_q", "weight", "temperature")
    for form in FORMS.values():
        for loss in (fastcl.infonce, fastcl.dclw, fastcl.mine_plus):
            whole = {
                name: big[name][: sum(sizes)].clone() for name in ("query", "positive_key", "log_q", "weight", "ids")
            }
            whole["temperature"] = big["rows"][: sum(sizes)].clone()
            mine = {name: x[start : start + n].clone() for name, x in whole.items()}
            for inputs in (whole, mine):
                for name in learn:
                    inputs[name].requires_grad_()
            if loss is fastcl.dclw:  # its default weights are those of a rank's own rows
                options: dict[str, Any] = {"weight_fn": lambda q, p: 2.0 - (q * p).sum(1).sigmoid()}
            else:
                options = {}
            truth, value = loss(**whole, **options), form(loss)(**mine, **options)
            torch.testing.assert_close(mean_over_ranks(value), truth.detach(), rtol=1e-10, atol=1e-10)
            wanted, found = (torch.autograd.grad(x, [i[k] for k in learn]) for x, i in ((truth, whole), (value, mine)))
            for a, b in zip(found, wanted, strict=True):
                torch.testing.assert_close(a / dist.get_world_size(), b[start : start + n], rtol=1e-10, atol=1e-10)


def check_no_rank_has_rows() -> None:
    for form in FORMS.values():
        for reduction in ("mean", "sum", "none"):
            leaves = [torch.ones(0, D, requires_grad=True) for _ in range(2)]
            value = form(fastcl.infonce)(*leaves, reduction=reduction)
            assert value.sum().item() == 0.0
            assert all(x.shape == (0, D) for x in torch.autograd.grad(value.sum(), leaves))
    assert distributed.gather(torch.ones(0, 3)).shape == (0, 3)


def check_a_mistake_of_one_rank_reaches_all() -> None:
    good = {"query": torch.ones(2, D), "positive_key": torch.ones(2, D)}
    wrong = [
        ({"query": torch.ones(2, D + 1)}, ValueError, "positive_key"),
        ({"temperature": -1.0}, ValueError, "temperature"),
        ({"ids": torch.ones(2)}, TypeError, "ids"),
        ({"symmetric": True, "log_q": torch.ones(2)}, ValueError, "symmetric"),
        ({"positive_key": None}, TypeError, "positive_key"),
        ({"temprature": 0.1}, TypeError, "got an unexpected keyword argument 'temprature'"),
        ({"temperature": torch.tensor(-1.0)}, ValueError, "temperature"),
    ]
    last = dist.get_world_size() - 1
    mine = dist.get_rank() == last
    for form in FORMS.values():
        for change, error, name in wrong:
            with pytest.raises(error if mine else RuntimeError) as raised:
                form(fastcl.infonce)(**{**good, **(change if mine else {})})
            assert str(raised.value).startswith(name if mine else f"rank {last} refused its arguments"), raised.value
    for loss, change, error, name in (
        (fastcl.debiased_infonce, {"tau_plus": 2.0}, ValueError, "tau_plus"),
        (fastcl.mine_plus, {"lam": "much"}, TypeError, "lam"),
        # An option for each row, of another length than the batch: longer, shorter, and of a single row.
        *((fastcl.infonce, {"cap": torch.ones(n)}, ValueError, "cap: expected shape [2]") for n in (1, 3)),
        (fastcl.sl_at_k, {"threshold": torch.zeros(3)}, ValueError, "threshold"),
        (fastcl.bsl, {"group": torch.zeros(2).long()}, ValueError, "group"),
    ):
        for form in FORMS.values():
            with pytest.raises(error if mine else RuntimeError) as raised:
                form(loss)(**good, **(change if mine else {}))
            assert str(raised.value).startswith(name if mine else f"rank {last} refused its arguments"), raised.value
    for option in (torch.ones(2, D), small_queue(F32, False, True)):  # the second with a log q that the loss has not
        with pytest.raises((TypeError, ValueError) if mine else RuntimeError, match=None if mine else f"rank {last}"):
            distributed.gathered(fastcl.infonce)(**good, queue=option if mine else None)
    # Options that are valid, but given on one rank only, would leave the other ranks waiting.
    for change in (
        {"log_q": torch.ones(2)},
        {"positive_key": torch.ones(2, D, requires_grad=True)},
        {"positive_key": torch.ones(2, D).double(), "query": torch.ones(2, D).double()},
        {"query": torch.ones(2, D).double()},
        {"symmetric": True},
        {"temperature": 0.2},
        {"reduction": "sum"},
        {"normalize": False},
    ):
        for form in FORMS.values():
            with pytest.raises(RuntimeError, match=f"rank {last}: expected arguments of the kinds that rank 0 has"):
                form(fastcl.infonce)(**{**good, **(change if mine else {})})
    with pytest.raises(RuntimeError, match=f"rank {last}: expected arguments of the kinds that rank 0 has"):
        distributed.ring_siglip(torch.ones(2, D, dtype=F64 if mine else F32), torch.ones(2, D))
    queue = fastcl.NegativeQueue(3, D)
    for call in (distributed.gather, functools.partial(distributed.push, queue)):
        with pytest.raises(TypeError if mine else RuntimeError):
            call("no tensor" if mine else torch.ones(2, D))
        for wrong_kind in (torch.ones(2, D).to_sparse(), torch.ones(2, D, device="meta")):
            with pytest.raises((TypeError, ValueError) if mine else RuntimeError):
                call(wrong_kind if mine else torch.ones(2, D))
    assert len(queue) == 0
