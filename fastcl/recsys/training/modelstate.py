"""The tensors of a model as files hold them: tensors with several names (tied weights) are stored once. And a digest of
what a model's vectors depend on."""

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fastcl.recsys.models import Model


def digest(model: Model) -> str:
    """A hash of the model's name, settings, items and their features, and parameters: what its vectors depend on.

    Buffers that training fills, such as queues, are left out.
    """
    settings = dataclasses.asdict(model.config)
    found = hashlib.sha256(json.dumps([model.name, settings, model.items.digest], default=str).encode())
    arrays = {name: parameter.detach() for name, parameter in model.named_parameters()}
    arrays |= {f"feature/{name}": torch.from_numpy(feature.codes) for name, feature in model.items.features.items()}
    for name, tensor in sorted(arrays.items()):
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        found.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def distinct(model: nn.Module) -> dict[str, Tensor]:
    """The state dict, in which a tensor with several names (tied weights) stands under its first name only.

    Raises ValueError where two different tensors overlap in memory, or the elements of one tensor do (expand);
    TypeError where an entry is no tensor, or is sparse.
    """
    again = aliases(model)
    return {name: tensor for name, tensor in model.state_dict().items() if name not in again}


def with_aliases(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The whole state dict: what `distinct` gave, with the further names of tied weights."""
    return {**tensors, **{alias: tensors[name] for alias, name in aliases(model).items() if name in tensors}}


def aliases(model: nn.Module) -> dict[str, str]:
    """Further name of a tensor -> its first name in the state dict."""
    first: dict[tuple[object, ...], str] = {}
    found: dict[str, str] = {}
    spans: list[tuple[object, int, int, str]] = []
    for name, tensor in model.state_dict().items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"model: expected tensors in its state dict, got {type(tensor).__name__} for {name}")
        if tensor.layout != torch.strided:
            raise TypeError(f"model: expected dense tensors in its state dict, got {tensor.layout} for {name}")
        if not tensor.numel():
            continue
        if any(step == 0 < size - 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True)):
            raise ValueError(f"model: expected tensors of their own memory; elements of {name} share theirs (expand)")
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
