"""The Transformer that CL4SRec and S3-Rec train: SASRec with layer norm behind attention and FFN, GELU, and a row of
the item table for a mask token. No losses here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from fastcl.recsys.baselines.nextitem import NextItem, NextItemConfig, check_heads
from fastcl.recsys.data import PAD
from fastcl.recsys.models.batching import Packed
from fastcl.recsys.models.layers import POSITIONS, Dropout, PostBlock, short_normal
from fastcl.recsys.options import at_least
from fastcl.recsys.settings import setting


@dataclass(frozen=True)
class TransformerConfig(NextItemConfig):
    """Settings that CL4SRec and S3-Rec share."""

    blocks: int = setting(2, "Number of Transformer blocks.")
    heads: int = setting(2, "Attention heads of each block.")

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, "blocks", self.blocks)
        check_heads(self)


class Transformer(NextItem):
    """Row I+1 of the item table, `mask`, is the mask token, which is never scored."""

    def build(self) -> None:
        config = self.config
        self.mask = len(self.items) + 1
        self.item = nn.Embedding(len(self.items) + 2, config.dim, padding_idx=PAD)
        self.position = nn.Embedding(config.max_len, config.dim)
        self.norm, self.dropout = nn.LayerNorm(config.dim, eps=1e-12), Dropout(config.dropout)
        self.blocks = nn.ModuleList(
            PostBlock(config.dim, config.heads, config.dropout, config.dropout) for _ in range(config.blocks)
        )
        short_normal(self)

    def forward(self, item: Tensor, clicks: Packed, masks: Sequence[Tensor] | None = None) -> Tensor:
        """item [n] -> [n, D], the state of each click. masks: as PostBlock takes them; None: the causal mask."""
        x = self.dropout(self.norm(self.item(item) + self.position(POSITIONS["newest"](clicks))))
        for block in self.blocks:
            x = block(x, clicks, masks)
        return x
