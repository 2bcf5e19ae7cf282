"""Comparison of models: means and spread, popularity index, the paired test, and the commands evaluate and compare."""

from __future__ import annotations

import csv
import io
import json
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pytest
import torch

from fastcl.recsys import Histories, Interactions, Items, SASRec, save
from fastcl.recsys.cli import main
from fastcl.recsys.data import Split, fingerprints
from fastcl.recsys.evaluation.comparison import Comparison, compare
from fastcl.recsys.evaluation.measures import COUNTS
from fastcl.recsys.evaluation.paired import paired_test, swap_test
from fastcl.recsys.evaluation.ranking import evaluate

pytestmark = pytest.mark.usefixtures("one_thread")


class Fixed:
    """The same random scores for every history."""

    def __init__(self, items: int, seed: int) -> None:
        self.row = torch.from_numpy(np.random.default_rng(seed).normal(size=items + 1)).float()

    def scores(self, histories: Histories) -> torch.Tensor:
        return self.row.repeat(len(histories), 1)


class Rows:
    """Scores for each user, whose histories come all at once."""

    def __init__(self, scores: torch.Tensor) -> None:
        self.table = scores

    def scores(self, histories: Histories) -> torch.Tensor:
        return self.table


@pytest.fixture
def split() -> Split:
    rng = np.random.default_rng(0)
    log = Histories.from_lists([rng.integers(1, 41, 12).tolist() for _ in range(60)])
    return Interactions(Items(tuple(f"i{n}" for n in range(40))), tuple(f"u{n}" for n in range(60)), log).split()


def test_rows_are_means_and_spreads_of_evaluate(split: Split) -> None:
    models = {"a": [Fixed(40, 1), Fixed(40, 2), Fixed(40, 3)], "b": [Fixed(40, 4)]}
    found = compare(models, split.test, k=(5,))
    alone = [evaluate(scorer, split.test, k=(5,)) for scorer in models["a"]]
    a, b = found.rows
    for name in ("recall@5", "ndcg@5", "popularity@5"):
        values = [result[name] for result in alone]
        assert a[name] == pytest.approx(np.mean(values))
        assert a[f"{name} sd"] == pytest.approx(np.std(values, ddof=1))
        assert f"{name} sd" not in b
    most = max(a["popularity@5"], b["popularity@5"])
    assert (a["runs"], b["runs"]) == (3, 1)
    assert a["popularity index@5"] == pytest.approx(a["popularity@5"] / most)
    assert max(a["popularity index@5"], b["popularity index@5"]) == 1.0
    test = next(test for test in found.tests if test["metric"] == "ndcg@5")
    assert (test["name"], test["against"], test["metric"]) == ("b", "a", "ndcg@5")
    assert test["difference"] == pytest.approx(b["ndcg@5"] - a["ndcg@5"])
    table = list(csv.DictReader(io.StringIO(found.to_csv())))
    assert [row["name"] for row in table] == ["a", "b"]
    assert float(table[0]["recall@5"]) == a["recall@5"]
    assert table[1]["recall@5 sd"] == ""
    with pytest.raises(ValueError, match="models: expected at least one scorer per name"):
        compare({"a": []}, split.test)


def test_paired_test_against_all_sign_patterns() -> None:
    rng = np.random.default_rng(1)
    for users in (1, 4, 13, 16):  # the last one draws patterns
        a, b = rng.normal(0.4, 1.0, users), np.zeros(users)
        sums = np.array([np.dot(signs, a) for signs in product((-1, 1), repeat=users)])
        exact = float((np.abs(sums) >= abs(a.sum()) - 1e-9).mean())
        found = paired_test(a, b, draws=20000)
        slack = 4 * np.sqrt(exact * (1 - exact) / 20000) if users > 13 else 1e-12
        assert found["p"] == pytest.approx(exact, abs=slack)
        assert users == 1 or found["low"] < found["difference"] < found["high"]
        same = np.concatenate([a, [0.5, 0.5]]), np.concatenate([b, [0.5, 0.5]])  # who does not differ decides nothing
        assert paired_test(*same, draws=20000)["p"] == found["p"]
    assert paired_test(a, b) == paired_test(a, b)
    assert paired_test(a, a)["p"] == 1.0
    with pytest.raises(ValueError, match="a, b: expected two equally long"):
        paired_test(a, b[:3])


def test_paired_test_is_that_of_scipy() -> None:
    stats = pytest.importorskip("scipy.stats", reason="needs scipy")
    rng = np.random.default_rng(3)
    for users, resamples in ((9, np.inf), (60, 4000)):
        a, b = rng.random(users), rng.random(users) + 0.1
        theirs = stats.permutation_test(
            (a, b), lambda x, y: np.mean(x) - np.mean(y), permutation_type="samples", n_resamples=resamples, rng=0
        )
        slack = 1e-12 if users == 9 else 5 * np.sqrt(2 * theirs.pvalue / 4000)
        found = paired_test(a, b, draws=20000)
        assert found["difference"] == pytest.approx(theirs.statistic)
        assert found["p"] == pytest.approx(theirs.pvalue, abs=slack)


def test_the_best_value_has_the_stars_of_its_worst_test() -> None:
    def test(name: str, against: str, p: float) -> dict[str, object]:
        return {"name": name, "against": against, "metric": "recall@5", "difference": 0.1, "low": 0.0, "high": 0.2,
                "p": p, "p holm": p}  # fmt: skip

    rows = [
        {"name": "a_1", "runs": 2, "recall@5": 0.3, "recall@5 sd": 0.01, "diversity@5": 9.0},
        {"name": "b", "runs": 1, "recall@5": 0.4, "diversity@5": 30.0},
        {"name": "c", "runs": 1, "recall@5": 0.2, "diversity@5": 5.0},
    ]
    found = Comparison(rows, [test("b", "a_1", 0.0005), test("c", "a_1", 0.9), test("c", "b", 0.02)])
    assert found.best("recall@5") == ("b", "*")
    assert found.best("diversity@5") is None
    text = found.to_latex().splitlines()
    assert r"a\_1 & 2 & 0.3000 $\pm$ 0.0100 & 9 \\" in text
    assert r"b & 1 & \textbf{0.4000}* & 30 \\" in text
    assert r"b & a\_1 & recall@5 & $+0.1000$ & $+0.0000$ to $+0.2000$ & 0.0005*** \\" in text
    # Of values that cannot be told apart the best has no star; neither has a row that is not tested, as a floor is not.
    assert Comparison(rows, [test("b", "a_1", 0.001), test("c", "b", 0.06)]).best("recall@5") == ("b", "")
    floor = {"name": "floor", "runs": 1, "recall@5": 0.5}
    untested = Comparison([*rows, floor], found.tests)
    assert untested.best("recall@5") == ("floor", "")
    assert r"floor & 1 & \textbf{0.5000} & -- \\" in untested.to_latex().splitlines()


def test_one_case_has_no_interval() -> None:
    assert paired_test(np.array([1.0]), np.array([0.5])) == {"difference": 0.5, "p": 1.0}


def test_paired_test_keeps_its_level() -> None:
    rng = np.random.default_rng(2)
    ps = [paired_test(rng.random(40), rng.random(40), draws=199, seed=n)["p"] for n in range(400)]
    share = np.mean(np.array(ps) <= 0.05)
    assert abs(share - 0.05) < 4 * np.sqrt(0.05 * 0.95 / 400)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    path = tmp_path / "log.csv"
    rows = [f"u{user},i{rng.integers(30)},{step}" for user in range(40) for step in range(8)]
    path.write_text("user,item,time\n" + "\n".join(rows) + "\n")
    return path


def run_folder(folder: Path, log: Path, seed: int, dim: int = 8, **record: object) -> Path:
    items = Interactions.read(log).items
    data = {"path": str(log), "user": "user", "item": "item", "time": "time"}
    save(SASRec(items, seed=seed, dim=dim).eval(), folder, {"data": data, "seed": seed, "seen": "mask", **record})
    return folder


def call(*arguments: str | Path) -> int:
    return main.main([str(a) for a in arguments])


def test_compare_command(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [run_folder(tmp_path / f"r{seed}", log, seed) for seed in (0, 1)]
    runs.append(run_folder(tmp_path / "wide", log, 0, dim=16))
    assert call("compare", *runs, "--k", "5", "--csv", tmp_path / "t.csv", "--latex", tmp_path / "t.tex", "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert [(row["name"], row["runs"]) for row in printed["rows"]] == [
        ("sasrec dim=8", 2), ("sasrec dim=16", 1), ("floor: popularity", 1), ("floor: co-occurrence", 1),
    ]  # fmt: skip
    tests = [(test["name"], test["against"], test["metric"]) for test in printed["tests"]]
    assert tests == [("sasrec dim=16", "sasrec dim=8", metric) for metric in ("recall@5", "ndcg@5")]
    assert len((tmp_path / "t.csv").read_text().splitlines()) == 5
    assert (tmp_path / "t.tex").read_text() == Comparison(printed["rows"], printed["tests"]).to_latex()
    assert call("compare", *runs, "--protocol", "uniform100") == 0
    text = capsys.readouterr().out
    for word in ("hr@10", "±", "paired randomisation test", "floor: popularity"):
        assert word in text
    assert call("compare", *runs, "--metrics", "ndcg,gini") == 0
    tested = capsys.readouterr().out.split("p (Holm)")[1]
    assert "gini@10" in tested
    assert "-" in tested.split()  # in place of an interval


def test_runs_that_do_not_belong_together_are_refused(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = run_folder(tmp_path / "a", log, 0)
    other_log = tmp_path / "other.csv"
    header, *rows = log.read_text().splitlines()
    rows[0] = rows[0].replace(",0", ",9")  # the same users and items, another last item
    other_log.write_text("\n".join([header, *rows]) + "\n")
    items = Interactions.read(log).items
    assert Interactions.read(other_log).items.ids == items.ids
    other = run_folder(tmp_path / "b", other_log, 0)
    kept = run_folder(tmp_path / "c", log, 0, seen="keep")
    for arguments, message in (
        ((first, other), "expected runs on the same data"),
        ((first, kept), "expected --seen for all"),
        ((first, first), "expected different folders"),
        ((first, tmp_path), "not a run folder"),
        ((first, "--metrics", "recal"), "metrics: expected names among"),
        ((first, "--metrics", "distance"), "expected item features"),
    ):
        assert call("compare", *arguments) == 2
        error = capsys.readouterr().err
        assert message in error
        assert len(error.strip().splitlines()) == 1
    assert call("compare", first, kept, "--seen", "keep") == 0


def test_runs_whose_times_differ_are_refused_for_that(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = []
    for name, factor in (("seconds", 1), ("days", 86400)):
        header, *rows = log.read_text().splitlines()
        cells = [row.split(",") for row in rows]
        own = tmp_path / f"{name}.csv"
        own.write_text("\n".join([header, *(f"{user},{item},{int(time) * factor}" for user, item, time in cells)]))
        digest = fingerprints.fingerprint(Interactions.read(own).split())
        runs.append(run_folder(tmp_path / name, own, 0, data_sha256=digest))
    assert call("compare", *runs) == 2
    error = capsys.readouterr().err
    assert f"RUN: expected runs on the same data, got {tmp_path / 'seconds.csv'} and" in error


def test_a_run_and_its_copy_are_no_two_seeds(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, copy, other = (run_folder(tmp_path / name, log, seed) for name, seed in (("a", 0), ("b", 0), ("c", 1)))
    assert call("compare", run, copy, other) == 0
    assert f"note: {run}, {copy} have the same settings and the same seed" in capsys.readouterr().err
    assert call("compare", run, other) == 0
    assert "same seed" not in capsys.readouterr().err


def test_features_and_titles_are_those_of_any_run(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "items.csv"
    table.write_text("item,colour,name\n" + "".join(f"i{n},{'red' if n % 2 else 'blue'},N{n}\n" for n in range(30)))
    plain, named = run_folder(tmp_path / "plain", log, 0), tmp_path / "named"
    described = Interactions.read(log, item_features=table, title="name").items
    data = {"path": str(log), "item_features": str(table), "title": "name"}
    save(SASRec(described, seed=0, dim=8).eval(), named, {"data": data, "seed": 0, "seen": "mask"})
    for first, second in ((plain, named), (named, plain)):
        assert call("compare", first, second, "--metrics", "distance", "--json") == 0
        assert json.loads(capsys.readouterr().out)["rows"][0]["distance@10"] > 0


def test_evaluate_command(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_folder(tmp_path / "a", log, 0)
    more = ["--by", "popularity,length", "--metrics", "recall,auc,gini", "--robustness", "0.5"]
    assert call("evaluate", run, "--k", "5,10", *more, "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert set(printed["results"]) == {"popularity", "co-occurrence", "sasrec"}
    expected = {"recall@5", "recall@10", "auc", "gini@5", "gini@10", *COUNTS}
    assert set(printed["results"]["sasrec"]) == expected
    assert set(printed["by"]["sasrec"]) == {"popularity", "length"}
    noise = [(row["kind"], row["ratio"]) for row in printed["robustness"]["sasrec"]]
    assert noise == [("delete", 0.5), ("replace", 0.5)]
    assert call("evaluate", run, *more) == 0
    text = capsys.readouterr().out
    for word in ("recall@10 by popularity", "recall@10 by length", "under noise", "40 cases"):
        assert word in text
    for arguments, message in (
        (("--by", "age"), "by: expected names among popularity, frequency, length, got 'age'"),
        (("--robustness", "2"), "--robustness: expected numbers from 0 to 1"),
        (("--robustness", "x"), "--robustness: expected numbers"),
        (("--protocol", "pop100", "--metrics", "gini"), "needs whole lists"),
    ):
        assert call("evaluate", run, *arguments) == 2
        assert message in capsys.readouterr().err


def test_every_pair_metric_and_cut_off_is_tested_and_corrected(split: Split) -> None:
    """Whatever the order of the names."""
    models = {"one": [Fixed(40, 1)], "two": [Fixed(40, 2), Fixed(40, 3)], "three": [Fixed(40, 4)]}
    metrics = ("recall", "mrr", "auc")
    found = compare(models, split.test, k=(3, 9), metrics=metrics)
    named = {(frozenset((t["name"], t["against"])), t["metric"]): t for t in found.tests}
    expected = {(frozenset(pair), m) for pair in combinations(models, 2) for m in ("recall@3", "recall@9", "auc")}
    expected |= {(frozenset(pair), m) for pair in combinations(models, 2) for m in ("mrr@3", "mrr@9")}
    assert (named.keys(), len(found.tests)) == (expected, 15)
    rows = {row["name"]: row for row in found.rows}
    for test in found.tests:
        gain = rows[test["name"]][test["metric"]] - rows[test["against"]][test["metric"]]
        assert test["difference"] == pytest.approx(gain)
    ranked = sorted(test["p"] for test in found.tests)
    for test in found.tests:  # the largest of (number of the tests not yet rejected) * p, over those that come first
        places = [(15 - n) * p for n, p in enumerate(ranked) if p <= test["p"]]
        assert test["p holm"] == pytest.approx(min(1.0, max(places)))
    turned = compare(dict(reversed(models.items())), split.test, k=(3, 9), metrics=metrics)
    for test in turned.tests:
        other = named[frozenset((test["name"], test["against"])), test["metric"]]
        assert (test["p"], test["p holm"]) == (other["p"], other["p holm"])
        assert test["difference"] == pytest.approx(-other["difference"])


OF_ALL_LISTS = ("diversity", "coverage", "popularity", "gini", "novelty", "distance")


def test_metrics_of_all_lists_are_tested_by_users_who_swap_theirs(split: Split) -> None:
    """Against all ways to swap, with the figures of `evaluate` for models that are mixed by hand."""
    cases = split.test.take(np.arange(6))
    vectors = torch.from_numpy(np.random.default_rng(5).normal(size=(41, 3)))
    rng = np.random.default_rng(6)
    favours = torch.tensor([0.0] * 35 + [1.5] * 6)  # of model "one": its lists are more alike

    def rows(extra: torch.Tensor | float = 0.0) -> torch.Tensor:
        return torch.from_numpy(rng.normal(size=(6, 41))).float() + extra

    of = {"one": [rows(favours), rows(favours)], "two": [rows()]}

    def values(scores: torch.Tensor) -> dict[str, float]:
        return evaluate(Rows(scores), cases, k=(3,), metrics=OF_ALL_LISTS, vectors=vectors)

    differences = []
    for swaps in product((False, True), repeat=6):
        swapped = torch.tensor(swaps)[:, None]
        (two,) = of["two"]
        mixed = [(values(torch.where(swapped, one, two)), values(torch.where(swapped, two, one))) for one in of["one"]]
        differences.append({f"{m}@3": np.mean([a[f"{m}@3"] - b[f"{m}@3"] for a, b in mixed]) for m in OF_ALL_LISTS})
    models = {name: [Rows(scores) for scores in each] for name, each in of.items()}
    found = compare(models, cases, k=(3,), metrics=OF_ALL_LISTS, vectors=vectors)
    assert [test["metric"] for test in found.tests] == [f"{name}@3" for name in OF_ALL_LISTS]
    for test in found.tests:
        drawn = np.array([each[test["metric"]] for each in differences])
        assert test["difference"] == pytest.approx(drawn[0])
        assert test["p"] == np.mean(np.abs(drawn) >= abs(drawn[0]) - 1e-12)
        assert "low" not in test
        assert found.best(test["metric"]) is None  # the highest Gini index is not the best
    assert len({test["p"] for test in found.tests}) > 1
    assert "--" in found.to_latex()


def test_swaps_that_are_drawn_agree_with_the_test_of_means() -> None:
    a, b = np.random.default_rng(7).random((2, 40))
    found = swap_test(lambda swapped: {"mean": np.where(swapped, b - a, a - b).mean()}, users=40, draws=2000)["mean"]
    whole = paired_test(a, b)
    assert found["difference"] == pytest.approx(whole["difference"])
    assert found["p"] == pytest.approx(whole["p"], abs=4 * np.sqrt(whole["p"] * (1 - whole["p"]) * (1 / 2000 + 1e-4)))


def test_metrics_that_nobody_asked_for_are_not_tested(split: Split) -> None:
    found = compare({"one": [Fixed(40, 1)], "two": [Fixed(40, 2)]}, split.test)
    assert [test["metric"] for test in found.tests] == ["recall@10", "ndcg@10"]
