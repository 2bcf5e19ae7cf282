"""Losses over several lengths of their embeddings, and the mining of hard negatives."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from problems import F64
from torch import Tensor

import fastcl
from fastcl import mining

pytestmark = pytest.mark.usefixtures("one_thread")


def _randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def test_matryoshka_is_the_sum_over_lengths() -> None:
    query, key = _randn(9, 8, seed=1).requires_grad_(), _randn(9, 8, seed=2).requires_grad_()
    shared, ids = _randn(5, 8, seed=3), torch.arange(9) // 2
    for loss in (fastcl.infonce, fastcl.nn.InfoNCE(0.3), fastcl.mine_plus):
        nested = fastcl.matryoshka(loss, (2, 5, 8), (0.5, 1.0, 2.0))
        ours = nested(query, key, shared, ids=ids, negative_ids=torch.arange(5), in_batch=True)
        plain = sum(
            weight * loss(query[:, :d], key[:, :d], shared[:, :d], ids=ids, negative_ids=torch.arange(5), in_batch=True)
            for d, weight in ((2, 0.5), (5, 1.0), (8, 2.0))
        )
        torch.testing.assert_close(ours, plain)
        torch.testing.assert_close(*(torch.autograd.grad(x, [query, key]) for x in (ours, plain)))
    # What is no embedding stays, whatever its size; private negatives are cut in their last dimension.
    target, table = torch.arange(9) % 8, _randn(8, 8, seed=4)
    cut = fastcl.matryoshka(fastcl.linear_cross_entropy, [4])(query, table, target, weight=torch.ones(8))
    torch.testing.assert_close(cut, fastcl.linear_cross_entropy(query[:, :4], table[:, :4], target))
    private = _randn(9, 3, 8, seed=5)
    pairs = fastcl.matryoshka(fastcl.directional_infonce, [4])(query, document=key)
    torch.testing.assert_close(pairs, fastcl.directional_infonce(query[:, :4], key[:, :4]))
    cut = fastcl.matryoshka(fastcl.infonce, [4])(query, key, private)
    torch.testing.assert_close(cut, fastcl.infonce(query[:, :4], key[:, :4], private[..., :4]))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([],), ValueError, "dims"),
        (([2.0],), TypeError, "dims.*float"),
        (([2], [1.0, 2.0]), ValueError, "weights.*1.*2"),
        (([2], ["1"]), TypeError, "weights.*str"),
        ((4,), TypeError, "dims: expected a list of numbers, got int"),
        (([2], 3.0), TypeError, "weights: expected a list of numbers, got float"),
    ],
)
def test_matryoshka_refuses(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        fastcl.matryoshka(fastcl.infonce, *arguments)


def test_matryoshka_refuses_what_it_meets_in_a_call() -> None:
    x, queue = torch.ones(3, 4), fastcl.NegativeQueue(8, 4)
    with pytest.raises(ValueError, match=r"dims.*1 to 4.*5"):
        fastcl.matryoshka(fastcl.infonce, [5])(x, x)
    with pytest.raises(ValueError, match="queue"):
        fastcl.matryoshka(fastcl.infonce, [2])(x, x, queue=queue)
    # A queue may come with the loss as well; a call takes a module's away.
    for loss in (fastcl.nn.InfoNCE(queue=queue), functools.partial(fastcl.infonce, queue=queue)):
        with pytest.raises(ValueError, match="queue: expected none with matryoshka"):
            fastcl.matryoshka(loss, [4])(x, x)
        torch.testing.assert_close(fastcl.matryoshka(loss, [4])(x, x, queue=None), fastcl.infonce(x, x))
    # Averages that all lengths shared would move once for each length.
    averages, index = fastcl.Denominators(3), torch.arange(3)
    for nested, more in (
        (fastcl.matryoshka(fastcl.sogclr, [2, 4]), {"denominators": averages}),
        (fastcl.matryoshka(fastcl.nn.SogCLR(averages), [2, 4]), {}),
    ):
        with pytest.raises(ValueError, match="denominators: expected none with matryoshka"):
            nested(x, x, index, **more)
    assert (averages.log_average == -torch.inf).all()
    with pytest.raises(TypeError, match="loss"):
        fastcl.matryoshka(lambda a, b: a, [2])


@pytest.mark.parametrize("held", [1, 50, 1 << 22])
def test_hard_negatives_are_the_best_of_a_full_sort(monkeypatch: pytest.MonkeyPatch, held: int) -> None:
    monkeypatch.setattr(mining, "_HELD", held)
    query, table = _randn(13, 6, seed=1), _randn(40, 6, seed=2)
    ids, index_ids = torch.arange(13) % 5, torch.arange(40) % 7
    cap = _randn(13, seed=3).abs() + 1
    for options in ({}, {"ids": ids, "index_ids": index_ids}, {"cap": 1.5}, {"cap": cap, "skip": 3}):
        score, place = fastcl.hard_negatives(query, table, 4, **options)
        for i in range(13):
            s = query[i] @ table.T
            limit = options.get("cap", torch.inf)
            limit = limit[i] if isinstance(limit, Tensor) else limit
            left = [j for j in range(40) if s[j] <= limit and not ("ids" in options and ids[i] == index_ids[j])]
            left = sorted(left, key=lambda j: -s[j])[options.get("skip", 0) :][:4]
            assert place[i].tolist() == left
            torch.testing.assert_close(score[i], s[left])
    queue = fastcl.NegativeQueue(64, 6, F64)
    queue.push(table, index_ids)
    for found, expected in zip(
        fastcl.hard_negatives(query, queue, 4, ids=ids),
        fastcl.hard_negatives(query, table, 4, ids=ids, index_ids=index_ids),
        strict=True,
    ):
        assert torch.equal(found, expected)


def test_too_few_hard_negatives_are_filled_up() -> None:
    query, table = torch.eye(2), torch.eye(2)
    score, place = fastcl.hard_negatives(query, table, 3, ids=torch.arange(2), index_ids=torch.arange(2))
    assert place.tolist() == [[1, -1, -1], [0, -1, -1]]
    assert score.tolist() == [[0.0, -torch.inf, -torch.inf]] * 2
    assert fastcl.hard_negatives(query, table[:0], 2)[1].tolist() == [[-1, -1]] * 2


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"k": 0}, ValueError, "k.*at least 1"),
        ({"k": 1.0}, TypeError, "k.*float"),
        ({"skip": -1}, ValueError, "skip"),
        ({"index": torch.ones(3, 3)}, ValueError, "index"),
        ({"index": {}}, TypeError, "queue"),
        ({"index": [1]}, TypeError, r"index: expected a tensor \[M, D\] or a queue .*, got list"),
        ({"index": fastcl.NegativeQueue(4, 2), "index_ids": torch.arange(2)}, ValueError, "index_ids: expected None"),
        ({"ids": torch.arange(2)}, ValueError, "index_ids"),
        ({"cap": torch.ones(3)}, ValueError, r"cap: expected shape \[2\], got \[3\]"),
        ({"cap": torch.tensor(0.3)}, ValueError, r"cap: expected shape \[2\], got \[\]"),
        ({"cap": "0.3"}, TypeError, "cap: expected a number or a tensor, got str"),
    ],
)
def test_hard_negatives_refuse(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        fastcl.hard_negatives(**({"query": torch.eye(2), "index": torch.eye(2), "k": 1} | options))
