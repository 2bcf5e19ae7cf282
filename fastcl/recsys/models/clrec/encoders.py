"""CLRec's encoders (Zhou et al. 2021, appendix B.1): one of items, and two of users by name, which are the paper's own
and the Transformer of its public tables.

These networks turn items and packed clicks into vectors. model.py has similarity, loss, queues and batches.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastcl.recsys.data import PAD, Histories, Items
from fastcl.recsys.models.base import NamedRows
from fastcl.recsys.models.batching import TOGETHER, Packed, Prefixes, Spans, windows
from fastcl.recsys.models.clrec.config import CLRecConfig
from fastcl.recsys.models.layers import CausalBlock, Dropout, MultiAtt, WeightedHeads, codes_of


class ItemEncoder(nn.Module):
    """g(y): the id embedding plus the concatenated embeddings of the features, whose widths add up to `dim`. A feature
    without a value adds zeros.
    """

    def __init__(self, items: Items, dim: int, id_table: nn.Embedding, id_dropout: float = 0.0) -> None:
        super().__init__()
        self.id_dropout = id_dropout
        count = len(items.features)
        if count > dim:
            raise ValueError(f"dim: expected at least the number of item features ({count}), got {dim}")
        self.id = id_table
        self.features = nn.ModuleList()
        for nth, feature in enumerate(items.features.values()):
            width = dim // count + (nth < dim % count)
            self.features.append(nn.EmbeddingBag(len(feature.values) + 1, width, mode="mean", padding_idx=PAD))
            # The codes are not in the state dict, since a run folder stores the item table beside the weights.
            self.register_buffer(f"codes_{nth}", codes_of(feature), persistent=False)

    def named_rows(self, items: Items, prefix: str) -> dict[str, NamedRows]:
        """As `Model.named_rows`. prefix: what precedes the names of the tensors."""
        values = enumerate(items.features.values())
        of_features = {f"{prefix}features.{nth}.weight": NamedRows(feature.values) for nth, feature in values}
        return {f"{prefix}id.weight": NamedRows(items.ids), **of_features}

    def forward(self, item: Tensor) -> Tensor:  # int64 [U] -> [U, D]
        found = self.id(item)
        if self.training and self.id_dropout:
            # Not scaled: a dropped id leaves what a new item has.
            found = found * (torch.rand(len(item), 1, dtype=found.dtype, device=found.device) >= self.id_dropout)
        return found + self.described(item) if len(self.features) else found

    def described(self, item: Tensor) -> Tensor:
        """[U, D], the part of the vectors that the features add."""
        values = [bag(self.get_buffer(f"codes_{nth}")[item]) for nth, bag in enumerate(self.features)]
        return torch.cat(values, -1) if values else self.id.weight.new_zeros(len(item), self.id.embedding_dim)


class Features(NamedTuple):
    """One choice of the setting that says where item features are used: two functions that encode items."""

    both: Callable[[ItemEncoder, Tensor, Tensor], tuple[Tensor, Tensor]]  # clicks [n], targets and negatives [m]
    scored: Callable[[ItemEncoder, Tensor], Tensor]  # targets and negatives alone


def _distinct(encode: Callable[[Tensor], Tensor], item: Tensor) -> Tensor:
    """[n, D], the vectors of items [n]; each distinct item is encoded once."""
    distinct, place = item.unique(return_inverse=True)
    return F.embedding(place, encode(distinct))


def _everywhere(encoder: ItemEncoder, clicked: Tensor, scored: Tensor) -> tuple[Tensor, Tensor]:
    x, y = _distinct(encoder, torch.cat([clicked, scored])).split([len(clicked), len(scored)])
    return x, y


def _clicks(encoder: ItemEncoder, clicked: Tensor, scored: Tensor) -> tuple[Tensor, Tensor]:
    x, y = _distinct(encoder.id, torch.cat([clicked, scored])).split([len(clicked), len(scored)])
    return x + _distinct(encoder.described, clicked), y


FEATURES: dict[str, Features] = {
    "everywhere": Features(_everywhere, lambda encoder, item: encoder(item)),
    "clicks": Features(_clicks, lambda encoder, item: encoder.id(item)),
}


class UserEncoder(nn.Module, ABC):
    """f(x), from encoded clicks [n, D] with their time buckets [n] to user vectors, which are not normalised.

    Training reads `spans` of the histories and makes one vector for each click that a target follows; `trained` names
    these clicks. `served` picks the vector after the newest click of each span. sorted_together: as in `batched`.
    """

    sorted_together: ClassVar[int] = 1

    def __init__(self, config: CLRecConfig) -> None:
        super().__init__()
        self.position = nn.Embedding(config.max_len, config.dim)
        self.dropout = Dropout(config.dropout)

    @staticmethod
    @abstractmethod
    def spans(histories: Histories, length: int) -> Spans | Prefixes:
        """Spans of at most `length` clicks; a target follows the newest click of each."""

    @staticmethod
    @abstractmethod
    def trained(clicks: Packed) -> Tensor:
        """[N], the packed rows of the clicks that a target follows."""

    @staticmethod
    @abstractmethod
    def served(vectors: Tensor, clicks: Packed) -> Tensor:
        """[N, D] -> [B, D], the vector after the newest click of each span."""

    @abstractmethod
    def forward(self, x: Tensor, bucket: Tensor, clicks: Packed) -> Tensor:
        """x [n, D], bucket [n] -> [N, D]."""


class Pooling(UserEncoder):
    """WHA(MultiAtt(X)) of appendix B.1.2 with normalised heads (B.2). The embeddings of a click's time bucket and of
    its position are added to it; the earliest click has position 0. A span is all that was clicked before one target.
    """

    sorted_together = TOGETHER

    def __init__(self, config: CLRecConfig) -> None:
        super().__init__(config)
        self.bucket = nn.Embedding(len(config.time_cuts) + 1, config.dim) if config.time_cuts else None
        self.attention = MultiAtt(config.dim, config.hidden, config.heads)
        self.aggregate = WeightedHeads(config.dim)

    @staticmethod
    def spans(histories: Histories, length: int) -> Prefixes:
        return Prefixes(histories, length)

    @staticmethod
    def trained(clicks: Packed) -> Tensor:
        return clicks.last

    @staticmethod
    def served(vectors: Tensor, clicks: Packed) -> Tensor:
        return vectors

    def forward(self, x: Tensor, bucket: Tensor, clicks: Packed) -> Tensor:
        x = x + self.position(clicks.position)
        if self.bucket is not None:
            x = x + self.bucket(bucket)
        return self.aggregate(F.normalize(self.attention(self.dropout(x), clicks), dim=-1))


class Transformer(UserEncoder):
    """SASRec's encoder (Kang & McAuley 2018): causal blocks over positions and clicks, which predict the click after
    each click. It has no time buckets: the time up to the newest click would tell earlier clicks about later ones.
    """

    def __init__(self, config: CLRecConfig) -> None:
        super().__init__(config)
        self.blocks = nn.ModuleList(CausalBlock(config.dim, config.heads, config.dropout) for _ in range(config.blocks))
        self.norm = nn.LayerNorm(config.dim)

    @staticmethod
    def spans(histories: Histories, length: int) -> Spans:
        cut = windows(histories, length)
        return cut._replace(stop=cut.stop - 1)  # the last click of a window is a target only

    @staticmethod
    def trained(clicks: Packed) -> Tensor:
        return torch.arange(len(clicks.row), device=clicks.row.device)

    @staticmethod
    def served(vectors: Tensor, clicks: Packed) -> Tensor:
        return vectors[clicks.last]

    def forward(self, x: Tensor, bucket: Tensor, clicks: Packed) -> Tensor:
        x = self.dropout(x + self.position(clicks.position))
        for block in self.blocks:
            x = block(x, clicks)
        return self.norm(x)


ENCODERS: dict[str, type[UserEncoder]] = {"pooling": Pooling, "sasrec": Transformer}
