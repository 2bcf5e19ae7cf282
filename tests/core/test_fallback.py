"""The chunked PyTorch path must give what the compiled kernels give: other devices depend on it."""

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor

import fastcl
from fastcl import fallback, ops

NONE = torch.empty(0)


def problem(n: int, m: int, d: int, dtype: torch.dtype, options: str) -> list[Tensor | float]:
    g = torch.Generator().manual_seed(n * 1000 + m)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g).to(dtype)

    scale = {"rows": torch.rand(n, generator=g) * 3, "tensor": torch.tensor(2.5)}.get(options, NONE)
    bias = torch.randn(m, generator=g).masked_fill(torch.rand(m, generator=g) < 0.2, -torch.inf)
    ids = options in ("rows", "tensor")
    row_id = torch.randint(4, (n,), generator=g) if ids else NONE
    col_id = torch.randint(4, (m,), generator=g) if ids else NONE
    cap = torch.rand(n, generator=g) * 3 * d**0.5 if ids else NONE
    q, k, p = draw(n, d), draw(m, d), draw(n, d)
    return [q, k, p, scale, bias if ids else NONE, row_id, col_id, cap, 1.0 if ids else 1.7]


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
        ours, theirs = fallback.forward(*inputs, row_grad), ops.forward_op(*inputs, row_grad, *ops.PLAIN)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)
    _, lse, mean_key, *nothing = theirs
    upstream = torch.linspace(-1, 1, shape[0], dtype=lse.dtype)
    args = (upstream, upstream.flip(0).contiguous(), *inputs[:8], lse, mean_key, *nothing, inputs[8])
    for wanted in [(True,) * 5, (True, False, False, False, False), (False, True, False, False, True)]:
        for a, b in zip(fallback.backward(*args, *wanted), ops.backward_op(*args, *wanted), strict=True):
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            torch.testing.assert_close(a, b, rtol=2e-2 if dtype == torch.bfloat16 else 5e-5, atol=5e-5)


def test_a_device_without_kernels_is_announced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fallback, "_announced", set())
    inputs = problem(2, 3, 4, torch.float32, "plain")
    forward = fallback.kernel(fallback.forward)
    with pytest.warns(UserWarning, match="no compiled kernel for cpu"):
        forward(*inputs, False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        forward(*inputs, False)


def test_autocast_does_not_reach_the_products() -> None:
    inputs = problem(7, 33, 5, torch.float32, "rows")
    plain = fallback.forward(*inputs, True)
    with torch.autocast("cpu", torch.bfloat16):
        for a, b in zip(fallback.forward(*inputs, True), plain, strict=True):
            assert torch.equal(a, b)


def _run(*command: str, wish: str = "1") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "FASTCL_FALLBACK": wish, "OMP_NUM_THREADS": "1"}
    command = (sys.executable, *command)
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[1]
    )


_COUNT = """
import torch, fastcl
from fastcl import fallback
calls = []
chunks = fallback.chunks
fallback.chunks = lambda n, m: calls.append((n, m)) or chunks(n, m)
fastcl.contrast(torch.ones(3, 2), torch.ones(4, 2))
print(calls, fastcl.config()["cpu"])
"""


def test_the_environment_forces_it_on_the_cpu() -> None:
    done = _run("-W", "error", "-c", _COUNT)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[(3, 4)] chunked PyTorch, because of FASTCL_FALLBACK=1\n"
    assert done.stderr == ""


def test_it_is_not_what_runs_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    if fallback.FORCED:
        pytest.skip("FASTCL_FALLBACK=1 is set")
    monkeypatch.setattr(fallback, "chunks", lambda n, m: pytest.fail("the chunked path ran"))
    fastcl.contrast(torch.ones(3, 2), torch.ones(4, 2))
    assert fastcl.config()["cpu"] == "compiled kernels"


def test_the_environment_is_checked() -> None:
    done = _run("-c", "import fastcl", wish="yes")
    assert done.returncode != 0
    assert "ValueError: FASTCL_FALLBACK: expected 0 or 1, got 'yes'" in done.stderr


def test_the_tests_of_the_op_pass_on_it() -> None:
    chosen = "empty_rows or not_saved or opcheck or autocast or twice or func or mixed_dtypes or subset"
    files = ("core/test_contrast.py", "core/test_contrast_torch.py")
    done = _run("-m", "pytest", "-q", "-p", "no:cacheprovider", *files, "-k", f"({chosen}) and not avx")
    assert done.returncode == 0, done.stdout[-3000:]
    assert int(re.findall(r"(\d+) passed", done.stdout)[0]) > 50
