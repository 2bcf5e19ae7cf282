"""The properties of the CUDA op that no emulator shows: streams, devices, captured graphs, memory. Runs on a GPU only.

Values and gradients over shapes and types are tested in test_contrast_cuda.py.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastcl import ops

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device here")


def _value_and_gradients(inputs: list[Tensor]) -> list[Tensor]:
    pos, lse = ops.contrast(*inputs, scale=0.5)
    return [pos, lse, *torch.autograd.grad((lse - pos).sum(), inputs)]


def _inputs(device: str, n: int = 300) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(rows, 48, generator=g).to(device).requires_grad_() for rows in (n, 4000, n)]


def test_the_current_stream_is_used() -> None:
    inputs = _inputs("cuda")
    expected = _value_and_gradients(inputs)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)  # what runs on another stream would not wait for the inputs
        late = [x.detach().clone().requires_grad_() for x in inputs]
        found = _value_and_gradients(late)
    side.synchronize()
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def test_a_second_device() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one device only")
    for a, b in zip(_value_and_gradients(_inputs("cuda:1")), _value_and_gradients(_inputs("cuda:0")), strict=True):
        assert a.device == torch.device("cuda:1")
        torch.testing.assert_close(a.cpu(), b.cpu())
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("d", [48, 300])
def test_a_graph_can_be_captured(d: int) -> None:
    g = torch.Generator().manual_seed(0)
    inputs = [torch.randn(rows, d, generator=g).cuda().requires_grad_() for rows in (100, 1000, 100)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        _value_and_gradients(inputs)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = _value_and_gradients(inputs)
    with torch.no_grad():
        for x in inputs:
            x.mul_(0.5)
    graph.replay()
    for a, b in zip(found, _value_and_gradients(inputs), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("d", [64, 300])
def test_logits_are_never_stored(d: int) -> None:
    n = 20_000
    inputs = [torch.randn(n, d, device="cuda", requires_grad=True) for _ in range(3)]
    _value_and_gradients(inputs)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    _value_and_gradients(inputs)
    grown = torch.cuda.max_memory_allocated() - before
    assert grown < 0.3 * 4 * n * n, f"peak memory grew by {grown / 1e6:.0f} MB"


def test_compiled_without_a_graph_break() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(ops.contrast, fullgraph=True, backend="aot_eager")
    inputs = _inputs("cuda")
    pos, lse = compiled(*inputs, scale=0.5)
    assert pos is not None
    found = [pos, lse, *torch.autograd.grad((lse - pos).sum(), inputs)]
    for a, b in zip(found, _value_and_gradients(inputs), strict=True):
        torch.testing.assert_close(a, b)
