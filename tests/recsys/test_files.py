"""Files as people use them: words for missing values, long fields, stray quotes, spaces around ids, pipes, and runs
that read their data again."""

from __future__ import annotations

import csv
import gzip
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from logs import named

from fastcl.recsys.cli import main
from fastcl.recsys.data import Interactions
from fastcl.recsys.data.reading import textfiles

HEADER = "user,item,time\n"


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_a_word_for_a_missing_value_is_no_id_unless_it_is_asked_for(tmp_path: Path) -> None:
    words = ["NA", "\\N", "N/A", "(null)", "null", "NULL", "None", "undefined", "nan", "NaN", "-", "<NA>", " NA "]
    text = HEADER + "".join(f"{word},x,1\na,{word},1\n" for word in words) + "a,x,1\nb,Nana,2\nc,0,3\n"
    path = write(tmp_path / "log.csv", text)
    with pytest.raises(ValueError, match=r":2: user id 'NA' stands for a missing value; missing=\(\) \(--missing"):
        Interactions.read(path)
    data = Interactions.read(path, on_error="skip")
    assert named(data) == {"a": ["x"], "b": ["Nana"], "c": ["0"]}
    assert data.report is not None
    assert (data.report.rows_read, sum(data.report.dropped.values())) == (2 * len(words) + 3, 2 * len(words))
    assert (data.report.dropped["missing user id (NA)"], data.report.dropped["missing item id (\\N)"]) == (2, 1)
    kept = Interactions.read(path, missing=()).report
    assert kept is not None
    assert (kept.rows, kept.look_missing) == (kept.rows_read, 2 * len(words))
    assert named(Interactions.read(path, missing=["0", *words], on_error="skip")) == {"a": ["x"], "b": ["Nana"]}
    # The same of a table in memory, of sequences and of features.
    table = {"user": ["NA", "b"], "item": ["x", "null"]}
    with pytest.raises(ValueError, match=r"row 0 \(from 0\): user id 'NA' stands for a missing value"):
        Interactions.read(table, time=None)
    assert Interactions.read(table, time=None, missing=()).users == ("NA", "b")
    sequences = Interactions.read(write(tmp_path / "s.txt", "a x - y\nNA z\nb x\n"), on_error="skip")
    assert named(sequences) == {"a": ["x", "y"], "b": ["x"]}
    items = {"item": ["x"], "tags": ["new|N/A|nan"]}
    assert Interactions.read({"user": ["u"], "item": ["x"]}, time=None, item_features=items).items.features[
        "tags"
    ].values == ("new",)


def test_a_user_with_most_of_the_rows_is_remarked() -> None:
    users = ["?"] * 6 + ["a", "b", "c"]
    report = Interactions.read({"user": users, "item": list(range(9))}, time=None).report
    assert "user '?' has 6 of 9 rows: a word for a missing value?" in str(report)
    report = Interactions.read({"user": users[2:], "item": list(range(7))}, time=None).report
    assert "user '?' has 4 of 7 rows" in str(report)
    report = Interactions.read({"user": users[3:], "item": list(range(6))}, time=None).report
    assert "a word for a missing value?" not in str(report)


@pytest.mark.parametrize("quoted", [False, True])
def test_fields_of_any_length(quoted: bool, tmp_path: Path) -> None:
    before = csv.field_size_limit()
    long = "w" * 200_000
    second = '"y"' if quoted else "y"
    text = f"user,item,time,review\na,x,1,{long}\na,{second},2,{long}\na,{long},3,z\n"
    assert named(Interactions.read(write(tmp_path / "log.csv", text))) == {"a": ["x", "y", long]}
    header = write(tmp_path / "wide.csv", f'user,item,time,"{long}"\na,x,1,\n')
    assert named(Interactions.read(header)) == {"a": ["x"]}
    assert csv.field_size_limit() == before


class _Counted(list[str]):
    """A list that knows how many of its elements were handed out."""

    taken = 0

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        self.taken += len(found) if isinstance(at, slice) else 1
        return found


@pytest.mark.parametrize("bad", ['"disk,{k},1\n', '"a" b,{k},1\n', '""",{k},1\n', '"x\n', 'u,5" "disk,1\n'])
def test_rows_with_stray_quotes_cost_no_more_than_their_number(bad: str) -> None:
    lines = _Counted(bad.format(k=k) for k in range(4000))
    piece = textfiles._quoted(lines, 1, 3, textfiles.Dialect("csv", ",", '"', False), True)
    assert len(piece.faults) + len(piece.lines) <= 4000
    assert lines.taken <= 5 * 4000


def test_an_id_keeps_its_outer_spaces_and_can_be_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clicked = [" Rock ", '" Rock "', "Rock", '"Pop, 2"', "Jazz"]
    lines = [f"{user},{item},{t}\n" for user in "abcdef" for t, item in enumerate(clicked)]
    log = write(tmp_path / "log.csv", HEADER + "".join(lines))
    items = write(tmp_path / "items.csv", "item,kind\n Rock ,spaced\nRock,bare\n")
    options = ["--model", "sasrec", "--epochs", "1", "--set", "dim=8", "batch=8", "max_len=4"]
    run = str(tmp_path / "run")
    assert main.main(["train", str(log), "--item-features", str(items), *options, "-o", run]) == 0
    assert "1 ids begin or end with a space" in capsys.readouterr().err
    assert json.loads((tmp_path / "run" / "items.json").read_text())["ids"] == [" Rock ", "Rock", "Pop, 2", "Jazz"]
    for history, known in (('" Rock "', 1), (" Rock , Jazz", 2), ('Jazz," Rock ","Pop, 2"', 3), ('"a ""b""",Rock', 1)):
        assert main.main(["recommend", run, "--history", history, "-k", "9", "--seen", "mask", "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert len(document["recommendations"][0]["items"]) == 4 - known
    assert document["skipped"] == {'a "b"': 1}
    assert main.main(["recommend", run, "--users", str(log), "-k", "9", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["skipped"] == {}
    features = Interactions.read(log, item_features=items).items.features["kind"]
    assert features.codes[:, 0].tolist() == [0, 2, 1, 0, 0]


def _fifo(path: Path, text: str) -> threading.Thread:
    os.mkfifo(path)

    def fill() -> None:
        with open(path, "wb", buffering=0) as file:
            for begin in range(0, len(text), 7):  # a writer that is slower than the reader
                file.write(text[begin : begin + 7].encode())

    thread = threading.Thread(target=fill)
    thread.start()
    return thread


LOG = HEADER + "".join(f"u{u},i{(u * 7 + k) % 9},{k}\n" for u in range(8) for k in range(5))


def test_a_pipe_is_read_once_and_named_where_it_would_be_read_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = Interactions.read(write(tmp_path / "plain.csv", LOG))
    thread = _fifo(tmp_path / "log.csv", LOG)
    assert named(Interactions.read(tmp_path / "log.csv")) == named(plain)
    thread.join()
    thread = _fifo(tmp_path / "again", LOG)
    options = ["--format", "csv", "--model", "sasrec", "--epochs", "1", "--set", "dim=8", "batch=8", "max_len=4"]
    assert main.main(["train", str(tmp_path / "again"), *options, "-o", str(tmp_path / "run")]) == 0
    thread.join()
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["data"]["path"] == f"pipe:{tmp_path / 'again'}"
    capsys.readouterr()
    for command in ("evaluate", "resume", "report"):
        more = ["-o", str(tmp_path / "pictures")] if command == "report" else []
        assert main.main([command, str(tmp_path / "run"), *more]) == 2
        error = capsys.readouterr().err
        assert "was read from the pipe" in error
        assert "--data FILE" in error
    assert main.main(["evaluate", str(tmp_path / "run"), "--data", str(tmp_path / "plain.csv")]) == 0


@pytest.mark.parametrize("name", ["-", "/dev/stdin", "/dev/fd/{}"])
def test_stdin_and_process_substitution(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    end, writer = os.pipe()
    os.write(writer, gzip.compress(LOG.encode()))
    os.close(writer)
    before = os.dup(0)
    try:
        os.dup2(end, 0)
        assert main.main(["data", "check", name.format(end), "--format", "csv", "--json"]) == 0
    finally:
        os.dup2(before, 0)
    assert json.loads(capfd.readouterr().out)["rows"] == 40


@pytest.mark.parametrize("words", [["recommend", "--users", "-"], ["evaluate", "--data", "-"]])
def test_every_file_of_clicks_may_be_stdin(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "log.csv", LOG)
    run = str(tmp_path / "run")
    assert main.main(["train", str(path), "--model", "sasrec", "--epochs", "1", "--set", "dim=4", "-o", run]) == 0
    said = []
    for source in (str(path), "-"):
        before = os.dup(0)
        with open(path, "rb") as stream:
            os.dup2(stream.fileno(), 0)
        capfd.readouterr()
        assert main.main([words[0], run, *[source if word == "-" else word for word in words[1:]]]) == 0
        said.append(capfd.readouterr().out)
        os.dup2(before, 0)
    assert said[0] == said[1] != ""


def test_a_run_reads_its_data_as_it_was_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [f"u{u}::NA{(u * 7 + k) % 9}::x::0{k + 1}.10.2017\n" for u in range(8) for k in range(5)]
    log = write(tmp_path / "ratings.dat", "".join(lines) + "-::NA1::x::\n")
    items = write(tmp_path / "movies.dat", "NA1|a\nNA2|b\n")
    options = ["--delimiter", "::", "--columns", "user,item,_,time", "--time-format", "%d.%m.%Y", "--missing=-,?"]
    options += ["--on-error", "skip", "--item-features", str(items), "--item-delimiter", "|"]
    options += ["--item-columns", "item,kind"]
    model = ["--model", "sasrec", "--epochs", "1", "--set", "dim=8", "batch=8", "max_len=4"]
    run = str(tmp_path / "run")
    assert main.main(["train", str(log), *options, *model, "-o", run]) == 0
    capsys.readouterr()
    assert main.main(["resume", run]) == 0
    assert main.main(["evaluate", run]) == 0
    assert main.main(["recommend", run, "--users", str(log)]) == 0
    config = json.loads((tmp_path / "run" / "config.json").read_text())["data"]
    assert [config[name] for name in ("delimiter", "columns", "missing", "item_delimiter", "item_columns")] == [
        "::", ["user", "item", "_", "time"], ["-", "?"], "|", ["item", "kind"]
    ]  # fmt: skip
