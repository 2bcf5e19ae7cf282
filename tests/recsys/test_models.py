"""The models' parts against plain loops: batching, encoders, SASRec's losses (CLRec's are elsewhere)."""

import dataclasses
import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fastcl import reference
from fastcl.recsys import (
    CLRec,
    CLRecConfig,
    ContrastVAE,
    Feature,
    Histories,
    Items,
    MultiCLRec,
    SASRec,
    SASRecConfig,
)
from fastcl.recsys.models.batching import newest, pack
from fastcl.recsys.models.layers import POSITIONS

MODELS = [SASRec, CLRec, MultiCLRec, functools.partial(CLRec, encoder="sasrec", heads=2)]
OPTIONS = {"dim": 16, "max_len": 7}
SASREC = {"encoder": "sasrec", "heads": 2, **OPTIONS}  # of CLRec
ENCODERS = [OPTIONS, SASREC]


def items(count: int = 40, features: bool = True) -> Items:
    if not features:
        return Items(tuple(f"i{n}" for n in range(count)))
    genres = [["a", "b", "c"][: n % 4] for n in range(count)]
    eras = [[str(n % 3)] for n in range(count)]
    table = {"genre": Feature.from_labels(genres), "era": Feature.from_labels(eras)}
    return Items(tuple(f"i{n}" for n in range(count)), None, table)


def with_a_bare_feature(table: Items) -> list[Items]:
    """The same items with a feature that none of them has; as they are read, and as a run folder has them."""
    bare = Items(table.ids, None, {**table.features, "brand": Feature.from_labels([[]] * len(table))})
    return [bare, Items.from_json(bare.to_json())]


def histories(rows: int = 30, count: int = 40, seed: int = 0, longest: int = 15) -> Histories:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest + 1, rows)
    lists = [rng.integers(1, count + 1, n).tolist() for n in lengths]
    times = [np.cumsum(rng.integers(0, 10**6, n)).tolist() for n in lengths]
    return Histories.from_lists(lists, times)


def rows(histories: Histories) -> list[list[int]]:
    return [histories.item[a:b].tolist() for a, b in zip(histories.offsets, histories.offsets[1:], strict=False)]


# Both models


@pytest.mark.parametrize("model_class", MODELS)
@pytest.mark.parametrize("features", [True, False])
def test_encoding_in_a_batch_equals_one_by_one(model_class, features):
    model = model_class(items(features=features), seed=1, **{**OPTIONS, "max_len": 50}).eval()
    data = histories(longest=60)
    together = model.encode(data)
    alone = torch.cat([model.encode(data.take(np.array([r]))) for r in range(len(data))])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("model_class", MODELS)
def test_only_the_newest_max_len_clicks_count(model_class):
    model = model_class(items(), seed=1, **OPTIONS).eval()
    data = histories(longest=20)
    assert (data.lengths > 7).any()
    assert torch.equal(model.encode(data), model.encode(data.last(7)))


@pytest.mark.parametrize("model_class", MODELS)
def test_seed_decides_the_weights_and_leaves_the_global_generator_alone(model_class):
    torch.manual_seed(5)
    state = torch.get_rng_state()
    one, same, other = (model_class(items(), seed=seed, **OPTIONS).state_dict() for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), state)
    names = [
        name
        for name, tensor in one.items()
        if tensor.is_floating_point() and tensor.std(correction=0) > 0 and "norm" not in name
    ]
    assert len(names) > 5
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert all(not torch.equal(one[name], other[name]) for name in names if "_keys" not in name)


@pytest.mark.parametrize("model_class", MODELS)
def test_scores_leave_padding_out(model_class):
    scores = model_class(items(), seed=0, **OPTIONS).eval().scores(histories())
    assert scores.shape == (30, 41)
    assert (scores[:, 0] == -torch.inf).all()
    assert scores[:, 1:].isfinite().all()


@pytest.mark.parametrize("model_class", MODELS)
def test_an_empty_history_is_refused(model_class):
    with pytest.raises(ValueError, match="at least one click each, got none in row 1"):
        model_class(items(), **OPTIONS).encode(Histories.from_lists([[1], [], [2]]))


@pytest.mark.parametrize("model_class", MODELS)
def test_every_parameter_learns(model_class):
    model = model_class(items(), seed=0, batch=64, **OPTIONS).train()
    data = histories(rows=200)
    for batch in model.batches(data, np.random.default_rng(0)):
        model.loss(batch).backward()
        model.after_update()
        model.after_step(batch)
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (SASRecConfig, {"dim": 10, "heads": 3}, "dim: expected a multiple of heads=3, got 10"),
        (SASRecConfig, {"loss": "hinge"}, "loss: expected one of softmax, sce, popular, gbce, bce, got 'hinge'"),
        (SASRecConfig, {"positions": "last"}, "positions: expected one of oldest, newest, got 'last'"),
        (SASRecConfig, {"debias": -1.0}, "debias: expected at least 0"),
        (SASRecConfig, {"dropout": 1.0}, "dropout: expected at least 0 and below 1, got 1.0"),
        (SASRecConfig, {"normalize": 1.5}, "normalize: expected from 0 to 1, got 1.5"),
        (SASRecConfig, {"label_smoothing": 1.5}, "label_smoothing: expected from 0 to 1, got 1.5"),
        (SASRecConfig, {"label_smoothing": 0.1, "loss": "bce"}, "label_smoothing: expected 0 with loss=bce, got 0.1"),
        (SASRecConfig, {"blocks": 0}, "blocks: expected at least 1, got 0"),
        (CLRecConfig, {"negatives": 256}, "negatives: expected at least 257, got 256"),
        (CLRecConfig, {"encoder": "gru"}, "encoder: expected one of pooling, sasrec, got 'gru'"),
        (CLRecConfig, {"encoder": "sasrec", "dim": 10}, "dim: expected a multiple of heads=4, got 10"),
        (CLRecConfig, {"objective": "bpr"}, "objective: expected one of clrec, sampled_softmax, .*, got 'bpr'"),
        (CLRecConfig, {"objective": "sampled_softmax", "negatives": 0}, "negatives: expected at least 1, got 0"),
        (CLRecConfig, {"negatives_from": "rank"}, "negatives_from: expected one of batch, ids, vectors, got 'rank'"),
        (CLRecConfig, {"momentum": 1.0}, "momentum: expected at least 0 and below 1, got 1.0"),
        (CLRecConfig, {"momentum": 0.9, "negatives_from": "ids"}, "momentum: expected 0 where no vectors are queued"),
        (CLRecConfig, {"momentum": 0.9, "objective": "ipw"}, "momentum: expected 0 where no vectors are queued"),
        (CLRecConfig, {"features": "none"}, "features: expected one of everywhere, clicks, got 'none'"),
        (CLRecConfig, {"tasks": ("u2u",)}, "tasks: expected u2i or u2i,u2u, got u2u"),
        (CLRecConfig, {"tasks": ()}, "tasks: expected u2i or u2i,u2u, got none"),
        (CLRecConfig, {"time_unit": "week"}, "time_unit: expected one of .*, day, got 'week'"),
        (CLRecConfig, {"samples": 0}, "samples: expected at least 1, got 0"),
        (CLRecConfig, {"propensity": "x"}, "propensity: expected one of popularity, learned, got 'x'"),
        (CLRecConfig, {"weight_limit": 0.0}, "weight_limit: expected a finite number above 0"),
        (CLRecConfig, {"log_q": 1.1}, "log_q: expected from 0 to 1, got 1.1"),
        (CLRecConfig, {"log_q": 0.5, "objective": "ipw"}, "log_q: expected 0 or 1 with objective=ipw, got 0.5"),
        (CLRecConfig, {"temperature": 0.0}, "temperature: expected a finite number above 0, got 0.0"),
        (CLRecConfig, {"duplicates": "drop"}, "duplicates: expected one of keep, exclude, got 'drop'"),
        (CLRecConfig, {"time_cuts": (5.0, 1.0)}, "time_cuts: expected rising limits"),
    ],
)
def test_bad_settings_are_refused(config, options, message):
    with pytest.raises(ValueError, match=message):
        config(**options)


# SASRec


def test_sasrec_sees_no_later_click():
    model = SASRec(items(), seed=2, **OPTIONS).eval()
    before = Histories.from_lists([[1, 2, 3, 4, 5], [6, 7, 8]])
    after = Histories.from_lists([[1, 2, 3, 30, 31], [6, 7, 33]])
    hidden = []
    for data in (before, after):
        clicks = pack(newest(data, 7))
        hidden.append(model(torch.from_numpy(data.item), clicks))
    same = torch.tensor([True, True, True, False, False, True, True, False])
    assert torch.equal(hidden[0][same], hidden[1][same])
    assert (hidden[0][~same] != hidden[1][~same]).any(1).all()


def test_sasrec_trains_what_it_serves():
    """The hidden state of training step t of a window is the encoding of the history up to t."""
    model = SASRec(items(), seed=2, batch=8, **OPTIONS).eval()
    data = Histories.from_lists([[1, 2, 3, 4, 5], [6, 7, 8]])
    (batch,) = model.batches(data, np.random.default_rng(0))
    hidden = model(batch.item, batch.clicks)
    served = {tuple(h): model.encode(Histories.from_lists([h]))[0] for h in ([1], [1, 2], [1, 2, 3, 4], [6], [6, 7])}
    position = batch.clicks.position.tolist()
    for at, item in enumerate(batch.item.tolist()):
        history = tuple(range(item - position[at], item + 1))
        assert batch.target[at] == item + 1
        if history in served:
            torch.testing.assert_close(hidden[at], served[history], atol=1e-5, rtol=0)
    assert len(hidden) == 6


def test_sasrec_attention_equals_a_plain_loop():
    model = SASRec(items(), seed=2, heads=2, **OPTIONS).eval()
    block = model.blocks[0]
    clicks = pack(newest(Histories.from_lists([[1, 2, 3], [4]]), 7))
    x = torch.randn(4, 16)
    found = block(x, clicks)
    q, k, v = block.qkv(block.norm_attention(x)).chunk(3, -1)
    for row, at in ((0, 0), (0, 1), (0, 2), (3, 3)):
        mixed = []
        for head in (slice(0, 8), slice(8, 16)):
            weight = (k[row : at + 1, head] @ q[at, head] / 8**0.5).softmax(0)
            mixed.append(weight @ v[row : at + 1, head])
        y = x[at] + block.out(torch.cat(mixed))
        torch.testing.assert_close(found[at], y + block.feed(block.norm_feed(y)), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_sasrec_softmax_is_cross_entropy_over_the_items(smoothing):
    model = SASRec(items(), seed=2, batch=64, label_smoothing=smoothing, **OPTIONS).eval()
    (batch,) = model.batches(histories(), np.random.default_rng(0))
    hidden = model(batch.item, batch.clicks)
    expected = F.cross_entropy(hidden @ model.item.weight[1:].T, batch.target - 1, label_smoothing=smoothing)
    torch.testing.assert_close(model.loss(batch), expected)
    model.loss(batch).backward()
    (grad,) = torch.autograd.grad(expected, model.position.weight)
    torch.testing.assert_close(model.position.weight.grad, grad, atol=1e-6, rtol=1e-4)
    assert (model.item.weight.grad[0] == 0).all()


def test_debias_adds_the_log_share_of_the_clicks_in_training_alone():
    data = Histories.from_lists([[1, 2, 1], [1, 3], [2, 1]])
    share = torch.full((40,), 1.0)
    share[0], share[1], share[2] = 5.0, 3.0, 2.0
    bias = 0.5 * (share / share.sum()).log()
    one, two = (SASRec(items(), seed=2, batch=8, debias=debias, **OPTIONS).eval() for debias in (0.0, 0.5))
    (batch,) = two.batches(data, np.random.default_rng(0))
    hidden = two(batch.item, batch.clicks)
    expected = F.cross_entropy(hidden @ two.item.weight[1:].T + bias, batch.target - 1)
    torch.testing.assert_close(two.loss(batch), expected)
    assert torch.equal(one.scores(data), two.scores(data))


@pytest.mark.parametrize("model_class", [SASRec, ContrastVAE])
def test_normalize_shortens_the_item_vectors_of_scores_and_not_those_of_training(model_class):
    data = histories(rows=20)
    one, two = (model_class(items(), seed=2, normalize=power, **OPTIONS).eval() for power in (0.0, 0.3))
    table = one.item.weight[: len(items()) + 1]
    expected = one.encode(data) @ (table / table.norm(dim=1, keepdim=True).clamp(min=1e-9) ** 0.3).T
    torch.testing.assert_close(two.scores(data)[:, 1:], expected[:, 1:])
    assert not torch.equal(one.scores(data), two.scores(data))
    torch.testing.assert_close(two.vectors_of(torch.tensor([3, 1])), two.item_vectors()[[3, 1]])
    torch.testing.assert_close(*(model.loss(*model.batches(data, np.random.default_rng(0))) for model in (one, two)))


def test_positions_count_from_either_end():
    clicks = pack(newest(Histories.from_lists([[1, 2, 3], [4]]), 7))
    assert POSITIONS["oldest"](clicks).tolist() == [0, 1, 2, 0]
    assert POSITIONS["newest"](clicks).tolist() == [2, 1, 0, 0]
    model = SASRec(items(), seed=2, positions="newest", **OPTIONS).eval()
    hidden = model(torch.tensor([1, 2, 3, 4]), clicks)
    with torch.no_grad():
        model.position.weight[:3] = model.position.weight[:3].flip(0)
    model.config = dataclasses.replace(model.config, positions="oldest")
    torch.testing.assert_close(model(torch.tensor([1, 2, 3, 4]), clicks)[:3], hidden[:3])


def test_sasrec_gbce_is_that_of_the_paper_over_items_drawn_for_the_batch():
    model = SASRec(items(), seed=2, loss="gbce", samples=30, debias=0.5, batch=64, **OPTIONS).eval()
    (batch,) = model.batches(histories(), np.random.default_rng(0))
    assert len(batch.negative) == 30
    logits = model(batch.item, batch.clicks) @ model.item.weight[1:].T + model.bias
    up = logits.gather(1, batch.target[:, None] - 1)[:, 0].sigmoid()
    down = (1 - logits[:, batch.negative - 1].sigmoid()).log()
    same = batch.target[:, None] == batch.negative
    assert same.any()
    share = 30 / (40 - 1)
    beta = share * (0.75 * (1 - 1 / share) + 1 / share)
    expected = -((up**beta).log() + down.masked_fill(same, 0.0).sum(1)) / 31
    torch.testing.assert_close(model.loss(batch), expected.mean())


def test_sasrec_sce_is_the_softmax_over_the_items_of_the_buckets():
    model = SASRec(items(600), seed=2, loss="sce", debias=0.5, batch=64, **OPTIONS).eval()
    (batch,) = model.batches(histories(), np.random.default_rng(0))
    assert batch.negative.shape == (0,)
    hidden, table = model(batch.item, batch.clicks), model.item.weight[1:]
    count = len(hidden)
    buckets = int(2 * count**0.5)
    torch.manual_seed(3)
    directions = torch.randn(buckets, count) @ hidden.detach()
    expected = reference.sce(hidden, table, batch.target - 1, model.bias, buckets=directions)
    torch.manual_seed(3)
    torch.testing.assert_close(model.loss(batch), expected)
    assert expected < 0.9 * F.cross_entropy(hidden @ table.T + model.bias, batch.target - 1)


def test_sasrec_bce_takes_one_unclicked_item_a_position():
    model = SASRec(items(), seed=2, loss="bce", batch=64, **OPTIONS).eval()
    data = histories()
    clicked = [set(row) for row in rows(data)]
    (batch,) = model.batches(data, np.random.default_rng(0))
    hidden, table = model(batch.item, batch.clicks), model.item.weight
    up = torch.sigmoid((hidden * table[batch.target]).sum(1))
    down = torch.sigmoid((hidden * table[batch.negative]).sum(1))
    torch.testing.assert_close(model.loss(batch), -(up.log() + (1 - down).log()).mean())
    for row in range(len(batch.clicks.length)):
        here = batch.clicks.row == row
        user = next(u for u in clicked if set(batch.item[here].tolist()) | set(batch.target[here].tolist()) <= u)
        assert not user & set(batch.negative[here].tolist())
