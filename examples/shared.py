"""What the examples share: small real data sets as tensors, an image encoder, a linear probe, a rank correlation.

No loss and no training. The files are fetched and checked by benchmarks/prepare.py when they are first needed.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from zlib import crc32

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.prepare import ready


def digits() -> tuple[Tensor, Tensor]:
    """1,797 scanned digits: images [N, 1, 8, 8] in 0..1, labels [N]."""
    with gzip.open(ready("images/digits") / "images" / "digits.csv.gz", "rt") as file:
        rows = torch.tensor([[float(x) for x in line.split(",")] for line in file])
    return rows[:, :64].reshape(-1, 1, 8, 8) / 16, rows[:, 64].long()


def augmented(images: Tensor) -> Tensor:
    """Another view of each image [N, 1, 8, 8]: shifted by up to a pixel, one 3 x 3 patch erased, noise added."""
    n, _, height, width = images.shape
    padded = F.pad(images, (1, 1, 1, 1))[:, 0]
    top, left = torch.randint(3, (2, n, 1, 1))
    row, column = torch.arange(height)[:, None], torch.arange(width)
    view = padded[torch.arange(n)[:, None, None], top + row, left + column]
    y, x = torch.randint(6, (2, n, 1, 1))
    erased = (row >= y) & (row < y + 3) & (column >= x) & (column < x + 3)
    return (view.masked_fill(erased, 0.0) + 0.1 * torch.randn_like(view))[:, None]


def image_encoder() -> nn.Module:
    """Images [N, 1, 8, 8] to features [N, 64]."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 64),
    )  # fmt: skip


def sentence_pairs(part: str) -> tuple[list[str], list[str], Tensor]:
    """STS benchmark: first sentences, second sentences, human similarity 0..5 [N]."""
    with gzip.open(ready("text/stsb") / "text" / f"stsb-{part}.tsv.gz", "rt", encoding="utf-8") as file:
        rows = [line.rstrip("\n").split("\t") for line in file]
    return [r[2] for r in rows], [r[3] for r in rows], torch.tensor([float(r[1]) for r in rows])


def hashed_words(sentences: list[str], buckets: int) -> Tensor:
    """Words and their three-letter pieces counted in `buckets` columns, rows of length 1: [N, buckets]."""
    rows, columns = [], []
    for i, sentence in enumerate(sentences):
        for word in sentence.lower().split():
            marked = f"<{word}>"
            for piece in (marked, *(marked[j : j + 3] for j in range(len(marked) - 2))):
                rows.append(i)
                columns.append(crc32(piece.encode()) % buckets)
    index = torch.tensor(rows) * buckets + torch.tensor(columns)
    return F.normalize(index.bincount(minlength=len(sentences) * buckets).view(-1, buckets).float(), dim=1)


def citations() -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """Cora: words [N, 1433], rows summing to 1; D^-1/2 (A + I) D^-1/2, sparse [N, N]; labels [N]; Planetoid split."""
    folder = ready("graph/cora") / "graph"
    with gzip.open(folder / "cora.nodes.txt.gz", "rt") as file:
        nodes = [[int(x) for x in line.split()] for line in file]
    words = torch.zeros(len(nodes), 1433)
    for node, _, *ones in nodes:
        words[node, ones] = 1.0
    with gzip.open(folder / "cora.edges.txt.gz", "rt") as file:
        edges = torch.tensor([[int(x) for x in line.split()] for line in file]).T
    loops = torch.arange(len(nodes)).expand(2, -1)
    index = torch.cat([edges, edges.flip(0), loops], 1)
    degree = index[0].bincount().float()
    weight = (degree[index[0]] * degree[index[1]]).rsqrt()
    graph = torch.sparse_coo_tensor(index, weight, (len(nodes), len(nodes)), check_invariants=True).coalesce()
    with gzip.open(folder / "cora.split.txt.gz", "rt") as file:
        split = {name: torch.tensor([int(x) for x in rest]) for name, *rest in (line.split() for line in file)}
    labels = torch.tensor([label for _, label, *_ in nodes])
    return words / words.sum(1, keepdim=True).clamp(min=1), graph, labels, split


def batches(n: int, size: int, epochs: int) -> Iterator[Tensor]:
    """Row numbers of shuffled batches; a last batch that is not full is left out."""
    for _ in range(epochs):
        yield from torch.randperm(n)[: n - n % size].split(size)


def probe(features: Tensor, labels: Tensor, train: Tensor, test: Tensor, ridge: float = 1e-2) -> float:
    """Accuracy on rows `test` of a linear classifier (least squares on one-hot labels) fitted on rows `train`."""
    x = features.detach().double()
    x = (x - x[train].mean(0)) / (x[train].std() + 1e-12)
    x = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)
    a, b = x[train], F.one_hot(labels[train]).double()
    weight = torch.linalg.solve(a.T @ a + ridge * len(train) * torch.eye(x.shape[1], dtype=x.dtype), a.T @ b)
    return ((x[test] @ weight).argmax(1) == labels[test]).double().mean().item()


def few_labels(labels: Tensor, per_class: int) -> tuple[Tensor, Tensor]:
    """(train, test): the first `per_class` rows of every class, and all other rows."""
    train = torch.cat([(labels == c).nonzero()[:per_class, 0] for c in labels.unique()])
    rest = torch.ones(len(labels), dtype=torch.bool)
    rest[train] = False
    return train, rest.nonzero()[:, 0]


def spearman(a: Tensor, b: Tensor) -> float:
    """Correlation of ranks; equal values share the mean of theirs."""
    ranks = []
    for x in (a, b):
        _, group, count = x.detach().double().unique(return_inverse=True, return_counts=True)
        ranks.append((count.cumsum(0) - (count - 1) / 2)[group])
    return torch.corrcoef(torch.stack(ranks))[0, 1].item()
