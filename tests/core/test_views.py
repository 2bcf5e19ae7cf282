"""Losses over views and classes against their twins, numbers worked out by hand, and the formulas of other packages."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from problems import DTYPES, F32, F64
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from twins import assert_equals_twin, value_and_gradients

import fastcl
from fastcl import ops_autograd, reference

pytestmark = pytest.mark.usefixtures("one_thread")


def _views(n: int, d: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=g, dtype=F64)
    return x.to(dtype), (x + 0.7 * torch.randn(n, d, generator=g, dtype=F64)).to(dtype)


def _drawn(f: Callable[..., None]) -> Callable[..., None]:
    return given(
        n=st.sampled_from([2, 3, 9, 33]),
        d=st.sampled_from([1, 6, 17, 64]),
        dtype=st.sampled_from(DTYPES),
        temperature=st.sampled_from(["float", "tensor", "rows"]),
        weighted=st.booleans(),
        reduction=st.sampled_from(["mean", "sum", "none"]),
        seed=st.integers(0, 1000),
    )(f)


def _options(rows: int, dtype: torch.dtype, temperature: str, weighted: bool, seed: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    wide = F64 if dtype == F64 else F32
    learn = {}
    if temperature != "float":
        value = 0.1 + 0.3 * torch.rand(rows, generator=g, dtype=F64)
        learn["temperature"] = (value if temperature == "rows" else value[0]).to(wide)
    if weighted:
        learn["weight"] = 2 * torch.rand(rows, generator=g, dtype=F64).to(wide)
    return learn


def _floor(learn: dict[str, Tensor]) -> float:
    """Attraction and repulsion cancel; each is a gradient of cosines / T, as large as 1 / (T length)."""
    return 10.0 / min(x.double().norm(dim=1).min().item() for x in learn.values() if x.ndim == 2)


@_drawn
def test_nt_xent_equals_the_twin(
    n: int, d: int, dtype: torch.dtype, temperature: str, weighted: bool, reduction: str, seed: int
) -> None:
    view1, view2 = _views(n, d, dtype, seed)
    learn = {"view1": view1, "view2": view2, **_options(2 * n, dtype, temperature, weighted, seed)}
    assert_equals_twin("nt_xent", learn, {"reduction": reduction}, 10.0, _floor(learn))


@_drawn
def test_supcon_equals_the_twin(
    n: int, d: int, dtype: torch.dtype, temperature: str, weighted: bool, reduction: str, seed: int
) -> None:
    learn = {"features": _views(n, d, dtype, seed)[0], **_options(n, dtype, temperature, weighted, seed)}
    # Few and many classes, labels far apart and negative, some classes of one sample only.
    labels = torch.randint(-n // 3, n // 3 + 1, (n,), generator=torch.Generator().manual_seed(seed)) * 10**12
    assert_equals_twin("supcon", learn, {"labels": labels, "reduction": reduction}, 15.0, _floor(learn))


@given(
    n=st.sampled_from([1, 2, 9, 33]),
    d=st.sampled_from([1, 6, 64]),
    dtype=st.sampled_from(DTYPES),
    alpha=st.sampled_from([0.5, 1, 2, 3.5]),
    weighted=st.booleans(),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    seed=st.integers(0, 1000),
)
def test_alignment_equals_the_twin(
    n: int, d: int, dtype: torch.dtype, alpha: float, weighted: bool, reduction: str, seed: int
) -> None:
    x, y = _views(n, d, dtype, seed)
    learn = {"x": x, "y": y + 0.01, **_options(n, dtype, "float", weighted, seed)}
    assert_equals_twin("alignment", learn, {"alpha": alpha, "reduction": reduction}, 1.0, 0.0)


@given(
    n=st.sampled_from([2, 3, 9, 33, 65]),
    d=st.sampled_from([1, 6, 64]),
    dtype=st.sampled_from(DTYPES),
    t=st.sampled_from([0.1, 1, 2.0]),
    offset=st.sampled_from([0.0, 10.0]),
    seed=st.integers(0, 1000),
)
def test_uniformity_equals_the_twin(n: int, d: int, dtype: torch.dtype, t: float, offset: float, seed: int) -> None:
    x = (F.normalize(_views(n, d, F64, seed)[0], dim=1) + offset).to(dtype)
    assert_equals_twin("uniformity", {"x": x}, {"t": t}, 2 * t, 4 * t)


@pytest.mark.parametrize("loss", ["nt_xent", "supcon", "alignment", "uniformity"])
def test_gradcheck(loss: str) -> None:
    view1, view2 = _views(4, 3, F64, 0)
    options = _options(8 if loss == "nt_xent" else 4, F64, "rows", True, 0)
    labels = torch.tensor([7, 3, 7, 7])
    calls: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {
        "nt_xent": (lambda a, b, t, w: fastcl.nt_xent(a, b, t, weight=w), [view1, view2, *options.values()]),
        "supcon": (lambda a, t, w: fastcl.supcon(a, labels, t, weight=w), [view1, *options.values()]),
        "alignment": (lambda a, b, w: fastcl.alignment(a, b, 1.5, weight=w), [view1, view2, options["weight"]]),
        "uniformity": (fastcl.uniformity, [view1]),
    }
    function, inputs = calls[loss]
    assert torch.autograd.gradcheck(function, [x.requires_grad_() for x in inputs])
    assert torch.autograd.gradgradcheck(function, inputs)


def test_nt_xent_at_convergence_keeps_its_gradient() -> None:
    # Two opposite samples, T = 0.05: the loss is log(1 + 2 e^-40), which cross-entropy in float32 rounds to 0.
    view = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    assert fastcl.nt_xent(view, view, 0.05).item() == pytest.approx(2 * math.exp(-40), rel=1e-5)


def test_supcon_anchors_without_positives() -> None:
    features = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    loss = fastcl.supcon(features, torch.arange(5))
    assert loss.item() == 0
    assert torch.equal(torch.autograd.grad(loss, features)[0], torch.zeros(5, 3))
    labels = torch.tensor([1, 2, 1, 3, 4])
    rows = fastcl.supcon(features, labels, reduction="none")
    assert (rows == 0).tolist() == [False, True, False, True, True]
    torch.testing.assert_close(fastcl.supcon(features, labels), rows.sum() / 2)
    weight = torch.tensor([3.0, 9.0, 5.0, 9.0, 9.0])
    torch.testing.assert_close(fastcl.supcon(features, labels, weight=weight), (3 * rows[0] + 5 * rows[2]) / 2)


def test_supcon_of_two_views_is_nt_xent() -> None:
    view1, view2 = _views(9, 6, F64, 0)
    both, labels = torch.cat([view1, view2]), torch.arange(9).repeat(2)
    torch.testing.assert_close(fastcl.supcon(both, labels, 0.3), fastcl.nt_xent(view1, view2, 0.3))


@pytest.mark.parametrize("sizes", [(2,) * 64, (2, 3) * 26, (2, 1, 5) * 16], ids=["pairs", "pairs and triples", "mixed"])
@pytest.mark.parametrize("temperature", [0.07, 0.05])
def test_supcon_near_convergence(temperature: float, sizes: tuple[int, ...]) -> None:
    """Classes of two have losses that go to 0; those of more add at least their log, and are told apart by row."""
    labels = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    for seed in range(3):
        g = torch.Generator().manual_seed(seed)
        centres = F.normalize(torch.randn(len(sizes), 128, generator=g), dim=1)
        features = centres[labels] + 0.1 / 128**0.5 * torch.randn(len(labels), 128, generator=g)
        found = []
        for loss, dtype in ((fastcl.supcon, F32), (reference.supcon, F64)):
            x = features.to(dtype).requires_grad_()
            rows = loss(x, labels, temperature, reduction="none")
            pairs = torch.tensor([sizes[c] == 2 for c in labels.tolist()])
            found.append((rows.detach().double(), torch.autograd.grad(rows[pairs].mean(), x)[0].double()))
        (rows, grad), (true_rows, true_grad) = found
        assert true_rows[pairs].mean() < 1e-3
        # The rounding of logits of size 1/T, relative to the loss itself.
        limit = 8 / temperature * 2.0**-24
        assert ((rows - true_rows).abs() <= limit * true_rows.clamp(min=1e-30)).all()
        assert (grad - true_grad).norm() <= limit * true_grad.norm()


def test_one_sample_has_nothing_to_contrast_with() -> None:
    view = torch.randn(1, 4, requires_grad=True)
    for loss in (fastcl.nt_xent(view, view.detach() + 1), fastcl.supcon(view, torch.tensor([3]))):
        assert loss.item() == 0
        assert torch.equal(torch.autograd.grad(loss, view)[0], torch.zeros(1, 4))


@pytest.mark.parametrize("alpha", [0.5, 1, 2])
def test_alignment_where_pairs_meet(alpha: float) -> None:
    x = torch.tensor([[1.0, 2.0], [0.0, 0.0]], requires_grad=True)
    loss = fastcl.alignment(x, torch.tensor([[1.0, 2.0], [3.0, 4.0]]), alpha, reduction="none")
    torch.testing.assert_close(loss, torch.tensor([0.0, 5.0**alpha]))
    slope = alpha * 5 ** (alpha - 1)
    torch.testing.assert_close(
        torch.autograd.grad(loss.sum(), x)[0], torch.tensor([[0.0, 0.0], [-0.6 * slope, -0.8 * slope]])
    )


def test_uniformity_far_from_the_origin() -> None:
    # Inner products of 1e8 hide distances of 1 from float32, unless the common offset is taken off.
    x = torch.eye(4)
    there = fastcl.uniformity(x + 1e4)
    torch.testing.assert_close(there, torch.tensor(-4.0), rtol=1e-3, atol=0)
    torch.testing.assert_close(fastcl.uniformity(x.expand(2, 4, 4)[0] * 0), torch.tensor(0.0))


@pytest.mark.parametrize("n", [3, 17])
def test_symmetric_infonce_is_the_clip_loss(n: int) -> None:
    """open_clip's ClipLoss, written out: a learnable logit_scale = exp(parameter), labels on the diagonal."""
    image, text = _views(n, 8, F64, 1)

    def ours(image: Tensor, text: Tensor, parameter: Tensor) -> Tensor:
        return fastcl.infonce(image, text, temperature=torch.exp(-parameter), symmetric=True)

    def theirs(image: Tensor, text: Tensor, parameter: Tensor) -> Tensor:
        image_features, text_features = F.normalize(image, dim=-1), F.normalize(text, dim=-1)
        logits_per_image = parameter.exp() * image_features @ text_features.T
        labels = torch.arange(len(image))
        return (F.cross_entropy(logits_per_image, labels) + F.cross_entropy(logits_per_image.T, labels)) / 2

    learn = {"image": image, "text": text, "parameter": torch.tensor(math.log(1 / 0.07), dtype=F64)}
    torch.testing.assert_close(
        value_and_gradients(ours, learn, {}), value_and_gradients(theirs, learn, {}), rtol=1e-10, atol=1e-12
    )


class _Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that operators returned, but for the last one of the packed op."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        # What backward reads of the packed op is one tensor; test_packed has its exact size.
        looked = out[:2] if func is ops_autograd.packed_forward_op else out
        self.numel = max(self.numel, *(x.numel() for x in tree_leaves(looked) if isinstance(x, Tensor)), 0)
        return out


def test_all_pairs_are_never_stored() -> None:
    x = torch.randn(500, 4, requires_grad=True)
    labels = torch.arange(500) % 7
    calls = {
        "nt_xent": (fastcl.nt_xent, x, x.flip(0)),
        "supcon": (fastcl.supcon, x, labels),
        "uniformity": (fastcl.uniformity, x),
        "linear_cross_entropy": (fastcl.linear_cross_entropy, x, x, labels),
    }
    for name, (function, *inputs) in calls.items():
        with _Largest() as ours:
            function(*inputs).backward()
        with _Largest() as textbook:
            getattr(reference, name)(*inputs).backward()
        assert ours.numel <= 1000 * 4, name
        assert textbook.numel >= 500 * 499 / 2, name


def test_compile_without_a_graph_break_and_map() -> None:
    view1, view2 = _views(6, 4, F32, 0)
    labels = torch.tensor([0, 0, 1, 1, 2, 1])

    def call(view1: Tensor, view2: Tensor) -> Tensor:
        return fastcl.nt_xent(view1, view2) + fastcl.supcon(view1, labels) + fastcl.uniformity(view2)

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    learn = {"view1": view1, "view2": view2}
    torch.testing.assert_close(value_and_gradients(compiled, learn, {}), value_and_gradients(call, learn, {}))
    pairs = torch.stack([view1, view2]), torch.stack([view2, view1])
    mapped = torch.vmap(torch.func.grad(call))(*pairs)
    torch.testing.assert_close(mapped, torch.stack([torch.func.grad(call)(a, b) for a, b in zip(*pairs, strict=True)]))


X = torch.ones(3, 4)
LABELS = torch.tensor([1, 1, 2])


@pytest.mark.parametrize(
    ("loss", "change", "error", "message"),
    [
        ("nt_xent", {"view1": X.long()}, TypeError, "view1.*int64"),
        ("nt_xent", {"view2": torch.ones(2, 4)}, ValueError, r"view2.*\[3, 4\].*\[2, 4\]"),
        ("nt_xent", {"view2": torch.ones(3, 4, device="meta")}, ValueError, "view2.*cpu.*meta"),
        ("nt_xent", {"temperature": -1.0}, ValueError, "temperature.*-1"),
        ("nt_xent", {"reduction": "max"}, ValueError, "reduction.*max"),
        ("nt_xent", {"weight": torch.ones(3)}, ValueError, r"weight.*\[6\].*\[3\]"),
        ("supcon", {"features": torch.ones(3)}, ValueError, r"features.*\[N, D\].*\[3\]"),
        ("supcon", {"labels": torch.ones(3)}, TypeError, "labels.*integer.*float32"),
        ("supcon", {"labels": LABELS[:2]}, ValueError, r"labels.*\[3\].*\[2\]"),
        ("supcon", {"temperature": torch.ones(2)}, ValueError, r"temperature.*\[2\]"),
        ("supcon", {"reduction": "max"}, ValueError, "reduction.*max"),
        ("supcon", {"weight": torch.ones(2)}, ValueError, r"weight.*\[3\].*\[2\]"),
        ("alignment", {"x": [1.0]}, TypeError, "x.*list"),
        ("alignment", {"y": torch.ones(3, 5)}, ValueError, r"y.*\[3, 4\].*\[3, 5\]"),
        ("alignment", {"alpha": 0}, ValueError, "alpha.*0"),
        ("alignment", {"alpha": "2"}, TypeError, "alpha.*str"),
        ("alignment", {"reduction": "max"}, ValueError, "reduction.*max"),
        ("alignment", {"weight": torch.ones(2)}, ValueError, r"weight.*\[3\].*\[2\]"),
        ("uniformity", {"x": torch.ones(1, 4)}, ValueError, r"x.*N >= 2.*\[1, 4\]"),
        ("uniformity", {"x": X.int()}, TypeError, "x.*int32"),
        ("uniformity", {"t": math.inf}, ValueError, "t.*inf"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_refused(loss: str, change: dict[str, Any], error: type[Exception], message: str) -> None:
    valid: dict[str, dict[str, Any]] = {
        "nt_xent": {"view1": X, "view2": X},
        "supcon": {"features": X, "labels": LABELS},
        "alignment": {"x": X, "y": X},
        "uniformity": {"x": X},
    }
    getattr(fastcl, loss)(**valid[loss])
    with pytest.raises(error, match=message):
        getattr(fastcl, loss)(**{**valid[loss], **change})
