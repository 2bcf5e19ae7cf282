"""Facts about the installation: the compiled part, its instruction sets, torch and threads. Touches no tensor."""

import importlib.metadata
import platform
from typing import Any

import torch

from fastcl import _cuda, _kernels, fallback
from fastcl._library import BUILT


def _cpu() -> str:
    if fallback.WANTED:
        return "chunked PyTorch, because of FASTCL_FALLBACK=1"
    if not BUILT:
        return f"chunked PyTorch: no kernels for {platform.system()} {platform.machine()} in this installation"
    return "compiled kernels"


def config() -> dict[str, Any]:
    """Build and run-time facts. "isas": the compiled instruction sets that this processor runs, slowest first; "isa":
    the active one; "cpu", "cuda": whether compiled kernels or chunked PyTorch run there, and why.

    The environment variable FASTCL_FALLBACK=1 replaces the compiled kernels by the chunked PyTorch that serves other
    devices, for tests and comparisons.

    >>> sorted(config())
    ['compiled_isas', 'cpu', 'cuda', 'isa', 'isas', 'threads', 'torch', 'version']
    """
    return {
        "version": importlib.metadata.version("fastcl"),
        "compiled_isas": _kernels.compiled_isas(),
        "isas": _kernels.usable_isas(),
        "isa": _kernels.active_isa(),
        "cpu": _cpu(),
        "cuda": _cuda.load(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def show_config() -> None:
    """Prints `config()`, one fact per line."""
    for name, value in config().items():
        print(f"{name:15}{', '.join(value) if isinstance(value, list) else value}")


def set_isa(name: str) -> str:
    """Sets the instruction set of the CPU kernels for the whole process, and returns the choice before. For tests and
    benchmarks.

    "auto", the choice at start-up, takes the fastest set that this processor runs, and for tiny problems the set that
    is fastest for them. The environment variable FASTCL_ISA sets another choice at start-up. ValueError names the
    choices.

    >>> before = set_isa("baseline")
    >>> set_isa(before)
    'baseline'
    """
    choices = ["auto", *_kernels.usable_isas()]
    if name not in choices:
        raise ValueError(f"isa: expected one of {choices} (compiled and supported by this processor), got {name!r}")
    return _kernels.set_isa(name)
