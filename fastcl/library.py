"""How an op of fastcl is declared to torch, and how arguments cross into it.

What contrast (ops.py), softplus_sum (ops_pairwise.py) and normalisation (normalize.py) have in common, and what those
need who call the ops below autograd. No op is declared here.
"""

import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from fastcl import fallback
from fastcl.checks import packed

LIBRARY = torch.library.Library("fastcl", "DEF")


def implement(name: str, function: Callable[..., Any]) -> None:
    """Registers the chunked PyTorch twin of an op, and a batch of calls as calls one after the other."""
    LIBRARY.impl(name, fallback.kernel(function), "CompositeExplicitAutograd")
    if fallback.FORCED:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch remarks that a kernel is replaced
            LIBRARY.impl(name, fallback.kernel(function), "CPU")
    op = getattr(torch.ops.fastcl, name).default

    def batched(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        calls = [
            op(*(x if d is None else x.select(d, i).contiguous() for x, d in zip(args, in_dims, strict=True)))
            for i in range(info.batch_size)
        ]
        results = tuple(torch.stack(parts) for parts in zip(*calls, strict=True))
        return results, (0,) * len(results)

    torch.library.register_vmap(f"fastcl::{name}", batched, lib=LIBRARY)
    take_zeros(name)


def take_zeros(name: str) -> None:
    """Tensors of zeros without memory, as autograd makes some, are given memory before they reach the op."""
    op = getattr(torch.ops.fastcl, name).default

    def run(*args: Any) -> Any:
        return op(*[t.clone() if isinstance(t, Tensor) and t._is_zerotensor() else t for t in args])

    LIBRARY.impl(name, run, "ZeroTensor")


def absent(dtype: torch.dtype) -> Tensor:
    """[0], made by a thread of its own: modes and default devices belong to a thread, and whoever imports fastcl first
    may be inside `torch.device("meta")`, inference mode, FakeTensorMode or a transform of torch.func.
    """
    made: list[Tensor] = []
    thread = threading.Thread(target=lambda: made.append(torch.empty(0, dtype=dtype, device="cpu")))
    thread.start()
    thread.join()
    return made[0]


# An optional tensor crosses the op boundary as an empty 1-D tensor: the stable C ABI has no cheap Optional.
NONE = absent(torch.float32)


def none_for(t: Tensor) -> Tensor:
    """An absent tensor beside `t`: FakeTensorMode and subclasses that dispatch take none but their own kind."""
    return NONE if type(t) is Tensor or type(t) is Parameter else t.new_empty(0, dtype=torch.float32)


def handed_over(names: tuple[str, ...], given: tuple[Tensor | None, ...], none: Tensor) -> list[Tensor]:
    """Tensors as the ops take them: contiguous, and `none` for an absent one."""
    unchecked = fallback.FORCED  # by the compiled part, which looks at the memory behind each tensor
    tensors = [
        none if t is None else t if t.is_contiguous() and not unchecked else packed(name, t)
        for name, t in zip(names, given, strict=True)
    ]
    if torch.compiler.is_compiling():
        # Dynamo refuses a Function that gets one tensor twice, as in-batch negatives (positive is key) do.
        return [t.view_as(t) for t in tensors]
    return tensors


def scale_and_factor(scale: float | Tensor, none: Tensor) -> tuple[Tensor, float]:
    """How a scale crosses the op boundary."""
    return (scale, 1.0) if isinstance(scale, Tensor) else (none, float(scale))
