"""The tensors of a model as files have them: each storage once, whatever the number of its names."""

import itertools
from collections.abc import Mapping

from torch import Tensor, nn


def distinct(model: nn.Module) -> dict[str, Tensor]:
    """The state dict, of tensors with several names (tied weights) under the first one only.

    Raises ValueError where tensors share a part of their memory without being the same, TypeError where one is none.
    """
    again = aliases(model)
    return {name: tensor for name, tensor in model.state_dict().items() if name not in again}


def with_aliases(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What `distinct` left out beside it: a whole state dict."""
    return {**tensors, **{alias: tensors[name] for alias, name in aliases(model).items() if name in tensors}}


def aliases(model: nn.Module) -> dict[str, str]:
    """Further name of a tensor -> its first name in the state dict."""
    first: dict[tuple[object, ...], str] = {}
    found: dict[str, str] = {}
    spans: list[tuple[object, int, int, str]] = []
    for name, tensor in model.state_dict().items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"model: expected tensors in its state dict, got {type(tensor).__name__} for {name}")
        if not tensor.numel():
            continue
        start = tensor.data_ptr()
        key = (tensor.device, start, tensor.dtype, tensor.shape, tensor.stride())
        if first.setdefault(key, name) != name:
            found[name] = first[key]
            continue
        steps = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        spans.append((str(tensor.device), start, start + (steps + 1) * tensor.element_size(), name))
    spans.sort(key=lambda span: (str(span[0]), span[1]))
    for (device, _, end, name), (other_device, start, _, other) in itertools.pairwise(spans):
        if device == other_device and start < end:
            raise ValueError(
                f"model: expected tensors of their own memory, or the same one under two names; {other} overlaps {name}"
            )
    return found
