"""ContrastVAE: its losses against hand-written ones (clean and the authors' program), augmentations, what it may see,
what it learns, and that a study goes on where it stopped.
"""

import contextlib
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.distributions import Normal, kl_divergence

from benchmarks.study import Plan, train
from fastcl.recsys import Cases, ContrastVAE, ContrastVAEConfig, Histories, Items, Split, evaluate, fit, load, save
from fastcl.recsys.layers import POSITIONS
from fastcl.recsys.models.contrastvae import View, divergence, variational_dropout_kl
from fastcl.recsys.models.contrastvae_rules import (
    CLEAN,
    PAPER_CODE,
    above,
    by_either,
    by_ndcg,
    dropped,
    left_padded,
    newest_window,
    original_next,
    own_next,
    sampled,
    sampled_else_above,
)
from fastcl.recsys.models.contrastvae_views import CONTRASTS, RECONSTRUCTIONS, SEQUENCE, crop, mask, reorder

pytestmark = pytest.mark.usefixtures("one_thread")

COUNT = 40
SMALL = {"dim": 16, "max_len": 7, "positions": "oldest"}
MODES = {
    "AVAE": (),
    "MA": ("dropout",),
    "VA": ("variational",),
    "DA": ("crop", "mask", "reorder"),
    "VA+DA": ("variational", "crop", "mask", "reorder"),
}


def items() -> Items:
    return Items(tuple(f"i{n}" for n in range(1, COUNT + 1)))


def histories(rows: int = 30, seed: int = 0, longest: int = 15) -> Histories:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest + 1, rows)
    return Histories.from_lists([rng.integers(1, COUNT + 1, n).tolist() for n in lengths])


def model(seed: int = 1, **options) -> ContrastVAE:
    return ContrastVAE(items(), seed=seed, **{**SMALL, **options})


def one_batch(net: ContrastVAE, data: Histories, seed: int = 0) -> tuple[View, ...]:
    (batch,) = net.batches(data, np.random.default_rng(seed))
    return batch


# Shapes and settings


@pytest.mark.parametrize("compat", ["none", "paper-code"])
@pytest.mark.parametrize("mode", MODES)
def test_shapes(mode, compat):
    net = model(augment=MODES[mode], compat=compat, heads=2).eval()
    data = histories()
    assert net.encode(data).shape == (30, 16)
    assert net.logits(data).shape == (30, COUNT + 2)
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
        ({"reconstruction": "mse"}, "reconstruction: expected one of bce, sampled, softmax, got 'mse'"),
        ({"contrast": "moco"}, "contrast: expected one of infonce, dcl, mine_plus, nt_xent, got 'moco'"),
        ({"kl_weight": -1.0}, "kl_weight: expected at least 0"),
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
@pytest.mark.parametrize("contrast", CONTRASTS)
def test_every_parameter_learns(mode, reconstruction, contrast):
    net = model(
        augment=MODES[mode], reconstruction=reconstruction, contrast=contrast, temperature_is="learned", kl_steps=1
    ).train()
    data = histories(rows=60)
    for batch in net.batches(data, np.random.default_rng(0)):
        net.loss(batch).backward()
        net.after_step(batch)
    assert [name for name, p in net.named_parameters() if p.grad is None or not p.grad.any()] == []
    assert (net.item.weight.grad[0] == 0).all()


def test_a_run_folder_gives_the_model_back(tmp_path):
    for number, options in enumerate(({}, {"compat": "paper-code"}, {"augment": (), "alpha": "position"})):
        net = model(**options).eval()
        net.after_step(())
        save(net, tmp_path / str(number))
        again = load(tmp_path / str(number))
        assert again.config == net.config
        assert again.step == 1
        assert torch.equal(again.scores(histories()), net.scores(histories()))


# KL, noise and alpha


def test_kl_is_that_of_torch_and_of_monte_carlo():
    torch.manual_seed(0)
    mu, log_variance = torch.randn(5, 8), torch.randn(5, 8)
    posterior, prior = Normal(mu, (0.5 * log_variance).exp()), Normal(0.0, 1.0)
    found = divergence(mu, log_variance)
    torch.testing.assert_close(found, kl_divergence(posterior, prior).sum(-1))
    z = posterior.sample((100_000,))
    estimate = (posterior.log_prob(z) - prior.log_prob(z)).sum(-1)
    error = estimate.std(0) / math.sqrt(len(z))
    assert ((found - estimate.mean(0)).abs() < 5 * error).all()
    assert (divergence(torch.zeros(2, 8), torch.zeros(2, 8)) == 0).all()


def test_samplers():
    torch.manual_seed(0)
    mu, sigma = torch.full((200_000, 1), 3.0), torch.full((200_000, 1), 2.0)
    z = sampled(mu, sigma, 0.5, 0.0, True)
    assert abs(z.mean() - 3) < 0.01
    assert abs(z.std() - 1) < 0.01
    assert torch.equal(sampled(mu, sigma, 0.5, 0.0, False), mu)
    assert abs(sampled_else_above(mu, sigma, 0.5, 0.0, True).std() - 2) < 0.02  # alpha is no part of it
    assert torch.equal(sampled_else_above(mu, sigma, 0.5, 0.0, False), mu + sigma)
    assert torch.equal(above(mu, sigma, 0.5, 0.9, True), mu + sigma)
    kept = (dropped(mu, sigma, 1.0, 0.2, True) - 3) / 2
    assert set(kept.unique().tolist()) == {0.0, 1.25}
    assert abs((kept == 0).float().mean() - 0.2) < 0.01
    assert torch.equal(dropped(mu, sigma, 1.0, 0.2, False), mu + sigma)
    assert PAPER_CODE.varied(mu, sigma, 0.5, 0.0, False).std() > 0.9  # the noise stays on
    modes = [(CLEAN.alone, CLEAN.first, CLEAN.second, CLEAN.varied), (PAPER_CODE.alone, PAPER_CODE.first)]
    assert modes == [(sampled,) * 4, (sampled_else_above, above)]


@pytest.mark.parametrize(("alpha", "shape"), [("scalar", ()), ("dimension", (16,)), ("position", (7, 1))])
def test_alpha_scales_the_second_views_noise_and_learns(alpha, shape):
    net = model(augment=("variational",), alpha=alpha, dropout=0.0).train()
    assert net.alpha_logit.shape == shape
    assert (net.alpha_logit.sigmoid() == 0.5).all()
    batch = one_batch(net, histories(rows=20, longest=8))
    clicks = batch[0].clicks
    with torch.no_grad():
        net.alpha_logit.copy_(torch.linspace(-2, 2, net.alpha_logit.numel()).reshape(shape))
    found = torch.broadcast_to(torch.as_tensor(net._alpha(clicks)), (len(batch[0].item), 16))
    for at, position in enumerate(clicks.position.tolist()):
        expected = net.alpha_logit[position] if alpha == "position" else net.alpha_logit
        assert torch.equal(found[at], torch.broadcast_to(expected.sigmoid(), (16,)))

    def loss(seed):
        torch.manual_seed(seed)
        parts = net.parts(batch)
        return parts["reconstruction"] + parts["contrast"]

    loss(3).backward()
    analytic = net.alpha_logit.grad.sum()
    with torch.no_grad():
        net.alpha_logit += 1e-2
        up = loss(3)
        net.alpha_logit -= 2e-2
        down = loss(3)
    assert analytic != 0
    torch.testing.assert_close(analytic, (up - down) / 2e-2, rtol=0.1, atol=1e-4)


def test_alpha_costs_the_variational_dropout_kl():
    """The fit of Kingma et al. 2015, Eq. 14, against the integral it fits: -KL = 0.5 log a + c - E log|1 + sqrt(a) e|,
    up to the constant, for a up to 1.
    """
    eps = torch.randn(2_000_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def integral(a: float) -> float:
        return -(0.5 * math.log(a) - float((1 + math.sqrt(a) * eps).abs().log().mean()))

    values = [0.1, 0.3, 0.5, 0.8, 0.95]
    fit_minus_integral = [float(variational_dropout_kl(torch.tensor(a))) - integral(a) for a in values]
    assert max(fit_minus_integral) - min(fit_minus_integral) < 0.02


# The whole loss by hand


def plain_block(block, x, allowed):  # x [L, D] of one row, allowed [L, L] additive
    heads = block.heads
    q, k, v = (t.reshape(len(x), heads, -1).transpose(0, 1) for t in block.qkv(x).chunk(3, -1))
    weight = ((q @ k.transpose(1, 2)) / math.sqrt(q.shape[-1]) + allowed).softmax(-1)
    x = block.norm_attention(x + block.out((weight @ v).transpose(0, 1).reshape(len(x), -1)))
    inner, _, outer = block.feed
    hidden = inner(x)
    return block.norm_feed(x + outer(hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))))


def through(blocks, x, allowed):
    for block in blocks:
        x = plain_block(block, x, allowed)
    return x


def embedded(net, sequence):
    return net.norm(net.item.weight[sequence] + net.position.weight[: len(sequence)])


def log_sigmoid(x):
    return torch.log(1 / (1 + torch.exp(-x)))


def binary_loss(net, hidden, target, negative):
    up, down = (hidden * net.item.weight[target]).sum(-1), (hidden * net.item.weight[negative]).sum(-1)
    return -log_sigmoid(up) - torch.log(1 - 1 / (1 + torch.exp(-down)))


def kl_by_hand(mu, log_variance):
    return -0.5 * (1 + log_variance - mu**2 - torch.exp(log_variance)).sum(-1)


DATA = [[1, 2, 3, 4, 5], [6, 7, 8], [9, 10], [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]]


@pytest.mark.parametrize("mode", ["AVAE", "VA"])
def test_clean_loss_by_hand(mode):
    """Sampled z in both views (noise taken from the generator in the order of the views), means over real positions,
    symmetric InfoNCE of the mean z. Dropout is 0, long histories make two windows.
    """
    net = model(
        augment=MODES[mode],
        dropout=0.0,
        heads=2,
        blocks=2,
        batch=64,
        contrast_weight=0.7,
        temperature=0.3,
        kl_weight=0.2,
        kl_steps=10,
        debias=0.4,
        max_len=5,
    ).train()
    net.step.fill_(1)
    data = Histories.from_lists(DATA)
    batch = one_batch(net, data)
    torch.manual_seed(11)
    found = net.parts(batch)

    counts = np.bincount(data.item, minlength=COUNT + 1)[1:] + 1.0
    bias = torch.tensor(0.4 * np.log(counts / counts.sum()), dtype=torch.float32)
    first = batch[0]
    rows = [first.item[first.clicks.row == r] for r in range(len(first.clicks.length))]
    targets = [first.target[first.clicks.row == r] for r in range(len(rows))]
    windows = [DATA[0], DATA[1], DATA[2], DATA[3][4:], DATA[3][:5]]
    found_windows = [[*row.tolist(), int(target[-1])] for row, target in zip(rows, targets, strict=True)]
    assert sorted(found_windows) == sorted(windows)
    torch.manual_seed(11)
    reconstruction = kl = 0.0
    pooled = []
    for alpha in (1.0, 0.5)[: len(batch)]:
        noise = torch.randn(len(first.item), 16).split([len(row) for row in rows])
        losses, divergences, vectors = [], [], []
        for row, target, eps in zip(rows, targets, noise, strict=True):
            allowed = torch.full((len(row), len(row)), -torch.inf).triu(1)
            x = embedded(net, row)
            mu, log_variance = through(net.to_mu, x, allowed), through(net.to_log_variance, x, allowed)
            z = mu + alpha * torch.exp(log_variance / 2) * eps
            logits = through(net.decoder, z, allowed) @ net.item.weight[1:-1].T + bias
            losses.append(-logits.log_softmax(-1)[torch.arange(len(row)), target - 1])
            divergences.append(kl_by_hand(mu, log_variance))
            vectors.append(z.mean(0))
        reconstruction += torch.cat(losses).mean()
        kl += torch.cat(divergences).mean()
        pooled.append(F.normalize(torch.stack(vectors), dim=-1))
    torch.testing.assert_close(found["reconstruction"], reconstruction, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found["kl"], 0.1 * kl, atol=1e-5, rtol=1e-5)  # step 1 of 10, below the cap of 0.2
    expected = found["reconstruction"] + found["kl"]
    if mode == "VA":
        logits = pooled[0] @ pooled[1].T / 0.3
        here = torch.arange(len(rows))
        contrast = 0.5 * (F.cross_entropy(logits, here) + F.cross_entropy(logits.T, here))
        torch.testing.assert_close(found["contrast"], 0.7 * contrast, atol=1e-5, rtol=1e-5)
        a = 0.5
        alpha_cost = -(0.5 * math.log(a) + 1.16145124 * a - 1.50204118 * a**2 + 0.58629921 * a**3)
        assert math.isclose(found["alpha"].item(), alpha_cost, rel_tol=1e-5)
        expected = expected + found["contrast"] + found["alpha"]
    torch.manual_seed(11)
    torch.testing.assert_close(net.loss(batch), expected)


@pytest.mark.parametrize("mode", ["AVAE", "MA", "VA", "DA"])
def test_paper_code_loss_by_hand(mode):
    """As protocols describe the authors' program: left padding that is encoded, counted in KL and summed into the
    sequence vector; no noise in view 1; NT-Xent; the newest window only. Dropout is 0.
    """
    net = model(
        compat="paper-code",
        augment=("reorder",) if mode == "DA" else MODES[mode],
        dropout=0.0,
        sigma_dropout=0.0,
        heads=2,
        batch=64,
        max_len=6,
        contrast_weight=0.3,
        kl_weight=0.2,
        kl_steps=100,
    ).train()
    net.step.fill_(50)
    batch = one_batch(net, Histories.from_lists(DATA))
    torch.manual_seed(11)
    found = net.parts(batch)
    length = 6
    padded = [[0, 0, 1, 2, 3, 4], [0, 0, 0, 0, 6, 7], [0, 0, 0, 0, 0, 9], [14, 15, 16, 17, 18, 19]]
    answers = [[0, 0, 2, 3, 4, 5], [0, 0, 0, 0, 7, 8], [0, 0, 0, 0, 0, 10], [15, 16, 17, 18, 19, 20]]
    torch.manual_seed(11)
    reconstruction = kl = 0.0
    vectors = []
    for nth, view in enumerate(batch):
        blocks = view.item.unflatten(0, (-1, length)).tolist()
        if nth == 0 or mode != "DA":
            assert sorted(blocks) == sorted(padded)
        else:
            assert sorted(map(sorted, blocks)) == sorted(map(sorted, padded))
        target = view.target.unflatten(0, (-1, length))
        assert sorted(target.tolist()) == sorted(answers)
        noisy = mode == "AVAE" or (mode == "VA" and nth == 1)
        noise = torch.randn(len(blocks) * length, 16).unflatten(0, (-1, length)) if noisy else None
        loss, count, divergences, pooled = 0.0, 0, [], []
        negatives = iter(view.negative)
        for row, sequence in enumerate(blocks):
            sequence = torch.tensor(sequence)
            hidden_keys = (sequence == 0)[None, :] | torch.ones(length, length).triu(1).bool()
            allowed = hidden_keys * -10000.0
            x = embedded(net, sequence)
            mu, log_variance = through(net.to_mu, x, allowed), through(net.to_log_variance, x, allowed)
            sigma = torch.exp(0.5 * log_variance)
            scale = {"AVAE": 1.0, "VA": 0.5}.get(mode)
            z = mu + sigma if noise is None else mu + scale * sigma * noise[row]
            hidden = through(net.decoder, z, allowed)
            for t in range(length):
                if target[row, t]:
                    loss = loss + binary_loss(net, hidden[t], target[row, t], next(negatives))
                    count += 1
            divergences.append(kl_by_hand(mu, log_variance))
            pooled.append(z.sum(0))
        reconstruction += loss / count
        kl += torch.cat(divergences).mean()  # over padding too
        vectors.append(torch.stack(pooled))
    torch.testing.assert_close(found["reconstruction"], reconstruction, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found["kl"], 0.2 * kl, atol=1e-5, rtol=1e-5)  # 50 / 100 is above the cap
    assert ("contrast" in found) == (mode != "AVAE")
    assert ("alpha" in found) == (mode == "VA")
    if mode != "AVAE":
        both = F.normalize(torch.cat(vectors), dim=-1)
        logits = (both @ both.T / 0.5).fill_diagonal_(-torch.inf)
        contrast = F.cross_entropy(logits, torch.arange(8).roll(4))
        torch.testing.assert_close(found["contrast"], 0.3 * contrast, atol=1e-5, rtol=1e-5)


def test_paper_code_ranks_seen_items_at_zero_and_the_two_extra_rows():
    net = model(compat="paper-code", augment=()).eval()
    data = Histories.from_lists([[1, 2], [3], [4, 5, 6]])
    cases = Cases(np.arange(3), data, np.array([7, 8, 9]))
    found = net.rules.evaluate(net, cases, np.ones(COUNT + 1, np.int64), (5, 20))
    logits, ranks = net.logits(data), []
    for row, seen in enumerate([[1, 2], [3], [4, 5, 6]]):
        scores = logits[row].clone()
        scores[seen] = 0.0
        order = scores.argsort(descending=True).tolist()
        ranks.append(order.index(int(cases.target[row])) + 1)
    assert math.isclose(found["recall@20"], np.mean([r <= 20 for r in ranks]))
    assert math.isclose(found["ndcg@20"], np.mean([(r <= 20) / math.log2(r + 1) for r in ranks]), rel_tol=1e-6)
    assert by_either({"recall@10": 0.2, "ndcg@10": 0.0}, {"recall@10": 0.1, "ndcg@10": 0.5})
    assert not by_either({"recall@10": 0.1, "ndcg@10": 0.5}, {"recall@10": 0.1, "ndcg@10": 0.5})
    assert by_ndcg({"ndcg@20": 0.2}, {"ndcg@20": 0.1})


def test_positions_may_count_from_the_newest_click():
    one, two = (model(positions=positions).eval() for positions in POSITIONS)
    data = histories()
    assert not torch.equal(one.encode(data), two.encode(data))
    assert torch.equal(two.encode(data), two.encode(data.last(7)))


def test_left_padding_and_newest_windows():
    clicks = left_padded(np.array([2, 3]), 3, torch.device("cpu"))
    assert clicks.source.tolist() == [-1, 0, 1, 2, 3, 4]
    assert clicks.position.tolist() == [0, 1, 2] * 2
    assert clicks.last.tolist() == [2, 5]
    spans = newest_window(Histories.from_lists([[1], [1, 2, 3, 4, 5], [6, 7]]), 2)
    assert [spans.start.tolist(), spans.stop.tolist(), spans.row.tolist()] == [[3, 6], [6, 8], [1, 2]]


def test_sampled_reconstruction_estimates_the_full_softmax():
    torch.manual_seed(0)
    hidden, table = torch.randn(6, 8), torch.randn(COUNT + 1, 8)
    target, bias = torch.randint(1, COUNT + 1, (6,)), torch.randn(COUNT)
    every = torch.arange(1, COUNT + 1)
    full = RECONSTRUCTIONS["softmax"].loss(hidden, table, target, every, bias)
    torch.testing.assert_close(full, F.cross_entropy(hidden @ table[1:].T + bias, target - 1))
    torch.testing.assert_close(RECONSTRUCTIONS["sampled"].loss(hidden, table, target, every, bias), full)
    some = RECONSTRUCTIONS["sampled"].loss(hidden, table, target, every.repeat(3)[:90], bias)
    torch.testing.assert_close(some, full, atol=0.2, rtol=0.1)


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
    kinds = set()
    for seed in range(5):
        one, two = one_batch(net, histories(longest=8), seed)
        assert (one.item >= 1).all()
        assert (one.item <= COUNT).all()
        assert (two.item >= 1).all()
        assert (two.item <= COUNT + 1).all()
        assert (two.target >= 1).all()
        assert (two.target <= COUNT).all()
        assert len(two.clicks.length) == len(one.clicks.length)
        kinds |= {bool((two.item == COUNT + 1).any()), len(two.item) < len(one.item)}
    assert True in kinds
    (plain, same) = one_batch(model(augment=("dropout",), batch=64), histories())
    assert plain is same


# What it may see


@pytest.mark.parametrize("compat", ["none", "paper-code"])
def test_no_later_click_changes_an_earlier_state(compat):
    net = model(seed=2, heads=2, compat=compat).eval()
    states = []
    for row in ([1, 2, 3, 4, 5], [1, 2, 3, 30, 31]):
        item, clicks, allowed = net._newest(Histories.from_lists([row]))
        mu, log_variance = net.posterior(item, clicks, allowed)
        states.append(torch.cat([mu, log_variance, net.decode(mu, clicks, allowed)], 1)[-5:])
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


def test_packed_equals_padded():
    """The same rows as one padded block with a padding mask, as the authors lay them out (but positions from the
    oldest click): states, KL and pooled z agree.
    """
    net = model(seed=3, heads=2, blocks=2).eval()
    data = histories(longest=7)
    item, clicks, _ = net._newest(data)
    mu, log_variance = net.posterior(item, clicks, None)
    width = clicks.width
    block = torch.zeros(len(data), width, dtype=torch.int64)
    for row in range(len(data)):
        block[row, : clicks.length[row]] = item[clicks.row == row]
    causal_mask = torch.ones(width, width).triu(1).bool()
    for row in range(len(data)):
        allowed = (causal_mask | (block[row] == 0)) * -10000.0
        x = embedded(net, block[row])
        real = block[row] != 0
        wide = through(net.to_mu, x, allowed), through(net.to_log_variance, x, allowed)
        here = clicks.row == row
        torch.testing.assert_close(mu[here], wide[0][real], atol=1e-5, rtol=0)
        torch.testing.assert_close(log_variance[here], wide[1][real], atol=1e-5, rtol=0)
        decoded = through(net.decoder, wide[0], allowed)[real]
        torch.testing.assert_close(net.decode(mu, clicks, None)[here], decoded, atol=1e-5, rtol=0)


def test_diagnostics_are_means_over_real_positions():
    data = histories(rows=300)
    for compat in ("none", "paper-code"):
        net = model(seed=3, compat=compat).eval()
        values = []
        for row in range(len(data)):
            item, clicks, allowed = net._newest(data.take(np.array([row])))
            mu, log_variance = net.posterior(item, clicks, allowed)
            real = item != 0
            values.append(torch.stack([kl_by_hand(mu, log_variance), log_variance.exp().mean(1)], 1)[real])
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


@pytest.mark.parametrize("mode", ["AVAE", "VA", "DA"])
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
