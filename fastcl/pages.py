"""Memory for large tables of which a step reads and writes rows here and there.

Each of these rows is in another page. With pages of 4 KiB the processor then looks up the place of almost every row in
page tables that fit into no cache; with pages of 2 MiB it looks up few, and these tables are small.
"""

import mmap
from contextlib import suppress

import torch
from torch import Tensor

LEAST = 1 << 22  # bytes from which on a table is more than a few large pages


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of zeros; a large one on the CPU is in large pages where the system has some to give.

    Memory is taken when it is first touched, as of torch.zeros.

    >>> zeros((2, 3), torch.float32, torch.device("cpu")).tolist()
    [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    """
    size = torch.Size(shape).numel() * dtype.itemsize
    if device.type != "cpu" or size < LEAST or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # of a kernel that is built without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
