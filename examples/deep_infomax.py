"""Deep InfoMax (Hjelm et al. 2019) on scanned digits: `fastcl.infonce` between an image and its own places.

    python -m examples.deep_infomax
"""

import torch
from torch import Tensor, nn

import fastcl
from examples.shared import batches, digits, few_labels, probe


class Encoder(nn.Module):
    """Images [N, 1, 8, 8] to a map of local features [N, 64, 4, 4] and from it to global ones [N, 64]."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU()
        )
        self.whole = nn.Sequential(nn.Flatten(), nn.Linear(1024, 64))

    def forward(self, images: Tensor) -> Tensor:
        return self.whole(self.places(images))


def train(images: Tensor, epochs: int = 10, dim: int = 64) -> nn.Module:
    model = Encoder()
    of_place, of_whole = nn.Linear(64, dim), nn.Linear(64, dim)
    parameters = [*model.parameters(), *of_place.parameters(), *of_whole.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=2e-3)
    for rows in batches(len(images), 128, epochs):
        places = model.places(images[rows])  # [B, 64, 4, 4]
        whole = of_whole(model.whole(places))
        local = of_place(places.flatten(2).transpose(1, 2))  # [B, 16, D]
        query = whole[:, None].expand_as(local).flatten(0, 1)  # an image for each of its places
        image = torch.arange(len(rows)).repeat_interleave(local.shape[1])
        # All places of all other images are negatives; ids leave out the places of the same image.
        loss = fastcl.infonce(query, local.flatten(0, 1), temperature=0.2, ids=image)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def main(seed: int = 0) -> tuple[float, float]:
    """Accuracy of a linear probe on the global features, before and after training."""
    images, labels = digits()
    split = few_labels(labels, 10)
    torch.manual_seed(seed)
    untrained = probe(Encoder()(images), labels, *split)
    torch.manual_seed(seed)
    return untrained, probe(train(images)(images), labels, *split)


if __name__ == "__main__":
    print("accuracy of a linear probe, 10 labels a class: untrained {:.3f}, trained {:.3f}".format(*main()))
