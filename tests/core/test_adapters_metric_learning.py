"""fastcl.compat.pytorch_metric_learning: values and gradients are those of the originals' formulas, written here with
all logits stored, and what is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from adapter_rows import F64, D, N, cos, rows, same
from torch import Tensor, nn

from fastcl.compat import pytorch_metric_learning

pytestmark = pytest.mark.usefixtures("one_thread")
LABELS = torch.tensor([0, 1, 2, 0, 1, 0, 3, 1, 1])


def _metric(x: Tensor, ref: Tensor, labels: Tensor, ref_labels: Tensor, own: Any, kind: str, t: float) -> Tensor:
    """NTXentLoss and SupConLoss with masks over all logits; own: [N, M], where rows meet themselves."""
    logits = cos(x, ref) / t
    alike = (labels[:, None] == ref_labels) & ~own
    other = labels[:, None] != ref_labels
    if kind == "ntxent":
        lse = logits.masked_fill(~other, -torch.inf).logsumexp(1, keepdim=True)
        return (torch.logaddexp(lse, logits) - logits)[alike].mean()
    log_p = logits - logits.masked_fill(~(alike | other), -torch.inf).logsumexp(1, keepdim=True)
    losses = -(log_p * alike).sum(1)[alike.any(1)] / alike.sum(1)[alike.any(1)]
    return losses.mean()


METRIC: dict[str, Callable[..., Any]] = {
    "ntxent": pytorch_metric_learning.NTXentLoss,
    "supcon": pytorch_metric_learning.SupConLoss,
}


@pytest.mark.parametrize("kind", METRIC)
def test_metric_learning(kind: str) -> None:
    x, ref = rows(N, N + 3)
    ref_labels = torch.cat([LABELS.roll(2), torch.tensor([0, 5, 5])])
    diagonal, nowhere = torch.eye(N, dtype=torch.bool), torch.zeros(N, N + 3, dtype=torch.bool)
    loss = METRIC[kind](0.3)
    same(loss(x, LABELS), _metric(x, x, LABELS, LABELS, diagonal, kind, 0.3), x)
    theirs = _metric(x, ref, LABELS, ref_labels, nowhere, kind, 0.3)
    same(loss(x, LABELS, None, ref, ref_labels), theirs, x, ref)
    pairs = (*torch.where(LABELS[:, None] == ref_labels), *torch.where(LABELS[:, None] != ref_labels))
    same(loss(x, indices_tuple=pairs, ref_emb=ref), theirs, x, ref)
    triplets = tuple(torch.tensor(i) for i in ([0, 0, 1], [3, 5, 4], [1, 2, 0]))  # of anchors 0 and 1
    logits = cos(x, x) / 0.3
    if kind == "ntxent":
        terms = [logits[[0, 0], [1, 2]], logits[[0, 0], [1, 2]], logits[1, [0]]]
        each = [torch.cat([p[None], n]).logsumexp(0) - p for p, n in zip(logits[triplets[:2]], terms, strict=True)]
        theirs = torch.stack(each).mean()
    else:
        first = logits[0, [3, 5, 1, 2]].logsumexp(0) - logits[0, [3, 5]].mean()
        theirs = (first + logits[1, [4, 0]].logsumexp(0) - logits[1, 4]) / 2
    same(loss(x, LABELS, triplets), theirs, x)
    for labels in (torch.zeros(N), torch.arange(N)):  # without negatives, without positives
        value = loss(x, labels.long())
        assert value.item() == 0
        assert torch.autograd.grad(value, x)[0].abs().max() == 0


@pytest.mark.parametrize("kind", METRIC)
def test_metric_learning_of_rows_with_themselves(kind: str) -> None:
    x, ref = rows(N, N)
    loss, diagonal, nowhere = METRIC[kind](0.3), torch.eye(N, dtype=torch.bool), torch.zeros(N, N, dtype=torch.bool)
    others = LABELS.roll(2)
    same(loss(x, LABELS, ref_emb=x, ref_labels=others), _metric(x, x, LABELS, others, nowhere, kind, 0.3), x)
    same(loss(x, LABELS, ref_emb=x, ref_labels=LABELS.clone()), _metric(x, x, LABELS, LABELS, nowhere, kind, 0.3), x)
    # The same tensor of labels for both says that row i of the one is row i of the other, as in the original.
    for other in (x, ref):
        theirs = _metric(x, other, LABELS, LABELS, diagonal, kind, 0.3)
        same(loss(x, LABELS, ref_emb=other, ref_labels=LABELS), theirs, x, other)


@pytest.mark.parametrize("kind", METRIC)
def test_metric_learning_labels_of_any_dtype(kind: str) -> None:
    (x,) = rows(N)
    loss = METRIC[kind](0.3)
    same(loss(x, LABELS + 0.25), loss(x, LABELS), x)
    same(loss(x, LABELS > 0), loss(x, (LABELS > 0).long()), x)
    mixed = loss(x, LABELS, ref_emb=x, ref_labels=LABELS.double())
    same(mixed, loss(x, LABELS, ref_emb=x, ref_labels=LABELS.clone()), x)


class CosineSimilarity:
    """What the losses take of a distance of the original package."""

    is_inverted, p = True, 2

    def __init__(self, power: int) -> None:
        self.power = power

    def __call__(self, x: Tensor, ref: Tensor) -> Tensor:
        return cos(x, ref) ** self.power


@pytest.mark.parametrize("kind", METRIC)
def test_metric_learning_powers_of_cosines(kind: str) -> None:
    (x,) = rows(N)
    alike = (LABELS[:, None] == LABELS) & ~torch.eye(N, dtype=torch.bool)
    pairs = (*torch.where(alike), *torch.where(LABELS[:, None] != LABELS))
    same(METRIC[kind](0.3, distance=CosineSimilarity(1))(x, LABELS), METRIC[kind](0.3)(x, LABELS), x)
    squared = METRIC[kind](0.3, distance=CosineSimilarity(2))(x, LABELS)
    logits = cos(x, x) ** 2 / 0.3
    if kind == "ntxent":
        lse = logits.masked_fill(LABELS[:, None] == LABELS, -torch.inf).logsumexp(1)
        theirs = (torch.logaddexp(lse[pairs[0]], logits[pairs[:2]]) - logits[pairs[:2]]).mean()
    else:
        log_p = logits - logits.masked_fill(torch.eye(N, dtype=torch.bool), -torch.inf).logsumexp(1, keepdim=True)
        theirs = (-(log_p * alike).sum(1)[alike.any(1)] / alike.sum(1)[alike.any(1)]).mean()
    same(squared, theirs, x)


@pytest.mark.parametrize("kind", METRIC)
def test_metric_learning_refuses(kind: str) -> None:
    (x,) = rows(N)
    METRIC[kind](0.3, embedding_regularizer=None, collect_stats=False)
    with pytest.raises(ValueError, match="embedding_regularizer"):
        METRIC[kind](0.3, embedding_regularizer=nn.Identity())
    for labels in (LABELS[:5], LABELS[:, None]):
        with pytest.raises(ValueError, match=rf"^labels: expected shape \[{N}\]"):
            METRIC[kind](0.3)(x, labels)
    with pytest.raises(ValueError, match=r"^ref_labels: expected shape \[4\]"):
        METRIC[kind](0.3)(x, LABELS, ref_emb=x[:4], ref_labels=LABELS)


def test_a_pair_that_is_positive_and_negative_is_refused() -> None:
    (x,) = rows(N)
    pairs = tuple(torch.tensor(i) for i in ([0, 0], [3, 5], [0, 0], [3, 1]))
    with pytest.raises(ValueError, match="indices_tuple"):
        pytorch_metric_learning.SupConLoss()(x, indices_tuple=pairs)


@pytest.mark.parametrize("kind", METRIC)
@pytest.mark.parametrize("masked", [False, True])
def test_cross_batch_memory(kind: str, masked: bool) -> None:
    size = 2 * N + 4
    loss = pytorch_metric_learning.CrossBatchMemory(METRIC[kind](0.3), D, size)
    memory, labels_of, place = torch.zeros(size, D, dtype=F64), torch.full((size,), -1), 0
    for step in range(5):
        (x,) = rows(N, seed=step)
        labels = LABELS.roll(step)
        mask = torch.arange(N) % 2 == 0 if masked else torch.ones(N, dtype=torch.bool)
        at = (place + torch.arange(int(mask.sum()))) % size
        memory[at], labels_of[at], place = x[mask].detach(), labels[mask], (place + len(at)) % size
        asks = ~mask if masked else mask
        filled = labels_of >= 0
        own = torch.zeros(int(asks.sum()), size, dtype=torch.bool)
        if not masked:
            own[torch.arange(N), at] = True
        arguments = (x[asks], memory[filled], labels[asks], labels_of[filled], own[:, filled])
        ours = loss(x, labels, enqueue_mask=mask if masked else None)
        same(ours, _metric(*arguments, kind, 0.3), x)


def test_cross_batch_memory_with_a_miner_and_another_loss() -> None:
    (x,) = rows(N)
    seen = {}

    def miner(a: Tensor, la: Tensor, b: Tensor, lb: Tensor) -> tuple[Tensor, ...]:
        return (*torch.where(la[:, None] == lb), *torch.where(la[:, None] != lb))

    def other(a: Tensor, la: Tensor, indices: Any, b: Tensor, lb: Tensor) -> Tensor:
        seen["pairs"] = indices
        return a.sum()

    pytorch_metric_learning.CrossBatchMemory(other, D, N + 1, miner)(x, LABELS)
    anchor, positive, *_ = seen["pairs"]
    assert (anchor != positive).all()
    assert len(anchor) == (LABELS[:, None] == LABELS).sum() - N
    wanted = pytorch_metric_learning.NTXentLoss(0.3)(x, LABELS)
    ours = pytorch_metric_learning.CrossBatchMemory(pytorch_metric_learning.NTXentLoss(0.3), D, N + 1, miner)(x, LABELS)
    torch.testing.assert_close(ours, wanted)


def test_cross_batch_memory_has_the_helpers_of_the_original() -> None:
    memory = pytorch_metric_learning.CrossBatchMemory(pytorch_metric_learning.NTXentLoss(0.3), D, 2 * N)
    (x,) = rows(N)
    memory(x, LABELS)
    stored = (memory.embedding_memory[:N], memory.label_memory[:N])
    alike = LABELS[:, None] == LABELS
    for apart in (True, False):
        anchor, positive, *negatives = memory.create_indices_tuple(x, LABELS, *stored, None, apart)
        wanted = alike & ~torch.eye(N, dtype=torch.bool) if apart else alike
        assert torch.equal(torch.stack([anchor, positive]), wanted.nonzero().T)
        assert torch.equal(torch.stack(negatives), (~alike).nonzero().T)
    mined = (torch.tensor([0]), torch.tensor([1]), torch.tensor([2]))
    assert len(memory.create_indices_tuple(x, LABELS, *stored, mined, True)[2]) == (~alike).sum() + 1
    assert "NTXentLoss" in memory.supported_losses()
    memory.check_loss_support("SupConLoss")
    with pytest.raises(ValueError, match="loss: expected one of AngularLoss, .*, got ArcFaceLoss"):
        memory.check_loss_support("ArcFaceLoss")
