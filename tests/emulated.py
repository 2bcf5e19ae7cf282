"""The CUDA kernels as a `contrast` on CPU tensors: built for the emulator (cuda_emulator/) and called through ctypes.

It does what the host code does, dtypes and workspace, so that the same checks run against kernels as against the op.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, byref, c_bool, c_char_p, c_double, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import torch
from compiler import compile_all, compiler_or_skip
from torch import Tensor

from fastcl import ops_pairwise

ROOT = Path(__file__).resolve().parent.parent
DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}  # DType of csrc/contrast.h


class CProblem(Structure):
    _fields_ = (
        ("rows", c_int64), ("columns", c_int64), ("features", c_int64), ("dtype", c_int32), ("tf32", c_bool),
        ("multiprocessors", c_int32), ("query", c_void_p), ("key", c_void_p), ("positive", c_void_p),
        ("scale", c_void_p), ("one_scale", c_bool), ("factor", c_double), ("bias", c_void_p),
        ("row_id", c_void_p), ("col_id", c_void_p), ("reducer", c_int32), ("offset", c_void_p), ("cap", c_void_p),
    )  # fmt: skip


class COutputs(Structure):
    _fields_ = (("pos", c_void_p), ("lse", c_void_p), ("mean_key", c_void_p), ("sum_weight", c_void_p))


class CGradients(Structure):
    _fields_ = tuple(
        (name, c_void_p)
        for name in ("grad_pos", "grad_lse", "lse", "mean_key", "query", "positive", "scale", "key", "bias")
    )


class CChunk(Structure):
    _fields_ = (("begin", c_int64), ("count", c_int64), ("dots", c_void_p), ("weights", c_void_p), ("dtype", c_int32))


def build(folder: Path, flags: Sequence[str] = ("-O1",)) -> Path:
    """Compiles kernels and emulator into a library in `folder`; skips the test where there is no compiler."""
    compiler = compiler_or_skip()
    emulator = ROOT / "tests" / "cuda" / "cuda_emulator"
    sources = [*sorted((ROOT / "csrc" / "cuda").glob("*.cu")), emulator / "bindings.cpp"]
    common = [compiler, "-std=c++17", "-fPIC", "-Wall", "-Wextra", "-Werror", "-DFASTCL_EMULATED", *flags]
    common += [f"-I{ROOT / 'csrc'}", f"-I{emulator}", "-x", "c++"]
    objects = compile_all(common, sources, folder)
    library = folder / "kernels.so"
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

    def in_chunks(self, query: Tensor) -> bool:
        return query.shape[1] > self.most_features(DTYPES[query.dtype])

    def forward(self, problem: CProblem, outputs: COutputs, query: Tensor, key: Tensor, sums: Tensor | None) -> None:
        if not self.in_chunks(query):
            return self.run("forward", problem, outputs)

        def multiply(rows: slice, weights: Tensor) -> None:
            assert sums is not None
            sums[rows] = weights @ key.float()

        return self.run_chunks("forward", problem, outputs, query, key, None if sums is None else multiply)

    def backward(self, problem: CProblem, g: CGradients, query: Tensor, key: Tensor, d_key: Tensor | None) -> None:
        if (g.key or g.bias) and self.in_chunks(query):
            total = torch.zeros(key.shape)

            def multiply(rows: slice, weights: Tensor) -> None:
                total.addmm_(weights.T, query[rows].float())

            columns = CGradients(grad_lse=g.grad_lse, lse=g.lse, bias=g.bias)
            self.run_chunks("backward", problem, columns, query, key, multiply if g.key else None)
            if d_key is not None:
                d_key.copy_(total)
            g.key = g.bias = None
        self.run("backward", problem, g)

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
        cap: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor]:
        """As `fastcl.contrast`."""
        (query, key, positive), (scale_t, bias, cap), factor = _as_one_type((query, key, positive), scale, bias, cap)
        pos, lse = _Contrast.apply(self, query, key, positive, scale_t, bias, row_id, col_id, cap, factor)
        return (None if positive is None else pos), lse

    def softplus_sum(
        self,
        query: Tensor,
        key: Tensor,
        *,
        scale: float | Tensor = 1.0,
        offset: Tensor | None = None,
        bias: Tensor | None = None,
        row_id: Tensor | None = None,
        col_id: Tensor | None = None,
    ) -> Tensor:
        """As `fastcl.softplus_sum`."""
        (query, key), (scale_t, bias, offset), factor = _as_one_type((query, key), scale, bias, offset)
        return _SoftplusSum.apply(self, query, key, scale_t, offset, bias, row_id, col_id, factor)

    def problem(self, query: Tensor, key: Tensor, positive: Tensor | None, scale: Tensor | None, bias: Tensor | None,
                row_id: Tensor | None, col_id: Tensor | None, factor: float) -> CProblem:  # fmt: skip
        (n, d), m = query.shape, key.shape[0]
        one_scale = scale is not None and scale.dim() == 0
        return CProblem(n, m, d, DTYPES[query.dtype], self.tf32, self.multiprocessors, *map(_pointer, (
            query, key, positive, scale)), one_scale, factor, *map(_pointer, (bias, row_id, col_id)))  # fmt: skip


def _as_one_type(matrices: tuple[Tensor | None, ...], scale: float | Tensor, *vectors: Tensor | None) -> Any:
    """(matrices in one dtype, scale and vectors in the compute type, the factor), contiguous."""
    dtypes = {t.dtype for t in matrices if t is not None}
    wide = torch.float64 if torch.float64 in dtypes else torch.float32
    dtype = dtypes.pop() if len(dtypes) == 1 else wide
    scale_t = scale if isinstance(scale, Tensor) else None
    return (
        [None if t is None else t.to(dtype).contiguous() for t in matrices],
        [None if t is None else t.to(wide).contiguous() for t in (scale_t, *vectors)],
        1.0 if isinstance(scale, Tensor) else scale,
    )


def _pointer(t: Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()


def _nan(wanted: bool, t: Tensor, *shape: int) -> Tensor | None:
    """For a kernel to write: what it leaves out shows."""
    return torch.full(shape, torch.nan, dtype=t.dtype) if wanted else None


def _compute_type(t: Tensor) -> Tensor:
    return t.new_empty(0, dtype=torch.float64 if t.dtype == torch.float64 else torch.float32)


class _Contrast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernels: Kernels, query: Tensor, key: Tensor, positive: Tensor | None, scale: Tensor | None,
                bias: Tensor | None, row_id: Tensor | None, col_id: Tensor | None, cap: Tensor | None,
                factor: float) -> Any:  # fmt: skip
        problem = kernels.problem(query, key, positive, scale, bias, row_id, col_id, factor)
        problem.cap = _pointer(cap)
        n, d = query.shape
        wide = _compute_type(query)
        pos, lse = _nan(positive is not None, wide, n), _nan(True, wide, n)
        mean_key = _nan(ctx.needs_input_grad[1] or ctx.needs_input_grad[4], wide, n, d)
        kernels.forward(problem, COutputs(*map(_pointer, (pos, lse, mean_key)), None), query, key, mean_key)
        ctx.save_for_backward(query, key, positive, scale, bias, row_id, col_id, cap, lse, mean_key)
        ctx.kernels, ctx.problem = kernels, problem
        return wide if pos is None else pos, lse

    @staticmethod
    def backward(ctx: Any, grad_pos: Tensor, grad_lse: Tensor) -> Any:
        query, key, positive, scale, bias, *_, lse, mean_key = ctx.saved_tensors
        grad_pos, grad_lse = grad_pos.contiguous(), grad_lse.contiguous()
        needs = ctx.needs_input_grad[1:6]
        d_query, d_key = (_nan(needed, t, *t.shape) for needed, t in zip(needs, (query, key), strict=False))
        d_positive, d_scale = _nan(needs[2], query, *query.shape), _nan(needs[3], lse, *lse.shape)
        d_bias = _nan(needs[4], lse, key.shape[0])
        given = (None if positive is None else grad_pos, grad_lse, lse, mean_key)
        g = CGradients(*map(_pointer, (*given, d_query, d_positive, d_scale, d_key, d_bias)))
        ctx.kernels.backward(ctx.problem, g, query, key, d_key)
        if d_scale is not None and scale.dim() == 0:
            d_scale = d_scale.sum()
        return None, d_query, d_key, d_positive, d_scale, d_bias, None, None, None, None


class _SoftplusSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernels: Kernels, query: Tensor, key: Tensor, scale: Tensor | None, offset: Tensor | None,
                bias: Tensor | None, row_id: Tensor | None, col_id: Tensor | None, factor: float) -> Any:  # fmt: skip
        problem = kernels.problem(query, key, None, scale, bias, row_id, col_id, factor)
        problem.reducer, problem.offset = 1, _pointer(offset)
        n, d = query.shape
        wide = _compute_type(query)
        total, sum_key, sum_weight = _nan(True, wide, n), _nan(True, wide, n, d), _nan(True, wide, n)
        assert total is not None
        outputs = COutputs(None, *map(_pointer, (total, sum_key, sum_weight)))
        kernels.forward(problem, outputs, query, key, sum_key)
        absent = query.new_empty(0)
        optional = (absent if t is None else t for t in (scale, offset, bias, row_id, col_id))
        ctx.save_for_backward(query, key, *optional, sum_key, sum_weight)
        ctx.kernels, ctx.problem, ctx.factor = kernels, problem, factor
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        def columns(grad: Tensor, query: Tensor, key: Tensor, *rest: Any) -> tuple[Tensor | None, Tensor | None]:
            d_key, d_bias = _nan(rest[-2], key, *key.shape), _nan(rest[-1], grad, key.shape[0])
            g = CGradients(grad_lse=grad.data_ptr(), key=_pointer(d_key), bias=_pointer(d_bias))
            ctx.kernels.backward(ctx.problem, g, query, key, d_key)
            return d_key, d_bias

        needs = ctx.needs_input_grad[1:6]
        found = ops_pairwise._gradients(columns, needs, ctx.factor, grad.contiguous(), *ctx.saved_tensors)
        return None, *(x if needed else None for x, needed in zip(found, needs, strict=True)), None, None, None
