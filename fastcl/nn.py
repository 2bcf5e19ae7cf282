"""The losses as modules: the constructor fixes temperature, reduction and constants, forward takes the tensors.

Formulas and checks stay in losses.py; a module adds no behaviour of its own.

A temperature given as an nn.Parameter learns, but nothing keeps it above 0: an optimizer's step that takes it to 0 or
below ends in the ValueError of the next call on the CPU. Its logarithm stays positive: keep `log_temperature =
nn.Parameter(torch.tensor(0.1).log())` in the model and call the function with `temperature=log_temperature.exp()`.
"""

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from fastcl import losses, pairwise, softmax, views
from fastcl.checks import check_reduction


class _Loss(nn.Module):
    function: Callable[..., Tensor]

    def __init__(
        self,
        temperature: float | Tensor = 0.1,
        reduction: str = "mean",
        negative_mode: str | None = None,
        *,
        normalize: bool = True,
        **constants: Any,
    ) -> None:
        super().__init__()
        check_reduction(reduction)
        known = [p.name for p in inspect.signature(type(self).function).parameters.values() if p.kind is p.KEYWORD_ONLY]
        for name in constants.keys() - set(known):
            raise TypeError(f"{name}: expected one of {', '.join(known)}, got an unknown option")
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


class DCLW(_Loss):
    """`fastcl.dclw` as a module; the constructor also takes `weight_fn`; see `InfoNCE`."""

    function = staticmethod(losses.dclw)


class DebiasedInfoNCE(_Loss):
    """`fastcl.debiased_infonce` as a module; the constructor also takes `tau_plus` and `beta`; see `InfoNCE`."""

    function = staticmethod(losses.debiased_infonce)


class InfoNCEPlus(_Loss):
    """`fastcl.infonce_plus` as a module; the constructor also takes `epsilon` and `lam`; see `InfoNCE`."""

    function = staticmethod(losses.infonce_plus)


class MINE(_Loss):
    """`fastcl.mine` as a module; see `InfoNCE`."""

    function = staticmethod(losses.mine)


class MINEPlus(_Loss):
    """`fastcl.mine_plus` as a module; the constructor also takes `lam`; see `InfoNCE`."""

    function = staticmethod(losses.mine_plus)


class _Fixed(nn.Module):
    """The keyword arguments that do not change from step to step, registered where they learn."""

    function: Callable[..., Tensor]

    def __init__(self, **fixed: Any) -> None:
        super().__init__()
        check_reduction(fixed.get("reduction", "mean"))
        self.names = tuple(fixed)
        for name, value in fixed.items():
            setattr(self, name, value)

    def forward(self, *tensors: Tensor, **options: Any) -> Tensor:
        return type(self).function(*tensors, **{name: getattr(self, name) for name in self.names}, **options)


class SampledSoftmax(_Fixed):
    """`fastcl.sampled_softmax` as a module; forward takes query, positive_key, negative_keys and the other keywords.

    >>> import torch
    >>> loss = SampledSoftmax(temperature=0.5)(torch.eye(2), torch.eye(2))
    >>> round(loss.item(), 4)
    0.1269
    """

    function = staticmethod(softmax.sampled_softmax)

    def __init__(self, temperature: float | Tensor = 1.0, reduction: str = "mean") -> None:
        super().__init__(temperature=temperature, reduction=reduction)


class LinearCrossEntropy(_Fixed):
    """`fastcl.linear_cross_entropy` as a module; forward takes query, table, target, and bias and weight if wanted.

    >>> import torch
    >>> loss = LinearCrossEntropy(temperature=0.5)(torch.eye(2), torch.eye(2), torch.tensor([0, 1]))
    >>> round(loss.item(), 4)
    0.1269
    """

    function = staticmethod(softmax.linear_cross_entropy)

    def __init__(self, temperature: float | Tensor = 1.0, ignore_index: int = -100, reduction: str = "mean") -> None:
        super().__init__(temperature=temperature, ignore_index=ignore_index, reduction=reduction)


class NTXent(_Fixed):
    """`fastcl.nt_xent` as a module; forward takes view1, view2, and weight if wanted.

    >>> import torch
    >>> round(NTXent(temperature=0.5)(torch.eye(2), torch.eye(2)).item(), 4)
    0.2395
    """

    function = staticmethod(views.nt_xent)

    def __init__(self, temperature: float | Tensor = 0.5, reduction: str = "mean") -> None:
        super().__init__(temperature=temperature, reduction=reduction)


class SupCon(_Fixed):
    """`fastcl.supcon` as a module; forward takes features, labels, and weight if wanted.

    >>> import torch
    >>> features = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    >>> round(SupCon(temperature=0.5)(features, torch.tensor([5, 5, 8])).item(), 4)
    0.1269
    """

    function = staticmethod(views.supcon)

    def __init__(self, temperature: float | Tensor = 0.07, reduction: str = "mean") -> None:
        super().__init__(temperature=temperature, reduction=reduction)


class Alignment(_Fixed):
    """`fastcl.alignment` as a module; forward takes x, y, and weight if wanted.

    >>> import torch
    >>> Alignment()(torch.eye(2), torch.eye(2).flip(0))
    tensor(2.)
    """

    function = staticmethod(views.alignment)

    def __init__(self, alpha: float = 2.0, reduction: str = "mean") -> None:
        super().__init__(alpha=alpha, reduction=reduction)


class Uniformity(_Fixed):
    """`fastcl.uniformity` as a module; forward takes x.

    >>> import torch
    >>> round(Uniformity()(torch.eye(2)).item(), 4)
    -4.0
    """

    function = staticmethod(views.uniformity)

    def __init__(self, t: float = 2.0) -> None:
        super().__init__(t=t)


class BPR(_Fixed):
    """`fastcl.bpr` as a module; forward takes query, positive_key, negative_keys, and weight if wanted.

    >>> import torch
    >>> round(BPR()(torch.eye(2), torch.eye(2), torch.zeros(1, 2)).item(), 4)
    0.3133
    """

    function = staticmethod(pairwise.bpr)

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__(reduction=reduction)


class NegativeSampling(BPR):
    """`fastcl.negative_sampling` as a module; see `BPR`."""

    function = staticmethod(pairwise.negative_sampling)


class JensenShannon(BPR):
    """`fastcl.jensen_shannon` as a module; see `BPR`."""

    function = staticmethod(pairwise.jensen_shannon)


class SigLIP(_Fixed):
    """`fastcl.siglip` as a module; forward takes query, key, and weight if wanted. An nn.Parameter given here learns.

    >>> import torch
    >>> loss = SigLIP(logit_scale=1.0, logit_bias=torch.nn.Parameter(torch.tensor(0.0)))
    >>> round(loss(torch.eye(2), torch.eye(2)).item(), 4)
    1.0064
    """

    function = staticmethod(pairwise.siglip)

    def __init__(
        self, logit_scale: float | Tensor = 10.0, logit_bias: float | Tensor = -10.0, reduction: str = "mean"
    ) -> None:
        super().__init__(logit_scale=logit_scale, logit_bias=logit_bias, reduction=reduction)


class Triplet(_Fixed):
    """`fastcl.triplet` as a module; forward takes anchor, positive, negative, and weight if wanted.

    >>> import torch
    >>> Triplet(margin=1.5)(torch.eye(2), torch.eye(2), torch.zeros(2, 2)).item()
    0.5
    """

    function = staticmethod(pairwise.triplet)

    def __init__(self, margin: float = 1.0, reduction: str = "mean") -> None:
        super().__init__(margin=margin, reduction=reduction)
