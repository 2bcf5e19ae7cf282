"""MoCo (He et al. 2020) on scanned digits: `fastcl.infonce` against a `NegativeQueue` that a momentum encoder fills.

    python -m examples.moco
"""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastcl
from examples.shared import augmented, batches, digits, few_labels, image_encoder, probe
from fastcl import momentum_update


def train(images: Tensor, epochs: int = 20) -> nn.Module:
    model = image_encoder()
    query_encoder = nn.Sequential(model, nn.ReLU(), nn.Linear(64, 32))
    key_encoder = copy.deepcopy(query_encoder).requires_grad_(False)
    queue = fastcl.NegativeQueue(capacity=512, dim=32)
    optimizer = torch.optim.Adam(query_encoder.parameters(), lr=2e-3)
    for rows in batches(len(images), 128, epochs):
        momentum_update(key_encoder, query_encoder, 0.99)
        key = F.normalize(key_encoder(augmented(images[rows])), dim=1)
        query = query_encoder(augmented(images[rows]))
        # The first queue is empty: that batch has loss 0.
        loss = fastcl.infonce(query, key, temperature=0.1, in_batch=False, queue=queue)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        queue.push(key)
    return model


def main(seed: int = 0) -> tuple[float, float]:
    """Accuracy of a linear probe on the encoder, before and after training."""
    images, labels = digits()
    split = few_labels(labels, 10)
    torch.manual_seed(seed)
    untrained = probe(image_encoder()(images), labels, *split)
    torch.manual_seed(seed)
    return untrained, probe(train(images)(images), labels, *split)


if __name__ == "__main__":
    print("accuracy of a linear probe, 10 labels a class: untrained {:.3f}, trained {:.3f}".format(*main()))
