"""The losses for pairs: against their twins, for every kind of negatives, with gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from pairs_twin import TWINS

from fastcl.recsys.models.pair_losses import LOSSES, Constants, Pairs

CONSTANTS = Constants(0.3, 1.3, 0.4, -0.1, 7.0, 1.7, 0.8)


def pairs(kind: str, rows: int = 7, dim: int = 5, items: int = 12, seed: int = 0) -> Pairs:
    """With users, and positives, that come twice, and positives among the negatives."""
    g = torch.Generator().manual_seed(seed)

    def vectors(*shape: int) -> torch.Tensor:
        found = F.normalize(torch.randn(*shape, dim, generator=g, dtype=torch.float64), dim=-1)
        return found.requires_grad_()

    shape = {"batch": None, "shared": (9,), "row": (rows, 4)}[kind]
    item_id = torch.randint(1, items, (rows,), generator=g)
    item_id[3] = item_id[1]
    user_id = torch.randint(0, 4, (rows,), generator=g)
    log_q = torch.randn(items, generator=g, dtype=torch.float64) - 3
    if shape is None:
        return Pairs(vectors(rows), vectors(rows), None, user_id, item_id, None, log_q[item_id], None)
    ids = torch.randint(1, items, shape, generator=g)
    ids.view(-1)[0] = item_id[0]
    return Pairs(vectors(rows), vectors(rows), vectors(*shape), user_id, item_id, ids, log_q[item_id], log_q[ids])


def same_vectors(x: Pairs) -> Pairs:
    """Items of one id have one vector, as out of a table."""
    table = F.normalize(torch.randn(12, 5, generator=torch.Generator().manual_seed(9), dtype=torch.float64), dim=-1)
    item = table[x.item_id].requires_grad_()
    negative = None if x.negative_id is None else table[x.negative_id].requires_grad_()
    return x._replace(item=item, negative=negative)


def test_every_loss_has_a_twin() -> None:
    assert TWINS.keys() == LOSSES.keys()


@pytest.mark.parametrize("kind", ["batch", "shared", "row"])
@pytest.mark.parametrize("name", list(LOSSES))
def test_losses_and_gradients_are_those_of_the_textbook(name: str, kind: str) -> None:
    ours, theirs = same_vectors(pairs(kind)), same_vectors(pairs(kind))
    if name == "bpr":  # which knows no ids: rows without their own item, or an equal one, among the negatives
        apart = {"batch": torch.arange(1, 8), "shared": torch.tensor([0] * 7), "row": torch.tensor([0] * 7)}[kind]
        ours, theirs = ours._replace(item_id=apart), theirs._replace(item_id=apart)
    found, expected = LOSSES[name](ours, CONSTANTS), TWINS[name](theirs, CONSTANTS)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    for one, other in ((ours.user, theirs.user), (ours.item, theirs.item), (ours.negative, theirs.negative)):
        if one is None or (name == "directau" and one is ours.negative):
            continue
        (mine,) = torch.autograd.grad(found, one, retain_graph=True)
        (right,) = torch.autograd.grad(expected, other, retain_graph=True)
        torch.testing.assert_close(mine, right, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("kind", ["batch", "shared", "row"])
@pytest.mark.parametrize("name", list(LOSSES))
def test_gradients_are_those_of_small_differences(name: str, kind: str) -> None:
    x = pairs(kind, rows=4, dim=3)

    def loss(*vectors: torch.Tensor) -> torch.Tensor:
        negative = vectors[2] if len(vectors) > 2 else None
        return LOSSES[name](x._replace(user=vectors[0], item=vectors[1], negative=negative), CONSTANTS)

    vectors = [v for v in (x.user, x.item, x.negative) if v is not None]
    assert torch.autograd.gradcheck(loss, vectors, eps=1e-6, atol=1e-7)


def test_by_hand() -> None:
    """Two users on the axes, each with its own item: scores 1 and 0."""
    eye, numbers = torch.eye(2), torch.arange(2)
    x = Pairs(eye, eye, None, numbers, numbers + 1, None, torch.tensor([0.5, 0.25]).log(), None)
    c = Constants(temperature=0.5, lam=1.2, epsilon=1.0, margin=-0.5, weight=10.0, gamma=2.0)
    e = torch.exp
    two, one = torch.tensor(2.0), torch.tensor(1.0)
    expected = {
        "bpr": (1 + e(-two)).log(),
        "infonce": (1 + e(-two)).log(),
        "dcl": -two,
        "infonce_plus": 1.2 * (e(two) + 1).log() - 2,
        "mine": -two,
        "mine_plus": -two,
        "sampled_softmax": 0.5 * ((1 + 2 * e(-two)).log() + (1 + 0.5 * e(-two)).log()),
        "ccl": one * 10 * 0.5,
        "directau": torch.tensor(2.0) * (-4.0),  # alignment 0; one distance, of the root of 2
        "bsl": -two,
    }
    for name, value in expected.items():
        torch.testing.assert_close(LOSSES[name](x, c), value, rtol=1e-5, atol=1e-6, msg=name)


def test_bsl_is_mine_where_no_user_comes_twice() -> None:
    x = pairs("shared")._replace(user_id=torch.arange(7))
    torch.testing.assert_close(LOSSES["bsl"](x, CONSTANTS), LOSSES["mine"](x, CONSTANTS))


def test_a_batch_of_one_pair() -> None:
    x = pairs("row", rows=4)
    one = x._replace(
        user=x.user[:1], item=x.item[:1], negative=None, user_id=x.user_id[:1], item_id=x.item_id[:1],
        negative_id=None, log_q=x.log_q[:1], negative_log_q=None,
    )  # fmt: skip
    for name, loss in LOSSES.items():
        assert torch.isfinite(loss(one, CONSTANTS)), name
