"""Deep Graph Infomax (Velickovic et al. 2019) on Cora citations: `fastcl.jensen_shannon` between nodes and their graph.

    python -m examples.dgi
"""

import torch
from torch import Tensor, nn

import fastcl
from examples.shared import citations, probe


class GraphLayer(nn.Module):
    """PReLU(A X W + b): one graph convolution."""

    def __init__(self, words: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.init.xavier_uniform_(torch.empty(words, dim)))
        self.bias = nn.Parameter(torch.zeros(dim))
        self.activation = nn.PReLU()

    def forward(self, words: Tensor, graph: Tensor, order: Tensor) -> Tensor:
        return self.activation(graph @ (words @ self.weight)[order] + self.bias)


def train(words: Tensor, graph: Tensor, dim: int = 128, steps: int = 60) -> nn.Module:
    model, discriminator = GraphLayer(words.shape[1], dim), nn.Linear(dim, dim, bias=False)
    optimizer = torch.optim.Adam([*model.parameters(), *discriminator.parameters()], lr=1e-2)
    nodes = torch.arange(len(words))
    for _ in range(steps):
        real = model(words, graph, nodes)
        fake = model(words, graph, nodes[torch.randperm(len(nodes))])  # the same graph with the words dealt anew
        summary = discriminator(real.mean(0).sigmoid()).expand_as(real)
        loss = fastcl.jensen_shannon(summary, real, fake[:, None])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def main(seed: int = 0) -> tuple[float, float]:
    """Accuracy of a linear probe on the usual 140 / 1,000 split, before and after training."""
    words, graph, labels, split = citations()
    everything = (words, graph, torch.arange(len(words)))
    torch.manual_seed(seed)
    untrained = probe(GraphLayer(words.shape[1], 128)(*everything), labels, split["train"], split["test"])
    torch.manual_seed(seed)
    return untrained, probe(train(words, graph)(*everything), labels, split["train"], split["test"])


if __name__ == "__main__":
    print("accuracy of a linear probe, 140 labels: untrained {:.3f}, trained {:.3f}".format(*main()))
