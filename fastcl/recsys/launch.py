"""Threads and processes: joining those that train one model, who leads, and the few things they tell each other.

Everything here is also right for a process that is alone, without torch.distributed. No training, no files.
"""

import itertools
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastcl.recsys.options import at_least

_groups = itertools.count()  # that this process has joined: their names in the store


@contextmanager
def threads(number: int) -> Iterator[None]:
    """torch's threads of this process, for as long as it lasts."""
    at_least(1, "threads", number)
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def processes(device: str) -> Iterator[torch.device]:
    """Joins the processes that torchrun started, if it did (nccl for "cuda", gloo for "cpu"), and leaves them again.

    Yields this process's device. Raises ValueError where `device` is "cuda" and there is none.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: expected cpu, since this torch finds no CUDA device, got cuda")
    launched = dist.is_torchelastic_launched()
    place = torch.device("cuda", int(os.environ["LOCAL_RANK"]) if launched else 0) if device == "cuda" else device
    if not launched or dist.is_initialized():
        yield torch.device(place)
        return
    store, own, size = next(dist.rendezvous("env://"))
    # Rank 0 may read a large log or score all validation cases while the others wait.
    patience = timedelta(hours=2)
    backend = "nccl" if device == "cuda" else "gloo"
    group = f"fastcl/{next(_groups)}"
    shared = dist.PrefixStore(group, store)
    dist.init_process_group(backend, store=shared, rank=own, world_size=size, timeout=patience)
    try:
        yield torch.device(place)
        wait()
        _leave(store, group, size)
    finally:
        dist.destroy_process_group()


def _leave(store: dist.Store, group: str, size: int) -> None:
    """Until every process is out of its last collective: gloo may abort one whose peer ends the group meanwhile, which
    a barrier, being a collective itself, cannot prevent. The store is torchrun's and outlives them all.
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
    """Until every process has come here."""
    if count() > 1:
        dist.barrier()


def add(values: Tensor) -> Tensor:
    """The sum of all processes' `values`, the same bits in each of them."""
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
    flat = torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in learning])
    dist.all_reduce(flat)
    for parameter, piece in zip(learning, flat.split([p.numel() for p in learning]), strict=True):
        parameter.grad = piece.view_as(parameter)


def same_start(module: nn.Module) -> None:
    """Gives every process the parameters and buffers of the first one."""
    if count() > 1:
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), src=0)


def collect(data: bytes, device: torch.device) -> list[bytes]:
    """Every process's `data`, in the order of their ranks."""
    if count() == 1:
        return [data]
    sizes = torch.zeros(count(), dtype=torch.int64, device=device)
    sizes[rank()] = len(data)
    dist.all_reduce(sizes)
    padded = torch.zeros(int(sizes.max()), dtype=torch.uint8, device=device)
    padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    everyone = [torch.empty_like(padded) for _ in range(count())]
    dist.all_gather(everyone, padded)
    return [row[:size].cpu().numpy().tobytes() for row, size in zip(everyone, sizes.tolist(), strict=True)]
