"""The ops below the public functions, called without Python's checks. The compiled part refuses wrong lengths, dtypes
and memory with a RuntimeError; nothing crashes, and no memory beyond the caller's is read.
"""

from __future__ import annotations

import math
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fastcl import both_ways, fallback, normalize, ops, ops_autograd, ops_pairwise, tokens

pytestmark = pytest.mark.skipif(fallback.FORCED, reason="the compiled kernels alone read raw memory")
N, M, D = 6, 5, 4
NONE = torch.empty(0)


def _arguments(dtype: torch.dtype = torch.float32) -> dict[str, list]:
    """Right arguments of each op, by its name."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    g = torch.Generator().manual_seed(0)

    def randn(*shape: int, as_: torch.dtype = wide) -> Tensor:
        return torch.randn(*shape, generator=g).to(as_)

    q, k, p = randn(N, D, as_=dtype), randn(M, D, as_=dtype), randn(N, D, as_=dtype)
    row, col = torch.arange(N) % 3, torch.arange(M) % 2
    columns = [randn(M), row, col, 1.3]
    frozen = [randn(3, D, as_=dtype), randn(3), torch.arange(3)]
    rest = [1.3, True, True, True, 0.5, randn(N), randn(N), randn(N), *frozen]
    forward = [q, k, p, randn(N), *columns[:3], 3 * randn(N).abs(), *rest]
    _, lse, *sums = ops.forward_op(*forward)
    packed = {unit: ops_autograd.packed_forward_op(*forward, unit, 2)[1:] for unit in (0, 2)}
    gradients = [1.3, True, True, True, True, True]
    offset, grad = randn(N), randn(N)
    pairs = [q, k, randn(N), offset, *columns, True, True, True, randn(N)]
    _, _, _, *pair_sums = ops_pairwise.forward_op(*pairs)
    unit, inverse = normalize.unit_forward(q)
    ways = [q.to(wide), p.to(wide), row]
    _, _, *logits = both_ways._forward(*ways, 1.3)
    words = [randn(N, 3, D, as_=dtype), randn(M, 5, D, as_=dtype)]
    lengths = [torch.arange(N) % 4, torch.arange(M) + 1]
    score, place = tokens.forward_op(*words, *lengths, True)
    return {
        "contrast_forward": forward,
        "contrast_backward": [randn(N), grad, *forward[:8], lse, *sums, *gradients],
        "packed_forward": [*forward, 0, 2],
        "packed_backward": [randn(N), grad, *forward[:8], *packed[0], *gradients, 0, True],
        "packed_backward of unit rows": [randn(N), grad, *forward[:8], *packed[2], *gradients, 2, True],
        "softplus_sum_forward": pairs,
        "softplus_sum_backward": [grad, *pairs[:8], True, True, *pair_sums],
        "normalize_forward": [q],
        "normalize_backward": [randn(N, D), unit, inverse, q],
        "both_ways_forward": [*ways, 1.3],
        "both_ways_backward": [randn(2 * N), randn(2 * N), *ways, *logits, 1.3, True, True],
        "maxsim_forward": [*words, *lengths, True],
        "maxsim_backward": [randn(*score.shape), *words, place, True, True],
    }


RUN = {
    "contrast_forward": ops.forward_op,
    "contrast_backward": ops.backward_op,
    "packed_forward": ops_autograd.packed_forward_op,
    "packed_backward": ops_autograd.packed_backward_op,
    "packed_backward of unit rows": ops_autograd.packed_backward_op,
    "softplus_sum_forward": ops_pairwise.forward_op,
    "softplus_sum_backward": ops_pairwise.backward_op,
    "normalize_forward": normalize.unit_forward,
    "normalize_backward": normalize.unit_backward,
    "both_ways_forward": both_ways._forward,
    "both_ways_backward": both_ways._backward,
    "maxsim_forward": tokens.forward_op,
    "maxsim_backward": tokens.backward_op,
}


def _freed(t: Tensor) -> Tensor:
    view = torch.cat([t.flatten(), t.flatten()])[t.numel() :].view(t.shape)
    view.untyped_storage().resize_(0)
    return view


def _cut_short(t: Tensor) -> Tensor:
    t = t.clone()
    t.untyped_storage().resize_(t.untyped_storage().nbytes() // 2)
    return t


# What no op takes in the place of any tensor that it reads.
WRONG = {
    "one row more": lambda t: torch.cat([t, t[-1:]]),
    "one row less": lambda t: t[1:],
    "one feature less": lambda t: t[:, 1:].contiguous(),
    "one dimension more": lambda t: t[None],
    "no dimension": lambda t: t.sum().to(t.dtype),
    "strided": lambda t: torch.stack([t, t], -1)[..., 0],
    "another kind": lambda t: t.long() if t.is_floating_point() else t.float(),
    "complex": lambda t: t.to(torch.complex64),
    "int32": lambda t: t.int(),
    "float8": lambda t: t.float().to(torch.float8_e4m3fn),
    "freed": _freed,
    "cut short": _cut_short,
}


# A single scale is a 0-d tensor, rows of any number and length are normalised, and places are int32.
SCALE = {"contrast_forward": 3, "contrast_backward": 5, "softplus_sum_forward": 2, "softplus_sum_backward": 3}
SCALE |= {"packed_forward": 3, "packed_backward": 5, "packed_backward of unit rows": 5}
# Of rows that were divided by their length, backward reads the shapes and dtypes alone.
UNREAD = {
    ("packed_backward of unit rows", place, kind) for place in (2, 3, 4) for kind in ("strided", "freed", "cut short")
}
RIGHT_AFTER_ALL = {(op, place, "no dimension") for op, place in SCALE.items()} | {
    ("normalize_forward", 0, kind) for kind in ("one row more", "one row less", "one feature less")
} | {("maxsim_backward", 3, "int32")} | UNREAD


def _mutants(rng: random.Random, dtype: torch.dtype, op: str) -> tuple[str, list]:
    arguments = _arguments(dtype)[op]
    place = rng.choice([i for i, x in enumerate(arguments) if isinstance(x, Tensor)])
    kind = rng.choice([k for k in WRONG if "feature" not in k or arguments[place].dim() == 2])
    arguments[place] = WRONG[kind](arguments[place])
    return f"{op}, argument {place}, {kind}", arguments


@pytest.mark.parametrize("op", RUN)
def test_right_arguments_are_taken(op: str) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        found = RUN[op](*_arguments(dtype)[op])
        assert (found[0] if isinstance(found, tuple) else found).isfinite().all()


def _refusal(run: Callable[..., object], arguments: list) -> str:
    try:
        run(*arguments)
    except RuntimeError as error:
        return str(error)
    return "taken"


def every_wrong_argument_is_refused() -> int:
    tried = 0
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        right = _arguments(dtype)
        for op, given in right.items():
            for place, t in enumerate(given):
                if not isinstance(t, Tensor):
                    continue
                for kind, wrong in WRONG.items():
                    if "feature" in kind and t.dim() != 2:
                        continue
                    if (op, place, kind) in RIGHT_AFTER_ALL:
                        continue
                    arguments = list(given)
                    arguments[place] = wrong(t)
                    error = _refusal(RUN[op], arguments)
                    assert "fastcl: " in error, f"{op}, {dtype}, argument {place}, {kind}: {error}"
                    tried += 1
    return tried


def absent_ones_are_refused_where_they_are_needed() -> int:
    forward = _arguments()["contrast_forward"]
    backward = _arguments()["contrast_backward"]
    packed, unpacked = _arguments()["packed_forward"], _arguments()["packed_backward"]
    cases = [
        (ops.forward_op, forward, {2: NONE}),  # a shift without a positive
        (ops.forward_op, forward, {2: NONE, 12: float("nan")}),
        (ops.forward_op, forward, {1: NONE}),
        (ops.forward_op, forward, {6: NONE, 18: NONE}),  # ids of rows alone
        (ops.forward_op, forward, {5: NONE}),
        (ops.forward_op, forward, {5: NONE, 6: NONE}),  # ids of frozen columns alone
        (ops.forward_op, forward, {16: NONE}),  # a bias and ids of no frozen columns
        (ops.backward_op, backward, {4: NONE}),  # the gradient of a positive that is not there
        (ops.backward_op, backward, {4: NONE.half()}),
        (ops.backward_op, backward, {3: NONE}),
        (ops.backward_op, backward, {10: NONE}),
        (ops.backward_op, backward, {11: NONE}),
        (ops.backward_op, backward, {14: torch.ones(1)}),  # a sum for one column
        (ops.backward_op, backward, {14: torch.ones(M, dtype=torch.float64)}),
        (ops_autograd.packed_forward_op, packed, {19: 5}),
        (ops_autograd.packed_forward_op, packed, {19: 3}),  # keys that are fewer than the queries which they are
        (ops_autograd.packed_forward_op, packed, {2: NONE, 12: -math.inf, 19: 4}),
        (ops_autograd.packed_forward_op, packed, {20: 3}),
        (ops_autograd.packed_forward_op, packed, {20: 1}),
        (ops_autograd.packed_forward_op, packed, {10: False, 11: False, 20: 0}),
        (ops_autograd.packed_backward_op, unpacked, {19: False}),  # sums that are not there
        (ops_autograd.packed_backward_op, unpacked, {18: 1}),
        (ops_autograd.packed_backward_op, unpacked, {3: NONE}),
        (ops_autograd.packed_backward_op, unpacked, {3: unpacked[2], 13: False, 18: 3}),  # one gradient for both
    ]
    for run, right, changes in cases:
        arguments = [changes.get(i, x) for i, x in enumerate(right)]
        error = _refusal(run, arguments)
        assert "fastcl: " in error, f"{changes}: {error}"
    return len(cases)


def random_combinations(count: int, seed: int) -> int:
    """Two wrong ones at once, and sizes of 0: what comes is a RuntimeError or an answer, never a crash."""
    rng = random.Random(seed)
    for _ in range(count):
        op = rng.choice(list(RUN))
        dtype = rng.choice([torch.float32, torch.bfloat16, torch.float64, torch.float16])
        what, arguments = _mutants(rng, dtype, op)
        for place, x in enumerate(arguments):
            if isinstance(x, Tensor) and rng.random() < 0.15:
                shorter, wider = x[:0] if x.dim() else x, torch.zeros_like(x, dtype=torch.float64)
                arguments[place] = rng.choice([NONE, NONE.to(torch.int64), shorter, wider])
            elif isinstance(x, bool) and rng.random() < 0.3:
                arguments[place] = not x
            elif isinstance(x, float) and rng.random() < 0.3:
                arguments[place] = rng.choice([0.0, float("nan"), float("inf"), -float("inf"), 1e300])
        error = _refusal(RUN[op], arguments)
        assert error == "taken" or "fastcl: " in error, f"{what}: {error}"
    return count


def _in_a_child(code: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", f"import test_raw_ops as t; print({code})"],
        cwd=Path(__file__).parent, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return int(done.stdout)


def test_wrong_arguments_are_refused_and_nothing_crashes() -> None:
    calls = "t.every_wrong_argument_is_refused() + t.absent_ones_are_refused_where_they_are_needed()"
    assert _in_a_child(f"{calls} + t.random_combinations(1500, 0)") > 2900


def test_a_library_of_another_version_is_refused() -> None:
    """Where the Python files declare an argument that the library does not know of, as after an update without a new
    build, a call must not read the stack by the library's own count.
    """
    code = """
import torch
define = torch.library.Library.define
torch.library.Library.define = lambda self, schema, *rest, **more: define(
    self, schema.replace("normalize_forward(Tensor x)", "normalize_forward(Tensor x, int later)"), *rest, **more
)
import fastcl
try:
    torch.ops.fastcl.normalize_forward(torch.eye(2), 1)
except RuntimeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "of another version than the Python files" in done.stdout


@pytest.mark.slow
def test_many_more_combinations_crash_nothing() -> None:
    assert _in_a_child("t.random_combinations(60000, 1)") == 60000
