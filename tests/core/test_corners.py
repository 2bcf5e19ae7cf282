"""Sizes, layouts and orders of calls at the limits of what the op takes: items of TESTLIST.md that no other file tests.

Extreme values are in test_numerics.py; random small problems in test_contrast.py.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import TOLERANCE, assert_budget, outputs_and_gradients, tolerance
from problems import BF16, DTYPES, F16, F32, F64, Problem
from torch import Tensor

import fastcl
from fastcl import reference

pytestmark = pytest.mark.usefixtures("one_thread")

LOSSES = ("infonce", "dcl", "infonce_plus", "mine", "mine_plus")


def _check(problem: Problem) -> None:
    """Against float64, plain torch in the same dtype allowed for: sums over 65,536 columns round in any order."""
    ours, plain = (outputs_and_gradients(f.contrast, problem) for f in (fastcl, reference))
    truth = outputs_and_gradients(reference.contrast, problem, F64)
    tol = tolerance(problem.query_dtype, problem.largest_logit())
    for name in truth:
        assert_budget(name, ours[name], plain[name], truth[name], tol, floor=1.0)


@pytest.mark.parametrize("d", [1, 8, 50, 64, 100, 384, 1000])
@pytest.mark.parametrize("m", [0, 1, 63])
@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 1000])
def test_sizes(n: int, m: int, d: int) -> None:
    _check(Problem(n, m, d, F32, F32, scale="tensor"))


@pytest.mark.parametrize(("n", "d"), [(1, 1), (63, 8), (64, 50), (65, 64)])
def test_sixty_five_thousand_columns(n: int, d: int) -> None:
    _check(Problem(n, 65_536, d, F32, F32, scale="rows", ids="many"))


@pytest.mark.slow
@pytest.mark.parametrize(("n", "d"), [(1000, 1), (1000, 50), (65, 100), (4, 384), (2, 1000)])
def test_sixty_five_thousand_columns_of_more(n: int, d: int) -> None:
    _check(Problem(n, 65_536, d, F32, F32, scale="tensor", ids="many"))


@pytest.mark.slow
def test_more_logits_than_32_bits_count(isa: str) -> None:
    # 2.8e9 logits, 11 GB if they were stored. One feature and few different values, so that the truth is small: a row's
    # answer depends on its value and on whether it excludes the last column.
    n, m = 70_000, 40_000
    assert n * m > 2**31
    values = torch.linspace(-2.0, 2.0, 7, dtype=F64)
    keys = torch.linspace(-1.0, 1.0, m, dtype=F64)[:, None]
    rows = torch.arange(n) % 7
    query = values[rows][:, None].float().requires_grad_()
    key = keys.float().requires_grad_()
    row_id, col_id = torch.zeros(n, dtype=torch.int64), torch.ones(m, dtype=torch.int64)
    row_id[-100:], col_id[-1] = 5, 5
    _, lse = fastcl.contrast(query, key, row_id=row_id, col_id=col_id)
    logits = values[:, None] * keys.T
    everything, but_last = torch.logsumexp(logits, 1), torch.logsumexp(logits[:, :-1], 1)
    expected = torch.where(row_id == 5, but_last[rows], everything[rows])
    assert (but_last - everything).abs().max() > 5e-5
    torch.testing.assert_close(lse.double(), expected, rtol=2e-6, atol=0.0)

    query_grad, key_grad = torch.autograd.grad(lse.sum(), [query, key])
    weights = torch.exp(logits - everything[:, None])
    torch.testing.assert_close(query_grad[:-100, 0].double(), (weights @ keys)[rows[:-100], 0], rtol=2e-5, atol=2e-5)
    excluded = torch.exp(logits - but_last[:, None])
    excluded[:, -1] = 0.0
    counts, few = rows[:-100].bincount(minlength=7).double(), rows[-100:].bincount(minlength=7).double()
    truth = ((counts * values) @ weights + (few * values) @ excluded)[:, None]
    assert_budget("grad key", key_grad, key_grad, truth, 1e-4, factor=0.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["transposed", "sliced", "offset"])
@pytest.mark.parametrize("d", [1, 16, 17, 64, 67])
def test_layout_changes_no_bit(isa: str, dtype: torch.dtype, layout: str, d: int) -> None:
    found, expected = (
        outputs_and_gradients(fastcl.contrast, Problem(33, 65, d, dtype, dtype, kind, scale="tensor"))
        for kind in (layout, "contiguous")
    )
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("offset", [1, 2, 3, 5, 7, 9, 15])
def test_any_storage_offset(isa: str, dtype: torch.dtype, offset: int) -> None:
    g = torch.Generator().manual_seed(0)
    inputs = [torch.randn(*shape, generator=g).to(dtype) for shape in ((33, 24), (65, 24), (33, 24), (65,), (33,))]
    expected = fastcl.contrast(*inputs[:3], bias=inputs[3], scale=inputs[4])
    moved = [x.new_full((x.numel() + offset,), 77.0)[offset:].view_as(x).copy_(x) for x in inputs]
    assert all(x.storage_offset() == offset for x in moved)
    found = fastcl.contrast(*moved[:3], bias=moved[3], scale=moved[4])
    assert torch.equal(torch.stack(found), torch.stack(expected))


def test_expanded_rows_get_the_gradient_of_all_their_copies() -> None:
    g = torch.Generator().manual_seed(0)
    row, key = (torch.randn(n, 6, generator=g, dtype=F64).requires_grad_() for n in (1, 9))
    _, lse = fastcl.contrast(row.expand(5, 6), key)
    (found,) = torch.autograd.grad(lse.sum(), row)
    _, alone = fastcl.contrast(row, key)
    torch.testing.assert_close(found, 5 * torch.autograd.grad(alone.sum(), row)[0])


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("temperature", [0.5, 0.07, 0.01])
def test_sixteen_bits_with_sixty_five_thousand_negatives(isa: str, dtype: torch.dtype, temperature: float) -> None:
    # Weights near 1/65536, divided by T times a batch of 65,536 besides: below the smallest numbers of fp16, and under
    # the threshold of kernels that drop what they take for negligible. Together they are the whole repulsion.
    g = torch.Generator().manual_seed(0)
    # The common direction keeps the repulsion large where the softmax is flat.
    query, positive, keys = (F.normalize(torch.randn(n, 64, generator=g) + 0.3, dim=1) for n in (8, 8, 65_536))
    inputs = [x.to(dtype).requires_grad_() for x in (query, positive, keys)]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    ours, truth = (
        module.dcl(*x, temperature=temperature, reduction="sum", normalize=False)
        for module, x in ((fastcl, inputs), (reference, wide))
    )
    assert ours.item() == pytest.approx(truth.item(), rel=2e-6)
    (found,), (expected,) = (torch.autograd.grad(x / 65_536, leaf[0]) for x, leaf in ((ours, inputs), (truth, wide)))
    attraction = positive.to(dtype).double() / temperature / 65_536
    repulsion = expected + attraction
    assert (repulsion.norm(dim=1) > 0.2 * attraction.norm(dim=1)).all()
    error = (found.double() - expected).norm(dim=1)
    assert (error <= TOLERANCE[dtype] * expected.norm(dim=1) + (8 * 6e-8 if dtype == F16 else 0.0)).all()


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("dtype", [F64, F32], ids=str)
def test_a_common_offset_changes_no_loss(loss: str, dtype: torch.dtype) -> None:
    # Not normalised, every logit 1e4 higher. InfoNCE+ and MINE+ weigh the two sides differently, so they move with it.
    g = torch.Generator().manual_seed(0)
    query, positive, keys = (torch.randn(n, 8, generator=g, dtype=F64) for n in (9, 9, 20))
    for x in (query, positive, keys):
        x[:, 0] = 0.0
    options: dict[str, Any] = {"temperature": 1.0, "normalize": False, "in_batch": True, "reduction": "none"}
    constants = {"lam": 1.0} if loss.endswith("plus") else {}
    expected = getattr(fastcl, loss)(query, positive, keys, **options, **constants)
    for x in (query, positive, keys):
        x[:, 0] = 100.0
    moved = getattr(fastcl, loss)(*(x.to(dtype) for x in (query, positive, keys)), **options, **constants)
    # float32 numbers near 1e4 are 1e-3 apart.
    torch.testing.assert_close(moved.double(), expected, rtol=0, atol=1e-11 if dtype == F64 else 4e-3)


@pytest.mark.parametrize("loss", LOSSES)
def test_an_empty_queue_alone_is_a_loss_of_zero(loss: str) -> None:
    query, key = (torch.randn(4, 3, requires_grad=True) for _ in range(2))
    value = getattr(fastcl, loss)(query, key, in_batch=False, queue=fastcl.NegativeQueue(8, 3), reduction="none")
    assert torch.equal(value, torch.zeros(4))
    for grad in torch.autograd.grad(value.sum(), [query, key]):
        assert torch.equal(grad, torch.zeros(4, 3))


@pytest.mark.parametrize("loss", LOSSES)
def test_two_forwards_before_one_backward(loss: str) -> None:
    # Both read the queue, which moves on between them and after them, through a whole turn.
    function = getattr(fastcl, loss)
    g = torch.Generator().manual_seed(0)
    old, new = (torch.randn(8, 5, generator=g) for _ in range(2))
    first, second, key = (torch.randn(6, 5, generator=g).requires_grad_() for _ in range(3))

    def gradients(steps: list[tuple[Tensor, Tensor]], queue: fastcl.NegativeQueue) -> tuple[Tensor, ...]:
        total = torch.zeros(())
        for query, pushed in steps:
            total = total + function(query, key, queue=queue)
            queue.push(pushed)
        return torch.autograd.grad(total, [first, second, key], allow_unused=True)

    queues = [fastcl.NegativeQueue(8, 5) for _ in range(3)]
    for queue, start in zip(queues, (old, old, new), strict=True):
        queue.push(start)
    together = gradients([(first, new), (second, torch.full((8, 5), 50.0))], queues[0])
    alone = gradients([(first, new)], queues[1]), gradients([(second, new)], queues[2])
    assert torch.equal(together[0], alone[0][0])
    assert torch.equal(together[1], alone[1][1])
    torch.testing.assert_close(together[2], alone[0][2] + alone[1][2])


def test_the_same_inputs_may_be_used_twice() -> None:
    query, key = (torch.randn(6, 5, dtype=F64, requires_grad=True) for _ in range(2))
    once = torch.autograd.grad(fastcl.infonce(query, key), [query, key])
    twice = torch.autograd.grad(fastcl.infonce(query, key) + 2 * fastcl.infonce(query, key), [query, key])
    for a, b in zip(once, twice, strict=True):
        torch.testing.assert_close(3 * a, b)


_IMPORT = """
import shutil, torch, fastcl
assert not any(map(shutil.which, ("c++", "g++", "gcc", "cc", "clang++", "nvcc", "ninja")))
query = torch.randn(5, 7, requires_grad=True)
fastcl.infonce(query, torch.randn(5, 7)).backward()
print(query.grad.isfinite().all().item())
"""


def test_imports_and_runs_without_a_compiler(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _IMPORT], env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True"]
