"""Row weights on every loss of the family, the weights of DCLW, and the debiased and hard negatives."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from calls import FAMILY
from hypothesis import given
from problems import BF16, DTYPES, F16, F32, F64, Batch, batches
from torch import Tensor
from twins import assert_equals_twin, value_and_gradients

import fastcl
from fastcl import reference

pytestmark = pytest.mark.usefixtures("one_thread")

LOSSES = list(FAMILY)


def _weight(n: int, dtype: torch.dtype = F64) -> Tensor:
    return (3 * torch.rand(n, generator=torch.Generator().manual_seed(5), dtype=F64)).to(dtype)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("symmetric", [False, True])
def test_weight_multiplies_each_row(loss: str, reduction: str, symmetric: bool) -> None:
    learn, rest = Batch(symmetric=symmetric).build()
    weight = _weight(9)
    rows = getattr(fastcl, loss)(**learn, **{**rest, "reduction": "none"})
    expected = {"mean": (weight * rows).sum() / 9, "sum": (weight * rows).sum(), "none": weight * rows}[reduction]
    options = {**rest, "reduction": reduction}
    torch.testing.assert_close(getattr(fastcl, loss)(**learn, **options, weight=weight), expected)
    ours, truth = (
        value_and_gradients(getattr(module, loss), {**learn, "weight": weight}, options)
        for module in (fastcl, reference)
    )
    torch.testing.assert_close(ours, truth, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("loss", LOSSES)
def test_weight_gradcheck(loss: str) -> None:
    query, positive = (x.requires_grad_() for x in Batch(4, 3).build()[0].values())
    options: dict[str, Any] = {"weight_fn": lambda q, p: 1 + (q * p).sum(1)} if loss == "dclw" else {}

    def call(query: Tensor, positive: Tensor, weight: Tensor) -> Tensor:
        return getattr(fastcl, loss)(query, positive, temperature=0.3, weight=weight, **options)

    assert torch.autograd.gradcheck(call, (query, positive, _weight(4).requires_grad_()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weight_of_any_floating_type(dtype: torch.dtype) -> None:
    learn, _ = Batch(dtype=F32).build()
    weight = _weight(9, dtype).requires_grad_()
    rows = fastcl.infonce(**learn, reduction="none")
    loss = fastcl.infonce(**learn, weight=weight)
    assert loss.dtype == F32
    torch.testing.assert_close(loss, (weight.float() * rows).mean())
    torch.testing.assert_close(torch.autograd.grad(loss, weight)[0], (rows / 9).to(dtype))


@pytest.mark.parametrize("loss", LOSSES)
def test_weighted_row_without_negatives_stays_zero(loss: str) -> None:
    learn, _ = Batch(4, 6).build()
    query, positive = (x.requires_grad_() for x in learn.values())
    negatives = torch.randn(2, 6, dtype=F64, generator=torch.Generator().manual_seed(0))
    options: dict[str, Any] = {"ids": torch.tensor([1, 5, 2, 3]), "negative_ids": torch.tensor([5, 5])}
    weight = torch.full((4,), 1e6, dtype=F64, requires_grad=True)
    rows = getattr(fastcl, loss)(query, positive, negatives, weight=weight, reduction="none", **options)
    assert (rows == 0).tolist() == [False, True, False, False]
    for g in torch.autograd.grad(rows.sum(), [query, positive, weight]):
        assert (g.view(4, -1).abs().sum(1) == 0).tolist() == [False, True, False, False]


@pytest.mark.parametrize(
    ("weight", "error", "message"),
    [
        (torch.ones(2), ValueError, r"weight.*\[3\].*\[2\]"),
        (torch.ones(3, 1), ValueError, r"weight.*\[3\].*\[3, 1\]"),
        (torch.ones(3).long(), TypeError, "weight.*int64"),
        (0.5, TypeError, "weight.*float"),
        (torch.ones(3, device="meta"), ValueError, "weight.*cpu.*meta"),
    ],
)
def test_weight_refused(weight: Any, error: type[Exception], message: str) -> None:
    for loss in (*LOSSES, "sampled_softmax"):
        with pytest.raises(error, match=message):
            getattr(fastcl, loss)(torch.ones(3, 4), torch.ones(3, 4), weight=weight)


def test_mises_fisher_weights() -> None:
    query, positive = (F.normalize(x, dim=1).requires_grad_() for x in Batch(7, 5).build()[0].values())
    for sigma in (0.5, 2.0):
        ours = fastcl.mises_fisher_weights(query, positive, sigma)
        torch.testing.assert_close(ours, reference.mises_fisher_weights(query, positive, sigma))
        assert ours.mean().item() == pytest.approx(1.0)
        assert not ours.requires_grad
    closest = (query * positive).sum(1).argmax()
    assert fastcl.mises_fisher_weights(query, positive).argmin() == closest
    assert fastcl.mises_fisher_weights(query.to(BF16), positive.to(BF16)).dtype == F32
    # Another sigma through a partial; at a very large one all weights are 1 and DCLW is DCL.
    wide = partial(fastcl.mises_fisher_weights, sigma=1e9)
    torch.testing.assert_close(fastcl.dclw(query, positive, weight_fn=wide), fastcl.dcl(query, positive))


def test_dclw_is_that_of_the_authors_code() -> None:
    """Both directions over both views, as in lightly's DCLWLoss, written out; the positive's weight is a constant."""
    view1, view2 = (F.normalize(x, dim=1) for x in Batch(8, 5).build()[0].values())

    def theirs(view1: Tensor, view2: Tensor) -> Tensor:
        total = torch.zeros((), dtype=F64)
        for a, b in ((view1, view2), (view2, view1)):
            weight = 2 - 8 * torch.softmax((a * b).sum(1).detach() / 0.5, 0)
            logits = torch.cat([a @ a.T, a @ b.T], 1) / 0.1
            mine = torch.eye(8, dtype=torch.bool).repeat(1, 2)
            negative = torch.logsumexp(logits.masked_fill(mine, -math.inf), 1)
            total = total + (negative - weight * (a * b).sum(1) / 0.1).mean() / 2
        return total

    def ours(view1: Tensor, view2: Tensor) -> Tensor:
        ids = torch.arange(8).repeat(2)
        total = torch.zeros((), dtype=F64)
        for a, b in ((view1, view2), (view2, view1)):
            keys = torch.cat([view1, view2])
            total = total + fastcl.dclw(a, b, keys, normalize=False, ids=ids[:8], negative_ids=ids) / 2
        return total

    learn = {"view1": view1, "view2": view2}
    torch.testing.assert_close(value_and_gradients(ours, learn, {}), value_and_gradients(theirs, learn, {}))


@pytest.mark.parametrize(
    ("weight_fn", "error", "message"),
    [
        (lambda q, p: torch.ones(2), ValueError, r"weight_fn.*\[3\].*\[2\]"),
        (lambda q, p: 1.0, TypeError, "weight_fn.*float"),
    ],
)
def test_weight_fn_refused(weight_fn: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        fastcl.dclw(torch.ones(3, 4), torch.ones(3, 4), weight_fn=weight_fn)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"positive_key": torch.ones(2, 4)}, ValueError, r"positive_key.*\[3, 4\].*\[2, 4\]"),
        ({"sigma": 0.0}, ValueError, "sigma.*0"),
        ({"sigma": None}, TypeError, "sigma.*None"),
    ],
)
def test_mises_fisher_weights_refuses(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        fastcl.mises_fisher_weights(**{"query": torch.ones(3, 4), "positive_key": torch.ones(3, 4), **change})


CONSTANTS = ({}, {"tau_plus": 0.02}, {"tau_plus": 0.02, "beta": 0.5}, {"tau_plus": 0.0, "beta": 1.0})


@given(batch=batches())
def test_debiased_equals_the_textbook(batch: Batch) -> None:
    learn, rest = replace(batch, log_q=False, normalize=True).build()
    if batch.dtype in (BF16, F16):
        # What is left of a difference depends on every bit: the twin must get the same numbers.
        learn = {name: F.normalize(x.float(), dim=-1) if x.ndim > 1 else x for name, x in learn.items()}
    for constants in CONSTANTS:
        shortest = min(x.double().norm(dim=-1).min().item() for x in learn.values() if x.ndim > 1)
        assert_equals_twin("debiased_infonce", learn, {**rest, **constants}, 20.0, 20.0 / min(shortest, 1.0))


@pytest.mark.parametrize("beta", [0.0, 1.0])
@pytest.mark.parametrize("tau_plus", [0.1, 0.01])
def test_debiased_is_that_of_the_authors_code(beta: float, tau_plus: float) -> None:
    """The criterion of Chuang et al. and, with beta, of Robinson et al., over both views of a batch, written out."""
    view1, view2 = (F.normalize(x, dim=1) for x in Batch(6, 5, seed=1).build()[0].values())

    def theirs(view1: Tensor, view2: Tensor) -> Tensor:
        out, count = torch.cat([view1, view2]), 10
        mine = torch.eye(6, dtype=torch.bool).repeat(2, 2)
        neg = torch.exp(out @ out.T / 0.5)[~mine].view(12, count)
        pos = torch.exp((view1 * view2).sum(1) / 0.5).repeat(2)
        importance = (beta * neg.log()).exp()
        reweighted = (importance * neg).sum(1) / importance.mean(1)
        left = (-tau_plus * count * pos + reweighted) / (1 - tau_plus)
        return -torch.log(pos / (pos + left.clamp(min=count * math.exp(-1 / 0.5)))).mean()

    def ours(view1: Tensor, view2: Tensor) -> Tensor:
        both, partner = torch.cat([view1, view2]), torch.cat([view2, view1])
        ids = torch.arange(6).repeat(2)
        return fastcl.debiased_infonce(
            both, partner, both, 0.5, ids=ids, negative_ids=ids, tau_plus=tau_plus, beta=beta, normalize=False
        )

    learn = {"view1": view1, "view2": view2}
    torch.testing.assert_close(value_and_gradients(ours, learn, {}), value_and_gradients(theirs, learn, {}))


def test_debiased_row_at_its_bound_sends_nothing_to_its_negatives() -> None:
    # T = 1: the mean of the negatives is 1; 0.9 e takes all of it off, 0.1 e leaves (1 - 0.1 e) / 0.9.
    query, negatives = torch.tensor([[1.0, 0.0]], dtype=F64), torch.tensor([[0.0, 1.0]], dtype=F64, requires_grad=True)
    loss = fastcl.debiased_infonce(query, query, negatives, 1.0, tau_plus=0.9)
    assert loss.item() == pytest.approx(math.log1p(math.exp(-1) / math.e))
    assert torch.equal(torch.autograd.grad(loss, negatives)[0], torch.zeros_like(negatives))
    loss = fastcl.debiased_infonce(query, query, negatives, 1.0, tau_plus=0.1)
    assert loss.item() == pytest.approx(math.log1p((1 - 0.1 * math.e) / 0.9 / math.e))
    assert torch.autograd.grad(loss, negatives)[0][0, 0] > 0


@pytest.mark.parametrize("constants", CONSTANTS, ids=str)
@pytest.mark.parametrize("temperature", ["tensor", "rows"])
def test_debiased_gradcheck(constants: dict[str, float], temperature: str) -> None:
    learn, rest = Batch(4, 3, F64, "shared", True, "partial", temperature=temperature, reduction="none").build()
    names = list(learn)

    def call(*args: Tensor) -> Tensor:
        return fastcl.debiased_infonce(**dict(zip(names, args, strict=True)), **rest, **constants)

    assert torch.autograd.gradcheck(call, [x.requires_grad_() for x in learn.values()])


def test_debiased_in_float32_where_exponentials_overflow() -> None:
    learn, _ = Batch(33, 8, F32).build()
    constants = {"temperature": 0.005, "tau_plus": 0.01, "beta": 0.5}  # exp(1.5 * 200) fits float64 alone
    ours = value_and_gradients(fastcl.debiased_infonce, learn, constants)
    truth = value_and_gradients(reference.debiased_infonce, {n: x.double() for n, x in learn.items()}, constants)
    for name, value in ours.items():
        torch.testing.assert_close(value.double(), truth[name], rtol=1e-3, atol=1e-3)


def test_debiased_meets_infonce() -> None:
    for batch in (Batch(), Batch(negatives="private", in_batch=True, ids=True), Batch(symmetric=True)):
        learn, rest = batch.build()
        torch.testing.assert_close(
            fastcl.debiased_infonce(**learn, **rest, tau_plus=0.0), fastcl.infonce(**learn, **rest)
        )


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"tau_plus": 1.0}, ValueError, "tau_plus.*1.0"),
        ({"tau_plus": -0.1}, ValueError, "tau_plus.*-0.1"),
        ({"tau_plus": "0"}, TypeError, "tau_plus.*str"),
        ({"beta": -1.0}, ValueError, "beta.*-1"),
        ({"beta": math.nan}, ValueError, "beta.*nan"),
        ({"beta": None}, TypeError, "beta.*None"),
        ({"log_q": torch.zeros(3)}, ValueError, "log_q"),
    ],
    ids=str,
)
def test_debiased_refuses(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        fastcl.debiased_infonce(torch.ones(3, 4), torch.ones(3, 4), **change)
