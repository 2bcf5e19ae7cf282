"""Saving that is killed at any of its steps: what is found is one whole run, of before or of after, or none."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import ITEMS, TINY, write_table

from fastcl.recsys import Histories, Interactions, SASRec, fit, load, resume, save
from fastcl.recsys.training import checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")


class Killed(BaseException):
    """A process that ends here."""


def killed_at_every_point(act: Callable[[], Any], prepare: Callable[[], Any], check: Callable[[int], Any]) -> int:
    """Does `act` after `prepare` once for every name that it changes, killed there, and calls `check`."""
    true = {name: getattr(os, name) for name in ("replace", "unlink")}
    left = 10**9

    def counted(name: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal left
            if left == 0:
                raise Killed
            left -= 1
            return true[name](*args, **options)

        return call

    def with_limit(limit: int) -> int:
        nonlocal left
        prepare()
        left = limit
        with pytest.MonkeyPatch.context() as patch:
            for name in true:
                patch.setattr(os, name, counted(name))
            try:
                act()
            except Killed:
                assert limit < 10**9
        return limit - left

    points = with_limit(10**9)
    for point in range(points):
        with_limit(point)
        check(point)
    return points


def test_saving_killed_anywhere_leaves_a_pair_that_belongs(tmp_path: Path) -> None:
    one, two = (SASRec(ITEMS, seed=seed, **TINY, dropout=dropout) for seed, dropout in ((1, 0.1), (2, 0.4)))
    run, histories = tmp_path / "run", Histories.from_lists([[1, 2, 3]])
    scores = {model.config.dropout: model.eval().scores(histories) for model in (one, two)}

    def prepare() -> None:
        shutil.rmtree(run, ignore_errors=True)
        save(one, run)

    def check(point: int) -> None:
        try:
            found = load(run)
        except FileNotFoundError:
            return
        assert torch.equal(found.scores(histories), scores[found.config.dropout]), point

    assert killed_at_every_point(lambda: save(two, run), prepare, check) > 5
    # A pair that was put together by other means is refused.
    save(two, tmp_path / "two")
    prepare()
    shutil.copy(tmp_path / "two" / "config.json", run)
    with pytest.raises(ValueError, match="does not belong to config.json and items.json"):
        load(run)


def test_force_killed_anywhere_leaves_one_run_or_none(tmp_path: Path) -> None:
    split = Interactions.read(write_table(tmp_path)).split()
    run, whole = tmp_path / "run", tmp_path / "whole"
    options = {"epochs": 1, "progress": False, "save_every": 0.0}
    fit(SASRec(split.items, seed=1, **TINY, dropout=0.1), split, out=whole, **options)
    new = tmp_path / "new"
    fit(SASRec(split.items, seed=2, **TINY, dropout=0.4), split, out=new, **options)
    weights = {0.1: (whole / "model.safetensors").read_bytes(), 0.4: (new / "model.safetensors").read_bytes()}

    def prepare() -> None:
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(whole, run)

    def act() -> None:
        fit(SASRec(split.items, seed=2, **TINY, dropout=0.4), split, out=run, force=True, **options)

    def check(point: int) -> None:
        try:
            resume(run, split, progress=False)
        except FileNotFoundError:
            act()  # nothing that is in the way
        dropout = checkpoint.read_config(run)["config"]["dropout"]
        assert (run / "model.safetensors").read_bytes() == weights[dropout], point
        assert set(os.listdir(run)) == set(checkpoint.FILES)

    assert killed_at_every_point(act, prepare, check) > 10
