"""Export: vectors that rank as the model does, ids in their order, and a recall that is measured."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from made import LEARNED, made

from fastcl.recsys import MODELS, Histories, Items, SASRec, export, query_vectors, recommend, save
from fastcl.recsys.cli import main

pytestmark = pytest.mark.usefixtures("one_thread")
IDS = tuple(f"i{n}" for n in range(1, 301))
ITEMS = Items(IDS)
OPTIONS = {"dim": 16, "max_len": 7}


@pytest.mark.parametrize("name", LEARNED)
def test_vectors_and_queries_rank_as_the_model(name, tmp_path):
    model = made(name, ITEMS, seed=1, **OPTIONS).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    about = export(model, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "export.json").read_text()) == about
    assert "recall@10" not in about
    vectors = np.load(tmp_path / "out" / "vectors.npy")
    ids = json.loads((tmp_path / "out" / "ids.json").read_text())
    assert (vectors.shape, vectors.dtype) == ((300, about["dim"]), np.float32)
    histories = [["i3", "i200", "i5"], ["i7"], ["i11", "i12"]]
    queries = query_vectors(model, histories)
    scores = (queries.reshape(3, -1, about["dim"]) @ vectors.T).max(1)
    assert len(queries.reshape(-1, about["dim"])) == 3 * about["queries_per_history"]
    for row, found in zip(scores, recommend(model, histories, k=20, seen="keep"), strict=True):
        assert [ids[at] for at in np.argsort(-row, kind="stable")[:20]] == [item for item, _ in found]


def test_a_model_whose_scores_are_no_inner_products_is_refused(tmp_path):
    class Backwards(SASRec):
        def scores(self, histories):
            return -super().scores(histories).clamp(min=-1e6)

    class Bare(SASRec):
        item_vectors = MODELS["sasrec"].__mro__[1].item_vectors

    for kind, message in ((Backwards, "scores that inner products rank"), (Bare, "one with item vectors, got sasrec")):
        with pytest.raises(ValueError, match=message):
            export(kind(ITEMS, seed=0, **OPTIONS).eval(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_bad_options_are_refused(tmp_path):
    model = SASRec(ITEMS, seed=0, **OPTIONS).eval()
    with pytest.raises(ValueError, match="to: expected one of npy, faiss, torch, onnx, got 'annoy'"):
        export(model, tmp_path / "out", to="annoy")
    with pytest.raises(ValueError, match="queries: expected at least one history, got none"):
        export(model, tmp_path / "out", queries=Histories.from_lists([]))
    assert not (tmp_path / "out").exists()


def test_faiss_index_and_its_recall(tmp_path):
    faiss = pytest.importorskip("faiss")
    model = SASRec(ITEMS, seed=1, **OPTIONS).eval()
    queries = Histories.from_lists([[n, n % 300 + 1] for n in range(1, 101)])
    exact = export(model, tmp_path / "flat", to="faiss", index="Flat", queries=queries)
    assert exact["recall@10"] == 1.0
    about = export(model, tmp_path / "ivf", to="faiss", index="IVF20,Flat", queries=queries, k=5)
    index = faiss.read_index(str(tmp_path / "ivf" / "index.faiss"))
    vectors = model.item_vectors()[1:].detach().numpy()
    query = query_vectors(model, [[IDS[item - 1] for item in row] for row in queries.item.reshape(-1, 2)])
    _, near = index.search(query, 5)
    best = np.argsort(-(query @ vectors.T), axis=1)[:, :5]
    hits = sum(len(set(a) & set(b)) for a, b in zip(near.tolist(), best.tolist(), strict=True))
    assert about["recall@5"] == pytest.approx(hits / 500)
    assert 0.05 < about["recall@5"] < 0.95  # one cell of twenty is searched
    assert (about["query_count"], about["queries"], about["index"]) == (100, "histories", "IVF20,Flat")
    with pytest.raises(ValueError, match="index: expected a Faiss factory string that fits, got 'Nonsense'"):
        export(model, tmp_path / "bad", to="faiss", index="Nonsense", queries=queries)


def test_an_export_lies_beside_no_file_of_other_weights(tmp_path):
    first, second = (SASRec(ITEMS, dim=8, seed=seed).eval() for seed in (0, 1))
    export(first, tmp_path)
    export(first, tmp_path, "faiss")
    assert {file.name for file in tmp_path.iterdir()} == {"vectors.npy", "index.faiss", "ids.json", "export.json"}
    (tmp_path / "notes.txt").write_text("of somebody")
    export(second, tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"vectors.npy", "ids.json", "export.json", "notes.txt"}


def test_command(tmp_path, capsys):
    pytest.importorskip("faiss")
    log = tmp_path / "log.csv"
    log.write_text("user,item,time\n" + "".join(f"u{n},i{n},1\nu{n},new,2\n" for n in range(1, 31)) + "x,new,1\n")
    run: Path = tmp_path / "run"
    save(SASRec(ITEMS, seed=0, **OPTIONS), run, {"data": {"path": str(log)}})
    assert main.main(["export", str(run), "--to", "faiss", "-o", str(tmp_path / "out")]) == 0
    assert "recall@10 " in (shown := capsys.readouterr().out)
    assert "30 queries (histories)" in shown
    log.unlink()
    assert main.main(["export", str(run), "--to", "faiss", "-o", str(tmp_path / "out"), "--json"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["queries"] == "single items"
    assert "the run's data has moved" in shown.err
    assert main.main(["export", str(run), "--to", "faiss", "--queries", str(log), "-o", str(tmp_path / "out")]) == 2
    assert main.main(["export", str(run), "-o", str(tmp_path / "plain")]) == 0
    assert sorted(p.name for p in (tmp_path / "plain").iterdir()) == ["export.json", "ids.json", "vectors.npy"]


def test_the_missing_extra_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "faiss", None)
    save(SASRec(ITEMS, seed=0, **OPTIONS), tmp_path / "run")
    assert main.main(["export", str(tmp_path / "run"), "--to", "faiss", "-o", str(tmp_path / "out")]) == 2
    assert "pip install 'fastcl[ann]'" in capsys.readouterr().err
