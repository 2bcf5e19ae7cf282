"""Rows, and the comparison of two losses of them with their gradients, for the tests of the adapters."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

N, D, F64 = 9, 5, torch.float64


def rows(*counts: int, seed: int = 0) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    first = torch.randn(max(counts), D, generator=g, dtype=F64)
    return [(first[:n] + 0.8 * torch.randn(n, D, generator=g, dtype=F64)).requires_grad_() for n in counts]


def same(ours: Tensor, theirs: Tensor, *inputs: Tensor, within: float = 1e-11) -> None:
    torch.testing.assert_close(ours, theirs, rtol=within, atol=within)
    grads = [torch.autograd.grad(loss, inputs, retain_graph=True) for loss in (ours, theirs)]
    for a, b in zip(*grads, strict=True):
        assert b.abs().max() > 1e-4
        torch.testing.assert_close(a, b, rtol=within, atol=within)


def cos(a: Tensor, b: Tensor) -> Tensor:
    return F.normalize(a, dim=1) @ F.normalize(b, dim=1).T
