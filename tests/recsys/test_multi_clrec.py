"""Multi-CLRec: the paper's equations click by click. Its queues have a file of their own."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from logs import needs_movies
from test_models import OPTIONS as SMALL
from test_models import histories, items, with_a_bare_feature

from fastcl.recsys import Histories, Items, MultiCLRec, MultiCLRecConfig, bundled, evaluate, fit, nearest
from fastcl.recsys.models.batching import Prefixes
from fastcl.recsys.models.multi_clrec.parts import balance, polarity, routing, separation, straight_through

pytestmark = pytest.mark.usefixtures("one_thread")
OPTIONS = SMALL | {"intents": 5, "served": 3, "hidden": 6}


# The parts


def test_routing_is_equation_7_and_sums_to_one() -> None:
    rng = torch.Generator().manual_seed(0)
    category, prototypes = torch.randn(9, 4, generator=rng), torch.randn(5, 4, generator=rng)
    found = routing(category, prototypes, 0.07).exp()
    torch.testing.assert_close(found.sum(1), torch.ones(9))
    for t, c in enumerate(category.double()):
        terms = [math.exp(float(mu @ c / (0.07 * mu.norm() * c.norm()))) for mu in prototypes.double()]
        expected = torch.tensor([term / sum(terms) for term in terms])
        torch.testing.assert_close(found[t], expected, atol=1e-6, rtol=1e-4)


def test_an_item_has_the_same_intents_under_autocast() -> None:
    model = MultiCLRec(items(), seed=3, **OPTIONS).eval()
    routed = model.intents(torch.arange(41))
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model.intents(torch.arange(41)), routed)


def test_straight_through_is_one_hot_with_the_gradient_of_the_softmax() -> None:
    """By hand: of <g, sum_h s_h z_h>, dz_h = s_h g, and dw_h = p_h (<g, z_h> - sum_k p_k <g, z_k>)."""
    rng = torch.Generator().manual_seed(0)
    w = (3 * torch.randn(6, 5, generator=rng, dtype=torch.float64)).requires_grad_()
    z = torch.randn(6, 5, 4, generator=rng, dtype=torch.float64).requires_grad_()
    g = torch.randn(6, 4, generator=rng, dtype=torch.float64)
    choice = straight_through(w)
    assert choice.tolist() == [[float(h == int(row.argmax())) for h in range(5)] for row in w]
    dw, dz = torch.autograd.grad(((choice[:, None] @ z)[:, 0] * g).sum(), (w, z))
    for b in range(6):
        p = [math.exp(x) for x in w[b].tolist()]
        along = (z[b].detach() @ g[b]).tolist()
        mean = sum(x * y for x, y in zip(p, along, strict=True)) / sum(p)
        for h in range(5):
            assert dw[b, h].item() == pytest.approx(p[h] / sum(p) * (along[h] - mean), rel=1e-9, abs=1e-12)
            torch.testing.assert_close(dz[b, h], choice[b, h] * g[b])


def test_auxiliary_losses_by_hand() -> None:
    routed = torch.tensor([[0.9, 0.1], [0.3, 0.7]]).log()
    assert polarity(routed).item() == pytest.approx(-(math.log(0.9) + math.log(0.7)) / 2)
    pi = (0.6, 0.4)
    expected = sum(0.5 * (math.log(0.5) - math.log(share)) for share in pi)
    assert balance(routed).item() == pytest.approx(expected, abs=1e-6)
    assert balance(torch.tensor([[1.0, 1e-30], [1e-30, 1.0]]).log()).item() == pytest.approx(0.0, abs=1e-6)
    cosine, intent = torch.tensor([[0.5, -0.2, 0.1], [0.3, 0.3, 0.9]]), torch.tensor([0, 1])
    terms = [[math.exp(value / 0.5) for value in row] for row in cosine.tolist()]
    expected = -(math.log(terms[0][0] / sum(terms[0])) + math.log(terms[1][1] / sum(terms[1]))) / 2
    assert separation(cosine, intent, 0.5).item() == pytest.approx(expected)


def test_a_category_is_the_mean_of_its_values_or_the_item_itself() -> None:
    table = items()
    for category, feature in (("", "genre"), ("genre", "genre"), ("era", "era")):
        encoder = MultiCLRec(table, seed=1, category=category, **OPTIONS).item
        bags = dict(zip(table.features, encoder.features.values(), strict=True))
        for item in range(1, 10):
            codes = [code for code in table.features[feature].codes[item].tolist() if code]
            own = encoder.id.weight[item]
            expected = sum(bags[feature].weight[code] for code in codes) / len(codes) if codes else own
            torch.testing.assert_close(encoder(torch.tensor([item]))[1][0], expected)
            means = []
            for name, bag in bags.items():
                rows = [bag.weight[code] for code in table.features[name].codes[item].tolist() if code]
                means.append(sum(rows) / len(rows) if rows else torch.zeros(16))
            g = own + sum(means) + encoder.mlp[2](torch.tanh(encoder.mlp[0](torch.cat([own, *means]))))
            torch.testing.assert_close(encoder(torch.tensor([item]))[0][0], g)
    for bare in with_a_bare_feature(table):
        encoder, item = MultiCLRec(bare, seed=1, category="brand", **OPTIONS).item, torch.arange(1, 10)
        g, category = encoder(item)
        assert g.isfinite().all()
        assert torch.equal(category, encoder.id.weight[item])
    plain = MultiCLRec(Items(tuple("abc")), seed=1, **OPTIONS).item
    assert torch.equal(plain(torch.tensor([2, 3]))[1], plain.id.weight[2:4])


# The model


def test_users_are_encoded_as_the_paper_writes_it() -> None:
    """Equations 6 to 9, click by click."""
    model = MultiCLRec(items(), seed=3, **OPTIONS).eval()
    data = histories(rows=8, longest=7)
    z, fit_of = model.users(data)
    encoded = model.encode(data)
    for r in range(len(data)):
        begin, end = data.offsets[r], data.offsets[r + 1]
        g, c, scores = [], [], []
        for p in range(begin, end):
            vector, category = (x[0] for x in model.item(torch.tensor([data.item[p]])))
            gap = data.time[end - 1] - data.time[p]
            bucket = model.bucket.weight[sum(gap >= cut for cut in model.config.time_cuts)]
            about = torch.cat([vector, category, model.position.weight[p - begin], bucket])
            scores.append(model.importance[2](torch.tanh(model.importance[0](about))))
            g.append(vector)
            c.append(category)
        weight = torch.cat(scores).softmax(0)
        whole = sum(p_t * g_t for p_t, g_t in zip(weight, g, strict=True))
        m = whole + model.choice(whole)
        fits = []
        for h in range(5):
            routed = [routing(c_t[None], model.prototype.weight, 0.07)[0, h].exp() for c_t in c]
            pooled = sum(p_ht * p_t * g_t for p_ht, p_t, g_t in zip(routed, weight, g, strict=True))
            z_h = pooled + whole + model.intention(torch.cat([pooled, model.beta.weight[h]]))
            torch.testing.assert_close(z[r, h], z_h, atol=1e-5, rtol=1e-4)
            fits.append(F.cosine_similarity(m, z_h, dim=0) / 0.07)
        torch.testing.assert_close(fit_of[r], torch.stack(fits), atol=1e-4, rtol=1e-4)
        best = torch.stack(fits).topk(3).indices
        torch.testing.assert_close(encoded[r, :, :-1], F.normalize(z[r, best], dim=1), atol=1e-5, rtol=1e-4)
        shares = torch.stack(fits).softmax(0)
        torch.testing.assert_close(encoded[r, :, -1].exp(), shares[best], atol=1e-5, rtol=1e-4)


def test_scores_are_the_largest_over_the_served_intents_and_searching_finds_them() -> None:
    """K intents against a loop, and `nearest` over an exact search of each against the k best of these scores."""
    model = MultiCLRec(items(200), seed=3, **OPTIONS).eval()
    data = histories(rows=12, count=200)
    z, w = model.users(data)
    g = model.item(torch.arange(1, 201))[0]
    scores = model.scores(data)
    served = []
    for r in range(len(data)):
        best = w[r].topk(3).indices.tolist()
        of_each = [F.cosine_similarity(z[r, h][None], g) / 0.07 + w[r].log_softmax(0)[h] for h in best]
        served.append(torch.stack(of_each))
        torch.testing.assert_close(scores[r, 1:], served[r].amax(0), atol=1e-4, rtol=1e-4)
    assert {int(each.argmax(0).bincount().argmax()) for each in served} == {0}  # the best fit, but not it alone
    assert any(each.argmax(0).any() for each in served)

    table = model.item_vectors()[1:].detach().numpy()

    def search(queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        found = queries @ table.T
        rows = np.argsort(-found, axis=1, kind="stable")[:, :k]
        return np.take_along_axis(found, rows, axis=1), rows

    queries = model.encode(data).detach().numpy()
    near, rows = nearest(search, queries, 10)
    assert any(len(set(search(each, 10)[1].ravel())) < 30 for each in queries)  # some item is found twice
    expected = scores[:, 1:].topk(10)
    np.testing.assert_allclose(near, expected.values.detach().numpy(), rtol=1e-4)
    assert rows.tolist() == expected.indices.tolist()


def test_an_intention_vector_has_the_clicks_of_the_other_intents_or_its_own_alone() -> None:
    own, every = (MultiCLRec(items(), seed=3, clicks=clicks, **OPTIONS).eval() for clicks in ("own", "all"))
    data = histories(rows=40)
    apart = every.users(data).intention - own.users(data).intention
    torch.testing.assert_close(apart, apart[:, :1].expand_as(apart))  # what is added is the same for all intents
    assert apart.abs().max() > 0.01


@pytest.mark.parametrize(("duplicates", "kept"), [("keep", "ids"), ("exclude", "ids"), ("exclude", "vectors")])
def test_the_loss_is_the_sum_of_its_equations(duplicates: str, kept: str) -> None:
    weights = {"polarity": 0.5, "separation": 2.0, "balance": 3.0}
    sizes = {"batch": 24, "main": 60, "secondary": 30}
    options = {"duplicates": duplicates, "negatives_from": kept, **weights, **sizes, **OPTIONS}
    model = MultiCLRec(items(), seed=3, **options).eval()
    for batch in model.batches(histories(rows=40), np.random.default_rng(0)):
        model.loss(batch)
        model.after_step(batch)
    assert len(model.queues.main) == 36
    assert sum(len(queue) > 0 for queue in model.queues.secondary) > 2
    batch = next(model.batches(histories(rows=40), np.random.default_rng(1)))
    parts = model.parts(batch)
    total = {"contrast": 0.0, "polarity": 0.0, "separation": 0.0, "balance": 0.0}
    n = len(batch.target)
    positive = F.normalize(model.item(batch.target)[0], dim=1)
    everything = torch.cat([batch.target, batch.item])
    total["balance"] = balance(model.intents(everything).log()).item()
    for row, target in enumerate(batch.target.tolist()):
        routed = model.intents(torch.tensor([target]))[0]
        intent = int(routed.argmax())
        here = batch.clicks.row == row
        click = batch.item[here]
        encoded = (*model.item(click), model.intents(click), batch.bucket[here])
        alone = batch.clicks._replace(
            row=torch.zeros(len(click), dtype=torch.int64),
            position=batch.clicks.position[here],
            length=batch.clicks.length[row : row + 1],
        )
        z, w = (x[0] for x in model(*encoded, alone))
        user = F.normalize(z[w.argmax()], dim=0)
        others = [(positive[j], int(batch.target[j])) for j in range(n) if j != row]
        for queue in (model.queues.main, model.queues.secondary[intent]):
            held = [] if queue.ids is None else queue.ids.tolist()
            vectors = F.normalize(model.item(torch.tensor(held, dtype=torch.int64))[0], dim=1)
            if kept == "vectors":
                torch.testing.assert_close(queue.keys, vectors)  # no step was made in between
            others += zip(vectors, held, strict=True)
        keys = [positive[row], *(key for key, item in others if duplicates == "keep" or item != target)]
        logits = torch.stack(keys) @ user / 0.07
        total["contrast"] -= logits.log_softmax(0)[0].item() / n
        total["polarity"] -= routed[intent].log().item() / n
        near = F.cosine_similarity(z, positive[row][None], dim=1) / 0.07
        total["separation"] -= near.log_softmax(0)[intent].item() / n
    assert list(parts) == list(model.part_names)
    for name, value in total.items():
        assert parts[name].item() == pytest.approx(weights.get(name, 1.0) * value, rel=1e-4), name
    assert model.loss(batch).item() == pytest.approx(sum(part.item() for part in parts.values()))


@pytest.mark.parametrize("kept", ["ids", "vectors"])
def test_queued_items_learn_where_they_are_encoded_anew(kept: str) -> None:
    model = MultiCLRec(items(200), seed=3, batch=8, main=20, secondary=30, negatives_from=kept, **OPTIONS)
    first, second, *_ = model.batches(histories(rows=12, count=200), np.random.default_rng(0))
    model.loss(first)
    model.after_step(first)
    model.parts(second)["contrast"].backward()
    queued = set(first.target.tolist()) - set(second.target.tolist()) - set(second.item.tolist())
    assert queued
    learned = [bool(model.item.id.weight.grad[item].any()) for item in queued]
    assert learned == [kept == "ids"] * len(queued)


def test_what_the_main_queue_evicts_is_routed_by_the_weights_of_now() -> None:
    model = MultiCLRec(items(), seed=3, batch=24, main=30, secondary=50, **OPTIONS).eval()
    first, second, *_ = model.batches(histories(rows=40), np.random.default_rng(0))
    for batch in (first, second):
        model.loss(batch)
        with torch.no_grad():
            model.prototype.weight.copy_(model.prototype.weight.flip(0))
        model.after_step(batch)
    out = first.target.tolist() + second.target.tolist()[: 24 - 6]
    by_hand: list[list[int]] = [[] for _ in range(5)]
    model.prototype.weight.data.copy_(model.prototype.weight.flip(0))
    before = model.intents(first.target[:18]).argmax(1).tolist()
    model.prototype.weight.data.copy_(model.prototype.weight.flip(0))
    after = model.intents(torch.tensor(out[18:])).argmax(1).tolist()
    for item, intent in zip(out, before + after, strict=True):
        by_hand[intent].append(item)
    assert [[] if queue.ids is None else queue.ids.tolist() for queue in model.queues.secondary] == by_hand
    assert by_hand != [[] for _ in range(5)]


def test_a_history_does_not_depend_on_what_comes_after() -> None:
    model = MultiCLRec(items(), seed=3, **OPTIONS).eval()
    one = Histories.from_lists([[1, 2, 3, 4]], [[0, 100, 5000, 9000]])
    two = Histories.from_lists([[1, 2, 9, 9]], [[0, 100, 10**7, 10**8]])
    users = []
    for data in (one, two):
        clicks, item, bucket = model._clicks(data, Prefixes(data, 7).all())
        users.append(model(*model.item(item), model.intents(item), bucket, clicks).intention)
    assert torch.equal(users[0][:2], users[1][:2])
    assert not torch.equal(users[0][2], users[1][2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"main": 256}, "main: expected at least 257, got 256"),
        ({"served": 17}, "served: expected at most intents=16, got 17"),
        ({"negatives_from": "batch"}, "negatives_from: expected one of ids, vectors, got 'batch'"),
        ({"balance": -1.0}, "balance: expected at least 0"),
        ({"duplicates": "drop"}, "duplicates: expected one of keep, exclude, got 'drop'"),
        ({"time_cuts": (5.0, 1.0)}, "time_cuts: expected rising limits"),
    ],
)
def test_bad_settings_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MultiCLRecConfig(**options)


def test_a_category_that_is_no_feature_is_refused() -> None:
    with pytest.raises(ValueError, match="category: expected one of genre, era, got 'brand'"):
        MultiCLRec(items(), category="brand")


@pytest.mark.parametrize("name", ["purchases", pytest.param("movies", marks=needs_movies)])
def test_the_bundled_sets_with_their_categories(name: str) -> None:
    split = bundled(name).split()
    lengths = np.minimum(split.train.lengths, 40) * (np.arange(len(split.train)) < 40)  # the others have no click
    few = dataclasses.replace(split, train=split.train.slice(split.train.offsets[1:] - lengths, lengths))
    model = MultiCLRec(split.items, seed=0, batch=64, main=200, secondary=100, dim=16, separation=1.0)
    assert model.item.category == 0
    with torch.no_grad():
        before = model.eval().intents(torch.arange(1, len(split.items) + 1))
    history = fit(model, few, epochs=3, progress=False)
    assert history[-1]["loss_parts"]["separation"] < history[0]["loss_parts"]["separation"]
    with torch.no_grad():
        after = model.intents(torch.arange(1, len(split.items) + 1))
    assert after.amax(1).mean() > before.amax(1).mean()  # polarised
    assert evaluate(model, split.test)["cases"] == len(split.test)
