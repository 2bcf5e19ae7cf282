"""The names of lightly.loss (lightly 1.6.0): NTXentLoss, DCLLoss, DCLWLoss."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastcl.compat.gathering import check_available, own_places, rows_of_all
from fastcl.losses import dcl, dclw, infonce, mises_fisher_weights
from fastcl.negatives import NegativeQueue

Weights = Callable[[Tensor, Tensor], Tensor]


class NTXentLoss(nn.Module):
    """`lightly.loss.NTXentLoss`. The result has the dtype of out0.

    Differs on purpose: the memory bank is a `fastcl.NegativeQueue`. It keeps every key, also where a batch crosses the
    end of the bank, and it is in the state dict. A bank without a width has that of the first batch. A temperature
    below 0 is refused.
    """

    def __init__(
        self, temperature: float = 0.5, memory_bank_size: int | Sequence[int] = 0, gather_distributed: bool = False
    ) -> None:
        super().__init__()
        check_available(gather_distributed)
        if abs(temperature) < 1e-8:
            raise ValueError(f"temperature: expected at least 1e-8, got {temperature}")
        self.temperature, self.gather_distributed = temperature, gather_distributed
        self.size = (memory_bank_size,) if isinstance(memory_bank_size, int) else tuple(memory_bank_size)
        if any(size < 0 for size in self.size) or len(self.size) not in (1, 2):
            raise ValueError(
                f"memory_bank_size: expected a size, or a size and a width, of at least 0, got {memory_bank_size}"
            )
        self.memory_bank = self._filled(self.size[1]) if self.size[0] and len(self.size) > 1 else None

    def _filled(self, dim: int) -> NegativeQueue:
        queue = NegativeQueue(self.size[0], dim)
        device = next(queue.buffers()).device
        queue.push(F.normalize(torch.randn(self.size[0], dim, device=device, dtype=torch.float32), dim=-1))
        return queue

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        keys = state_dict.get(f"{prefix}memory_bank._keys")
        if keys is not None and self.size[0] and self.memory_bank is None:  # its width is that of the first batch
            self.memory_bank = NegativeQueue(self.size[0], keys.shape[1])
        super()._load_from_state_dict(state_dict, prefix, *others)

    def forward(self, out0: Tensor, out1: Tensor) -> Tensor:
        if not self.size[0]:
            return _both_views(infonce, out0, out1, self.temperature, self.gather_distributed)
        if self.memory_bank is None:
            self.memory_bank = self._filled(out0.shape[1])
        self.memory_bank.to(out0.device)  # a module without weights may not have been moved
        loss = infonce(out0, out1, temperature=self.temperature, in_batch=False, queue=self.memory_bank)
        if out0.requires_grad and torch.is_grad_enabled():
            keys = F.normalize(out1.detach(), dim=1)
            self.memory_bank.push(*(rows_of_all(keys) if self.gather_distributed else (keys,)))
        return loss.to(out0.dtype)


class DCLLoss(nn.Module):
    """`lightly.loss.DCLLoss`. The result has the dtype of out0.

    Differs on purpose: a batch of one pair, which has no negatives, has loss 0 instead of minus infinity.
    """

    def __init__(
        self, temperature: float = 0.1, weight_fn: Weights | None = None, gather_distributed: bool = False
    ) -> None:
        super().__init__()
        check_available(gather_distributed)
        self.temperature, self.weight_fn, self.gather_distributed = temperature, weight_fn, gather_distributed

    def forward(self, out0: Tensor, out1: Tensor) -> Tensor:
        loss = functools.partial(dclw, weight_fn=self._weights) if self.weight_fn else dcl
        return _both_views(loss, out0, out1, self.temperature, self.gather_distributed)

    def _weights(self, query: Tensor, key: Tensor) -> Tensor:
        """Of the rows of each direction apart, as `weight_fn` may look at the others."""
        assert self.weight_fn is not None
        directions = zip(query.chunk(2), key.chunk(2), strict=True)
        return torch.cat([self.weight_fn(*each) for each in directions])


class DCLWLoss(DCLLoss):
    """`lightly.loss.DCLWLoss`: `DCLLoss` with negative von Mises-Fisher weights."""

    def __init__(self, temperature: float = 0.1, sigma: float = 0.5, gather_distributed: bool = False) -> None:
        super().__init__(temperature, functools.partial(mises_fisher_weights, sigma=sigma), gather_distributed)


negative_mises_fisher_weights = mises_fisher_weights


def _both_views(loss: Callable[..., Tensor], out0: Tensor, out1: Tensor, temperature: float, of_all: bool) -> Tensor:
    """Over 2N rows, of which each leaves out itself and its partner."""
    ids = own_places(len(out0), out0.device) if of_all else torch.arange(len(out0), device=out0.device)
    query, key = torch.cat([out0, out1]), torch.cat([out1, out0])
    if not of_all:
        return loss(query, key, temperature=temperature, ids=ids.repeat(2)).to(out0.dtype)
    keys = torch.cat(rows_of_all(out0, out1))
    places = torch.arange(len(keys) // 2, device=keys.device).repeat(2)
    found = loss(query, key, keys, temperature=temperature, ids=ids.repeat(2), negative_ids=places)
    return found.to(out0.dtype)
