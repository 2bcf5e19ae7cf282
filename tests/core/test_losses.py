"""Each loss against its textbook twin, against numbers worked out by hand, and against what it promises to refuse.

The op underneath is tested in test_contrast.py, extreme numbers in test_numerics.py, row weights and the debiased loss
in test_weights.py.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from calls import CALLS, FAMILY
from conftest import TOLERANCE, assert_budget
from hypothesis import given
from problems import BF16, DTYPES, F16, F32, F64, Batch, batches
from torch import Tensor
from twins import assert_family_equals_twin

import fastcl
from fastcl import reference
from fastcl.registry import LOSSES as REGISTRY

pytestmark = pytest.mark.usefixtures("one_thread")

# Debiased InfoNCE takes no log q, and has a gradient with kinks: test_weights.py.
LOSSES = [name for name in FAMILY if name != "debiased_infonce"]


def test_every_loss_has_its_row() -> None:
    """A loss of the registry is tested once it has a row in calls.py, and fails here as long as it has none."""
    assert set(FAMILY) == {name for name, loss in REGISTRY.items() if loss.formula is not None}
    assert {call.function for call in CALLS.values()} == {*REGISTRY, "contrast", "softplus_sum"}
    assert [name for name in REGISTRY if not hasattr(reference, name)] == []


@pytest.mark.parametrize("loss", LOSSES)
@given(batch=batches())
def test_equals_the_textbook(loss: str, batch: Batch) -> None:
    for constants in FAMILY[loss]:
        assert_family_equals_twin(loss, batch, constants)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    "batch",
    [
        Batch(),
        Batch(symmetric=True, temperature="tensor"),
        Batch(negatives="shared", ids=True),
        Batch(negatives="private", ids=True, log_q=True, in_batch=True, temperature="rows"),
        Batch(negatives="shared", queue="full", in_batch=True, ids=True, log_q=True, temperature="tensor"),
        Batch(queue="partial", in_batch=False, normalize=False),
        Batch(queue="empty"),
    ],
    ids=["in-batch", "symmetric", "shared", "private", "everything", "queue", "empty queue"],
)
def test_equals_the_textbook_on_every_isa(isa: str, loss: str, batch: Batch) -> None:
    for dtype, reduction in zip(DTYPES, itertools.cycle(("mean", "none"))):
        larger = replace(batch, dtype=dtype, n=33, d=17, reduction=reduction)
        for constants in FAMILY[loss]:
            assert_family_equals_twin(loss, larger, constants)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("temperature", ["tensor", "rows"])
@pytest.mark.parametrize("negatives", ["shared", "private"])
def test_gradcheck(loss: str, temperature: str, negatives: str) -> None:
    batch = Batch(4, 3, F64, negatives, True, "partial", log_q=True, temperature=temperature, reduction="none")
    learn, rest = batch.build()
    names = list(learn)
    if loss == "dclw":  # the default's weights are constants; these have their gradient
        rest["weight_fn"] = lambda query, positive_key: 1.0 + (query * positive_key).sum(1)

    def call(*args: Tensor) -> Tensor:
        return getattr(fastcl, loss)(**dict(zip(names, args, strict=True)), **rest)

    assert torch.autograd.gradcheck(call, [x.requires_grad_() for x in learn.values()])


# Two queries in the plane, not normalised, T = 1: q0.p0 = 2, q0.p1 = 1, q1.p0 = 0, q1.p1 = 3.
HAND_QUERY = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=F64)
HAND_POSITIVE = torch.tensor([[2.0, 0.0], [1.0, 3.0]], dtype=F64)
E = math.exp


@pytest.mark.parametrize(
    ("loss", "constants", "expected"),
    [
        ("infonce", {}, [-math.log(E(2) / (E(2) + E(1))), -math.log(E(3) / (E(3) + E(0)))]),
        ("dcl", {}, [1.0 - 2.0, 0.0 - 3.0]),
        ("dclw", {}, [1 - 2 * (2 - 2 * E(4) / (E(4) + E(6))), -3 * (2 - 2 * E(6) / (E(4) + E(6)))]),
        ("infonce_plus", {}, [1.1 * 1.0 - 2.0, 1.1 * 0.0 - 3.0]),
        (
            "infonce_plus",
            {"epsilon": 0.5, "lam": 2.0},
            [2 * math.log(0.5 * E(2) + E(1)) - 2, 2 * math.log(0.5 * E(3) + 1) - 3],
        ),
        ("mine", {}, [1.0 - 2.0, 0.0 - 3.0]),
        ("mine_plus", {"lam": 3.0}, [3.0 * 1.0 - 2.0, 3.0 * 0.0 - 3.0]),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_hand_computed_in_batch(loss: str, constants: dict[str, float], expected: list[float]) -> None:
    options = {"temperature": 1.0, "normalize": False, **constants}
    rows = getattr(fastcl, loss)(HAND_QUERY, HAND_POSITIVE, reduction="none", **options)
    torch.testing.assert_close(rows, torch.tensor(expected, dtype=F64), rtol=1e-12, atol=1e-12)
    for reduction, value in (("sum", sum(expected)), ("mean", sum(expected) / 2)):
        total = getattr(fastcl, loss)(HAND_QUERY, HAND_POSITIVE, reduction=reduction, **options)
        assert total.shape == ()
        assert total.item() == pytest.approx(value, rel=1e-12)


def test_hand_computed_with_everything() -> None:
    # One row, T = 0.5, so logits double. Positive: 2 - log 0.1. In-batch: nothing but itself. Shared keys: 4 - log 0.2
    # and an excluded one. Queue: 6 - log 0.4.
    queue = fastcl.NegativeQueue(4, 1, F64)
    queue.push(torch.tensor([[3.0]], dtype=F64), torch.tensor([9]), torch.tensor([math.log(0.4)]))
    one = torch.ones(1, 1, dtype=F64)
    options: dict[str, Any] = {
        "temperature": 0.5,
        "normalize": False,
        "in_batch": True,
        "queue": queue,
        "ids": torch.tensor([5]),
        "negative_ids": torch.tensor([7, 5]),
        "log_q": torch.tensor([math.log(0.1)], dtype=F64),
        "negative_log_q": torch.tensor([0.2, 0.3], dtype=F64).log(),
    }
    keys = torch.tensor([[2.0], [50.0]], dtype=F64)
    pos, neg = E(2) / 0.1, E(4) / 0.2 + E(6) / 0.4
    expected = {
        "infonce": -math.log(pos / (pos + neg)),
        "dcl": -math.log(pos / neg),
        "dclw": -math.log(pos / neg),  # one row weighs 1
        "infonce_plus": 1.1 * math.log(neg) - math.log(pos),
        "mine": -math.log(pos / (neg / 2)),
        "mine_plus": 1.1 * math.log(neg / 2) - math.log(pos),
    }
    for loss, value in expected.items():
        # The queue keeps log q in float32.
        assert getattr(fastcl, loss)(one, one, keys, **options).item() == pytest.approx(value, rel=1e-6)


def test_normalisation_is_by_length() -> None:
    loss = fastcl.infonce(7 * HAND_QUERY, HAND_POSITIVE, temperature=0.5, reduction="none")
    # Lengths 2 and sqrt 10: cosines 1, 1/sqrt 10; 0, 3/sqrt 10.
    root = math.sqrt(10)
    expected = [math.log1p(E(2 / root - 2)), math.log1p(E(0 - 6 / root))]
    torch.testing.assert_close(loss, torch.tensor(expected, dtype=F64), rtol=1e-12, atol=1e-12)


def _info_nce_pytorch(
    query: Tensor, positive_key: Tensor, negative_keys: Tensor | None, temperature: float, reduction: str, mode: str
) -> Tensor:
    """What the info-nce-pytorch package computes (github.com/RElbers/info-nce-pytorch), written out."""
    query, positive_key = F.normalize(query, dim=-1), F.normalize(positive_key, dim=-1)
    if negative_keys is None:
        logits, labels = query @ positive_key.T, torch.arange(len(query))
    else:
        negative_keys = F.normalize(negative_keys, dim=-1)
        positive_logit = (query * positive_key).sum(1, keepdim=True)
        if mode == "unpaired":
            negative_logits = query @ negative_keys.T
        else:
            negative_logits = (query[:, None] @ negative_keys.transpose(1, 2))[:, 0]
        logits = torch.cat([positive_logit, negative_logits], 1)
        labels = torch.zeros(len(logits), dtype=torch.long)
    return F.cross_entropy(logits / temperature, labels, reduction=reduction)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("mode", ["unpaired", "paired", None])
def test_replacing_the_import_of_info_nce_pytorch_is_enough(mode: str | None, reduction: str) -> None:
    negatives = {"unpaired": "shared", "paired": "private", None: "none"}[mode]
    learn, _ = Batch(negatives=negatives).build()
    inputs = [x.requires_grad_() for x in learn.values()]
    args = (*inputs, None)[:3]
    ours = fastcl.infonce(*args, 0.1, reduction, mode or "unpaired")
    theirs = _info_nce_pytorch(*args, 0.1, reduction, mode or "unpaired")
    torch.testing.assert_close(ours, theirs)
    upstream = torch.rand_like(ours)
    for a, b in zip(
        torch.autograd.grad(ours, inputs, upstream), torch.autograd.grad(theirs, inputs, upstream), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_members_of_the_family_meet() -> None:
    everything = Batch(negatives="private", ids=True, in_batch=True, queue="full")
    for batch in (Batch(), everything, Batch(negatives="shared")):
        learn, rest = batch.build()
        value = {loss: getattr(fastcl, loss)(**learn, **rest).item() for loss in LOSSES}
        assert fastcl.infonce_plus(**learn, **rest, epsilon=1.0, lam=1.0).item() == pytest.approx(value["infonce"])
        assert fastcl.infonce_plus(**learn, **rest, epsilon=0.0, lam=1.0).item() == pytest.approx(value["dcl"])
        assert fastcl.infonce_plus(**learn, **rest, epsilon=0.0, lam=1.1).item() == pytest.approx(value["infonce_plus"])
        assert fastcl.mine_plus(**learn, **rest, lam=1.0).item() == pytest.approx(value["mine"])
        assert fastcl.mine_plus(**learn, **rest, lam=1.1).item() == pytest.approx(value["mine_plus"])


def test_ids_exclude_duplicates_and_count_leaves_them_out() -> None:
    # Rows 0 and 1 have the same positive; each then meets only row 2, so count is 1, 1, 2.
    query = torch.eye(3, dtype=F64)
    options: dict[str, Any] = {"temperature": 1.0, "normalize": False, "reduction": "none"}
    ids = torch.tensor([4, 4, 8])
    torch.testing.assert_close(
        fastcl.dcl(query, query, ids=ids, **options), torch.tensor([-1.0, -1.0, math.log(2) - 1], dtype=F64)
    )
    torch.testing.assert_close(fastcl.mine(query, query, ids=ids, **options), torch.full((3,), -1.0, dtype=F64))
    # Without ids duplicates stay in the sum; only one's own positive is left out.
    torch.testing.assert_close(fastcl.dcl(query, query, **options), torch.full((3,), math.log(2) - 1, dtype=F64))


def test_queue_entries_without_ids_match_nothing() -> None:
    query = torch.eye(2, dtype=F64)
    queue = fastcl.NegativeQueue(8, 2, F64)
    queue.push(query)
    queue.push(query, torch.tensor([1, 2]))
    options: dict[str, Any] = {"temperature": 1.0, "normalize": False, "reduction": "none", "in_batch": False}
    loss = fastcl.mine(query, query, queue=queue, ids=torch.tensor([1, 2]), **options)
    # Row 0: the two entries without ids (logits 1, 0) and the one of id 2 (logit 0).
    torch.testing.assert_close(loss, torch.full((2,), math.log((E(1) + 2) / 3) - 1, dtype=F64))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("dtype", [F64, F32, BF16], ids=str)
def test_rows_without_negatives_cost_nothing_but_count_in_the_mean(loss: str, dtype: torch.dtype) -> None:
    function = getattr(fastcl, loss)
    learn, _ = Batch(4, 6, dtype).build()
    query, positive = (x.requires_grad_() for x in learn.values())
    temperature = torch.tensor(0.3, dtype=F64 if dtype == F64 else F32, requires_grad=True)
    ids = torch.tensor([1, 1, 1, 1])
    rows = function(query, positive, temperature=temperature, ids=ids, reduction="none")
    assert torch.equal(rows, torch.zeros_like(rows))
    for g in torch.autograd.grad(rows.sum(), [query, positive, temperature]):
        assert torch.equal(g, torch.zeros_like(g))
    # One empty row among four: the others keep their loss, the mean divides by four.
    negatives = torch.randn(2, 6, dtype=dtype, generator=torch.Generator().manual_seed(0))
    options: dict[str, Any] = {"temperature": temperature, "negative_ids": torch.tensor([5, 5])}
    some = function(query, positive, negatives, ids=torch.tensor([1, 5, 2, 3]), reduction="none", **options)
    assert (some == 0).tolist() == [False, True, False, False]
    mean = function(query, positive, negatives, ids=torch.tensor([1, 5, 2, 3]), **options)
    assert mean.item() == pytest.approx(some.sum().item() / 4, rel=1e-6)
    query_grad, positive_grad = torch.autograd.grad(mean, [query, positive])
    assert (query_grad.abs().sum(1) == 0).tolist() == [False, True, False, False]
    assert (positive_grad.abs().sum(1) == 0).tolist() == [False, True, False, False]


def test_single_row_has_no_in_batch_negatives() -> None:
    query = torch.randn(1, 5, requires_grad=True)
    for loss in LOSSES:
        value = getattr(fastcl, loss)(query, query)
        assert value.item() == 0
        assert torch.equal(torch.autograd.grad(value, query)[0], torch.zeros(1, 5))


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_temperature_may_have_16_bits(dtype: torch.dtype) -> None:
    # As it has after model.to(bfloat16): the value is what those bits say, not a rounded reciprocal.
    learn, rest = Batch(33, 17, F32).build()
    for value in (torch.tensor(0.0103), torch.linspace(0.0103, 0.07, 33)):
        temperature = value.to(dtype).requires_grad_()
        ours = fastcl.dcl(**learn, **{**rest, "temperature": temperature})
        wide = value.to(dtype).double().requires_grad_()
        truth = reference.dcl(**{k: v.double() for k, v in learn.items()}, temperature=wide)
        assert ours.item() == pytest.approx(truth.item(), rel=1e-5)
        (a,), (b,) = torch.autograd.grad(ours, temperature), torch.autograd.grad(truth, wide)
        assert a.dtype == dtype
        assert_budget("grad temperature", a, a, b, TOLERANCE[dtype], factor=0.0)


def test_losses_compile_without_a_graph_break() -> None:
    learn, rest = Batch(negatives="shared", dtype=F32, ids=True, log_q=True, in_batch=True).build()
    inputs = [x.requires_grad_() for x in learn.values()]
    names = list(learn)
    for loss in ("infonce", "mine_plus"):
        function = getattr(fastcl, loss)

        def call(*args: Tensor, function: Any = function) -> Tensor:
            return function(**dict(zip(names, args, strict=True)), **rest)

        torch._dynamo.reset()
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        a, b = compiled(*inputs), call(*inputs)
        torch.testing.assert_close(a, b)
        for x, y in zip(torch.autograd.grad(a, inputs), torch.autograd.grad(b, inputs), strict=True):
            torch.testing.assert_close(x, y)
