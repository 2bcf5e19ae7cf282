"""Settings of torch that callers may have on: default device and dtype, modes, transforms. Whether they are on while
fastcl is imported or while a loss is called, they change no value and no gradient.
"""

from __future__ import annotations

import ast
import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import CALLS, Call
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import fastcl

pytestmark = pytest.mark.usefixtures("one_thread")

# One process that has torch and forks once for each state, of which each imports fastcl for the first time.
IMPORTS = """
import os, sys, importlib.metadata, torch, torch._dynamo, torch.testing
from torch._subclasses.fake_tensor import FakeTensorMode

def importing(x=None):
    assert "fastcl" not in sys.modules
    import fastcl
    return x

def traced(x):
    import fastcl
    return x

def within(mode):
    with mode:
        importing()

def with_default_device(device):
    torch.set_default_device(device)
    importing()
    torch.set_default_device("cpu")

def with_default_dtype(dtype):
    torch.set_default_dtype(dtype)
    importing()
    torch.set_default_dtype(torch.float32)

STATES = {
    "none": importing,
    "meta context": lambda: within(torch.device("meta")),
    "meta by default": lambda: with_default_device("meta"),
    "cuda by default": lambda: with_default_device("cuda"),
    "float64": lambda: with_default_dtype(torch.float64),
    "float16": lambda: with_default_dtype(torch.float16),
    "inference mode": lambda: within(torch.inference_mode()),
    "no grad": lambda: within(torch.no_grad()),
    "fake tensors": lambda: within(FakeTensorMode()),
    "autocast": lambda: within(torch.autocast("cpu", torch.bfloat16)),
    "deterministic": lambda: (torch.use_deterministic_algorithms(True), importing()),
    "vmap": lambda: torch.func.vmap(importing)(torch.ones(3)),
    "grad": lambda: torch.func.grad(importing)(torch.ones(())),
    "functionalize": lambda: torch.func.functionalize(importing)(torch.ones(())),
    "compile": lambda: torch.compile(traced, backend="eager")(torch.ones(())),
}

def check():
    import fastcl
    from fastcl import reference
    torch.manual_seed(0)
    x, y = torch.randn(4, 2, requires_grad=True), torch.randn(4, 2)
    queue = fastcl.NegativeQueue(3, 2)
    queue.push(torch.randn(2, 2))
    for name, *arguments in (
        ("infonce", x, y, y), ("nt_xent", x, y), ("bpr", x, y, y), ("siglip", x, y, torch.tensor(1.0), 0.0),
        ("uniformity", x), ("infonce", x, y, None, 0.1, "mean", None),
    ):
        options = {"queue": queue} if len(arguments) == 6 else {}
        found, expected = (getattr(f, name)(*arguments, **options) for f in (fastcl, reference))
        assert found.dtype == torch.float32 and found.device.type == "cpu", found
        for a, b in ((found, expected), (torch.autograd.grad(found, x)[0], torch.autograd.grad(expected, x)[0])):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    pos, lse = fastcl.contrast(x.detach(), y)
    assert pos is None and lse.dtype == torch.float32
    torch.testing.assert_close(lse, reference.contrast(x.detach(), y)[1])

for name, state in STATES.items():
    child = os.fork()
    if child == 0:
        try:
            state()
            check()
        except BaseException as error:
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, name
print(len(STATES))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_import_in_any_state() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split()[-1] == "15"


@contextlib.contextmanager
def _default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


STATES: dict[str, Callable[[], Any]] = {
    "meta context": lambda: torch.device("meta"),
    "meta by default": lambda: _default_device("meta"),
    "cuda by default": lambda: _default_device("cuda"),
    "float64": lambda: _default_dtype(torch.float64),
    "float16": lambda: _default_dtype(torch.float16),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "deterministic": _deterministic,
}


def _results(call: Call, arguments: dict[str, Tensor]) -> list[Tensor | None]:
    leaves = {n: x.detach().clone().requires_grad_(n in call.learning) for n, x in arguments.items()}
    found = call(leaves)
    values = [x for x in (found if isinstance(found, tuple) else (found,)) if x is not None]
    learning = [leaves[n] for n in call.learning]
    return [*values, *torch.autograd.grad(sum(x.sum() for x in values), learning, allow_unused=True)]


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_calls_in_any_state(state: Callable[[], Any]) -> None:
    for name, call in CALLS.items():
        arguments = call.make()
        expected = _results(call, arguments)
        with state():
            found = _results(call, arguments)
        for x, y in zip(found, expected, strict=True):
            if x is None or y is None:
                assert x is y, name
                continue
            assert x.dtype == y.dtype, name
            assert torch.equal(x, y), name


def test_without_gradients_and_in_inference_mode() -> None:
    for name, call in CALLS.items():
        arguments = call.make()
        expected = _results(call, arguments)[0]
        for mode in (torch.no_grad(), torch.inference_mode()):
            with mode:
                found = call(arguments)
            found = found if isinstance(found, Tensor) else next(x for x in found if x is not None)
            torch.testing.assert_close(found.clone(), expected.detach(), msg=name)
        # The modes leave nothing behind that changes a later call.
        assert torch.equal(_results(call, arguments)[0], expected), name


def test_fake_tensors_have_the_shapes_and_dtypes_of_real_ones() -> None:
    for name, call in CALLS.items():
        arguments = call.make()
        expected = call(arguments)
        with FakeTensorMode() as mode:
            found = call({n: mode.from_tensor(x) for n, x in arguments.items()})
        pairs = zip(expected, found, strict=True) if isinstance(expected, tuple) else [(expected, found)]
        for x, y in pairs:
            if x is not None:
                assert (x.shape, x.dtype, x.device) == (y.shape, y.dtype, y.device), name
        on_meta = call({n: x.to("meta") for n, x in arguments.items()})
        assert (on_meta[1] if isinstance(on_meta, tuple) else on_meta).is_meta, name


# Factories whose result depends on the default device; those of the second group on the default dtype as well.
ANY_DTYPE = {"arange", "as_tensor", "tensor", "randint", "randperm"}
DEFAULT_DTYPE = {"empty", "zeros", "ones", "full", "eye", "linspace", "rand", "randn"}


def _ambient_calls(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    """(the functions and classes around it, call) of factories of torch that leave device or dtype to the ambient."""

    def visit(node: ast.AST, where: tuple[str, ...]) -> Iterator[tuple[str, ast.Call]]:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            # A class without bases is no module.
            plain = isinstance(node, ast.ClassDef) and not node.bases
            where = (*where, f"{node.name} (no module)" if plain else node.name)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            of_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
            given = {k.arg for k in node.keywords}
            needs = {"device"} | ({"dtype"} if node.func.attr in DEFAULT_DTYPE else set())
            if of_torch and node.func.attr in ANY_DTYPE | DEFAULT_DTYPE and not needs <= given:
                yield ".".join(where), node
        for child in ast.iter_child_nodes(node):
            yield from visit(child, where)

    return visit(tree, ())


def test_no_tensor_takes_the_ambient_device_or_dtype() -> None:
    """Constructors of modules apart, and `build` of the baselines, whose parameters and buffers are where and what the
    caller's context says.
    """
    package = Path(fastcl.__file__).parent
    found = []
    for file in sorted(package.rglob("*.py")):
        if file.stem.startswith("reference"):  # twins for tests
            continue
        for where, call in _ambient_calls(ast.parse(file.read_text())):
            if "(no module)" in where or not where.endswith(("__init__", ".build")):
                found.append(f"{file.relative_to(package)}:{call.lineno}: {ast.unparse(call)}")
    assert found == []
