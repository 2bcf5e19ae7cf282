"""SimCLR (Chen et al. 2020) on scanned digits: `fastcl.nt_xent` over two augmented views of each image.

    python -m examples.simclr
"""

import torch
from torch import Tensor, nn

import fastcl
import fastcl.eval
from examples.shared import augmented, batches, digits, few_labels, image_encoder


def train(images: Tensor, epochs: int = 20) -> nn.Module:
    model = image_encoder()
    head = nn.Sequential(nn.ReLU(), nn.Linear(64, 32))  # thrown away after training
    optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()], lr=2e-3)
    for rows in batches(len(images), 256, epochs):
        view1, view2 = (head(model(augmented(images[rows]))) for _ in range(2))
        loss = fastcl.nt_xent(view1, view2, temperature=0.5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def main(seed: int = 0) -> tuple[float, float]:
    """Accuracy of a linear probe on the encoder, before and after training."""
    images, labels = digits()
    few, rest = few_labels(labels, 10)

    def probe(encoder: nn.Module) -> float:
        x = encoder(images)
        return fastcl.eval.linear_probe(x[few], labels[few], x[rest], labels[rest])

    torch.manual_seed(seed)
    untrained = probe(image_encoder())
    torch.manual_seed(seed)
    return untrained, probe(train(images))


if __name__ == "__main__":
    print("accuracy of a linear probe, 10 labels a class: untrained {:.3f}, trained {:.3f}".format(*main()))
