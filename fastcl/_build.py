"""What was built and what runs: the compiled part, its instruction sets, torch and threads. Touches no tensor."""

import importlib.metadata
from typing import Any

import torch

from fastcl import _C, _cuda, fallback


def config() -> dict[str, Any]:
    """Build and run-time facts; `isas` are the compiled ones this processor runs, slowest first, `isa` the active one.

    The environment variable FASTCL_FALLBACK=1 puts the chunked PyTorch of other devices in the place of the compiled
    kernels, for tests and for comparing; `cpu` and `cuda` say which of them run, and why.

    >>> sorted(config())
    ['compiled_isas', 'cpu', 'cuda', 'isa', 'isas', 'threads', 'torch', 'version']
    """
    return {
        "version": importlib.metadata.version("fastcl"),
        "compiled_isas": list(_C.compiled_isas()),
        "isas": list(_C.usable_isas()),
        "isa": _C.active_isa(),
        "cpu": "chunked PyTorch, because of FASTCL_FALLBACK=1" if fallback.FORCED else "compiled kernels",
        "cuda": _cuda.load(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def show_config() -> None:
    """Prints `config()`, a line each."""
    for name, value in config().items():
        print(f"{name:15}{', '.join(value) if isinstance(value, list) else value}")


def set_isa(name: str) -> str:
    """Makes the CPU kernels use instruction set `name` from now on, in the whole process; returns the choice before.

    "auto", which is how a process starts, is the fastest set this processor runs, and for tiny problems the fastest for
    those. For tests and benchmarks; the environment variable FASTCL_ISA sets the choice at start-up. ValueError names
    the choices.

    >>> before = set_isa("baseline")
    >>> set_isa(before)
    'baseline'
    """
    choices = ["auto", *_C.usable_isas()]
    if name not in choices:
        raise ValueError(f"isa: expected one of {choices} (compiled and supported by this processor), got {name!r}")
    return str(_C.set_isa(name))
