"""What several ranks check together of modules and queues: DDP, fully_shard, pushes of all ranks.

ranks.py starts them.
"""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from rank_inputs import F32, F64, D, big_batch, own_rows
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fastcl
from fastcl import distributed


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
              (wrapped, inner, distributed.gathered(fastcl.infonce), own_rows,
               functools.partial(distributed.push, inner.queue)))  # fmt: skip
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in (single, wrapped)]
    for step in range(3):
        big = {name: x * (1 + step) for name, x in big_batch().items()}
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


def check_ddp_around_cached() -> None:
    """Ranks have different numbers of chunks; gradients arrive once, also where steps are accumulated by `no_sync`."""
    big = big_batch()
    own = {name: own_rows(big[name]) for name in ("query", "positive_key", "ids")}
    single = _Model()
    plain = [
        fastcl.infonce(single(big["query"]), single(big["positive_key"]), temperature=0.5, ids=big["ids"]),
        fastcl.infonce(single(2 * big["query"]), single(big["positive_key"]), temperature=0.5, ids=big["ids"]),
    ]
    torch.autograd.backward(plain)
    loss = functools.partial(distributed.gathered(fastcl.infonce), temperature=0.5)
    model = _Model()
    step = DistributedDataParallel(fastcl.cached(model.encode, loss, chunk=2))
    with step.no_sync():
        step(own["query"], own["positive_key"], ids=own["ids"]).backward()
    step(2 * own["query"], own["positive_key"], ids=own["ids"]).backward()
    for a, b in zip(model.encode.parameters(), single.encode.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-11, atol=1e-12)
    with pytest.raises(ValueError, match="DistributedDataParallel.fastcl.cached.encoder, loss.."):
        fastcl.cached(DistributedDataParallel(torch.nn.Linear(2, 2)), loss)


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
    big = big_batch()
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
