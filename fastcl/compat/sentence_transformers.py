"""The names of sentence_transformers.losses (6.0): MultipleNegativesRankingLoss and its cached form."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fastcl.arithmetic import logsumexp
from fastcl.checks import positive_number
from fastcl.chunked import cached, token_chunks
from fastcl.compat.gathering import own_places, rows_of_all
from fastcl.losses import dcl, infonce
from fastcl.normalize import normalized

DIRECTIONS = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
HARDNESS = ("in_batch_negatives", "hard_negatives", "all_negatives")


def cos_sim(a: Tensor, b: Tensor) -> Tensor:
    return normalized(a) @ normalized(b).T


class MultipleNegativesRankingLoss(nn.Module):
    """`sentence_transformers.losses.MultipleNegativesRankingLoss`. The result has the dtype of the embeddings.

    similarity_fct is `cos_sim` or `dot_score`, of whichever module, by its name.
    """

    def __init__(
        self,
        model: Any,
        scale: float = 20.0,
        similarity_fct: Callable[[Tensor, Tensor], Tensor] = cos_sim,
        gather_across_devices: bool = False,
        directions: tuple[str, ...] = ("query_to_doc",),
        partition_mode: str = "joint",
        hardness_mode: str | None = None,
        hardness_strength: float = 0.0,
    ) -> None:
        super().__init__()
        positive_number("scale", scale)
        _check("directions", directions, "query_to_doc" in directions and set(directions) <= set(DIRECTIONS))
        whole = partition_mode == "per_direction" and not {"query_to_query", "doc_to_doc"} & set(directions)
        _check("partition_mode", partition_mode, whole or partition_mode == "joint")
        _check("hardness_mode", hardness_mode, hardness_mode in (None, *HARDNESS))
        _check("hardness_strength", hardness_strength, hardness_strength >= 0)
        _similarity(similarity_fct)
        self.model, self.scale, self.similarity_fct = model, scale, similarity_fct
        self.gather_across_devices, self.directions = gather_across_devices, tuple(directions)
        self.partition_mode, self.hardness_mode = partition_mode, hardness_mode
        self.hardness_strength = hardness_strength

    @property
    def temperature(self) -> float:
        return 1 / self.scale

    def get_config_dict(self) -> dict[str, Any]:
        names = ("scale", "gather_across_devices", "directions", "partition_mode", "hardness_mode", "hardness_strength")
        found = {name: getattr(self, name) for name in names}
        return found | {"similarity_fct": getattr(self.similarity_fct, "__name__", repr(self.similarity_fct))}

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        return self.compute_loss_from_embeddings([self.model(f)["sentence_embedding"] for f in sentence_features])

    def compute_loss_from_embeddings(self, embeddings: list[Tensor], labels: Tensor | None = None) -> Tensor:
        """embeddings: those of the queries, of their documents and of any number of hard negatives, each [N, D]."""
        _check("sentence_features", f"{len(embeddings)} columns", len(embeddings) > 1)
        name = _similarity(self.similarity_fct)  # which may have been replaced since
        query, *docs = [normalized(x) for x in embeddings] if name == "cos_sim" else embeddings
        queries, *docs_of_all = rows_of_all(query, *docs) if self.gather_across_devices else (query, *docs)
        place = own_places if self.gather_across_devices else torch.arange
        own = place(len(query), device=query.device)
        mode = self.hardness_mode if self.hardness_strength else None
        given = query, docs, queries, torch.cat(docs_of_all), own.to(query.device)
        parts = _parts(*given, 1 / self.scale, self.directions, mode, self.hardness_strength)
        each = torch.stack([logsumexp(torch.stack(part, 1)) for part in parts], 1)
        loss = logsumexp(each) if self.partition_mode == "joint" else each.mean(1)
        return loss.mean().to(embeddings[0].dtype)


def _parts(query: Tensor, docs: list[Tensor], queries: Tensor, keys: Tensor, own: Tensor, temperature: float,
           directions: tuple[str, ...], mode: str | None, strength: float) -> list[list[Tensor]]:  # fmt: skip
    """For each direction, losses of the rows [N] whose log-sum-exp is that of the direction: the logits of its columns
    less that of the positive, which is itself a column of query_to_doc and doc_to_query.

    queries, keys: the columns, of all ranks, documents of one kind after the other; own: the rows' places in them.
    """
    options: dict[str, Any] = {"temperature": temperature, "reduction": "none", "normalize": False, "ids": own}
    place, column = torch.arange(len(queries), device=own.device), torch.arange(len(keys), device=own.device)
    query_of = place.repeat(len(docs))
    among, hard = (strength if mode in (name, "all_negatives") else None for name in HARDNESS[:2])
    if len(docs) == 1 or among == hard:
        to_doc = [infonce(query, docs[0], keys, negative_ids=column, hardness=among, **options)]
    else:  # the rows' own hard negatives apart from all others
        private = options | {"hardness": hard, "ids": None}
        to_doc = [infonce(query, docs[0], keys, negative_ids=query_of, hardness=among, **options),
                  dcl(query, docs[0], torch.stack(docs[1:], 1), **private)]  # fmt: skip
    parts = [to_doc]
    others = len(queries) > 1
    if "query_to_query" in directions and others:
        parts.append([dcl(query, docs[0], queries, negative_ids=place, **options)])
    if "doc_to_query" in directions:
        parts.append([infonce(docs[0], query, queries, negative_ids=place, **options)])
    if "doc_to_doc" in directions and others:
        parts.append([dcl(docs[0], query, keys, negative_ids=query_of, **options)])
    return parts


class CachedMultipleNegativesRankingLoss(MultipleNegativesRankingLoss):
    """`sentence_transformers.losses.CachedMultipleNegativesRankingLoss`, by `fastcl.cached`.

    show_progress_bar has no effect. Under DistributedDataParallel this loss is to be inside of it, with its model. The
    package's MatryoshkaLoss may be around it.
    """

    uses_gradient_cache = True  # the package's MatryoshkaLoss and AdaptiveLayerLoss ask for it

    def __init__(
        self,
        model: Any,
        scale: float = 20.0,
        similarity_fct: Callable[[Tensor, Tensor], Tensor] = cos_sim,
        mini_batch_size: int = 32,
        mini_batch_num_tokens: int | None = None,
        gather_across_devices: bool = False,
        directions: tuple[str, ...] = ("query_to_doc",),
        partition_mode: str = "joint",
        show_progress_bar: bool = False,
        hardness_mode: str | None = None,
        hardness_strength: float = 0.0,
    ) -> None:
        super().__init__(model, scale, similarity_fct, gather_across_devices, directions, partition_mode, hardness_mode,
                         hardness_strength)  # fmt: skip
        for name, size in (("mini_batch_size", mini_batch_size), ("mini_batch_num_tokens", mini_batch_num_tokens)):
            if size is not None:
                positive_number(name, size)
        self.mini_batch_size, self.mini_batch_num_tokens = mini_batch_size, mini_batch_num_tokens

    def get_config_dict(self) -> dict[str, Any]:
        sizes = {"mini_batch_size": self.mini_batch_size, "mini_batch_num_tokens": self.mini_batch_num_tokens}
        return super().get_config_dict() | sizes

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        chunk = self.mini_batch_size if self.mini_batch_num_tokens is None else token_chunks(self.mini_batch_num_tokens)
        features = [dict(f) for f in sentence_features]
        step = cached([_encoder(self.model, f) for f in features], partial(_calculated, self.calculate_loss), chunk)
        return step(*({name: x for name, x in f.items() if isinstance(x, Tensor)} for f in features))

    def calculate_loss(
        self, reps: list[list[Tensor]], labels: Tensor | None = None, *, with_backward: bool = False
    ) -> Tensor:
        """From the embeddings of each column, in parts [n, D]. with_backward: their gradients are added to `grad`, and
        the result has none. The package's MatryoshkaLoss puts a function of its own around this one.
        """
        loss = self.compute_loss_from_embeddings([torch.cat(column) for column in reps])
        if not with_backward:
            return loss
        loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
        return loss.detach()


class _Known(Function):
    """A loss whose gradients have been computed: value, then the gradients, then what they belong to."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, grads: list[Tensor | None], *inputs: Tensor) -> Tensor:
        ctx.grads = grads
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override, unused-ignore]
        return None, None, *(None if g is None else g * grad.to(g.dtype) for g in ctx.grads)


def _calculated(calculate: Callable[..., Tensor], *embeddings: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return calculate([[x] for x in embeddings])
    leaves = [x.detach().requires_grad_() for x in embeddings]
    value = calculate([[x] for x in leaves], with_backward=True)
    return _Known.apply(value, [x.grad for x in leaves], *embeddings)


def _encoder(model: Any, features: dict[str, Any]) -> Callable[..., Tensor]:
    """From a chunk of the tensors to embeddings; what is no tensor goes along as it is."""
    rest = {name: x for name, x in features.items() if not isinstance(x, Tensor)}
    return lambda **chunk: model(chunk | rest)["sentence_embedding"]


def _similarity(function: Callable[[Tensor, Tensor], Tensor]) -> str:
    name = getattr(function, "__name__", "")
    if name not in ("cos_sim", "dot_score"):
        raise ValueError(f"similarity_fct: expected cos_sim or dot_score, got {name or function!r}")
    return name


def _check(name: str, value: Any, right: bool) -> None:
    if not right:
        raise ValueError(f"{name}: expected what sentence_transformers takes there, got {value!r}")
