"""Contrastive predictive coding (van den Oord et al. 2018) on sequences: `fastcl.infonce` over steps into the future.

A digit is read as a sequence of its eight rows of pixels; the probe reads the state after the last row.

    python -m examples.cpc
"""

import torch
from torch import Tensor, nn

import fastcl
from examples.shared import batches, digits, few_labels, probe


class CPC(nn.Module):
    def __init__(self, steps: int = 2) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 32))
        self.context = nn.GRU(32, 64, batch_first=True)
        self.predictors = nn.ModuleList(nn.Linear(64, 32) for _ in range(steps))

    def forward(self, sequences: Tensor) -> Tensor:
        return self.context(self.encoder(sequences))[0][:, -1]

    def loss(self, sequences: Tensor) -> Tensor:
        codes = self.encoder(sequences)  # [B, L, 32]
        context = self.context(codes)[0]
        losses = []
        for step, predict in enumerate(self.predictors, start=1):
            # Every place predicts the code `step` places later; all other places' codes are negatives.
            predicted, code = predict(context[:, :-step]).flatten(0, 1), codes[:, step:].flatten(0, 1)
            losses.append(fastcl.infonce(predicted, code, temperature=0.1))
        return torch.stack(losses).mean()


def train(sequences: Tensor, epochs: int = 20) -> CPC:
    model = CPC()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for rows in batches(len(sequences), 128, epochs):
        loss = model.loss(sequences[rows] + 0.1 * torch.randn_like(sequences[rows]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def main(seed: int = 0) -> tuple[float, float]:
    """Accuracy of a linear probe on the last state, before and after training."""
    images, labels = digits()
    sequences, split = images[:, 0], few_labels(labels, 10)
    torch.manual_seed(seed)
    untrained = probe(CPC()(sequences), labels, *split)
    torch.manual_seed(seed)
    return untrained, probe(train(sequences)(sequences), labels, *split)


if __name__ == "__main__":
    print("accuracy of a linear probe, 10 labels a class: untrained {:.3f}, trained {:.3f}".format(*main()))
