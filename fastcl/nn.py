"""The losses as modules: the constructor fixes temperature, reduction and constants, forward calls the function.

Formulas and checks stay in losses.py; a module adds no behaviour of its own.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from fastcl import losses


class _Loss(nn.Module):
    function: Callable[..., Tensor]

    def __init__(
        self,
        temperature: float | Tensor = 0.1,
        reduction: str = "mean",
        negative_mode: str | None = None,
        *,
        normalize: bool = True,
        **constants: float,
    ) -> None:
        super().__init__()
        self.temperature = temperature  # an nn.Parameter is registered, so that it learns with the model
        self.reduction = reduction
        self.negative_mode = negative_mode
        self.normalize = normalize
        self.constants = constants

    def forward(
        self, query: Tensor, positive_key: Tensor, negative_keys: Tensor | None = None, **options: Any
    ) -> Tensor:
        return type(self).function(
            query,
            positive_key,
            negative_keys,
            self.temperature,
            self.reduction,
            self.negative_mode,
            normalize=self.normalize,
            **self.constants,
            **options,
        )


class InfoNCE(_Loss):
    """`fastcl.infonce` as a module; forward takes query, positive_key, negative_keys and the keywords of the function.

    >>> import torch
    >>> loss = InfoNCE(temperature=0.5)(torch.eye(2), torch.eye(2))
    >>> round(loss.item(), 4)
    0.1269
    """

    function = staticmethod(losses.infonce)


class DCL(_Loss):
    """`fastcl.dcl` as a module; see `InfoNCE`."""

    function = staticmethod(losses.dcl)


class InfoNCEPlus(_Loss):
    """`fastcl.infonce_plus` as a module; the constructor also takes `epsilon` and `lam`; see `InfoNCE`."""

    function = staticmethod(losses.infonce_plus)


class MINE(_Loss):
    """`fastcl.mine` as a module; see `InfoNCE`."""

    function = staticmethod(losses.mine)


class MINEPlus(_Loss):
    """`fastcl.mine_plus` as a module; the constructor also takes `lam`; see `InfoNCE`."""

    function = staticmethod(losses.mine_plus)
