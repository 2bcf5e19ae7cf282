"""Child processes that cost no import of torch: forks of the test, which run one thread only."""

from __future__ import annotations

import os
import signal
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def forked(work: Callable[[], int | None]) -> int:
    """The id of a child that does `work` and ends with what it returns (None: 0), or with 1 and a traceback."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads that sleep in the parent
        child = os.fork()
    if child:
        return child
    code = 1
    try:
        code = work() or 0
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def ended(child: int) -> int:
    """Waits for the child: its exit code, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def started(count: int, store: Path, work: Callable[[], Any]) -> list[int]:
    """`count` children that are one group of processes and do `work`."""
    store.unlink(missing_ok=True)
    return [forked(partial(_joined, rank, count, store, work)) for rank in range(count)]


def run_together(count: int, store: Path, work: Callable[[], Any]) -> None:
    assert [ended(child) for child in started(count, store, work)] == [0] * count


def first_end_kills(children: list[int]) -> None:
    """What torchrun does: when one process ends by a signal, the others are killed."""
    left = set(children)
    while left:
        child, status = os.wait()
        left.remove(child)
        if status:
            for other in left:
                os.kill(other, signal.SIGKILL)


def _joined(rank: int, count: int, store: Path, work: Callable[[], Any]) -> None:
    torch.set_num_threads(1)
    patience = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count, timeout=patience)
    work()
    dist.barrier()
    dist.destroy_process_group()
