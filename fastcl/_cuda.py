"""Loads the compiled CUDA kernels where there are any for this torch; without, CUDA tensors run through fallback.py.

Which of them runs, and why, is for `fastcl.show_config()`. Touches no device: whether there is a GPU is torch's matter.
"""

import functools
import importlib.util

import torch

from fastcl import fallback


@functools.cache
def load() -> str:
    """Registers the kernels (after the schemas in ops.py are defined) and says what CUDA tensors run through."""
    if fallback.FORCED:
        return "chunked PyTorch, because of FASTCL_FALLBACK=1"
    built = importlib.util.find_spec("fastcl._C_cuda") is not None
    if torch.version.cuda is None:
        return f"chunked PyTorch: this torch is not a CUDA build; our kernels are {'' if built else 'not '}built"
    if not built:
        return "chunked PyTorch: our kernels are not built; install with nvcc (see FASTCL_CUDA in the README)"
    try:
        from fastcl import _C_cuda
    except ImportError as error:
        return f"chunked PyTorch: our kernels are built, but cannot be loaded: {error}"
    return f"compiled kernels for compute capability {_C_cuda.architectures().replace(';', ', ')}"


def tf32_allowed() -> bool:
    """Whether torch may make a float32 matrix product on CUDA of TF32 products, as `set_float32_matmul_precision` says.

    Not read from `allow_tf32`, which raises where the newer of torch's two settings is in use.
    """
    return torch.backends.cuda.matmul.fp32_precision not in ("none", "ieee")
