"""The parts of Multi-CLRec: the item encoder with categories, the routing of items to intents, the straight-through
choice of an intent, and the three auxiliary losses. Equation numbers are those of Zhou et al. 2021, section 3.2.

No queues, batches or settings here.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastcl.arithmetic import no_autocast
from fastcl.normalize import normalized
from fastcl.recsys.data import PAD, Items
from fastcl.recsys.models.layers import codes_of


def mlp(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    """The paper's MLPs, of two layers.

    Where an MLP's output is a vector of the items' space, callers add it to the vector that it changes, so that users
    and items lie in one space from the first step. With one intent, recall@10 after three epochs on Amazon Tools was
    0.026 with this sum and 0.017 without it.
    """
    return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs))


class CategoryItems(nn.Module):
    """Eq. 5: g(y) = sum of the parts + MLP([the parts]), where the parts are the embeddings of the id and of each
    feature; and c(y), the embedding of the category.

    c(y) embeds the feature `category`, as the mean over several values. Items without a value, and all items where
    `category` is "", have the embedding of their id as c(y), so that each is a category of its own.
    """

    def __init__(self, items: Items, category: str, hidden: int, id_table: nn.Embedding) -> None:
        super().__init__()
        self.id, dim = id_table, id_table.embedding_dim
        self.features = nn.ModuleDict()
        for nth, feature in enumerate(items.features.values()):
            self.features[str(nth)] = nn.EmbeddingBag(len(feature.values) + 1, dim, mode="mean", padding_idx=PAD)
            # The codes are not in the state dict, since a run folder stores the item table beside the weights.
            self.register_buffer(f"codes_{nth}", codes_of(feature), persistent=False)
        self.category = list(items.features).index(category) if category else None
        self.mlp = mlp((1 + len(self.features)) * dim, hidden, dim)

    def forward(self, item: Tensor) -> tuple[Tensor, Tensor]:  # int64 [U] -> g [U, D], c [U, D]
        embedding = self.id(item)
        parts = [bag(self.get_buffer(f"codes_{nth}")[item]) for nth, bag in self.features.items()]
        category = embedding
        if self.category is not None:
            known = (self.get_buffer(f"codes_{self.category}")[item] != PAD).any(1, keepdim=True)
            category = torch.where(known, parts[self.category], embedding)
        return sum(parts, embedding) + self.mlp(torch.cat([embedding, *parts], -1)), category


@no_autocast  # an item's intent must be the same inside and outside of autocast
def routing(category: Tensor, prototypes: Tensor, temperature: float) -> Tensor:
    """Eq. 7, in logarithms: log p_{h|t} = log softmax_h(cos(mu_h, c_t) / rho), [n, D] and [H, D] -> [n, H]."""
    return (normalized(category) @ normalized(prototypes).T / temperature).log_softmax(-1)


def straight_through(logits: Tensor) -> Tensor:
    """Eq. 9: one-hot at the largest logit of each row [B, H]; its gradient is that of softmax(logits) (Bengio et al.
    2013).
    """
    soft = logits.softmax(-1)
    hard = F.one_hot(logits.argmax(-1), logits.shape[-1]).to(soft)
    return hard + (soft - soft.detach())  # the difference is exactly 0


def polarity(log_routing: Tensor) -> Tensor:
    """Eq. 10: -log max_h p_{h|T}, averaged over the targets [B, H]."""
    return -log_routing.amax(-1).mean()


def separation(cosine: Tensor, intent: Tensor, temperature: float) -> Tensor:
    """Eq. 11: cross entropy of the target's intent [B] under softmax_h(cos(z_h, g(y_T)) / rho), cosine [B, H]."""
    return F.cross_entropy(cosine / temperature, intent)


def balance(log_routing: Tensor) -> Tensor:
    """Eq. 12: KL(uniform || pi) = sum_h 1/H (log 1/H - log pi_h), pi_h the mean of p_{h|t} over the items [n, H]."""
    count, intents = log_routing.shape
    log_pi = log_routing.logsumexp(0) - math.log(count)
    return -math.log(intents) - log_pi.mean()
