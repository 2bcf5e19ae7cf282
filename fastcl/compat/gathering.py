"""What losses of several ranks ask of torch.distributed. No loss belongs here."""

import torch
from torch import Tensor
from torch import distributed as dist

from fastcl.distributed import gather


def rank_and_size() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def rows_of_all(*rows: Tensor) -> tuple[Tensor, ...]:
    """The rows of all ranks, with gradient."""
    return rows if rank_and_size()[1] == 1 else tuple(gather(x) for x in rows)


def own_places(count: int, device: torch.device) -> Tensor:
    """Where this rank's rows lie among those of all, which have as many each: int64 [count]."""
    return torch.arange(count, device=device) + rank_and_size()[0] * count


def check_available(gather_distributed: bool) -> None:
    if gather_distributed and not dist.is_available():
        raise ValueError("gather_distributed: expected False, since this torch has no torch.distributed, got True")
