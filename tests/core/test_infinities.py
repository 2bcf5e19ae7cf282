"""Infinities, NaN and overflow in any input of the op: one rule for every kernel, the fallback and the textbook.

The rule is in the docstring of `fastcl.contrast`; the textbook in float64 is compared NaN by NaN and infinity by
infinity. Kernels of CUDA run in the emulator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import assert_budget, gradients, leaves, tolerance
from emulated import Kernels
from problems import DTYPES, F16, F32, F64
from torch import Tensor

import fastcl
from fastcl import fallback, ops, reference

INF, NAN = torch.inf, torch.nan
pytestmark = pytest.mark.usefixtures("one_thread")


def planted(seed: int, dtype: torch.dtype, infinite_entries: bool = True) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A random problem with infinities, NaN and huge numbers in some inputs; (tensors, ids)."""
    g = torch.Generator().manual_seed(seed)

    def below(n: int) -> int:
        return int(torch.randint(n, (), generator=g))

    def any_of(*values: Any) -> Any:
        return values[below(len(values))]

    n, m, d = any_of(1, 2, 5, 33), any_of(1, 3, 17, 64, 70), any_of(1, 3, 16, 40)
    wide = F64 if dtype == F64 else F32
    # Whole numbers other than 0: no product of them is rounded, and no product with an infinity is NaN.
    tensors = {
        name: torch.randint(2, 5, shape, generator=g).to(dtype) * any_of(1, -1)
        for name, shape in (("query", (n, d)), ("key", (m, d)), ("positive", (n, d)))
    }
    tensors["scale"] = torch.full((n,), any_of(1.0, -1.0, 2.0), dtype=wide)
    tensors["bias"] = torch.randint(-3, 4, (m,), generator=g).to(wide)
    if dtype != F16 and below(3) == 0:
        # One number whose every product overflows. With two, the result would depend on the order of the sum.
        x = tensors[any_of("query", "key", "positive")]
        x.view(-1)[below(x.numel())] = any_of(1, -1) * torch.finfo(dtype).max
        del tensors["scale"]  # its gradient in the textbook is 0 * inf where a logit overflowed to -inf
        return tensors, _ids(g, n, m) if below(2) else {}
    for _ in range(1 + below(3)):
        x = tensors[any_of(*tensors)]
        x.view(-1)[below(x.numel())] = any_of(NAN, INF, -INF) if x.dim() == 1 or infinite_entries else NAN
    return tensors, _ids(g, n, m) if below(2) else {}


def _ids(g: torch.Generator, n: int, m: int) -> dict[str, Tensor]:
    return {"row_id": torch.randint(4, (n,), generator=g), "col_id": torch.randint(4, (m,), generator=g)}


def results(function: Callable[..., Any], tensors: dict[str, Tensor], ids: dict[str, Any]) -> dict[str, Tensor]:
    inputs = leaves(tensors, frozenset(tensors))
    pos, lse = function(**inputs, **ids)
    ones = [torch.ones_like(pos), torch.ones_like(lse)]
    return {"pos": pos.detach(), "lse": lse.detach(), **gradients([pos, lse], ones, inputs)}


def assert_same_specials(ours: dict[str, Tensor], truth: dict[str, Tensor], tolerance: float, what: object) -> None:
    for name, expected in truth.items():
        found, expected = ours[name].double(), expected.double()
        size = 1 + expected[expected.isfinite()].abs().amax().item() if expected.isfinite().any() else 1
        close = torch.isclose(found, expected, rtol=tolerance, atol=tolerance * size, equal_nan=True)
        assert close.all(), f"{what}, {name}: {found[~close][:5]}, expected {expected[~close][:5]}"


def fallback_contrast(query: Tensor, key: Tensor, positive: Tensor, **rest: Any) -> tuple[Tensor, Tensor]:
    return _Fallback.apply(query, key, positive, *map(rest.get, ("scale", "bias", "row_id", "col_id", "cap")))


class _Fallback(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        given = [torch.empty(0) if t is None else t for t in inputs]
        pos, lse, mean_key, *_ = fallback.forward(*given, 1.0, True)
        ctx.save_for_backward(*given, lse, mean_key)
        return pos, lse

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        found = fallback.backward(*grads, *ctx.saved_tensors, *ops.NO_SUMS, 1.0, *(True,) * 5)
        return *(g if needed else None for g, needed in zip(found, ctx.needs_input_grad, strict=False)), *(None,) * 3


def truth_of(tensors: dict[str, Tensor], ids: dict[str, Any]) -> dict[str, Tensor]:
    """The textbook in float64, and in float32 what overflows there and would not in float64."""
    dtype = tensors["query"].dtype
    largest = max(x.abs().nan_to_num(0, 0).max() for x in tensors.values())
    dtype = F32 if dtype != F64 and largest == torch.finfo(dtype).max else F64
    inputs = {name: x.to(dtype) for name, x in tensors.items()}
    truth = results(reference.contrast, inputs, ids)
    # A row with an empty sum has zero gradient, where the textbook has 0 * inf; the part of its positive remains.
    empty = truth["lse"] == -INF
    scale = inputs.get("scale", torch.ones(len(empty), dtype=dtype))
    scale = scale.masked_fill(~scale.isfinite(), NAN)
    truth["query"] = torch.where(empty[:, None], scale[:, None] * inputs["positive"], truth["query"])
    if "scale" in truth:
        truth["scale"] = torch.where(empty, (inputs["query"] * inputs["positive"]).sum(1), truth["scale"])
    return truth


def check(function: Callable[..., Any], seeds: range, dtype: torch.dtype, infinite_entries: bool = True) -> int:
    special = 0
    for seed in seeds:
        tensors, ids = planted(seed, dtype, infinite_entries)
        truth = truth_of(tensors, ids)
        special += int((truth["lse"] == INF).any())
        limit = tolerance(dtype, 32 * tensors["query"].shape[1])  # logits are at most 2 * 4 * 4 a feature
        assert_same_specials(results(function, tensors, ids), truth, limit, (seed, dtype))
    return special


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_isa_has_the_textbooks_infinities(isa: str, dtype: torch.dtype) -> None:
    assert check(fastcl.contrast, range(60), dtype) > 10


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_fallback_has_the_textbooks_infinities(dtype: torch.dtype) -> None:
    assert check(fallback_contrast, range(60), dtype) > 10


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_cuda_kernels_have_the_textbooks_infinities(emulated_kernels: Any, dtype: torch.dtype) -> None:
    # Split in parts for tensor cores, an infinite float32 is NaN.
    assert check(Kernels(emulated_kernels).contrast, range(60, 85), dtype, infinite_entries=dtype != F32) > 3


@pytest.mark.parametrize("loss", ["dcl", "mine", "mine_plus", "infonce_plus"])
def test_losses_over_infinite_logits(loss: str) -> None:
    """As the textbook has them, gradients too; infonce_plus is the limit, or NaN where that is lam * inf - inf."""
    options = {"epsilon": 0.5} if loss == "infonce_plus" else {}
    for seed in range(40):
        tensors = {name: x for name, x in planted(seed, F32)[0].items() if name not in ("scale", "bias")}
        found = []
        for module in (fastcl, reference):
            inputs = leaves(tensors, frozenset(tensors))
            three = (inputs["query"], inputs["positive"], inputs["key"])
            rows = getattr(module, loss)(*three, 1.0, "none", normalize=False, **options)
            found.append({"rows": rows.detach(), **gradients([rows], [torch.ones_like(rows)], inputs)})
        ours, truth = found
        if loss == "infonce_plus":
            assert torch.equal(ours["rows"].isfinite(), truth["rows"].isfinite())
        else:
            assert_same_specials(ours, truth, tolerance(F32, 32 * tensors["query"].shape[1]), (seed, loss))


def test_infonce_over_infinite_logits(isa: str) -> None:
    """The limit where there is one, and a gradient of NaN or 0 as the op has it; the rows beside are not touched."""
    positive = torch.tensor([[1.0], [INF], [-INF], [1.0], [INF], [NAN], [2.0]], requires_grad=True)
    query = torch.tensor([[1.0], [1.0], [1.0], [3e38], [1.0], [1.0], [1.0]], requires_grad=True)
    key = torch.tensor([[1.0], [2.0]], requires_grad=True)
    rows = fastcl.infonce(query, positive, 10 * key, 1.0, "none", normalize=False)
    beside = torch.log1p(torch.exp(torch.tensor(10 - 1.0)) + torch.exp(torch.tensor(20 - 1.0))).item()
    last = torch.log1p(torch.exp(torch.tensor(10 - 2.0)) + torch.exp(torch.tensor(20 - 2.0))).item()
    expected = torch.tensor([beside, 0.0, INF, INF, 0.0, NAN, last])
    torch.testing.assert_close(rows.detach(), expected, equal_nan=True)
    grads = torch.autograd.grad(rows[[0, 3, 6]].sum(), [query, positive])
    assert grads[0][[0, 6]].isfinite().all()
    assert grads[0][3].isnan().all()
    assert grads[1][[0, 3, 6]].isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_infinities_of_more_problems(isa: str, dtype: torch.dtype) -> None:
    seeds = range(60, 800)
    print(f"{len(seeds)} problems, {check(fastcl.contrast, seeds, dtype)} with an infinite lse")


def extreme(seed: int, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Finite numbers at the ends of what there is: subnormal, -0, steep, one row, many columns, edge ids."""
    g = torch.Generator().manual_seed(seed)

    def any_of(*values: Any) -> Any:
        return values[int(torch.randint(len(values), (), generator=g))]

    n, m, d = any_of(1, 2, 35), any_of(1, 2, 65, 3000), any_of(1, 2, 33)
    wide = F64 if dtype == F64 else F32
    tensors = {}
    for name, rows in (("query", n), ("key", m), ("positive", n)):
        x = torch.randn(rows, d, generator=g, dtype=F64) * any_of(1e-45, 1e-30, 1e-6, 1.0, 1.0, 30.0)
        tensors[name] = any_of(x, x, x.masked_fill(torch.rand(rows, d, generator=g) < 0.5, -0.0)).to(dtype)
    tensors["scale"] = torch.full((n,), any_of(1e-30, 0.0, 1.0, -1.0, 100.0), dtype=wide)
    tensors["bias"] = torch.randn(m, generator=g).mul(any_of(0.0, 1.0, 1e4)).to(wide)
    tensors["bias"][torch.rand(m, generator=g) < any_of(0.0, 0.0, 0.5, 1.0)] = -INF
    ends = torch.tensor([0, -1, 2**63 - 1, -(2**63), 2**32, 2**31 - 1])
    ids = {name: ends[torch.randint(6, (size,), generator=g)] for name, size in (("row_id", n), ("col_id", m))}
    return tensors, any_of({}, ids)


def check_extreme(seeds: range) -> None:
    for dtype in DTYPES:
        for seed in seeds:
            tensors, ids = extreme(seed, dtype)
            wide = {name: x.double() for name, x in tensors.items()}
            truth, ours = results(reference.contrast, wide, ids), results(fastcl.contrast, tensors, ids)
            sizes = [x.nan_to_num(0, 0, 0).abs() for x in wide.values()]
            logits = (sizes[0] @ sizes[1].T * sizes[3][:, None]).max().item() + sizes[4].max().item()
            logits = max(logits, (sizes[0] * sizes[2]).sum(1).mul(sizes[3]).max().item())
            steep = sizes[3].max().item()
            part = {  # what the sums of a result are made of, and may cancel
                "pos": logits, "lse": 1.0 + logits, "bias": 1.0, "scale": logits / max(steep, 1e-30),
                "query": steep * max(sizes[1].max().item(), sizes[2].max().item()),
                "key": steep * sizes[0].max().item(), "positive": 0.0,
            }  # fmt: skip
            for name, expected in truth.items():
                limit = tolerance((F64 if dtype == F64 else F32) if name in ("pos", "lse") else dtype, logits)
                # The smallest float16 is 6e-8.
                floor = part[name] + (6e-8 / limit if dtype == F16 else 1e-30)
                assert_budget(f"{seed} {dtype} {name}", ours[name], ours[name], expected, limit, floor, factor=0.0)


def test_numbers_at_the_ends(isa: str) -> None:
    check_extreme(range(25))


@pytest.mark.slow
def test_numbers_at_the_ends_of_more_problems(isa: str) -> None:
    check_extreme(range(25, 1000))
    print("3,900 problems")
