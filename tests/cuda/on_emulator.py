"""A pytest plugin that puts the CUDA op, kernels and host code, in the place of the CPU's: `pytest -p on_emulator`.

The library named by FASTCL_EMULATED_OP (test_cuda_host.py builds it) registers itself for CPU tensors when loaded.
What the tests ask of `fastcl` then goes through autograd, the CUDA host code, its launches and the emulated kernels.
"""

import ctypes
import os

from fastcl import ops, rows  # which define the ops

op = ctypes.CDLL(os.environ["FASTCL_EMULATED_OP"])
op.launches.restype = ctypes.c_uint64
ops.packs = rows.packs = lambda query: False  # as for tensors on a GPU


def pytest_sessionfinish(session: object) -> None:
    print(f"\n{op.launches()} emulated launches")
