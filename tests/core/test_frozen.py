"""Columns without gradient beside others, in one call of the op: the sums are those of two calls that are merged, and
the frozen columns take no part in the backward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import TOLERANCE
from test_expected import problem
from torch import Tensor

import fastcl
from fastcl import fallback, ops, reference

INFINITY = float("inf")
# The two sets of columns, and what they have besides.
SHAPES = [(1, 1, 65, 3), (50, 200, 33, 7), (70, 97, 400, 16), (9, 40, 0, 4), (9, 0, 40, 4)]


def _merged(first: tuple[Tensor, ...], second: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    lse = torch.logaddexp(first[1], second[1])
    shares = [torch.exp(part[1] - lse.masked_fill(lse == -INFINITY, INFINITY))[:, None] for part in (first, second)]
    return lse, shares[0] * first[2] + shares[1] * second[2]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_call_gives_the_sums_of_two(isa: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    n, m, f, d = shape
    query, key, positive, scale, bias, row_id, col_id, cap = problem(n, m, d, dtype)
    _, more, _, _, more_bias, _, more_id, _ = problem(n, f, d, dtype)
    plain = (*ops.PLAIN[:-3],)
    columns = (bias, row_id, col_id, cap)
    first = ops.forward_op(query, key, positive, scale, *columns, 0.7, True, *ops.PLAIN)
    second = ops.forward_op(query, more, positive, scale, more_bias, row_id, more_id, cap, 0.7, True, *ops.PLAIN)
    both = (query, key, positive, scale, *columns, 0.7, True, *plain, more, more_bias, more_id)
    lse, mean_key = _merged(first, second)
    tolerance = {torch.float64: 1e-12}.get(dtype, 2e-5)
    for found in (ops.forward_op(*both), fallback.forward(*both)):
        torch.testing.assert_close(found[1], lse, rtol=tolerance, atol=tolerance)
        # There weights are rounded to bfloat16, as the inputs are (conftest.TOLERANCE).
        rounded = isa == "avx512_bf16" and dtype == torch.bfloat16
        mean = TOLERANCE[dtype] if rounded else tolerance
        torch.testing.assert_close(found[2], mean_key, rtol=mean, atol=mean)


@pytest.mark.skipif(fallback.FORCED, reason="the compiled kernels alone sum over columns on the way")
def test_sums_on_the_way_are_those_of_the_whole(isa: str) -> None:
    inputs = (*problem(130, 300, 20, torch.float64), 0.7)
    _, more, _, _, more_bias, _, more_id, _ = problem(130, 150, 20, torch.float64)
    weight, rest, row_shift = (torch.rand(130).double() for _ in range(3))
    _, lse, mean_key, expected, key_sum, bias_sum = ops.forward_op(
        *inputs, True, True, True, 0.0, row_shift, rest, weight, more, more_bias, more_id
    )
    upstream = (torch.zeros_like(lse), 3.0 * expected, *inputs[:8], lse, mean_key)
    wanted = (False, True, False, False, True)
    _, key, _, _, bias = ops.backward_op(*upstream, expected, key_sum, bias_sum, 0.7, *wanted)
    _, again, _, _, bias_again = ops.backward_op(*upstream, *ops.NO_SUMS, 0.7, *wanted)
    torch.testing.assert_close(key, again, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(bias, bias_again, rtol=1e-11, atol=1e-13)


def test_an_infinite_or_an_empty_side() -> None:
    query, key, more = torch.ones(1, 1), torch.tensor([[1.0]]), torch.tensor([[2.0]])
    none = [torch.empty(0)] * 6

    def lse(key: Tensor, more: Tensor, more_bias: Tensor) -> float:
        given = (query, key, *none, 1.0, True, *ops.PLAIN[:-3], more, more_bias, none[0])
        return ops.forward_op(*given)[1].item()

    nothing, free = torch.empty(0, 1), torch.empty(0)
    assert lse(key, nothing, free) == 1.0
    assert lse(nothing, more, free) == 2.0
    assert lse(nothing, nothing, free) == -INFINITY
    assert lse(key, more, torch.tensor([-INFINITY])) == 1.0
    assert lse(key, more, torch.tensor([INFINITY])) == INFINITY
    assert lse(key * INFINITY, more, torch.tensor([INFINITY])) == INFINITY
    assert lse(key, more * float("nan"), free) != lse(key, more * float("nan"), free)


def _batch_and_queue() -> tuple[Tensor, Tensor, fastcl.NegativeQueue]:
    torch.manual_seed(0)
    query, positive = (torch.randn(40, 12, requires_grad=True) for _ in range(2))
    queue = fastcl.NegativeQueue(64, 12)
    queue.push(F.normalize(torch.randn(50, 12), dim=1))
    return query, positive, queue


def _ops_of(step: Any) -> dict[str, int]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    return {event.key: event.count for event in profile.key_averages() if event.key.startswith("fastcl::")}


@pytest.mark.skipif(fallback.FORCED, reason="counts calls of the compiled op")
@pytest.mark.parametrize("normalize", [True, False])
def test_batch_and_queue_are_one_call(normalize: bool) -> None:
    query, positive, queue = _batch_and_queue()
    found = _ops_of(lambda: fastcl.infonce(query, positive, queue=queue, normalize=normalize).backward())
    assert found == {"fastcl::contrast_packed_forward": 1, "fastcl::contrast_packed_backward": 1}


def test_no_frozen_column_is_saved_or_read_again() -> None:
    query, positive, queue = _batch_and_queue()
    loss = fastcl.infonce(query, positive, queue=queue)
    saved: set[int] = set()
    nodes = [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        saved |= {t.untyped_storage().data_ptr() for t in getattr(node, "saved_tensors", ()) if t is not None}
        nodes += [each for each, _ in node.next_functions if each is not None]
    assert queue.keys.untyped_storage().data_ptr() not in saved
    expected = torch.autograd.grad(loss, (query, positive), retain_graph=True)
    queue.push(torch.full((64, 12), torch.nan))
    for found, before in zip(torch.autograd.grad(loss, (query, positive)), expected, strict=True):
        assert torch.equal(found, before)


def test_gradients_of_gradients_are_refused() -> None:
    query, positive, queue = _batch_and_queue()
    (grad,) = torch.autograd.grad(fastcl.infonce(query, positive, queue=queue), query, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward needs the key"):
        grad.sum().backward()


@pytest.mark.parametrize("learns", ["log_q", "negative_log_q"])
def test_a_log_q_that_learns_beside_frozen_keys_has_its_gradient(learns: str) -> None:
    torch.manual_seed(0)
    query, positive, negative = torch.randn(4, 8), torch.randn(4, 8), torch.randn(6, 8)
    corrected = {"log_q": torch.full((4,), -1.0), "negative_log_q": torch.full((6,), -2.0)}
    corrected[learns].requires_grad_()
    positive.requires_grad_(learns == "negative_log_q")
    ours, truth = (
        torch.autograd.grad(
            f.infonce(query, positive, negative.clone().requires_grad_(learns == "log_q"), in_batch=True, **corrected),
            corrected[learns],
        )
        for f in (fastcl, reference)
    )
    torch.testing.assert_close(ours, truth)


@pytest.mark.parametrize("ids", [False, True])
def test_negatives_without_ids_stand_beside_a_frozen_batch_or_a_queue_with_them(ids: bool) -> None:
    torch.manual_seed(0)
    query, positive, negative = torch.randn(4, 8), torch.randn(4, 8), torch.randn(6, 8, requires_grad=True)
    options: dict[str, Any] = {"in_batch": True}
    if ids:
        options = {"queue": fastcl.NegativeQueue(6, 8), "ids": torch.arange(4)}
        options["queue"].push(torch.randn(6, 8), ids=torch.arange(6))
    ours, truth = (
        torch.autograd.grad(f.infonce(query, positive, negative, **options), negative) for f in (fastcl, reference)
    )
    torch.testing.assert_close(ours, truth)
