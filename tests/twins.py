"""A loss and its gradients, held against its textbook twin in the same type and in float64.

The comparison only: which losses, inputs and tolerances is up to the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from conftest import TOLERANCE, assert_budget, gradients, leaves, tolerance
from problems import F32, F64, Batch
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


def _run(module: Any, loss: str, batch: Batch, constants: Mapping[str, Any], cast: torch.dtype | None = None) -> Any:
    learn, rest = batch.build()
    learn = {name: (x if cast is None else x.to(cast)).requires_grad_() for name, x in learn.items()}
    if cast is not None and "queue" in rest:
        queue = rest["queue"]
        log_q = None if queue.log_q is None else queue.log_q.to(cast)
        rest["queue"] = SimpleNamespace(keys=queue.keys.to(cast), ids=queue.ids, log_q=log_q)
    value = getattr(module, loss)(**learn, **rest, **constants)
    g = torch.Generator().manual_seed(batch.seed + 1)
    upstream = torch.randn(value.shape, generator=g).to(value.dtype)
    grads = torch.autograd.grad(value, list(learn.values()), upstream, allow_unused=True)
    filled = [torch.zeros_like(x) if g is None else g for x, g in zip(learn.values(), grads, strict=True)]
    return {"value": value, **{f"grad {n}": g for n, g in zip(learn, filled, strict=True)}}


def assert_family_equals_twin(loss: str, batch: Batch, constants: Mapping[str, Any]) -> None:
    """A loss over rows, with keywords of its own or of all in `constants`, on a batch: value and all gradients."""
    ours = _run(fastcl, loss, batch, constants)
    plain = _run(reference, loss, batch, constants)
    truth = _run(reference, loss, batch, constants, F64)
    wide = F64 if batch.dtype == F64 else F32
    assert ours["value"].dtype == wide
    learn, rest = batch.build()
    rows = {name: x.double().norm(dim=-1) for name, x in learn.items() if name not in ("temperature", "log_q")}
    coldest = learn.get("temperature", torch.tensor(rest.get("temperature", 1.0))).min().item()
    longest = 1.0 if batch.normalize else max(x.max().item() for n, x in rows.items() if n != "negative_log_q")
    logit = longest**2 * (1 / coldest + hardest(constants))
    for name, size in truth.items():
        what = name.removeprefix("grad ")
        rounded = what in ("query", "positive_key", "negative_keys", "temperature")
        tol = tolerance(batch.dtype if rounded else wide, logit)
        # Attraction and repulsion cancel in part, near convergence almost wholly: errors are relative to their size.
        floor: float | Tensor = 1.0
        if what in ("query", "positive_key", "negative_keys"):
            floor = 2 * longest / coldest / (rows[what] if batch.normalize else torch.ones_like(rows[what]))
            floor = floor.flatten(1).amax(1) if floor.ndim > 1 else floor
        elif what == "temperature":
            floor = logit / coldest * batch.n
        elif batch.reduction == "sum":
            floor = float(batch.n)
        assert_budget(name, ours[name], plain[name], size, tol, floor)


def hardest(constants: Mapping[str, Any]) -> float:
    hardness = constants.get("hardness") or 0.0
    return max(hardness.values(), default=0.0) if isinstance(hardness, dict) else hardness
