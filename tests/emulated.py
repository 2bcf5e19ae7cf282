"""The CUDA kernels as a `contrast` on CPU tensors: built for the emulator (cuda_emulator/) and called through ctypes.

It does what the host code does, dtypes and workspace, so that the same checks run against kernels as against the op.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, byref, c_bool, c_char_p, c_double, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}  # DType of csrc/contrast.h


class CProblem(Structure):
    _fields_ = (
        ("rows", c_int64), ("columns", c_int64), ("features", c_int64), ("dtype", c_int32), ("tf32", c_bool),
        ("multiprocessors", c_int32), ("query", c_void_p), ("key", c_void_p), ("positive", c_void_p),
        ("scale", c_void_p), ("one_scale", c_bool), ("factor", c_double), ("bias", c_void_p),
        ("row_id", c_void_p), ("col_id", c_void_p),
    )  # fmt: skip


class COutputs(Structure):
    _fields_ = (("pos", c_void_p), ("lse", c_void_p), ("mean_key", c_void_p))


class CGradients(Structure):
    _fields_ = tuple(
        (name, c_void_p)
        for name in ("grad_pos", "grad_lse", "lse", "mean_key", "query", "positive", "scale", "key", "bias")
    )


class CChunk(Structure):
    _fields_ = (("begin", c_int64), ("count", c_int64), ("dots", c_void_p), ("weights", c_void_p), ("dtype", c_int32))


def build(folder: Path, flags: Sequence[str] = ("-O2",)) -> Path:
    """Compiles kernels and emulator into a library in `folder`; skips the test where there is no compiler."""
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        pytest.skip(f"no C++ compiler ({compiler}) here")
    emulator = ROOT / "tests" / "cuda_emulator"
    sources = [*sorted((ROOT / "csrc" / "cuda").glob("*.cu")), emulator / "bindings.cpp"]
    common = [compiler, "-std=c++17", "-fPIC", "-Wall", "-Wextra", "-Werror", "-DFASTCL_EMULATED", *flags]
    common += [f"-I{ROOT / 'csrc'}", f"-I{emulator}", "-x", "c++", "-c"]
    jobs = []
    for source in sources:
        command = [*common, str(source), "-o", str(folder / f"{source.name}.o")]
        jobs.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
    errors = [job.communicate()[1] for job in jobs]
    assert not any(job.returncode for job in jobs), "\n".join(errors)
    library = folder / "kernels.so"
    objects = [str(folder / f"{source.name}.o") for source in sources]
    subprocess.run([compiler, "-shared", *flags, *objects, "-o", str(library)], check=True)
    return library


class Kernels:
    """The launchers of a built library. Settings are attributes, so that one build serves all tests."""

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))
        for name, args in (("forward", COutputs), ("backward", CGradients)):
            size, run = getattr(self.library, f"{name}_bytes"), getattr(self.library, f"run_{name}")
            size.argtypes, size.restype = [POINTER(CProblem), POINTER(args)], c_size_t
            run.argtypes, run.restype = [POINTER(CProblem), POINTER(args), c_void_p], c_char_p
            run = getattr(self.library, f"run_{name}_chunk")
            run.argtypes, run.restype = [POINTER(CProblem), POINTER(args), POINTER(CChunk)], c_char_p
        self.library.most_features.restype = c_int64
        self.library.launches.restype = self.library.bank_conflicts.restype = c_uint64
        self.library.set_schedule.argtypes = [c_uint64]
        self.reset()

    def reset(self) -> None:
        self.schedule(0)
        self.multiprocessors, self.tf32 = 1, False
        self.chunk_rows, self.chunk_dtype = 40, torch.float32
        self.most_features: Callable[[int], int] = self.library.most_features

    def schedule(self, seed: int) -> None:
        self.library.set_schedule(seed)

    def launches(self) -> int:
        return int(self.library.launches())

    def bank_conflicts(self) -> int:
        """Of `ldmatrix`, so far."""
        return int(self.library.bank_conflicts())

    def run(self, name: str, problem: CProblem, args: Structure) -> None:
        size = getattr(self.library, f"{name}_bytes")(byref(problem), byref(args))
        # Exactly as long as asked for, and full of NaN: what is read must have been written.
        workspace = torch.full((size,), 0xFF, dtype=torch.uint8) if size else None
        self.check(getattr(self.library, f"run_{name}")(byref(problem), byref(args), _pointer(workspace)))

    def run_chunks(self, name: str, problem: CProblem, args: Structure, query: Tensor, key: Tensor,
                   multiply: Callable[[slice, Tensor], object] | None) -> None:  # fmt: skip
        """With products of float32; `multiply` gets the weights of some rows."""
        for begin in range(0, len(query), self.chunk_rows):
            rows = slice(begin, min(begin + self.chunk_rows, len(query)))
            dots = query[rows].float() @ key.float().T
            weights = torch.full_like(dots, torch.nan, dtype=self.chunk_dtype)
            chunk = CChunk(begin, len(dots), dots.data_ptr(), weights.data_ptr() if multiply else None,
                           DTYPES[weights.dtype])  # fmt: skip
            self.check(getattr(self.library, f"run_{name}_chunk")(byref(problem), byref(args), byref(chunk)))
            if multiply:
                multiply(rows, weights.float())

    @staticmethod
    def check(error: bytes) -> None:
        if error != b"no error":
            raise RuntimeError(error.decode())

    def contrast(
        self,
        query: Tensor,
        key: Tensor,
        positive: Tensor | None = None,
        *,
        scale: float | Tensor = 1.0,
        bias: Tensor | None = None,
        row_id: Tensor | None = None,
        col_id: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor]:
        """As `fastcl.contrast`."""
        matrices = [t for t in (query, key, positive) if t is not None]
        dtype = matrices[0].dtype
        if any(t.dtype != dtype for t in matrices):
            dtype = torch.float64 if any(t.dtype == torch.float64 for t in matrices) else torch.float32
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        query, key, positive = (None if t is None else t.to(dtype).contiguous() for t in (query, key, positive))
        factor = 1.0 if isinstance(scale, Tensor) else scale
        vectors = [t.to(wide).contiguous() if isinstance(t, Tensor) else None for t in (scale, bias)]
        pos, lse = _Contrast.apply(self, query, key, positive, *vectors, row_id, col_id, factor)
        return (None if positive is None else pos), lse


def _pointer(t: Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()


class _Contrast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernels: Kernels, query: Tensor, key: Tensor, positive: Tensor | None, scale: Tensor | None,
                bias: Tensor | None, row_id: Tensor | None, col_id: Tensor | None, factor: float) -> Any:  # fmt: skip
        (n, d), m = query.shape, key.shape[0]
        wide = torch.float64 if query.dtype == torch.float64 else torch.float32
        one_scale = scale is not None and scale.dim() == 0
        problem = CProblem(n, m, d, DTYPES[query.dtype], kernels.tf32, kernels.multiprocessors, *map(_pointer, (
            query, key, positive, scale)), one_scale, factor, *map(_pointer, (bias, row_id, col_id)))  # fmt: skip
        pos = query.new_full((0 if positive is None else n,), torch.nan, dtype=wide)
        lse = query.new_full((n,), torch.nan, dtype=wide)
        sums = ctx.needs_input_grad[1] or ctx.needs_input_grad[4]
        mean_key = query.new_full((n, d), torch.nan, dtype=wide) if sums else None
        outputs = COutputs(_pointer(None if positive is None else pos), *map(_pointer, (lse, mean_key)))
        if d > kernels.most_features(DTYPES[query.dtype]):

            def multiply(rows: slice, weights: Tensor) -> None:
                mean_key[rows] = weights @ key.float()

            kernels.run_chunks("forward", problem, outputs, query, key, multiply if sums else None)
        else:
            kernels.run("forward", problem, outputs)
        ctx.save_for_backward(query, key, positive, scale, bias, row_id, col_id, lse, mean_key)
        ctx.kernels, ctx.problem = kernels, problem
        return pos, lse

    @staticmethod
    def backward(ctx: Any, grad_pos: Tensor, grad_lse: Tensor) -> Any:
        query, key, positive, scale, bias, *_, lse, mean_key = ctx.saved_tensors
        grad_pos, grad_lse = grad_pos.contiguous(), grad_lse.contiguous()
        needs = ctx.needs_input_grad[1:6]
        inputs = (query, key, positive, scale, bias)
        found = [torch.full_like(t, torch.nan) if needed else None for t, needed in zip(inputs, needs, strict=True)]
        if found[3] is not None:
            found[3] = lse.new_full(lse.shape, torch.nan)
        d_query, d_key, d_positive, d_scale, d_bias = map(_pointer, found)
        given = [_pointer(t) for t in (None if positive is None else grad_pos, grad_lse, lse, mean_key)]
        kernels: Kernels = ctx.kernels
        if (needs[1] or needs[4]) and query.shape[1] > kernels.most_features(DTYPES[query.dtype]):
            total = torch.zeros(key.shape)

            def multiply(rows: slice, weights: Tensor) -> None:
                total.addmm_(weights.T, query[rows].float())

            columns = CGradients(*given, None, None, None, None, d_bias)
            kernels.run_chunks("backward", ctx.problem, columns, query, key, multiply if needs[1] else None)
            if needs[1]:
                found[1] = total.to(key.dtype)
            d_key = d_bias = None
        kernels.run("backward", ctx.problem, CGradients(*given, d_query, d_positive, d_scale, d_key, d_bias))
        if found[3] is not None and scale.dim() == 0:
            found[3] = found[3].sum()
        return None, *found, None, None, None
