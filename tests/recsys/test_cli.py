"""The command line as a user meets it: train, evaluate, recommend, and one clear line for every mistake."""

import csv
import json
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import fastcl
from fastcl.recsys import MODELS, load
from fastcl.recsys.cli import main
from fastcl.recsys.cli.main import leaves
from fastcl.recsys.reporting import demo
from fastcl.recsys.reporting.cost import Shape, measure
from fastcl.recsys.settings import settings_of

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = ["--set", "dim=16", "batch=8", "max_len=5"]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """40 users who walk along a ring of 30 items: what comes next is easy to learn."""
    rng = np.random.default_rng(0)
    lines = ["who,what,when"]
    for user in range(40):
        start = rng.integers(30)
        lines += [f"u{user},i{(start + step) % 30},{1000 * user + 60 * step}" for step in range(8)]
    path = tmp_path / "log.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


COLUMNS = ["--user", "who", "--item", "what", "--time", "when"]


def call(*arguments: str | Path) -> int:
    return main.main([str(a) for a in arguments])


@pytest.mark.parametrize("model", ["sasrec", "clrec", "multi_clrec"])
def test_train_evaluate_recommend(model: str, table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    more = ["negatives=64"] if model == "clrec" else []
    assert call("train", table, "--model", model, "--epochs", "3", *COLUMNS, *SMALL, *more, "-o", run) == 0
    assert "best of 3 epochs" in capsys.readouterr().out
    config = json.loads((run / "config.json").read_text())
    assert (config["model"], config["config"]["dim"], config["epochs"]) == (model, 16, 3)
    assert config["versions"]["fastcl"] == fastcl.__version__
    assert [json.loads(line)["epoch"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]
    assert load(run).items.encode(["i0"])[0] > 0

    assert call("evaluate", run, "--k", "5,10") == 0
    printed = capsys.readouterr().out
    for word in ("recall@5", "ndcg@10", "pop100 hr@10", "popularity", "co-occurrence", model):
        assert word in printed

    assert call("recommend", run, "--history", "i3, i4,nowhere", "-k", "4") == 0
    shown = capsys.readouterr()
    items = [line.split()[1] for line in shown.out.splitlines()]
    assert len(items) == 4
    assert not {"i3", "i4"} & set(items)
    assert "skipped 1 of 3 clicks, on unknown items: nowhere" in shown.err

    # The data may move, and may not become another.
    table.rename(tmp_path / "moved.csv")
    assert call("evaluate", run) == 2
    assert call("evaluate", run, "--data", tmp_path / "moved.csv") == 0


def test_seen_items_are_kept_where_asked(table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    kept = ["--seen", "keep"]
    assert call("train", table, "--model", "sasrec", "--epochs", "1", *COLUMNS, *SMALL, *kept, "-o", run) == 0
    assert call("evaluate", run) == 0
    assert "personal frequency" in capsys.readouterr().out
    assert call("recommend", run, "--history", "i3", "-k", "30") == 0
    assert len(capsys.readouterr().out.splitlines()) == 30


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "dimm=3"], "SASRecConfig has no field 'dimm'; did you mean dim?"),
        (["--set", "dim=many"], "--set dim: expected a whole number, got 'many'"),
        (["--set", "dim=0"], "dim: expected at least 1, got 0"),
        (["--set", "loss=hinge"], "loss: expected one of softmax, sce, popular, gbce, bce, got 'hinge'"),
        (["--epochs", "0"], "epochs: expected at least 1, got 0"),
        (["--user", "nobody"], "nobody"),
        (["--format", "sequence"], ""),
        (["--model", "gru"], "invalid choice"),
        (["--lr", "0"], "--lr: expected a finite number above 0, got 0.0"),
        (["--lr", "0.1", "--set", "lr=0.2"], "--lr: expected none beside --set lr, got 0.1"),
        (["--k", "5"], "fastcl train: error: unrecognized arguments: --k 5; see fastcl train --help"),
        (["--split", "time"], "--at: expected"),
        (["--seed", "9" * 20], "--seed: expected whole numbers of at most 64 bits"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    arguments: list[str], message: str, table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", table, "--model", "sasrec", *COLUMNS, *arguments, "-o", tmp_path / "run"]
    try:
        code = call(*command)
    except SystemExit as stop:
        code = int(stop.code or 0)
    error = capsys.readouterr().err
    assert code == 2
    assert message in error
    assert len(error.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("batch", [8, 1000])
def test_a_learning_rate_that_is_too_high_is_named(
    batch: int, table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # In a batch after the first one, and in the only one, where the scores of the validation are the first to be NaN.
    settings = ["--set", "dim=16", f"batch={batch}", "max_len=5", "--lr", "1e30", "--epochs", "1"]
    assert call("train", table, "--model", "sasrec", *COLUMNS, *settings, "-o", tmp_path / "run") == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(
        "fastcl train: error: loss: expected" if batch == 8 else "fastcl train: error: scores: expected"
    )
    assert last.endswith("; try a lower lr than 1e+30")


def test_a_bad_row_is_named_with_its_line(table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table.write_text(table.read_text() + "u1,i1\n")
    assert call("train", table, "--model", "clrec", *COLUMNS, "-o", tmp_path / "run") == 2
    assert "log.csv:322" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_run_is_not_overwritten_by_accident(table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    train = ["train", table, "--model", "sasrec", "--epochs", "1", *COLUMNS, *SMALL, "-o", run]
    assert call(*train) == 0
    before = (run / "model.safetensors").read_bytes()
    assert call(*train, "--seed", "1") == 2
    assert "--force" in capsys.readouterr().err
    assert (run / "model.safetensors").read_bytes() == before
    assert call(*train, "--seed", "1", "--force") == 0
    assert (run / "model.safetensors").read_bytes() != before


def test_data_of_another_run_is_refused(table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, other = tmp_path / "run", tmp_path / "other.csv"
    assert call("train", table, "--model", "sasrec", "--epochs", "1", *COLUMNS, *SMALL, "-o", run) == 0
    other.write_text(table.read_text().replace(",i7,", ",elsewhere,"))
    capsys.readouterr()
    assert call("evaluate", run, "--data", other) == 2
    assert "expected the items of the model, got others: item 30 is 'elsewhere', not 'i7'" in capsys.readouterr().err


def test_a_missing_extra_is_named_before_data_is_read(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("safetensors", "safetensors.torch"):
        monkeypatch.setitem(sys.modules, name, None)
    assert call("train", table, "--model", "sasrec", *COLUMNS, *SMALL, "-o", tmp_path / "run") == 2
    assert "pip install 'fastcl[recsys]'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("info") == 0
    assert fastcl.config()["isa"] in capsys.readouterr().out


def test_demo_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    # The real demo on the real purchases, with models small enough for a test.
    plan = ("keep", {"sasrec": (1, {"dim": 8, "max_len": 5}), "clrec": (1, {"dim": 8, "max_len": 5, "batch": 1024})})
    monkeypatch.setitem(demo.PLANS, "purchases", plan)
    assert call("demo", "-o", tmp_path / "demo", "--json") == 0
    numbers = json.loads(capsys.readouterr().out)
    assert numbers == json.loads((tmp_path / "demo" / "report.json").read_text())
    text = (tmp_path / "demo" / "report.txt").read_text()
    columns = ("recall@10", "ndcg@10", "pop100 hr@10", "diversity@10", "new items recall@10", "train s")
    for word in (*columns, "What to expect"):
        assert word in text
    assert {p.name for p in (tmp_path / "demo").iterdir()} >= {
        "sasrec",
        "clrec",
        "report.json",
        "report.txt",
        "report.png",
    }
    assert set(numbers["results"]) == {"popularity", "co-occurrence", "personal frequency", "sasrec", "clrec"}
    assert (numbers["data"], numbers["seen"]) == ("purchases", "keep")
    assert load(tmp_path / "demo" / "clrec").name == "clrec"


def test_cost_measures_memory_of_each_loss() -> None:
    torch.manual_seed(0)
    cost = measure(Shape("softmax", 1500, 6000, 32), repetitions=1)
    logits = 1500 * 6000 * 4
    assert cost["plain_bytes"] > logits  # the logit matrix is there ...
    assert cost["fused_bytes"] < logits / 2  # ... and here it is not


WAY = """\
fastcl data check log.csv --user uid --item sku --time ts
fastcl train log.csv --user uid --item sku --time ts --model sasrec --epochs 2 --set dim=8 --seed 1,2,3 -o runs/sasrec
fastcl train log.csv --user uid --item sku --time ts --model clrec --epochs 2 --set dim=8 --seed 1,2,3 -o runs/clrec
fastcl resume runs/clrec
fastcl evaluate runs/clrec/seed-1 --k 10,50 --by popularity,length --robustness 0.1,0.3
fastcl compare runs/sasrec runs/clrec --csv table.csv
fastcl report runs/sasrec runs/clrec -o report
fastcl recommend runs/clrec/seed-1 --history "sku1,sku2" -k 10
fastcl recommend runs/clrec/seed-1 --users log.csv -k 10 -o lists.csv
fastcl export runs/clrec/seed-1 --to npy -o vectors
"""


def test_the_way_from_a_log_to_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [f"u{user},sku{(user + step) % 25},{100 * user + step}" for user in range(30) for step in range(4)]
    Path("log.csv").write_text("uid,sku,ts\n" + "\n".join(rows) + "\n")
    for line in WAY.splitlines():
        assert main.main(shlex.split(line)[1:]) == 0, line
    assert len(Path("lists.csv").read_text().splitlines()) == 1 + 30 * 10
    with open("table.csv", newline="") as table:
        runs = {row["name"]: row["runs"] for row in csv.DictReader(table)}
    assert runs == {"sasrec": "3", "clrec": "3", "floor: popularity": "1", "floor: co-occurrence": "1"}


def test_an_option_that_means_nothing_or_a_file_of_another_form_is_refused_by_its_name(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = tmp_path / "bare.csv"
    bare.write_text("".join(table.read_text().splitlines(keepends=True)[1:]))
    columns = ["--columns", ",".join([*"abcdefgh"][: len(bare.read_text().splitlines()[0].split(","))])]
    columns += ["--user", "a", "--item", "b", "--time", ""]
    run = tmp_path / "run"
    assert call("train", bare, "--model", "sasrec", "--epochs", "1", *columns, *SMALL, "-o", run) == 0
    other = tmp_path / "other.csv"
    other.write_text("one\ntwo\n")
    out = tmp_path / "out"
    for words, said in (
        (["recommend", run, "--users", other, "--alone"], "error: --users: expected a name for each field"),
        (["evaluate", run, "--data", other], "error: --data: expected a name for each field"),
        (["export", run, "-k", "5", "-o", out], "error: -k: expected --to faiss with it, got 5"),
        (["export", run, "--queries", other, "-o", out], "error: --queries: expected --to faiss with it"),
        (["train", "bundled:books", "--model", "sasrec", "-o", out], "error: bundled:books: name: expected one of"),
    ):
        capsys.readouterr()
        assert call(*words) == 2
        assert said in capsys.readouterr().err
    assert not out.exists()
    with pytest.raises(SystemExit) as stop:
        call("--use")
    assert stop.value.code == 2
    assert capsys.readouterr().err == "fastcl: error: argument --use: expected one argument; see fastcl --help\n"


def test_models_tells_every_setting_and_version_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[: len(MODELS)]] == list(MODELS)
    assert lines[0].endswith("Transformer over a click history, scored against the item table by inner products.")
    for name, model in MODELS.items():
        assert main.main(["models", name]) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert all(f"{one.name}: {one.type} = " in out and one.meaning in out for one in settings_of(model.Config))
    assert main.main(["models", "sasrec", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)["sasrec"][0]
    assert (first["name"], first["type"], first["default"]) == ("dim", "int", "64")
    assert main.main(["models", "gru"]) == 2
    assert "NAME: expected one of sasrec, " in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main.main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"fastcl {fastcl.__version__}\n")


def test_every_argument_of_every_command_says_what_it_is() -> None:
    for leaf in leaves(main.build_parser()):
        for action in leaf._actions:
            told = (action.help or "").partition(" (default")[0]
            assert len(told.split()) >= 2, f"{leaf.prog} {action.option_strings or action.dest}"


def test_info_and_bench_as_json(capsys, monkeypatch):
    from fastcl.recsys.cli import bench
    from fastcl.recsys.reporting.cost import Shape

    assert call("info", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["isa"], found["models"]) == (fastcl.config()["isa"], list(MODELS))
    monkeypatch.setattr(bench, "SHAPES", {"small": Shape("softmax", 64, 500, 16)})
    assert call("bench", "--repetitions", "1", "--json") == 0
    small = json.loads(capsys.readouterr().out)["results"]["small"]
    assert 0 < small["difference"] < 1e-4
    assert small["fused_ms"] > 0
