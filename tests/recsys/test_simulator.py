"""The simulated world of the debiasing benchmark is what it claims: preference, exposure, clicks, distances, optima.

No model is trained here; what the benchmark finds is in its results.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.bench_debias import Setting, against_truth, loop
from benchmarks.debias_methods import METHODS, Log
from benchmarks.optima import optima, with_intent_queues
from benchmarks.simulator import World, divergence, joined, rank_correlation, show, world
from fastcl.recsys import Histories

pytestmark = pytest.mark.usefixtures("one_thread")

# Two intents, three items: item 1 and 3 belong to the first one.
SMALL = World(
    intent=np.array([0, 1, 0]),
    quality=np.array([0.5, 1.0, 0.2]),
    interest=np.array([[1.0, 0.0], [0.25, 0.75]]),
    popularity=np.array([0.6, 0.3, 0.1]),
)


def rows(histories: Histories) -> list[list[int]]:
    return [part.tolist() for part in np.split(histories.item, histories.offsets[1:-1])]


def test_preference_by_hand() -> None:
    expected = [[0.01 + 0.99 * 0.5, 0.01, 0.01 + 0.99 * 0.2], [0.01 + 0.99 * 0.125, 0.01 + 0.99 * 0.75, 0.01 + 0.0495]]
    np.testing.assert_allclose(SMALL.preference(), expected)


def test_policy_by_hand() -> None:
    np.testing.assert_allclose(SMALL.policy(0.0), [[0.6, 0.3, 0.1]] * 2)
    # Within the first intent the items share 6 to 1, the second has one item.
    np.testing.assert_allclose(SMALL.policy(1.0), [[6 / 7, 0.0, 1 / 7], [0.25 * 6 / 7, 0.75, 0.25 / 7]])
    np.testing.assert_allclose(SMALL.policy(0.5), (SMALL.policy(0.0) + SMALL.policy(1.0)) / 2)


def test_the_item_table_knows_the_intents_and_nothing_else() -> None:
    (feature,) = SMALL.items.features.values()
    assert feature.codes[1:, 0].tolist() == [1, 2, 1]


def test_a_world_is_skewed_and_its_quality_is_no_popularity() -> None:
    made = world(500, 300, 6, np.random.default_rng(0))
    assert np.bincount(made.intent).tolist() == [50] * 6
    ranked = np.sort(made.popularity)[::-1]
    np.testing.assert_allclose(ranked[[0, 1, 9]] / ranked[0], [1.0, 1 / 2, 1 / 10])
    np.testing.assert_allclose(made.interest.sum(1), 1.0)
    assert abs(np.corrcoef(made.quality, made.popularity)[0, 1]) < 0.15


def test_impressions_follow_the_policy_and_clicks_the_preference_of_what_was_shown() -> None:
    copies = 4000
    policy, preference = (np.repeat(x[1:], copies, axis=0) for x in (SMALL.policy(0.5), SMALL.preference()))
    shown = show(policy, preference, 2, np.random.default_rng(0))
    assert (shown.clicks.lengths == 2).all()
    assert shown.impressions[0] == 0
    share = shown.impressions[1:] / shown.impressions.sum()
    np.testing.assert_allclose(share, policy[0], atol=4 * np.sqrt(0.25 / shown.impressions.sum()))
    clicked = np.bincount(shown.clicks.item, minlength=4)[1:] / (2 * copies)
    expected = policy[0] * preference[0]
    np.testing.assert_allclose(clicked, expected / expected.sum(), atol=4 * np.sqrt(0.25 / (2 * copies)))


def test_later_clicks_stand_behind_earlier_ones() -> None:
    both = joined(Histories.from_lists([[1, 2], [], [3]]), Histories.from_lists([[4], [5, 6], []]))
    assert rows(both) == [[1, 2, 4], [5, 6], [3]]


def test_divergence_and_rank_correlation_by_hand() -> None:
    preference = np.array([[0.1, 0.3], [0.2, 0.2]])
    # p = (1/4, 3/4) and (1/2, 1/2) against uniform: ln 2 - H(p), and 0.
    expected = (np.log(2) + 0.25 * np.log(0.25) + 0.75 * np.log(0.75)) / 2
    assert divergence(preference, np.full((2, 2), 7.0)) == pytest.approx(expected)
    # Ranks 0 1 2 3 against 1 0 2 3: 1 - 6 * 2 / (4 * 15).
    assert rank_correlation(np.array([[1.0, 2.0, 3.0, 4.0]]), np.array([[20.0, 1.0, 30.0, 40.0]])) == pytest.approx(0.8)


def small_log() -> tuple[Log, Setting]:
    rng = np.random.default_rng(0)
    setting = Setting(
        users=60, items=40, intents=4, clicks=6, epochs=1, rounds=2, clicks_a_round=2, epochs_a_round=1, shown=10
    )
    made = world(setting.users, setting.items, setting.intents, rng)
    clicks, impressions = show(made.policy(0.8), made.preference(), setting.clicks, rng)
    return Log(clicks, impressions, made.policy(0.8), made), setting


def test_the_optima_are_those_of_theorem_1() -> None:
    log, _ = small_log()
    found = {label: against_truth(scores, log) for label, scores in optima(log).items()}
    truth, clicks, known, impressions, clicked = list(found.values())[:5]
    assert known["KL"] == pytest.approx(0.0, abs=1e-9)
    assert known["rank corr."] == pytest.approx(1.0)
    # Dividing by what an item was shown, or even only by what it was clicked, leads towards the truth; fitting the
    # clicks away from it, although that is what finds them again.
    assert impressions["KL"] < clicked["KL"] < clicks["KL"]
    assert clicks["recall@10, log"] > truth["recall@10, log"]
    assert truth["recall@10"] == max(row["recall@10"] for row in found.values())


@pytest.mark.parametrize("ratio", [0.0, 0.5, 4.0])
def test_at_the_optimum_of_multi_clrec_its_loss_has_no_gradient(ratio: float) -> None:
    log, _ = small_log()
    intent = torch.from_numpy(log.world.intent)
    p = torch.from_numpy(log.world.preference() * log.policy)
    p, q = p / p.sum(1, keepdim=True), torch.from_numpy(np.bincount(log.clicks.item, minlength=41)[1:] + 0.5)
    found = with_intent_queues(p.log().numpy(), q.log().numpy(), log.world.intent, ratio)
    scores = torch.from_numpy(found).requires_grad_()
    q = q / q.sum()
    of_intent = torch.stack([torch.where(intent == h, q, 0.0) / q[intent == h].sum() for h in range(4)])
    rest = ((q + ratio * of_intent)[None] * scores.exp()[:, None]).sum(2).log()  # [U, H]
    loss = (p * (rest[:, intent] - scores)).sum()
    assert torch.autograd.grad(loss, scores)[0].abs().max() < 1e-6
    # Without the intents' queues the optimum is that of CLRec.
    apart = found - (p / q).log().numpy()
    assert (np.ptp(apart, axis=1).max() < 1e-6) == (ratio == 0)


def test_every_method_learns_from_a_log_and_the_loop_has_a_row_a_round() -> None:
    log, setting = small_log()
    assert rows(log.clicks) == rows(small_log()[0].clicks)
    for label, method in METHODS.items():
        scores, later = (method(log, epochs, 0).scores(log.clicks)[:, 1:] for epochs in (1, 2))
        assert scores.isfinite().all(), label
        assert (scores - later).abs().max() > 1e-3, f"{label} stays as it began"
    found = loop(METHODS["CLRec, batch"], log, setting, 0, np.random.default_rng(0))
    assert len(found) == 1 + setting.rounds
    # Of the first log's impressions, the most shown tenth of the items.
    head = np.sort(log.impressions)[-4:].sum() / log.impressions.sum()
    assert found[0]["head's share"] == pytest.approx(head)
    assert all(0 < row["clicks an impression"] < 1 for row in found)
