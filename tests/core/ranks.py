"""What several ranks check together: losses over all their rows against the loss of the one big batch.

Run by torchrun, which test_distributed.py starts; every rank runs every `check_*` below, the first failure ends them
all.
"""

from __future__ import annotations

import datetime
import functools
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import fastcl
from fastcl import distributed

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
FORMS = {"gathered": distributed.gathered, "ring": distributed.ring}
SIZES = (5, 3, 6)  # rows of each rank
D = 4


def _own(x: Tensor, group: Any = None) -> Tensor:
    """This rank's rows of a big batch."""
    sizes = SIZES[: dist.get_world_size(group)]
    start = sum(sizes[: dist.get_rank(group)])
    return x[start : start + sizes[dist.get_rank(group)]]


def _big(group: Any = None, dtype: torch.dtype = F64) -> dict[str, Tensor]:
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


def _queue(dtype: torch.dtype, ids: bool, log_q: bool) -> fastcl.NegativeQueue:
    g = torch.Generator().manual_seed(6)
    queue = fastcl.NegativeQueue(8, D, dtype)
    keys = torch.randn(5, D, generator=g)
    queue.push(keys, torch.arange(5) if ids else None, torch.randn(5, generator=g) if log_q else None)
    return queue


def _mean_over_ranks(x: Tensor, group: Any = None) -> Tensor:
    total = x.detach().clone()
    dist.all_reduce(total, group=group)
    return total / dist.get_world_size(group)


def _assert_equals_the_big_batch(
    form: str, loss: Callable[..., Tensor], options: str, dtype: torch.dtype = F64, group: Any = None, **rest: Any
) -> None:
    """`options`: which of ids, log_q, weight, queue and rows (a temperature for each row) the call has."""
    tol = {"rtol": 1e-10, "atol": 1e-10} if dtype == F64 else {"rtol": 1e-5, "atol": 1e-5}
    big, chosen = _big(group, dtype), options.split()
    if "queue" in chosen:
        rest["queue"] = _queue(dtype, "ids" in chosen or "queue_ids" in chosen, "log_q" in chosen)
    temperature = "rows" if "rows" in chosen else "temperature"
    learn = ["query", "positive_key", *(x for x in ("log_q", "weight") if x in chosen)]

    def run(loss: Callable[..., Tensor], own: Callable[[Tensor], Tensor]) -> tuple[Tensor, list[Tensor]]:
        inputs = {name: own(big[name]).clone().requires_grad_() for name in learn}
        t = big[temperature].clone() if temperature == "temperature" else own(big["rows"]).clone()
        constants = {"ids": own(big["ids"])} if "ids" in chosen else {}
        value = loss(**inputs, temperature=t.requires_grad_(), **constants, **rest)
        return value, list(torch.autograd.grad(value.sum(), [*inputs.values(), t]))

    own = functools.partial(_own, group=group)
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
            torch.testing.assert_close(_mean_over_ranks(value, group), truth.detach(), **tol)
            factor = 1.0 / dist.get_world_size(group)
        for a, b in zip(found, wanted, strict=True):
            if b.dim() == 0:
                torch.testing.assert_close(_mean_over_ranks(a, group) * factor * dist.get_world_size(group), b, **tol)
            else:
                torch.testing.assert_close(a * factor, own(b), **tol)


def check_gather() -> None:
    n = sum(SIZES[: dist.get_world_size()])
    for dtype in (F64, F32, BF16):
        whole = torch.arange(2.0 * n).reshape(n, 2).to(dtype)
        mine = _own(whole).clone().requires_grad_()
        everything = distributed.gather(mine)
        assert torch.equal(everything, whole)
        upstream = torch.full_like(whole, dist.get_rank() + 1.0) * torch.arange(n).to(dtype)[:, None]
        (grad,) = torch.autograd.grad(everything, mine, upstream)
        world = dist.get_world_size()
        assert torch.equal(grad, _own(torch.arange(n).to(dtype)[:, None].expand(n, 2)) * (world * (world + 1) // 2))
    ids = torch.arange(n) * 3
    assert torch.equal(distributed.gather(_own(ids)), ids)
    assert torch.equal(distributed.row_ids(SIZES[dist.get_rank()]), _own(torch.arange(n)))


def check_local_form() -> None:
    for form in FORMS:
        for loss in (fastcl.infonce, fastcl.dcl, fastcl.infonce_plus, fastcl.mine, fastcl.mine_plus):
            _assert_equals_the_big_batch(form, loss, "")
        for options in ("ids", "ids log_q weight rows", "weight"):
            _assert_equals_the_big_batch(form, fastcl.infonce, options)
            _assert_equals_the_big_batch(form, fastcl.mine, options)
        _assert_equals_the_big_batch(form, fastcl.infonce, "", normalize=False)
        _assert_equals_the_big_batch(form, fastcl.debiased_infonce, "ids", beta=0.5)
        _assert_equals_the_big_batch(form, fastcl.infonce, "ids", symmetric=True)
        _assert_equals_the_big_batch(form, fastcl.infonce, "ids log_q", dtype=F32)
        _assert_equals_the_big_batch(form, fastcl.mine, "", dtype=F32)


def check_local_form_with_a_queue() -> None:
    for options in ("queue", "queue queue_ids", "queue ids", "queue ids log_q"):
        _assert_equals_the_big_batch("gathered", fastcl.infonce, options, in_batch=None)


def check_sampled_softmax() -> None:
    _assert_equals_the_big_batch("gathered", fastcl.sampled_softmax, "ids log_q")


def check_a_group_of_some_ranks() -> None:
    members = [0, dist.get_world_size() - 1]
    group = dist.new_group(members)
    if dist.get_rank() in members:
        for form in FORMS:
            _assert_equals_the_big_batch(form, fastcl.infonce, "ids log_q", group=group)


def check_global_form() -> None:
    big = _big()
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
        mine = [_own(big[name]).clone().requires_grad_() for name in ("query", "positive_key")]
        value = loss(*(distributed.gather(x) for x in mine))
        torch.testing.assert_close(value, truth, rtol=1e-10, atol=1e-10)
        for a, b in zip(torch.autograd.grad(value, mine), wanted, strict=True):
            torch.testing.assert_close(a / dist.get_world_size(), _own(b), rtol=1e-10, atol=1e-10)


def check_nt_xent_by_ids() -> None:
    big = _big()
    truth = fastcl.nt_xent(big["query"], big["positive_key"])
    q, k = _own(big["query"]), _own(big["positive_key"])
    ids = distributed.row_ids(len(q)).repeat(2)
    for form in FORMS.values():
        value = form(fastcl.infonce)(torch.cat([q, k]), torch.cat([k, q]), temperature=0.5, ids=ids)
        torch.testing.assert_close(_mean_over_ranks(value), truth, rtol=1e-10, atol=1e-10)


def check_rows_without_negatives() -> None:
    big = _big()
    for form in FORMS.values():
        q, k = (_own(big[name]).clone().requires_grad_() for name in ("query", "positive_key"))
        ids = torch.full((len(q),), 7)
        value = form(fastcl.infonce)(q, k, ids=ids, reduction="none")
        assert torch.equal(value, torch.zeros(len(q), dtype=F64))
        for grad in torch.autograd.grad(value.sum(), [q, k]):
            assert torch.equal(grad, torch.zeros_like(q))


def check_keys_that_do_not_learn() -> None:
    big = _big()
    whole = big["query"].clone().requires_grad_()
    (wanted,) = torch.autograd.grad(fastcl.infonce(whole, big["positive_key"]), whole)
    for form in FORMS.values():
        q = _own(big["query"]).clone().requires_grad_()
        (found,) = torch.autograd.grad(form(fastcl.infonce)(q, _own(big["positive_key"])), q)
        torch.testing.assert_close(found / dist.get_world_size(), _own(wanted), rtol=1e-10, atol=1e-10)
        with torch.no_grad():
            value = form(fastcl.infonce)(q, _own(big["positive_key"]))
        torch.testing.assert_close(
            _mean_over_ranks(value), fastcl.infonce(big["query"], big["positive_key"]), rtol=1e-10, atol=1e-10
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
    big = _big()
    largest = {}
    for name, form in FORMS.items():
        q, k = (_own(big[name]).clone().requires_grad_() for name in ("query", "positive_key"))
        with _Largest() as mode:
            form(fastcl.infonce)(q, k, log_q=_own(big["log_q"])).backward()
        largest[name] = mode.elements
    assert largest["ring"] == max(SIZES[: dist.get_world_size()]) * D
    assert largest["gathered"] >= len(big["query"]) * D


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encode = torch.nn.Linear(D, D, dtype=F64)
        self.temperature = torch.nn.Parameter(torch.tensor(0.3, dtype=F64))
        self.queue = fastcl.NegativeQueue(7, D, F64)

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x)


def check_ddp_with_a_synchronised_queue() -> None:
    single, wrapped = _Model(), DistributedDataParallel(_Model())
    inner = wrapped.module
    models = ((single, single, fastcl.infonce, lambda x: x, single.queue.push),
              (wrapped, inner, distributed.gathered(fastcl.infonce), _own,
               functools.partial(distributed.push, inner.queue)))  # fmt: skip
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in (single, wrapped)]
    for step in range(3):
        big = {name: x * (1 + step) for name, x in _big().items()}
        for (model, state, loss, own, push), optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            both = model(torch.cat([own(big["query"]), own(big["positive_key"])]))
            q, k = both.chunk(2)
            value = loss(q, k, temperature=state.temperature, in_batch=None, queue=state.queue, ids=own(big["ids"]))
            push(k.detach(), own(big["ids"]))
            value.backward()
            optimizer.step()
        for a, b in zip(inner.parameters(), single.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(inner.queue.keys, single.queue.keys, rtol=1e-9, atol=1e-9)
        assert torch.equal(inner.queue.ids, single.queue.ids)
    copies = [torch.empty_like(inner.queue.keys) for _ in range(dist.get_world_size())]
    dist.all_gather(copies, inner.queue.keys)
    assert all(torch.equal(copy, copies[0]) for copy in copies)


def check_ddp_leaves_a_local_queue_alone() -> None:
    model = _Model()
    model.batch_norm = torch.nn.BatchNorm1d(D, dtype=F64)
    rank = dist.get_rank()
    model.queue.push(torch.full((rank + 1, D), float(rank)), torch.full((rank + 1,), rank))
    model.batch_norm.running_mean.fill_(rank)
    distributed.keep_local(model)
    wrapped = DistributedDataParallel(model)
    wrapped(torch.ones(2, D, dtype=F64)).sum().backward()
    assert torch.equal(model.queue.keys, torch.full((rank + 1, D), float(rank), dtype=F64))
    assert torch.equal(model.queue.ids, torch.full((rank + 1,), rank))
    assert torch.equal(model.batch_norm.running_mean, torch.zeros(D, dtype=F64)), "the others are still broadcast"


def check_ddp_gives_every_rank_the_queue_of_the_first() -> None:
    model, rank = _Model(), dist.get_rank()
    model.temperature.requires_grad_(False)
    own = 3 if rank == 0 else 6
    model.queue.push(torch.full((own, D), rank + 1.0), torch.full((own,), rank) if rank == 0 else None)
    wrapped = DistributedDataParallel(model)
    for _ in range(2):
        # Not one row of zeros, which nobody pushed, on any rank.
        assert len(model.queue) == 3
        assert torch.equal(model.queue.keys, torch.ones(3, D, dtype=F64))
        assert model.queue.ids is not None
        assert model.queue.ids.tolist() == [0, 0, 0]
        if rank:
            model.queue.push(torch.full((2, D), 9.0))
        wrapped(torch.ones(2, D, dtype=F64)).sum().backward()


def check_a_rank_without_rows() -> None:
    big = _big()
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
            torch.testing.assert_close(_mean_over_ranks(value), truth.detach(), rtol=1e-10, atol=1e-10)
            assert n or value.item() == 0.0
            for a, b in zip(torch.autograd.grad(value, mine), wanted, strict=True):
                torch.testing.assert_close(a / dist.get_world_size(), b[start : start + n], rtol=1e-10, atol=1e-10)
    queue = fastcl.NegativeQueue(8, D, F64)
    distributed.push(queue, big["query"][start : start + n])
    assert torch.equal(queue.newest(8).keys, big["query"][: sum(sizes)][-8:])


def check_options_of_a_rank_without_rows() -> None:
    big = _big()
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
            torch.testing.assert_close(_mean_over_ranks(value), truth.detach(), rtol=1e-10, atol=1e-10)
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


def check_a_push_of_other_types_of_ids() -> None:
    queue, rank = fastcl.NegativeQueue(9, D), dist.get_rank()
    own = torch.tensor([rank, 10 + rank], dtype=torch.int32 if rank else torch.int64)
    distributed.push(queue, torch.full((2, D), float(rank)), own, -own.to(F64 if rank else F32))
    wanted = [x for other in range(dist.get_world_size()) for x in (other, 10 + other)]
    newest = queue.newest(9)
    assert newest.ids is not None
    assert newest.log_q is not None
    assert newest.ids.tolist() == wanted
    assert (-newest.log_q).tolist() == wanted


def check_fully_shard_with_a_queue() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def model_of_rows() -> _Model:
        model = _Model()
        del model.temperature  # fully_shard takes no scalar parameters
        return model

    single, sharded = model_of_rows(), model_of_rows()
    fully_shard(sharded, mesh=mesh)
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in (single, sharded)]
    big = _big()
    for step in range(3):
        values = []
        for model, optimizer in zip((single, sharded), optimizers, strict=True):
            optimizer.zero_grad()
            q, k = model(torch.cat([big["query"], big["positive_key"]]) + step).chunk(2)
            value = fastcl.infonce(q, k, queue=model.queue, in_batch=True, ids=big["ids"])
            model.queue.push(k, big["ids"])
            value.backward()
            optimizer.step()
            values.append(value.detach())
        torch.testing.assert_close(*values, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(sharded.queue.newest(9).keys, single.queue.newest(9).keys, rtol=1e-10, atol=1e-10)
    state = get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True))
    again = model_of_rows()
    fully_shard(again, mesh=mesh)
    rows = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(again, state if dist.get_rank() == 0 else {}, options=rows)
    for a, b in zip(again.queue.newest(9), sharded.queue.newest(9), strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


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
    ):
        for form in FORMS.values():
            with pytest.raises(error if mine else RuntimeError) as raised:
                form(loss)(**good, **(change if mine else {}))
            assert str(raised.value).startswith(name if mine else f"rank {last} refused its arguments"), raised.value
    for option in (torch.ones(2, D), _queue(F32, False, True)):  # the second with a log q that the loss has not
        with pytest.raises((TypeError, ValueError) if mine else RuntimeError, match=None if mine else f"rank {last}"):
            distributed.gathered(fastcl.infonce)(**good, queue=option if mine else None)
    # What is no mistake by itself, but on one rank only, would leave the others waiting in backward or before.
    for change in (
        {"log_q": torch.ones(2)},
        {"positive_key": torch.ones(2, D, requires_grad=True)},
        {"positive_key": torch.ones(2, D).double(), "query": torch.ones(2, D).double()},
        {"symmetric": True},
        {"temperature": 0.2},
        {"reduction": "sum"},
        {"normalize": False},
    ):
        for form in FORMS.values():
            with pytest.raises(RuntimeError, match=f"rank {last}: expected arguments of the kinds that rank 0 has"):
                form(fastcl.infonce)(**{**good, **(change if mine else {})})
    queue = fastcl.NegativeQueue(3, D)
    for call in (distributed.gather, functools.partial(distributed.push, queue)):
        with pytest.raises(TypeError if mine else RuntimeError):
            call("no tensor" if mine else torch.ones(2, D))
        for wrong_kind in (torch.ones(2, D).to_sparse(), torch.ones(2, D, device="meta")):
            with pytest.raises((TypeError, ValueError) if mine else RuntimeError):
                call(wrong_kind if mine else torch.ones(2, D))
    assert len(queue) == 0


CHECKS = {name: function for name, function in list(globals().items()) if name.startswith("check_")}


def _main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    for name, check in CHECKS.items():
        try:
            check()
        except Exception:
            print(f"rank {dist.get_rank()} failed {name}\n{traceback.format_exc()}", flush=True)
            raise
        dist.barrier()
        if dist.get_rank() == 0:
            print(f"passed {name}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    _main()
