"""Network parts of the models on packed clicks, namely Transformer blocks and the two pooling steps of CLRec; the
initial weights; and the lengths of item vectors.

Linear layers see real clicks only; attention runs on padded blocks. No item tables, losses or batching here.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastcl.recsys.data import Feature
from fastcl.recsys.models.batching import Packed

# The row of the position table for each click: its distance from the oldest or from the newest click of its window.
POSITIONS: dict[str, Callable[[Packed], Tensor]] = {
    "oldest": lambda clicks: clicks.position,
    "newest": lambda clicks: clicks.length[clicks.row] - 1 - clicks.position,
}


SHORT = 0.02  # initial standard deviation of embeddings


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """A block in which initial weights depend on the seed alone. The caller's random state does not change."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def codes_of(feature: Feature) -> Tensor:
    """int64 [I+1, W], the feature's codes as an embedding bag reads them, which refuses bags of width 0."""
    codes = torch.from_numpy(feature.codes)
    return codes if codes.shape[1] else codes.new_zeros(len(codes), 1)


@torch.no_grad()
def short_normal(model: nn.Module) -> None:
    """Draws linear and embedding weights from N(0, 0.02^2); sets biases and padding rows to zero."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=SHORT)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            module.weight[module.padding_idx] = 0.0


def glorot_normal(model: nn.Module) -> None:
    """Draws all weights from normal distributions, so that normalised vectors begin evenly spread over the sphere (Zhou
    et al. 2021, appendix B.2); biases begin at zero.

    Embeddings begin short, as Glorot's rule makes tables of some thousand rows: an optimiser step then turns a vector
    further, and rarely clicked items learn in fewer epochs.
    """
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif isinstance(module, nn.Embedding | nn.EmbeddingBag):
                nn.init.normal_(parameter, std=SHORT)
            elif not isinstance(module, nn.LayerNorm):
                nn.init.xavier_normal_(parameter)


NORMALIZE_MEANING = """Strength of tau-normalisation (Kang et al. 2020): scoring divides each item's vector by its
length to this power, from 0, the vectors of training, to 1, vectors of length one. Training does not, and may make the
vectors of rarely clicked items too long."""
SMOOTHING_MEANING = """Label smoothing (Szegedy et al. 2016) of the softmax over all items: the share of a target,
    from 0 to 1, that is spread evenly over all items. The other losses do not take it."""


def shortened(rows: Tensor, power: float) -> Tensor:
    """rows / |row|^power, [n, D]: tau-normalisation (Kang et al. 2020, section 4.3). A row of zeros stays one."""
    if not power:
        return rows
    length = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    return rows * torch.where(length > 0, length, 1.0) ** -power


class Dropout(nn.Dropout):
    """nn.Dropout that draws four times fewer random numbers on a CPU: each 64-bit number decides four elements.

    torch's CPU generator is serial and takes up to a fifth of the training time. The rate is rounded to a multiple of
    2^-16, and kept elements are scaled by the rounded rate, so that the mean is exact.
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

    This is torch's function, except for training with dropout on a CPU: there torch stores the weights as well, and
    draws a random number for each.
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

    Padding stands behind the real clicks of its row, so that the causal mask hides it from them.
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

    For contiguous inputs torch calls oneDNN, which compiles a kernel for every n and keeps the last thousand. Where
    every batch has another n, that takes gigabytes and more time than the function itself.
    """

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x.mT).mT


class PostBlock(nn.Module):
    """Post-LN Transformer block (Vaswani et al. 2017): LN(x + Attention(x)), then LN(x + FFN(x)). The FFN has GELU and
    width 4 `dim`; attention weights have dropout too.

    masks: the mask of each padded block [b, 1, L, L], as `attention` takes it; None: the causal mask, which hides
        padding behind the clicks.
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
    """SoftMax(MLP(X)^T) X: each head weighs the clicks of a row by its own softmax (Zhou et al. 2021, appendix B.1.2).
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
