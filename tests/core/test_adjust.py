"""Weights of hard negatives, margins and caps: on every loss of the family, against the twins and the papers."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from calls import FAMILY
from hypothesis import given
from hypothesis import strategies as st
from problems import DTYPES, F32, F64, Batch, batches
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from twins import assert_family_equals_twin

import fastcl
import fastcl.distributed

pytestmark = pytest.mark.usefixtures("one_thread")

LOSSES = [name for name in FAMILY if name != "debiased_infonce"]  # which has its own beta
HARDNESS = (None, 0.0, 5.0, {"in_batch": 3.0}, {"negative_keys": 4.0, "queue": 2.0})
MARGINS = (None, fastcl.cosface(0.3), fastcl.arcface(0.4), lambda similarity: 0.5 * similarity)
CAPS = (None, 0.5, lambda similarity: similarity + 0.1, lambda similarity: 0.9 * similarity)
AVERAGES = ("mine", "mine_plus", "bsl")  # which do not know how many negatives a cap leaves
EVERYTHING = Batch(negatives="shared", queue="full", in_batch=True, ids=True, log_q=True, temperature="tensor")


def _options(loss: str, batch: Batch, hardness: Any, margin: Any, cap: Any) -> dict[str, Any]:
    # A learned log q has no gradient beside weights and a temperature for each row. Angles are those of cosines, and
    # in one dimension all of these are 1, where the slope is infinite.
    hard = None if batch.log_q and batch.temperature == "rows" else hardness
    angles = batch.normalize and batch.d > 1
    margin = None if margin is MARGINS[2] and not angles else margin
    # Vectors rounded to 16 bits lie on other sides of a cap than their twins; test_contrast.py has caps between them.
    exact = batch.dtype in (F64, F32) and loss not in AVERAGES
    return {"hardness": hard, "margin": margin, "cap": cap if exact else None}


@given(
    loss=st.sampled_from(LOSSES),
    batch=batches(),
    hardness=st.sampled_from(HARDNESS),
    margin=st.sampled_from(MARGINS),
    cap=st.sampled_from(CAPS),
)
def test_equals_the_textbook(loss: str, batch: Batch, hardness: Any, margin: Any, cap: Any) -> None:
    assert_family_equals_twin(loss, batch, _options(loss, batch, hardness, margin, cap))


@pytest.mark.parametrize("batch", [Batch(temperature="rows"), EVERYTHING, Batch(symmetric=True)],
                         ids=["rows", "everything", "symmetric"])  # fmt: skip
def test_equals_the_textbook_on_every_isa(isa: str, batch: Batch) -> None:
    for dtype in DTYPES:
        for reduction in ("mean", "none"):
            larger = replace(batch, dtype=dtype, n=33, d=17, reduction=reduction)
            options = _options("infonce", larger, 5.0, MARGINS[1], CAPS[2])
            assert_family_equals_twin("infonce", larger, options)


@pytest.mark.parametrize("negatives", ["none", "shared", "private"])
def test_gradcheck_of_a_margin(negatives: str) -> None:
    learn, rest = Batch(4, 3, F64, negatives, True, log_q=True, temperature="rows", reduction="none").build()
    names = list(learn)

    def call(*args: Tensor) -> Tensor:
        return fastcl.infonce(**dict(zip(names, args, strict=True)), **rest, margin=fastcl.arcface(0.4))

    assert torch.autograd.gradcheck(call, [x.requires_grad_() for x in learn.values()])


class _Products(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def _nodes(node: Any) -> Iterator[Any]:
    stack = [node]
    while stack:
        node = stack.pop()
        yield node
        stack += [n for n, _ in node.next_functions if n is not None]


def test_hardness_and_margin_take_no_product_more() -> None:
    """One forward op, and the sums of the keys' gradients that it made are what backward takes."""
    learn, _ = Batch(33, 17, F32).build()
    inputs = {name: x.requires_grad_() for name, x in learn.items()}
    for options in ({"hardness": 5.0}, {"margin": fastcl.cosface(0.3)}, {"hardness": 2.0, "margin": MARGINS[3]},
                    {"cap": CAPS[2]}):  # fmt: skip
        with _Products() as products:
            loss = fastcl.infonce(**inputs, **options)
        assert sum("contrast_packed_forward" in name for name in products.seen) == 1
        node = next(n for n in _nodes(loss.grad_fn) if type(n).__name__ == "PackedBackward")
        mean_keys = inputs["query"].numel()  # what stands before the expected gradients in what the op saved
        expected = node.saved_tensors[-1][mean_keys : mean_keys + 33]
        arrived: list[Tensor] = []
        node.register_prehook(lambda grads, arrived=arrived: arrived.append(grads[1]))
        came = torch.autograd.grad(loss, list(inputs.values()), retain_graph=True)
        plain = torch.autograd.grad(fastcl.infonce(**inputs, **options, reduction="none").mean(), list(inputs.values()))
        torch.testing.assert_close(came, plain, rtol=1e-4, atol=1e-7)
        ratio = arrived[0] / expected
        torch.testing.assert_close(ratio, ratio.mean().expand(33), rtol=1e-5, atol=0.0)


def test_hardness_of_two_numbers() -> None:
    # Query (1, 0): positive 1, negatives 0.6 and 0, T = 1; with beta = 2 they weigh e^1.2 and 1.
    query = torch.tensor([[1.0, 0.0]], dtype=F64)
    keys = torch.tensor([[0.6, 0.8], [0.0, 1.0]], dtype=F64)
    loss = fastcl.infonce(query, query, keys, temperature=1.0, hardness=2.0)
    denominator = math.exp(1) + math.exp(0.6 + 1.2) + 1
    assert loss.item() == pytest.approx(math.log(denominator) - 1)
    # The weights have no gradient: that of key 0 is its share of the denominator times the query, not three times it.
    keys.requires_grad_()
    (grad,) = torch.autograd.grad(fastcl.dcl(query, query, keys, 1.0, normalize=False, hardness=2.0), keys)
    assert grad[0, 0].item() == pytest.approx(math.exp(1.8) / (math.exp(1.8) + 1))


def test_margins() -> None:
    angles = torch.linspace(0.01, 3.13, 50, dtype=F64)
    torch.testing.assert_close(fastcl.cosface(0.2)(angles.cos()), angles.cos() - 0.2)
    found = fastcl.arcface(0.5)(angles.cos())
    torch.testing.assert_close(found[angles < math.pi - 0.5], (angles + 0.5).cos()[angles < math.pi - 0.5])
    assert (found.diff() < 0).all()  # falls with the angle over all of [0, pi]
    # The loss of the ArcFace paper, on stored logits.
    learn, _ = Batch(9, 6).build()
    query, positive = (F.normalize(x, dim=1) for x in learn.values())
    cosine = query @ positive.T
    cosine = torch.where(torch.eye(9, dtype=torch.bool), (cosine.clamp(-1, 1).acos() + 0.5).cos(), cosine)
    plain = F.cross_entropy(cosine / 0.2, torch.arange(9))
    torch.testing.assert_close(fastcl.infonce(**learn, temperature=0.2, margin=fastcl.arcface(0.5)), plain)
    same = torch.ones(1, 1, dtype=F64, requires_grad=True)
    (slope,) = torch.autograd.grad(fastcl.arcface(0.5)(same[0]), same)
    assert slope.item() == pytest.approx(math.cos(0.5) + math.sin(0.5) / 1e-7**0.5)
    beyond = torch.tensor([2.0, -3.0, 5.0], requires_grad=True)  # no cosines
    (slope,) = torch.autograd.grad(fastcl.arcface(0.5)(beyond).sum(), beyond)
    torch.testing.assert_close(slope, torch.tensor([math.cos(0.5), 1.0, math.cos(0.5)]))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"hardness": -1.0}, ValueError, "hardness.*at least 0.*-1"),
        ({"hardness": "5"}, TypeError, "hardness.*str"),
        ({"hardness": {"batch": 1.0}}, ValueError, "hardness.*in_batch.*'batch'"),
        ({"hardness": {"queue": True}}, TypeError, "hardness.*bool"),
        ({"margin": 0.3}, TypeError, "margin.*function.*float"),
        ({"margin": lambda s: s.sum()}, ValueError, r"margin.*\[3\].*\[\]"),
        ({"cap": "0.5"}, TypeError, "cap.*str"),
        ({"cap": torch.ones(2)}, ValueError, r"cap.*\[3\].*\[2\]"),
        ({"cap": math.nan}, ValueError, "cap.*nan"),
        ({"cap": lambda s: s[:1]}, ValueError, r"cap.*\[3\].*\[1\]"),
        ({"hardness": 1.0, "temperature": torch.ones(3), "log_q": torch.zeros(3, requires_grad=True)}, ValueError,
         "log_q.*hardness"),
    ],
)  # fmt: skip
def test_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        fastcl.infonce(torch.ones(3, 4), torch.ones(3, 4), **options)


@pytest.mark.parametrize("loss", ["mine", "mine_plus", "debiased_infonce"])
def test_a_mean_over_negatives_takes_no_cap(loss: str) -> None:
    with pytest.raises(ValueError, match=r"cap.*averages"):
        getattr(fastcl, loss)(torch.eye(3), torch.eye(3), cap=0.5)


def test_cap_of_two_numbers() -> None:
    # One query (1, 0), its positive at a cosine of 0.8; negatives at 1, 0.6 and 0, T = 1.
    query, positive = torch.tensor([[1.0, 0.0]], dtype=F64), torch.tensor([[0.8, 0.6]], dtype=F64)
    keys = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]], dtype=F64, requires_grad=True)

    def negatives(cap: Any) -> list[float]:
        """Which are left: those that have a gradient."""
        (grad,) = torch.autograd.grad(fastcl.dcl(query, positive, keys, 1.0, normalize=False, cap=cap), keys)
        return (grad[:, 0] > 0).tolist()

    assert negatives(None) == [True, True, True]
    assert negatives(lambda similarity: similarity + 0.1) == [False, True, True]
    assert negatives(lambda similarity: similarity + 0.3) == [True, True, True]
    assert negatives(lambda similarity: 0.5 * similarity) == [False, False, True]
    assert negatives(0.5) == [False, False, True]
    assert negatives(torch.tensor([0.9])) == [False, True, True]
    assert fastcl.infonce(query, positive, keys, cap=-1.0).item() == 0  # a row that has lost all of them
    loss = fastcl.infonce(query, positive, keys, 1.0, cap=0.7)
    assert loss.item() == pytest.approx(math.log(math.exp(0.8) + math.exp(0.6) + 1) - 0.8)


def test_refused_by_itself() -> None:
    with pytest.raises(ValueError, match=r"hardness.*debiased_infonce"):
        fastcl.debiased_infonce(torch.eye(3), torch.eye(3), hardness=1.0)
    with pytest.raises(ValueError, match=r"margin.*below pi"):
        fastcl.arcface(4.0)
    with pytest.raises(ValueError, match=r"margin.*at least 0"):
        fastcl.cosface(-0.1)


def test_module() -> None:
    loss = fastcl.nn.InfoNCE(0.2, hardness=5.0, margin=fastcl.cosface(0.1))
    learn, _ = Batch().build()
    expected = fastcl.infonce(**learn, temperature=0.2, hardness=5.0, margin=fastcl.cosface(0.1))
    assert torch.equal(loss(**learn), expected)
    assert "hardness=5.0" in repr(loss)
    for margin in (fastcl.cosface(0.1), fastcl.arcface(0.1)):
        loss = fastcl.nn.InfoNCE(0.2, margin=margin)
        assert torch.equal(pickle.loads(pickle.dumps(loss))(**learn), loss(**learn))


def test_over_processes() -> None:
    """One rank here: the forms over ranks take the options and mean the same by them."""
    learn, _ = Batch(temperature="tensor").build()
    inputs = [x.requires_grad_() for x in learn.values()]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for options in ({"hardness": 3.0}, {"hardness": {"in_batch": 3.0}}, {"margin": fastcl.cosface(0.2)},
                        {"cap": 0.5, "hardness": 2.0}):  # fmt: skip
            plain = fastcl.infonce(**learn, **options)
            for form in (fastcl.distributed.gathered, fastcl.distributed.ring):
                found = form(fastcl.infonce)(**learn, **options)
                torch.testing.assert_close(found, plain)
                pairs = (torch.autograd.grad(x, inputs, retain_graph=True) for x in (found, plain))
                torch.testing.assert_close(*pairs)
    finally:
        dist.destroy_process_group()


@given(batch=batches())
def test_label_smoothing_and_z_loss_equal_the_twin(batch: Batch) -> None:
    assert_family_equals_twin("infonce", batch, {"label_smoothing": 0.2, "z_loss": 0.01})


def test_smoothing_by_hand_and_where_it_is_refused() -> None:
    x = torch.eye(2, dtype=torch.float64)
    # Logits 2 and 0 of two columns: 0.75 of the target on the first, a quarter on the second.
    loss = fastcl.infonce(x, x, temperature=0.5, label_smoothing=0.5)
    log_p = torch.tensor([2.0, 0.0], dtype=torch.float64).log_softmax(0)
    assert loss.item() == pytest.approx(-(0.75 * log_p[0] + 0.25 * log_p[1]).item())
    for options, message in (
        ({"hardness": 1.0}, "label_smoothing: expected 0 with hardness"),
        ({"cap": 0.5}, "cap: expected none with a loss that averages"),
    ):
        with pytest.raises(ValueError, match=message):
            fastcl.infonce(x, x, label_smoothing=0.1, **options)
    with pytest.raises(ValueError, match="label_smoothing: expected a finite number from 0 to 1, got 2"):
        fastcl.infonce(x, x, label_smoothing=2)
    with pytest.raises(TypeError, match="z_loss: expected a number, got str"):
        fastcl.infonce(x, x, z_loss="a")
