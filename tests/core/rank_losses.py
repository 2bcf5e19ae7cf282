"""What several ranks check together of losses: values and gradients are those of the one big batch.

ranks.py starts them.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_inputs import (
    BF16,
    F32,
    F64,
    FORMS,
    SIZES,
    D,
    assert_equals_the_big_batch,
    big_batch,
    mean_over_ranks,
    own_rows,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fastcl
from fastcl import distributed


def check_gather() -> None:
    n = sum(SIZES[: dist.get_world_size()])
    for dtype in (F64, F32, BF16):
        whole = torch.arange(2.0 * n).reshape(n, 2).to(dtype)
        mine = own_rows(whole).clone().requires_grad_()
        everything = distributed.gather(mine)
        assert torch.equal(everything, whole)
        upstream = torch.full_like(whole, dist.get_rank() + 1.0) * torch.arange(n).to(dtype)[:, None]
        (grad,) = torch.autograd.grad(everything, mine, upstream)
        world = dist.get_world_size()
        assert torch.equal(grad, own_rows(torch.arange(n).to(dtype)[:, None].expand(n, 2)) * (world * (world + 1) // 2))
    ids = torch.arange(n) * 3
    assert torch.equal(distributed.gather(own_rows(ids)), ids)
    others = (torch.bool, torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.uint64)
    for dtype in (*others, torch.float16, torch.complex64, torch.float8_e4m3fn):
        for whole in (ids.to(dtype), ids.reshape(n, 1, 1).expand(n, 2, 3).to(dtype), torch.empty(n, 0, dtype=dtype)):
            found = distributed.gather(own_rows(whole))
            assert (found.dtype, found.shape) == (dtype, whole.shape)
            assert torch.equal(found.view(torch.uint8), whole.contiguous().view(torch.uint8))
    turned = torch.complex(ids.float(), ids.float() + 1).conj()  # only a mark on memory that is not turned
    assert torch.equal(distributed.gather(own_rows(turned)), turned.resolve_conj())
    assert torch.equal(distributed.gather(own_rows(turned).imag), turned.imag)
    assert torch.equal(distributed.row_ids(SIZES[dist.get_rank()]), own_rows(torch.arange(n)))


def check_local_form() -> None:
    for form in FORMS:
        for loss in (fastcl.infonce, fastcl.dcl, fastcl.infonce_plus, fastcl.mine, fastcl.mine_plus):
            assert_equals_the_big_batch(form, loss, "")
        for options in ("ids", "ids log_q weight rows", "weight"):
            assert_equals_the_big_batch(form, fastcl.infonce, options)
            assert_equals_the_big_batch(form, fastcl.mine, options)
        assert_equals_the_big_batch(form, fastcl.infonce, "", normalize=False)
        assert_equals_the_big_batch(form, fastcl.debiased_infonce, "ids", beta=0.5)
        assert_equals_the_big_batch(form, fastcl.infonce, "ids", symmetric=True)
        assert_equals_the_big_batch(form, fastcl.infonce, "ids log_q", dtype=F32)
        assert_equals_the_big_batch(form, fastcl.mine, "", dtype=F32)


def check_local_form_with_a_queue() -> None:
    for options in ("queue", "queue queue_ids", "queue ids", "queue ids log_q"):
        assert_equals_the_big_batch("gathered", fastcl.infonce, options, in_batch=None)


def check_sampled_softmax() -> None:
    assert_equals_the_big_batch("gathered", fastcl.sampled_softmax, "ids log_q")


def check_a_group_of_some_ranks() -> None:
    members = [0, dist.get_world_size() - 1]
    group = dist.new_group(members)
    if dist.get_rank() in members:
        for form in FORMS:
            assert_equals_the_big_batch(form, fastcl.infonce, "ids log_q", group=group)


def check_global_form() -> None:
    big = big_batch()
    labels = big["ids"] % 3
    for loss in (
        lambda q, k: fastcl.infonce(q, k, temperature=0.3, symmetric=True),
        lambda q, k: fastcl.nt_xent(q, k),
        lambda q, k: fastcl.supcon(torch.cat([q, k]), torch.cat([labels, labels])),
        lambda q, k: fastcl.siglip(q, k, 5.0, -2.0),
        lambda q, k: fastcl.bpr(q, k, k.flip(0)),
        lambda q, k: fastcl.alignment(q, k),
        lambda q, k: fastcl.uniformity(q + k),
    ):
        whole = [big[name].clone().requires_grad_() for name in ("query", "positive_key")]
        truth = loss(*whole)
        wanted = torch.autograd.grad(truth, whole)
        mine = [own_rows(big[name]).clone().requires_grad_() for name in ("query", "positive_key")]
        value = loss(*(distributed.gather(x) for x in mine))
        torch.testing.assert_close(value, truth, rtol=1e-10, atol=1e-10)
        for a, b in zip(torch.autograd.grad(value, mine), wanted, strict=True):
            torch.testing.assert_close(a / dist.get_world_size(), own_rows(b), rtol=1e-10, atol=1e-10)


def _equals_siglip(key: Tensor, of_ranks: tuple[int, ...], ids: dict[str, Tensor]) -> None:
    """`ring_siglip` on this rank's rows and keys, of which each rank has `of_ranks`, is `siglip` of the big batch."""
    big, world = big_batch(), dist.get_world_size()
    constants = [torch.tensor(5.0, dtype=F64), torch.tensor(-2.0, dtype=F64)]
    own_keys = functools.partial(own_rows, of_ranks=of_ranks)
    own = {name: (own_keys if name == "key_ids" else own_rows)(x) for name, x in ids.items()}
    within = {"rtol": 1e-12, "atol": 1e-12}
    for reduction in ("mean", "sum", "none"):
        whole = [x.clone().requires_grad_() for x in (big["query"], key, *constants)]
        truth = fastcl.siglip(*whole, reduction=reduction, weight=big["weight"], **ids)
        wanted = torch.autograd.grad(truth.sum(), whole)
        mine = [x.clone().requires_grad_() for x in (own_rows(big["query"]), own_keys(key), *constants)]
        value = distributed.ring_siglip(*mine, reduction=reduction, weight=own_rows(big["weight"]), **own)
        if reduction == "none":
            torch.testing.assert_close(value, own_rows(truth), **within)
        else:
            torch.testing.assert_close(mean_over_ranks(value), truth, **within)
        found = torch.autograd.grad(value.sum(), mine)
        count = 1 if reduction == "none" else world
        torch.testing.assert_close(found[0] / count, own_rows(wanted[0]), **within)
        torch.testing.assert_close(found[1] / count, own_keys(wanted[1]), **within)
        for a, b in zip(found[2:], wanted[2:], strict=True):
            torch.testing.assert_close(mean_over_ranks(a) * (world / count), b, **within)
    plain = distributed.ring_siglip(own_rows(big["query"]), own_keys(key), 5.0, -2.0, **own)
    torch.testing.assert_close(mean_over_ranks(plain), fastcl.siglip(big["query"], key, 5.0, -2.0, **ids), **within)


def check_ring_siglip() -> None:
    _equals_siglip(big_batch()["positive_key"], SIZES, {})


def check_ring_siglip_of_groups() -> None:
    """Positives on other ranks, rows without any, other numbers of keys than of rows, and a rank without keys."""
    g = torch.Generator().manual_seed(7)
    of_ranks = (7, 0, 4)
    count = sum(of_ranks[: dist.get_world_size()])
    ids = {"ids": big_batch()["ids"] % 4, "key_ids": torch.randint(3, (count,), generator=g)}
    _equals_siglip(torch.randn(count, D, generator=g, dtype=F64), of_ranks, ids)
    whole = big_batch()["query"]
    with pytest.raises(ValueError, match="key_ids: expected both ids and key_ids or neither"):
        distributed.ring_siglip(own_rows(whole), own_rows(whole), ids=own_rows(big_batch()["ids"]))


def check_nt_xent_by_ids() -> None:
    big = big_batch()
    truth = fastcl.nt_xent(big["query"], big["positive_key"])
    q, k = own_rows(big["query"]), own_rows(big["positive_key"])
    ids = distributed.row_ids(len(q)).repeat(2)
    for form in FORMS.values():
        value = form(fastcl.infonce)(torch.cat([q, k]), torch.cat([k, q]), temperature=0.5, ids=ids)
        torch.testing.assert_close(mean_over_ranks(value), truth, rtol=1e-10, atol=1e-10)


def check_rows_without_negatives() -> None:
    big = big_batch()
    for form in FORMS.values():
        q, k = (own_rows(big[name]).clone().requires_grad_() for name in ("query", "positive_key"))
        ids = torch.full((len(q),), 7)
        value = form(fastcl.infonce)(q, k, ids=ids, reduction="none")
        assert torch.equal(value, torch.zeros(len(q), dtype=F64))
        for grad in torch.autograd.grad(value.sum(), [q, k]):
            assert torch.equal(grad, torch.zeros_like(q))


def check_keys_that_do_not_learn() -> None:
    big = big_batch()
    whole = big["query"].clone().requires_grad_()
    (wanted,) = torch.autograd.grad(fastcl.infonce(whole, big["positive_key"]), whole)
    for form in FORMS.values():
        q = own_rows(big["query"]).clone().requires_grad_()
        (found,) = torch.autograd.grad(form(fastcl.infonce)(q, own_rows(big["positive_key"])), q)
        torch.testing.assert_close(found / dist.get_world_size(), own_rows(wanted), rtol=1e-10, atol=1e-10)
        with torch.no_grad():
            value = form(fastcl.infonce)(q, own_rows(big["positive_key"]))
        torch.testing.assert_close(
            mean_over_ranks(value), fastcl.infonce(big["query"], big["positive_key"]), rtol=1e-10, atol=1e-10
        )


class _Largest(TorchDispatchMode):
    """The elements of the largest floating tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(found):
            if isinstance(x, Tensor) and x.is_floating_point():
                self.elements = max(self.elements, x.numel())
        return found


def check_ring_holds_one_block() -> None:
    big = big_batch()
    largest = {}
    for name, form in FORMS.items():
        q, k = (own_rows(big[name]).clone().requires_grad_() for name in ("query", "positive_key"))
        with _Largest() as mode:
            form(fastcl.infonce)(q, k, log_q=own_rows(big["log_q"])).backward()
        largest[name] = mode.elements
    assert largest["ring"] == max(SIZES[: dist.get_world_size()]) * D
    assert largest["gathered"] >= len(big["query"]) * D
