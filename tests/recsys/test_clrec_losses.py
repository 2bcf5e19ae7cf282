"""The losses CLRec is compared with, against hand-computed values; propensities; what is learned by heart."""

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_models import ENCODERS, OPTIONS, histories, items
from test_train import memory

from fastcl.recsys import CLRec, CLRecConfig, Histories, evaluate, fit
from fastcl.recsys.models.batching import drawing
from fastcl.recsys.models.clrec.objectives import OBJECTIVES, Pairs, contrastive

pytestmark = pytest.mark.usefixtures("one_thread")
TEMPERATURE = 0.07


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


@pytest.mark.parametrize("log_q", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("source", ["batch", "ids", "vectors"])
def test_log_q_is_a_dial_from_the_contrast_to_the_sampled_softmax(source, log_q):
    """The second batch after the first, whose positives the queue holds, term by term; and the gradient."""
    options = {"negatives_from": source, "log_q": log_q, "duplicates": "exclude", **OPTIONS}
    model, first, _, _, share = one_batch(**options)
    second = next(itertools.islice(model.batches(histories(rows=40), np.random.default_rng(1)), 1, None))
    model.loss(first)
    model.after_step(first)
    queued = [] if source == "batch" else first.target.tolist()
    users = model(model.item(second.item), second.bucket, second.clicks)
    table = F.normalize(model.item(torch.arange(41)), dim=-1)
    kept = table.detach() if source == "vectors" else table
    losses = []
    for r, target in enumerate(second.target.tolist()):
        keys = [(target, table), *((item, table) for item in second.target.tolist() if item != target)]
        keys += [(item, kept) for item in queued if item != target]
        terms = [users[r] @ of[item] / TEMPERATURE - log_q * np.log(share[item - 1]) for item, of in keys]
        losses.append(torch.stack(terms).logsumexp(0) - terms[0])
    expected, found = torch.stack(losses).mean(), model.loss(second)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    weights = model.item.id.weight, model.user.aggregate.a
    wanted, got = (torch.autograd.grad(loss, weights, retain_graph=True) for loss in (expected, found))
    torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("log_q", [0.0, 0.3, 1.0])
def test_log_q_divides_the_optimum_by_a_power_of_the_share(log_q):
    """With every click among the negatives, the gradient is that of the full softmax whose logits have (1 - log_q)
    times the log share added, as SASRec's debias adds it. Both share the minimum then.
    """
    rng = np.random.default_rng(0)
    counts = rng.integers(1, 9, 12)
    share = torch.from_numpy(counts / counts.sum()).log()
    drawn = torch.from_numpy(np.repeat(np.arange(1, 13), 2000 * counts))
    users, table = (torch.from_numpy(rng.normal(size=(n, 4))).requires_grad_() for n in (5, 12))
    target = torch.tensor([1, 4, 4, 12, 7])
    config = CLRecConfig(log_q=log_q, negatives_from="batch", temperature=0.5)
    pairs = Pairs(
        user=users,
        positive=table[target - 1],
        target=target,
        window=torch.arange(5),
        drawn=drawn,
        keys=table[drawn - 1],
        queued=None,
        items=lambda: table,
        log_share=share,
        log_q=users.new_empty(0),
    )
    full = F.cross_entropy(users @ table.T / 0.5 + (1 - log_q) * share, target - 1)
    found = torch.autograd.grad(contrastive(pairs, config), (users, table))
    torch.testing.assert_close(found, torch.autograd.grad(full, (users, table)), rtol=1e-2, atol=2e-3)


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
    draw = drawing(torch.from_numpy(np.log(share)).float(), power, np.random.default_rng(0))
    drawn = draw((400, 500))
    assert drawn.shape == (400, 500)
    found = np.bincount(drawn.ravel(), minlength=5)[1:] / drawn.size
    assert found == pytest.approx(share**power / (share**power).sum(), abs=0.004)  # 3.5 standard errors


@pytest.mark.parametrize(("objective", "sums"), [("clrec", 0), ("full_softmax", 0), ("sampled_softmax", 1)])
def test_popularities_of_all_items_are_summed_once_an_epoch_and_only_for_draws(objective, sums, monkeypatch):
    """At 10^7 items each sum takes as long as several batches."""
    exp, sizes = np.exp, []
    monkeypatch.setattr(np, "exp", lambda x: (sizes.append(np.size(x)), exp(x))[1])
    model = CLRec(items(), seed=3, batch=8, negatives=20, objective=objective)
    batches = list(model.batches(histories(rows=40), np.random.default_rng(0)))
    assert len(batches) > 5
    assert [size for size in sizes if size == len(model.items)] == [len(model.items)] * sums


def test_encoders_start_alike_whatever_the_loss():
    one, *others = (CLRec(items(), seed=3, objective=name, propensity="learned", **OPTIONS) for name in OBJECTIVES)
    for other in others:
        for name in ("item", "user"):
            ours, theirs = getattr(one, name).state_dict(), getattr(other, name).state_dict()
            assert all(torch.equal(ours[key], theirs[key]) for key in ours)
        assert other.queue is None


@pytest.mark.parametrize(
    ("options", "epochs"),
    [
        pytest.param({"negatives": 64, "negatives_from": "vectors"}, 60, marks=pytest.mark.slow),
        ({"negatives_from": "batch"}, 60),
        pytest.param({"negatives": 64, "negatives_from": "vectors", "momentum": 0.9}, 60, marks=pytest.mark.slow),
        pytest.param({"negatives": 64, "tasks": ("u2i", "u2u")}, 100, marks=pytest.mark.slow),
        pytest.param({"negatives": 64, "encoder": "sasrec", "batch": 10, "dropout": 0.0}, 40, marks=pytest.mark.slow),
        pytest.param({"negatives": 64, "objective": "sampled_softmax"}, 40, marks=pytest.mark.slow),
        pytest.param({"samples": 8, "objective": "negative_sampling"}, 60, marks=pytest.mark.slow),
        pytest.param({"negatives": 64, "objective": "shared_negatives"}, 100, marks=pytest.mark.slow),
        ({"objective": "ipw", "propensity": "learned"}, 80),
        ({"objective": "full_softmax"}, 40),
    ],
)
def test_fifty_users_are_learned_by_heart(options, epochs):
    split = memory()
    model = CLRec(split.items, seed=0, **{"batch": 32} | options)
    fit(model, split, epochs=epochs, lr=1e-2, progress=False)
    assert evaluate(model, split.test, counts=split.counts, k=(1,))["recall@1"] > 0.9
