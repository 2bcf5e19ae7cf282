"""Spans, packed batches and negatives drawn for them, against plain loops."""

import numpy as np
import pytest
import torch

from fastcl.recsys import BERT4Rec, CLRec, ContrastVAE, Items, SASRec
from fastcl.recsys.data import Histories
from fastcl.recsys.models.batching import Prefixes, Unclicked, batch_count, batched, newest, pack, windows
from fastcl.recsys.models.layers import CausalBlock, PostBlock


def histories(rows: int = 30, longest: int = 15) -> Histories:
    rng = np.random.default_rng(0)
    return Histories.from_lists([rng.integers(1, 41, n).tolist() for n in rng.integers(1, longest + 1, rows)])


def rows(histories: Histories) -> list[list[int]]:
    return [histories.item[a:b].tolist() for a, b in zip(histories.offsets, histories.offsets[1:], strict=False)]


def test_windows_make_every_click_but_the_first_a_target_once():
    data = histories()
    spans = windows(data, 4)
    targets = np.concatenate([np.arange(a + 1, b) for a, b in zip(spans.start, spans.stop, strict=True)])
    firsts = data.offsets[:-1]
    assert sorted(targets) == sorted(set(range(len(data.item))) - set(firsts))
    assert ((spans.stop - spans.start) <= 5).all()
    assert ((spans.stop - spans.start) >= 2).all()
    assert (spans.start >= data.offsets[spans.row]).all()
    assert (spans.stop <= data.offsets[spans.row + 1]).all()
    # The newest window is a full one wherever the history is long enough.
    longest = [spans.stop[spans.row == r].max() - spans.start[spans.row == r].max() for r in set(spans.row)]
    assert longest == [min(5, n) for n in data.lengths if n > 1]


def test_prefixes_hold_the_newest_clicks_before_each_target():
    data = histories()
    spans = Prefixes(data, 4).all()
    found = {(r, t): data.item[a:t].tolist() for r, a, t in zip(spans.row, spans.start, spans.stop, strict=True)}
    expected = {}
    for r, row in enumerate(rows(data)):
        for p in range(1, len(row)):
            expected[r, data.offsets[r] + p] = row[max(0, p - 4) : p]
    assert found == expected


@pytest.mark.parametrize("together", [1, 32])
def test_batches_hold_every_span_once_in_random_order(together):
    data = histories(rows=3000, longest=50)
    spans = windows(data, 50)
    batches = list(batched(spans, 32, np.random.default_rng(0), sorted_together=together))
    assert sorted(np.concatenate([b.start for b in batches])) == sorted(spans.start)
    assert len(batches) == batch_count(spans, 32)
    means = np.array([(b.stop - b.start).mean() for b in batches])
    assert list(means) != sorted(means)
    # 32 lengths that are spread evenly over 2..50 have a mean with a standard deviation of 2.5.
    assert (means.std() < 4) == (together == 1)
    real = sum((b.stop - b.start).sum() for b in batches)
    padded = sum(len(b.start) * (b.stop - b.start).max() for b in batches)
    assert (padded < 1.1 * real) == (together == 32)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (SASRec, {}),
        (BERT4Rec, {}),
        (ContrastVAE, {"augment": ()}),
        (ContrastVAE, {"augment": (), "compat": "paper-code"}),
        (CLRec, {"encoder": "sasrec", "negatives": 2000}),
    ],
)
def test_models_whose_clicks_are_all_targets_mix_lengths(kind, options):
    rng = np.random.default_rng(0)
    data = Histories.from_lists([rng.integers(1, 41, n).tolist() for n in rng.integers(2, 31, 2000)])  # 20 full batches
    model = kind(Items(tuple(map(str, range(40)))), dim=8, heads=2, max_len=30, batch=100, seed=0, **options)
    counts = np.array([model.targets(batch) for batch in model.batches(data, rng)])
    assert counts.min() > 0.75 * counts.mean()  # sorted by length, the least is below a quarter
    assert counts.max() < 1.25 * counts.mean()


def test_negatives_are_drawn_only_where_a_loss_reads_them(monkeypatch):
    """And the batches are the same with and without them: the draws come after the order."""
    data = histories()
    made = {loss: SASRec(Items(tuple(map(str, range(40)))), dim=8, batch=9, loss=loss) for loss in ("bce", "softmax")}
    drawn = list(made["bce"].batches(data, np.random.default_rng(3)))
    monkeypatch.setattr(Unclicked, "__init__", lambda *_: pytest.fail("nobody reads these draws"))
    plain = list(made["softmax"].batches(data, np.random.default_rng(3)))
    for one, two in zip(drawn, plain, strict=True):
        assert torch.equal(one.item, two.item)
        assert torch.equal(one.target, two.target)
        assert (len(one.negative), len(two.negative)) == (len(one.target), 0)


def test_padded_rows_hold_their_clicks():
    data = histories()
    clicks = pack(newest(data, 6))
    x = torch.randn(len(clicks.source), 3)
    block = clicks.pad(x)
    assert block.shape == (len(data), 6, 3)
    for row, length in enumerate(clicks.length):
        assert torch.equal(block[row, :length], x[clicks.row == row])
    assert (block[torch.arange(6) >= clicks.length[:, None]] == 0).all()
    assert torch.equal(x[clicks.last], torch.stack([x[clicks.row == r][-1] for r in range(len(data))]))


def test_blocks_hold_rows_of_about_equal_lengths():
    clicks = pack(newest(histories(rows=500, longest=100), 100))
    x = torch.arange(1.0, 1 + len(clicks.source)).double()[:, None]
    seen = []

    def reversed_rows(block, nth):
        length, width = clicks.blocks[nth]
        assert block.shape == (len(length), width, 1)
        assert width == length.max()
        assert width < 2 * length.min() or width <= 8
        assert ((block != 0).sum((1, 2)) == length).all()
        seen.append(width)
        return torch.stack([torch.cat([row[:n].flip(0), row[n:]]) for row, n in zip(block, length, strict=True)])

    found = clicks.by_length(x, reversed_rows)
    assert len(seen) == 5  # up to 8, 16, 32, 64, 128
    assert torch.equal(found, torch.cat([x[clicks.row == row].flip(0) for row in range(500)]))


@pytest.mark.parametrize(("kind", "masked"), [(CausalBlock, False), (PostBlock, False), (PostBlock, True)])
def test_rows_of_all_lengths_attend_as_they_would_alone(kind, masked):
    """States and gradients; the masks let every click see all of its row."""
    block = kind(8, 2, *([0.5, 0.5] if kind is PostBlock else [0.5])).double().eval()
    data = histories(rows=40, longest=60)
    clicks = pack(newest(data, 60))
    assert len(clicks.blocks) > 2

    def states(x, clicks):
        masks = [torch.arange(width) < length[:, None, None, None] for length, width in clicks.blocks]
        return block(x, clicks, masks) if masked else block(x, clicks)

    x = torch.randn(len(clicks.source), 8, dtype=torch.float64, requires_grad=True)
    single = [pack(newest(data.take(np.array([row])), 60)) for row in range(40)]
    alone = torch.cat([states(x[clicks.row == row], one) for row, one in enumerate(single)])
    together = states(x, clicks)
    torch.testing.assert_close(together, alone)
    weight = torch.randn_like(alone)
    gradients = [torch.autograd.grad((weight * found).sum(), x)[0] for found in (together, alone)]
    torch.testing.assert_close(*gradients)


def test_unclicked_items_are_drawn_uniformly():
    data = Histories.from_lists([[2, 2, 5], [1, 2, 3, 4, 5, 6], [6, 1], []])
    draw = Unclicked(data, 6).draw(np.repeat([0, 1, 2, 3], 4000), np.random.default_rng(0)).reshape(4, -1)
    for row, free in ((0, [1, 3, 4, 6]), (2, [2, 3, 4, 5]), (3, [1, 2, 3, 4, 5, 6])):
        values, counts = np.unique(draw[row], return_counts=True)
        assert values.tolist() == free
        assert (abs(counts / 4000 - 1 / len(free)) < 0.03).all()
    assert (draw[1] == 0).all()
