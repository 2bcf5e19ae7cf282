"""Cut-offs and metrics are named alike wherever one is asked for: 10, (10, 50), "10,50", "recall@10"."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastcl.recsys import (
    Interactions,
    MultiCLRec,
    Popularity,
    SASRec,
    Split,
    compare,
    evaluate,
    export,
    fit,
    intents,
    nearest,
    rank_cases,
    recommend,
    recommend_users,
    robustness,
    top_k,
)
from fastcl.recsys.cli import main
from fastcl.recsys.evaluation.cutoffs import cutoffs
from fastcl.recsys.training.state import Settings

pytestmark = pytest.mark.usefixtures("one_thread")
ROWS = {"user": np.repeat(range(9), 5), "item": [(u * s) % 13 for u in range(9) for s in range(5)], "time": range(45)}


def data() -> Interactions:
    return Interactions.read({name: list(column) for name, column in ROWS.items()})


def split() -> Split:
    return data().split()


def test_one_list_of_cut_offs_however_it_is_written() -> None:
    held = split()
    floor = Popularity(held.counts, held.items)
    for one, more in ((10, 5), ("10", "5"), ((10,), [5]), (np.int64(10), np.array([5]))):
        assert evaluate(floor, held.test, k=one) == evaluate(floor, held.test, k=(10,))
        assert evaluate(floor, held.test, k=more) == evaluate(floor, held.test, k=(5,))
    both: Any
    for both in ((5, 10), [5, 10], "5,10", np.array([5, 10])):
        assert list(evaluate(floor, held.test, k=both, metrics="recall"))[:2] == ["recall@5", "recall@10"]
        assert rank_cases(floor, held.test, k=both).k == (5, 10)
        assert "ndcg@5" in robustness(floor, held.test, k=both, ratios=(0.0,), kinds=("delete",))[0]
        assert "ndcg@5" in compare({"it": [floor]}, held.test, k=both).rows[0]


def test_a_metric_may_name_its_cut_off() -> None:
    held = split()
    floor = Popularity(held.counts)
    for metrics in ("recall@5,ndcg,auc", ["recall@5", "ndcg", "auc"]):
        found = evaluate(floor, held.test, k=(2, 10), metrics=metrics)
        assert list(found)[:4] == ["recall@5", "ndcg@2", "ndcg@10", "auc"]
    whole = evaluate(floor, held.test, k=(2, 5, 10), metrics=("recall", "ndcg", "auc"))
    assert {name: whole[name] for name in found} == found
    row = compare({"it": [floor]}, held.test, metrics="popularity@3").rows[0]
    assert row["popularity index@3"] == 1.0
    for wrong, error, message in (
        ("recal@5", ValueError, "metrics: expected names among recall, .*, got 'recal@5'"),
        ("recall@five", ValueError, "metrics: expected a whole number from 1 after the @, got 'recall@five'"),
        ("auc@5", ValueError, "metrics: auc has no cut-off, got 'auc@5'"),
        ([5], TypeError, "metrics: expected names such as recall or recall@10, got 5"),
    ):
        with pytest.raises(error, match=message):
            evaluate(floor, held.test, metrics=wrong)


@pytest.mark.parametrize("k", [0, -1, True, 1.5, (), "", "ten", "5,", (5, 5), [5, 0], None, 2**63])
def test_what_is_no_cut_off_is_refused(k: Any) -> None:
    with pytest.raises(ValueError, match="-k: expected (whole numbers from 1|different cut-offs)"):
        cutoffs(k, "-k")


def test_lists_have_one_length(tmp_path: Path) -> None:
    log = data()
    model = SASRec(log.items, dim=8, seed=0)
    ids = [[log.items.ids[0]]]
    scores = model.scores(log.log).detach()
    many = MultiCLRec(log.items, dim=8, intents=2)
    for k in (3, "3", (3,)):
        assert len(recommend(model, ids, k)[0]) == 3
        assert len(next(recommend_users(model, log, k, "keep").rows)[1]) == 3
        assert top_k(scores, log.log, k, "keep")[0].shape == (9, 3)
        assert export(model, tmp_path, k=k)["items"] == len(log.items)
        assert intents(many, log.log, k)["list_share"] > 0
    for call in (
        lambda k: recommend(model, ids, k),
        lambda k: recommend_users(model, log, k),
        lambda k: top_k(scores, log.log, k),
        lambda k: export(model, tmp_path, k=k),
        lambda k: intents(many, log.log, k),
        lambda k: nearest(lambda queries, k: (queries, queries), np.zeros((1, 2), np.float32), k),
    ):
        with pytest.raises(ValueError, match=r"k: expected one whole number, got \(3, 5\)"):
            call((3, 5))


def test_any_mean_over_cases_decides_which_epoch_is_best(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held = split()
    for asked, metric in (("recall", "recall@10"), ("ndcg@3", "ndcg@3"), ("auc", "auc")):
        out = tmp_path / metric
        lines = fit(SASRec(held.items, dim=8, seed=0), held, epochs=3, metric=asked, out=out, progress=False)
        assert json.loads((out / "config.json").read_text())["metric"] == metric
        best = [line for line in lines if line["best"]][-1]
        assert best[metric] == max(line[metric] for line in lines)
        assert {"ndcg@10", "recall@10"} <= set(best)
    for asked in ("diversity", "recall@0", "auc@10", "ndcg,recall"):
        with pytest.raises(ValueError, match="metric: expected"):
            fit(SASRec(held.items, dim=8), held, epochs=1, metric=asked)
    with pytest.raises(ValueError, match="metric: expected one with its cut-off, such as ndcg@10, got 'ndcg'"):
        Settings(1, 0.1, metric="ndcg")
    table = tmp_path / "log.csv"
    table.write_text("\n".join(["user,item,time", *map("{},{},{}".format, *ROWS.values())]) + "\n")
    run = str(tmp_path / "run")
    assert main.main(["train", str(table), "--model", "sasrec", "--epochs", "1", "--metric", "mrr@3", "-o", run]) == 0
    assert "mrr@3 0." in capsys.readouterr().out
    assert main.main(["evaluate", run, "-k", "2,5", "--metrics", "recall@3,ndcg", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["results"]["sasrec"]
    assert list(found)[:3] == ["recall@3", "ndcg@2", "ndcg@5"]
    assert main.main(["evaluate", run, "-k", "ten"]) == 2
    assert "-k: expected whole numbers from 1, such as 10 or 10,50, got 'ten'" in capsys.readouterr().err
    assert main.main(["evaluate", run, "--metrics", "recall@x"]) == 2
    assert "--metrics: expected a whole number from 1 after the @, got 'recall@x'" in capsys.readouterr().err
