"""Runs are neither lost nor mixed: one writer a folder, --force, runs of the first format."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import ended, forked
from tiny_runs import ITEMS, TINY, write_table

from fastcl.recsys import CLRec, Interactions, Model, MultiCLRec, SASRec, fit, load, resume, save
from fastcl.recsys.cli import main
from fastcl.recsys.data.source import Source
from fastcl.recsys.training import checkpoint, lock

pytestmark = pytest.mark.usefixtures("one_thread")
OLD = Path(__file__).parent / "runs_of_format_1"


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return write_table(tmp_path)


def command(table: Path, run: Path, *more: str) -> list[str]:
    settings = ["--set", *(f"{name}={value}" for name, value in TINY.items())]
    return [
        "train",
        str(table),
        "--model",
        "sasrec",
        "--epochs",
        "1",
        "--threads",
        "1",
        *settings,
        *more,
        "-o",
        str(run),
    ]


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_one_writer_a_folder(table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert main.main(command(table, run)) == 0
    before = content(run)
    held, said = os.pipe()

    def hold() -> None:
        with lock.held(run):
            os.write(said, b"held")
            time.sleep(600)

    holder = forked(hold)
    try:
        assert os.read(held, 4) == b"held"
        capsys.readouterr()
        for words in (
            command(table, run, "--force"),
            command(table, run, "--force", "--seed", "1"),
            ["resume", str(run)],
        ):
            assert main.main(words) == 2
            (line,) = (line for line in capsys.readouterr().err.splitlines() if "error" in line)
            assert f"{run}: process {holder} is training in it" in line
        with pytest.raises(lock.LockedError):
            save(load(run), run)
        assert main.main(["recommend", str(run), "--history", "i1"]) == 0
        assert main.main(["evaluate", str(run)]) == 0
        assert {name: data for name, data in content(run).items() if name != lock.NAME} == before
    finally:
        os.kill(holder, signal.SIGKILL)
        assert ended(holder) == -signal.SIGKILL
        for end in (held, said):
            os.close(end)
    assert main.main(["resume", str(run)]) == 0  # a lock ends with its process
    assert content(run) == before
    with lock.held(tmp_path / "new" / "folder"):
        assert (tmp_path / "new" / "folder" / lock.NAME).read_text() == f"{os.getpid()}\n"
    assert not (tmp_path / "new").exists()


def test_a_run_that_came_while_the_data_was_read_stays(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other command is quicker: it reads, trains and ends while this one reads."""
    run = tmp_path / "run"
    read = Source.split

    def slow(source: Source) -> Any:
        monkeypatch.setattr(Source, "split", read)
        assert main.main(command(table, run, "--seed", "7")) == 0
        return read(source)

    monkeypatch.setattr(Source, "split", slow)
    assert main.main(command(table, run)) == 2
    assert "is not empty; --force overwrites" in capsys.readouterr().err
    assert checkpoint.read_config(run)["seed"] == 7
    load(run)


@pytest.mark.slow
def test_two_trainings_at_once_leave_one_whole_run(table: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = [sys.executable, "-m", "fastcl.recsys"]
    both = [
        subprocess.Popen([*words, *command(table, run, "--seed", str(seed))], stderr=-1, stdout=-1, text=True)
        for seed in (1, 2)
    ]
    said = [process.communicate(timeout=300)[1] for process in both]
    codes = [process.returncode for process in both]
    assert sorted(codes) == [0, 2], said
    assert checkpoint.read_config(run)["seed"] == 1 + codes.index(0)
    loser = said[codes.index(2)].splitlines()[-1]
    assert "is training in it" in loser or "is not empty" in loser
    assert load(run).name == "sasrec"


def test_force_takes_what_it_writes_and_nothing_else(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / checkpoint.LOG).write_text('["of the user"]')
    assert main.main(command(table, mine)) == 2
    assert main.main(command(table, mine, "--force")) == 0
    assert (mine / checkpoint.LOG).read_text() == '["of the user"]'
    several = tmp_path / "several"
    assert main.main(command(table, several, "--seed", "1,2")) == 0
    (several / "notes.txt").write_text("mine")
    before = content(several)
    for more in ([], ["--force"]):
        assert main.main(command(table, several, "--seed", "4", *more)) == 2
        assert f"{several}: holds the runs seed-1, seed-2; expected another folder" in capsys.readouterr().err
    assert content(several) == before
    assert main.main(command(table, several, "--seed", "2,3")) == 2
    assert "seed-2: exists and is not empty" in capsys.readouterr().err
    assert content(several) == before
    assert main.main(command(table, several, "--seed", "2,3", "--force", "--epochs", "2")) == 0
    after = content(several)
    assert {name: after[name] for name in before if "seed-2" not in name} == {
        name: data for name, data in before.items() if "seed-2" not in name
    }
    assert [load(several / f"seed-{seed}").name for seed in (1, 2, 3)] == ["sasrec"] * 3
    assert checkpoint.read_config(several / "seed-2")["epochs"] == 2
    assert main.main(command(table, several / "seed-1", "--seed", "1,2", "--force")) == 2
    assert "seed-1: is a run itself" in capsys.readouterr().err
    with pytest.raises(FileExistsError, match="holds the runs seed-1, seed-2, seed-3"):
        save(load(several / "seed-1"), several)  # would hide them from every command
    assert not (several / "config.json").exists()


@pytest.mark.parametrize("name", checkpoint.FILES)
def test_what_is_no_file_is_neither_read_nor_replaced(name: str, table: Path, tmp_path: Path, capsys: Any) -> None:
    """A pipe would be waited for without end, a device read without end."""
    run = tmp_path / "run"
    run.mkdir()
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero"), lambda path: path.mkdir()):
        make(run / name)
        for more in ([], ["--force"]):
            assert main.main(command(table, run, *more)) == 2
            words = ("is not empty", f"{run / name}: not a file of a run")
            assert words[bool(more)] in capsys.readouterr().err
        (run / name).rmdir() if (run / name).is_dir() else (run / name).unlink()
    run.rmdir()
    run.symlink_to("nowhere")
    assert main.main(command(table, run, "--force")) == 2
    assert f"{run}: expected a folder for the run, got a file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.json", '{"dim": 4}'),
        ("config.json", "[]"),
        ("config.json", '{"format": "fastcl'),
        ("metrics.jsonl", '{"accuracy": 1}\n'),
        ("items.json", "[1, 2]"),
        ("model.safetensors", "weights"),
    ],
)
def test_files_that_are_no_run_stay(name: str, text: str, table: Path, tmp_path: Path, capsys: Any) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / name).write_text(text)
    for more in ([], ["--force"]):
        assert main.main(command(table, run, *more)) == 2
    assert f"{run / name}: not a file of a run of fastcl" in capsys.readouterr().err
    with pytest.raises(FileExistsError, match="not a file of a run of fastcl"):
        save(SASRec(ITEMS, **TINY), run)
    assert content(run) == {name: text.encode()}


def test_a_complete_run_needs_no_writing(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a user who may only read it: a process of its own, since the tests may run as root."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        shutil.copy(table, Path(folder) / "log.csv")
        assert main.main(command(Path(folder) / "log.csv", run)) == 0
        lines = resume(run, progress=False)
        before = content(run)
        for path in (Path(folder), run):
            path.chmod(0o555)
        assert main.main(["resume", str(run)]) == 0  # what Python imports late may be out of that user's reach
        told, tell = os.pipe()

        def read_only() -> int:
            if os.getuid() == 0:
                os.setgid(65534)
                os.setuid(65534)
            assert not os.access(run, os.W_OK)
            capsys.readouterr()
            code = main.main(["resume", str(run)])
            os.write(tell, "".join(capsys.readouterr()).encode())
            return code

        code = ended(forked(read_only))
        os.close(tell)
        with open(told, encoding="utf-8") as file:
            text = file.read()
        assert code == 0, text
        assert "1 of 1 epochs are finished, the run is complete" in text
        for path in (Path(folder), run):
            path.chmod(0o755)
        assert content(run) == before
        assert len(lines) == 1
        assert "run: 1 epoch, validation" in text


def test_data_that_moved_is_named(table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert main.main(command(table, run)) == 0
    table.rename(tmp_path / "moved.csv")
    capsys.readouterr()
    for words in (["resume", str(run)], ["evaluate", str(run)]):
        assert main.main(words) == 2
        assert "--data FILE says where it is" in capsys.readouterr().err
        assert main.main([*words, "--data", str(tmp_path / "moved.csv")]) == 0
    assert resume(run, progress=False, data=tmp_path / "moved.csv")[0]["epoch"] == 1


def test_memory_that_ends_is_an_error_that_says_so(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = Interactions.read(table).split()
    model = SASRec(split.items, **TINY)

    def full(*args: Any) -> Any:
        return torch.empty(2**60)

    monkeypatch.setattr(SASRec, "parts", full)
    with pytest.raises(MemoryError, match=r"allocate .* at once: .*\(dim, batch"):
        fit(model, split, epochs=1, out=tmp_path / "run", progress=False)
    for size in ("dim=100000000000", "max_len=100000000000000"):
        assert main.main([*command(table, tmp_path / "large"), "--set", size]) == 2
    assert not (tmp_path / "large").exists()


def test_runs_of_the_first_format_load_and_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Made by the code before versions were numbers; the figures are what that code printed."""
    for name, model in (("clrec", CLRec), ("sasrec", SASRec)):
        shutil.copytree(OLD / name, tmp_path / name)
        assert checkpoint.read_config(tmp_path / name)["version"] == checkpoint.VERSION
        assert isinstance(load(tmp_path / name), model)
        assert main.main(["recommend", str(tmp_path / name), "--history", "i1,i2", "-k", "1"]) == 0
    shown = capsys.readouterr().out.split()
    assert shown[1::2] == ["i4", "i7"]
    assert [float(score) for score in shown[::2]] == pytest.approx([9.1619, 0.0494], abs=2e-4)
    assert main.main(["resume", str(tmp_path / "clrec"), "--data", str(OLD / "log.csv")]) == 0
    lines = checkpoint.read_metrics(tmp_path / "clrec")
    assert [line["epoch"] for line in lines] == [1, 2, 3]
    assert [line["loss"] for line in lines] == pytest.approx([7.830901, 7.797343, 6.387341], rel=1e-4)
    assert main.main(["resume", str(tmp_path / "sasrec"), "--data", str(OLD / "log.csv")]) == 0
    assert "the run is complete" in capsys.readouterr().err
    assert (tmp_path / "sasrec" / "last.safetensors").read_bytes() == (OLD / "sasrec" / "last.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("model", "setting", "default", "earlier"),
    [
        (MultiCLRec(ITEMS, dim=4, batch=4, main=8, secondary=8, intents=2), "clicks", "all", "own"),
        (CLRec(ITEMS, dim=4, batch=4, negatives=8), "log_q", 1.0, 0.0),
    ],
)
def test_a_run_without_a_later_setting_has_what_it_was_trained_with(
    tmp_path: Path, model: Model, setting: str, default: object, earlier: object
) -> None:
    save(model, tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    assert config["config"].pop(setting) == default
    path.write_text(json.dumps(config))
    assert getattr(checkpoint.build(tmp_path).config, setting) == earlier


def test_what_is_no_version_of_ours_is_named(tmp_path: Path) -> None:
    save(SASRec(ITEMS, **TINY), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for changes, words in (
        ({"version": 3}, "expected a run of version 1 to 2, got version 3, made by fastcl"),
        ({"version": "2"}, "expected a run of fastcl, got"),
        ({"format": "other"}, "expected a run of fastcl, got .* format 'other'"),
        ({"data": {"path": "\ud800"}}, "config.json: damaged .*surrogates not allowed"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(ValueError, match=words):
            load(tmp_path)


def test_settings_that_decide_nothing_may_be_changed(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main.main(command(table, run)) == 0
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"save_every": 5.0}))
    assert main.main(["resume", str(run)]) == 0
    assert "save_every was 600.0 when the run was begun, config.json says 5.0" in capsys.readouterr().err
    for device in (-1, "x", "meta", [1], "cuda:99"):
        (run / "config.json").write_text(json.dumps(config | {"device": device}))
        assert main.main(["resume", str(run)]) == 2
        assert "device: expected" in capsys.readouterr().err
    for changes in ({"lr": 0.5}, {"seen": "keep"}, {"epochs": 9}, {"data_sha256": None}):
        (run / "config.json").write_text(json.dumps(config | changes))
        assert main.main(["resume", str(run)]) == 2
        assert re.search(f"{next(iter(changes))} was|expected the clicks", capsys.readouterr().err)


def test_records_do_not_hide_fields(table: Path, tmp_path: Path) -> None:
    split = Interactions.read(table).split()
    for record, words in (
        ({"epochs": 3}, "expected other names than epochs"),
        ({"model": "x"}, "expected other names than model"),
        ({"note": {1, 2}}, "expected what JSON can hold"),
        ({"note": "half: \ud800"}, "record: damaged .*surrogates not allowed"),
        ({"deep": [[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]}, "expected at most 16 levels"),
    ):
        with pytest.raises(ValueError, match=words):
            fit(SASRec(split.items, **TINY), split, epochs=1, out=tmp_path / "run", record=record, progress=False)
        assert not (tmp_path / "run").exists()
