"""A batch without rows: loss 0 and zero gradient, as sum and as mean, in every loss; [0] rows with reduction="none"."""

from __future__ import annotations

from typing import Any

import pytest
import test_compat
import torch
from calls import CALLS, LOSSES, SIZES, Call

import fastcl


def _leaves(call: Call, dtype: torch.dtype, **sizes: int) -> dict[str, Any]:
    arguments = call.make(SIZES | sizes, dtype)
    return {name: x.requires_grad_() if name in call.learning else x for name, x in arguments.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("call", LOSSES.values(), ids=LOSSES)
def test_a_batch_without_rows_adds_nothing(call: Call, dtype: torch.dtype) -> None:
    arguments = _leaves(call, dtype, N=0)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for reduction in ("mean", "sum", "none"):
        loss = call(arguments, reduction=reduction)
        assert loss.shape == ((0,) if reduction == "none" else ())
        assert loss.dtype == wide
        assert loss.sum() == 0
        assert loss.requires_grad
        found = torch.autograd.grad(loss.sum(), [arguments[n] for n in call.learning], allow_unused=True)
        for name, gradient in zip(call.learning, found, strict=True):
            assert gradient is None or (gradient == 0).all(), name


@pytest.mark.parametrize("call", LOSSES.values(), ids=LOSSES)
def test_no_gradient_is_read_from_memory_that_nothing_wrote(call: Call) -> None:
    arguments = _leaves(call, torch.float32, N=0)
    learning = [arguments[n] for n in call.learning]
    for _ in range(5):
        loss = call(arguments)
        for size in range(1, 400):  # freed blocks of the sizes that the ops allocate, which are handed out next
            torch.full((size,), torch.nan)
        found = torch.autograd.grad(loss + call(arguments), learning, allow_unused=True)
        for name, gradient in zip(call.learning, found, strict=True):
            assert gradient is None or (gradient == 0).all(), name


@pytest.mark.parametrize("name", ["contrast", "contrast, a scale a row", "softplus_sum", "softplus_sum, a scale a row"])
def test_the_ops_answer_no_rows_with_no_rows(name: str) -> None:
    call = CALLS[name]
    arguments = _leaves(call, torch.float32, N=0)
    found = call(arguments)
    total = found if isinstance(found, torch.Tensor) else found[1]
    assert total.shape == (0,)
    for n, g in zip(call.learning, torch.autograd.grad(total.sum(), [arguments[n] for n in call.learning],
                                                       allow_unused=True), strict=True):  # fmt: skip
        assert g is None or (g == 0).all(), n


@pytest.mark.parametrize("sizes", [{"D": 0}, {"M": 0, "K": 0}, {"N": 1}, {"N": 0, "D": 0}], ids=str)
@pytest.mark.parametrize("call", LOSSES.values(), ids=LOSSES)
def test_other_sizes_of_zero_and_one_have_the_value_of_the_formula(call: Call, sizes: dict[str, int]) -> None:
    arguments = call.make(SIZES | sizes, torch.float64)
    if sizes == {"M": 0, "K": 0} and call.function == "jensen_shannon":  # a mean over no negatives: counted as 0
        return
    loss = call(arguments, reduction="none")
    if sizes.get("N") != 0:
        torch.testing.assert_close(loss, call.reference(arguments, reduction="none"), rtol=1e-9, atol=1e-9)
    else:
        assert loss.shape == (0,)


@pytest.mark.parametrize("theirs", ["NTXentLoss(temperature=0.07)(x, labels)", "CrossBatchMemory"])
def test_rows_of_the_migration_page_take_labels_that_all_differ(theirs: str) -> None:
    (call,) = [c.replace("`", "") for _, c in test_compat.TABLE if theirs in c.replace("`", "")]
    x = torch.randn(5, 3, requires_grad=True)
    queue = fastcl.NegativeQueue(8, 3)
    for first in (0, 5):
        labels = torch.arange(first, first + 5)
        loss = test_compat._ours("pytorch-metric-learning", call, x=x, labels=labels, queue=queue)
        assert loss == 0
        assert (torch.autograd.grad(loss, x)[0] == 0).all()
