"""Starts the checks that several ranks make together: python ranks.py COUNT ...

test_distributed.py reads what it prints.
For every COUNT, COUNT processes join a gloo group and run every `check_*` of rank_losses.py, rank_modules.py and
rank_corners.py; the first failure ends all processes. They are forks of this process, which has imported torch.
"""

from __future__ import annotations

import datetime
import functools
import os
import signal
import sys
import tempfile
import traceback
from pathlib import Path

import rank_corners
import rank_losses
import rank_modules
import rank_sharded
import torch
import torch.distributed as dist
from forks import forked

MODULES = (rank_losses, rank_modules, rank_corners, rank_sharded)
CHECKS = {name: check for module in MODULES for name, check in vars(module).items() if name.startswith("check_")}


def _rank(rank: int, count: int, store: Path) -> None:
    patience = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count, timeout=patience)
    for name, check in CHECKS.items():
        try:
            check()
        except BaseException:
            print(f"rank {rank} of {count} failed {name}\n{traceback.format_exc()}", flush=True)
            raise
        dist.barrier()
        if rank == 0:
            print(f"passed {name} on {count}", flush=True)
    dist.destroy_process_group()


def _run(count: int) -> bool:
    """Whether all ranks passed; when one fails, those that would wait for it are killed."""
    with tempfile.TemporaryDirectory() as folder:
        work = [functools.partial(_rank, rank, count, Path(folder) / "store") for rank in range(count)]
        left = {forked(one) for one in work}
        passed = True
        while left:
            child, status = os.wait()
            left.remove(child)
            if status and passed:
                passed = False
                for other in left:
                    os.kill(other, signal.SIGKILL)
    return passed


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(not all([_run(int(count)) for count in sys.argv[1:]]))
