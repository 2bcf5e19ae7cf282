"""CLRec's parts against plain loops and hand-computed values: encoders, losses, negatives, tasks."""

import dataclasses

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
    model = CLRec(items(), seed=3, batch=32, negatives=96, duplicates=duplicates, **OPTIONS).eval()
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


# The SASRec encoder


SASREC = {"encoder": "sasrec", "heads": 2, **OPTIONS}


def test_sasrec_encoder_is_causal_blocks_over_clicks_and_positions():
    model = CLRec(items(), seed=3, **SASREC).eval()
    user = model.user
    # Normal everywhere, but for what normalises.
    assert user.norm.weight.eq(1).all()
    assert user.blocks[0].norm_feed.weight.eq(1).all()
    for weight in (model.item.id.weight, user.position.weight, user.blocks[1].qkv.weight):
        assert weight.std().item() == pytest.approx(16**-0.5, rel=0.15)
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
    assert list(found) == list(model.part_names) == ["ipw", "propensity"]
    torch.testing.assert_close(found["ipw"].double(), torch.stack(losses).mean(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found["propensity"].double(), -torch.stack(log_qs).mean(), rtol=1e-5, atol=1e-5)
    # The propensity learns from its own likelihood alone, the encoders from the weighted loss alone.
    for part, learners in (("ipw", (model.item, model.user)), ("propensity", (model.propensity,))):
        model.zero_grad()
        model.parts(batch)[part].backward()
        learning = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
        allowed = {id(p) for module in learners for p in module.parameters()}
        assert learning
        assert all(id(p) in allowed for name, p in model.named_parameters() if name in learning)


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
