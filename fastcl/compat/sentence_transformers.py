"""The names of sentence_transformers.losses (6.0): MultipleNegativesRankingLoss and its cached form."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fastcl.adjust import graded
from fastcl.arithmetic import dot, logsumexp
from fastcl.checks import positive_number
from fastcl.chunked import cached, token_chunks
from fastcl.compat.gathering import own_places, rows_of_all
from fastcl.losses import infonce
from fastcl.normalize import normalized
from fastcl.ops import contrast
from fastcl.private import private_similarity

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
        name = getattr(self.similarity_fct, "__name__", "")
        _check("similarity_fct", name, name in ("cos_sim", "dot_score"))
        query, *docs = [normalized(x) for x in embeddings] if name == "cos_sim" else embeddings
        queries, *docs_of_all = rows_of_all(query, *docs) if self.gather_across_devices else (query, *docs)
        place = own_places if self.gather_across_devices else torch.arange
        own = place(len(query), device=query.device)
        loss = self._plain if self.directions == ("query_to_doc",) and not self._hardness() else self._of_parts
        return loss(query, docs, queries, docs_of_all, own.to(query.device)).to(embeddings[0].dtype)

    def _hardness(self) -> float:
        return self.hardness_strength if self.hardness_mode else 0.0

    def _plain(
        self, query: Tensor, docs: list[Tensor], queries: Tensor, all_docs: list[Tensor], own: Tensor
    ) -> Tensor:
        keys = torch.cat(all_docs)
        places = torch.arange(len(keys), device=own.device)
        return infonce(query, docs[0], keys, 1 / self.scale, normalize=False, ids=own, negative_ids=places)

    def _of_parts(
        self, query: Tensor, docs: list[Tensor], queries: Tensor, all_docs: list[Tensor], own: Tensor
    ) -> Tensor:
        """One log-sum-exp for each direction and for the own hard negatives, merged as partition_mode says."""
        keys, place = torch.cat(all_docs), torch.arange(len(queries), device=own.device)
        mode = self.hardness_mode if self._hardness() else ""
        among, hard = mode in ("in_batch_negatives", "all_negatives"), mode in ("hard_negatives", "all_negatives")
        query_of = place.repeat(len(docs))

        def lse(row: Tensor, columns: Tensor, of_columns: Tensor | None, scale: float = self.scale) -> Tensor:
            ids = own if of_columns is not None else None
            return contrast(row, columns, scale=scale, row_id=ids, col_id=of_columns)[1]

        pos = self.scale * dot(query, docs[0])
        parts = {"query_to_doc": [pos, self._harder(among, lambda scale: lse(query, keys, query_of, scale))]}
        if len(docs) > 1:
            mine = private_similarity(query, torch.stack(docs[1:], 1))
            parts["query_to_doc"].append(self._harder(hard, lambda scale: logsumexp(mine * scale)))
        if "query_to_query" in self.directions:
            parts["query_to_query"] = [lse(query, queries, place)]
        if "doc_to_query" in self.directions:
            parts["doc_to_query"] = [lse(docs[0], queries, None)]
        if "doc_to_doc" in self.directions:
            parts["doc_to_doc"] = [lse(docs[0], keys, query_of)]
        each = [logsumexp(torch.stack(part, 1)) for part in parts.values()]
        stacked = torch.stack(each, 1)
        return ((logsumexp(stacked) if self.partition_mode == "joint" else stacked.mean(1)) - pos).mean()

    def _harder(self, harder: bool, of: Callable[[float], Tensor]) -> Tensor:
        """`of` the scale. With hardness h a similarity x counts (scale + h) x in the value, scale x in the gradient."""
        if not harder:
            return of(self.scale)
        raised = self.scale + self.hardness_strength
        return graded(of(raised), self.scale / raised)


class CachedMultipleNegativesRankingLoss(MultipleNegativesRankingLoss):
    """`sentence_transformers.losses.CachedMultipleNegativesRankingLoss`, by `fastcl.cached`.

    show_progress_bar has no effect. Under DistributedDataParallel this loss is to be inside of it, with its model.
    """

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
        step = cached(
            [_encoder(self.model, f) for f in features],
            lambda *embeddings: self.compute_loss_from_embeddings([*embeddings]),
            chunk,
        )
        return step(*({name: x for name, x in f.items() if isinstance(x, Tensor)} for f in features))


def _encoder(model: Any, features: dict[str, Any]) -> Callable[..., Tensor]:
    """From a chunk of the tensors to embeddings; what is no tensor goes along as it is."""
    rest = {name: x for name, x in features.items() if not isinstance(x, Tensor)}
    return lambda **chunk: model(chunk | rest)["sentence_embedding"]


def _check(name: str, value: Any, right: bool) -> None:
    if not right:
        raise ValueError(f"{name}: expected what sentence_transformers takes there, got {value!r}")
