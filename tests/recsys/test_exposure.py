"""The study on random exposures reads its files as they are meant, measures what it says and compares the same
users."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import exposure
from benchmarks.exposure_data import auc, group, measured, ndcg, read, tenths
from fastcl.recsys.data import Histories
from fastcl.recsys.studies.manifest import runs

pytestmark = pytest.mark.usefixtures("one_thread")
ITEMS = 60  # of which the last two are no candidates


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Users 0 to 15: user u clicks u, u + 1, ... in training; user 3 has no click and so no row of its own."""
    path = tmp_path_factory.mktemp("kuairand")

    def write(name: str, head: str, lines: list[str]) -> None:
        with gzip.open(path / f"{name}.csv.gz", "wt") as file:
            file.write("\n".join([head, *lines]) + "\n")

    tags = ["1", "2|1", ""]
    core = [f"{i},{tags[i % 3]},{int(i != 59)},{int(i != 58)}" for i in range(ITEMS)]
    write("items", "item,tag,pool,core", core)
    users = [u for u in range(16) if u != 3]
    write("train", "user,unknown,items", [f"{u},0,{u} {u + 1} {u + 2} {u + 1}" for u in users])
    # User 0 clicked two and passed on two; user 4 passed on nothing; user 8 saw nothing.
    shown = {0: ("20 58", "21 30"), 4: ("20", ""), 2: ("22", "23 24"), 6: ("6 40", "41"), 3: ("5", "6")}
    write("random", "user,clicked,passed", [f"{u},{yes},{no}" for u, (yes, no) in shown.items()])
    late = ["2,30,1,0,0", "2,30,2,1,0", "2,31,3,0,0", "1,7,5,1,1"]
    late += [f"{u},{item},5,{click},0" for u in (6, 8) for item, click in ((40, 1), (41, 0))]
    write("standard_late", "user,item,time,click,long_view", late)
    return path


def test_the_files_are_read_as_they_are_meant(folder: Path) -> None:
    data = read(folder)
    assert len(data.split.train) == 15
    assert data.split.train.item[:4].tolist() == [1, 2, 3, 2]
    assert data.split.items.features["tag"].values == ("1", "2")
    assert data.split.items.features["tag"].codes[1:4].tolist() == [[1, 0], [2, 1], [0, 0]]
    assert np.flatnonzero(~data.candidate).tolist() == [0, 59, 60]
    assert data.impressions[[31, 32, 8, 20]].tolist() == [3, 2, 2, 1]
    assert data.user[group(data, "uniform", "choosing")].tolist() == [0]
    assert data.user[group(data, "uniform", "reporting")].tolist() == [2, 6]
    assert data.user[group(data, "biased", "reporting")].tolist() == [2, 6], "a pair with a click is clicked"


def test_auc_and_ndcg_by_hand() -> None:
    assert auc(np.array([2.0, 1.0]), np.array([1.0, 0.0, 5.0])) == pytest.approx((0 + 1 + 1 + 0 + 0.5 + 1) / 6)
    gain = 1 / np.log2(np.arange(2, 7))
    clicked = np.array([False, True, False, True, False, False])
    score = np.array([6.0, 5.0, 4.0, 1.0, 3.0, 2.0])  # the clicked ones are second and last
    assert ndcg(score, clicked) == pytest.approx(gain[1] / (gain[0] + gain[1]))
    assert ndcg(score[:2], clicked[:2]) == pytest.approx(gain[1] / gain[0])
    assert ndcg(-score, np.ones(6, bool)) == pytest.approx(1.0)


def test_recall_ranks_the_candidates_without_the_train_clicks(folder: Path) -> None:
    data = read(folder)

    def rising(histories: Histories) -> np.ndarray:
        return np.tile(np.arange(ITEMS + 1.0), (len(histories), 1))

    # 58 candidates, of which user 2 has seen the videos 2, 3 and 4 and user 6 the videos 6, 7 and 8: 50 of 55.
    found = measured(rising, data, "uniform", "reporting", chunk=1)
    assert found[:, 0].tolist() == [0.0, 0.0]
    assert found[:, 2].tolist() == [1.0, 1.0], "video 22 is among the 50, and 6 is no candidate of user 6"
    falling = measured(lambda histories: -rising(histories), data, "uniform", "choosing")
    ideal = 1 + 1 / np.log2(3)
    assert falling[0].tolist() == pytest.approx([0.5, (1 + 1 / np.log2(5)) / ideal, 1.0]), "58 is no candidate"
    found = measured(lambda h: np.where(rising(h) == 23, -1.0, rising(h)), data, "uniform", "reporting")
    assert found[:, 2].tolist() == [0.0, 1.0]


def test_settings_are_chosen_by_one_group_and_reported_on_another(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = {"dim": 4, "hidden": 4, "heads": 1, "batch": 16, "negatives": 20, "max_len": 4}
    methods: dict[str, tuple[str, dict[str, Any]]] = {
        exposure.BASE: ("clrec", tiny | {"objective": "full_softmax"}),
        "CLRec": ("clrec", tiny | {"log_q": 0.5}),
        "impressions": ("impressions", tiny),
    }
    monkeypatch.setattr(exposure, "METHODS", methods)
    monkeypatch.setattr(exposure, "SEARCHED", tuple(methods))
    data = read(folder)
    finished = [run | exposure.do(run, tmp_path / run["id"], data) for run in runs({"runs": exposure.search()})]
    assert len(finished) == 2 * len(methods)
    for run, value in zip(finished, (0.6, 0.5, 0.4, 0.5, 0.7, 0.3), strict=True):
        run["choosing"]["uniform"]["AUC"] = value
    first, second = ({"temperature": t} for t in exposure.TEMPERATURES)
    assert exposure.best(finished) == {exposure.BASE: first, "CLRec": second, "impressions": first}
    more = [run for run in runs({"runs": exposure.further(finished)}) if run["id"] not in {r["id"] for r in finished}]
    assert [(run["label"], run["seed"]) for run in more] == [(label, seed) for seed in (1, 2) for label in methods]
    finished.append(more[0] | exposure.do(more[0], tmp_path / more[0]["id"], data))
    rows = {(row["feed"], row["method"]): row for row in exposure.report(finished, data, tmp_path)}
    assert len(rows) == 2 * (len(methods) + len(("popularity", "co-occurrence")))
    base, clrec = rows["uniform", exposure.BASE], rows["uniform", "CLRec"]
    assert (base["seeds"], clrec["seeds"], base["AUC"]["difference"]) == (2, 1, 0.0)

    def aucs(run: dict[str, Any]) -> np.ndarray:
        return exposure.by_user(exposure.loaded(run, data, tmp_path), data, "uniform", "reporting")[:, 0]

    of_base = np.mean([aucs(finished[0]), aucs(finished[-1])], 0)
    assert base["AUC"]["mean"] == pytest.approx(of_base.mean())
    difference = aucs(finished[4]) - of_base
    assert clrec["AUC"]["difference"] == pytest.approx(difference.mean())
    assert clrec["AUC"]["standard error"] == pytest.approx(difference.std(ddof=1) / 2**0.5)
    moved = {row["weight"]: row["biased"] for row in exposure.shifted(finished, data, tmp_path)}
    assert moved[0.0] == pytest.approx(finished[0]["choosing"]["biased"])
    assert list(moved) == list(exposure.SHIFTS)


def test_a_shift_adds_a_constant_of_each_item() -> None:
    class Flat:
        def scores(self, histories: Histories) -> torch.Tensor:
            return torch.ones(len(histories), 3)

    found = exposure.Shifted(Flat(), np.array([0.0, 1.0, -2.0])).scores(Histories.from_lists([[1], [2]]))
    assert found.tolist() == 2 * [[1.0, 2.0, -1.0]]


def test_tenths_go_from_the_least_to_the_most_clicked(folder: Path) -> None:
    found = tenths(read(folder))
    assert [row["clicks"] for row in found] == sorted(row["clicks"] for row in found)
    assert sum(row["clicks"] for row in found) == pytest.approx(1.0)
    assert sum(row["impressions"] for row in found) == pytest.approx(1.0)
    # The least clicked six are the videos 18 to 23. Two users clicked on 20, one on 22, and one passed on 21 and 23.
    assert found[0]["click rate"] == pytest.approx(3 / 5)
    assert np.isnan(found[4]["click rate"])
