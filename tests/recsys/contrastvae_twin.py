"""A ContrastVAE small enough to follow, and its networks written a second time: plain loops over one padded row."""

import math

import numpy as np
import torch

from fastcl.recsys import ContrastVAE, Histories, Items
from fastcl.recsys.models.contrastvae.model import View

COUNT = 40  # items
SMALL = {"dim": 16, "max_len": 7, "positions": "oldest"}
MODES = {
    "AVAE": (),
    "MA": ("dropout",),
    "VA": ("variational",),
    "DA": ("crop", "mask", "reorder"),
    "VA+DA": ("variational", "crop", "mask", "reorder"),
}


def items() -> Items:
    return Items(tuple(f"i{n}" for n in range(1, COUNT + 1)))


def histories(rows: int = 30, seed: int = 0, longest: int = 15) -> Histories:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest + 1, rows)
    return Histories.from_lists([rng.integers(1, COUNT + 1, n).tolist() for n in lengths])


def model(seed: int = 1, **options) -> ContrastVAE:
    fixed = {"positions": "newest"} if options.get("compat") == "paper-code" else {}
    return ContrastVAE(items(), seed=seed, **{**SMALL, **fixed, **options})


def one_batch(net: ContrastVAE, data: Histories, seed: int = 0) -> tuple[View, ...]:
    (batch,) = net.batches(data, np.random.default_rng(seed))
    return batch


def plain_block(block, x, allowed):  # x [L, D] of one row, allowed [L, L] additive
    heads = block.heads
    q, k, v = (t.reshape(len(x), heads, -1).transpose(0, 1) for t in block.qkv(x).chunk(3, -1))
    weight = ((q @ k.transpose(1, 2)) / math.sqrt(q.shape[-1]) + allowed).softmax(-1)
    x = block.norm_attention(x + block.out((weight @ v).transpose(0, 1).reshape(len(x), -1)))
    inner, _, outer = block.feed
    hidden = inner(x)
    return block.norm_feed(x + outer(hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))))


def through(blocks, x, allowed):
    for block in blocks:
        x = plain_block(block, x, allowed)
    return x


def embedded(net, sequence):
    position = net.position.weight[: len(sequence)]
    return net.norm(net.item.weight[sequence] + (position.flip(0) if net.config.positions == "newest" else position))


def log_sigmoid(x):
    return torch.log(1 / (1 + torch.exp(-x)))


def binary_loss(net, hidden, target, negative):
    up, down = (hidden * net.item.weight[target]).sum(-1), (hidden * net.item.weight[negative]).sum(-1)
    return -log_sigmoid(up) - torch.log(1 - 1 / (1 + torch.exp(-down)))


def kl_by_hand(mu, log_variance):
    return -0.5 * (1 + log_variance - mu**2 - torch.exp(log_variance)).sum(-1)
