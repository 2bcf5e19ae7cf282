"""Loads the compiled CUDA kernels where they are built for this torch. Elsewhere fallback.py serves CUDA tensors.

`fastcl.show_config()` says which of the two runs, and why. Nothing here touches a device or asks whether there is one.
"""

import functools
import importlib.util

import torch

from fastcl import fallback


@functools.cache
def load() -> str:
    """Registers the kernels and returns what CUDA tensors run through, in words. ops.py must have defined the schemas.
    """
    if fallback.WANTED:
        return "chunked PyTorch, because of FASTCL_FALLBACK=1"
    built = importlib.util.find_spec("fastcl._C_cuda") is not None
    if torch.version.cuda is None:
        return f"chunked PyTorch: this torch is not a CUDA build; our kernels are {'' if built else 'not '}built"
    if not built:
        return "chunked PyTorch: our kernels are not built; install with nvcc (see FASTCL_CUDA in docs/guide/cuda.md)"
    try:
        from fastcl import _C_cuda
    except ImportError as error:
        return f"chunked PyTorch: our kernels are built, but cannot be loaded: {error}"
    return f"compiled kernels for compute capability {_C_cuda.architectures().replace(';', ', ')}"


def tf32_allowed() -> bool:
    """Whether torch may compute float32 matrix products on CUDA in TF32 (`torch.set_float32_matmul_precision`).

    `allow_tf32` would not do: reading it raises where the newer of torch's two settings is in use.
    """
    return torch.backends.cuda.matmul.fp32_precision not in ("none", "ieee")
