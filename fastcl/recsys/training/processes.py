"""Threads and processes: how the processes that train one model join, which of them leads, and what they exchange.

Every function also works in a single process without torch.distributed. Nothing here trains or touches files.
"""

import builtins
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastcl.recsys.options import at_least

_groups = itertools.count()  # numbers the groups that this process has joined, for their names in the store
_problems = itertools.count()  # numbers the errors that all processes were told of


@contextmanager
def threads(number: int) -> Iterator[None]:
    """A block in which torch uses `number` threads in this process."""
    at_least(1, "threads", number)
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def processes(device: str) -> Iterator[torch.device]:
    """A block in which the processes that torchrun started, if it did, are one group (nccl for "cuda", gloo for "cpu").

    Yields this process's device. Raises ValueError where `device` is "cuda" and there is no CUDA device.
    """
    place = device_of(device)
    if not dist.is_torchelastic_launched() or dist.is_initialized():
        yield place
        return
    if device == "cuda":
        torch.cuda.set_device(place)
    store, own, size = next(dist.rendezvous("env://"))
    # The other processes may wait long for rank 0, for example while it reads a large log.
    patience = timedelta(hours=2)
    backend = "nccl" if device == "cuda" else "gloo"
    group = f"fastcl/{next(_groups)}"
    shared = dist.PrefixStore(group, store)
    dist.init_process_group(backend, store=shared, rank=own, world_size=size, timeout=patience)
    try:
        yield place
        wait()
        _leave(store, group, size)
    finally:
        dist.destroy_process_group()


def device_of(device: str) -> torch.device:
    """This process's device of the kind "cpu" or "cuda"; ValueError where there is none."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: expected cpu, since this torch finds no CUDA device, got cuda")
    local = int(os.environ["LOCAL_RANK"]) if dist.is_torchelastic_launched() else 0
    return torch.device(device, local) if device == "cuda" else torch.device(device)


def _leave(store: dist.Store, group: str, size: int) -> None:
    """Waits until every process has left its last collective. gloo may abort a collective whose peer ends the group
    meanwhile; a barrier cannot prevent that, since it is a collective too. The store is torchrun's and outlives all.
    """
    if store.add(f"{group}/left", 1) == size:
        store.set(f"{group}/empty", "")
    store.wait([f"{group}/empty"])


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def count() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def leads() -> bool:
    """Whether this process is the one that writes files and reports."""
    return rank() == 0


def wait() -> None:
    """Waits until every process has called this function."""
    if count() > 1:
        dist.barrier()


def add(values: Tensor) -> Tensor:
    """The sum of all processes' `values`, with the same bits in every process."""
    if count() == 1:
        return values
    everyone = [torch.empty_like(values) for _ in range(count())]
    dist.all_gather(everyone, values)
    total = everyone[0]
    for other in everyone[1:]:
        total = total + other
    return total


def add_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Replaces every gradient by its sum over the processes; one that is missing somewhere counts as zeros."""
    if count() == 1:
        return
    learning = [p for p in parameters if p.requires_grad]
    if not learning:  # a model of which all tables are cut by rows
        return
    flat = torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in learning])
    dist.all_reduce(flat)
    for parameter, piece in zip(learning, flat.split([p.numel() for p in learning]), strict=True):
        parameter.grad = piece.view_as(parameter)


def same_start(module: nn.Module) -> None:
    """Gives every process the parameters and buffers of the first one."""
    if count() > 1:
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), src=0)


def collect(data: bytes) -> list[bytes]:
    """Every process's `data`, in the order of their ranks."""
    if count() == 1:
        return [data]
    device = _place()
    sizes = torch.zeros(count(), dtype=torch.int64, device=device)
    sizes[rank()] = len(data)
    dist.all_reduce(sizes)
    padded = torch.zeros(max(1, int(sizes.max())), dtype=torch.uint8, device=device)
    padded[: len(data)] = torch.frombuffer(bytearray(data or b"0"), dtype=torch.uint8)[: len(data)].to(device)
    everyone = [torch.empty_like(padded) for _ in range(count())]
    dist.all_gather(everyone, padded)
    return [row[:size].cpu().numpy().tobytes() for row, size in zip(everyone, sizes.tolist(), strict=True)]


@contextmanager
def together() -> Iterator[None]:
    """A block whose error in one process is raised in all processes, so that none waits for a process that has ended.

    Every process must enter the block, and must not wait for another one inside. The other processes raise an error of
    the same built-in type, or a RuntimeError, that names the failing process.
    """
    problem: Exception | None = None
    try:
        yield
    except Exception as error:
        if count() == 1:
            raise
        problem = error
    if count() == 1:
        return
    told = collect(b"" if problem is None else json.dumps([_kind(problem), str(problem)]).encode())
    if not any(told):
        return
    _all_have_it()
    if problem is not None:
        raise problem
    first = next(number for number, text in enumerate(told) if text)
    kind, text = json.loads(told[first])
    raise getattr(builtins, kind)(f"{text} (in process {first} of {count()})")


def agree(facts: Mapping[str, str]) -> None:
    """ValueError in every process where the processes differ in one of `facts`."""
    told = [json.loads(data) for data in collect(json.dumps(dict(facts)).encode())]
    with together():
        for number, theirs in enumerate(told):
            for name in sorted(told[0].keys() | theirs.keys()):
                mine, other = told[0].get(name, "nothing"), theirs.get(name, "nothing")
                if mine != other:
                    both = f"{mine} in process 0 and {other} in process {number}"
                    raise ValueError(f"{name}: expected the same in all processes, got {both}")


def decided(wish: bool) -> bool:
    """The first process's `wish`, returned in every process."""
    return bool(add(torch.tensor(float(wish and leads()), device=_place()))) if count() > 1 else wish


def _kind(error: Exception) -> str:
    """The name of the nearest built-in base class that can be made from a text alone."""
    names = (kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins")
    return "ValueError" if isinstance(error, UnicodeError) else next(names)


def _all_have_it() -> None:
    """Waits until every process has left the collective before; `_leave` says why."""
    store = dist.distributed_c10d._get_default_store()
    name = f"fastcl/problem/{next(_problems)}"
    if store.add(name, 1) == count():
        store.set(f"{name}/known", "")
    store.wait([f"{name}/known"])


def _place() -> torch.device:
    """The device that the tensors of a collective must be on."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
