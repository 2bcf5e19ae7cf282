"""CLRec's queues against plain lists: negatives by source, encoders that follow, the task u2u."""

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_models import ENCODERS, OPTIONS, SASREC, histories, items, rows

from fastcl import reference
from fastcl.recsys import CLRec, Histories

TEMPERATURE = 0.07


def trained(model, data, steps):
    """The model's batches up to `steps`, in training mode, with plain gradient steps in between."""
    done = []
    for batch in itertools.islice(model.batches(data, np.random.default_rng(0)), steps):
        model.zero_grad()
        model.loss(batch).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.5 * parameter.grad
        model.after_step(batch)
        done.append(batch)
    return done


@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize("source", ["batch", "ids", "vectors"])
def test_negatives_are_the_newest_clicks_whatever_keeps_them(source, encoder):
    options = {**encoder, "max_len": 2, "log_q": 0.0}
    model = CLRec(items(), seed=3, batch=8, negatives=60, negatives_from=source, dropout=0.0, **options).train()
    data = histories(rows=60)
    before, kept = [], []
    for batch in itertools.islice(model.batches(data, np.random.default_rng(0)), 9):
        n = len(batch.target)
        assert n <= 16
        table = F.normalize(model.item(torch.arange(41)), dim=-1)
        users = model(model.item(batch.item), batch.bucket, batch.clicks)
        queued = slice(-min(len(before), 60 - n, 52), None) if before else slice(0, 0)
        older = {
            "batch": table[:0],
            "ids": table[before[queued]],
            "vectors": torch.stack([table[0], *kept])[1:][queued],
        }
        windows = batch.clicks.row if encoder is SASREC else torch.arange(n)
        losses = []
        for r in range(n):
            negatives = torch.cat([table[batch.target[windows != windows[r]]], older[source]])
            logits = torch.cat([table[batch.target[r : r + 1]], negatives]) @ users[r] / TEMPERATURE
            losses.append(logits.logsumexp(0) - logits[0])
        expected, found = torch.stack(losses).mean(), model.loss(batch)
        torch.testing.assert_close(found, expected)
        gradients = [torch.autograd.grad(loss, model.item.id.weight)[0] for loss in (found, expected)]
        torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-4)
        with torch.no_grad():
            model.item.id.weight -= gradients[0]
            kept += [vector.detach() for vector in table[batch.target]]
            before += batch.target.tolist()
        model.after_step(batch)
    assert len(before) > 60, "the queue was never full"
    assert (model.queue is None) == (source == "batch")


def test_features_of_the_negatives_can_be_left_out():
    model = CLRec(
        items(), seed=3, features="clicks", negatives_from="vectors", log_q=0.0, batch=32, negatives=96, **OPTIONS
    ).train()
    data = histories(rows=40)
    (batch,) = trained(model, data, 1)
    assert torch.equal(model.queue.keys, model._positives)
    torch.testing.assert_close(model.item_vectors(), F.normalize(model.item.id.weight, dim=-1) / TEMPERATURE)
    plain = CLRec(items(), seed=3, negatives_from="vectors", batch=32, negatives=96, **OPTIONS)
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(model.eval().encode(data), plain.eval().encode(data))  # clicks have theirs
    model.zero_grad()
    model.loss(batch).backward()
    assert all(bag.weight.grad.any() for bag in model.item.features)
    model.queue.push(torch.zeros(64, 16))
    users = model(model.item(batch.item), batch.bucket, batch.clicks)
    options = {"temperature": TEMPERATURE, "in_batch": True, "queue": model.queue}
    torch.testing.assert_close(model.loss(batch), reference.infonce(users, model.item.id(batch.target), **options))


def test_a_follower_fills_the_queue():
    model = CLRec(items(), seed=3, momentum=0.75, negatives_from="vectors", batch=32, negatives=96, **OPTIONS).train()
    expected = {name: p.detach().clone() for name, p in model.item.named_parameters()}
    keys = []
    for batch in model.batches(histories(rows=40), np.random.default_rng(0)):
        model.zero_grad()
        model.loss(batch).backward()
        assert all(p.grad is None for p in model.item_follower.parameters())
        with torch.no_grad():
            for parameter in model.item.parameters():
                parameter -= parameter.grad
        model.after_step(batch)
        for name, p in model.item.named_parameters():
            expected[name] = 0.75 * expected[name] + 0.25 * p.detach()
        for name, p in model.item_follower.named_parameters():
            torch.testing.assert_close(p, expected[name])
        keys += F.normalize(model.item_follower(batch.target), dim=-1)
        torch.testing.assert_close(model.queue.newest(64).keys, torch.stack(keys[-64:]))
    assert not torch.equal(model.item_follower.id.weight, model.item.id.weight)


# u2u


TASKS = ("u2i", "u2u")


def in_order(count=12, length=14):
    """Histories without repeats, so that an item tells its place: item 20 u + t + 1 is click t of user u."""
    return Histories.from_lists([[20 * u + t + 1 for t in range(2 + (5 * u) % length)] for u in range(count)])


@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize("longest", [5, 30])
def test_u2u_sets_the_clicks_after_a_history_against_it(encoder, longest):
    model = CLRec(items(240), tasks=TASKS, batch=8, negatives=20, **{**encoder, "max_len": longest})
    data = in_order()
    seen, places = 0, set()
    for batch in model.batches(data, np.random.default_rng(0)):
        then = batch.later
        assert len(then.pair) == len(then.row) == len(then.clicks.length) == len(batch.clicks.length)
        assert batch.clicks.row[batch.at[then.pair]].tolist() == list(range(len(then.pair)))  # one of each window
        for r, (pair, user) in enumerate(zip(then.pair.tolist(), then.row.tolist(), strict=True)):
            at = batch.at[pair].item()
            history = batch.item[at - batch.clicks.position[at] : at + 1].tolist()
            after = then.item[then.clicks.row == r].tolist()
            row = rows(data)[user]
            cut = row.index(history[-1]) + 1
            # What comes before the moment, and what comes after it: never an item on both sides.
            assert history == row[:cut][-len(history) :]
            assert after == row[cut : cut + min(9, longest)]
            assert after[0] == batch.target[pair]
            seen += 1
            places.add(len(history))
    assert seen == model.user.spans(data, longest).total
    assert len(places) > 3, "the moment is always the same"


@pytest.mark.parametrize("encoder", ENCODERS)
def test_u2u_never_sees_its_target(encoder):
    """Other clicks after the moment leave the history's vector alone, other clicks before it the later sequence's."""
    model = CLRec(items(240), seed=3, tasks=TASKS, batch=100, negatives=120, **encoder).eval()
    data = in_order()
    (batch,) = model.batches(data, np.random.default_rng(0))
    then = batch.later

    def vectors(batch):
        users = model(model.item(batch.item), batch.bucket, batch.clicks)[batch.later.pair]
        return users, model._served(model.item, model.user, *batch.later[:3])

    before, after = vectors(batch)
    moment = batch.at[then.pair]
    for side in ("before", "after"):
        item, follows = batch.item.clone(), then.item.clone()
        position, row = batch.clicks.position, batch.clicks.row
        if side == "after":  # the history's own window beyond the moment, and all of the later sequence
            item[position > position[moment][row]] = 240
            follows[:] = 239
        else:
            item[position <= position[moment][row]] = 240
        changed_before, changed_after = vectors(batch._replace(item=item, later=then._replace(item=follows)))
        assert torch.equal(changed_before, before) == (side == "after")
        assert torch.equal(changed_after, after) == (side == "before")


@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize("source", ["batch", "ids", "vectors"])
def test_u2u_loss_and_its_queue(source, encoder):
    options = {"negatives_from": source, "dropout": 0.0, **encoder}
    model = CLRec(items(), seed=3, tasks=TASKS, batch=16, negatives=40, **options).train()
    plain = CLRec(items(), seed=3, batch=16, negatives=40, **options).train()
    data = histories(rows=25)
    keys, owners = torch.empty(0, 16), torch.empty(0, dtype=torch.int64)
    for batch in itertools.islice(model.batches(data, np.random.default_rng(0)), 5):
        then, plain.log_share = batch.later, model.log_share  # plain makes no batches, which set it
        users = model(model.item(batch.item), batch.bucket, batch.clicks)[then.pair]
        after = model._served(model.item, model.user, *then[:3])
        losses = []
        n = len(then.row)
        for r in range(n):
            mine = [users[r] @ after[r] / TEMPERATURE]
            mine += [users[r] @ after[c] / TEMPERATURE for c in range(n) if then.row[c] != then.row[r]]
            queued = zip(keys[-24:], owners[-24:], strict=True)
            mine += [users[r] @ key / TEMPERATURE for key, owner in queued if owner != then.row[r]]
            losses.append(torch.stack(mine).logsumexp(0) - mine[0])
        parts = model.parts(batch)
        torch.testing.assert_close(parts["u2u"], torch.stack(losses).mean())
        torch.testing.assert_close(parts["u2i"], plain.loss(batch._replace(later=None)))
        torch.testing.assert_close(model.loss(batch), parts["u2i"] + parts["u2u"])
        model.after_step(batch)
        plain.after_step(batch)
        if source != "batch":
            keys, owners = torch.cat([keys, after.detach()]), torch.cat([owners, then.row])
            torch.testing.assert_close(model.later_queue.newest(24).keys, keys[-24:])
    assert (model.later_queue is None) == (source == "batch")
    assert (then.row[:, None] == then.row).sum() > n or encoder is SASREC, "no user was there twice"
    # The histories and what follows them are encoded by the same parameters, which both tasks move.
    model.zero_grad()
    model.parts(batch)["u2u"].backward()
    assert model.item.id.weight.grad.any()
    assert all(p.grad is not None and p.grad.any() for name, p in model.user.named_parameters() if "bucket" not in name)


def test_u2u_with_followers_queues_what_they_encode():
    model = CLRec(items(), seed=3, tasks=TASKS, momentum=0.5, batch=16, negatives=40, dropout=0.0, **OPTIONS).train()
    (batch,) = trained(model, histories(rows=25), 1)
    expected = model._served(model.item_follower, model.user_follower, *batch.later[:3])
    torch.testing.assert_close(model.later_queue.keys, expected)
    assert not torch.allclose(expected, model._served(model.item, model.user, *batch.later[:3]))
    start = CLRec(items(), seed=3, **OPTIONS)
    for name, p in model.user_follower.named_parameters():
        middle = (start.user.get_parameter(name) + model.user.get_parameter(name)) / 2
        torch.testing.assert_close(p, middle)
