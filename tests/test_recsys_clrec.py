"""CLRec's parts against plain loops and hand-computed values: encoders, losses, negatives, tasks."""

import dataclasses
import itertools
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_recsys_models import OPTIONS, histories, items, rows

import fastcl
from fastcl import reference
from fastcl.recsys import CLRec, Histories
from fastcl.recsys.batching import newest, prefixes
from fastcl.recsys.models.clrec_objectives import OBJECTIVES, draw


def test_encodes_users_as_the_paper_writes_it():
    """Appendix B.1.2 and B.2, click by click: MultiAtt, normalised heads, WHA, normalised user."""
    model = CLRec(items(), seed=3, heads=3, hidden=5, **OPTIONS).eval()
    data = histories(rows=8, longest=7)
    found = model.encode(data)
    mlp, a, cuts = model.user.attention.mlp, model.user.aggregate.a, model.config.time_cuts
    for r in range(len(data)):
        begin, end = data.offsets[r], data.offsets[r + 1]
        x = []
        for p in range(begin, end):
            gap = data.time[end - 1] - data.time[p]
            bucket = sum(gap >= cut for cut in cuts)
            item = model.item(torch.tensor([data.item[p]]))[0]
            x.append(item + model.user.position.weight[p - begin] + model.user.bucket.weight[bucket])
        x = torch.stack(x)
        scores = mlp[2](torch.tanh(mlp[0](x)))
        z = []
        for head in range(3):
            weight = scores[:, head].exp() / scores[:, head].exp().sum()
            pooled = sum(w * click for w, click in zip(weight, x, strict=True))
            z.append(pooled / pooled.norm())
        m = sum(z) / 3
        e = torch.stack([(h @ a @ m).exp() for h in z])
        user = sum(weight * h for weight, h in zip(e / e.sum(), z, strict=True))
        torch.testing.assert_close(found[r], user / user.norm(), atol=1e-5, rtol=1e-5)


def test_item_is_id_plus_concatenated_feature_means():
    table = items()
    model = CLRec(table, seed=3, dim=17, max_len=7)
    genre, era = model.item.features
    assert (genre.embedding_dim, era.embedding_dim) == (9, 8)
    found = model.item(torch.tensor([1, 2, 4]))
    for row, item in enumerate((1, 2, 4)):
        codes = [code for code in table.features["genre"].codes[item] if code]
        mean = sum(genre.weight[code] for code in codes) / len(codes) if codes else torch.zeros(9)
        era_row = era.weight[table.features["era"].codes[item, 0]]
        torch.testing.assert_close(found[row], model.item.id.weight[item] + torch.cat([mean, era_row]))
    plain = CLRec(items(features=False), seed=3, **OPTIONS)
    assert torch.equal(plain.item(torch.tensor([5])), plain.item.id.weight[5:6])
    with pytest.raises(ValueError, match=r"dim: expected at least the number of item features \(2\), got 1"):
        CLRec(table, dim=1)


def test_positions_count_from_the_earliest_click():
    model = CLRec(items(), seed=3, **OPTIONS)
    clicks, _, _ = model._clicks(histories(), newest(Histories.from_lists([[1, 2, 3], [4]]), 7))
    assert clicks.position.tolist() == [0, 1, 2, 0]


def test_time_buckets_reach_up_to_the_newest_click():
    model = CLRec(items(), seed=3, time_cuts=(60.0, 3600.0), **OPTIONS)
    data = Histories.from_lists([[1, 2, 3, 4], [5, 6]], [[0, 3541, 3600, 3600], [7, 67]])
    _, _, bucket = model._clicks(data, newest(data, 7))
    assert bucket.tolist() == [2, 0, 0, 0, 1, 0]
    # In training too, where the target's own time is later: the gap ends at the newest click of the history.
    spans = prefixes(data, 7)
    clicks, _, bucket = model._clicks(data, spans)
    assert [bucket[clicks.row == r].tolist() for r in range(4)] == [[0], [1, 0], [2, 0, 0], [0]]
    assert CLRec(items(), time_cuts=(), **OPTIONS).user.bucket is None


@pytest.mark.parametrize(
    ("unit", "per_day"), [("second", 86400), ("millisecond", 86_400_000), ("hour", 24), ("day", 1)]
)
def test_time_buckets_do_not_depend_on_the_unit(unit, per_day):
    model = CLRec(items(), seed=3, time_unit=unit, **OPTIONS)
    days = [0, 900, 1000, 1030, 1059, 1059 + 1 - 1 / per_day, 1060]
    data = Histories.from_lists([[1, 2, 3, 4, 5, 6, 7]], [[round(day * per_day) for day in days]])
    _, _, bucket = model._clicks(data, newest(data, 7))
    # Up to the newest click lie 1060, 160, 60, 30 days, one day, one unit and nothing.
    smallest = {"second": 0, "millisecond": 0, "hour": 4, "day": 7}[unit]
    assert bucket.tolist() == [17, 14, 13, 12, 7, smallest, 0]


def test_times_that_look_like_another_unit_are_reported():
    lists, now = [[1, 2, 3], [4, 5]], 1_500_000_000
    seconds = Histories.from_lists(lists, [[now, now + 1, now + 2], [now, now + 9]])
    milliseconds = Histories(seconds.offsets, seconds.item, seconds.time * 1000)
    with pytest.warns(UserWarning, match="time_unit: times look like milliseconds, got 'second'"):
        list(CLRec(items(), **OPTIONS).batches(milliseconds, np.random.default_rng(0)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(CLRec(items(), **OPTIONS).batches(seconds, np.random.default_rng(0)))
        list(CLRec(items(), time_unit="millisecond", **OPTIONS).batches(milliseconds, np.random.default_rng(0)))
        list(CLRec(items(), time_cuts=(), **OPTIONS).batches(milliseconds, np.random.default_rng(0)))


def test_history_does_not_depend_on_what_comes_after():
    model = CLRec(items(), seed=3, **OPTIONS).eval()
    one = Histories.from_lists([[1, 2, 3, 4]], [[0, 100, 5000, 9000]])
    two = Histories.from_lists([[1, 2, 9, 9]], [[0, 100, 10**7, 10**8]])
    users = []
    for data in (one, two):
        clicks, item, bucket = model._clicks(data, prefixes(data, 7))
        users.append(model(model.item(item), bucket, clicks))
    assert torch.equal(users[0][:2], users[1][:2])
    assert not torch.equal(users[0][2], users[1][2])


@pytest.mark.parametrize("duplicates", ["keep", "exclude"])
def test_loss_is_infonce_over_batch_and_queue(duplicates):
    options = {"negatives_from": "vectors", "duplicates": duplicates, **OPTIONS}
    model = CLRec(items(), seed=3, batch=32, negatives=96, **options).eval()
    data = histories(rows=40)
    first, second, *_ = model.batches(data, np.random.default_rng(0))
    model.loss(first)
    assert len(model.queue) == 0
    model.after_step(first)
    vectors = F.normalize(model.item(first.target), dim=-1)
    torch.testing.assert_close(model.queue.keys, vectors)
    assert torch.equal(model.queue.ids, first.target)
    torch.testing.assert_close(model.queue.keys.norm(dim=1), torch.ones(32))

    clicks, target = second.clicks, second.target
    assert set(target.tolist()) & set(first.target.tolist())
    user = model(model.item(second.item), second.bucket, clicks)
    ids = target if duplicates == "exclude" else None
    options = {"temperature": 0.07, "in_batch": True, "queue": model.queue, "ids": ids}
    expected = reference.infonce(user, model.item(target), **options)
    torch.testing.assert_close(model.loss(second), expected)
    wrong = reference.infonce(user, model.item(target), **options | {"ids": None if ids is not None else target})
    assert abs(wrong - expected) > 1e-3


def test_queue_and_batch_make_up_the_negatives():
    model = CLRec(items())
    assert isinstance(model.queue, fastcl.NegativeQueue)
    assert (model.queue.capacity, model.config.batch, model.config.negatives) == (2304, 256, 2560)
    assert dataclasses.asdict(model.config)["temperature"] == 0.07


def test_scores_are_cosines_over_temperature():
    model = CLRec(items(), seed=3, **OPTIONS).eval()
    data = histories()
    expected = F.cosine_similarity(model.encode(data)[:, None], model.item(torch.arange(41)), dim=-1) / 0.07
    torch.testing.assert_close(model.scores(data)[:, 1:], expected[:, 1:])


def test_starts_with_normal_weights():
    for options in ({}, {"encoder": "sasrec"}):
        model = CLRec(items(4000), seed=3, **options)
        weights = dict(model.named_parameters())
        assert len(weights) >= 10
        for name, weight in weights.items():
            if weight.dim() == 1:
                assert weight.eq(float("norm" in name and name.endswith("weight"))).all()
                continue
            short = any(part in name for part in ("id", "features", "position", "bucket"))
            std = 0.02 if short else (2 / sum(weight.shape)) ** 0.5
            x = weight.detach().flatten() / std
            # Five standard errors of the standard deviation and of the fourth moment, which is 3 for a normal and 1.8
            # for a uniform distribution.
            assert x.std().item() == pytest.approx(1, abs=5 / (2 * len(x)) ** 0.5)
            assert (x**4).mean().item() == pytest.approx(3, abs=5 * (96 / len(x)) ** 0.5)


# The SASRec encoder


SASREC = {"encoder": "sasrec", "heads": 2, **OPTIONS}


def test_sasrec_encoder_is_causal_blocks_over_clicks_and_positions():
    model = CLRec(items(), seed=3, **SASREC).eval()
    user = model.user
    for row in ([5], [1, 2, 3], [4, 4, 7, 9]):
        x = model.item(torch.tensor(row)) + user.position.weight[: len(row)]
        mask = torch.ones(len(row), len(row)).tril() == 0
        for block in user.blocks:
            q, k, v = block.qkv(block.norm_attention(x)).chunk(3, -1)
            heads = []
            for head in (slice(0, 8), slice(8, 16)):
                weight = (q[:, head] @ k[:, head].T / 8**0.5).masked_fill(mask, -torch.inf).softmax(-1)
                heads.append(weight @ v[:, head])
            x = x + block.out(torch.cat(heads, -1))
            x = x + block.feed(block.norm_feed(x))
        expected = F.normalize(user.norm(x)[-1], dim=-1)
        torch.testing.assert_close(model.encode(Histories.from_lists([row]))[0], expected, atol=1e-5, rtol=1e-5)


def test_sasrec_encoder_trains_what_it_serves():
    """Every click but a history's first is a target once, of the vector that serves the clicks of its window before."""
    model = CLRec(items(), seed=3, batch=4, negatives=9, **SASREC).eval()
    data = histories(rows=10, longest=20)
    seen = []
    for batch in model.batches(data, np.random.default_rng(0)):
        users = model(model.item(batch.item), batch.bucket, batch.clicks)
        assert len(users) == len(batch.target) == len(batch.item) == model.targets(batch)
        position, row = batch.clicks.position.tolist(), batch.clicks.row.tolist()
        for at, target in enumerate(batch.target.tolist()):
            window = batch.item[at - position[at] : at + 1].tolist()
            torch.testing.assert_close(model.encode(Histories.from_lists([window]))[0], users[at], atol=1e-5, rtol=0)
            if at + 1 < len(row) and row[at + 1] == row[at]:
                assert target == batch.item[at + 1]
            seen.append(target)
    wanted = [item for row in rows(data) for item in row[1:]]
    assert sorted(seen) == sorted(wanted)


@pytest.mark.parametrize("duplicates", ["keep", "exclude"])
@pytest.mark.parametrize("negatives", [9, 40, 10**4])
def test_sasrec_loss_takes_the_newest_clicks_but_the_windows_own(duplicates, negatives):
    model = CLRec(items(), seed=3, batch=8, negatives=negatives, duplicates=duplicates, **SASREC).eval()
    first, second, *_ = model.batches(histories(rows=40), np.random.default_rng(0))
    model.loss(first)
    model.after_step(first)
    n = len(second.target)
    assert n > 9
    user = model(model.item(second.item), second.bucket, second.clicks)
    every = F.normalize(model.item(torch.arange(41)), dim=-1)
    few = min(n, negatives)
    columns = [c * n // few for c in range(few)]
    queued = first.target.tolist()[::-1][: negatives - few]
    losses = []
    for r, target in enumerate(second.target.tolist()):
        own = second.clicks.row[r]
        terms = [user[r] @ every[target] / 0.07]
        for c in columns:
            item = second.target[c].item()
            if (item != target) if duplicates == "exclude" else (second.clicks.row[c] != own):
                terms.append(user[r] @ every[item] / 0.07)
        terms += [user[r] @ every[item] / 0.07 for item in queued if duplicates == "keep" or item != target]
        losses.append(torch.stack(terms).logsumexp(0) - terms[0])
    torch.testing.assert_close(model.loss(second), torch.stack(losses).mean())


# The compared losses

TEMPERATURE = 0.07
ENCODERS = [OPTIONS, SASREC]


def one_batch(**options):
    """A model without dropout, its first batch, and by plain means: user vectors, all items' vectors, click shares."""
    model = CLRec(items(), seed=3, batch=8, negatives=20, samples=5, **options).eval()
    data = histories(rows=40)
    batch = next(iter(model.batches(data, np.random.default_rng(0))))
    users = model(model.item(batch.item), batch.bucket, batch.clicks).detach().double()
    table = F.normalize(model.item(torch.arange(41)), dim=-1).detach().double()
    share = 1.0 + np.bincount(data.item, minlength=41)[1:]
    return model, batch, users, table, share / share.sum()


@pytest.mark.parametrize("encoder", ENCODERS)
def test_full_softmax_and_its_weighting(encoder):
    model, batch, users, table, share = one_batch(objective="full_softmax", **encoder)
    log_p = (users @ table[1:].T / TEMPERATURE).log_softmax(-1)
    rows = -log_p[torch.arange(len(users)), batch.target - 1]
    torch.testing.assert_close(model.loss(batch).double(), rows.mean(), atol=1e-4, rtol=1e-5)
    weights = [1 / (40 * share[target - 1]) for target in batch.target.tolist()]
    assert min(weights) < 0.8 < 1.2 < max(weights)
    for limit in (10.0, 1.1):
        model, batch, *_ = one_batch(objective="ipw", weight_limit=limit, **encoder)
        expected = sum(min(w, limit) * loss for w, loss in zip(weights, rows.tolist(), strict=True)) / len(weights)
        assert model.loss(batch).item() == pytest.approx(expected, rel=1e-5)
        assert model.part_names == ("loss",)


@pytest.mark.parametrize("encoder", ENCODERS)
def test_learned_propensity_is_a_model_of_the_click_before(encoder):
    model, batch, users, table, share = one_batch(objective="ipw", propensity="learned", weight_limit=1e9, **encoder)
    torch.nn.init.normal_(model.propensity.after.weight)
    torch.nn.init.normal_(model.propensity.bias)
    weights = model.propensity.state_dict()
    before, after, bias = (weights[name].double() for name in ("before.weight", "after.weight", "bias"))
    log_p = (users @ table[1:].T / TEMPERATURE).log_softmax(-1)
    ends = batch.clicks.last if encoder is OPTIONS else torch.arange(len(batch.item))
    losses, log_qs = [], []
    for r, target in enumerate(batch.target.tolist()):
        logits = after @ before[batch.item[ends[r]]] + bias + torch.from_numpy(np.log(share))
        log_q = logits.log_softmax(0)[target - 1]
        losses.append(-log_p[r, target - 1] / (40 * log_q.exp()))
        log_qs.append(log_q)
    found = model.parts(batch)
    assert list(found) == list(model.part_names) == ["u2i", "propensity"]
    torch.testing.assert_close(found["u2i"].double(), torch.stack(losses).mean(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found["propensity"].double(), -torch.stack(log_qs).mean(), rtol=1e-5, atol=1e-5)
    # The propensity learns from its own likelihood alone, the encoders from the weighted loss alone.
    for part, learners in (("u2i", (model.item, model.user)), ("propensity", (model.propensity,))):
        model.zero_grad()
        model.parts(batch)[part].backward()
        learning = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
        allowed = {id(p) for module in learners for p in module.parameters()}
        assert learning
        assert all(id(p) in allowed for name, p in model.named_parameters() if name in learning)


def test_learned_propensity_finds_what_is_shown_after_what():
    """On a ring of 40 items every next click is known: q(y|x) goes from the share to one, the weight to 1/40."""
    data = Histories.from_lists([[(user + step) % 40 + 1 for step in range(6)] for user in range(40)])
    model = CLRec(items(), seed=3, objective="ipw", propensity="learned", batch=32, **OPTIONS).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    found = []
    for epoch in range(15):
        for batch in model.batches(data, np.random.default_rng(epoch)):
            optimizer.zero_grad()
            parts = model.parts(batch)
            sum(parts.values()).backward()
            optimizer.step()
            found.append(parts["propensity"].item())
    assert found[0] == pytest.approx(np.log(40), abs=1e-4)
    assert found[-1] < 0.1


def test_a_propensity_of_ones_own():
    class Known(torch.nn.Module):
        def forward(self, before, target, log_share):
            return torch.full((len(target),), 0.5 / 40).log()

    model, batch, *_ = one_batch(objective="ipw", **OPTIONS)
    plain, again, *_ = one_batch(objective="full_softmax", **OPTIONS)
    model.propensity = Known()
    torch.testing.assert_close(model.loss(batch), 2 * plain.loss(again))


@pytest.mark.parametrize("encoder", ENCODERS)
def test_sampled_softmax_takes_log_q_off(encoder):
    model, batch, users, table, share = one_batch(objective="sampled_softmax", **encoder)
    assert batch.drawn.shape == (20,)
    losses = []
    for r, target in enumerate(batch.target.tolist()):
        terms = [users[r] @ table[target] / TEMPERATURE - np.log(share[target - 1])]
        others = [item for item in batch.drawn.tolist() if item != target]
        terms += [users[r] @ table[item] / TEMPERATURE - np.log(share[item - 1]) for item in others]
        losses.append(torch.stack(terms).logsumexp(0) - terms[0])
    torch.testing.assert_close(model.loss(batch).double(), torch.stack(losses).mean(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize("objective", ["negative_sampling", "shared_negatives"])
def test_negative_sampling_is_a_binary_decision_a_pair(objective, encoder):
    model, batch, users, table, _ = one_batch(objective=objective, **encoder)
    n = len(batch.target)
    assert batch.drawn.shape == ((n, 5) if objective == "negative_sampling" else (20,))
    total = 0.0
    for r, target in enumerate(batch.target.tolist()):
        total -= torch.sigmoid(users[r] @ table[target] / TEMPERATURE).log()
        for item in (batch.drawn[r] if objective == "negative_sampling" else batch.drawn).tolist():
            total -= torch.sigmoid(-users[r] @ table[item] / TEMPERATURE).log()
    torch.testing.assert_close(model.loss(batch).double(), total / n, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("power", [1.0, 0.75])
def test_items_are_drawn_by_their_clicks(power):
    share = np.array([0.5, 0.3, 0.15, 0.05])
    drawn = draw(torch.from_numpy(np.log(share)).float(), power, (400, 500), np.random.default_rng(0))
    assert drawn.shape == (400, 500)
    found = np.bincount(drawn.ravel(), minlength=5)[1:] / drawn.size
    assert found == pytest.approx(share**power / (share**power).sum(), abs=0.004)  # 3.5 standard errors


def test_encoders_start_alike_whatever_the_loss():
    one, *others = (CLRec(items(), seed=3, objective=name, propensity="learned", **OPTIONS) for name in OBJECTIVES)
    for other in others:
        for name in ("item", "user"):
            ours, theirs = getattr(one, name).state_dict(), getattr(other, name).state_dict()
            assert all(torch.equal(ours[key], theirs[key]) for key in ours)
        assert other.queue is None


# Negatives from the batch, from ids encoded again, from kept vectors; followers


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
    options = {**encoder, "max_len": 2}
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
        items(), seed=3, features="clicks", negatives_from="vectors", batch=32, negatives=96, **OPTIONS
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
    assert seen == len(model.user.spans(data, longest).start)
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
        then = batch.later
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
