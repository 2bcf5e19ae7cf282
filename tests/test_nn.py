"""The losses as modules: equal to the functions, and a temperature that learns is registered."""

from __future__ import annotations

import pytest
import torch
from problems import Batch

import fastcl
import fastcl.nn

MODULES = {
    "infonce": fastcl.nn.InfoNCE,
    "dcl": fastcl.nn.DCL,
    "infonce_plus": fastcl.nn.InfoNCEPlus,
    "mine": fastcl.nn.MINE,
    "mine_plus": fastcl.nn.MINEPlus,
}


@pytest.mark.parametrize("loss", list(MODULES))
def test_modules_equal_the_functions(loss: str) -> None:
    constants = {"infonce_plus": {"epsilon": 0.3, "lam": 1.2}, "mine_plus": {"lam": 1.3}}.get(loss, {})
    batch = Batch(negatives="private", in_batch=True, queue="full", ids=True, log_q=True)
    learn, rest = batch.build()
    in_constructor = ("temperature", "reduction", "normalize")
    options = {name: x for name, x in {**learn, **rest}.items() if name not in in_constructor}
    for reduction in ("mean", "none"):
        for normalize in (True, False):
            module = MODULES[loss](
                temperature=0.2, reduction=reduction, negative_mode="paired", normalize=normalize, **constants
            )
            assert isinstance(module, torch.nn.Module)
            expected = getattr(fastcl, loss)(
                **options, temperature=0.2, reduction=reduction, normalize=normalize, **constants
            )
            assert torch.equal(module(**options), expected)
    default = getattr(fastcl, loss)(learn["query"], learn["positive_key"])
    assert torch.equal(MODULES[loss]()(learn["query"], learn["positive_key"]), default)


def test_module_registers_a_learning_temperature() -> None:
    temperature = torch.nn.Parameter(torch.tensor(0.2))
    module = fastcl.nn.InfoNCE(temperature=temperature)
    assert [p is temperature for p in module.parameters()] == [True]
    query = torch.randn(4, 3)
    module(query, query.flip(0)).backward()
    assert temperature.grad is not None
    assert temperature.grad.item() != 0
