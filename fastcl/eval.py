"""Evaluation of an encoder by its embeddings: nearest neighbours, a linear probe, retrieval in both directions.

Every figure is exact and computed on the device of the embeddings, in chunks, so that no N x M matrix is stored.
Nothing here has a gradient. `fastcl.alignment` and `fastcl.uniformity` are two further usual figures; under
`torch.no_grad()` after every epoch they show the course of a training.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fastcl.arithmetic import no_autocast

__all__ = ["knn_accuracy", "linear_probe", "retrieval"]
CHUNK = 2**24  # similarities held at once


@torch.no_grad()
def knn_accuracy(
    train: Tensor,  # [M, D]
    train_labels: Tensor,  # [M]
    test: Tensor,  # [N, D]
    test_labels: Tensor,  # [N]
    *,
    k: int = 20,
    temperature: float = 0.07,
) -> float:
    """Accuracy of the weighted nearest-neighbour classifier (Wu et al. 2018, Sec. 3.4): how often the class with

        argmax_c  sum over the k nearest train rows j of class c of exp(s_ij / temperature),    s = cosine,

    is that of test row i. Nothing is trained, so that the figure is cheap enough for every epoch.

    Args:
        train, test: [M, D] and [N, D], any floating dtype, M, N >= 1; normalised here.
        train_labels, test_labels: [M] and [N], integers from 0.
        k: number of neighbours, 1 <= k <= M. Of equal similarities at the k-th place any may be taken.
        temperature: > 0.

    Returns: a share from 0 to 1. The lower class wins a tie.

    Errors: TypeError and ValueError, each naming the argument.

    >>> import torch, fastcl.eval
    >>> train, labels = torch.eye(2), torch.tensor([0, 1])
    >>> fastcl.eval.knn_accuracy(train, labels, torch.tensor([[2.0, 1.0], [0.0, 1.0]]), torch.tensor([0, 0]), k=1)
    0.5
    """
    _check_embeddings(train=train, test=test)
    _check_labels(train, train_labels, "train_labels")
    _check_labels(test, test_labels, "test_labels")
    if not 1 <= k <= len(train):
        raise ValueError(f"k: expected 1 to {len(train)}, the rows of train, got {k}")
    if not temperature > 0:
        raise ValueError(f"temperature: expected a number > 0, got {temperature}")
    keys, classes = _unit(train), int(train_labels.max()) + 1
    right = 0
    for rows in _chunks(len(test), len(train)):
        similarity, nearest = _products(_unit(test[rows]), keys).topk(k, dim=1)
        votes = torch.zeros(len(similarity), classes, dtype=similarity.dtype, device=similarity.device)
        # The largest weight of a row is 1: exp cannot overflow, and a common factor changes no vote.
        weight = ((similarity - similarity[:, :1]) / temperature).exp()
        votes.scatter_add_(1, train_labels[nearest].long(), weight)
        right += int((votes.argmax(1) == test_labels[rows]).sum())
    return right / len(test)


def linear_probe(
    train: Tensor,  # [M, D]
    train_labels: Tensor,  # [M]
    test: Tensor,  # [N, D]
    test_labels: Tensor,  # [N]
    *,
    l2: float = 1e-3,
    iterations: int = 200,
) -> float:
    """Accuracy of multinomial logistic regression on frozen embeddings, the linear evaluation protocol: the weights are

        argmin_W,b  mean_i cross_entropy(W x_i + b, y_i) + l2 / 2 |W|^2

    found by L-BFGS in float64. The optimum is unique, so the figure depends on neither a seed nor a learning rate.

    Args:
        train, test: [M, D] and [N, D], any floating dtype, M, N >= 1. Each column is shifted and scaled to mean 0 and
            standard deviation 1 over train, so that `l2` means the same for every encoder.
        train_labels, test_labels: [M] and [N], integers from 0.
        l2: > 0. iterations: the most iterations of L-BFGS.

    Returns: a share from 0 to 1.

    Errors: TypeError and ValueError, each naming the argument.

    >>> import torch, fastcl.eval
    >>> x, y = torch.tensor([[-2.0], [-1.0], [1.0], [2.0]]), torch.tensor([0, 0, 1, 1])
    >>> fastcl.eval.linear_probe(x, y, torch.tensor([[-0.5], [0.5]]), torch.tensor([0, 1]))
    1.0
    """
    _check_embeddings(train=train, test=test)
    _check_labels(train, train_labels, "train_labels")
    _check_labels(test, test_labels, "test_labels")
    if not l2 > 0:
        raise ValueError(f"l2: expected a number > 0, got {l2}")
    with torch.inference_mode(False):  # tensors of an encoder's inference mode have no place in a graph: clones do
        own = [x.detach().clone() for x in (train, train_labels, test, test_labels)]
        return _probe(own[0], own[1], own[2], own[3], l2, iterations)


def _probe(
    train: Tensor, train_labels: Tensor, test: Tensor, test_labels: Tensor, l2: float, iterations: int
) -> float:
    x, labels = train.double(), train_labels.long()
    mean, spread = x.mean(0), x.std(0, unbiased=False)
    spread = torch.where(spread > 0, spread, 1.0)
    x = (x - mean) / spread
    classes = int(labels.max()) + 1
    weight = torch.zeros(x.shape[1], classes, dtype=x.dtype, device=x.device, requires_grad=True)
    bias = torch.zeros(classes, dtype=x.dtype, device=x.device, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weight, bias], max_iter=iterations, tolerance_grad=1e-8, tolerance_change=0.0, line_search_fn="strong_wolfe"
    )

    def objective() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(x @ weight + bias, labels) + l2 / 2 * weight.square().sum()
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(objective)
    with torch.no_grad():
        logits = ((test.double() - mean) / spread) @ weight + bias
        return float((logits.argmax(1) == test_labels).double().mean())


@torch.no_grad()
def retrieval(
    query: Tensor,  # [N, D]
    key: Tensor,  # [N, D]
    *,
    k: int | Sequence[int] = (1, 5, 10),
) -> dict[str, float]:
    """Recall@k of finding row i of `key` by row i of `query` among all rows by cosine, and of the reverse direction
    (image to text and text to image).

        rank_i = 1 + #{j: s_ij > s_ii} + #{j != i: s_ij = s_ii} / 2,    recall@k = mean of [rank <= k]

    Ties count half, so that a constant encoder gets no credit for the order of the rows.

    Args:
        query, key: [N, D], any floating dtype, N >= 1; normalised here.
        k: a cut-off or several, whole numbers from 1.

    Returns: "recall@K" and "reverse recall@K" for every K, and "median rank" and "reverse median rank".

    Errors: TypeError and ValueError, each naming the argument.

    >>> import torch, fastcl.eval
    >>> found = fastcl.eval.retrieval(torch.eye(3), torch.eye(3)[[0, 2, 1]], k=(1, 2))
    >>> round(found["recall@1"], 4), round(found["recall@2"], 4)  # the other two rows tie for ranks 2 and 3
    (0.3333, 0.3333)
    """
    _check_embeddings(query=query, key=key)
    if len(query) != len(key):
        raise ValueError(f"key: expected [{len(query)}, {query.shape[1]}], got {list(key.shape)}")
    k = [k] if isinstance(k, int) else k
    wrong = [cutoff for cutoff in k if not isinstance(cutoff, int) or cutoff < 1]
    if wrong or not k:
        raise ValueError(f"k: expected whole numbers from 1, got {tuple(k)}")
    found: dict[str, float] = {}
    for name, left, right in (("", _unit(query), _unit(key)), ("reverse ", _unit(key), _unit(query))):
        rank = _ranks(left, right)
        found |= {f"{name}recall@{cutoff}": float((rank <= cutoff).double().mean()) for cutoff in k}
        found[f"{name}median rank"] = float(rank.median() - (-rank).median()) / 2
    return found


@no_autocast
def _products(a: Tensor, b: Tensor) -> Tensor:
    return a @ b.T


def _ranks(query: Tensor, key: Tensor) -> Tensor:
    """float64 [N], the rank of each row's own key."""
    ranks = []
    for rows in _chunks(len(query), len(key)):
        similarity = _products(query[rows], key)
        own = similarity[:, rows].diagonal()
        higher = (similarity > own[:, None]).sum(1)
        equal = (similarity == own[:, None]).sum(1) - 1
        ranks.append(1.0 + higher.double() + 0.5 * equal.double())
    return torch.cat(ranks)


def _unit(x: Tensor) -> Tensor:
    return F.normalize(x.detach().to(torch.promote_types(x.dtype, torch.float32)), dim=1)


def _chunks(rows: int, columns: int) -> list[slice]:
    size = max(1, CHUNK // columns)
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def _check_embeddings(**named: Tensor) -> None:
    width = None
    for name, x in named.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
        if not x.is_floating_point():
            raise TypeError(f"{name}: expected a floating dtype, got {x.dtype}")
        if x.ndim != 2 or not len(x) or (width is not None and x.shape[1] != width):
            wanted = "[rows, D]" if width is None else f"[rows, {width}]"
            raise ValueError(f"{name}: expected {wanted} with at least one row, got {list(x.shape)}")
        if not torch.isfinite(x).all():
            raise ValueError(f"{name}: expected finite numbers, got others")
        width = x.shape[1]


def _check_labels(x: Tensor, labels: Tensor, name: str) -> None:
    if not isinstance(labels, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(labels).__name__}")
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise TypeError(f"{name}: expected an integer dtype, got {labels.dtype}")
    if labels.shape != x.shape[:1]:
        raise ValueError(f"{name}: expected [{len(x)}], one per row, got {list(labels.shape)}")
    if labels.min() < 0:
        raise ValueError(f"{name}: expected integers from 0, got {int(labels.min())}")
