"""momentum_update against the formula, and what it refuses."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import fastcl
from fastcl.momentum import momentum_update


def _encoder(seed: int, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).to(dtype)


@pytest.mark.parametrize("m", [0, 0.25, 0.999, 1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_formula(m: float, dtype: torch.dtype) -> None:
    target, source = _encoder(0, dtype), _encoder(1)
    source(torch.randn(5, 3, dtype=torch.float64))  # moves the running means
    before = {name: p.detach().double().clone() for name, p in target.named_parameters()}
    unchanged = {name: p.detach().clone() for name, p in source.state_dict().items()}
    momentum_update(target, source, m)
    tol = {torch.float64: 1e-15, torch.float32: 1e-6, torch.bfloat16: 2e-2}[dtype]
    for name, p in target.named_parameters():
        assert p.dtype == dtype
        expected = m * before[name] + (1 - m) * unchanged[name]
        torch.testing.assert_close(p.detach().double(), expected, rtol=tol, atol=tol)
    for name, buffer in target.named_buffers():
        assert torch.equal(buffer, unchanged[name].to(buffer.dtype))
    assert target[1].running_mean.abs().sum() > 0
    assert all(torch.equal(p, unchanged[name]) for name, p in source.state_dict().items())


def test_many_updates_follow_the_source() -> None:
    target, source = _encoder(0), _encoder(1)
    gap = (target[0].weight - source[0].weight).detach().clone()
    for _ in range(10):
        momentum_update(target, source, 0.9)
    torch.testing.assert_close((target[0].weight - source[0].weight).detach(), 0.9**10 * gap)


def test_takes_no_gradient_and_leaves_none() -> None:
    source = _encoder(1)
    target = copy.deepcopy(source).requires_grad_(False)
    query, key = source(torch.randn(4, 3).double()), target(torch.randn(4, 3).double())
    fastcl.infonce(query, key).backward()
    grads = [p.grad.clone() for p in source.parameters()]
    with torch.no_grad():
        source[0].weight.add_(1.0)
    momentum_update(target, source, 0.5)
    assert all(torch.equal(p.grad, g) for p, g in zip(source.parameters(), grads, strict=True))
    assert all(p.grad is None and not p.requires_grad and p.is_leaf for p in target.parameters())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"target": torch.ones(2)}, TypeError, "target: expected a module, got Tensor"),
        ({"source": None}, TypeError, "source: expected a module, got NoneType"),
        ({"m": "0.9"}, TypeError, "m: expected a number, got str"),
        ({"m": True}, TypeError, "m: expected a number, got bool"),
        ({"m": 1.5}, ValueError, "m: expected at least 0 and at most 1, got 1.5"),
        ({"m": -0.1}, ValueError, "m: .*-0.1"),
        ({"m": float("nan")}, ValueError, "m: .*nan"),
        ({"source": nn.Linear(3, 4, bias=False)}, ValueError, "target: expected the parameters of source.*bias"),
        ({"target": nn.Linear(3, 4, device="meta")}, ValueError, "target: expected weight on a device.*, got meta"),
        ({"source": nn.Linear(3, 4, device="meta")}, ValueError, "source: expected weight on a device.*, got meta"),
        ({"source": nn.Linear(2, 4)}, ValueError, r"target: expected weight of shape \[4, 2\], got \[4, 3\]"),
        (
            {name: nn.Sequential(fastcl.NegativeQueue(n, 2)) for name, n in (("target", 3), ("source", 4))},
            ValueError,
            r"target: expected 0._keys of shape \[4, 2\], got \[3, 2\]",
        ),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        momentum_update(**{"target": nn.Linear(3, 4), "source": nn.Linear(3, 4), "m": 0.9, **change})


def test_another_set_of_buffers_changes_nothing() -> None:
    target, source = nn.Linear(3, 4), nn.Linear(3, 4)
    source.register_buffer("extra", torch.ones(1))
    before = target.weight.detach().clone()
    with pytest.raises(ValueError, match="target: expected the buffers of source.*extra"):
        momentum_update(target, source, 0.9)
    assert torch.equal(target.weight, before)


def test_a_queue_is_copied_whole() -> None:
    target, source = (nn.ModuleDict({"encode": nn.Linear(2, 2), "queue": fastcl.NegativeQueue(3, 2)}) for _ in range(2))
    target["queue"].push(torch.ones(3, 2), torch.arange(3))
    source["queue"].push(torch.tensor([[5.0, 6.0]]), torch.tensor([9]))
    momentum_update(target, source, 0.9)
    assert target["queue"].keys.tolist() == [[5.0, 6.0]]
    assert target["queue"].ids.tolist() == [9]


def test_parameters_of_integers_are_copied() -> None:
    target, source = nn.Linear(3, 4), nn.Linear(3, 4)
    for module, value in ((target, 1), (source, 8)):
        module.places = nn.Parameter(torch.full((2,), value), requires_grad=False)
    momentum_update(target, source, 0.9)
    assert target.places.tolist() == [8, 8]
