"""Unusual kinds of tensors in place of every tensor argument of every public function give the value of the reference
or one error that names what is wrong. Nothing crashes, and no wrong number is returned.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import CALLS, SIZES, Call
from torch import Tensor
from torch.utils._pytree import tree_map

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # torch warns that such tensors are in beta, or deprecated.
    pytest.mark.filterwarnings("ignore:.*(Sparse CSR|nested tensors|quantize_per_tensor)"),
]


class Plain(Tensor):
    """A subclass that changes nothing."""


def _negative_bit(x: Tensor) -> Tensor:
    return torch.complex(x, -x).conj().imag if x.is_floating_point() and x.dtype == torch.float32 else x


def _freed(x: Tensor) -> Tensor:
    x = x.clone()
    x.untyped_storage().resize_(0)
    return x


class Dispatching(Tensor):
    """A subclass that holds a tensor and no memory of its own, and sees every operation."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Dispatching:
        return Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, strides=held.stride())

    def __init__(self, held: Tensor) -> None:
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*_held(args), **_held(kwargs or {}))
        return tree_map(lambda x: Dispatching(x) if isinstance(x, Tensor) else x, found)


def _held(tree: Any) -> Any:
    return tree_map(lambda x: x.held if isinstance(x, Dispatching) else x, tree)


class _Distributed(Tensor):
    """A stand-in for torch's DTensor, which needs a process group; tests/core/ranks.py has one."""

    def to_local(self) -> Tensor:
        return self.as_subclass(Tensor)


def _inference(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x.clone()


# Kinds with the same values: the result must be that of the plain tensor.
HARMLESS: dict[str, Callable[[Tensor], Tensor]] = {
    "subclass": lambda x: x.as_subclass(Plain),
    "dispatching": Dispatching,
    "inference": _inference,
    "negated view": lambda x: torch._neg_view(-x),
    "parameter": lambda x: torch.nn.Parameter(x, requires_grad=x.is_floating_point()),
    "negative bit": _negative_bit,
    "strided": lambda x: torch.stack([x, x], -1)[..., 0],
    "transposed": lambda x: x.mT.contiguous().mT if x.dim() > 1 else x,
    "offset": lambda x: torch.cat([x.flatten(), x.flatten()])[x.numel() :].view(x.shape),
}
# Kinds that every function must refuse.
REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "meta": lambda x: x.to("meta"),
    "freed": _freed,
    "sparse": lambda x: x.to_sparse(),
    "compressed": lambda x: x.to_sparse_csr() if x.dim() > 1 else x.to_sparse(),
    "oneDNN": lambda x: x.to_mkldnn() if x.dtype == torch.float32 and x.dim() else x.to_sparse(),
    "quantized": lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8),
    "distributed": lambda x: x.as_subclass(_Distributed),
    "nested": lambda x: torch.nested.nested_tensor([x, x]) if x.dim() else x.to("meta"),
    "jagged": lambda x: torch.nested.nested_tensor([x, x], layout=torch.jagged) if x.dim() else x.to_sparse(),
    "complex": lambda x: x.to(torch.complex64),
    "bool": lambda x: x.bool(),
    "float8": lambda x: x.to(torch.float8_e4m3fn),
    "list": lambda x: x.tolist() if x.dim() else [1.0],
    "one more dimension": lambda x: x[None, None],
    "another length": lambda x: x[:-1] if x.dim() else x.expand(2),
}
ARGUMENTS = [(name, call, argument) for name, call in CALLS.items() for argument in call.arguments]


def _value(found: Any) -> Tensor:
    return _held(found[1] if isinstance(found, tuple) else found)


def _truth(call: Call, arguments: dict[str, Tensor]) -> Tensor:
    wide = {n: x.double() if x.is_floating_point() else x.long() for n, x in arguments.items()}
    return _value(call.reference(wide))


def _answer(call: Call, arguments: dict[str, Any]) -> tuple[Tensor | None, str]:
    try:
        return _value(call(arguments)), ""
    except (TypeError, ValueError, RuntimeError) as error:
        return None, str(error)


@pytest.mark.parametrize("kind", HARMLESS)
def test_tensors_of_the_same_values_give_the_same(kind: str) -> None:
    for name, call, argument in ARGUMENTS:
        arguments = call.make()
        found = _value(call({**arguments, argument: HARMLESS[kind](arguments[argument])}))
        torch.testing.assert_close(
            found.detach().as_subclass(Tensor).double(), _truth(call, arguments), rtol=1e-4, atol=1e-4,
            msg=f"{name}: {argument}",
        )  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_others_are_refused(kind: str) -> None:
    for name, call, argument in ARGUMENTS:
        arguments = call.make()
        wrong = REFUSED[kind](arguments[argument])
        if argument in ("negative_keys", "key", "queue.keys", "table", "buckets") and kind == "another length":
            continue  # there is no wrong number of columns, but for what goes with them
        if name == "uniformity" and kind in ("meta", "another length"):
            continue  # it has nothing beside it that would tell
        found, error = _answer(call, {**arguments, argument: wrong})
        assert ": expected" in error, f"{name}, {argument}: {error} {found}"


def test_zeros_without_memory_are_zeros() -> None:
    for name, call, argument in ARGUMENTS:
        arguments = call.make()
        if argument in ("temperature", "logit_scale") or argument not in call.learning:
            continue  # the first have to be above 0, and autograd makes no integers
        zeros = torch._efficientzerotensor(arguments[argument].shape, dtype=arguments[argument].dtype)
        found = _value(call({**arguments, argument: zeros}))
        truth = _truth(call, {**arguments, argument: torch.zeros_like(arguments[argument])})
        torch.testing.assert_close(found.double(), truth, rtol=1e-4, atol=1e-4, msg=f"{name}: {argument}")


def test_the_fallback_reads_no_freed_memory() -> None:
    """In a process of its own, since reading it ends the process."""
    folders = [str(folder) for folder in Path(__file__).parents[:2]]  # its own and that of what tests share
    code = f"import sys; sys.path += {folders}; import test_kinds as t; t.test_others_are_refused('freed')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "FASTCL_FALLBACK": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint64], ids=str)
def test_any_integer_dtype_serves_as_id(dtype: torch.dtype) -> None:
    tried = 0
    for name, call, argument in ARGUMENTS:
        if call.arguments[argument].kind in ("id", "class", "row"):
            arguments = call.make()
            found = _value(call({**arguments, argument: arguments[argument].to(dtype)}))
            assert torch.equal(found, _value(call(arguments))), (name, argument)
            tried += 1
    assert tried >= 14


def _random_calls(count: int, seed: int) -> Iterator[tuple[str, Call, dict[str, Any], str]]:
    rng = random.Random(seed)
    for n in range(count):
        name, call, argument = rng.choice(ARGUMENTS)
        sizes = {letter: rng.choice([0, 1, 2, size]) for letter, size in SIZES.items()}
        dtype = rng.choice([torch.float32, torch.float64, torch.bfloat16, torch.float16])
        arguments: dict[str, Any] = dict(call.make(sizes, dtype, seed + n))
        table = {**HARMLESS, **REFUSED, "float64": lambda x: x.double() if x.is_floating_point() else x.int()}
        kind = rng.choice(list(table))
        if kind not in REFUSED or arguments[argument].numel():
            arguments[argument] = table[kind](arguments[argument])
        yield f"{name}, {argument} {kind}, {sizes}, {dtype}", call, arguments, kind


def _fuzz(count: int, seed: int) -> int:
    answered = 0
    for what, call, arguments, kind in _random_calls(count, seed):
        found, error = _answer(call, arguments)
        assert found is not None or ": expected" in error, f"{what}: {error}"
        if found is None or kind in REFUSED or found.is_meta or any(x.numel() == 0 for x in arguments.values()):
            continue  # of sizes of 0, test_no_rows.py tests the values
        answered += 1
        truth = _truth(call, {n: x.detach().as_subclass(Tensor) for n, x in arguments.items()})
        rough = any(x.dtype in (torch.bfloat16, torch.float16) for x in arguments.values())
        tolerance = 0.05 if rough else 1e-3
        torch.testing.assert_close(
            found.detach().as_subclass(Tensor).double(), truth, rtol=tolerance, atol=tolerance, msg=what
        )
    return answered


def test_random_calls_are_right_or_refused() -> None:
    assert _fuzz(600, 0) > 80


@pytest.mark.slow
def test_many_random_calls_are_right_or_refused() -> None:
    assert _fuzz(20000, 1) > 2500
