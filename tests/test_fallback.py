"""The chunked PyTorch path must give what the compiled kernels give: other devices depend on it."""

import warnings

import pytest
import torch
from torch import Tensor

from fastcl import fallback, ops

NONE = torch.empty(0)


def problem(n: int, m: int, d: int, dtype: torch.dtype, options: str) -> list[Tensor | float]:
    g = torch.Generator().manual_seed(n * 1000 + m)
    draw = lambda *shape: torch.randn(*shape, generator=g).to(dtype)  # noqa: E731
    scale = {"rows": torch.rand(n, generator=g) * 3, "tensor": torch.tensor(2.5)}.get(options, NONE)
    bias = torch.randn(m, generator=g).masked_fill(torch.rand(m, generator=g) < 0.2, -torch.inf)
    ids = options in ("rows", "tensor")
    row_id = torch.randint(4, (n,), generator=g) if ids else NONE
    col_id = torch.randint(4, (m,), generator=g) if ids else NONE
    return [draw(n, d), draw(m, d), draw(n, d), scale, bias if ids else NONE, row_id, col_id, 1.0 if ids else 1.7]


@pytest.fixture(autouse=True)
def _quiet() -> None:
    fallback._announced.add("cpu")  # these tests call the path on purpose


@pytest.mark.parametrize("options", ["plain", "rows", "tensor"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7, 33, 5), (40, 3, 17), (4, 0, 3), (1, 1, 1)])
@pytest.mark.parametrize("chunk", [1, 100, 1 << 22])
def test_agrees_with_the_kernels(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int], dtype: torch.dtype, options: str, chunk: int
) -> None:
    monkeypatch.setattr(fallback, "_CHUNK_ELEMENTS", chunk)
    inputs = problem(*shape, dtype, options)
    for row_grad in (False, True):
        ours, theirs = fallback.forward(*inputs, row_grad), ops._forward(*inputs, row_grad)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)
    _, lse, mean_key = theirs
    upstream = torch.linspace(-1, 1, shape[0], dtype=lse.dtype)
    args = (upstream, upstream.flip(0).contiguous(), *inputs[:7], lse, mean_key, inputs[7])
    for wanted in [(True,) * 5, (True, False, False, False, False), (False, True, False, False, True)]:
        for a, b in zip(fallback.backward(*args, *wanted), ops._backward(*args, *wanted), strict=True):
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            torch.testing.assert_close(a, b, rtol=2e-2 if dtype == torch.bfloat16 else 5e-5, atol=5e-5)


def test_a_device_without_kernels_is_announced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fallback, "_announced", set())
    inputs = problem(2, 3, 4, torch.float32, "plain")
    with pytest.warns(UserWarning, match="no compiled kernel for cpu"):
        fallback.forward(*inputs, False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fallback.forward(*inputs, False)
