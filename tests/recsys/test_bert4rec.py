"""BERT4Rec against plain loops: what is covered, what is predicted, who attends to whom, and that it learns."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fastcl.recsys import BERT4Rec, BERT4RecConfig, Cases, Histories, Items, Split, evaluate, fit, load, save
from fastcl.recsys.models.batching import newest, pack, windows
from fastcl.recsys.models.bert4rec import cover

pytestmark = pytest.mark.usefixtures("one_thread")
COUNT = 40
ITEMS = Items(tuple(str(n) for n in range(COUNT)))  # an item called "0" is an item
OPTIONS = {"dim": 16, "max_len": 7, "batch": 8}


def histories(rows: int = 30, seed: int = 0, shortest: int = 1, longest: int = 15) -> Histories:
    rng = np.random.default_rng(seed)
    return Histories.from_lists([rng.integers(1, COUNT + 1, n).tolist() for n in rng.integers(shortest, longest, rows)])


def test_the_mask_token_is_neither_padding_nor_an_item():
    model = BERT4Rec(ITEMS, seed=0, **OPTIONS).eval()
    assert model.mask == COUNT + 1
    assert ITEMS.encode(["0"])[0] == 1
    assert (model.item.weight[0] == 0).all()
    assert (model.item.weight[model.mask] != 0).all()
    scores = model.scores(histories())
    assert scores.shape == (30, COUNT + 1)
    assert (scores[:, 0] == -torch.inf).all()
    assert scores[:, 1:].isfinite().all()


def test_covered_clicks_are_predicted_from_their_own_place():
    """The target of each covered place is what the log has there, and no uncovered click is changed."""
    data = histories(rows=60)
    model = BERT4Rec(ITEMS, seed=0, mask_rate=0.4, **OPTIONS)
    seen = 0
    for batch in model.batches(data, np.random.default_rng(0)):
        original = data.item[batch.clicks.source]
        covered = np.zeros(len(original), bool)
        covered[batch.covered.numpy()] = True
        assert (batch.item.numpy()[covered] == model.mask).all()
        assert (batch.item.numpy()[~covered] == original[~covered]).all()
        assert batch.target.tolist() == original[covered].tolist()
        per_row = np.bincount(batch.clicks.row.numpy()[covered], minlength=len(batch.clicks.length))
        assert (per_row >= 1).all()
        seen += len(batch.clicks.length)
    assert seen == len(windows(data, 6).start)


def test_the_share_that_is_covered():
    clicks = pack(newest(Histories.from_lists([list(range(1, 21))] * 400 + [[1, 2]] * 400), 20))
    covered = cover(clicks, 0.2, 0.25, np.random.default_rng(0))
    long, short = covered[: 400 * 20].reshape(400, 20), covered[400 * 20 :].reshape(400, 2)
    alone = (long.sum(1) == 1) & long[:, -1]
    assert set(long.sum(1)) == {1, 4}
    assert abs(alone.mean() - 0.25) < 0.06
    assert (short.sum(1) == 1).all()
    # Elsewhere every place is covered alike.
    assert (abs(long[~alone].mean(0) - 0.2) < 0.08).all()


def test_serving_equals_a_cover_over_the_last_click():
    """Appending the mask token in `encode` and covering the newest click in training are the same input."""
    model = BERT4Rec(ITEMS, seed=1, last_only=1.0, batch=64, **{k: OPTIONS[k] for k in ("dim", "max_len")}).eval()
    data = Histories.from_lists([[1, 2, 3, 4, 5], [6, 7, 8], [9, 10]])
    (batch,) = model.batches(data, np.random.default_rng(0))
    hidden = model.head(model(batch.item, batch.clicks)[batch.covered])
    served = model.encode(Histories.from_lists([[1, 2, 3, 4], [6, 7], [9]]))
    order = [[5, 8, 10].index(target) for target in batch.target.tolist()]
    torch.testing.assert_close(hidden, served[order, :-1], atol=1e-5, rtol=0)
    assert (served[:, -1] == 1).all()


def test_attention_looks_both_ways_and_never_at_padding():
    model = BERT4Rec(ITEMS, seed=1, **{**OPTIONS, "max_len": 50}).eval()
    data = histories(longest=60)
    together = model.encode(data)
    alone = torch.cat([model.encode(data.take(np.array([r]))) for r in range(len(data))])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)
    states = []
    for last in (3, 30):
        lists = Histories.from_lists([[1, 2, last], [6]])
        states.append(model(torch.from_numpy(lists.item), pack(newest(lists, 7))))
    assert (states[0][:3] != states[1][:3]).any(1).all()
    torch.testing.assert_close(states[0][3], states[1][3])


def test_only_the_newest_clicks_count_and_an_empty_history_is_refused():
    model = BERT4Rec(ITEMS, seed=1, **OPTIONS).eval()
    data = histories(longest=20)
    assert torch.equal(model.encode(data), model.encode(data.last(6)))
    with pytest.raises(ValueError, match="at least one click each, got none in row 1"):
        model.encode(Histories.from_lists([[1], [], [2]]))


@pytest.mark.parametrize("loss", ["softmax", "sampled"])
def test_the_loss_is_cross_entropy_with_a_bias(loss):
    model = BERT4Rec(ITEMS, seed=2, loss=loss, samples=25, **OPTIONS).eval()
    with torch.no_grad():
        model.bias.normal_()
    batch = next(model.batches(histories(), np.random.default_rng(0)))
    hidden = model.head(model(batch.item, batch.clicks)[batch.covered])
    logits = hidden @ model.item.weight[:-1].T + model.bias
    target = logits.gather(1, batch.target[:, None])[:, 0]
    if loss == "softmax":
        expected = F.cross_entropy(logits[:, 1:], batch.target - 1)
    else:
        drawn = logits[:, batch.negative] + np.log(COUNT / 25)
        drawn[batch.negative == batch.target[:, None]] = -torch.inf
        expected = (torch.cat([target[:, None], drawn], 1).logsumexp(1) - target).mean()
    torch.testing.assert_close(model.loss(batch), expected)
    model.loss(batch).backward()
    for parameter in (model.bias, model.head[0].weight):
        (gradient,) = torch.autograd.grad(expected, parameter, retain_graph=True)
        torch.testing.assert_close(parameter.grad, gradient, atol=1e-6, rtol=1e-4)


def test_every_parameter_learns_and_no_loss_is_nan():
    model = BERT4Rec(ITEMS, seed=0, **OPTIONS).train()
    for batch in model.batches(histories(rows=200), np.random.default_rng(0)):
        loss = model.loss(batch)
        assert loss.isfinite()
        loss.backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask_rate": 0.0}, "mask_rate: expected a finite number above 0, got 0.0"),
        ({"mask_rate": 1.5}, "mask_rate: expected a share from 0 to 1, got 1.5"),
        ({"last_only": -0.1}, "last_only: expected a share from 0 to 1, got -0.1"),
        ({"max_len": 1}, "max_len: expected at least 2, got 1"),
        ({"loss": "bce"}, "loss: expected one of softmax, sampled, got 'bce'"),
        ({"dim": 10, "heads": 3}, "dim: expected a multiple of heads=3, got 10"),
    ],
)
def test_bad_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        BERT4RecConfig(**options)


def test_it_learns_a_ring_repeats_and_survives_the_run_folder(tmp_path):
    lists = [[int(s + step) % 30 + 1 for step in range(10)] for s in np.random.default_rng(0).integers(0, 30, 150)]
    part = [Histories.from_lists([row[:n] for row in lists]) for n in (8, 9)]
    cases = [Cases(np.arange(150), h, np.array([row[n] for row in lists])) for h, n in zip(part, (8, 9), strict=True)]
    items = Items(tuple(f"i{n}" for n in range(30)))
    split = Split(items, tuple(f"u{n}" for n in range(150)), part[0], *cases, counts=np.ones(31, np.int64))
    options = {"dim": 32, "max_len": 10, "batch": 16, "dropout": 0.0, "attention_dropout": 0.0}
    model, once, again = (BERT4Rec(items, seed=0, **options) for _ in range(3))
    fit(model, split, epochs=25, lr=3e-3, progress=False)
    assert evaluate(model, split.test, counts=split.counts, k=(1,))["recall@1"] > 0.6
    for short in (once, again):
        fit(short, split, epochs=1, progress=False)
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in once.state_dict().items())
    save(model, tmp_path / "run")
    assert torch.equal(load(tmp_path / "run").scores(part[1]), model.scores(part[1]))
