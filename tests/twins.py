"""A loss and its gradients, held against its textbook twin in the same type and in float64.

The comparison only: which losses, inputs and tolerances is up to the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from conftest import TOLERANCE, assert_budget, gradients, leaves
from problems import F32, F64
from torch import Tensor

import fastcl
from fastcl import reference


def value_and_gradients(function: Callable[..., Tensor], learn: Mapping[str, Tensor], rest: Mapping[str, Any],
                        dtype: torch.dtype | None = None) -> dict[str, Tensor]:  # fmt: skip
    """The value, and "grad NAME" of every tensor of `learn` for a random upstream gradient."""
    inputs = leaves(learn, frozenset(learn), dtype)
    value = function(**inputs, **rest)
    upstream = torch.randn(value.shape, generator=torch.Generator().manual_seed(1)).to(value.dtype)
    return {"value": value} | {f"grad {n}": g for n, g in gradients([value], [upstream], inputs).items()}


def assert_equals_twin(
    loss: str, learn: Mapping[str, Tensor], rest: Mapping[str, Any], largest_logit: float, floor: float = 1.0
) -> dict[str, Tensor]:
    """Returns what `fastcl` gave. `floor` is the size of what cancels in value and gradients."""
    ours = value_and_gradients(getattr(fastcl, loss), learn, rest)
    plain = value_and_gradients(getattr(reference, loss), learn, rest)
    truth = value_and_gradients(getattr(reference, loss), learn, rest, F64)
    wide = F64 if any(x.dtype == F64 for x in learn.values()) else F32
    assert ours["value"].dtype == wide
    for name, true in truth.items():
        given = learn.get(name.removeprefix("grad "))
        rounded = wide if given is None else given.dtype
        logit_error = 8 * largest_logit * (2.0**-53 if wide == F64 else 2.0**-24)
        assert ours[name].dtype == rounded
        assert_budget(f"{loss} {name}", ours[name], plain[name], true, TOLERANCE[rounded] + logit_error, floor)
    return ours
