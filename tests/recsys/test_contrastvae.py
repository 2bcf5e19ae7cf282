"""ContrastVAE: settings, augmentations, what it may see, what it learns, and that a study goes on where it stopped.

Its losses are in test_contrastvae_losses.py.
"""

import contextlib
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from contrastvae_twin import COUNT, MODES, embedded, histories, items, kl_by_hand, model, one_batch, through

from benchmarks.study import Plan, train
from fastcl import reference
from fastcl.recsys import Cases, ContrastVAE, ContrastVAEConfig, Histories, Items, Split, evaluate, fit, load, save
from fastcl.recsys.models.contrastvae.config import RECONSTRUCTIONS
from fastcl.recsys.models.contrastvae.rules import original_next, own_next
from fastcl.recsys.models.contrastvae.views import CONTRASTS, SEQUENCE, crop, mask, reorder

pytestmark = pytest.mark.usefixtures("one_thread")


# Shapes and settings


@pytest.mark.parametrize("compat", ["none", "paper-code"])
@pytest.mark.parametrize("mode", MODES)
def test_shapes(mode, compat):
    net = model(augment=MODES[mode], compat=compat, heads=2).eval()
    data = histories()
    assert net.encode(data).shape == (30, 16)
    scores = net.scores(data)
    assert scores.shape == (30, COUNT + 1)
    assert (scores[:, 0] == -torch.inf).all()
    assert scores[:, 1:].isfinite().all()
    assert set(net.diagnostics(data)) == {"kl", "variance"}
    batches = list(net.batches(data, np.random.default_rng(0)))
    assert len(batches) == net.steps(data)
    assert all(net.targets(batch) == len(batch[0].target[batch[0].target > 0]) for batch in batches)
    assert {len(batch) for batch in batches} == {2 if MODES[mode] else 1}
    assert net.loss(batches[0]).shape == ()


def test_the_default_is_contrastive_and_the_authors_program_has_its_own_defaults():
    assert ContrastVAEConfig().augment
    config = ContrastVAE(items(), compat="paper-code").config
    assert (config.dim, config.heads, config.blocks, config.batch, config.dropout) == (128, 4, 1, 256, 0.3)
    assert (config.reconstruction, config.contrast, config.temperature, config.lr) == ("bce", "nt_xent", 0.5, 1e-3)
    assert ContrastVAE(items(), compat="paper-code", batch=32).config.batch == 32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"augment": ("flip",)}, "augment: expected one of crop, mask, reorder, dropout, variational, got 'flip'"),
        ({"positions": "last"}, "positions: expected one of oldest, newest, got 'last'"),
        ({"alpha": "item"}, "alpha: expected one of scalar, dimension, position, got 'item'"),
        ({"compat": "tf"}, "compat: expected one of none, paper-code, got 'tf'"),
        ({"compat": "paper-code", "positions": "oldest"}, 'positions: expected "newest" with compat='),
        ({"reconstruction": "mse"}, "reconstruction: expected one of softmax, sampled, bce, got 'mse'"),
        ({"contrast": "moco"}, "contrast: expected one of infonce, dcl, .*, nt_xent, got 'moco'"),
        ({"kl_weight": -1.0}, "kl_weight: expected at least 0"),
        ({"label_smoothing": 0.1, "reconstruction": "bce"}, "label_smoothing: expected 0 with recon"),
        ({"normalize": -0.1}, "normalize: expected from 0 to 1, got -0.1"),
        ({"kl_steps": 0}, "kl_steps: expected at least 1, got 0"),
        ({"temperature_is": "hot"}, "temperature_is: expected one of fixed, learned, got 'hot'"),
        ({"dim": 10, "heads": 4}, "dim: expected a multiple of heads=4, got 10"),
    ],
)
def test_bad_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ContrastVAE(items(), **options)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reconstruction", RECONSTRUCTIONS)
@pytest.mark.parametrize("contrast", ["infonce", "nt_xent"])
def test_every_parameter_learns(mode, reconstruction, contrast):
    net = model(
        augment=MODES[mode], reconstruction=reconstruction, contrast=contrast, temperature_is="learned", kl_steps=1
    ).train()
    data = histories(rows=60)
    for batch in net.batches(data, np.random.default_rng(0)):
        net.loss(batch).backward()
        net.after_update()
    assert [name for name, p in net.named_parameters() if p.grad is None or not p.grad.any()] == []
    assert (net.item.weight.grad[0] == 0).all()


@pytest.mark.parametrize("contrast", CONTRASTS)
def test_contrasts_are_the_textbooks(contrast):
    g = torch.Generator().manual_seed(0)
    one, two = torch.randn(2, 7, 5, generator=g, dtype=torch.float64)
    both = {} if contrast == "nt_xent" else {"symmetric": True}
    expected = getattr(reference, contrast)(one, two, temperature=0.3, **both)
    torch.testing.assert_close(CONTRASTS[contrast](one, two, 0.3), expected)


def test_a_run_folder_gives_the_model_back(tmp_path):
    for number, options in enumerate(({}, {"compat": "paper-code"}, {"augment": (), "alpha": "position"})):
        net = model(**options).eval()
        net.after_update()
        save(net, tmp_path / str(number))
        again = load(tmp_path / str(number))
        assert again.config == net.config
        assert again.step == 1
        assert torch.equal(again.scores(histories()), net.scores(histories()))


# Augmentations


@pytest.mark.parametrize("name", SEQUENCE)
@pytest.mark.parametrize("n", [1, 2, 7])
def test_augmentations_keep_to_the_sequence(name, n):
    rng = np.random.default_rng(0)
    for _ in range(50):
        look = SEQUENCE[name](n, rng)
        assert 1 <= len(look.order) == len(look.covered) <= n
        assert set(look.order) <= set(range(n))
        assert len(set(look.order)) == len(look.order)
        for follow in (own_next, original_next):
            assert (follow(look.order) >= 1 - (follow is own_next)).all()
            assert follow(look.order).max() <= n


def test_crop_keeps_order_and_contiguity():
    rng = np.random.default_rng(0)
    starts = set()
    for _ in range(200):
        look = crop(10, rng)
        assert look.order.tolist() == list(range(look.order[0], look.order[0] + 6))
        assert not look.covered.any()
        assert own_next(look.order).tolist() == (look.order + 1).tolist()
        starts.add(int(look.order[0]))
    assert starts == set(range(5))


def test_mask_covers_three_in_ten():
    rng = np.random.default_rng(0)
    looks = [mask(10, rng) for _ in range(2000)]
    assert all(look.order.tolist() == list(range(10)) for look in looks)
    assert abs(np.mean([look.covered.mean() for look in looks]) - 0.3) < 0.01


def test_reorder_permutes_one_window():
    rng = np.random.default_rng(0)
    moved = set()
    for _ in range(300):
        look = reorder(10, rng)
        assert sorted(look.order) == list(range(10))
        assert not look.covered.any()
        away = np.flatnonzero(look.order != np.arange(10))
        assert len(away) == 0 or away.max() - away.min() < 6
        moved |= set(away.tolist())
        assert own_next(look.order)[-1] == 10
    assert moved == set(range(10))


def test_views_never_choose_padding_and_cover_with_the_mask_token():
    net = model(augment=MODES["DA"], batch=64)
    masked = cropped = False
    for seed in range(5):
        one, two = one_batch(net, histories(longest=8), seed)
        assert (one.item >= 1).all()
        assert (one.item <= COUNT).all()
        assert (two.item >= 1).all()
        assert (two.item <= COUNT + 1).all()
        assert (two.target >= 1).all()
        assert (two.target <= COUNT).all()
        assert len(two.clicks.length) == len(one.clicks.length)
        masked |= bool((two.item == COUNT + 1).any())
        cropped |= len(two.item) < len(one.item)
    assert masked
    assert cropped
    (plain, same) = one_batch(model(augment=("dropout",), batch=64), histories())
    assert plain is same


@pytest.mark.parametrize(("compat", "shared"), [("none", ()), ("paper-code", ("MA", "VA"))])
@pytest.mark.parametrize("mode", ["MA", "VA", "DA"])
def test_views_share_the_dropout_of_the_embedding_in_the_authors_program_alone(mode, compat, shared):
    augment = ("reorder",) if mode == "DA" else MODES[mode]
    net = model(augment=augment, compat=compat, batch=64, dropout=0.5).train()
    entered, left = [], []
    net.to_mu[0].register_forward_pre_hook(lambda module, inputs: entered.append(inputs[0]))
    net.to_mu[0].register_forward_hook(lambda module, inputs, output: left.append(output))
    net.parts(one_batch(net, histories()))
    assert torch.equal(*entered) == (mode in shared)
    assert not torch.equal(*left)


# What it may see


@pytest.mark.parametrize("compat", ["none", "paper-code"])
def test_no_later_click_changes_an_earlier_state(compat):
    net = model(seed=2, heads=2, compat=compat).eval()
    states = []
    for row in ([1, 2, 3, 4, 5], [1, 2, 3, 30, 31]):
        (view, *_) = one_batch(net, Histories.from_lists([[*row, 6]]))
        masks = net.rules.masks(view.clicks, view.item)
        mu, log_variance = net.posterior(net.embed(view.item, view.clicks), view.clicks, masks)
        real = view.item != 0
        states.append(torch.cat([mu[real], log_variance[real], net.decode(mu[real], view.real)], 1))
    assert torch.equal(states[0][:3], states[1][:3])
    assert (states[0][3:] != states[1][3:]).any(1).all()


@pytest.mark.parametrize("compat", ["none", "paper-code"])
@pytest.mark.parametrize("mode", MODES)
def test_training_sees_train_clicks_only(mode, compat):
    """Items that occur in validation or test targets alone are never an input or a target."""
    train = Histories.from_lists([[1, 2, 3, 4], [5, 6, 7], [2, 5]])
    net = model(augment=MODES[mode], compat=compat, batch=2)
    for seed in range(5):
        for batch in net.batches(train, np.random.default_rng(seed)):
            for view in batch:
                assert set(view.target.tolist()) <= {0, *range(2, 8)}
                assert set(view.item.tolist()) <= {0, *range(1, 8), COUNT + 1}


@pytest.mark.parametrize("compat", ["none", "paper-code"])
def test_packed_rows_equal_single_ones(compat):
    net = model(seed=3, heads=2, blocks=2, compat=compat).eval()
    data = histories(longest=12)
    alone = torch.cat([net.encode(data.take(np.array([r]))) for r in range(len(data))])
    torch.testing.assert_close(net.encode(data), alone, atol=1e-5, rtol=0)
    torch.testing.assert_close(net.encode(data), net.encode(data.last(7)), atol=0, rtol=0)


@pytest.mark.parametrize("compat", ["none", "paper-code"])
def test_packed_equals_padded(compat):
    """The same rows as one padded block with a padding mask, as the authors lay them out (padding behind the clicks,
    though): states agree.
    """
    net = model(seed=3, heads=2, blocks=2, compat=compat).eval()
    data = histories(longest=7)
    item, clicks = net._newest(data)
    mu, log_variance = net.posterior(net.embed(item, clicks), clicks)
    width = clicks.width
    block = torch.zeros(len(data), width, dtype=torch.int64)
    for row in range(len(data)):
        block[row, : clicks.length[row]] = item[clicks.row == row]
    causal_mask = torch.ones(width, width).triu(1).bool()
    for row in range(len(data)):
        allowed = (causal_mask | (block[row] == 0)) * -10000.0
        real = block[row] != 0
        x = torch.zeros(width, net.config.dim).index_copy(0, real.nonzero()[:, 0], embedded(net, block[row][real]))
        wide = through(net.to_mu, x, allowed), through(net.to_log_variance, x, allowed)
        here = clicks.row == row
        torch.testing.assert_close(mu[here], wide[0][real], atol=1e-5, rtol=0)
        torch.testing.assert_close(log_variance[here], wide[1][real], atol=1e-5, rtol=0)
        decoded = through(net.decoder, wide[0], allowed)[real]
        torch.testing.assert_close(net.decode(mu, clicks)[here], decoded, atol=1e-5, rtol=0)


def test_paper_code_serves_the_states_it_trains():
    """Padding is laid out in training alone, where no click sees it."""
    net = model(seed=3, heads=2, blocks=2, compat="paper-code", augment=(), batch=64).eval()
    (view,) = one_batch(net, histories(longest=12))
    rows = view.item[view.item != 0].split(view.real.length.tolist())
    inputs = Histories.from_lists([row.tolist() for row in rows])
    masks = net.rules.masks(view.clicks, view.item)
    trained = net.posterior(net.embed(view.item, view.clicks), view.clicks, masks)
    item, clicks = net._newest(inputs)
    for padded, served in zip(trained, net.posterior(net.embed(item, clicks), clicks), strict=True):
        torch.testing.assert_close(padded[view.item != 0], served, atol=1e-5, rtol=0)


def test_diagnostics_are_means_over_real_positions():
    data = histories(rows=300)
    for compat in ("none", "paper-code"):
        net = model(seed=3, compat=compat).eval()
        values = []
        for row in range(len(data)):
            item, clicks = net._newest(data.take(np.array([row])))
            mu, log_variance = net.posterior(net.embed(item, clicks), clicks)
            values.append(torch.stack([kl_by_hand(mu, log_variance), log_variance.exp().mean(1)], 1))
        kl, variance = torch.cat(values).mean(0).tolist()
        found = net.diagnostics(data)
        assert math.isclose(found["kl"], kl, rel_tol=1e-4)
        assert math.isclose(found["variance"], variance, rel_tol=1e-4)


# Training


def memory(users: int = 50, length: int = 4) -> Split:
    rng = np.random.default_rng(7)
    lists = [(rng.permutation(COUNT * 3)[:length] + 1).tolist() for _ in range(users)]
    train = Histories.from_lists(lists)
    pairs = [(u, n) for u in range(users) for n in range(2, length)]
    history = Histories.from_lists([lists[u][:n] for u, n in pairs])
    cases = Cases(np.array([u for u, _ in pairs]), history, np.array([lists[u][n] for u, n in pairs]))
    table = Items(tuple(f"i{n + 1}" for n in range(COUNT * 3)))
    names = tuple(f"u{u}" for u in range(users))
    return Split(table, names, train, cases, cases, np.bincount(train.item, minlength=COUNT * 3 + 1))


@pytest.mark.parametrize("mode", ["AVAE", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("VA", "DA"))])
def test_fifty_users_are_memorised(mode):
    split = memory()
    options = {"dim": 32, "batch": 16, "dropout": 0.1, "kl_weight": 0.001, "augment": MODES[mode], "lr": 5e-3}
    options["positions"] = "oldest"  # so that a click trained in mid-history is served at the end of a prefix
    net = ContrastVAE(split.items, seed=0, **options)
    fit(net, split, epochs=40, progress=False)
    assert evaluate(net, split.test, counts=split.counts)["recall@10"] > 0.95


def test_seeds_repeat_bit_for_bit():
    split = memory()
    options = {"dim": 16, "batch": 16, "augment": MODES["VA+DA"]}
    nets = [ContrastVAE(split.items, seed=seed, **options) for seed in (0, 0, 1)]
    for net, seed in zip(nets, (0, 0, 1), strict=True):
        fit(net, split, epochs=2, seed=seed, progress=False)
    one, same, other = (net.state_dict() for net in nets)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["item.weight"], other["item.weight"])


def test_a_plan_reaches_the_optimiser(tmp_path):
    split = memory()
    plans = (Plan(2, 2), Plan(2, 2, schedule="constant"), Plan(2, 2, betas=(0.9, 0.999)))
    ends = []
    for nth, plan in enumerate(plans):
        net = ContrastVAE(split.items, seed=0, dim=16, batch=16)
        train(net, plan, 0, split, tmp_path / str(nth), lambda log: None)
        ends.append(net.item.weight.detach())
    falling, constant, slower = ends
    assert not torch.equal(falling, constant)
    assert not torch.equal(falling, slower)


@pytest.mark.parametrize("schedule", ["falling", "constant"])
def test_a_study_goes_on_where_it_stopped(schedule, tmp_path):
    split = memory()
    options = {"dim": 16, "batch": 16, "augment": ("variational",)}
    plan = Plan(epochs=4, patience=4, schedule=schedule)

    def trained(epochs: int, path: Path) -> tuple[ContrastVAE, dict]:
        def stop(log: dict) -> None:
            if log["epochs"] == epochs < plan.epochs:
                raise KeyboardInterrupt

        net = ContrastVAE(split.items, seed=0, **options)
        with contextlib.suppress(KeyboardInterrupt):
            return net, train(net, plan, 0, split, path, stop)
        return net, {}

    whole, log = trained(4, tmp_path / "whole")
    trained(1, tmp_path / "part")
    trained(3, tmp_path / "part")
    parts, again = trained(4, tmp_path / "part")
    for key in ("epochs", "best_epoch", "valid", "curve"):
        assert log[key] == again[key]
    assert all(torch.equal(parts.state_dict()[name], tensor) for name, tensor in whole.state_dict().items())
