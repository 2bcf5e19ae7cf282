"""Studies: their manifests can run, an interrupted run goes on to the same result, tables say what is missing, splits
and protocols keep what they promise. No figure of a result is looked at.
"""

from __future__ import annotations

import copy
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from logs import needs_movies
from tiny_runs import write_sequences

from benchmarks import quality, study
from benchmarks.protocols import PROTOCOLS, SEEN, some
from benchmarks.sources import DAY, SPLITS
from benchmarks.study import Plan
from fastcl.recsys import Interactions, bundled
from fastcl.recsys.evaluation.ranking import draw_negatives
from fastcl.recsys.models import MODELS
from fastcl.recsys.studies.manifest import read, runs
from fastcl.recsys.studies.summary import Study

pytestmark = pytest.mark.usefixtures("one_thread")

MANIFESTS = sorted((Path(quality.__file__).parent / "studies").glob("*.json"))
RUN = {
    "label": "CLRec",
    "data": "tiny",
    "model": "clrec",
    "options": {"encoder": "sasrec", "dim": 8, "heads": 1, "blocks": 1, "max_len": 10, "batch": 16, "negatives": 60,
                "time_cuts": []},
    "plan": {"epochs": 3, "patience": 3, "valid": 40},
    "seeds": [0, 1],
}  # fmt: skip
MANIFEST: dict[str, Any] = {
    "measured by": "debiasing",
    "columns": ["pop100 hr@10", "recall@10", "diversity@10"],
    "paper": {"tiny": {"CLRec": {"pop100 hr@10": 0.5}, "sampled softmax": {"diversity@10": 3}}},
    "runs": [{"label": "popularity", "data": "tiny", "model": "popularity"}, RUN],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data")
    write_sequences(path, users=60, items=150, length=9)
    return path


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_every_run_of_a_manifest_can_be_begun(path: Path) -> None:
    manifest = json.loads(path.read_text())
    every = list(runs(manifest))
    assert len({run["id"] for run in every}) == len(every), "two runs with one id"
    assert {run["data"] for run in every} <= set(manifest["paper"])
    for run in every:
        protocol = run.get("measured by", manifest["measured by"])
        if protocol in quality.MEASURES:
            assert run["plan"] is None or run["plan"].keys() == {"epochs", "grid"}
            continue
        assert protocol in PROTOCOLS.keys() & SEEN.keys()
        assert run.get("split", "last-one") in SPLITS
        if run["model"] in MODELS:
            Plan(**run["plan"])
            options = {name: tuple(x) if isinstance(x, list) else x for name, x in (run["options"] or {}).items()}
            MODELS[run["model"]].Config(**options)


class Stop(Exception):
    """Ends a run as a signal would."""


def test_an_interrupted_run_goes_on_to_the_same_result(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, stopped = tmp_path / "whole.json", tmp_path / "stopped.json"
    quality.work(MANIFEST, whole, folder, tmp_path / "a", ["CLRec, tiny, seed 0"])

    def stop(watched: str, log: dict[str, Any]) -> None:
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(study, "_say", stop)
        with pytest.raises(Stop):
            quality.work(MANIFEST, stopped, folder, tmp_path / "b", ["CLRec, tiny, seed 0"])
    assert not stopped.exists()
    quality.work(MANIFEST, stopped, folder, tmp_path / "b", ["CLRec, tiny, seed 0"])
    (a,), (b,) = read(whole), read(stopped)
    for name in ("epochs", "best_epoch", "valid", "curve", "test", "impressions"):
        assert a[name] == b[name], name
    assert 0 < a["test"]["pop100 hr@10"] < 1

    quality.work(MANIFEST, stopped, folder, tmp_path / "b", ["CLRec, tiny, seed 0"])
    assert len(read(stopped)) == 1, "a finished run ran again"


def test_tables_mark_what_is_missing(folder: Path, tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    quality.work(MANIFEST, results, folder, tmp_path, ["popularity"])
    done = read(results)
    test = done[0]["test"]
    lines = Study(MANIFEST, done).to_markdown().splitlines()
    assert "| paper: CLRec | | 0.5000 |  |  |" in lines
    assert "| paper: sampled softmax | |  |  | 3 |" in lines
    diversity = f"{test['diversity@10']:.0f}"
    diversity = f"**{diversity}**" if test["diversity@10"] > 3 else diversity
    assert f"| popularity | 1 | {test['pop100 hr@10']:.4f} | {test['recall@10']:.4f} | {diversity} |" in lines
    assert "| CLRec | 0 of 2 | missing | missing | missing |" in lines
    assert lines[-3:] == ["Runs missing: 2.", "- CLRec, tiny, seed 0", "- CLRec, tiny, seed 1"]


def test_a_run_can_also_rank_among_drawn_items(folder: Path, tmp_path: Path) -> None:
    manifest = copy.deepcopy(MANIFEST)
    manifest["runs"][0] |= {"measured by": "ranking and drawn"}
    quality.work(manifest, tmp_path / "results.json", folder, tmp_path, ["popularity"])
    (run,) = read(tmp_path / "results.json")
    # The lists of 10 of 100 drawn items hold the target more often than those of 10 of all 150.
    assert 0 < run["test"]["recall@10"] <= run["test"]["uniform100 hr@10"] < 1


def test_the_picture_shows_what_ran(folder: Path, tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    assert quality.drawn(MANIFEST, []) is None
    quality.work(MANIFEST, results, folder, tmp_path, ["popularity"])
    found = quality.drawn(MANIFEST, read(results))
    assert found is not None
    assert found.startswith(b"\x89PNG")


def test_whatever_changes_a_result_changes_the_run() -> None:
    def ids(**changes: Any) -> set[str]:
        manifest = copy.deepcopy(MANIFEST)
        manifest["runs"][1] |= changes
        return {run["id"] for run in runs(manifest) if run["model"] == "clrec"}

    same = ids()
    assert ids(label="other") == same
    for change in ({"split": "shift"}, {"measured by": "ranking"}, {"options": {"dim": 9}}, {"seeds": [2]}):
        assert not ids(**change) & same, change


def test_drawn_negatives_are_of_no_test_user(folder: Path) -> None:
    data = Interactions.read(folder / "tiny.txt.gz", format="sequence")
    split = data.split()
    drawn = draw_negatives(split.test.history, split.test.target, split.counts, np.random.default_rng(0))
    again = draw_negatives(split.test.history, split.test.target, split.counts, np.random.default_rng(0))
    np.testing.assert_array_equal(drawn, again)
    for user, negatives in zip(split.test.user, drawn, strict=True):
        clicked = data.log.item[data.log.offsets[user] : data.log.offsets[user + 1]]  # validation and test too
        assert not np.isin(negatives, clicked).any()
        assert len(np.unique(negatives)) == 100
        assert (split.counts[negatives] > 0).all()


def test_the_validation_users_are_the_same_for_all_runs(folder: Path) -> None:
    cases = Interactions.read(folder / "tiny.txt.gz", format="sequence").split().valid
    few = some(cases, 40)
    assert len(few) == 40
    np.testing.assert_array_equal(few.user, some(cases, 40).user)
    np.testing.assert_array_equal(few.target, cases.target[few.user])
    assert len(some(cases, 0)) == len(some(cases, 10**6)) == len(cases)


def test_the_shift_trains_on_weekdays_before_and_tests_after() -> None:
    parts = SPLITS["shift"]("bundled:purchases", Path())
    split, weekends = parts.split, parts.others["weekends"]
    assert split.train.time is not None

    def weekday(time: np.ndarray) -> np.ndarray:
        return np.array(time // DAY, "datetime64[D]").astype(object)

    assert max(day.weekday() for day in weekday(split.train.time)) <= 4
    log = bundled("purchases").log
    assert log.time is not None
    for cases, days in ((split.test, range(5)), (weekends, range(5, 7))):
        assert len(cases) > 1000
        for n in range(0, len(cases), 97):
            mine = slice(log.offsets[cases.user[n]], log.offsets[cases.user[n] + 1])
            later = [
                (time, item)
                for time, item, day in zip(log.time[mine], log.item[mine], weekday(log.time[mine]), strict=True)
                if day.weekday() in days and time >= split.report.at
            ]
            assert cases.target[n] == later[0][1]
    # The same users have the same history, which ends before the test period.
    both, first, second = np.intersect1d(split.test.user, weekends.user, return_indices=True)
    assert len(both) > 1000
    np.testing.assert_array_equal(split.test.history.take(first).item, weekends.history.take(second).item)
    assert split.test.history.time.max() < split.report.at


def test_attributes_join_what_is_known_of_the_items(tmp_path: Path) -> None:
    for name in ("tagged", "classed"):
        with gzip.open(tmp_path / f"{name}.txt.gz", "wt") as file:
            file.write("".join(f"{user} 7 3 9 5\n" for user in "abc"))
    with gzip.open(tmp_path / "tagged.item2attributes.json.gz", "wt") as file:
        json.dump({"3": [11, 2], "7": [2], "9": []}, file)
    with gzip.open(tmp_path / "classed.item_class.txt.gz", "wt") as file:
        file.write("9 x\n3 y\n7 x\n5 y\n")
    expected = {"tagged": {"7": ["2"], "3": ["11", "2"], "9": [], "5": []},
                "classed": {"7": ["x"], "3": ["y"], "9": ["x"], "5": ["y"]}}  # fmt: skip
    for name, known in expected.items():
        split = SPLITS["attributes"](name, tmp_path).split
        (feature,) = split.items.features.values()
        found = {
            item: [feature.values[code - 1] for code in row if code]
            for item, row in zip(split.items.ids, feature.codes[1:], strict=True)
        }
        assert {item: sorted(values) for item, values in found.items()} == known
        assert len(split.test) == 3


@needs_movies
def test_merged_trains_on_all_but_the_last_item() -> None:
    split = SPLITS["merged"]("bundled:movies", Path()).split
    log = bundled("movies").log
    rows = range(len(log))
    assert [split.train.take([n]).item.tolist() for n in rows] == [log.take([n]).item[:-1].tolist() for n in rows]
    assert split.test.target.tolist() == [log.take([n]).item[-1] for n in rows]
    assert split.test.counts is not None
    assert split.test.counts.sum() == len(split.train.item)
