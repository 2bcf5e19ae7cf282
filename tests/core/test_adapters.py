"""fastcl.compat: values and gradients are those of the originals' formulas, written here with all logits stored.

test_adapters_metric_learning.py has those of pytorch_metric_learning; test_compat.py compares with the packages
themselves where they are installed.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from adapter_rows import F64, D, N, cos, rows, same
from torch import Tensor, nn

from fastcl import compat
from fastcl.compat import info_nce, lightly, open_clip, pytorch_metric_learning, sentence_transformers

pytestmark = pytest.mark.usefixtures("one_thread")


def test_nothing_of_the_originals_is_imported() -> None:
    for file in Path(compat.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            roots = {name.partition(".")[0] for name in names}
            assert roots <= {"torch", "fastcl", "functools", "typing", "collections"}


@pytest.mark.parametrize("mode", ["unpaired", "paired"])
def test_info_nce(mode: str) -> None:
    query, key, keys = rows(N, N, 4)
    negative = keys if mode == "unpaired" else keys.detach().expand(N, 4, D).clone().requires_grad_()
    ours = info_nce.InfoNCE(0.2, "sum", mode)(query, key, negative)
    pos = F.cosine_similarity(query, key)[:, None]
    neg = torch.einsum("nd,nkd->nk", F.normalize(query, dim=1), F.normalize(negative, dim=-1).expand(N, 4, D))
    theirs = F.cross_entropy(torch.cat([pos, neg], 1) / 0.2, torch.zeros(N, dtype=torch.long), reduction="sum")
    same(ours, theirs, query, key, negative)


def _views(view1: Tensor, view2: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The logits of 2N rows with each other, -inf on the diagonal, and where the partners stand."""
    both = torch.cat([view1, view2])
    logits = (cos(both, both) / temperature).masked_fill(torch.eye(2 * N, dtype=torch.bool), -torch.inf)
    return logits, torch.arange(2 * N).roll(N)


@pytest.mark.parametrize("everywhere", [False, True])
def test_lightly(everywhere: bool) -> None:
    view1, view2 = rows(N, N)
    logits, partner = _views(view1, view2, 0.3)
    same(lightly.NTXentLoss(0.3, 0, everywhere)(view1, view2), F.cross_entropy(logits, partner), view1, view2)
    place = torch.arange(2 * N)
    pos, lse = logits[place, partner], logits.index_put((place, partner), torch.tensor(-torch.inf).to(F64)).logsumexp(1)
    same(lightly.DCLLoss(0.3, None, everywhere)(view1, view2), (lse - pos).mean(), view1, view2)
    weight = (F.normalize(view1, dim=1) * F.normalize(view2, dim=1)).sum(1)
    theirs = (lse - weight.repeat(2) * pos).mean()
    ours = lightly.DCLLoss(0.3, lambda a, b: (a * b).sum(1), everywhere)(view1, view2)
    same(ours, theirs, view1, view2)
    fixed = 2 - N * (weight.detach() / 0.2).softmax(0)
    ours = lightly.DCLWLoss(0.3, 0.2, everywhere)(view1, view2)
    same(ours, (lse - fixed.repeat(2) * pos).mean(), view1, view2)


def test_lightly_memory_bank() -> None:
    loss = lightly.NTXentLoss(0.3, (2 * N, D))
    for step in range(3):
        query, key = rows(N, N, seed=step)
        bank = loss.memory_bank.keys.clone().to(F64)
        assert len(bank) == 2 * N
        logits = torch.cat([F.cosine_similarity(query, key)[:, None], F.normalize(query, dim=1) @ bank.T], 1) / 0.3
        theirs = F.cross_entropy(logits, torch.zeros(N, dtype=torch.long))
        same(loss(query, key), theirs, query, key, within=1e-6)
        pushed = F.normalize(key, dim=1).to(torch.float32)
        assert all((loss.memory_bank.keys == row).all(1).any() for row in pushed)
    kept = loss.memory_bank.keys.clone()
    loss(query.detach(), key)
    with torch.no_grad():
        loss(query, key)
    assert torch.equal(kept, loss.memory_bank.keys)
    with pytest.raises(ValueError, match=r"memory_bank_size: .*got \(4, 5, 6\)"):
        lightly.NTXentLoss(0.3, (4, 5, 6))


def test_open_clip() -> None:
    image, text = (F.normalize(x, dim=1).detach().requires_grad_() for x in rows(N, N))
    scale, bias = (torch.tensor(x, dtype=F64, requires_grad=True) for x in (7.0, -3.0))
    logits, diagonal = scale * image @ text.T, torch.arange(N)
    clip = (F.cross_entropy(logits, diagonal) + F.cross_entropy(logits.T, diagonal)) / 2
    ours = open_clip.ClipLoss()(image, text, scale, bias, output_dict=True)["contrastive_loss"]
    assert torch.autograd.grad(ours, bias, retain_graph=True)[0] == 0
    same(ours, clip, image, text, scale)
    signs = 2 * torch.eye(N, dtype=F64) - 1
    theirs = -F.logsigmoid(signs * (logits + bias)).sum() / N
    same(open_clip.SigLipLoss()(image, text, scale, bias), theirs, image, text, scale, bias)
    one = scale[None]  # a shape that open_clip's models give their scales too
    same(open_clip.ClipLoss(use_horovod=False)(image, text, one), clip, image, text, scale)
    same(open_clip.SigLipLoss()(image, text, one, bias[None]), theirs, image, text, scale, bias)
    ours = open_clip.SigLipLoss()._loss(image, text, scale, bias, negative_only=True)
    same(ours, F.softplus(logits.detach() * 0 + scale * image @ text.T + bias).sum() / N, image, text, scale, bias)


def test_a_rounded_scale_is_inverted_unrounded() -> None:
    image, text = (F.normalize(x.detach(), dim=1).float() for x in rows(N, N))
    scale = torch.tensor(9.75)
    assert torch.equal(open_clip.ClipLoss()(image, text, scale.bfloat16()), open_clip.ClipLoss()(image, text, scale))


def test_open_clip_refuses() -> None:
    image, text = rows(N, N - 1)
    with pytest.raises(ValueError, match=f"text_features: expected {N} rows, as images, got {N - 1}"):
        open_clip.SigLipLoss()(image, text, 10.0)
    with pytest.raises(ValueError, match="use_horovod"):
        open_clip.ClipLoss(use_horovod=True)


def _ranking(query: Tensor, docs: list[Tensor], directions: Any, partition: str, mode: str | None, h: float) -> Tensor:
    """MultipleNegativesRankingLoss over stored similarities, with scale 8."""
    keys, own = torch.cat(docs), torch.eye(N, dtype=torch.bool)
    sims = {"query_to_doc": cos(query, keys)}
    others = {
        "query_to_query": cos(query, query).masked_fill(own, -torch.inf),
        "doc_to_query": cos(docs[0], query),
        "doc_to_doc": cos(docs[0], keys).masked_fill(own.repeat(1, len(docs)), -torch.inf),
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
    inputs = rows(*[N] * columns)
    options = {"directions": directions, "partition_mode": partition, "hardness_mode": mode}
    options |= {"scale": 8.0, "hardness_strength": strength}

    def embedded(features: dict[str, Any]) -> dict[str, Tensor]:
        assert features["prompt"] == "query"
        return {"sentence_embedding": model(features["x"])}

    features = [{"x": x, "attention_mask": torch.ones(N, 2), "prompt": "query"} for x in inputs]
    wanted = _ranking(model(inputs[0]), [model(x) for x in inputs[1:]], directions, partition, mode, strength)
    plain = sentence_transformers.MultipleNegativesRankingLoss(embedded, **options)
    same(plain(features, None), wanted, *inputs, *model.parameters())
    for size in ({"mini_batch_size": 4}, {"mini_batch_num_tokens": 6}):
        cached = sentence_transformers.CachedMultipleNegativesRankingLoss(embedded, **options, **size)
        again = _ranking(model(inputs[0]), [model(x) for x in inputs[1:]], directions, partition, mode, strength)
        same(cached(features, None), again, *inputs, *model.parameters())
    assert plain.get_config_dict().items() >= options.items() | {("similarity_fct", "cos_sim")}


def test_the_cached_loss_is_computed_by_what_takes_the_place_of_calculate_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As MatryoshkaLoss of that package does it: it cuts the embeddings, and sends the gradients back on its own."""
    model, inputs, dims = nn.Linear(D, D, dtype=F64), rows(N, N), (D, 3)
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
    same(cached(features), wanted, *inputs, *model.parameters())
    with torch.no_grad():
        torch.testing.assert_close(cached(features), wanted)


def test_sentence_transformers_of_one_pair() -> None:
    query, doc = rows(1, 1)
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
        {"similarity_fct": torch.mm},
    ],
)
def test_sentence_transformers_refuses(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="|".join(options)):
        sentence_transformers.MultipleNegativesRankingLoss(nn.Identity(), **options)


def test_results_have_the_dtype_of_the_embeddings() -> None:
    x, y = (t.detach().to(torch.bfloat16) for t in rows(N, N))
    labels = torch.arange(N) // 2
    ranking = sentence_transformers.MultipleNegativesRankingLoss(nn.Identity())
    for value in (
        info_nce.info_nce(x, y),
        lightly.NTXentLoss()(x, y),
        lightly.DCLLoss()(x, y),
        lightly.NTXentLoss(memory_bank_size=(4, D))(x, y),
        open_clip.ClipLoss()(x, y, 10.0),
        open_clip.SigLipLoss()(x, y, 10.0, None),
        pytorch_metric_learning.NTXentLoss()(x, labels),
        pytorch_metric_learning.SupConLoss()(x, labels),
        ranking.compute_loss_from_embeddings([x, y]),
    ):
        assert value.dtype == torch.bfloat16
        assert value.isfinite()


@pytest.mark.parametrize("name", ["mini_batch_size", "mini_batch_num_tokens"])
def test_empty_mini_batches_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: expected a finite number above 0, got 0"):
        sentence_transformers.CachedMultipleNegativesRankingLoss(nn.Identity(), **{name: 0})
