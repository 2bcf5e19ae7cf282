"""One op for all that is done to the rows of a batch, as plain eager code on the CPU calls it, against the several ops
of the general path, which stays the definition."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fastcl
from fastcl import fallback, ops, ops_autograd, rows

pytestmark = pytest.mark.skipif(fallback.FORCED, reason="the op has compiled kernels alone")
N, M, D = 14, 23, 10


def _queue() -> fastcl.NegativeQueue:
    queue = fastcl.NegativeQueue(32, D)
    queue.push(torch.nn.functional.normalize(torch.randn(20, D), dim=1), torch.arange(20) % 5)
    return queue


def _options() -> dict[str, dict[str, Any]]:
    ids = torch.arange(N) % 5
    return {
        "batch": {},
        "batch by ids": {"ids": ids},
        "keys": {"negative_keys": torch.randn(M, D)},
        "keys and batch": {"negative_keys": torch.randn(M, D), "in_batch": True},
        "queue alone": {"queue": _queue(), "in_batch": False, "ids": ids},
        "batch and queue": {"queue": _queue(), "ids": ids},
        "log q": {"log_q": torch.rand(N).log(), "ids": ids},
        "queries as keys": {"negative_keys": "query", "ids": torch.arange(N), "negative_ids": torch.arange(N)},
    }


def _loss(inputs: dict[str, Tensor], reduction: str, normalize: bool, options: dict[str, Any]) -> Tensor:
    given = options | {k: inputs[v] for k, v in options.items() if isinstance(v, str)} | inputs
    return fastcl.infonce(**given, reduction=reduction, normalize=normalize)


def _results(loss: Callable[[dict[str, Tensor]], Tensor], given: dict[str, Tensor], twice: bool) -> list[Tensor]:
    inputs = {name: t.detach().clone().requires_grad_() for name, t in given.items()}
    value = loss(inputs).sum()
    grads = torch.autograd.grad(value, list(inputs.values()), create_graph=twice)
    if not twice:
        return [value.detach(), *grads]
    second = torch.autograd.grad(sum(g.square().sum() for g in grads), list(inputs.values()))
    return [value.detach(), *(g.detach() for g in grads), *second]


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("what", _options())
def test_one_op_gives_what_the_general_path_gives(
    what: str, normalize: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    packed = ops_autograd.packed_forward_op
    monkeypatch.setattr(ops_autograd, "packed_forward_op", lambda *args: calls.append(args) or packed(*args))
    torch.manual_seed(0)
    options = _options()[what]
    negative_keys = options.get("negative_keys")
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-5), (torch.bfloat16, 2e-2)):
        given = {name: torch.randn(N, D).to(dtype) for name in ("query", "positive_key")}
        given["temperature"] = torch.full((), 0.3, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
        if isinstance(negative_keys, Tensor):
            given["negative_keys"] = negative_keys.to(dtype)
        for reduction in ("mean", "none"):
            twice = reduction == "mean" and dtype != torch.bfloat16 and "queue" not in options

            def loss(inputs: dict[str, Tensor], reduction: str = reduction) -> Tensor:
                return _loss(inputs, reduction, normalize, options)

            before = len(calls)
            ours = _results(loss, given, twice)
            assert len(calls) > before
            with monkeypatch.context() as general:
                for module in (ops, rows):
                    general.setattr(module, "packs", lambda query: False)
                before = len(calls)
                theirs = _results(loss, given, twice)
                assert len(calls) == before
            for one, other in zip(ours, theirs, strict=True):
                assert one.dtype == other.dtype
                torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_without_gradients_nothing_is_kept() -> None:
    query, key = torch.randn(N, D), torch.randn(M, D)
    none = ops_autograd.NONE
    vectors = (none, none, none)
    given = ops_autograd.Given(none, none, none, 1.0, False, ops_autograd.in_json(-math.inf), vectors, vectors, 2)
    *_, saved = ops_autograd.run_packed(query, key, none, none, none, given, (False,) * 5)
    assert saved.shape == (0,)
    *_, saved = ops_autograd.run_packed(query, key, none, none, none, given, (True, False, False, False, False))
    assert saved.shape == (N * D + N * (D + 1),)


def test_what_is_kept_is_vectors_of_rows_and_columns_and_no_logit(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []
    packed = ops_autograd.packed_forward_op
    monkeypatch.setattr(ops_autograd, "packed_forward_op", lambda *args: kept.append(packed(*args)) or kept[-1])
    x = torch.randn(500, 4, requires_grad=True)
    fastcl.nt_xent(x, x.flip(0))
    fastcl.linear_cross_entropy(x, torch.randn(900, 4, requires_grad=True), torch.zeros(500, dtype=torch.int64))
    views, table = (saved.numel() for *_, saved in kept)
    # Of each of 1,000 views the weighted mean of the keys, its own row and the positive's of length 1, and its sum as a
    # key; both lengths and the expected gradient.
    assert views == 1000 * (4 * 4 + 3)
    # The mean and the expected gradient of each input, the sum of each row of the table.
    assert table == 500 * (4 + 1) + 900 * 4
