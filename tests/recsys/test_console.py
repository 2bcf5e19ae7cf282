"""The frame of the command line: streams that are closed, full, left or of another encoding, and every exception as
one line with an exit code. `main()` without arguments takes file descriptors 1 and 2, so these tests lend it theirs.
"""

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from fastcl._start import is_command, let_threads_sleep
from fastcl.recsys import SASRec, save
from fastcl.recsys.cli import info, main
from fastcl.recsys.data.containers import Items
from fastcl.recsys.training.threads import _quota, cores

pytestmark = pytest.mark.usefixtures("one_thread")


class Ended(NamedTuple):
    code: int
    out: bytes
    err: bytes


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ended]:
    """Runs the command as a process of its own would; `out` and `err` are "file", "closed", "full" or "left", a pipe
    that nobody reads."""

    def run(*words: str | Path, out: str = "file", err: str = "file", encoding: str = "utf-8") -> Ended:
        monkeypatch.setattr(sys, "argv", ["fastcl", *map(str, words)])
        saved = {number: os.dup(number) for number in (1, 2)}
        streams = sys.stdout, sys.stderr
        files = {1: tmp_path / "stdout", 2: tmp_path / "stderr"}
        try:
            for number, kind in ((1, out), (2, err)):
                files[number].write_bytes(b"")
                if kind == "left":
                    read, write = os.pipe()
                    os.close(read)
                else:
                    write = os.open("/dev/full" if kind == "full" else files[number], os.O_WRONLY)
                os.dup2(write, number)
                os.close(write)
            sys.stdout, sys.stderr = (open(n, "w", encoding=encoding, closefd=False) for n in (1, 2))  # noqa: SIM115
            for number, name, kind in ((1, "stdout", out), (2, "stderr", err)):
                if kind == "closed":  # as Python starts then
                    setattr(sys, name, None)
                    os.close(number)
            code = main.main()
        finally:
            for number, copy in saved.items():
                os.dup2(copy, number)
                os.close(copy)
            sys.stdout, sys.stderr = streams
        return Ended(code, files[1].read_bytes(), files[2].read_bytes())

    return run


@pytest.fixture
def log(tmp_path: Path) -> Path:
    rows = [f"u{user},i{(user + step) % 20},{step}" for user in range(20) for step in range(6)]
    (tmp_path / "log.csv").write_text("user,item,time\n" + "\n".join(rows) + "\n")
    return tmp_path / "log.csv"


TRAIN = ["--model", "sasrec", "--epochs", "1", "--set", "dim=8", "max_len=5", "batch=8", "--json"]


@pytest.mark.parametrize("err", ["closed", "full", "left"])
def test_reports_that_nobody_can_read_stop_no_training(
    err: str, command: Callable[..., Ended], log: Path, tmp_path: Path
) -> None:
    done = command("train", log, *TRAIN, "-o", tmp_path / "run", err=err)
    assert done.code == 0
    assert json.loads(done.out)["epochs"] == 1  # the result alone: no report has strayed to stdout
    # Nor into a file that was opened meanwhile.
    assert b"validation" not in (tmp_path / "run" / "model.safetensors").read_bytes()
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1


def test_a_reader_who_leaves_ends_the_command_quietly(command: Callable[..., Ended]) -> None:
    assert command("info", out="left") == (141, b"", b"")
    with pytest.raises(SystemExit):
        command("train", "--help", out="left")


def test_a_full_disk_under_stdout_is_one_line(command: Callable[..., Ended]) -> None:
    done = command("info", out="full")
    assert (done.code, done.err) == (2, b"fastcl info: error: standard output: No space left on device\n")
    assert command("info", out="closed") == (0, b"", b"")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_every_terminal_shows_every_id(encoding: str, command: Callable[..., Ended], tmp_path: Path) -> None:
    ids = ("é", "中", "😀", "a")
    save(SASRec(Items(ids), dim=8).eval(), tmp_path / "run")
    words = ("recommend", tmp_path / "run", "--history", "a", "-k", "4")
    done = command(*words, "--json", encoding=encoding)
    assert done.code == 0
    found = json.loads(done.out.decode(encoding))["recommendations"][0]["items"]
    assert sorted(entry["item"] for entry in found) == sorted(set(ids) - {"a"})
    lines = command(*words, encoding=encoding)
    assert lines.code == 0
    assert len(lines.out.splitlines()) == 3


def test_what_an_encoding_lacks_is_told_once(
    command: Callable[..., Ended], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastcl.recsys.cli.console._noted", set())
    save(SASRec(Items(("é", "ä", "a")), dim=8).eval(), tmp_path / "run")
    done = command("recommend", tmp_path / "run", "--history", "a", encoding="ascii")
    (note,) = done.err.decode("ascii").splitlines()
    assert note.startswith("fastcl: note: standard output is ascii; what that lacks is written as in JSON, \\u00e")
    assert b"\\u00e9" in done.out
    assert b"\\u00e4" in done.out


MEMORY = "out of memory (2,000.0 GiB at once); try a smaller dim or batch, a shorter max_len, or fewer --threads"
ALLOCATOR = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 2147483648000 bytes. Error code 12"
FAULT = "this is a fault of fastcl; `fastcl --debug ...` shows where"


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ValueError("k:\n  expected this,\n  got that"), 2, "k: expected this, got that"),
        (TypeError("k: expected a whole number, got '1'"), 2, "k: expected a whole number, got '1'"),
        (FileNotFoundError(2, "No such file or directory", "log.csv"), 2, "log.csv: No such file or directory"),
        (OSError(28, "No space left on device"), 2, "No space left on device"),
        (OSError("made by hand"), 2, "made by hand"),
        (RuntimeError(f"[enforce fail at alloc_cpu.cpp:124] {ALLOCATOR}"), 2, MEMORY),
        (MemoryError(), 2, MEMORY.replace(" (2,000.0 GiB at once)", "")),
        (torch.OutOfMemoryError("CUDA out of memory"), 2, MEMORY.replace(" (2,000.0 GiB at once)", "")),
        (KeyError("x"), 2, f"KeyError: 'x': {FAULT}"),
        (TypeError("'NoneType' object is not iterable"), 2, f"TypeError: 'NoneType' object is not iterable: {FAULT}"),
        (RecursionError("maximum depth"), 2, f"RecursionError: maximum depth: {FAULT}"),
        (AssertionError(), 2, f"AssertionError: AssertionError: {FAULT}"),
        (KeyboardInterrupt(), 130, ""),
        (BrokenPipeError(32, "Broken pipe"), 141, ""),
    ],
)
def test_every_exception_is_one_line(
    error: BaseException, code: int, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(args: object) -> None:
        raise error

    monkeypatch.setattr(info, "run", fail)
    assert main.main(["info"]) == code
    assert capsys.readouterr().err == (f"fastcl info: error: {text}\n" if text else "")
    assert main.main(["info", "--debug"]) == code
    shown = capsys.readouterr().err
    assert ("Traceback" in shown) == bool(text)
    assert shown.endswith(f"fastcl info: error: {text}\n" if text else "")


@pytest.mark.parametrize("dim", [10**12, 10**18, 10**30])
@pytest.mark.parametrize("model", ["sasrec", "clrec", "multi_clrec", "bert4rec", "contrastvae"])
def test_a_model_too_large_for_the_memory_is_one_line(
    model: str, dim: int, log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["train", str(log), "--model", model, "--set", f"dim={dim}", "-o", str(tmp_path / "run")]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("fastcl train: error: out of memory")
    assert not (tmp_path / "run").exists()


def test_a_warning_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(info, "run", lambda args: warnings.warn("first\n  second", stacklevel=1))
    assert main.main(["info"]) == 0
    assert capsys.readouterr().err == "fastcl: note: first second\n"


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("/usr/bin/python3 /venv/bin/fastcl train log.csv", True),
        ("python -m fastcl.recsys info", True),
        ("python -u -W error -X utf8 -Im fastcl.recsys", True),
        ("python", False),
        ("python -c pass -m fastcl.recsys", False),
        ("python -m pytest fastcl", False),
        ("python train.py fastcl", False),
        ("python -W fastcl x.py", False),
        ("python -m", False),
    ],
)
def test_the_command_knows_itself(words: str, answer: bool) -> None:
    assert is_command(words.split()) == answer


SHOW = "import os; print(os.environ['OMP_WAIT_POLICY'])"
SCRIPT = "import sys\nfrom fastcl.recsys.cli.main import main\nsys.exit(main())\n"


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"])
def test_the_wish_of_the_user_for_waiting_threads_stands(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {name: "9"})
    let_threads_sleep()
    assert os.environ == {name: "9"}


def test_threads_sleep_and_a_foreign_folder_runs_nothing(tmp_path: Path) -> None:
    """Through a console script as pip makes it, started where files lie in wait under the names of Python's modules."""
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    for name in ("json", "random", "pkgutil", "torch", "numpy", "fastcl"):
        (foreign / f"{name}.py").write_text("raise SystemExit('ran')")
    (tmp_path / "show.py").write_text(SHOW)
    (tmp_path / "fastcl").write_text(SCRIPT)
    environment = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    script = [sys.executable, tmp_path / "fastcl", "--use", tmp_path / "show.py", "info"]
    done = subprocess.run(script, cwd=foreign, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0] == "passive"


def test_cores_are_those_of_the_container(tmp_path: Path) -> None:
    assert 1 <= cores() <= len(os.sched_getaffinity(0))
    own = tmp_path / "own"
    own.write_text("0::/a/b\n")
    (tmp_path / "root" / "a" / "b").mkdir(parents=True)
    assert _quota(tmp_path / "root", own) == np.inf
    (tmp_path / "root" / "a" / "b" / "cpu.max").write_text("max 100000\n")
    assert _quota(tmp_path / "root", own) == np.inf
    (tmp_path / "root" / "a" / "cpu.max").write_text("150000 100000\n")
    assert _quota(tmp_path / "root", own) == 1.5
    own.write_text("1:name=systemd:/x\n")
    assert _quota(tmp_path / "root", own) == np.inf


@pytest.mark.parametrize("number", ["0", "-1", str(cores() + 1), "300", "x", "1.5", ""])
def test_threads_are_bounded_by_the_cores(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["train", "log.csv", "--model", "sasrec", "-o", "run"], ["evaluate", "run"], ["demo"]):
        with pytest.raises(SystemExit) as stop:
            main.main([*words, f"--threads={number}"])
        assert stop.value.code == 2
        assert f"--threads: expected a whole number from 1 to {cores()}, the cores here" in capsys.readouterr().err


def test_every_command_that_computes_takes_threads() -> None:
    without = {leaf.prog for leaf in main.leaves(main.build_parser()) if "--threads" not in leaf._option_string_actions}
    # `resume` goes on with the number that the run was begun with; the others compute nothing.
    assert without == {"fastcl data check", "fastcl data prepare", "fastcl info", "fastcl models", "fastcl resume"}
