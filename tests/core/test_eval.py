"""The figures of fastcl.eval against loops that follow their definitions literally."""

from typing import Any

import numpy as np
import pytest
import torch

from fastcl import eval as evaluation

pytestmark = pytest.mark.usefixtures("one_thread")


def clouds(rows: int, classes: int, dim: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    centres = 2.0 * torch.randn(classes, dim)
    torch.manual_seed(seed)
    labels = torch.randint(classes, (rows,))
    return centres[labels] + torch.randn(rows, dim), labels


@pytest.mark.parametrize("k", [1, 5, 40])
def test_nearest_neighbours_vote_by_similarity(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "CHUNK", 300)  # several chunks
    (train, labels), (test, wanted) = clouds(40, 4, 3, 1), clouds(33, 4, 3, 2)
    right = 0
    for row, label in zip(test.double(), wanted, strict=True):
        cosine = torch.nn.functional.cosine_similarity(row[None], train.double())
        order = cosine.argsort(descending=True)[:k]
        votes = [float(sum(np.exp(float(cosine[j]) / 0.2) for j in order if labels[j] == c)) for c in range(4)]
        right += int(np.argmax(votes)) == int(label)
    assert evaluation.knn_accuracy(train, labels, test, wanted, k=k, temperature=0.2) == right / 33
    # A temperature near 0 leaves the nearest alone, and overflows nothing.
    one = evaluation.knn_accuracy(train, labels, test, wanted, k=1)
    assert evaluation.knn_accuracy(train, labels, test, wanted, k=k, temperature=1e-4) == one


def test_the_probe_is_at_the_optimum_of_its_objective() -> None:
    """Its accuracy is that of plain gradient descent run to the end, and scaling a column changes nothing."""
    (train, labels), (test, wanted) = clouds(80, 3, 5, 1), clouds(200, 3, 5, 2)
    x = train.double()
    mean, spread = x.mean(0), x.std(0, unbiased=False)
    weight = torch.zeros(5, 3, dtype=torch.float64)
    bias = torch.zeros(3, dtype=torch.float64)
    x = (x - mean) / spread
    target = torch.nn.functional.one_hot(labels, 3).double()
    for _ in range(20_000):
        error = ((x @ weight + bias).softmax(1) - target) / len(x)
        weight -= 0.5 * (x.T @ error + 1e-3 * weight)
        bias -= 0.5 * error.sum(0)
    logits = ((test.double() - mean) / spread) @ weight + bias
    expected = float((logits.argmax(1) == wanted).double().mean())
    assert evaluation.linear_probe(train, labels, test, wanted) == expected
    scale = torch.tensor([1.0, 100.0, 0.01, 1.0, 3.0])
    assert evaluation.linear_probe(train * scale + 5, labels, test * scale + 5, wanted) == expected
    assert 0.5 < expected < 1.0
    with torch.inference_mode(False), torch.no_grad():  # its own gradients need no mode of the caller's
        assert evaluation.linear_probe(train, labels, test, wanted) == expected


def test_embeddings_of_an_encoder_in_inference_mode_are_judged() -> None:
    torch.manual_seed(4)
    x, y = torch.randn(30, 3), torch.arange(30) % 3
    expected = evaluation.linear_probe(x, y, x, y)
    with torch.inference_mode():
        made = x * 1.0
        assert evaluation.linear_probe(made, y, made, y) == expected
        assert evaluation.knn_accuracy(made, y, made, y, k=1) == 1.0
        assert evaluation.retrieval(made, made, k=1)["recall@1"] == 1.0
    assert evaluation.linear_probe(made, y, made, y) == expected


def test_retrieval_ranks_both_directions_with_ties_at_half(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "CHUNK", 50)
    torch.manual_seed(3)
    query = torch.randn(23, 4)
    key = query + torch.randn(23, 4)
    key[5] = key[9]  # a tie
    cosine = torch.nn.functional.normalize(query, dim=1) @ torch.nn.functional.normalize(key, dim=1).T
    found = evaluation.retrieval(query, key, k=(1, 3))
    for name, table in (("", cosine), ("reverse ", cosine.T)):
        ranks = []
        for i, row in enumerate(table.tolist()):
            ranks.append(1 + sum(s > row[i] for s in row) + 0.5 * (sum(s == row[i] for s in row) - 1))
        for k in (1, 3):
            assert found[f"{name}recall@{k}"] == pytest.approx(np.mean([rank <= k for rank in ranks]))
        assert found[f"{name}median rank"] == np.median(ranks)
    assert evaluation.retrieval(torch.eye(4), torch.eye(4)[[0, 2, 1, 3]])["median rank"] == 2.0  # of 1, 1, 3 and 3
    constant = evaluation.retrieval(torch.ones(9, 2), torch.ones(9, 2), k=(1, 4, 5))
    assert (constant["recall@1"], constant["recall@4"], constant["recall@5"]) == (0.0, 0.0, 1.0)


def test_autocast_changes_no_figure() -> None:
    """Of embeddings that lie so close together that products in bfloat16 are all equal."""
    torch.manual_seed(0)
    query = torch.randn(60, 16)
    key = 1 + 1e-3 * (query + 0.5 * torch.randn(60, 16))
    query, labels = 1 + 1e-3 * query, torch.arange(60) % 3
    found = []
    for on in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):
            rows = key, labels, query, labels
            shares = evaluation.knn_accuracy(*rows, k=3), evaluation.linear_probe(*rows)
            found.append((evaluation.retrieval(query, key), *shares))
    assert found[0] == found[1]


X, Y = torch.eye(3), torch.arange(3)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: evaluation.retrieval(X, X[:2]), ValueError, r"key: expected \[3, 3\], got \[2, 3\]"),
        (lambda: evaluation.retrieval(X, X.long()), TypeError, "key: expected a floating dtype, got torch.int64"),
        (lambda: evaluation.retrieval(X, X, k=(0,)), ValueError, r"k: expected whole numbers from 1, got \(0,\)"),
        (lambda: evaluation.retrieval(X, X / 0), ValueError, "key: expected finite numbers, got others"),
        (lambda: evaluation.knn_accuracy(X, Y, X, Y, k=4), ValueError, "k: expected 1 to 3, the rows of train, got 4"),
        (lambda: evaluation.knn_accuracy(X, Y, X, Y, k=1, temperature=0.0), ValueError, "temperature: expected a num"),
        (lambda: evaluation.knn_accuracy(X, Y[:2], X, Y, k=1), ValueError, r"train_labels: .* \[3\], one per row"),
        (lambda: evaluation.linear_probe(X, Y, X[:, :2], Y), ValueError, r"test: expected \[rows, 3\]"),
        (lambda: evaluation.linear_probe(X, Y, X, Y - 1), ValueError, "test_labels: expected integers from 0, got -1"),
        (lambda: evaluation.linear_probe(X, Y.float(), X, Y), TypeError, "train_labels: expected an integer dtype"),
        (lambda: evaluation.linear_probe(X, Y, X, Y, l2=0.0), ValueError, "l2: expected a number > 0, got 0.0"),
        (lambda: evaluation.linear_probe([1.0], Y, X, Y), TypeError, "train: expected a tensor, got list"),  # type: ignore
        (lambda: evaluation.linear_probe(X[:0], Y[:0], X, Y), ValueError, "train: expected .* at least one row"),
    ],
)
def test_bad_input_is_named(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
