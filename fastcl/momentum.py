"""momentum_update: makes an encoder, whose keys fill a queue, slowly follow another one. No loss, no optimizer."""

import torch
from torch import Tensor, nn


@torch.no_grad()
def momentum_update(target: nn.Module, source: nn.Module, m: float) -> None:
    """target = m target + (1 - m) source, in place (MoCo, He et al. 2020, Eq. 2; its m is 0.999).

    The target begins as `copy.deepcopy(source).requires_grad_(False)` and is updated before it encodes the keys of a
    step, which go into a `NegativeQueue`; keys of nearby steps then come from nearly the same encoder. Parameters are
    mixed; buffers (running means of a BatchNorm, a queue) and parameters of integers are copied. No gradient is used or
    changed. Under torch.distributed every rank computes the same values.

    Values of the target are rounded to its dtype. With a bfloat16 or float16 target and an m near 1 the average stands
    still, since a step of 1 - m times the difference is lost by rounding: keep the target in float32.

    Args:
        target, source: modules whose parameters and buffers have the same names, shapes and devices; dtypes may differ.
        m: in [0, 1]; 0 copies the parameters, 1 does not change them.

    Errors: TypeError unless the arguments are modules and a number, ValueError for m outside of [0, 1], for modules
        of different structure and for those on the meta device, which have no values.

    >>> import copy, torch
    >>> from fastcl.momentum import momentum_update
    >>> encoder = torch.nn.Linear(2, 1, bias=False)
    >>> follower = copy.deepcopy(encoder).requires_grad_(False)
    >>> _ = torch.nn.init.ones_(follower.weight), torch.nn.init.zeros_(encoder.weight)
    >>> momentum_update(follower, encoder, m=0.75)
    >>> follower.weight
    Parameter containing:
    tensor([[0.7500, 0.7500]])
    """
    for name, module in (("target", target), ("source", source)):
        if not isinstance(module, nn.Module):
            raise TypeError(f"{name}: expected a module, got {type(module).__name__}")
    if isinstance(m, bool) or not isinstance(m, (int, float)):
        raise TypeError(f"m: expected a number, got {type(m).__name__}")
    if not 0 <= m <= 1:
        raise ValueError(f"m: expected at least 0 and at most 1, got {m}")
    parameters = _pairs("parameters", dict(target.named_parameters()), dict(source.named_parameters()))
    buffers = _pairs("buffers", dict(target.named_buffers()), dict(source.named_buffers()))
    for old, new in parameters:
        if old.is_floating_point() or old.is_complex():
            old.lerp_(new.to(old.dtype), 1.0 - m)
        else:
            old.copy_(new)
    for old, new in buffers:
        old.copy_(new)


def _pairs(kind: str, target: dict[str, Tensor], source: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    if target.keys() != source.keys():
        odd = sorted(target.keys() ^ source.keys())
        raise ValueError(f"target: expected the {kind} of source, got a difference in {', '.join(odd)}")
    for name, t in target.items():
        for module, x in (("target", t), ("source", source[name])):
            if x.is_meta:
                raise ValueError(f"{module}: expected {name} on a device with content, got meta")
        if t.shape != source[name].shape:
            raise ValueError(f"target: expected {name} of shape {list(source[name].shape)}, got {list(t.shape)}")
    return [(t, source[name]) for name, t in target.items()]
