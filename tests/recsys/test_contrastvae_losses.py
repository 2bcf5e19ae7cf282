"""The losses of ContrastVAE against hand-written ones: KL, noise and alpha, and the whole of it, clean and as the
authors' program has it.
"""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from contrastvae_twin import COUNT, MODES, binary_loss, embedded, histories, kl_by_hand, model, one_batch, through
from torch.distributions import Normal, kl_divergence

from benchmarks.paper_ranking import RANKINGS, logits
from fastcl.recsys import Cases, Histories
from fastcl.recsys.models.contrastvae.model import divergence, variational_dropout_kl
from fastcl.recsys.models.contrastvae.rules import (
    CLEAN,
    PAPER_CODE,
    above,
    dropped,
    left_padded,
    newest_window,
    sampled,
    sampled_else_above,
)
from fastcl.recsys.models.layers import POSITIONS
from fastcl.recsys.models.losses import ITEM_LOSSES, scored

pytestmark = pytest.mark.usefixtures("one_thread")


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
    found = RANKINGS["paper-code"].evaluate(net, cases, np.ones(COUNT + 1, np.int64), (5, 20))
    every, ranks = logits(net, data), []
    for row, seen in enumerate([[1, 2], [3], [4, 5, 6]]):
        scores = every[row].clone()
        scores[seen] = 0.0
        order = scores.argsort(descending=True).tolist()
        ranks.append(order.index(int(cases.target[row])) + 1)
    assert math.isclose(found["recall@20"], np.mean([r <= 20 for r in ranks]))
    assert math.isclose(found["ndcg@20"], np.mean([(r <= 20) / math.log2(r + 1) for r in ranks]), rel_tol=1e-6)
    assert RANKINGS["paper-code"].better({"recall@10": 0.2, "ndcg@10": 0.0}, {"recall@10": 0.1, "ndcg@10": 0.5})
    assert not RANKINGS["paper-code"].better({"recall@10": 0.1, "ndcg@10": 0.5}, {"recall@10": 0.1, "ndcg@10": 0.5})
    assert RANKINGS["none"].better({"ndcg@20": 0.2}, {"ndcg@20": 0.1})


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
    every, items = torch.arange(1, COUNT + 1), scored(table, bias)
    full = ITEM_LOSSES["softmax"].loss(hidden, items, target, every)
    torch.testing.assert_close(full, F.cross_entropy(hidden @ table[1:].T + bias, target - 1))
    smooth = ITEM_LOSSES["softmax"].loss(hidden, scored(table, bias, smoothing=0.3), target, every)
    wanted = F.cross_entropy(hidden @ table[1:].T + bias, target - 1, label_smoothing=0.3)
    torch.testing.assert_close(smooth, wanted)
    torch.testing.assert_close(ITEM_LOSSES["sampled"].loss(hidden, items, target, every), full)
    some = ITEM_LOSSES["sampled"].loss(hidden, items, target, every.repeat(3)[:90])
    torch.testing.assert_close(some, full, atol=0.2, rtol=0.1)
