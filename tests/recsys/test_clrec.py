"""CLRec's parts against plain loops and hand-computed values: its encoders, its own loss, its start."""

import dataclasses
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_models import OPTIONS, SASREC, histories, items, rows, with_a_bare_feature

import fastcl
from fastcl import reference
from fastcl.recsys import CLRec, Histories
from fastcl.recsys.models.batching import Prefixes, newest


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
    for bare in with_a_bare_feature(table):
        described = CLRec(bare, seed=3, dim=18, max_len=7).item.described(torch.arange(1, 41))
        assert described[:, :12].any()
        assert not described[:, 12:].any()
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
    spans = Prefixes(data, 7).all()
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
        clicks, item, bucket = model._clicks(data, Prefixes(data, 7).all())
        users.append(model(model.item(item), bucket, clicks))
    assert torch.equal(users[0][:2], users[1][:2])
    assert not torch.equal(users[0][2], users[1][2])


@pytest.mark.parametrize("duplicates", ["keep", "exclude"])
def test_loss_is_infonce_over_batch_and_queue(duplicates):
    options = {"negatives_from": "vectors", "log_q": 0.0, "duplicates": duplicates, **OPTIONS}
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
    options = {"negatives": negatives, "log_q": 0.0, "duplicates": duplicates, **SASREC}
    model = CLRec(items(), seed=3, batch=8, **options).eval()
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
