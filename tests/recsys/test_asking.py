"""`recommend` and what is no model, no scorer, no time or no data: files by their names, data that has moved, paths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import ITEMS, TINY, write_table

from fastcl.recsys import (
    Interactions,
    Items,
    Popular,
    SASRec,
    export,
    fit,
    recommend,
    recommend_users,
    save,
    similar,
    with_items,
)
from fastcl.recsys.cli import main

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    log = Interactions.read(write_table(tmp_path))
    save(SASRec(log.items, seed=0, **TINY).eval(), "run", {"data": {"path": str(tmp_path / "log.csv")}, "seen": "keep"})
    return "run"


def call(*arguments: str) -> int:
    return main.main(["recommend", *arguments])


@pytest.mark.parametrize("name", ["lists.csv.gz", "lists.json", "lists.xlsx", "lists.tsv", "lists.parquet.gz"])
def test_a_file_is_what_its_name_says(run: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(run, "--history", "i1", "-o", name) == 2
    assert f"-o: expected a name that ends in .csv, .jsonl or .parquet, got {name}" in capsys.readouterr().err
    assert not Path(name).exists()


def test_lines_of_json_whatever_the_case_of_the_name(run: str) -> None:
    assert call(run, "--history", "i1", "-k", "2", "-o", "LISTS.JSONL") == 0
    assert len(json.loads(Path("LISTS.JSONL").read_text())["items"]) == 2


def test_data_that_has_moved_is_named_or_asked_for(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("new.csv").write_text("user,item,time\nu1,i5,99999\nstranger,nothing,1\n")
    asked = [run, "--users", "new.csv", "-k", "2", "--fallback", "popular", "--seen", "mask"]
    assert call(*asked) == 0
    there = capsys.readouterr().out
    Path("log.csv").rename("moved.csv")
    assert call(*asked) == 2
    assert "log.csv: the data of run is not there; --data FILE says where it is" in capsys.readouterr().err
    assert call(*asked[:-4]) == 0
    assert "may be recommended; --data FILE says where it is" in capsys.readouterr().err
    assert call(*asked, "--data", "moved.csv") == 0
    assert capsys.readouterr().out == there
    assert call(*asked[:-4], "--data", "nowhere.csv") == 2
    assert "nowhere.csv: No such file or directory" in capsys.readouterr().err
    assert call(run, "--history", "i1", "--data", "moved.csv") == 2
    assert "--data: expected with --users" in capsys.readouterr().err


def test_a_limit_is_named_where_it_leaves_nothing(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(run, "--history", "i1", "--only", "i1", "--seen", "mask") == 0
    assert "the history holds every item that --only and --without allow" in capsys.readouterr().err


def test_an_id_that_holds_a_comma_asks_for_quotes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(SASRec(Items(("a,b", "c", "d")), seed=0, **TINY).eval(), tmp_path / "run")
    for words, noted in ((["--history", "a,b"], True), (["--history", '"a,b"'], False), (["--history", "c,d"], False)):
        assert call(str(tmp_path / "run"), *words) == 0
        told = """note: --history: an id that holds a comma stands in quotes: '"a,b"'"""
        assert (told in capsys.readouterr().err) is noted
    assert call(str(tmp_path / "run"), "--history", "c", "--without", "a,b") == 0
    assert "--without: an id that holds a comma" in capsys.readouterr().err


def test_popular_items_are_for_strangers_too(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    split = Interactions.read("log.csv").split()
    model = Popular(split.items)
    fit(model, split, epochs=1, out="popular", progress=False)
    everybody = recommend(model, [["i1"], []], k=3, seen="keep")
    assert everybody[0] == everybody[1]
    assert everybody.left_out == (1,)
    strangers = Interactions.read({"user": ["a", "b"], "item": ["i1", "x"], "time": [1, 2]})
    assert list(recommend_users(model, strangers, k=3, seen="keep").rows) == [("a", everybody[0]), ("b", everybody[0])]
    capsys.readouterr()
    assert call("popular", "--history", "nothing", "-k", "3") == 0
    shown = capsys.readouterr()
    assert [line.split()[1] for line in shown.out.splitlines()] == [item for item, _ in everybody[0]]
    assert "popular knows no item of the history: popular items are shown" in shown.err


def test_a_path_is_no_model(run: Any) -> None:
    for ask in (
        lambda: recommend(run, [["i1"]]),
        lambda: similar(run, "i1"),
        lambda: export(run, "vectors"),
        lambda: with_items(run, ITEMS),
    ):
        with pytest.raises(TypeError, match=r"model: expected a Model, got str; load\('run'\) opens a run folder"):
            ask()
    model = SASRec(ITEMS, **TINY)
    file: Any = "log.csv"
    with pytest.raises(TypeError, match=r"data: expected Interactions, got str; Interactions.read\(FILE\) reads a log"):
        recommend_users(model, file)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"times": [[float("inf")]]}, ValueError, "numbers that never fall, got inf in row 0"),
        ({"times": [["2024-01-01"]]}, TypeError, "times: expected numbers, in the unit of the training data"),
        ({"fallback": "popular"}, TypeError, "fallback: expected a scorer such as .*, got 'popular'"),
        ({"fallback": SASRec(ITEMS, **TINY)}, ValueError, "needs no history, got sasrec"),
    ],
)
def test_what_is_no_time_and_no_scorer_is_named(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        recommend(SASRec(ITEMS, **TINY), [["i1"]], **options)


def test_item_features_move_with_the_data(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("items.csv").write_text("item,tag\n" + "".join(f"i{n},{n % 2}\n" for n in range(9)))
    settings = ["--set", "dim=4", "batch=8", "negatives=9", "max_len=4", "--epochs", "1"]
    trained = ["train", "log.csv", "--item-features", "items.csv", "--model", "clrec", *settings, "-o", "clrec"]
    assert main.main(trained) == 0
    Path("elsewhere").mkdir()
    for name in ("log.csv", "items.csv"):
        Path(name).rename(Path("elsewhere", name))
    capsys.readouterr()
    assert main.main(["evaluate", "clrec", "--data", "elsewhere/log.csv", "--by", "tag"]) == 0
    assert "recall@10 by tag" in capsys.readouterr().out
    Path("elsewhere/items.csv").unlink()
    assert main.main(["evaluate", "clrec", "--data", "elsewhere/log.csv"]) == 2
    told = "items.csv: the item features of clrec are not there; they may also lie beside the FILE of --data"
    assert told in capsys.readouterr().err
