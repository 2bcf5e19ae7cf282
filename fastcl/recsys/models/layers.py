"""The network parts of the models: the causal Transformer blocks and the two pooling steps of CLRec, all on packed
clicks; and how weights begin.

No item tables, no losses and no batching here. Linear layers see real clicks only; attention runs on padded blocks.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastcl.recsys.models.batching import Packed

# Which row of a position table a click takes: its place from the oldest click of its window, or from the newest one.
POSITIONS: dict[str, Callable[[Packed], Tensor]] = {
    "oldest": lambda clicks: clicks.position,
    "newest": lambda clicks: clicks.length[clicks.row] - 1 - clicks.position,
}


SHORT = 0.02  # standard deviation of an embedding at the start


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Weights made inside depend on the seed alone; the caller's random state stays where it is."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


@torch.no_grad()
def short_normal(model: nn.Module) -> None:
    """Weights of linear layers and embeddings normal with standard deviation 0.02, biases and padding rows zero."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=SHORT)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            module.weight[module.padding_idx] = 0.0


def glorot_normal(model: nn.Module) -> None:
    """Normal everywhere, so that normalised vectors start evenly spread over the sphere (Zhou et al. 2021, appendix
    B.2); biases zero.

    Embeddings start short, as Glorot's rule has it for tables of some thousand rows: a step of the optimiser then turns
    a vector further, and rarely clicked items learn in fewer epochs.
    """
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif isinstance(module, nn.Embedding | nn.EmbeddingBag):
                nn.init.normal_(parameter, std=SHORT)
            elif not isinstance(module, nn.LayerNorm):
                nn.init.xavier_normal_(parameter)


class Dropout(nn.Dropout):
    """nn.Dropout with four times less to draw on a CPU, where torch takes the numbers of a serial generator one by one
    and training up to a fifth of its time there: each 64-bit number decides four elements here, 16 bits each.

    The rate is rounded to a multiple of 2^-16, and what is kept is scaled by that: the mean stays exact.
    """

    def forward(self, x: Tensor) -> Tensor:
        kept = round((1.0 - self.p) * 2**16)
        if not self.training or x.device.type != "cpu" or kept in (0, 2**16):
            return super().forward(x)
        count = x.numel()
        draws = torch.empty(-(-count // 4), device="cpu", dtype=torch.int64).random_(-(2**63), None)
        draws = draws.view(torch.int16)[:count].view(x.shape)
        scale = torch.lt(draws, kept - 2**15, out=torch.empty(x.shape, device="cpu", dtype=x.dtype))
        return x * scale.mul_(2**16 / kept)


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: Dropout) -> Tensor:
    """softmax(query key^T / sqrt(d) + mask) value, [B, heads, L, d], with dropout on the weights.

    A boolean mask is True where a key is seen; None: causal.

    Torch's own, but for training with dropout on a CPU, where that too stores the weights and draws for each by itself.
    """
    rate = dropout.p if dropout.training else 0.0
    if not rate or query.device.type != "cpu":
        return F.scaled_dot_product_attention(query, key, value, mask, rate, is_causal=mask is None)
    if mask is None:
        mask = torch.ones(query.shape[-2], key.shape[-2], device=query.device, dtype=torch.bool).tril()
    logits = (query * query.shape[-1] ** -0.5) @ key.mT
    logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask
    return dropout(logits.softmax(-1)) @ value


def split(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """[b, L, 3D] -> query, key and value, [b, heads, L, D/heads] each."""
    query, key, value = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in qkv.chunk(3, -1))
    return query, key, value


def merged(x: Tensor) -> Tensor:
    """[b, heads, L, D/heads] -> [b, L, D]."""
    return x.transpose(1, 2).flatten(2)


class CausalBlock(nn.Module):
    """Pre-LN Transformer block (Kang & McAuley 2018, section 3.2): x + Attention(LN(x)), then x + FFN(LN(x)), FFN of
    width `dim`.

    Padding stands behind the real clicks of its row, so the causal mask alone keeps it out of them.
    """

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_feed = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.feed = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), Dropout(dropout), nn.Linear(dim, dim))
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, clicks: Packed) -> Tensor:  # x: [n, D]
        def mixed(qkv: Tensor, block: int) -> Tensor:  # [b, L, 3D] -> [b, L, D]
            return merged(F.scaled_dot_product_attention(*split(qkv, self.heads), is_causal=True))

        x = x + self.dropout(self.out(clicks.by_length(self.qkv(self.norm_attention(x)), mixed)))
        return x + self.dropout(self.feed(self.norm_feed(x)))


class GELU(nn.Module):
    """torch's exact GELU, on a transposed view of x [n, D].

    Contiguous inputs go to oneDNN there, which compiles a kernel for every n and keeps the last thousand: gigabytes,
    and more time than the function takes, where every batch has a length of its own.
    """

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x.mT).mT


class PostBlock(nn.Module):
    """Post-LN Transformer block (Vaswani et al. 2017): LN(x + Attention(x)), then LN(x + FFN(x)), FFN with GELU and
    of width 4 `dim`, dropout on the attention weights too.

    masks: of each block of the clicks, as `attention` takes it, [b, 1, L, L]; None: the causal mask, which keeps
        padding behind the clicks out.
    """

    def __init__(self, dim: int, heads: int, dropout: float, attention_dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.feed = nn.Sequential(nn.Linear(dim, 4 * dim), GELU(), nn.Linear(4 * dim, dim))
        self.norm_attention, self.norm_feed = nn.LayerNorm(dim, eps=1e-12), nn.LayerNorm(dim, eps=1e-12)
        self.dropout, self.attention_dropout = Dropout(dropout), Dropout(attention_dropout)

    def forward(self, x: Tensor, clicks: Packed, masks: Sequence[Tensor] | None = None) -> Tensor:  # x: [n, D]
        def mixed(qkv: Tensor, block: int) -> Tensor:  # [b, L, 3D] -> [b, L, D]
            mask = None if masks is None else masks[block]
            return merged(attention(*split(qkv, self.heads), mask, self.attention_dropout))

        x = self.norm_attention(x + self.dropout(self.out(clicks.by_length(self.qkv(x), mixed))))
        return self.norm_feed(x + self.dropout(self.feed(x)))


class MultiAtt(nn.Module):
    """SoftMax(MLP(X)^T) X: each head weighs a row's clicks with a softmax of its own (Zhou et al. 2021, appendix
    B.1.2).
    """

    def __init__(self, dim: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.Tanh(), nn.Linear(hidden, heads))

    def forward(self, x: Tensor, clicks: Packed) -> Tensor:  # x: [n, D] -> [B, H, D]
        weight = clicks.pad(self.mlp(x), fill=-torch.inf).softmax(1)  # [B, L, H]; a row has at least one click
        return weight.transpose(1, 2) @ clicks.pad(x)


class WeightedHeads(nn.Module):
    """WHA (Zhou et al. 2021, appendix B.1.2): m = mean_h z_h, alpha = softmax_h(z_h^T A m), sum_h alpha_h z_h."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.empty(dim, dim))

    def forward(self, z: Tensor) -> Tensor:  # [B, H, D] -> [B, D]
        alpha = (z @ (self.a @ z.mean(1).unsqueeze(-1))).softmax(1)  # [B, H, 1]
        return (alpha * z).sum(1)
