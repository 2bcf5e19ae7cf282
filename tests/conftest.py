"""What the tests of the op and the losses share: error budgets, gradients by name, instruction sets, threads, data.

Which code is under test is up to the tests; inputs are made in problems.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import emulated
import pytest
import torch
from hypothesis import HealthCheck, settings
from problems import BF16, F16, F32, F64, Problem
from torch import Tensor

import fastcl
from fastcl import reference

# All examples of a test share one `isa` fixture on purpose. `pytest --hypothesis-profile=thorough` tries more examples,
# `few` as many as an emulated processor has time for.
_CHECKS = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
settings.register_profile("quick", derandomize=True, deadline=None, max_examples=60, suppress_health_check=_CHECKS)
settings.register_profile("few", derandomize=True, deadline=None, max_examples=4, suppress_health_check=_CHECKS)
settings.register_profile("thorough", deadline=None, max_examples=1000, suppress_health_check=_CHECKS)
settings.load_profile("quick")


# Error allowed relative to the size of a result, before that of the logits: sums of some hundred terms in float32, or
# one rounding to 16 bits of the weights and one of each of the few gradients that are added up.
TOLERANCE = {F64: 1e-12, F32: 1e-5, BF16: 1e-2, F16: 1.5e-3}


def tolerance(dtype: torch.dtype, largest_logit: float) -> float:
    """A logit's rounding, relative to its size, becomes a relative error of its weight and an absolute one of lse."""
    return TOLERANCE[dtype] + 8 * largest_logit * (2.0**-53 if dtype == F64 else 2.0**-24)


@pytest.fixture(params=fastcl.config()["isas"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test once per instruction set this machine can use."""
    before = fastcl.set_isa(request.param)
    yield request.param
    fastcl.set_isa(before)


@pytest.fixture(scope="session", autouse=True)
def disk_is_not_waited_for() -> Iterator[None]:
    """Waiting for the disk takes longer than the rest of the tests of run folders, and guards against power cuts alone:
    what a killed process has written stays.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For modules of many tiny problems: waking threads for each would take longer than everything else."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def emulated_kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library of the CUDA kernels built for the emulator, compiled once for all processes of pytest-xdist: the one
    that asks first holds a lock until the library is there.
    """
    import fcntl  # here, since Windows, where other tests run, has none

    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "emulator"
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        finished = folder / "finished"
        if not finished.exists():
            finished.write_text(str(emulated.build(folder)))
        return Path(finished.read_text())


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of the large data sets, which do not ship with the package; skips where there is none."""
    folder = Path(os.environ.get("FASTCL_DATA", Path(__file__).parents[2] / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"needs the large data sets: {folder.name} folder not found; set FASTCL_DATA to where they are")
    return folder


def leaves(tensors: Mapping[str, Tensor], needs: frozenset[str], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Detached copies that share layout, requiring grad where named; in `dtype` if given."""
    out = {}
    for name, x in tensors.items():
        y = x.detach() if dtype is None else x.detach().to(dtype)
        out[name] = y.requires_grad_(name in needs)
    return out


def gradients(outputs: list[Tensor], upstream: list[Tensor], inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gradient of each input that requires one, by name; zeros where the graph does not reach it."""
    wanted = [name for name, x in inputs.items() if x.requires_grad]
    pairs = [(o, u) for o, u in zip(outputs, upstream, strict=True) if o.requires_grad]
    if not pairs:
        return {name: torch.zeros_like(inputs[name]) for name in wanted}
    grads = torch.autograd.grad(
        [o for o, _ in pairs], [inputs[name] for name in wanted], [u for _, u in pairs], allow_unused=True
    )
    return {n: torch.zeros_like(inputs[n]) if g is None else g for n, g in zip(wanted, grads, strict=True)}


def outputs_and_gradients(
    function: Callable[..., Any], problem: Problem, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """What a `contrast` answers to the problem, in `dtype` if given: pos, lse and "grad NAME" for random upstream."""
    tensors, rest = problem.build()
    inputs = leaves(tensors, problem.needs, dtype)
    pos, lse = function(**inputs, **rest)
    assert (pos is None) == ("positive" not in inputs)
    outputs = [lse] if pos is None else [pos, lse]
    grads = gradients(outputs, list(problem.upstream(lse.dtype))[-len(outputs) :], inputs)
    assert set(grads) == problem.needs & set(inputs)
    for name, g in grads.items():
        assert g.dtype == inputs[name].dtype
    return {"lse": lse} | ({} if pos is None else {"pos": pos}) | {f"grad {n}": g for n, g in grads.items()}


def assert_budget(
    name: str,
    ours: Tensor,
    plain: Tensor,
    truth: Tensor,
    tol: float,
    floor: float | Tensor = 0.0,  # a number, or one for each row
    factor: float = 2.0,
) -> None:
    """|ours - truth| <= factor |plain torch - truth| + tol (size + floor), by row for matrices; same inf and NaN.

    The size of a row is its largest true entry, plus 1% of the whole tensor's; `floor` is the size of what cancels.
    """
    assert ours.shape == truth.shape, f"{name}: shape {tuple(ours.shape)}, expected {tuple(truth.shape)}"
    ours, plain, truth = ours.detach().double(), plain.detach().double(), truth.detach().double()
    special = ~truth.isfinite()
    assert torch.equal(ours.isnan(), truth.isnan()), f"{name}: NaN in other places than the truth"
    assert torch.equal(ours[special & ~truth.isnan()], truth[special & ~truth.isnan()]), f"{name}: infinities differ"
    assert ours[~special].isfinite().all(), f"{name}: not finite where the truth is"
    if truth.numel() == 0:
        return
    zero = torch.zeros_like(truth)
    error = torch.where(special, zero, ours - truth).abs()
    allowance = torch.where(special | ~plain.isfinite(), zero, plain - truth).abs()
    size = torch.where(special, zero, truth).abs()
    whole = size.max()
    if truth.ndim > 1:
        error, allowance, size = (x.flatten(1).amax(1) for x in (error, allowance, size))
    else:
        allowance, size = allowance.max(), whole
    excess = error - (factor * allowance + tol * (size + 0.01 * whole + floor))
    assert excess.max() <= 0, (
        f"{name}: error {error.max():.3e}, over the limit by {excess.max():.3e}; "
        f"plain torch {allowance.max():.3e}, size {whole:.3e}, relative tolerance {tol:.1e}"
    )


def assert_contrast(function: Callable[..., Any], problem: Problem) -> None:
    """Values and gradients of a `contrast` against the float64 truth, plain torch in the same dtype allowed for."""
    ours, plain = outputs_and_gradients(function, problem), outputs_and_gradients(reference.contrast, problem)
    truth = outputs_and_gradients(reference.contrast, problem, F64)
    wide = F64 if problem.query_dtype == F64 else F32
    # With 16-bit inputs an implementation may keep the weights in 16 bits, so this also holds for float32 gradients.
    narrow = max((problem.query_dtype, problem.key_dtype), key=TOLERANCE.__getitem__)
    largest = problem.largest_logit()
    for name in truth:
        if name in ("pos", "lse"):
            assert ours[name].dtype == wide
            assert_budget(name, ours[name], plain[name], truth[name], tolerance(wide, largest), floor=1.0, factor=0.0)
        else:
            # The gradients of scale and bias are sums over features and rows that may cancel.
            floor = 1.0 if name in ("grad scale", "grad bias") else 0.0
            assert_budget(name, ours[name], plain[name], truth[name], tolerance(narrow, largest), floor)


def assert_peaked(query: Tensor, key: Tensor, scale: float) -> None:
    """The truth must not be a flat softmax, which a kernel that ignored its input would also get nearly right."""
    weights = torch.softmax(scale * query.double() @ key.double().T, 1)
    assert weights.amax(1).median() > 3.0 / key.shape[0], "the problem is flat: a wrong kernel could pass"
