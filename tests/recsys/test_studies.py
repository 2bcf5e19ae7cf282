"""The studies' programs: which runs are worked through and in what order, and what the analyses make of results.

What the models reach is not tested here; that a run goes on where it stopped is tested with ContrastVAE.
"""

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import analyses, quality
from fastcl.recsys import ContrastVAE, Interactions, SASRec
from fastcl.recsys.evaluation.ranking import evaluate
from fastcl.recsys.studies.manifest import read, runs
from fastcl.recsys.training.checkpoint import save

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).parents[2]
SET = "amazon/Small"
OPTIONS = {"dim": 8, "augment": ["variational"], "contrast_weight": 0.3}
PLAN = {"epochs": 1, "patience": 1}


def entry(label: str, model: str, seeds: tuple[int, ...] = (0,), data: str = SET, **options: Any) -> dict[str, Any]:
    floor = model in ("popularity", "co-occurrence")
    more = {"options": None, "plan": None} if floor else {"options": options, "plan": PLAN}
    return {"label": label, "data": data, "model": model, **more, "seeds": list(seeds)}


MANIFEST: dict[str, Any] = {
    "measured by": "ranking",
    "columns": ["recall@40", "ndcg@20"],
    "paper": {},
    "runs": [
        entry("popularity", "popularity"),
        entry("co-occurrence", "co-occurrence"),
        entry("ContrastVAE VA+DA", "contrastvae", (0, 1), **OPTIONS),
        entry("ContrastVAE VA+DA, weight 0", "contrastvae", **{**OPTIONS, "contrast_weight": 0.0}),
        entry("ContrastVAE VA+DA, wide", "contrastvae", **{**OPTIONS, "dim": 16}),
        entry("paper-code VA", "contrastvae", **OPTIONS, compat="paper-code"),
        entry("SASRec softmax", "sasrec", dim=8),
        entry("SASRec softmax", "sasrec", data="amazon/Other", dim=8),
    ],
}


def write_log(path: Path, users: int) -> None:
    rng = np.random.default_rng(0)
    lines = [
        f"{user + 1} {' '.join(map(str, rng.permutation(30)[: rng.integers(5, 12)] + 1))}" for user in range(users)
    ]
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(gzip.compress("\n".join(lines).encode()))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_log(tmp_path / f"{SET}.txt.gz", users=60)
    return tmp_path


def results() -> list[dict[str, Any]]:
    """A result of every run of the manifest, with figures that tell the runs apart."""
    found = []
    for nth, run in enumerate(runs(MANIFEST)):
        of_latent = {"diagnostics": {"kl": float(nth), "variance": 0.5}} if run["model"] == "contrastvae" else {}
        found.append(run | {"test": {"recall@40": nth / 10, "ndcg@20": nth / 100}} | of_latent)
    return found


def test_what_matches_first_runs_first_and_nothing_twice(data: Path, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    quality.work(MANIFEST, path, data, tmp_path, ["co-occurrence, amazon/Small, seed 0", "popularity"])
    assert [run["label"] for run in read(path)] == ["co-occurrence", "popularity"]
    quality.work(MANIFEST, path, data, tmp_path, ["popularity", "co-occurrence"])
    assert len(read(path)) == 2
    with pytest.raises(ValueError, match="only: no run's title contains 'seed 7'; titles are like '"):
        quality.work(MANIFEST, path, data, tmp_path, ["SASRec", "seed 7"])
    assert len(read(path)) == 2  # said before anything is trained


def test_analyses_take_our_models_on_one_set() -> None:
    trained = analyses.finished(MANIFEST, results(), SET)
    assert {label: len(seeds) for label, seeds in trained.items()} == {
        "ContrastVAE VA+DA": 2, "ContrastVAE VA+DA, weight 0": 1, "ContrastVAE VA+DA, wide": 1, "SASRec softmax": 1,
    }  # fmt: skip
    assert analyses.finished(MANIFEST, [], SET) == {}
    latent = analyses.collapse(trained)
    assert list(latent) == ["ContrastVAE VA+DA", "ContrastVAE VA+DA, weight 0", "ContrastVAE VA+DA, wide"]
    assert latent["ContrastVAE VA+DA"] == {"runs": 2, "kl": 2.5, "variance": 0.5, "recall@40": pytest.approx(0.25)}
    weights = analyses.sensitivity(trained)
    assert list(weights) == ["0", "0.3"]  # not the wide one
    assert weights["0"]["ndcg@20"] == 0.04
    del trained["ContrastVAE VA+DA, weight 0"]
    assert analyses.sensitivity(trained) == analyses.sensitivity({}) == {}


def test_analyses_write_figures_pictures_and_tables(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "home"
    (home / "studies").mkdir(parents=True)
    (home / "studies" / "contrastvae.json").write_text(json.dumps(MANIFEST))
    (home / "contrastvae.json").write_text(json.dumps({"runs": results()}))
    split = Interactions.read(data / f"{SET}.txt.gz", format="sequence").split()
    ids = {run["label"]: run["id"] for run in results() if run["data"] == SET and run["seed"] == 0}
    latent = ContrastVAE(split.items, dim=8, seed=0).eval()
    save(latent, tmp_path / ids["ContrastVAE VA+DA"], {})
    save(SASRec(split.items, dim=8, seed=0).eval(), tmp_path / ids["SASRec softmax"], {})
    monkeypatch.setattr(analyses, "HERE", home)
    monkeypatch.setattr(analyses, "RESULTS", home)
    arguments = ["analyses", "--data", str(data), "--states", str(tmp_path), "--set", SET, "--threads", "1"]
    monkeypatch.setattr("sys.argv", [*arguments, "--output", str(tmp_path / "out")])
    analyses.main()
    folder = tmp_path / "out" / "Small"
    names = ("groups", "robustness", "collapse", "sensitivity")
    assert all((folder / f"{name}.png").read_bytes().startswith(b"\x89PNG") for name in names)
    numbers = json.loads((folder / "numbers.json").read_text())
    assert set(numbers["groups"]) == {"ContrastVAE VA+DA", "SASRec softmax", "popularity", "co-occurrence"}
    whole = evaluate(latent, split.test, k=(40,))["recall@40"]
    rows = numbers["groups"]["ContrastVAE VA+DA"]["frequency"]
    assert sum(row["cases"] * row["recall@40"] for row in rows) / 60 == pytest.approx(whole)
    assert [row["ratio"] for row in numbers["robustness"]["SASRec softmax"][:6]] == [0.0, 0.1, 0.2, 0.3, 0.4, 0.5]
    assert (folder / "tables.md").read_text().strip() in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", [*arguments[:-4], "--set", "amazon/Other"])
    with pytest.raises(SystemExit):
        analyses.main()
    assert "--set: expected one with a finished run of ContrastVAE VA+DA, got amazon/Other" in capsys.readouterr().err


@pytest.mark.slow
def test_cost_of_contrastvae_is_measured(tmp_path: Path) -> None:
    write_log(tmp_path / "amazon/Office_Products.txt.gz", users=600)
    command = [sys.executable, "-m", "benchmarks.bench_contrastvae", str(tmp_path), "--only", "Office"]
    subprocess.run([*command, "--output", str(tmp_path / "cost")], cwd=ROOT, check=True)
    found = json.loads((tmp_path / "cost.json").read_text())
    assert len(found["epoch"]) == 6
    assert all(row["CPU s"] > 0 for row in found["epoch"])
    assert found["memory"][0]["peak MB"] > 0
    assert "clean, full softmax" in (tmp_path / "cost.md").read_text()
