"""How an op of fastcl is declared to torch, and how arguments are passed to it.

contrast (ops.py), softplus_sum (ops_pairwise.py) and normalisation (normalize.py) share this code, as do callers of the
ops below autograd. No op is declared here.
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
    """Registers the chunked PyTorch form of an op, and its rule for torch.vmap, which calls the op once per element."""
    LIBRARY.impl(name, fallback.kernel(function), "CompositeExplicitAutograd")
    if fallback.FORCED:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that a kernel is replaced
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


def fake(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers what an op returns for tensors without memory.

    torch notes which line of which file does so, and looks through all loaded modules for each new file: all ops come
    through this line.
    """
    return lambda function: torch.library.register_fake(f"fastcl::{name}", function, lib=LIBRARY)


def take_zeros(name: str) -> None:
    """Gives memory to tensors of zeros without memory, which autograd may make, before they reach the op."""
    op = getattr(torch.ops.fastcl, name).default

    def run(*args: Any) -> Any:
        return op(*[t.clone() if isinstance(t, Tensor) and t._is_zerotensor() else t for t in args])

    LIBRARY.impl(name, run, "ZeroTensor")


def absent(dtype: torch.dtype) -> Tensor:
    """An empty tensor [0], made in a thread of its own. Modes and default devices belong to a thread, and the import of
    fastcl may run inside `torch.device("meta")`, inference mode, FakeTensorMode or a transform of torch.func.
    """
    made: list[Tensor] = []
    thread = threading.Thread(target=lambda: made.append(torch.empty(0, dtype=dtype, device="cpu")))
    thread.start()
    thread.join()
    return made[0]


# An absent tensor is passed to an op as an empty 1-D tensor, since the stable C ABI has no cheap Optional.
NONE = absent(torch.float32)


def none_for(t: Tensor) -> Tensor:
    """The absent tensor for ops that get `t`. FakeTensorMode and dispatching subclasses accept their own kind only."""
    return NONE if type(t) is Tensor or type(t) is Parameter else t.new_empty(0, dtype=torch.float32)


def handed_over(names: tuple[str, ...], given: tuple[Tensor | None, ...], none: Tensor) -> list[Tensor]:
    """Tensors as the ops take them: contiguous, and `none` in place of an absent one."""
    unchecked = fallback.FORCED  # the compiled part, which checks the memory of each tensor, does not run then
    tensors = [
        none if t is None else t if t.is_contiguous() and not unchecked else packed(name, t)
        for name, t in zip(names, given, strict=True)
    ]
    if torch.compiler.is_compiling():
        # Dynamo refuses a Function that gets one tensor twice, as with in-batch negatives, where positive is key.
        return [t.view_as(t) for t in tensors]
    return tensors


def scale_and_factor(scale: float | Tensor, none: Tensor) -> tuple[Tensor, float]:
    """The two arguments (tensor, number) by which a scale is passed to an op."""
    return (scale, 1.0) if isinstance(scale, Tensor) else (none, float(scale))
