"""Textbook forms of the optimisers of late.py, with dense gradients, step by step, in float64."""

from collections.abc import Iterable

import torch
from torch import Tensor


def adam(
    weight: Tensor, grads: Iterable[tuple[Tensor, float]], beta1: float, beta2: float, eps: float
) -> Tensor:  # Kingma & Ba 2015, algorithm 1
    """The table after steps of (gradient [rows, D], learning rate)."""
    weight = weight.double().clone()
    m, v = torch.zeros_like(weight), torch.zeros_like(weight)
    for t, (grad, lr) in enumerate(grads, 1):
        g = grad.double()
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        weight = weight - lr * (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + eps)
    return weight


def rowwise_adagrad(weight: Tensor, grads: Iterable[tuple[Tensor, float]], eps: float) -> Tensor:
    """The table after such steps of Adagrad (Duchi et al. 2011) with one sum per row, of the row's mean squares."""
    weight = weight.double().clone()
    total = torch.zeros(len(weight), 1, dtype=torch.float64)
    for grad, lr in grads:
        g = grad.double()
        total = total + (g**2).mean(1, keepdim=True)
        weight = weight - lr * g / (total.sqrt() + eps)
    return weight
