"""The command `study`: runs of a manifest are trained once, go on after a kill, and end in tables that say what is
missing; a manifest that cannot be worked through is refused before anything is trained."""

from __future__ import annotations

import csv
import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import TINY, stopped_after, write_table

from fastcl.recsys import Interactions, Popularity, SASRec, evaluate, fit, load, study
from fastcl.recsys.cli import main
from fastcl.recsys.studies.manifest import read, runs, title
from fastcl.recsys.studies.summary import Study, cell
from fastcl.recsys.training import loop

pytestmark = pytest.mark.usefixtures("one_thread")
MANIFEST: dict[str, Any] = {
    "about": "A study of nothing.",
    "data": {"tiny": {"path": "log.csv", "seen": "keep"}},
    "columns": ["recall@3", "ndcg@3", "auc"],
    "paper": {"tiny": {"theirs_1": {"recall@3": 0.1, "ndcg@3": 0.99}}},
    "notes": {"tiny": "Nine users."},
    "runs": [
        {"label": "popularity", "data": "tiny", "model": "popular"},
        {
            "label": "SASRec", "data": "tiny", "model": "sasrec", "options": TINY, "vary": {"lr": [0.001, 0.01]},
            "plan": {"epochs": 2, "metric": "auc"}, "seeds": [0, 1],
        },
    ],
}  # fmt: skip


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_table(tmp_path)
    return written(tmp_path, MANIFEST)


def written(folder: Path, manifest: dict[str, Any]) -> Path:
    path = folder / "study.json"
    path.write_text(json.dumps(manifest))
    return path


def test_a_study_is_worked_through_and_shown(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = study(file)
    assert len(first.missing) == 5
    assert "| SASRec, lr 0.001 | 0 of 2 | missing | missing | missing |" in first.to_markdown().splitlines()
    part = study(file, run=True, only=["lr 0.01, tiny, seed 1", "popularity"], progress=False)
    assert [title(run) for run in part.done] == ["SASRec, lr 0.01, tiny, seed 1", "popularity, tiny, seed 0"]
    with stopped_after(1):
        study(file, run=True, progress=False)
    found = study(file, run=True, progress=False)
    assert found.missing == []
    monkeypatch.setattr(loop, "epoch", None)
    assert study(file, run=True, progress=False) == found, "a finished run ran again"

    split = Interactions.read(file.with_name("log.csv")).split()
    options: dict[str, Any] = {"seen": "keep", "metrics": MANIFEST["columns"]}
    tests = {title(run): run["test"] for run in found.done}
    floor = evaluate(Popularity(split.counts, split.items), split.test, **options)
    assert tests["popularity, tiny, seed 0"] == {name: floor[name] for name in MANIFEST["columns"]}
    for run in found.done:
        if run["model"] == "sasrec":
            again = evaluate(load(file.with_suffix(".runs") / run["id"]), split.test, **options)
            assert run["test"] == {name: again[name] for name in MANIFEST["columns"]}
    values = [tests[f"SASRec, lr 0.001, tiny, seed {seed}"]["auc"] for seed in (0, 1)]
    text = found.to_markdown()
    assert f"{statistics.mean(values):.4f} ({statistics.stdev(values):.4f})" in text
    assert "| paper: theirs_1 | | 0.1000 | 0.9900 |  |" in text.splitlines()
    assert "Nine users." in text
    assert "**Bold**" in text
    rows = list(csv.DictReader(found.to_csv().splitlines()))
    assert [(row["name"], row["given"], row["done"]) for row in rows] == [
        ("theirs_1", "yes", "0"), ("popularity", "no", "1"),
        ("SASRec, lr 0.001", "no", "2"), ("SASRec, lr 0.01", "no", "2"),
    ]  # fmt: skip
    assert float(rows[2]["auc"]) == statistics.mean(values)
    assert float(rows[2]["auc sd"]) == statistics.stdev(values)
    latex = found.to_latex()
    assert r"theirs\_1 &  & 0.1000 & 0.9900 &  \\" in latex
    assert rf"& {statistics.mean(values):.4f} $\pm$ {statistics.stdev(values):.4f} \\" in latex
    assert latex.count(r"\midrule") == 2


def test_a_run_of_a_study_is_the_run_of_its_settings(file: Path, tmp_path: Path) -> None:
    found = study(file, run=True, only=["lr 0.01, tiny, seed 1"], progress=False)
    split = Interactions.read(tmp_path / "log.csv").split()
    model = SASRec(split.items, seed=1, lr=0.01, **TINY)
    fit(model, split, epochs=2, metric="auc", seed=1, seen="keep", progress=False)
    alone = evaluate(model, split.test, seen="keep", metrics="auc")
    assert found.done[0]["test"]["auc"] == alone["auc"]


def test_a_plan_has_the_defaults_of_fit(file: Path) -> None:
    plan = {"epochs": 1, "schedule": "plateau"}
    written(file.parent, {**MANIFEST, "runs": [{**MANIFEST["runs"][1], "plan": plan, "vary": {}, "seeds": [0]}]})
    assert study(file, run=True, progress=False).missing == []


def test_what_changes_a_result_changes_the_run() -> None:
    def ids(**changes: Any) -> set[str]:
        return {run["id"] for run in runs({**MANIFEST, **changes})}

    same = ids()
    assert len(same) == 5
    assert ids(columns=["recall@3"]) == same
    assert not ids(data={"tiny": {"path": "other.csv", "seen": "keep"}}) & same
    assert not ids(data={"tiny": {"path": "log.csv"}}) & same


def test_new_columns_are_measured_without_a_training(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only = ["lr 0.01, tiny, seed 1"]
    assert len(study(file, run=True, only=only, progress=False).missing) == 4
    paper = {"tiny": {"theirs_1": {"recall": 0.25}}}
    written(file.parent, {**MANIFEST, "columns": ["recall", "ndcg@3"], "paper": paper})  # without its cut-off
    found = study(file)
    assert len(found.missing) == 5
    monkeypatch.setattr(loop, "epoch", None)
    found = study(file, run=True, only=only, progress=False)
    assert len(found.missing) == 4
    assert [run["test"].keys() for run in found.done] == [{"recall@10", "ndcg@3"}]
    text = found.to_markdown()
    assert "|  | seeds | recall@10 | ndcg@3 |" in text
    assert "| paper: theirs_1 | | 0.2500 |  |" in text


def test_seeds_of_different_data_are_refused(file: Path) -> None:
    study(file, run=True, only=["lr 0.01, tiny, seed 0"], progress=False)
    log = file.with_name("log.csv")
    log.write_text(log.read_text() + "u1,i3,9000\n")
    with pytest.raises(ValueError, match="data: tiny: expected what SASRec, lr 0.01, tiny, seed 0 was trained on"):
        study(file, run=True, only=["lr 0.01, tiny, seed 1"], progress=False)


def test_labels_of_any_text_make_a_table() -> None:
    given = {"tiny": {"[12] a|b\nc": {"recall@3": 0.5}, "*star": {}}}
    found = Study({**MANIFEST, "paper": given}, [])
    assert "| paper: [12] a\\|b c | | 0.5000 |  |  |" in found.to_markdown().splitlines()
    lines = found.to_latex().splitlines()
    assert any(line.startswith("{}[12] a|b") for line in lines)
    assert any(line.startswith("{}*star &") for line in lines)


def test_bold_is_above_what_is_given() -> None:
    assert cell("ndcg@10", [0.2, 0.4], 0.25) == "**0.3000** (0.1414)"
    assert cell("ndcg@10", [0.2, 0.4], 0.31) == "0.3000 (0.1414)"
    assert cell("ndcg@10", [0.2], None) == "0.2000"
    assert cell("ndcg@10", [None], 0.1) == ""
    assert cell("ndcg@10", [], 0.1) == "missing"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"columns": ["recal@3"]}, "study.json: data: tiny: columns: expected names among"),
        ({"runs": []}, "study.json: runs: expected at least one entry, got none"),
        ({"colums": []}, "expected no field 'colums'; did you mean columns"),
        ({"runs": [{"label": "A", "data": "tiny", "model": "gru"}]}, "A, tiny, seed 0: model: expected one of"),
        ({"runs": [{"label": "A", "data": "tidy", "model": "mf"}]}, "entry 1: data: did you mean tiny?, got 'tidy'"),
        (
            {"runs": [{"label": "A", "data": "tiny", "model": "mf"}]},
            "A, tiny, seed 0: plan: expected a number of epochs",
        ),
        ({"runs": [{**MANIFEST["runs"][1], "options": {"dmi": 3}}]}, "SASRec, lr 0.001, tiny, seed 0: "),
        ({"runs": [{**MANIFEST["runs"][1], "vary": {"lr": []}}]}, "entry 1: expected at least one value"),
        ({"runs": [{**MANIFEST["runs"][1], "seed": 3}]}, "entry 1: expected one of label, data"),
        (
            {"runs": [*MANIFEST["runs"], MANIFEST["runs"][0]]},
            "popularity, tiny, seed 0: expected one run of this title",
        ),
        (
            {"runs": [*MANIFEST["runs"], {**MANIFEST["runs"][0], "label": "B"}]},
            "B, tiny, seed 0: expected other settings",
        ),
        ({"runs": [{**MANIFEST["runs"][0], "plan": {"lr": 0.1}}]}, "lr: expected none for popular"),
        ({"runs": [{**MANIFEST["runs"][1], "plan": {"epochs": 0}}]}, "epochs: expected at least 1, got 0"),
        ({"runs": [{**MANIFEST["runs"][1], "plan": {"epochs": 1, "lrr": 1}}]}, "plan: expected one of epochs, "),
        ({"data": {"tiny": {"path": "log.csv", "seen": "both"}}}, "data: tiny: seen: expected one of mask, keep"),
        ({"data": {"tiny": {"path": 3}}}, "data: tiny: path: expected text, got 3"),
        ({"data": {"tiny": {"path": "log.csv", "split": {"how": "none"}}}}, "split: how: expected one of last-one"),
        ({"data": {"tiny": {"path": "log.csv", "split": {"how": "foo"}}}}, "split: how: expected one of last-one"),
        ({"data": {"tiny": {"path": "log.csv", "test": "t.csv", "targets": "all"}}}, "columns: expected none without"),
        ({"runs": [{**MANIFEST["runs"][1], "seeds": [-1]}]}, "seeds: expected at least 0, got -1"),
    ],
)
def test_a_manifest_that_cannot_be_worked_through_is_refused(
    change: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, {**MANIFEST, **change})
    assert main.main(["study", str(file), "--run"]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["study.json"]


def test_the_command(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--csv", str(tmp_path / "t.csv"), "--latex", str(tmp_path / "t.tex")]
    assert main.main(["study", str(file), "--run", "--only", "seed 0", *out]) == 0
    assert "Runs missing: 2." in capsys.readouterr().out
    found = Study(MANIFEST, read(tmp_path / "study.results.json"))
    assert (tmp_path / "t.csv").read_text() == found.to_csv()
    assert (tmp_path / "t.tex").read_text() == found.to_latex()
    assert main.main(["study", str(file), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["runs"]) == 3
    log = tmp_path / "log.csv"
    before = log.read_bytes()
    for more, said in (
        (["--run", "--only", "seed 7"], "--only: no run's title contains 'seed 7'; titles are like '"),
        (["--only", "seed 0"], "--only: expected --run with it, got seed 0"),
        (["--csv", str(file)], "--csv: expected another file than the manifest"),
        (["--csv", str(tmp_path / "study.results.json")], "--csv: expected another file than the file of --results"),
        (["--csv", "new", "--latex", "./new"], "--latex: expected another file than the file of --csv"),
        (["--results", str(log)], "--results: expected another file than the path of"),
        (["--csv", str(log)], "--csv: expected another file than the path of"),
        (["--latex", str(log)], "--latex: expected another file than the path of"),
    ):
        assert main.main(["study", str(file), *more]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert len(error.splitlines()) == 1
    assert log.read_bytes() == before
