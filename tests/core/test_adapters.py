"""fastcl.compat: values and gradients are those of the originals' formulas, written here with all logits stored.

test_compat.py compares with the packages themselves where they are installed.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastcl import compat
from fastcl.compat import info_nce, lightly, open_clip, pytorch_metric_learning, sentence_transformers

pytestmark = pytest.mark.usefixtures("one_thread")
N, D, F64 = 9, 5, torch.float64


def _rows(*counts: int, seed: int = 0) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    first = torch.randn(max(counts), D, generator=g, dtype=F64)
    return [(first[:n] + 0.8 * torch.randn(n, D, generator=g, dtype=F64)).requires_grad_() for n in counts]


def _same(ours: Tensor, theirs: Tensor, *inputs: Tensor, within: float = 1e-11) -> None:
    torch.testing.assert_close(ours, theirs, rtol=within, atol=within)
    grads = [torch.autograd.grad(loss, inputs, retain_graph=True) for loss in (ours, theirs)]
    for a, b in zip(*grads, strict=True):
        assert b.abs().max() > 1e-4
        torch.testing.assert_close(a, b, rtol=within, atol=within)


def _cos(a: Tensor, b: Tensor) -> Tensor:
    return F.normalize(a, dim=1) @ F.normalize(b, dim=1).T


def test_nothing_of_the_originals_is_imported() -> None:
    for file in Path(compat.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            roots = {name.partition(".")[0] for name in names}
            assert roots <= {"torch", "fastcl", "functools", "typing", "collections"}


@pytest.mark.parametrize("mode", ["unpaired", "paired"])
def test_info_nce(mode: str) -> None:
    query, key, keys = _rows(N, N, 4)
    negative = keys if mode == "unpaired" else keys.detach().expand(N, 4, D).clone().requires_grad_()
    ours = info_nce.InfoNCE(0.2, "sum", mode)(query, key, negative)
    pos = F.cosine_similarity(query, key)[:, None]
    neg = torch.einsum("nd,nkd->nk", F.normalize(query, dim=1), F.normalize(negative, dim=-1).expand(N, 4, D))
    theirs = F.cross_entropy(torch.cat([pos, neg], 1) / 0.2, torch.zeros(N, dtype=torch.long), reduction="sum")
    _same(ours, theirs, query, key, negative)


def _views(view1: Tensor, view2: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The logits of 2N rows with each other, -inf on the diagonal, and where the partners stand."""
    both = torch.cat([view1, view2])
    logits = (_cos(both, both) / temperature).masked_fill(torch.eye(2 * N, dtype=torch.bool), -torch.inf)
    return logits, torch.arange(2 * N).roll(N)


@pytest.mark.parametrize("everywhere", [False, True])
def test_lightly(everywhere: bool) -> None:
    view1, view2 = _rows(N, N)
    logits, partner = _views(view1, view2, 0.3)
    _same(lightly.NTXentLoss(0.3, 0, everywhere)(view1, view2), F.cross_entropy(logits, partner), view1, view2)
    place = torch.arange(2 * N)
    pos, lse = logits[place, partner], logits.index_put((place, partner), torch.tensor(-torch.inf).to(F64)).logsumexp(1)
    _same(lightly.DCLLoss(0.3, None, everywhere)(view1, view2), (lse - pos).mean(), view1, view2)
    weight = (F.normalize(view1, dim=1) * F.normalize(view2, dim=1)).sum(1)
    theirs = (lse - weight.repeat(2) * pos).mean()
    ours = lightly.DCLLoss(0.3, lambda a, b: (a * b).sum(1), everywhere)(view1, view2)
    _same(ours, theirs, view1, view2)
    fixed = 2 - N * (weight.detach() / 0.2).softmax(0)
    ours = lightly.DCLWLoss(0.3, 0.2, everywhere)(view1, view2)
    _same(ours, (lse - fixed.repeat(2) * pos).mean(), view1, view2)


def test_lightly_memory_bank() -> None:
    loss = lightly.NTXentLoss(0.3, (2 * N, D))
    for step in range(3):
        query, key = _rows(N, N, seed=step)
        bank = loss.memory_bank.keys.clone().to(F64)
        assert len(bank) == 2 * N
        logits = torch.cat([F.cosine_similarity(query, key)[:, None], F.normalize(query, dim=1) @ bank.T], 1) / 0.3
        theirs = F.cross_entropy(logits, torch.zeros(N, dtype=torch.long))
        _same(loss(query, key), theirs, query, key, within=1e-6)
        pushed = F.normalize(key, dim=1).to(torch.float32)
        assert all((loss.memory_bank.keys == row).all(1).any() for row in pushed)
    kept = loss.memory_bank.keys.clone()
    loss(query.detach(), key)
    assert torch.equal(kept, loss.memory_bank.keys)


def test_open_clip() -> None:
    image, text = (F.normalize(x, dim=1).detach().requires_grad_() for x in _rows(N, N))
    scale, bias = (torch.tensor(x, dtype=F64, requires_grad=True) for x in (7.0, -3.0))
    logits, diagonal = scale * image @ text.T, torch.arange(N)
    clip = (F.cross_entropy(logits, diagonal) + F.cross_entropy(logits.T, diagonal)) / 2
    ours = open_clip.ClipLoss()(image, text, scale, bias, output_dict=True)["contrastive_loss"]
    assert torch.autograd.grad(ours, bias, retain_graph=True)[0] == 0
    _same(ours, clip, image, text, scale)
    signs = 2 * torch.eye(N, dtype=F64) - 1
    theirs = -F.logsigmoid(signs * (logits + bias)).sum() / N
    _same(open_clip.SigLipLoss()(image, text, scale, bias), theirs, image, text, scale, bias)
    ours = open_clip.SigLipLoss()._loss(image, text, scale, bias, negative_only=True)
    _same(ours, F.softplus(logits.detach() * 0 + scale * image @ text.T + bias).sum() / N, image, text, scale, bias)


LABELS = torch.tensor([0, 1, 2, 0, 1, 0, 3, 1, 1])


def _metric(x: Tensor, ref: Tensor, labels: Tensor, ref_labels: Tensor, own: Any, kind: str, t: float) -> Tensor:
    """NTXentLoss and SupConLoss with masks over all logits; own: [N, M], where rows meet themselves."""
    logits = _cos(x, ref) / t
    same = (labels[:, None] == ref_labels) & ~own
    other = labels[:, None] != ref_labels
    if kind == "ntxent":
        lse = logits.masked_fill(~other, -torch.inf).logsumexp(1, keepdim=True)
        return (torch.logaddexp(lse, logits) - logits)[same].mean()
    log_p = logits - logits.masked_fill(~(same | other), -torch.inf).logsumexp(1, keepdim=True)
    losses = -(log_p * same).sum(1)[same.any(1)] / same.sum(1)[same.any(1)]
    return losses.mean()


METRIC: dict[str, Callable[..., Any]] = {
    "ntxent": pytorch_metric_learning.NTXentLoss,
    "supcon": pytorch_metric_learning.SupConLoss,
}


@pytest.mark.parametrize("kind", METRIC)
def test_metric_learning(kind: str) -> None:
    x, ref = _rows(N, N + 3)
    ref_labels = torch.cat([LABELS.roll(2), torch.tensor([0, 5, 5])])
    diagonal, nowhere = torch.eye(N, dtype=torch.bool), torch.zeros(N, N + 3, dtype=torch.bool)
    loss = METRIC[kind](0.3)
    _same(loss(x, LABELS), _metric(x, x, LABELS, LABELS, diagonal, kind, 0.3), x)
    theirs = _metric(x, ref, LABELS, ref_labels, nowhere, kind, 0.3)
    _same(loss(x, LABELS, None, ref, ref_labels), theirs, x, ref)
    pairs = (*torch.where(LABELS[:, None] == ref_labels), *torch.where(LABELS[:, None] != ref_labels))
    _same(loss(x, indices_tuple=pairs, ref_emb=ref), theirs, x, ref)
    triplets = tuple(torch.tensor(i) for i in ([0, 0, 1], [3, 5, 4], [1, 2, 0]))  # of anchors 0 and 1
    logits = _cos(x, x) / 0.3
    if kind == "ntxent":
        terms = [logits[[0, 0], [1, 2]], logits[[0, 0], [1, 2]], logits[1, [0]]]
        each = [torch.cat([p[None], n]).logsumexp(0) - p for p, n in zip(logits[triplets[:2]], terms, strict=True)]
        theirs = torch.stack(each).mean()
    else:
        first = logits[0, [3, 5, 1, 2]].logsumexp(0) - logits[0, [3, 5]].mean()
        theirs = (first + logits[1, [4, 0]].logsumexp(0) - logits[1, 4]) / 2
    _same(loss(x, LABELS, triplets), theirs, x)
    for labels in (torch.zeros(N), torch.arange(N)):  # without negatives, without positives
        value = loss(x, labels.long())
        assert value.item() == 0
        assert torch.autograd.grad(value, x)[0].abs().max() == 0


@pytest.mark.parametrize("kind", METRIC)
@pytest.mark.parametrize("masked", [False, True])
def test_cross_batch_memory(kind: str, masked: bool) -> None:
    size = 2 * N + 4
    loss = pytorch_metric_learning.CrossBatchMemory(METRIC[kind](0.3), D, size)
    memory, labels_of, place = torch.zeros(size, D, dtype=F64), torch.full((size,), -1), 0
    for step in range(5):
        (x,) = _rows(N, seed=step)
        labels = LABELS.roll(step)
        mask = torch.arange(N) % 2 == 0 if masked else torch.ones(N, dtype=torch.bool)
        at = (place + torch.arange(int(mask.sum()))) % size
        memory[at], labels_of[at], place = x[mask].detach(), labels[mask], (place + len(at)) % size
        asks = ~mask if masked else mask
        filled = labels_of >= 0
        own = torch.zeros(int(asks.sum()), size, dtype=torch.bool)
        if not masked:
            own[torch.arange(N), at] = True
        arguments = (x[asks], memory[filled], labels[asks], labels_of[filled], own[:, filled])
        ours = loss(x, labels, enqueue_mask=mask if masked else None)
        _same(ours, _metric(*arguments, kind, 0.3), x)


def test_cross_batch_memory_with_a_miner_and_another_loss() -> None:
    (x,) = _rows(N)
    seen = {}

    def miner(a: Tensor, la: Tensor, b: Tensor, lb: Tensor) -> tuple[Tensor, ...]:
        return (*torch.where(la[:, None] == lb), *torch.where(la[:, None] != lb))

    def other(a: Tensor, la: Tensor, indices: Any, b: Tensor, lb: Tensor) -> Tensor:
        seen["pairs"] = indices
        return a.sum()

    pytorch_metric_learning.CrossBatchMemory(other, D, N + 1, miner)(x, LABELS)
    anchor, positive, *_ = seen["pairs"]
    assert (anchor != positive).all()
    assert len(anchor) == (LABELS[:, None] == LABELS).sum() - N
    wanted = pytorch_metric_learning.NTXentLoss(0.3)(x, LABELS)
    ours = pytorch_metric_learning.CrossBatchMemory(pytorch_metric_learning.NTXentLoss(0.3), D, N + 1, miner)(x, LABELS)
    torch.testing.assert_close(ours, wanted)


def _ranking(query: Tensor, docs: list[Tensor], directions: Any, partition: str, mode: str | None, h: float) -> Tensor:
    """MultipleNegativesRankingLoss over stored similarities, with scale 8."""
    keys, own = torch.cat(docs), torch.eye(N, dtype=torch.bool)
    sims = {"query_to_doc": _cos(query, keys)}
    others = {
        "query_to_query": _cos(query, query).masked_fill(own, -torch.inf),
        "doc_to_query": _cos(docs[0], query),
        "doc_to_doc": _cos(docs[0], keys).masked_fill(own.repeat(1, len(docs)), -torch.inf),
    }
    sims |= {name: x for name, x in others.items() if name in directions}
    blocks = [own if nth == 0 else own * 2 for nth in range(len(docs))]
    role = torch.cat([b.long() for b in blocks], 1)  # 1: the positive, 2: a hard negative of the row's own, 0: another
    harder = {None: role < 0, "in_batch_negatives": role == 0, "hard_negatives": role == 2, "all_negatives": role != 1}
    pos = 8 * sims["query_to_doc"].diagonal()
    logits = {name: 8 * x for name, x in sims.items()}
    logits["query_to_doc"] = logits["query_to_doc"] + h * sims["query_to_doc"].detach() * harder[mode]
    if partition == "joint":
        return (torch.cat(list(logits.values()), 1).logsumexp(1) - pos).mean()
    return (torch.stack([x.logsumexp(1) for x in logits.values()]).mean(0) - pos).mean()


ALL = sentence_transformers.DIRECTIONS
FORMS: list[tuple[Any, str, str | None, float]] = [
    (("query_to_doc",), "joint", None, 0.0),
    (ALL, "joint", None, 0.0),
    (("query_to_doc", "doc_to_query"), "per_direction", None, 0.0),
    (("query_to_doc", "query_to_query"), "joint", "in_batch_negatives", 3.0),
    (("query_to_doc",), "joint", "hard_negatives", 5.0),
    (ALL, "joint", "all_negatives", 2.0),
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("columns", [2, 3, 4])
def test_sentence_transformers(form: Any, columns: int) -> None:
    directions, partition, mode, strength = form
    model = nn.Linear(D, D, dtype=F64)
    inputs = _rows(*[N] * columns)
    options = {"directions": directions, "partition_mode": partition, "hardness_mode": mode}
    options |= {"scale": 8.0, "hardness_strength": strength}

    def embedded(features: dict[str, Any]) -> dict[str, Tensor]:
        assert features["prompt"] == "query"
        return {"sentence_embedding": model(features["x"])}

    features = [{"x": x, "attention_mask": torch.ones(N, 2), "prompt": "query"} for x in inputs]
    wanted = _ranking(model(inputs[0]), [model(x) for x in inputs[1:]], directions, partition, mode, strength)
    plain = sentence_transformers.MultipleNegativesRankingLoss(embedded, **options)
    _same(plain(features, None), wanted, *inputs, *model.parameters())
    for size in ({"mini_batch_size": 4}, {"mini_batch_num_tokens": 6}):
        cached = sentence_transformers.CachedMultipleNegativesRankingLoss(embedded, **options, **size)
        again = _ranking(model(inputs[0]), [model(x) for x in inputs[1:]], directions, partition, mode, strength)
        _same(cached(features, None), again, *inputs, *model.parameters())
    assert plain.get_config_dict().items() >= options.items() | {("similarity_fct", "cos_sim")}


def test_the_cached_loss_is_computed_by_what_takes_the_place_of_calculate_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As MatryoshkaLoss of that package does it: it cuts the embeddings, and sends the gradients back on its own."""
    model, inputs, dims = nn.Linear(D, D, dtype=F64), _rows(N, N), (D, 3)
    cached = sentence_transformers.CachedMultipleNegativesRankingLoss(
        lambda features: {"sentence_embedding": model(features["x"])}, scale=8.0, mini_batch_size=4
    )
    assert cached.uses_gradient_cache
    whole = cached.calculate_loss

    def nested(reps: list[list[Tensor]], *args: Any, **options: Any) -> Any:
        loss: Any = 0.0
        for dim in dims:
            cut = [[F.normalize(x[:, :dim], dim=-1) for x in column] for column in reps]
            leaves = [[x.detach().requires_grad_() for x in column] for column in cut] if options else cut
            loss = loss + whole(leaves, *args, **options)
            for x, leaf in zip(sum(cut, []), sum(leaves, []), strict=True) if options else ():
                x.backward(leaf.grad)
        return loss

    monkeypatch.setattr(cached, "calculate_loss", nested)
    wanted = sum(
        (_ranking(model(inputs[0])[:, :dim], [model(inputs[1])[:, :dim]], ("query_to_doc",), "joint", None, 0.0)
         for dim in dims), torch.zeros((), dtype=F64))  # fmt: skip
    features = [{"x": x} for x in inputs]
    _same(cached(features), wanted, *inputs, *model.parameters())
    with torch.no_grad():
        torch.testing.assert_close(cached(features), wanted)


def test_sentence_transformers_of_one_pair() -> None:
    query, doc = _rows(1, 1)
    for directions, columns in ((ALL, 2), (("query_to_doc", "query_to_query", "doc_to_doc"), 1)):
        loss = sentence_transformers.MultipleNegativesRankingLoss(nn.Identity(), directions=directions)
        value = loss.compute_loss_from_embeddings([query, doc])  # doc_to_query has the query itself among its columns
        torch.testing.assert_close(value, torch.tensor(float(columns), dtype=F64).log())


@pytest.mark.parametrize(
    "options",
    [
        {"scale": 0.0},
        {"directions": ()},
        {"directions": ("doc_to_query",)},
        {"directions": ("query_to_doc", "sideways")},
        {"directions": ALL, "partition_mode": "per_direction"},
        {"partition_mode": "both"},
        {"hardness_mode": "some"},
        {"hardness_strength": -1.0},
    ],
)
def test_sentence_transformers_refuses(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="|".join(options)):
        sentence_transformers.MultipleNegativesRankingLoss(nn.Identity(), **options)


def test_results_have_the_dtype_of_the_embeddings() -> None:
    x, y = (t.detach().to(torch.bfloat16) for t in _rows(N, N))
    ranking = sentence_transformers.MultipleNegativesRankingLoss(nn.Identity())
    for value in (
        info_nce.info_nce(x, y),
        lightly.NTXentLoss()(x, y),
        lightly.DCLLoss()(x, y),
        lightly.NTXentLoss(memory_bank_size=(4, D))(x, y),
        open_clip.ClipLoss()(x, y, 10.0),
        open_clip.SigLipLoss()(x, y, 10.0, None),
        pytorch_metric_learning.NTXentLoss()(x, LABELS),
        pytorch_metric_learning.SupConLoss()(x, LABELS),
        ranking.compute_loss_from_embeddings([x, y]),
    ):
        assert value.dtype == torch.bfloat16
        assert value.isfinite()


def test_cross_batch_memory_has_the_helpers_of_the_original() -> None:
    memory = pytorch_metric_learning.CrossBatchMemory(pytorch_metric_learning.NTXentLoss(0.3), D, 2 * N)
    (x,) = _rows(N)
    memory(x, LABELS)
    stored = (memory.embedding_memory[:N], memory.label_memory[:N])
    same = LABELS[:, None] == LABELS
    for apart in (True, False):
        anchor, positive, *negatives = memory.create_indices_tuple(x, LABELS, *stored, None, apart)
        wanted = same & ~torch.eye(N, dtype=torch.bool) if apart else same
        assert torch.equal(torch.stack([anchor, positive]), wanted.nonzero().T)
        assert torch.equal(torch.stack(negatives), (~same).nonzero().T)
    mined = (torch.tensor([0]), torch.tensor([1]), torch.tensor([2]))
    assert len(memory.create_indices_tuple(x, LABELS, *stored, mined, True)[2]) == (~same).sum() + 1
    assert "NTXentLoss" in memory.supported_losses()
    memory.check_loss_support("SupConLoss")
    with pytest.raises(ValueError, match="loss: expected one of AngularLoss, .*, got ArcFaceLoss"):
        memory.check_loss_support("ArcFaceLoss")


@pytest.mark.parametrize("name", ["mini_batch_size", "mini_batch_num_tokens"])
def test_empty_mini_batches_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: expected a finite number above 0, got 0"):
        sentence_transformers.CachedMultipleNegativesRankingLoss(nn.Identity(), **{name: 0})
