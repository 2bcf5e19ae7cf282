"""The option --threads of the commands that compute, and how many threads this process may use."""

import argparse
import math
import os
from pathlib import Path
from typing import Any

import torch

_CGROUPS = Path("/sys/fs/cgroup")


def cores() -> int:
    """The number of cores that this process may use: those it is bound to, or a container's smaller CPU quota. Where
    the system binds no process to cores (macOS) or does not tell (Windows), all of them.
    """
    bound = getattr(os, "sched_getaffinity", None)
    own = len(bound(0)) if bound else os.cpu_count() or 1
    return math.ceil(min(own, _quota(_CGROUPS, Path("/proc/self/cgroup"))))


def _quota(root: Path, own: Path) -> float:
    """The CPU time that cgroups (version 2) grant, in cores: the least limit from `own` up to `root`; inf if none."""
    least = math.inf
    try:
        (path,) = [line[3:] for line in own.read_text().splitlines() if line.startswith("0::")]
        folder = root / path.lstrip("/")
        for place in (folder, *folder.parents):
            if place.is_relative_to(root) and (place / "cpu.max").is_file():
                quota, period = (place / "cpu.max").read_text().split()
                least = least if quota == "max" else min(least, int(quota) / int(period))
    except (OSError, ValueError):  # no cgroups of version 2
        pass
    return least


def add_threads(parser: Any) -> None:
    """Adds `--threads N`, from 1 to the number of cores; the default is torch's own number, at most the cores."""
    default = min(torch.get_num_threads(), cores())
    help_ = f"threads to compute with, 1 to {cores()} on this machine (default: %(default)s)"
    parser.add_argument("--threads", type=_number, default=default, metavar="N", help=help_)


def _number(text: str) -> int:
    most = cores()
    if not (text.strip().isdecimal() and 1 <= int(text) <= most):
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 to {most}, the cores here, got {text!r}")
    return int(text)
