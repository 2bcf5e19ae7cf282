"""Recommendations by a Faiss index: those of exact search where the index is exact, never a seen item, never a short
list, and no index of another model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made import made

from fastcl.recsys import (
    Histories,
    Interactions,
    Items,
    SASRec,
    export,
    frozen,
    open_index,
    recommend,
    recommend_users,
    save,
)
from fastcl.recsys.cli import main
from fastcl.recsys.data.ids import Ids
from fastcl.recsys.models import Model
from fastcl.recsys.serving import vectors
from fastcl.recsys.training import modelstate

faiss = pytest.importorskip("faiss")
pytestmark = pytest.mark.usefixtures("one_thread")
IDS = tuple(f"i{n}" for n in range(1, 301))
ITEMS = Items(IDS)


def model_of(name: str = "sasrec", seed: int = 1, items: Items = ITEMS) -> Model:
    return made(name, items, seed=seed, dim=16, max_len=7).eval()


def histories(count: int = 40) -> list[list[str]]:
    rng = np.random.default_rng(0)
    rows = [[IDS[n] for n in rng.integers(0, 300, rng.integers(1, 25))] for _ in range(count)]
    return [*rows, list(IDS[:290]), list(IDS)]


def alike(found: list[Any], truth: list[Any]) -> None:
    assert [[item for item, _ in row] for row in found] == [[item for item, _ in row] for row in truth]
    for ours, theirs in zip(found, truth, strict=True):
        np.testing.assert_allclose([score for _, score in ours], [score for _, score in theirs], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["sasrec", "multi_clrec", "mf"])
def test_an_exact_index_gives_the_lists_of_exact_search(name: str, tmp_path: Path) -> None:
    model = model_of(name)
    export(model, tmp_path, "faiss", index="Flat", queries=Histories.from_lists([[1, 2]]))
    index = open_index(tmp_path)
    asked = [*histories(), ["unknown"]]
    options: list[dict[str, Any]] = [
        {"k": 10},
        {"k": 300},
        {"k": 10, "seen": "keep"},
        {"k": 10, "without": IDS[::2]},
        {"k": 10, "only": IDS[:200]},
        {"k": 10, "only": IDS[:5]},
    ]
    for each in options:
        alike(recommend(model, asked, index=index, **each), recommend(model, asked, **each))
    with pytest.MonkeyPatch.context() as patch:  # the index is asked for as many more as a history hides
        patch.setattr(type(model), "scores", lambda self, rows: pytest.fail("exact search"))
        assert [len(row) for row in recommend(model, histories(), index=index)[-2:]] == [10, 0]
    data = Interactions(ITEMS, tuple("abc"), Histories.from_lists([[1, 2], [3], list(range(1, 296))]))
    by_index, exact = (dict(recommend_users(model, data, 10, index=which).rows) for which in (tmp_path, None))
    assert list(by_index) == list(exact)
    alike(list(by_index.values()), list(exact.values()))


def test_lists_are_whole_where_the_index_finds_too_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One cell of twenty holds about fifteen items, so that an index alone would give shorter lists."""
    model = model_of()
    export(model, tmp_path, "faiss", index="IVF20,Flat", queries=Histories.from_lists([[1, 2]]))
    index, asked = open_index(tmp_path), histories()
    with torch.no_grad():
        query = model.encode(Histories.from_lists([[1, 2]])).numpy()
    assert (index.search(query, 60)[1] >= 0).sum() < 60
    alike(recommend(model, asked, k=60, index=index), recommend(model, asked, k=60))
    short = recommend(model, asked, k=3, index=index)
    scored = []
    monkeypatch.setattr(
        SASRec, "scores", lambda self, rows: scored.append(len(rows)) or super(SASRec, self).scores(rows)
    )
    again = recommend(model, asked, k=3, index=index)
    assert again == short
    assert 1 <= sum(scored) < 20  # exact search for those of whom the index found fewer than three, no others
    for history, row in zip(asked[:-1], short[:-1], strict=True):
        assert len(row) == 3
        assert not {item for item, _ in row} & set(history)
    assert short[-1] == []


def test_an_item_that_several_queries_find_is_listed_once(tmp_path: Path) -> None:
    """The queries of a history find few items together, some of them twice."""
    model = made("multi_clrec", ITEMS, seed=1, dim=16, max_len=7, served=4).eval()
    export(model, tmp_path, "faiss", index="IVF20,Flat", queries=Histories.from_lists([[1, 2]]))
    for k in (10, 15, 20, 25, 30):
        for row in recommend(model, histories(), k=k, index=tmp_path)[:40]:
            assert len({item for item, _ in row}) == k


def test_what_does_not_belong_together_is_refused(tmp_path: Path) -> None:
    model, folder = model_of(), tmp_path / "index"
    queries = Histories.from_lists([[1, 2]])
    export(model, folder, "faiss", index="Flat", queries=queries)
    index = open_index(folder)
    renamed = Items(("x", *IDS[1:]))
    for other in (model_of(seed=2), model_of("mf"), model_of(items=renamed)):
        with pytest.raises(ValueError, match="index: expected the index of this model's weights, got one of others"):
            recommend(other, [["i2"]], index=index)
    fewer = rf"index: expected the index of this model's {len(IDS) - 1} items, got one of {len(IDS)} in .*; export it"
    with pytest.raises(ValueError, match=fewer):
        recommend(model_of(items=Items(IDS[:-1])), [["i2"]], index=index)
    with torch.no_grad():
        next(iter(model.parameters())).add_(1e-6)
    with pytest.raises(ValueError, match="index: expected the index of this model's weights"):
        recommend(model, [["i2"]], index=folder)
    export(model, tmp_path / "npy")
    with pytest.raises(ValueError, match="index: expected a Faiss index .*, got .* with 'vectors.npy'"):
        recommend(model, [["i2"]], index=tmp_path / "npy")
    with pytest.raises(FileNotFoundError, match="index: expected a folder that export wrote"):
        open_index(tmp_path)
    file = folder / "index.faiss"
    whole = file.read_bytes()
    for damaged in (whole[:-1], whole + b"0", b"x" * len(whole)):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"index.faiss: (expected [\d,]+ bytes, got|damaged)"):
            open_index(folder)
    file.unlink()
    with pytest.raises(ValueError, match="bytes, got 0; export the index again"):
        open_index(folder)


def test_many_items_get_an_inverted_file_which_is_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(items=Items(Ids.of(IDS)))  # as those of a prepared folder
    assert export(model, tmp_path / "few", "faiss")["index"] == "HNSW32"
    assert json.loads((tmp_path / "few" / "ids.json").read_text()) == list(IDS)
    monkeypatch.setattr(vectors, "IVF_FROM", 300)
    about = export(model, tmp_path / "many", "faiss")
    assert about["index"] == "IVF16,Flat"
    assert about["query_ms"] > 0 < about["exact_ms"]
    read, opened = [], faiss.read_index
    monkeypatch.setattr(faiss, "read_index", lambda *given: read.append(opened(*given)) or read[-1])
    index = open_index(tmp_path / "many")
    lists = faiss.downcast_InvertedLists(faiss.extract_index_ivf(read[0]).invlists)
    assert isinstance(lists, faiss.OnDiskInvertedLists)
    assert lists.prefetch_nthread == 0
    row = recommend(model, [["i1", "i2"]], k=3, index=index)[0]
    assert len(row) == 3


def test_weights_are_hashed_once_in_a_frozen_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    export(model, tmp_path, "faiss", index="Flat")
    index, calls, digest = open_index(tmp_path), [], modelstate.digest
    monkeypatch.setattr("fastcl.recsys.serving.index.digest", lambda model: calls.append(1) or digest(model))
    with frozen(model):
        for item in IDS[:3]:
            recommend(model, [[item]], index=index)
    assert len(calls) == 1


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, index = str(tmp_path / "run"), str(tmp_path / "index")
    save(model_of(), run)
    assert main.main(["export", run, "--to", "faiss", "--index", "Flat", "-o", index]) == 0
    assert "one query takes " in capsys.readouterr().out
    words = ["recommend", run, "--history", "i1,i2", "-k", "3", "--json"]
    assert main.main([*words, "--index", index]) == 0
    found = json.loads(capsys.readouterr().out)["recommendations"][0]["items"]
    assert main.main(words) == 0
    truth = json.loads(capsys.readouterr().out)["recommendations"][0]["items"]
    assert [item["item"] for item in found] == [item["item"] for item in truth]
    other = str(tmp_path / "other")
    save(model_of(seed=2), other)
    assert main.main(["recommend", other, "--history", "i1", "--index", index]) == 2
    assert "--index: expected the index of this model's weights" in capsys.readouterr().err
