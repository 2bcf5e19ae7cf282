"""The losses as modules: equal to the functions, and a temperature that learns is registered."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from calls import FAMILY
from problems import Batch
from torch import Tensor, nn

import fastcl
from fastcl.registry import LOSSES


@pytest.mark.parametrize("loss", list(FAMILY))
def test_modules_equal_the_functions(loss: str) -> None:
    weights = {"weight_fn": partial(fastcl.mises_fisher_weights, sigma=0.7)}
    constants, made = weights if loss == "dclw" else FAMILY[loss][-1], getattr(fastcl.nn, LOSSES[loss].module)
    log_q = loss != "debiased_infonce"
    learn, rest = Batch(negatives="private", in_batch=True, queue="full", ids=True, log_q=log_q).build()
    rest["weight"] = torch.rand(9, generator=torch.Generator().manual_seed(0))
    in_constructor = ("temperature", "reduction", "normalize")
    options = {name: x for name, x in {**learn, **rest}.items() if name not in in_constructor}
    for reduction in ("mean", "none"):
        for normalize in (True, False):
            module = made(
                temperature=0.2, reduction=reduction, negative_mode="paired", normalize=normalize, **constants
            )
            assert isinstance(module, torch.nn.Module)
            expected = getattr(fastcl, loss)(
                **options, temperature=0.2, reduction=reduction, normalize=normalize, **constants
            )
            assert torch.equal(module(**options), expected)
    default = getattr(fastcl, loss)(learn["query"], learn["positive_key"])
    assert torch.equal(made()(learn["query"], learn["positive_key"]), default)


def test_module_registers_a_learning_temperature() -> None:
    temperature = torch.nn.Parameter(torch.tensor(0.2))
    module = fastcl.nn.InfoNCE(temperature=temperature)
    assert [p is temperature for p in module.parameters()] == [True]
    query = torch.randn(4, 3)
    module(query, query.flip(0)).backward()
    assert temperature.grad is not None
    assert temperature.grad.item() != 0


def test_tensors_among_the_settings_are_buffers() -> None:
    module = fastcl.nn.InfoNCE(torch.tensor(0.2, dtype=torch.float64))
    assert dict(module.named_parameters()) == {}
    assert module.state_dict() == {"temperature": torch.tensor(0.2, dtype=torch.float64)}
    assert module.to(torch.float32).temperature.dtype == torch.float32
    assert module.to("meta").temperature.device.type == "meta"
    learning = fastcl.nn.SigLIP(nn.Parameter(torch.tensor(10.0)), torch.tensor(-10.0))
    assert list(learning.state_dict()) == ["logit_scale", "logit_bias"]
    assert [name for name, _ in learning.named_parameters()] == ["logit_scale"]
    again = fastcl.nn.SigLIP(nn.Parameter(torch.tensor(1.0)), torch.tensor(0.0))
    again.load_state_dict(learning.state_dict())
    assert torch.equal(again(X, Y), learning(X, Y))
    # A queue among the settings is a part of the module, and moves and is saved with it.
    queue = fastcl.NegativeQueue(8, 4)
    assert [*fastcl.nn.InfoNCE(queue=queue).children()] == [queue]


def test_print_shows_the_settings() -> None:
    assert repr(fastcl.nn.MINEPlus(0.07, normalize=False, lam=1.2)) == (
        "MINEPlus(temperature=0.07, reduction='mean', normalize=False, symmetric=False, lam=1.2)"
    )
    module = fastcl.nn.LinearCrossEntropy(nn.Parameter(torch.tensor(0.25)), weight=torch.ones(3))
    assert "temperature=Parameter(0.25), reduction='mean'" in repr(module)
    assert "weight=Tensor[3]" in repr(module)
    module.temperature.data.fill_(0.5)
    assert "temperature=Parameter(0.5)" in repr(module)
    assert "weight_fn=mises_fisher_weights" in repr(fastcl.nn.DCLW())


def test_a_call_has_precedence_over_the_settings() -> None:
    module = fastcl.nn.InfoNCE(0.2, reduction="sum")
    rows = module(X, Y, temperature=0.3, reduction="none")
    assert torch.equal(rows, fastcl.infonce(X, Y, temperature=0.3, reduction="none"))
    assert torch.equal(module(X, Y), fastcl.infonce(X, Y, temperature=0.2, reduction="sum"))


def test_settings_may_be_given_later() -> None:
    module = fastcl.nn.InfoNCE(log_q=None)
    module.log_q = torch.arange(6.0)
    assert torch.equal(module(X, Y), fastcl.infonce(X, Y, log_q=torch.arange(6.0)))
    module.log_q = None
    assert torch.equal(module(X, Y), fastcl.infonce(X, Y))


X, Y = (torch.randn(6, 4, generator=torch.Generator().manual_seed(i)) for i in range(2))
LABELS = torch.tensor([0, 2, 1, 2, 2, 0])
WEIGHT = torch.rand(6, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("module", "function", "inputs", "fixed", "weight"),
    [
        (fastcl.nn.SampledSoftmax, fastcl.sampled_softmax, (X, Y), {"temperature": 0.3}, WEIGHT),
        (fastcl.nn.LinearCrossEntropy, fastcl.linear_cross_entropy, (X, Y, LABELS, WEIGHT),
         {"temperature": 0.3, "ignore_index": 2}, WEIGHT),
        (fastcl.nn.NTXent, fastcl.nt_xent, (X, Y), {"temperature": 0.3}, WEIGHT.repeat(2)),
        (fastcl.nn.SupCon, fastcl.supcon, (X, LABELS), {"temperature": 0.3}, WEIGHT),
        (fastcl.nn.Alignment, fastcl.alignment, (X, Y), {"alpha": 1.5}, WEIGHT),
        (fastcl.nn.Uniformity, fastcl.uniformity, (X,), {"t": 0.7}, None),
    ],
    ids=lambda x: x.__name__ if isinstance(x, type) else "",
)  # fmt: skip
def test_modules_of_other_shapes_equal_the_functions(
    module: type[nn.Module], function: Any, inputs: tuple[Tensor, ...], fixed: dict[str, Any], weight: Tensor | None
) -> None:
    assert torch.equal(module()(*inputs), function(*inputs))
    assert not torch.equal(module(**fixed)(*inputs), module()(*inputs))
    assert torch.equal(module(**fixed)(*inputs), function(*inputs, **fixed))
    if weight is not None:
        rows = module(**fixed, reduction="none")(*inputs, weight=weight)
        assert torch.equal(rows, function(*inputs, **fixed, reduction="none", weight=weight))
        assert rows.ndim == 1
    if "temperature" in fixed:
        temperature = nn.Parameter(torch.tensor(0.3))
        learning = module(temperature=temperature)
        assert [p is temperature for p in learning.parameters()] == [True]
        learning(*inputs).backward()
        assert temperature.grad is not None


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: fastcl.nn.InfoNCE(temprature=0.2), TypeError, "temprature: expected one of temperature, .*unknown"),
        (lambda: fastcl.nn.DCL(epsilon=0.2), TypeError, "epsilon: expected one of"),
        (lambda: fastcl.nn.Triplet(temperature=0.2), TypeError, "temperature: expected one of margin, .*unknown"),
        (lambda: fastcl.nn.SupCon(features=X), TypeError, "features: expected one of temperature, .*unknown"),
        (lambda: fastcl.nn.BPR("mean", None, 3), TypeError, "too many positional"),
        (lambda: fastcl.nn.DCL(-0.1), ValueError, "temperature: .*above 0.*-0.1"),
        (lambda: fastcl.nn.DCL("0.1"), TypeError, "temperature: expected a number, got str"),
        (lambda: fastcl.nn.InfoNCE(reduction="avg"), ValueError, "reduction: expected 'mean'.*avg"),
        (lambda: fastcl.nn.NTXent(reduction="avg"), ValueError, "reduction: expected 'mean'.*avg"),
    ],
)
def test_a_mistake_is_told_when_a_module_is_made(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()
    fastcl.nn.InfoNCEPlus(epsilon=0.5, lam=1.0, in_batch=True, symmetric=False)


def test_a_temperature_that_went_below_zero_is_refused() -> None:
    x = torch.eye(3, 2)
    for module in (fastcl.nn.InfoNCE, fastcl.nn.SupCon, fastcl.nn.NTXent, fastcl.nn.LinearCrossEntropy):
        loss = module(temperature=torch.nn.Parameter(torch.tensor(0.1)))
        arguments = {
            "SupCon": (x, torch.tensor([0, 0, 1])),
            "LinearCrossEntropy": (x, x, torch.tensor([0, 1, 2])),
        }.get(module.__name__, (x, x))
        loss(*arguments)
        with torch.no_grad():
            loss.temperature -= 0.2
        with pytest.raises(ValueError, match=r"temperature: expected finite and above 0, got -0\.1.*log_temperature"):
            loss(*arguments)
