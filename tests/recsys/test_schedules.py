"""Schedules of the learning rate, and the plan that follows from what is given. Nothing is learned here."""

import pytest
import torch
from tiny_runs import TINY, write_table

from fastcl.recsys import Interactions, SASRec, fit
from fastcl.recsys.training import loop
from fastcl.recsys.training.state import Progress, Settings, planned

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_rate_falls_to_a_tenth_where_validation_stands_still(monkeypatch, tmp_path):
    """Without learning the first epoch stays the best."""
    split = Interactions.read(write_table(tmp_path)).split()

    def model():
        return SASRec(split.items, **TINY | {"batch": 16})  # one batch an epoch

    rates = []

    def stands_still(run, batches):
        rates.append(run.optimizer.param_groups[0]["lr"])
        return torch.zeros(1, dtype=torch.float64)

    monkeypatch.setattr(loop, "step", stands_still)
    options = {"lr": 1e-2, "patience": 5, "progress": False}
    assert len(fit(model(), split, **options)) == 6
    assert rates == pytest.approx([1e-2] * 4 + [1e-3] * 2)  # half of 5 is rounded up to 3 epochs after the first
    rates.clear()
    fit(model(), split, schedule="constant", **options)
    assert rates == [1e-2] * 6


def test_a_stall_is_half_of_the_patience_and_ends_with_a_better_epoch():
    best = [True, False, False, True, False, True, False, False, False, True]
    progress = Progress([{"best": each} for each in best])
    assert [progress.stalls(Settings(9, 1e-3, patience=patience)) for patience in (1, 2, 3, 4, 5, 6, 8, None)] == [
        3, 3, 2, 2, 1, 1, 0, 0,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "validates", "batches", "expected"),
    [
        ((None, None, None), True, 500, (200, 10, "plateau")),
        ((None, None, None), True, 19, (200, 11, "plateau")),  # 200 batches
        ((None, None, None), True, 0, (200, 200, "plateau")),
        ((None, None, "constant"), True, 500, (200, 10, "constant")),
        ((None, None, "plateau"), True, 500, (200, 10, "plateau")),
        ((None, 3, "linear"), True, 1, (200, 3, "linear")),
        ((None, None, None), False, 500, (20, None, "linear")),
        ((7, None, None), True, 500, (7, None, "linear")),
        ((7, 2, "constant"), True, 500, (7, 2, "constant")),
        ((7, None, "plateau"), True, 500, (7, 10, "plateau")),
    ],
)
def test_what_is_not_given_follows_from_what_is(given, validates, batches, expected):
    assert tuple(planned(*given, validates=validates, batches=batches).values()) == expected
    assert planned(None, None, None, learns=False)["epochs"] == 1
