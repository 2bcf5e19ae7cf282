"""`fastcl data check` and the reading options of the commands: what they say, that they write nothing, exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fastcl.recsys import Interactions
from fastcl.recsys.cli import main
from fastcl.recsys.data.source import Source

pytestmark = pytest.mark.usefixtures("one_thread")
STEPS = [(u, k) for u in range(9) for k in range(6)]
GOOD = "uid,sku,ts\n" + "".join(f"u{u},i{(u + 2 * k) % 7},{1_500_000_000_000 + u + k // 2}\n" for u, k in STEPS)
NAMES = ["--user", "uid", "--item", "sku", "--time", "ts"]


def call(*arguments: str | Path) -> int:
    return main.main([str(a) for a in arguments])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_good_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "log.csv").write_text(GOOD)
    assert call("data", "check", "log.csv", *NAMES) == 0
    text = capsys.readouterr().out
    for words in (
        "54 rows, 9 users, 7 items",
        "times 2017-07-14 02:40:00 to 2017-07-14 02:40:00 UTC (int64, looks like ms)",
        "27 rows share their time with the row before them",
        "9 users end in such a tie",
    ):
        assert words in text
    assert call("data", "check", "log.csv", *NAMES, "--json") == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert captured.err == ""
    assert document["readable"]
    report = Interactions.read("log.csv", user="uid", item="sku", time="ts").report
    assert report is not None
    ours = json.loads(json.dumps(report.to_json()))
    assert {**document, "source": ""} == {"readable": True, **ours, "source": ""}
    assert [path.name for path in folder.iterdir()] == ["log.csv"]


BAD = GOOD.encode() + b"u1,,1\nu1,i1\nu1,i1,soon\nu1,i1,nan\nu1,null,1500000000001\n\nu1,caf\xe9,3\nu0,i1,1500000000009"


def test_all_bad_rows_are_named_and_counted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "log.csv").write_bytes(BAD)
    assert call("data", "check", "log.csv", *NAMES, "--json") == 2
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert not document["readable"]
    assert document["dropped"] == {
        "missing item id": 1,
        "missing item id (null)": 1,
        "wrong number of fields": 1,
        "unreadable time": 1,
        "time not finite": 1,
        "undecodable bytes": 1,
    }
    assert [fault.rpartition("log.csv:")[2].partition(":")[0] for fault in document["faults"]] == [
        "56", "57", "58", "59", "60", "62"  # the first five, and the first of each reason
    ]  # fmt: skip
    assert (document["rows"], document["look_missing"], document["blank_lines"]) == (55, 0, 1)
    assert document["cut_short"]
    assert len(captured.err.strip().splitlines()) == 1
    assert "log.csv:56: empty item id; --on-error skip drops them" in captured.err

    assert call("data", "check", "log.csv", *NAMES, "--on-error", "skip") == 0
    text = capsys.readouterr().out
    assert "dropped 1 of 61: undecodable bytes" in text
    assert "is the file whole?" in text
    assert call("data", "check", "log.csv", *NAMES, "--encoding", "latin-1", "--on-error", "skip", "--json") == 0
    assert "undecodable bytes" not in json.loads(capsys.readouterr().out)["dropped"]
    assert call("data", "check", "log.csv", *NAMES, "--on-error", "skip", "--missing", "", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["rows"], document["look_missing"]) == (56, 1)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("", [], "the file is empty"),
        ("uid,sku,ts\n", NAMES, "no interactions"),
        ("1,2,3\n4,5,6\n", [], "looks like data"),
        (GOOD, ["--user", "who"], "no user column 'who'"),
        (GOOD, [*NAMES, "--encoding", "utf-9"], "encoding: expected a text encoding"),
        (GOOD, [*NAMES, "--item-features", "nowhere.csv"], "nowhere.csv"),
    ],
)
def test_what_cannot_be_read_is_one_line_and_code_2(
    text: str, options: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "log.csv").write_text(text)
    assert call("data", "check", "log.csv", *options) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert len(captured.err.strip().splitlines()) == 1


def test_features_and_repeats_in_the_report(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "log.csv").write_text(GOOD.replace("u3,", "u0,"))
    (folder / "items.csv").write_text("sku,kind\ni1,a|b\ni2,\nelsewhere,a\n")
    features = ["--item-features", "items.csv", "--repeats", "first"]
    assert call("data", "check", "log.csv", *NAMES, *features) == 0
    text = capsys.readouterr().out
    assert "feature kind: 1 of 7 items have it" in text
    assert "1 items of the feature file are not in the log" in text  # i2 is, though it has no value
    assert "dropped 5 of 54: repeated item of a user" in text


SMALL = ["--model", "sasrec", "--epochs", "1", "--set", "dim=8", "batch=8", "max_len=4"]


@pytest.mark.filterwarnings("always:leave-one-out leaks")
def test_a_run_remembers_how_its_data_was_read_and_split(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "log.csv").write_bytes(BAD)
    reading = [*NAMES, "--on-error", "skip", "--encoding", "latin-1", "--ties", "random", "--split-seed", "5"]
    assert call("train", "log.csv", *SMALL, *reading, "-o", "run") == 0
    said = capsys.readouterr().err
    assert "fastcl: note: leave-one-out leaks the future" in said
    assert "dropped 1 of 61: time not finite" in said
    config = json.loads((folder / "run" / "config.json").read_text())
    assert config["split"] == {"how": "last-one", "at": None, "ties": "random", "seed": 5}
    split = Source.recorded(config).split()
    data = Interactions.read("log.csv", user="uid", item="sku", time="ts", on_error="skip", encoding="latin-1")
    expected = data.split(ties="random", seed=5)
    assert (split.test.target == expected.test.target).all()
    assert (split.test.history.item == expected.test.history.item).all()
    assert call("evaluate", "run") == 0


def test_a_cut_in_time_and_files_of_ones_own(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "log.csv").write_text(GOOD)
    cut = [*NAMES, "--split", "time", "--at", "1500000000005"]
    assert call("train", "log.csv", *SMALL, *cut, "-o", "cut") == 0
    assert "leaks" not in capsys.readouterr().err
    assert call("evaluate", "cut") == 0
    for name, lines in (("train", slice(1, 50)), ("valid", slice(7, 13)), ("test", slice(13, 19))):
        rows = GOOD.splitlines()
        (folder / f"{name}.csv").write_text("\n".join([rows[0], *rows[lines]]) + "\n")
    assert call("train", "train.csv", "--valid", "valid.csv", "--test", "test.csv", *SMALL, *NAMES, "-o", "own") == 0
    assert call("evaluate", "own") == 0
    assert Source.recorded(json.loads((folder / "own" / "config.json").read_text())).split().test.user.tolist() == [2]
    capsys.readouterr()
    for options, message in (
        (["--valid", "valid.csv"], "--valid: expected --test FILE with it, got none"),
        (["--valid", "v", "--test", "t", "--split", "time"], "expected no --split, --at or --ties beside"),
        (["--split", "time"], "at: expected a number or an ISO date"),
        (["--split-seed", "3"], "--split-seed: expected --ties random, --split items or --hold-out with it, got 3 a"),
        (["--at", "3"], 'at: expected none with "last-one"'),
    ):
        assert call("train", "train.csv", *SMALL, *NAMES, *options, "-o", "none") == 2
        assert message in capsys.readouterr().err
        assert not (folder / "none").exists()


def test_bundled_data_is_read_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("data", "check", "bundled:purchases") == 0
    assert "2,345 users" in capsys.readouterr().out
    assert call("data", "check", "bundled:purchases", "--repeats", "first") == 2
    assert "--repeats: expected none with bundled:purchases" in capsys.readouterr().err
