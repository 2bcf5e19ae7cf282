"""Whatever an object holds, it shows itself in a few lines."""

import dataclasses

import numpy as np
import pytest

import fastcl.recsys
from fastcl.recsys import MODELS, Interactions, Popularity, Split, bundled, compare, later, rank_cases
from fastcl.recsys.showing import brief
from fastcl.recsys.training.hooks import epoch_of

LINES, LETTERS = 10, 1000


@pytest.fixture(scope="module")
def split() -> Split:
    return bundled("purchases").split()


def test_every_public_class_is_short_on_real_data(split: Split) -> None:
    data = bundled("purchases")
    floor = Popularity(split.counts, split.items)
    ranked = rank_cases(floor, split.test)
    models = [kind(split.items) for kind in MODELS.values()]
    clicks = {"user": [data.users[0]], "item": [split.items.ids[0]], "time": [10**10]}
    week = later(split, data, Interactions.read(clicks))
    epoch = epoch_of({"epoch": 1, "loss": 0.5, "best": True, "ndcg@10": 0.1}, planned=2, last=False)
    shown = [data, data.report, split, split.report, split.items, split.train, split.test, ranked, *models]
    shown += [week.report, epoch]
    shown += [split.items.features["department"], compare({"a": [floor]}, split.test), *(m.config for m in models)]
    for each in shown:
        text = repr(each)
        assert type(each).__name__ in text
        assert len(text) <= LETTERS, text
        assert text.count("\n") < LINES, text
    public = [getattr(fastcl.recsys, name) for name in fastcl.recsys.__all__]
    classes = {one for one in public if isinstance(one, type) and dataclasses.is_dataclass(one)}
    assert classes <= {type(each) for each in shown}
    assert "... 1,220 in all" in repr(split.items)
    assert repr(models[0]).startswith("SASRec(1,220 items, ")
    assert "dim=64" in repr(models[0])


def test_a_log_that_was_hard_to_read_is_short_too() -> None:
    names = [f"{'n' * 400}{number}" for number in range(50)]
    log = Interactions.read({"user": names, "item": [*names[1:], ""], "time": range(50)}, on_error="skip")
    assert len(repr(log)) < LETTERS
    assert len(repr(log.report)) < 2 * LETTERS
    assert brief({str(n): [n] * 9 for n in range(9)}).endswith("... 9 in all}")
    assert brief(np.zeros((2, 0), np.int64)) == "int64[2, 0]"
