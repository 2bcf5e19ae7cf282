"""Theorem 1 of CLRec (Zhou et al. 2021), exactly: two contexts, six items, free logits, every draw of negatives listed.

    r(y|x) proportional to p_data(y|x) / q(y|x)

is the optimum of the contrastive loss with negatives from q, duplicates of the positive staying in the sum, and of full
softmax with each click weighted by 1/q (inverse propensity). Masking the duplicates moves it; measured here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from problems import F64
from torch import Tensor

import fastcl

pytestmark = pytest.mark.usefixtures("one_thread")

CLICKS = torch.tensor([[12, 6, 4, 1, 2, 3], [2, 3, 1, 9, 4, 5]])  # how often each item was clicked, by context
P_DATA = CLICKS.to(F64) / CLICKS.sum(1, keepdim=True)
Q = torch.tensor([[0.40, 0.20, 0.15, 0.05, 0.10, 0.10], [0.10, 0.20, 0.05, 0.35, 0.10, 0.20]], dtype=F64)  # exposure
R = (P_DATA / Q) / (P_DATA / Q).sum(1, keepdim=True)
ITEMS = torch.eye(6, dtype=F64)  # so that <logits of a context, item y> is the logit of y


def _optimum(loss: Callable[[Tensor], Tensor]) -> Tensor:
    """softmax of the logits [2, 6] that minimise `loss`; to about 1e-8 from r in the cases below."""
    logits = torch.zeros(2, 6, dtype=F64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [logits], max_iter=300, tolerance_grad=1e-13, tolerance_change=1e-16, line_search_fn="strong_wolfe"
    )

    def closure() -> float:
        optimizer.zero_grad()
        value = loss(logits)
        value.backward()
        return value.item()

    optimizer.step(closure)
    assert logits.grad is not None
    assert logits.grad.abs().max() < 1e-7
    return torch.softmax(logits.detach(), 1)


def _contrastive(negatives: int, mask_duplicates: bool) -> Callable[[Tensor], Tensor]:
    """The expectation of Eq. 3: each context, clicked item and draw from q is a row that weighs its probability."""
    rows = torch.tensor(list(itertools.product(range(2), range(6), *[range(6)] * negatives)))
    x, y, drawn = rows[:, 0], rows[:, 1], rows[:, 2:]
    weight = P_DATA[x, y] * Q[x[:, None], drawn].prod(1)
    ids = {"ids": y, "negative_ids": drawn} if mask_duplicates else {}
    return lambda logits: fastcl.sampled_softmax(
        logits[x], ITEMS[y], ITEMS[drawn], weight=weight, reduction="sum", **ids
    )


def _full_softmax(inverse_propensity: bool) -> Callable[[Tensor], Tensor]:
    """Eq. 4 as a data set has it: one row a click."""
    every = [(x, y) for x, y in itertools.product(range(2), range(6)) for _ in range(int(CLICKS[x, y]))]
    x, y = torch.tensor(every).T
    weight = 1 / Q[x, y] if inverse_propensity else None
    return lambda logits: fastcl.linear_cross_entropy(logits[x], ITEMS, y, row_weight=weight)


@pytest.mark.parametrize("negatives", [1, 2, 3])
def test_contrastive_loss_and_inverse_propensity_weighting_have_one_optimum(negatives: int) -> None:
    contrastive = _optimum(_contrastive(negatives, mask_duplicates=False))
    weighted = _optimum(_full_softmax(inverse_propensity=True))
    torch.testing.assert_close(contrastive, R, rtol=0, atol=1e-6)
    torch.testing.assert_close(weighted, R, rtol=0, atol=1e-6)
    torch.testing.assert_close(contrastive, weighted, rtol=0, atol=1e-6)


def test_full_softmax_without_weights_keeps_the_exposure_bias() -> None:
    likeliest = _optimum(_full_softmax(inverse_propensity=False))
    torch.testing.assert_close(likeliest, P_DATA, rtol=0, atol=1e-6)
    assert (likeliest - R).abs().max() > 0.2


def test_masking_duplicates_of_the_positive_brings_exposure_bias_back() -> None:
    """Without its duplicates an item is pushed down less the more it is exposed, and ends above r.

    With one negative a duplicate is a constant and nothing changes; then the bias grows with the number of negatives:
    measured, the largest error is 0.023 with 2, 0.039 with 3 and 0.052 with 4.
    """
    masked = {n: _optimum(_contrastive(n, mask_duplicates=True)) for n in (1, 2, 3, 4)}
    torch.testing.assert_close(masked[1], R, rtol=0, atol=1e-6)
    errors = [(masked[n] - R).abs().max().item() for n in (2, 3, 4)]
    assert 0.02 < errors[0] < errors[1] < errors[2]
    for p in (masked[2], masked[3], masked[4]):
        for context in (0, 1):
            excess = (p[context] / R[context]).log()
            # Most above r for the most exposed item, most below for the least, and with exposure in between.
            assert excess[Q[context].argmax()] == excess.max()
            assert excess[Q[context].argmin()] == excess.min()
            assert torch.corrcoef(torch.stack([excess, Q[context].log()]))[0, 1] > 0.8
            assert excess.max() > 0.08
            # Towards the unweighted optimum: the step from r has a positive share in the step from r to p_data.
            assert torch.dot(p[context] - R[context], P_DATA[context] - R[context]) > 0
