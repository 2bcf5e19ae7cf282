"""Multi-CLRec's queues against lists, and the loss over them row by row."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastcl.recsys.models.multi_clrec.queues import IntentQueues, infonce

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("kept", ["vectors", "ids"])
def test_queues_follow_the_rules_of_the_paper(kept: str) -> None:
    """The paper's own order, on lists: a batch enters Q0 before its loss, what Q0 drives out enters the queue of its
    intent, what that drives out is gone. Ours pushes after the loss, a batch less in Q0: each loss sees the same.
    """
    rng = np.random.default_rng(0)
    batch, main, secondary, intents = 4, 10, 5, 3
    queues = IntentQueues(intents, main - batch, secondary, 1, kept)
    q0: deque[int] = deque()
    q: list[deque[int]] = [deque(maxlen=secondary) for _ in range(intents)]
    partial = 0
    routed = np.zeros(0, np.int64)
    for step in range(30):
        route = rng.integers(0, intents, 1000)  # of each entry; moves with the prototypes, so anew at every step
        route[: 20 * batch : 2] = 0  # one intent gets most
        entered = range(step * batch, (step + 1) * batch)
        q0.extend(entered)
        while len(q0) > main:
            entry = q0.popleft()
            q[routed[entry]].append(entry)
        assert sorted([*held(queues.main), *entered]) == list(q0)
        assert [sorted(held(queue)) for queue in queues.secondary] == [sorted(queue) for queue in q]
        partial += any(0 < len(queue) < secondary for queue in q)
        keys = torch.tensor(entered, dtype=torch.float32)[:, None]
        queues.push(keys, torch.tensor(entered), route=lambda ids, route=route: torch.from_numpy(route[ids.numpy()]))
        routed = route
        queues = reloaded(queues, main - batch, secondary, kept)
    assert partial > 3
    assert all(len(queue) == secondary for queue in q)


def held(queue: torch.nn.Module) -> list[int]:
    assert queue.keys[:, 0].long().tolist() == ([] if queue.ids is None else queue.ids.tolist())
    return queue.keys[:, 0].long().tolist()


def reloaded(queues: IntentQueues, main: int, secondary: int, kept: str) -> IntentQueues:
    again = IntentQueues(len(queues.secondary), main, secondary, 1, kept)
    again.load_state_dict(queues.state_dict())
    return again


def test_a_batch_larger_than_the_main_queue_reaches_the_others() -> None:
    queues = IntentQueues(2, main=2, secondary=3, dim=1, kept="vectors")
    queues.push(torch.arange(9.0)[:, None], torch.arange(9), route=lambda ids: ids % 2)
    assert held(queues.main) == [7, 8]
    assert [sorted(held(queue)) for queue in queues.secondary] == [[2, 4, 6], [1, 3, 5]]


def filled(counts: list[int], main: int, dim: int = 8) -> IntentQueues:
    """A main queue with `main` entries of 20, and intents' queues with so many of 30; ids of 1..12."""
    rng = torch.Generator().manual_seed(1)
    queues = IntentQueues(len(counts), 20, 30, dim, "vectors")
    for queue, count in zip([queues.main, *queues.secondary], [main, *counts], strict=True):
        if count:
            keys = F.normalize(torch.randn(count, dim, generator=rng), dim=1)
            queue.push(keys, torch.randint(1, 13, (count,), generator=rng))
    return queues


@pytest.mark.parametrize("duplicates", ["keep", "exclude"])
@pytest.mark.parametrize(("counts", "main"), [([30, 0, 7, 1], 20), ([30, 30, 30, 30], 5), ([0, 0, 0, 0], 0)])
def test_grouped_loss_is_equation_13_row_by_row(duplicates: str, counts: list[int], main: int) -> None:
    queues = filled(counts, main)
    rng = torch.Generator().manual_seed(2)
    query, positive = (F.normalize(torch.randn(25, 8, generator=rng), dim=1) for _ in range(2))
    intent = torch.randint(0, 4, (25,), generator=rng)
    intent[intent == 2] = 3  # an intent of no row
    target = torch.randint(1, 13, (25,), generator=rng)
    ours = [x.clone().requires_grad_() for x in (query, positive)]
    theirs = [x.double().requires_grad_() for x in (query, positive)]
    loss = infonce(*ours, queues.ready(torch.empty(0, 8)), intent, 0.07, target if duplicates == "exclude" else None)
    expected = torch.zeros((), dtype=torch.float64)
    for row in range(25):
        q, keys = theirs[0][row], [theirs[1][row]]
        keys += [theirs[1][j] for j in range(25) if j != row and (duplicates == "keep" or target[j] != target[row])]
        for queue in (queues.main, queues.secondary[int(intent[row])]):
            ids = [] if queue.ids is None else queue.ids.tolist()
            pairs = zip(queue.keys.double(), ids, strict=True)
            keys += [key for key, item in pairs if duplicates == "keep" or item != target[row]]
        logits = torch.stack([q @ key for key in keys]) / 0.07
        expected = expected - logits.log_softmax(0)[0] / 25
    torch.testing.assert_close(loss.double(), expected, atol=1e-5, rtol=1e-5)
    grads = zip(torch.autograd.grad(loss, ours), torch.autograd.grad(expected, theirs), strict=True)
    for found, truth in grads:
        torch.testing.assert_close(found.double(), truth, atol=1e-5, rtol=1e-4)


class Largest(TorchDispatchMode):
    """The largest tensor that any operation gives."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, list | tuple) else [found]:
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return found


def test_no_row_has_keys_of_its_own_gathered() -> None:
    n, held_each, dim = 64, 500, 8
    queues = IntentQueues(4, 20, held_each, dim, "vectors")
    for queue in queues.secondary:
        queue.push(torch.randn(held_each, dim), torch.ones(held_each, dtype=torch.int64))
    query, positive = (torch.randn(n, dim, requires_grad=True) for _ in range(2))
    with Largest() as seen:
        queued = queues.ready(torch.empty(0, dim))
        infonce(query, positive, queued, torch.arange(n) % 4, 0.07, torch.arange(n)).backward()
    assert seen.numel <= held_each * dim < n * held_each
