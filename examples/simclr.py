"""SimCLR (Chen et al. 2020) on scanned digits: `fastcl.nt_xent` over two augmented views of each image.

While it learns, the vectors of the loss are measured by alignment and uniformity, which need no labels, and by nearest
neighbours, which do.

    python -m examples.simclr
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastcl
import fastcl.eval
from examples.shared import augmented, batches, digits, few_labels, image_encoder


def train(images: Tensor, labels: Tensor, epochs: int = 20) -> nn.Module:
    model = image_encoder()
    head = nn.Sequential(nn.ReLU(), nn.Linear(64, 32))  # thrown away after training
    optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()], lr=2e-3)
    for step, rows in enumerate(batches(len(images), 256, epochs)):
        view1, view2 = (head(model(augmented(images[rows]))) for _ in range(2))
        loss = fastcl.nt_xent(view1, view2, temperature=0.5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step}: {measures(nn.Sequential(model, head), images, labels)}")
    return model


@torch.no_grad()
def measures(encoder: nn.Module, images: Tensor, labels: Tensor) -> str:
    """How near two views of an image are, how evenly images are spread (Wang & Isola 2020; lower is better for both),
    and the accuracy of nearest neighbours with 10 labels a class.
    """
    with torch.random.fork_rng():  # what is measured must not change what is learned
        view1, view2 = (F.normalize(encoder(augmented(images)), dim=1) for _ in range(2))
    alignment, uniformity = fastcl.alignment(view1, view2).item(), fastcl.uniformity(view1).item()
    x, (few, rest) = encoder(images), few_labels(labels, 10)
    neighbours = fastcl.eval.knn_accuracy(x[few], labels[few], x[rest], labels[rest], k=5)
    return f"alignment {alignment:.2f}, uniformity {uniformity:.2f}, nearest neighbours {neighbours:.3f}"


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
    return untrained, probe(train(images, labels))


if __name__ == "__main__":
    print("accuracy of a linear probe, 10 labels a class: untrained {:.3f}, trained {:.3f}".format(*main()))
