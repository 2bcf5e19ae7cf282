"""Time and memory of the fused loss against plain PyTorch at given shapes. Time is measured in this process, each peak
of memory in a process of its own.

The inputs are random tensors. Nothing is trained, and no code depends on the results.

    python -m fastcl.recsys.reporting.cost fused softmax 400 9066 64

prints the extra peak memory of one loss and its gradients, in bytes.
"""

import ctypes
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import fastcl

if sys.platform != "win32":
    import resource

TEMPERATURE = 0.07


class Shape(NamedTuple):
    """kind: "softmax" (n positions against the item table) or "queue" (n users against batch and cached vectors)."""

    kind: str
    n: int
    columns: int  # items, or queued vectors
    dim: int


def _softmax(shape: Shape) -> tuple[list[Tensor], dict[str, Callable[[], Tensor]]]:
    hidden = torch.randn(shape.n, shape.dim, device="cpu", dtype=torch.float32).requires_grad_()
    table = (torch.randn(shape.columns + 1, shape.dim, device="cpu", dtype=torch.float32) * 0.1).requires_grad_()
    target = torch.randint(1, shape.columns + 1, (shape.n,), device="cpu")
    return [hidden, table], {
        "fused": lambda: fastcl.linear_cross_entropy(hidden, table[1:], target - 1),
        "plain": lambda: F.cross_entropy(hidden @ table[1:].T, target - 1),
    }


def _queue(shape: Shape) -> tuple[list[Tensor], dict[str, Callable[[], Tensor]]]:
    counts = (shape.n, shape.n, shape.columns)
    user, positive, cached = (F.normalize(torch.randn(m, shape.dim, device="cpu", dtype=torch.float32)) for m in counts)
    queue = fastcl.NegativeQueue(shape.columns, shape.dim)
    queue.push(cached)
    user.requires_grad_()
    positive.requires_grad_()

    def fused() -> Tensor:
        return fastcl.infonce(user, positive, temperature=TEMPERATURE, normalize=False, in_batch=True, queue=queue)

    def plain() -> Tensor:
        logits = user @ torch.cat([positive, queue.keys]).T / TEMPERATURE
        return F.cross_entropy(logits, torch.arange(shape.n, device="cpu"))

    return [user, positive], {"fused": fused, "plain": plain}


KINDS = {"softmax": _softmax, "queue": _queue}


def build(shape: Shape) -> tuple[list[Tensor], dict[str, Callable[[], Tensor]]]:
    """Inputs with gradients, and their loss as two functions: "fused" by fastcl, "plain" written in PyTorch."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return KINDS[shape.kind](shape)


def measure(shape: Shape, repetitions: int = 15) -> dict[str, float]:
    """{"fused_ms", "plain_ms", "fused_bytes", "plain_bytes"}: medians of alternating forward + backward runs in
    milliseconds, and extra peak memory in bytes.
    """
    inputs, losses = build(shape)
    seconds: dict[str, list[float]] = {name: [] for name in losses}
    for repetition in range(repetitions + 2):
        for name, loss in losses.items():
            started = time.perf_counter()
            torch.autograd.grad(loss(), inputs)
            if repetition >= 2:  # the first two warm up
                seconds[name].append(time.perf_counter() - started)
    times = {f"{name}_ms": 1e3 * statistics.median(spent) for name, spent in seconds.items()}
    return times | {f"{name}_bytes": _in_child(name, shape) for name in losses}


def agreement(shape: Shape) -> float:
    """The largest difference between "fused" and "plain" in the loss and its gradients, each relative to the largest
    absolute value of "plain".
    """
    inputs, losses = build(shape)
    found = {}
    for name, loss in losses.items():
        value = loss()
        found[name] = [value.detach(), *torch.autograd.grad(value, inputs)]
    pairs = zip(found["fused"], found["plain"], strict=True)
    return max(float((fused - plain).abs().max() / plain.abs().max()) for fused, plain in pairs)


def _in_child(name: str, shape: Shape) -> float:
    # -I keeps the current folder, which may hold a json.py, out of the child's path; the path is that of this process.
    code = f"import sys; sys.path[:] = {sys.path!r}; import runpy; runpy.run_module({__name__!r}, run_name='__main__')"
    command = [sys.executable, "-I", "-c", code, name, *map(str, shape)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


class _Counters(ctypes.Structure):
    """PROCESS_MEMORY_COUNTERS of Windows."""

    _fields_ = (
        ("size", ctypes.c_uint32), ("page_faults", ctypes.c_uint32), ("peak_working_set", ctypes.c_size_t),
        ("others", ctypes.c_size_t * 7),
    )  # fmt: skip


def _extra_memory(name: str, shape: Shape) -> int:
    """How far one loss and its gradients raise this process's peak resident memory."""
    # A tiny problem runs first, so that libraries and thread pools are loaded before the measurement.
    inputs, losses = build(shape._replace(n=2, columns=64))
    torch.autograd.grad(losses[name](), inputs)
    inputs, losses = build(shape)
    before = _peak()
    torch.autograd.grad(losses[name](), inputs)
    return _peak() - before


def _peak() -> int:
    if sys.platform == "win32":
        counters = _Counters(size=ctypes.sizeof(_Counters))
        own = ctypes.c_void_p(-1)  # what stands for this process
        ctypes.windll.kernel32.K32GetProcessMemoryInfo(own, ctypes.byref(counters), counters.size)
        return int(counters.peak_working_set)
    try:
        # On Linux ru_maxrss does not serve, since it begins with the memory of the parent process.
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return 1024 * int(status.partition("VmHWM:")[2].split()[0])
    except FileNotFoundError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


if __name__ == "__main__":
    kind, *sizes = sys.argv[2:]
    print(_extra_memory(sys.argv[1], Shape(kind, *map(int, sizes))))
