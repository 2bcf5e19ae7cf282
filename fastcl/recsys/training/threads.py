"""--threads of the commands that compute: how many this process may use at most, and using them."""

import argparse
import math
import os
from pathlib import Path
from typing import Any

import torch

_CGROUPS = Path("/sys/fs/cgroup")


def cores() -> int:
    """Cores that this process may use: those it is bound to, or fewer where a container's quota of CPU time is less."""
    return math.ceil(min(len(os.sched_getaffinity(0)), _quota(_CGROUPS, Path("/proc/self/cgroup"))))


def _quota(root: Path, own: Path) -> float:
    """Cores' worth of CPU time that cgroups (version 2) grant, the least from `own` up; inf without a limit."""
    least = math.inf
    try:
        (path,) = [line[3:] for line in own.read_text().splitlines() if line.startswith("0::")]
        folder = root / path.lstrip("/")
        for place in (folder, *folder.parents):
            if place.is_relative_to(root) and (place / "cpu.max").is_file():
                quota, period = (place / "cpu.max").read_text().split()
                least = least if quota == "max" else min(least, int(quota) / int(period))
    except (OSError, ValueError):  # no cgroups, or not as we know them
        pass
    return least


def add_threads(parser: Any) -> None:
    """`--threads N`, from 1 to the cores; the default is torch's own number, within them."""
    default = min(torch.get_num_threads(), cores())
    help_ = f"threads to compute with, 1 to {cores()} on this machine (default: %(default)s)"
    parser.add_argument("--threads", type=_number, default=default, metavar="N", help=help_)


def _number(text: str) -> int:
    most = cores()
    if not (text.strip().isdecimal() and 1 <= int(text) <= most):
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 to {most}, the cores here, got {text!r}")
    return int(text)
