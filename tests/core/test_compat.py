"""docs/guide/migration.md, row by row: our code there gives the loss and the gradients of the package it replaces.

Against the package itself where it is small enough to install (the `compat` extra), against its formula otherwise.
What fastcl's losses are by themselves is tested in the other files.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastcl
import fastcl.nn
from fastcl.compat.lightly import NTXentLoss

pytestmark = pytest.mark.usefixtures("one_thread")

DOCUMENT = Path(__file__).parents[2] / "docs" / "guide" / "migration.md"
N, D = 12, 7


def _table() -> dict[tuple[str, str], str]:
    """(package, their call as in the document) -> our code."""
    rows = [line.split(" | ") for line in DOCUMENT.read_text().splitlines() if line.startswith("| ")][2:]
    return {
        (package.removeprefix("| "), theirs): "\n".join(re.findall("`([^`]+)`", ours)) for package, theirs, ours in rows
    }


TABLE = _table()


def _ours(package: str, theirs: str, **names: Any) -> Tensor:
    (code,) = [c for (p, call), c in TABLE.items() if p == package and call.replace("`", "") == theirs]
    scope = {"torch": torch, "F": F, "fastcl": fastcl, **names}
    exec(compile(code, DOCUMENT.name, "exec"), scope)
    return scope["loss"]


def _assert_same(ours: Tensor, theirs: Tensor, *inputs: Tensor) -> None:
    """Values and gradients to 1e-5 of the size of each."""
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    upstream = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1))
    for a, b in zip(
        torch.autograd.grad(ours, inputs, upstream, retain_graph=True),
        torch.autograd.grad(theirs, inputs, upstream, retain_graph=True),
        strict=True,
    ):
        assert b.abs().max() > 1e-3, "no gradient to compare"
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * b.abs().max().item())


def _pairs(*shapes: tuple[int, ...], seed: int = 0, unit: bool = False) -> list[Tensor]:
    """Learning rows of the given shapes, the second near the first, as positives are."""
    g = torch.Generator().manual_seed(seed)
    rows = [torch.randn(*shape, generator=g) for shape in shapes]
    rows[1] = rows[0] + 0.8 * rows[1]
    return [(F.normalize(x, dim=-1) if unit else x).requires_grad_() for x in rows]


@pytest.fixture(scope="module")
def lightly() -> Any:
    pytest.importorskip("lightly", reason="needs the compat extra (lightly)")
    library = torch.library.Library("torchvision", "FRAGMENT")
    try:
        pytest.importorskip("torchvision", reason="lightly itself needs torchvision")
    except RuntimeError:
        # Its compiled part is for another build of torch (with CUDA). All that its import asks of it are two schemas,
        # and lightly's losses use none of it.
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return pytest.importorskip("lightly.loss", reason="needs what lightly itself needs")


@pytest.fixture(scope="module")
def metric_learning() -> Any:
    return pytest.importorskip("pytorch_metric_learning.losses", reason="needs the compat extra (metric learning)")


@pytest.fixture(scope="module")
def info_nce() -> Any:
    return pytest.importorskip("info_nce", reason="needs the compat extra (info-nce-pytorch)")


def test_every_row_of_the_document_is_tested() -> None:
    source = Path(__file__).read_text()
    assert len(TABLE) == 20
    assert [call for _, call in TABLE if call.split("`")[1] not in source] == []


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("mode", [None, "unpaired", "paired"])
@pytest.mark.parametrize("temperature", [0.05, 0.1, 1.0])
def test_info_nce_takes_the_same_arguments(info_nce: Any, mode: str | None, reduction: str, temperature: float) -> None:
    inputs = _pairs((N, D), (N, D), *([(5, D)] if mode == "unpaired" else [(N, 3, D)] if mode == "paired" else []))
    options = {"temperature": temperature, "reduction": reduction, "negative_mode": mode or "unpaired"}
    _assert_same(fastcl.infonce(*inputs, **options), info_nce.info_nce(*inputs, **options), *inputs)
    _assert_same(fastcl.nn.InfoNCE(**options)(*inputs), info_nce.InfoNCE(**options)(*inputs), *inputs)
    positional = (*inputs, None)[:3] + tuple(options.values())
    _assert_same(fastcl.infonce(*positional), info_nce.info_nce(*positional), *inputs)


def test_info_nce_rows(info_nce: Any) -> None:
    query, key, shared, private = _pairs((N, D), (N, D), (5, D), (N, 3, D))
    rows = {"query": query, "key": key, "shared": shared, "private": private}
    package = "info-nce-pytorch"
    for call, *inputs in (
        ("info_nce(query, key)", query, key),
        ("info_nce(query, key, shared)", query, key, shared),
        ('info_nce(query, key, private, negative_mode="paired")', query, key, private),
        ('InfoNCE(temperature=0.2, reduction="sum")(query, key)', query, key),
    ):
        _assert_same(_ours(package, call, **rows), eval(call, vars(info_nce).copy(), rows), *inputs)


def test_info_nce_is_exactly_zero_where_the_truth_is_not(info_nce: Any) -> None:
    query, key = torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 0.1]], requires_grad=True)
    losses = [f(query, key, torch.tensor([[0.0, 1.0]]), temperature=0.05) for f in (info_nce.info_nce, fastcl.infonce)]
    theirs, ours = ((loss.item(), torch.autograd.grad(loss, key)[0].abs().max().item()) for loss in losses)
    assert theirs == (0.0, 0.0)
    gap = 20 / 1.01**0.5
    assert ours[0] == pytest.approx(math.exp(-gap), rel=1e-5)
    assert ours[1] == pytest.approx(20 * math.exp(-gap) * 0.1 / 1.01**1.5, rel=1e-4)


@pytest.mark.parametrize(
    "call",
    [
        "NTXentLoss(temperature=0.5)(view1, view2)",
        "DCLLoss(temperature=0.1)(view1, view2)",
        "DCLWLoss(temperature=0.1, sigma=0.5)(view1, view2)",
    ],
)
@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
def test_lightly_views(lightly: Any, call: str) -> None:
    view1, view2 = _pairs((N, D), (N, D))
    rows = {"view1": view1, "view2": view2}
    _assert_same(_ours("lightly", call, **rows), eval(call, vars(lightly).copy(), rows), view1, view2)


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
def test_lightly_dclw_with_another_sigma(lightly: Any) -> None:
    view1, view2 = _pairs((N, D), (N, D))
    theirs = lightly.DCLWLoss(sigma=0.2)(view1, view2)
    ids = torch.arange(N)
    options: dict[str, Any] = {"in_batch": True, "ids": ids, "negative_ids": ids}
    options["weight_fn"] = lambda a, b: fastcl.mises_fisher_weights(a, b, sigma=0.2)
    ours = (fastcl.dclw(view1, view2, view1, **options) + fastcl.dclw(view2, view1, view2, **options)) / 2
    _assert_same(ours, theirs, view1, view2)


def test_lightly_memory_bank(lightly: Any) -> None:
    theirs = lightly.NTXentLoss(temperature=0.5, memory_bank_size=(3 * N, D))
    queue = fastcl.NegativeQueue(3 * N, D)
    queue.push(theirs.memory_bank.bank)
    for step in range(5):
        query, key = _pairs((N, D), (N, D), seed=step)
        expected = theirs(query, key)
        call = "NTXentLoss(temperature=0.5, memory_bank_size=(M, D))(query, key)"
        _assert_same(_ours("lightly", call, query=query, key=key, queue=queue), expected, query, key)


def test_lightly_drops_keys_where_the_bank_ends_and_we_do_not(lightly: Any) -> None:
    bank = lightly.NTXentLoss(memory_bank_size=(N + 4, D)).memory_bank
    queue = fastcl.NegativeQueue(N + 4, D)
    queue.push(bank.bank)
    for step in range(2):
        key = F.normalize(_pairs((N, D), (N, D), seed=step)[1].detach(), dim=1)
        bank(key, update=True)
        queue.push(key)
    lost = [row for row in key if not (bank.bank == row).all(1).any()]
    assert len(lost) == N - 4
    assert all((queue.keys == row).all(1).any() for row in key)


LABELS = torch.tensor([0, 1, 2, 0, 1, 2, 0, 0, 3, 4, 4, 5])  # classes of four, one and two


def test_metric_learning_pairs(metric_learning: Any) -> None:
    (x,) = _pairs((N, D), (N, D))[:1]
    theirs = metric_learning.NTXentLoss(temperature=0.07)(x, LABELS)
    call = "NTXentLoss(temperature=0.07)(x, labels)"
    _assert_same(_ours("pytorch-metric-learning", call, x=x, labels=LABELS), theirs, x)
    theirs = metric_learning.SupConLoss(temperature=0.1)(x, LABELS)
    call = "SupConLoss(temperature=0.1)(x, labels)"
    _assert_same(_ours("pytorch-metric-learning", call, x=x, labels=LABELS), theirs, x)


def test_metric_learning_memory(metric_learning: Any) -> None:
    # A memory that the batches do not divide, empty at first, then partly full, then wrapping.
    memory_size = 3 * N + 5
    theirs = metric_learning.CrossBatchMemory(metric_learning.NTXentLoss(temperature=0.07), D, memory_size=memory_size)
    queue = fastcl.NegativeQueue(memory_size - N, D)
    for step in range(7):
        (x,) = _pairs((N, D), (N, D), seed=step)[:1]
        labels = LABELS.roll(step)
        expected = theirs(x, labels)
        call = "CrossBatchMemory(NTXentLoss(temperature=0.07), D, memory_size=M)(x, labels)"
        _assert_same(_ours("pytorch-metric-learning", call, x=x, labels=labels, queue=queue), expected, x)


def test_metric_learning_is_stuck_where_we_go_on(metric_learning: Any) -> None:
    # A positive 200 nats below a negative. Each index twice: with one pair alone their loss answers 0.
    x = torch.tensor([[1.0, 0.0], [-1.0, 0.01], [1.0, 0.01]], requires_grad=True)
    pairs = [torch.tensor(i) for i in ([0, 0], [1, 1], [0], [2])]
    theirs = metric_learning.NTXentLoss(temperature=0.01)(x, indices_tuple=tuple(pairs))
    assert theirs.item() == pytest.approx(87.34, abs=0.01)
    assert torch.autograd.grad(theirs, x)[0].abs().max() == 0
    ours = fastcl.infonce(x[:1], x[1:2], x[2:], temperature=0.01)
    assert ours.item() == pytest.approx(200.0, rel=1e-3)
    assert torch.autograd.grad(ours, x)[0].abs().max() > 0.5


def test_supcontrast() -> None:
    # github.com/HobbitLong/SupContrast, losses.py, contrast_mode "all"; its model normalises.
    view1, view2 = _pairs((N, D), (N, D))
    features = F.normalize(torch.stack([view1, view2], 1), dim=2)
    stacked = torch.cat(torch.unbind(features, 1))
    logits = stacked @ stacked.T / 0.07
    logits = logits - logits.max(1, keepdim=True).values.detach()
    others = 1 - torch.eye(2 * N)
    same = (LABELS[:, None] == LABELS).float().repeat(2, 2) * others
    log_prob = logits - torch.log((logits.exp() * others).sum(1, keepdim=True))
    theirs = -((same * log_prob).sum(1) / same.sum(1)).mean()
    call = "SupConLoss(temperature=0.07)(torch.stack([view1, view2], 1), labels)"
    _assert_same(_ours("SupContrast", call, view1=view1, view2=view2, labels=LABELS), theirs, view1, view2)


def test_open_clip() -> None:
    # github.com/mlfoundations/open_clip, loss.py: features of length 1, logit_scale = log_scale.exp().
    query, key = _pairs((N, D), (N, D), unit=True)
    log_scale, logit_bias = nn.Parameter(torch.tensor(2.3)), nn.Parameter(torch.tensor(-5.0))
    logit_scale = log_scale.exp()
    rows = {"query": query, "key": key, "logit_scale": logit_scale, "logit_bias": logit_bias}
    logits, labels = logit_scale * query @ key.T, torch.arange(N)
    clip = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
    _assert_same(_ours("open_clip", "ClipLoss()(query, key, logit_scale)", **rows), clip, query, key, log_scale)
    signs = 2 * torch.eye(N) - 1
    siglip = -F.logsigmoid(signs * (logits + logit_bias)).sum() / N
    call = "SigLipLoss()(query, key, logit_scale, logit_bias)"
    _assert_same(_ours("open_clip", call, **rows), siglip, query, key, log_scale, logit_bias)


def test_sentence_transformers() -> None:
    # MultipleNegativesRankingLoss.py: "MultipleNegativesRankingLoss(model, scale=20)", cos_sim, its default direction.
    query, key, hard = _pairs((N, D), (N, D), (N, D))
    for kind, documents, inputs in (("pairs", [key], [query, key]), ("triplets", [key, hard], [query, key, hard])):
        scores = F.normalize(query, dim=1) @ F.normalize(torch.cat(documents), dim=1).T * 20
        theirs = F.cross_entropy(scores, torch.arange(N))
        call = f"MultipleNegativesRankingLoss(model, scale=20), {kind}"
        _assert_same(_ours("sentence-transformers", call, query=query, key=key, hard=hard), theirs, *inputs)


class _MoCoQueue:
    """github.com/facebookresearch/moco, builder.py: the queue [D, K] and its pointer."""

    def __init__(self, size: int) -> None:
        self.queue = F.normalize(torch.randn(D, size, generator=torch.Generator().manual_seed(9)), dim=0)
        self.pointer, self.size = 0, size

    def step(self, query: Tensor, key: Tensor) -> Tensor:
        positive = torch.einsum("nc,nc->n", query, key).unsqueeze(-1)
        negative = torch.einsum("nc,ck->nk", query, self.queue.clone().detach())
        logits = torch.cat([positive, negative], dim=1) / 0.07
        assert self.size % len(key) == 0
        self.queue[:, self.pointer : self.pointer + len(key)] = key.detach().T
        self.pointer = (self.pointer + len(key)) % self.size
        return F.cross_entropy(logits, torch.zeros(len(query), dtype=torch.long))


def test_moco() -> None:
    theirs, queue = _MoCoQueue(3 * N), fastcl.NegativeQueue(3 * N, D)
    queue.push(theirs.queue.T)
    for step in range(5):
        query, key = _pairs((N, D), (N, D), seed=step, unit=True)
        key = key.detach()
        expected = theirs.step(query, key)
        call = "MoCo.forward(im_q, im_k) after its encoders, CrossEntropyLoss()"
        _assert_same(_ours("MoCo", call, query=query, key=key, queue=queue), expected, query)
        assert torch.equal(queue.keys, theirs.queue.T)


def test_tensorflow_recommenders() -> None:
    # tfrs/tasks/retrieval.py: scores - log q, accidental hits removed, CategoricalCrossentropy summed over the batch.
    query, key = _pairs((N, D), (N, D))
    ids = LABELS
    q = torch.rand(6, generator=torch.Generator().manual_seed(2))[ids]
    scores = query @ key.T - q.log()
    hits = (ids[:, None] == ids).float() - torch.eye(N)
    theirs = F.cross_entropy(scores + hits * (torch.finfo(torch.float32).min / 100), torch.arange(N), reduction="sum")
    call = "Retrieval(remove_accidental_hits=True)(query, key, candidate_sampling_probability=q, candidate_ids=ids)"
    _assert_same(_ours("TensorFlow Recommenders", call, query=query, key=key, q=q, ids=ids), theirs, query, key)


def test_torch_cross_entropy() -> None:
    query, table = _pairs((20, D), (20, D))
    query = query[:N].detach().requires_grad_()
    target = torch.arange(N) + 3
    call = "F.cross_entropy(query @ table.T, target)"
    theirs = F.cross_entropy(query @ table.T, target)
    _assert_same(_ours("torch", call, query=query, table=table, target=target), theirs, query, table)


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="this torch has no linear_cross_entropy")
def test_torch_linear_cross_entropy() -> None:
    query, table = _pairs((20, D), (20, D))
    query = query[:N].detach().requires_grad_()
    target, classes = torch.arange(N) + 3, 0.5 + torch.rand(20, generator=torch.Generator().manual_seed(0))
    call = "F.linear_cross_entropy(query, table, target, weight=classes, label_smoothing=0.1)"
    theirs = F.linear_cross_entropy(query, table, target, weight=classes, label_smoothing=0.1)
    ours = _ours("torch 2.13", call, query=query, table=table, target=target, classes=classes)
    _assert_same(ours, theirs, query, table)


def test_a_bank_that_was_made_in_training_is_loaded() -> None:
    trained, fresh = (NTXentLoss(memory_bank_size=8) for _ in range(2))
    view1, view2 = _pairs((4, 3), (4, 3))
    trained(view1, view2)
    fresh.load_state_dict(trained.state_dict())
    assert torch.equal(fresh(view1, view2), trained(view1, view2))
