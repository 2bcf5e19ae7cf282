"""Sampled and full softmax against their twins, against torch's own cross-entropy, and what they refuse."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from problems import BF16, DTYPES, F32, F64, Batch, batches
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from twins import assert_equals_twin, value_and_gradients

import fastcl
from fastcl import ops_autograd

pytestmark = pytest.mark.usefixtures("one_thread")


def _problem(
    n: int = 6, v: int = 9, d: int = 4, dtype: torch.dtype = F64, temperature: str = "tensor", bias: bool = True,
    ignored: int = 1, seed: int = 0,
) -> tuple[dict[str, Tensor], dict[str, Any]]:  # fmt: skip
    """A linear_cross_entropy whose targets are likely: queries lie near the target's row; first rows are ignored."""
    g = torch.Generator().manual_seed(seed)
    wide = F64 if dtype == F64 else F32
    table = torch.randn(v, d, generator=g, dtype=F64) * 2 / d**0.5
    target = torch.randint(v, (n,), generator=g)
    query = table[target] + torch.randn(n, d, generator=g, dtype=F64) / d**0.5
    learn = {"input": query.to(dtype), "linear_weight": table.to(dtype)}
    if bias:
        learn["linear_bias"] = torch.randn(v, generator=g, dtype=F64).to(wide)
    rest: dict[str, Any] = {"target": target.masked_fill(torch.arange(n) < ignored, -100), "temperature": 0.4}
    if temperature != "float":
        rows = 0.3 + torch.rand(n, generator=g, dtype=F64)
        learn["temperature"] = (rows if temperature == "rows" else rows[0]).to(wide)
        del rest["temperature"]
    return learn, rest


@given(
    n=st.sampled_from([1, 2, 9, 33]),
    v=st.sampled_from([1, 2, 31, 65]),
    d=st.sampled_from([1, 6, 17, 64]),
    dtype=st.sampled_from(DTYPES),
    temperature=st.sampled_from(["float", "tensor", "rows"]),
    bias=st.booleans(),
    ignored=st.sampled_from([0, 1, 5]),
    weighted=st.booleans(),
    class_weighted=st.booleans(),
    smoothing=st.sampled_from([0.0, 0.1]),
    margin=st.sampled_from([None, fastcl.cosface(0.3)]),
    z_loss=st.sampled_from([0.0, 0.01]),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    seed=st.integers(0, 1000),
)
def test_linear_cross_entropy_equals_the_twin(
    n: int, v: int, d: int, dtype: torch.dtype, temperature: str, bias: bool, ignored: int, weighted: bool,
    class_weighted: bool, smoothing: float, margin: Any, z_loss: float, reduction: str, seed: int,
) -> None:  # fmt: skip
    learn, rest = _problem(n, v, d, dtype, temperature, bias, ignored, seed)
    rest |= {"margin": None if smoothing else margin, "z_loss": z_loss}
    if weighted:
        learn["row_weight"] = torch.rand(n, generator=torch.Generator().manual_seed(seed)) * 3
    rest["label_smoothing"] = smoothing
    if class_weighted:
        rest["weight"] = 0.5 + torch.rand(v, generator=torch.Generator().manual_seed(seed))
    longest = [learn[name].double().norm(dim=1).max().item() for name in ("input", "linear_weight")]
    assert_equals_twin("linear_cross_entropy", learn, {**rest, "reduction": reduction}, longest[0] * longest[1] / 0.3)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weight"])
def test_linear_cross_entropy_is_torchs(reduction: str, smoothing: float, weighted: bool) -> None:
    learn, rest = _problem(n=20)
    weight = torch.rand(9, dtype=F64, generator=torch.Generator().manual_seed(0)) if weighted else None
    options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing, "weight": weight}

    def theirs(target: Tensor, temperature: Tensor, **x: Tensor) -> Tensor:
        logits = x["input"] @ x["linear_weight"].T / temperature + x["linear_bias"]
        return F.cross_entropy(logits, target, weight=weight, label_smoothing=smoothing, reduction=reduction)

    ours = value_and_gradients(fastcl.linear_cross_entropy, learn, {**rest, **options})
    torch.testing.assert_close(ours, value_and_gradients(theirs, learn, rest), rtol=1e-11, atol=1e-12)
    # Another index to ignore: -100 is then out of range.
    target = rest["target"].masked_fill(rest["target"] == -100, -1)
    learn = {name: x.requires_grad_() for name, x in learn.items()}
    again = fastcl.linear_cross_entropy(**learn, target=target, ignore_index=-1, **options)
    torch.testing.assert_close(again, ours["value"])


@pytest.mark.parametrize("temperature", ["tensor", "rows"])
def test_linear_cross_entropy_gradcheck(temperature: str) -> None:
    learn, rest = _problem(4, 5, 3, temperature=temperature)
    learn["row_weight"] = torch.rand(4, dtype=F64, generator=torch.Generator().manual_seed(0))
    names = list(learn)

    def call(*args: Tensor) -> Tensor:
        return fastcl.linear_cross_entropy(**dict(zip(names, args, strict=True)), **rest)

    inputs = [x.requires_grad_() for x in learn.values()]
    assert torch.autograd.gradcheck(call, inputs)
    assert torch.autograd.gradgradcheck(call, inputs)


def test_label_smoothing_and_class_weights_gradcheck() -> None:
    learn, rest = _problem(4, 5, 3, temperature="rows")
    options = {"label_smoothing": 0.2, "weight": torch.tensor([1.0, 0.5, 2.0, 3.0, 0.0], dtype=F64)}

    def call(*args: Tensor) -> Tensor:
        return fastcl.linear_cross_entropy(**dict(zip(learn, args, strict=True)), **rest, **options)

    inputs = [x.requires_grad_() for x in learn.values()]
    assert torch.autograd.gradcheck(call, inputs)
    assert torch.autograd.gradgradcheck(call, inputs)


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="this torch has no linear_cross_entropy")
def test_a_call_of_torchs_is_a_call_of_ours() -> None:
    learn, rest = _problem(n=20, temperature="float")
    options = {"ignore_index": None, "label_smoothing": 0.1, "weight": torch.rand(9, dtype=F64)}
    given = {**learn, "target": rest["target"], **options}
    torch.testing.assert_close(fastcl.linear_cross_entropy(**given), F.linear_cross_entropy(**given))


def test_label_smoothing_stores_no_logits() -> None:
    """No tensor of as many numbers as there are logits is made by torch; what the op keeps is tested elsewhere."""
    n, v = 700, 900
    input, table = torch.randn(n, 4, requires_grad=True), torch.randn(v, 4, requires_grad=True)
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            found = func(*args, **(kwargs or {}))
            if func is ops_autograd.packed_forward_op:  # what backward reads: test_packed has its exact size
                found, whole = found[:2], found
            else:
                whole = found
            for x in found if isinstance(found, (tuple, list)) else [found]:
                largest = max(largest, x.numel() if isinstance(x, Tensor) else 0)
            return whole

    with Watch():
        options = {"label_smoothing": 0.1, "weight": torch.rand(v)}
        fastcl.linear_cross_entropy(input, table, torch.zeros(n, dtype=torch.int64), **options).backward()
    assert 0 < largest <= v * 4


def test_old_names_work_with_one_warning() -> None:
    learn, rest = _problem(n=20)
    row_weight = torch.rand(20)
    new = fastcl.linear_cross_entropy(**learn, **rest, row_weight=row_weight)
    old = {"input": "query", "linear_weight": "table", "linear_bias": "bias"}
    by_old_names = {old.get(name, name): x for name, x in learn.items()}
    message = r"expected input \(not query\), linear_weight \(not table\), .*row_weight \(not weight\)"
    with pytest.warns(DeprecationWarning, match=message) as told:
        assert torch.equal(fastcl.linear_cross_entropy(**by_old_names, **rest, weight=row_weight), new)
    assert [warning.filename for warning in told] == [__file__]
    names = list(inspect.signature(fastcl.linear_cross_entropy).parameters)
    assert names[:4] == ["input", "linear_weight", "target", "linear_bias"]


def test_ignored_rows_and_weights() -> None:
    query, table = torch.tensor([[1.0], [2.0], [3.0]], dtype=F64), torch.tensor([[1.0], [0.0]], dtype=F64)
    target = torch.tensor([0, -100, 1])
    losses = [math.log1p(math.exp(-1)), 0.0, math.log1p(math.exp(3))]
    none = fastcl.linear_cross_entropy(query, table, target, reduction="none")
    torch.testing.assert_close(none, torch.tensor(losses, dtype=F64))
    assert fastcl.linear_cross_entropy(query, table, target).item() == pytest.approx(sum(losses) / 2)
    # The mean divides by the rows that are not ignored, whatever their weights.
    weight = torch.tensor([2.0, 5.0, 4.0])
    weighted = fastcl.linear_cross_entropy(query, table, target, row_weight=weight)
    assert weighted.item() == pytest.approx((2 * losses[0] + 4 * losses[2]) / 2)


def test_nothing_to_learn_is_zero_not_nan() -> None:
    query, table = torch.randn(3, 2, requires_grad=True), torch.randn(4, 2, requires_grad=True)
    ignored = fastcl.linear_cross_entropy(query, table, torch.full((3,), -100))
    alone = fastcl.linear_cross_entropy(query, table[:1], torch.zeros(3, dtype=torch.int64))  # one class: certain
    for loss in (ignored, alone):
        assert loss.item() == 0
        for g in torch.autograd.grad(loss, [query, table]):
            assert torch.equal(g, torch.zeros_like(g))


def test_linear_cross_entropy_at_convergence() -> None:
    # The truth is 2 e^-40: cross-entropy in float32 gives 0 and no gradient.
    query = torch.tensor([[40.0]], requires_grad=True)
    loss = fastcl.linear_cross_entropy(query, torch.tensor([[1.0], [0.0], [0.0]]), torch.tensor([0]))
    assert loss.item() == pytest.approx(2 * math.exp(-40), rel=1e-5)
    assert torch.autograd.grad(loss, query)[0].item() == pytest.approx(-2 * math.exp(-40), rel=1e-5)


def test_linear_cross_entropy_compiles_and_maps() -> None:
    learn, rest = _problem(dtype=F32)
    torch._dynamo.reset()
    compiled = torch.compile(fastcl.linear_cross_entropy, fullgraph=True, backend="aot_eager")
    ours = value_and_gradients(fastcl.linear_cross_entropy, learn, rest)
    torch.testing.assert_close(value_and_gradients(compiled, learn, rest), ours)

    def call(query: Tensor, target: Tensor) -> Tensor:
        return fastcl.linear_cross_entropy(query, learn["linear_weight"], target)

    queries, targets = learn["input"].view(2, 3, -1), rest["target"].view(2, 3)
    mapped = torch.vmap(torch.func.grad(call))(queries, targets)
    single = [torch.func.grad(call)(q, t) for q, t in zip(queries, targets, strict=True)]
    torch.testing.assert_close(mapped, torch.stack(single))


@given(batch=batches().filter(lambda b: not b.symmetric))
def test_sampled_softmax_equals_the_twin(batch: Batch) -> None:
    learn, rest = batch.build()
    rest = {name: x for name, x in rest.items() if name not in ("normalize", "symmetric")}
    longest = [learn[name].double().norm(dim=-1).max().item() for name in ("query", "positive_key", "negative_keys")
               if name in learn]  # fmt: skip
    logit = longest[0] * max(longest) / 0.1
    # Attraction and repulsion cancel: the value is the small difference of logits, a gradient that of keys / T.
    assert_equals_twin("sampled_softmax", learn, rest, logit, floor=max(longest) / 0.1)


def test_log_q_is_subtracted() -> None:
    """Every item is drawn q_v times with log q_v given, the targets once: that is full softmax, each item once."""
    table = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=F64)
    query, target = table[:2], torch.tensor([0, 1])
    q = torch.tensor([1, 1, 7, 3, 2, 5])
    drawn = torch.arange(6).repeat_interleave(q)
    log_q = q.to(F64).log()
    options: dict[str, Any] = {"ids": target, "negative_ids": drawn, "reduction": "none"}
    corrected = fastcl.sampled_softmax(
        query, table[target], table[drawn], log_q=log_q[target], negative_log_q=log_q[drawn], **options
    )
    full = fastcl.linear_cross_entropy(query, table, target, reduction="none")
    torch.testing.assert_close(corrected, full, rtol=1e-12, atol=1e-12)
    uncorrected = fastcl.sampled_softmax(query, table[target], table[drawn], **options)
    torch.testing.assert_close(
        uncorrected, fastcl.infonce(query, table[target], table[drawn], 1.0, normalize=False, **options)
    )
    assert (uncorrected > 1.3 * full).all()


def test_sampled_softmax_gradcheck() -> None:
    learn, rest = Batch(4, 3, F64, "shared", True, "partial", ids=True, log_q=True, temperature="rows").build()
    learn["weight"] = torch.rand(4, dtype=F64, generator=torch.Generator().manual_seed(0))
    names = list(learn)
    del rest["normalize"], rest["symmetric"]

    def call(*args: Tensor) -> Tensor:
        return fastcl.sampled_softmax(**dict(zip(names, args, strict=True)), **rest)

    assert torch.autograd.gradcheck(call, [x.requires_grad_() for x in learn.values()])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"input": torch.ones(4)}, ValueError, r"input.*\[4\]"),
        ({"input": torch.ones(3, 4).long()}, TypeError, "input.*int64"),
        ({"input": None}, TypeError, "input.*NoneType"),
        ({"linear_weight": torch.ones(5, 3)}, ValueError, r"linear_weight.*\[C, 4\].*\[5, 3\]"),
        ({"linear_weight": torch.ones(0, 4)}, ValueError, r"linear_weight.*C >= 1.*\[0, 4\]"),
        ({"linear_weight": torch.ones(5, 4, device="meta")}, ValueError, "linear_weight.*cpu.*meta"),
        ({"target": torch.zeros(3)}, TypeError, "target.*integer.*float32"),
        ({"target": torch.zeros(2).long()}, ValueError, r"target.*\[3\].*\[2\]"),
        ({"target": torch.tensor([0, 5, 1])}, ValueError, r"target.*\[0, 5\).*5"),
        ({"target": torch.tensor([0, -1, 1])}, ValueError, r"target.*\[0, 5\).*-1"),
        ({"linear_bias": torch.ones(4)}, ValueError, r"linear_bias.*\[5\].*\[4\]"),
        ({"linear_bias": torch.ones(5).long()}, TypeError, "linear_bias.*int64"),
        ({"temperature": 0.0}, ValueError, "temperature.*0"),
        ({"temperature": torch.ones(2)}, ValueError, r"temperature.*\[2\]"),
        ({"ignore_index": 1.0}, TypeError, "ignore_index.*float"),
        ({"reduction": "max"}, ValueError, "reduction.*max"),
        ({"row_weight": torch.ones(5)}, ValueError, r"row_weight.*\[3\].*\[5\]"),
        ({"weight": torch.ones(3)}, ValueError, r"weight.*\[5\], one a class.*\[3\]; one a row is row_weight"),
        ({"weight": torch.ones(4)}, ValueError, r"weight.*\[5\].*\[4\]"),
        ({"weight": [1.0]}, TypeError, "weight.*list"),
        ({"label_smoothing": 1.5}, ValueError, "label_smoothing.*from 0 to 1.*1.5"),
        ({"label_smoothing": "0.1"}, TypeError, "label_smoothing.*str"),
        ({"row_weight": torch.ones(3).long()}, TypeError, "weight.*int64"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_linear_cross_entropy_refuses(change: dict[str, Any], error: type[Exception], message: str) -> None:
    valid = {"input": torch.ones(3, 4), "linear_weight": torch.ones(5, 4), "target": torch.tensor([0, 1, 4])}
    fastcl.linear_cross_entropy(**valid)
    with pytest.raises(error, match=message):
        fastcl.linear_cross_entropy(**{**valid, **change})


def test_sampled_softmax_refuses_what_infonce_does() -> None:
    with pytest.raises(ValueError, match="log_q"):
        fastcl.sampled_softmax(torch.ones(3, 4), torch.ones(3, 4), torch.ones(5, 4), log_q=torch.zeros(3))
    with pytest.raises(TypeError, match="normalize"):
        fastcl.sampled_softmax(torch.ones(3, 4), torch.ones(3, 4), normalize=True)


def test_16_bit_loss_is_float32() -> None:
    learn, rest = _problem(dtype=BF16, bias=False, temperature="float")
    assert fastcl.linear_cross_entropy(**learn, **rest).dtype == F32
