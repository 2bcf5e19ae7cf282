"""The losses of the sequence models in fastcl.recsys.baselines against plain loops over the models' own weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_baselines import small, split
from torch import Tensor

from fastcl.recsys import Histories
from fastcl.recsys.baselines.cl4srec import OPERATORS
from fastcl.recsys.baselines.s3rec import WEIGHTS, Pretraining
from fastcl.recsys.models.base import Model
from fastcl.recsys.models.batching import Packed, newest, pack

pytestmark = pytest.mark.usefixtures("one_thread")


def first_batch(model: Model) -> Any:
    return next(iter(model.batches(split().train, np.random.default_rng(0))))


def rows(clicks: Any, x: Tensor) -> list[Tensor]:
    return [x[clicks.row == row] for row in range(len(clicks.length))]


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected.double(), atol=1e-5, rtol=1e-4)


def gru(cell: Any, x: Tensor) -> Tensor:
    """The states [L, H] of torch's GRU, by its formulas."""
    w, u, b, c = cell.weight_ih_l0, cell.weight_hh_l0, cell.bias_ih_l0, cell.bias_hh_l0
    h, states = torch.zeros(u.shape[1]), []
    for step in x:
        (r1, z1, n1), (r2, z2, n2) = (w @ step + b).chunk(3), (u @ h + c).chunk(3)
        r, z = torch.sigmoid(r1 + r2), torch.sigmoid(z1 + z2)
        h = (1 - z) * torch.tanh(n1 + r * n2) + z * h
        states.append(h)
    return torch.stack(states)


def test_gru4rec_is_cross_entropy_of_the_states() -> None:
    model: Any = small("gru4rec", split(), loss="softmax").eval()
    with torch.no_grad():
        model.bias.normal_(generator=torch.Generator().manual_seed(0))
    batch = first_batch(model)
    states = torch.cat([gru(model.gru, model.item.weight[row]) for row in rows(batch.clicks, batch.item)])
    logits = states @ model.item.weight[1:].T + model.bias[1:]
    close(model.loss(batch), F.cross_entropy(logits, batch.target - 1))
    last = model.scores(Histories.from_lists([[3, 9, 4]]))[0, 1:]
    close(last, model.item.weight[1:] @ gru(model.gru, model.item.weight[[3, 9, 4]])[-1] + model.bias[1:])


def test_caser_is_two_kinds_of_convolutions_beside_a_user() -> None:
    data = split(length=9)
    model: Any = small("caser", data, max_len=3).eval()
    (batch, *_) = model.batches(data.train, np.random.default_rng(0))
    up, down = [], []
    for at, window in enumerate(batch.window.tolist()):
        image = model.item.weight[batch.item[window]][None, None]  # [1, 1, L, dim]
        found = [F.conv2d(image, model.vertical.weight[:, None, :, None], model.vertical.bias)[0, :, 0].mT.flatten()]
        for height, filters in enumerate(model.horizontal, start=1):
            # A filter's weights lie as [dim, height] in the model's rows.
            kernel = filters.weight.unflatten(1, (16, height)).mT[:, None]
            found.append(F.conv2d(image, kernel, filters.bias).relu().amax((2, 3))[0])
        z = model.dense(torch.cat(found)).relu()
        x = torch.cat([z, model.user.weight[batch.user[window]]])
        up.append(x @ model.out.weight[batch.target[at]] + model.bias[batch.target[at]])
        down.append(x @ model.out.weight[batch.negative[at]] + model.bias[batch.negative[at]])
    close(model.loss(batch), -(torch.stack(up).sigmoid().log() + (1 - torch.stack(down).sigmoid()).log()).mean())
    assert torch.bincount(batch.window).tolist() == [3] * len(batch.user)
    stranger = Histories.from_lists([[3, 9, 4]])
    known = model.encode(stranger.named(None, np.array(["u4"])))[0, 16:-1]
    close(known, model.user.weight[4])
    close(model.encode(stranger)[0, 16:-1], model.user.weight.mean(0))


def distance(mean: Tensor, cov: Tensor, other: Tensor, other_cov: Tensor) -> Tensor:
    return ((mean - other) ** 2).sum(-1) + ((cov.sqrt() - other_cov.sqrt()) ** 2).sum(-1)


def stosa_states(model: Any, item: Tensor) -> tuple[Tensor, Tensor]:
    """Means and covariances after each click of one history, pair by pair."""
    length, block = len(item), model.blocks[0]
    age = torch.arange(length - 1, -1, -1)
    m = F.elu(model.norm(model.item.weight[item] + model.position.weight[age]))
    c = F.elu(model.norm(model.item_covariance.weight[item] + model.position_covariance.weight[age])) + 1
    mq, mk = block.means(m).chunk(2, -1)
    cq, ck = (F.elu(block.covariances(c)) + 1).chunk(2, -1)
    value, of_mean = F.elu(block.covariance.value(c)) + 1, block.mean.value(m) if block.mean else m
    heads = [slice(0, 8), slice(8, 16)]
    means, covariances = torch.zeros(length, 16), torch.zeros(length, 16)
    for at in range(length):
        for head in heads:
            d = torch.stack([distance(mq[at, head], cq[at, head], mk[j, head], ck[j, head]) for j in range(at + 1)])
            a = (-d / 8**0.5).softmax(0)
            means[at, head] = a @ of_mean[: at + 1, head]
            covariances[at, head] = a**2 @ value[: at + 1, head]
    results = []
    for stream, x, context in ((block.mean, m, means), (block.covariance, c, covariances)):
        if stream is None:
            results.append(x)
            continue
        x = block.norm(x + stream.out(context))
        results.append(stream.norm(x + stream.feed[2](F.elu(stream.feed[0](x)))))
    return results[0], F.elu(results[1]) + 1


def rough(model: Model) -> Any:
    """With weights that are not next to zero, so that every term shows."""
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(0.3 * torch.randn_like(parameter)) if parameter.ndim > 1 or "bias" in name else None
    return model.eval()


@pytest.mark.parametrize("form", ["official", "paper"])
def test_stosa_ranks_and_trains_by_wasserstein_distances(form: str) -> None:
    model = rough(small("stosa", split(), form=form, apart=0.2))
    model.item.weight.data.mul_(3.0)  # so that some negatives are nearer to the positive than the state is, some not
    batch = first_batch(model)
    made = [stosa_states(model, row) for row in rows(batch.clicks, batch.item)]
    mean, cov = (torch.cat([pair[nth] for pair in made]) for nth in (0, 1))
    item_cov = F.elu(model.item_covariance.weight) + 1

    def to(item: Tensor) -> Tensor:
        return distance(mean, cov, model.item.weight[item], item_cov[item])

    target, negative = batch.target, batch.negative
    up, down = to(target), to(negative)
    between = distance(model.item.weight[target], item_cov[target], model.item.weight[negative], item_cov[negative])
    expected = -torch.sigmoid(down - up).log() + 0.2 * (up - between).relu()
    assert (up > between).any()
    assert (up < between).any()
    close(model.loss(batch), expected.mean())
    history = torch.tensor([3, 9, 4])
    m, c = stosa_states(model, history)
    d = distance(m[-1], c[-1], model.item.weight, item_cov)[1:]
    scores = model.scores(Histories.from_lists([[3, 9, 4]]))[0, 1:]
    close(scores - scores.mean(), d.mean() - d)  # -D, up to what is the same for all items
    model.config = dataclasses.replace(model.config, loss="softmax")
    logits = -torch.stack([distance(a, b, model.item.weight, item_cov)[1:] for a, b in zip(mean, cov, strict=True)])
    close(model.loss(batch), F.cross_entropy(logits, target - 1))


def dt4sr_stack(stack: Any, x: Tensor, official: bool) -> Tensor:
    length, block = len(x), stack.blocks[0]
    x = 4.0 * x + stack.position.weight[torch.arange(length - 1, -1, -1)]
    active = F.elu if official else (lambda t: t)
    query = block.norm_query(x)
    q, k, v = active(block.query(query)), active(block.key(x)), active(block.value(x))
    mixed = torch.zeros(length, 16)
    for at in range(length):
        for head in (slice(0, 8), slice(8, 16)):
            a = (k[: at + 1, head] @ q[at, head] / 8**0.5).softmax(0)
            mixed[at, head] = a @ v[: at + 1, head]
    y = block.norm_attention(query + mixed)
    return stack.norm(block.norm_feed(y + active(block.feed[2](F.elu(block.feed[0](y))))))


@pytest.mark.parametrize("form", ["official", "paper"])
def test_dt4sr_is_two_transformers_and_a_distance(form: str) -> None:
    model = rough(small("dt4sr", split(), form=form))
    batch = first_batch(model)
    down_minus_up = []
    item_cov = F.elu(model.item_covariance.weight) + 1
    for nth, item in enumerate(rows(batch.clicks, batch.item)):
        here = batch.clicks.row == nth
        mean = dt4sr_stack(model.mean, model.item.weight[item], form == "official")
        cov = F.elu(dt4sr_stack(model.variance, model.item_covariance.weight[item], form == "official")) + 1
        d = [distance(mean, cov, model.item.weight[i[here]], item_cov[i[here]]) for i in (batch.negative, batch.target)]
        down_minus_up.append(d[0] - d[1])
    close(model.loss(batch), -torch.sigmoid(torch.cat(down_minus_up)).log().mean())


def test_cl4srec_contrasts_two_changed_copies() -> None:
    data = split(length=11)
    model: Any = small("cl4srec", data, max_len=12, contrast_weight=0.7, temperature=2.0).eval()
    before = data.train.item.copy()
    (batch, *_) = model.batches(data.train, np.random.default_rng(0))
    assert np.array_equal(before, data.train.item)
    size = len(batch.clicks.length)
    views, originals = rows(batch.views, batch.viewed), rows(batch.clicks, batch.item)
    kinds = []
    for row, view in enumerate(views):
        original = originals[row % size].tolist()
        if len(view) < 10:
            at = original.index(int(view[0]))
            assert view.tolist() == original[at : at + 6]
            kinds.append("crop")
        elif (view == model.mask).any():
            seen = (view != model.mask).tolist()
            assert view[seen].tolist() == originals[row % size][seen].tolist()
            assert int((view == model.mask).sum()) == 3
            kinds.append("mask")
        else:
            assert sorted(view.tolist()) == sorted(original)
            kinds.append("reorder")
    assert len(OPERATORS) == len(set(kinds)) == 3
    assert all(one != other for one, other in zip(kinds[:size], kinds[size:], strict=True))
    z = torch.stack([model(view, _alone(view))[-1] for view in views])
    logits = (z @ z.T / 2.0).masked_fill(torch.eye(2 * size, dtype=torch.bool), -torch.inf)
    contrast = F.cross_entropy(logits, (torch.arange(2 * size) + size) % (2 * size))
    parts = model.parts(batch)
    close(parts["contrast"], 0.7 * contrast)
    hidden = model(batch.item, batch.clicks)
    up, down = ((hidden * model.item.weight[i]).sum(1) for i in (batch.target, batch.negative))
    close(parts["next"], -(up.sigmoid().log() + (1 - down.sigmoid()).log()).mean())


def _alone(view: Tensor) -> Packed:
    return pack(newest(Histories.from_lists([view.tolist()]), len(view)))


@pytest.mark.parametrize("form", ["paper", "official"])
def test_svae_tells_the_next_items_from_a_latent_variable(form: str) -> None:
    model: Any = small("svae", split(), form=form, decay=0.01).train()
    model.dropout.p, model.step = 0.0, torch.tensor(100)
    batch = first_batch(model)
    clicks = batch.clicks
    torch.manual_seed(5)
    parts = model.parts(batch)
    torch.manual_seed(5)
    eps = torch.randn(len(batch.item), 8)
    h = torch.cat([gru(model.gru, model.item.weight[row]) for row in rows(clicks, batch.item)])
    h = torch.tanh(model.encoder[0](h))
    mean, s = model.mean(h), model.log_variance(h)
    z = mean + (s / 2 if form == "paper" else s).exp() * eps
    logits = torch.tanh(model.decoder[0](z)) @ model.out.weight[1:].T + model.bias[1:]
    wanted = torch.zeros_like(logits)
    for at, row in enumerate(batch.target.tolist()):
        for item in row:
            if item:
                wanted[at, item - 1] += 1
    nll = -(wanted * logits.log_softmax(1)).sum(1)
    if form == "paper":
        expected = nll.mean()
    else:
        of_rows = [
            part.sum() / ones[0].sum() for part, ones in zip(rows(clicks, nll), rows(clicks, wanted), strict=True)
        ]
        expected = torch.stack(of_rows).mean()
    close(parts["reconstruction"], expected)
    close(parts["kl"], 0.1 * 0.5 * (mean**2 + s.exp() - 1 - s).sum(1).mean())
    close(parts["decay"], 0.005 * torch.stack([(p**2).sum() for p in model.parameters()]).sum())


def test_acvae_moves_each_part_by_its_own_term() -> None:
    model: Any = small("acvae", split()).eval()  # without noise and dropout
    batch = first_batch(model)
    clicks, size = batch.clicks, len(batch.clicks.length)
    x = model.item.weight[batch.item]
    states = [gru(model.gru, x[clicks.row == row]) for row in range(size)]

    def noisy(t: Tensor) -> Tensor:
        return t + model.encoder.noise.bias.tanh()

    z = []
    for state in states:
        y = noisy(F.softplus(model.encoder.first(noisy(state))))
        back = torch.cat([torch.zeros(4, y.shape[1]), y])
        seen = torch.stack([back[t : t + 5].T.flatten() for t in range(len(y))])  # a filter's weights: [state, 5]
        y = F.softplus(model.encoder.narrow(F.softplus(model.encoder.wide(seen))))
        z.append(model.encoder.out(state + y))
    flat = torch.cat(z)
    logits = torch.tanh(model.decoder[0](flat)) @ model.out.weight[1:].T + model.bias[1:]

    def critic(other: list[Tensor]) -> Tensor:
        both = [torch.cat([x[clicks.row == row], other[row]], 1) for row in range(size)]
        return torch.cat([model.verdict[1](F.gelu(gru(model.critic, one)))[:, 0] for one in both])

    def adversary_of(z: Tensor) -> Tensor:
        y = model.adversary.first(torch.cat([x, z], 1))
        for first, second in model.adversary.blocks:
            y = F.elu(y + second(first(y)))
        return model.adversary.last(y) + z**2 / 2

    others = []
    for row in range(size):
        theirs = z[(row + 1) % size]
        others.append(theirs[[min(at, len(theirs) - 1) for at in range(len(z[row]))]])
    torch.manual_seed(5)
    parts = model.parts(batch)
    torch.manual_seed(5)
    drawn = torch.randn_like(flat)
    told, prior = adversary_of(flat), adversary_of(drawn)
    close(parts["reconstruction"], F.cross_entropy(logits, batch.target - 1, reduction="sum") / size)
    close(parts["kl"], 0.05 * told.mean(1).sum() / size)
    right, wrong = critic(z), critic(others)
    close(parts["contrast"], -0.1 * (right.sigmoid().log() + (1 - wrong.sigmoid()).log()).sum() / size)
    close(parts["adversary"], -(told.sigmoid().log() + (1 - prior.sigmoid()).log()).mean(1).sum() / size)
    adversary = {id(p) for p in model.adversary.parameters()}
    for name in ("kl", "adversary"):
        model.zero_grad()
        parts[name].backward(retain_graph=True)
        moved = {id(p) for p in model.parameters() if p.grad is not None and p.grad.any()}
        assert moved
        assert moved <= adversary if name == "adversary" else not moved & adversary


def test_mind_routes_clicks_to_interests() -> None:
    model = rough(small("mind", split(), loss="softmax"))
    batch = first_batch(model)

    def squash(v: Tensor) -> Tensor:
        return (v @ v) / (1 + v @ v) * v / v.norm()

    users = []
    for item in rows(batch.clicks, batch.item):
        x = model.item.weight[item] @ model.capsule.weight.T
        logits = model.start[torch.arange(len(item) - 1, -1, -1)].clone()
        for _ in range(3):
            weight = logits.softmax(1)  # over the interests
            interests = torch.stack([squash((weight[:, k : k + 1] * x).sum(0)) for k in range(2)])
            logits = logits + x @ interests.T
        users.append(torch.relu(model.feed[0](interests)))
    interests = torch.stack(users)
    best = (interests * model.item.weight[batch.target][:, None]).sum(-1).argmax(1)
    chosen = interests[torch.arange(len(best)), best]
    assert len(set(best.tolist())) == 2
    close(model.loss(batch), F.cross_entropy(chosen @ model.item.weight[1:].T, batch.target - 1))
    history = Histories.from_lists([[3, 9, 4]])
    close(model.scores(history)[0, 1:], (model.encode(history)[0] @ model.item.weight[1:].T).amax(0))
    paper = rough(small("mind", split(), loss="softmax", form="paper"))
    fit = (interests * paper.item.weight[batch.target][:, None]).sum(-1).clamp(min=0) ** 2
    mixed = (fit.softmax(1)[:, :, None] * interests).sum(1)
    close(paper.loss(batch), F.cross_entropy(mixed @ paper.item.weight[1:].T, batch.target - 1))


def test_s3rec_learns_four_things_first() -> None:
    data = split(length=9)
    model = rough(small("s3rec", data, max_len=7))
    epoch = list(model.batches(data.train, np.random.default_rng(0)))
    before = [batch for batch in epoch if isinstance(batch, Pretraining)]
    assert len(before) == 2 * -(-40 * 8 // 40)
    assert isinstance(epoch[len(before) - 1], Pretraining)
    assert model.pretrained == 1
    assert [nth for nth, batch in enumerate(epoch) if model.begins_stage(batch)] == [len(before)]
    again = list(model.batches(data.train, np.random.default_rng(0)))
    assert len(again) == model.steps(data.train) == len(epoch) - len(before)
    assert not any(model.begins_stage(batch) for batch in again)
    batch = before[0]
    size = len(batch.clicks.length) // 4
    masked, context, positive, negative = (rows(batch.clicks, batch.item)[k * size : (k + 1) * size] for k in range(4))
    mask = model.mask
    covered = torch.zeros(len(batch.item), dtype=torch.bool).index_fill(0, batch.covered, True)
    assert torch.equal((batch.item == mask)[: len(covered) // 4], covered[: len(covered) // 4])
    sums = dict.fromkeys(WEIGHTS, torch.tensor(0.0))
    third, at = data.items.features["third"], 0

    def bidirectional(item: Tensor) -> Tensor:
        clicks = _alone(item)
        return model(item, clicks, [torch.ones(1, 1, len(item), len(item), dtype=torch.bool)])

    def attributes(query: Tensor, item: int) -> Tensor:
        has = torch.zeros(len(third.values))
        has[third.codes[item][third.codes[item] > 0] - 1] = 1.0
        return F.binary_cross_entropy(torch.sigmoid(model.attribute.weight @ query), has, reduction="sum")

    def rank(up: Tensor, down: Tensor) -> Tensor:
        return -torch.sigmoid(torch.sigmoid(up) - torch.sigmoid(down)).log()

    for row in range(size):
        states = bidirectional(masked[row])
        assert masked[row][-1] == mask
        for place, item in enumerate(masked[row].tolist()):
            if item != mask:
                sums["attributes"] = sums["attributes"] + attributes(model.to_attribute(states[place]), item)
                continue
            target, other = int(batch.target[at]), int(batch.negative[at])
            at += 1
            query = model.to_item(states[place])
            up, down = query @ model.item.weight[target], query @ model.item.weight[other]
            sums["items"] = sums["items"] + rank(up, down)
            of_target = attributes(model.to_covered(states[place]), target)
            sums["covered_attributes"] = sums["covered_attributes"] + of_target
        inside = context[row] == mask
        assert torch.equal(positive[row] != mask, inside)
        assert torch.equal(negative[row] != mask, inside)
        assert 1 <= int(inside.sum()) <= len(inside) // 2
        query, *vectors = (bidirectional(v)[-1] for v in (context[row], positive[row], negative[row]))
        query = model.to_segment(query)
        sums["segments"] = sums["segments"] + rank(query @ vectors[0], query @ vectors[1])
    assert at == len(batch.target)
    parts = model.parts(batch)
    for name, weight in WEIGHTS.items():
        close(parts[name], weight * sums[name] / size)
