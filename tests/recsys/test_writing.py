"""Outputs: what a killed writer leaves, what may not be replaced, and messages that name the user's path."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import ended, forked

from fastcl.recsys import SASRec, export, save, writing
from fastcl.recsys.cli import main
from fastcl.recsys.data import Interactions, Items
from fastcl.recsys.training import lock, tensorfile

pytestmark = pytest.mark.usefixtures("one_thread")


class Killed(BaseException):
    """A process that ends here."""


@pytest.fixture
def killed_at(monkeypatch: pytest.MonkeyPatch) -> Any:
    """killed_at(n): the nth call that changes a name, and all after it, raise; returns how many calls there were."""
    calls: dict[str, Any] = {"made": 0, "left": None}
    true = {name: getattr(os, name) for name in ("replace", "unlink")}

    def counted(name: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            if calls["left"] is not None and calls["made"] >= calls["left"]:
                raise Killed
            calls["made"] += 1
            return true[name](*args, **options)

        return call

    for name in true:
        monkeypatch.setattr(os, name, counted(name))

    def begin(left: int | None) -> dict[str, Any]:
        calls.update(made=0, left=left)
        return calls

    return begin


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_a_set_is_the_earlier_one_the_new_one_or_has_no_last_file(tmp_path: Path, killed_at: Any) -> None:
    out = tmp_path / "out"

    def write(content: bytes) -> None:
        writing.write_set(out, {name: [content, b"!"] for name in "abc"}, without=["d"])

    calls = killed_at(None)
    write(b"one")
    made = calls["made"]
    assert made >= 5
    for left in range(made):
        killed_at(None)
        write(b"one")
        (out / "d").write_bytes(b"one!")
        killed_at(left)
        with pytest.raises(Killed):
            write(b"two")
        killed_at(None)
        found = contents(out)
        if "c" in found:
            assert {found[name] for name in "abc"} in ({b"one!"}, {b"two!"}), left
            assert found.get("d", b"") == (b"one!" if found["c"] == b"one!" else b"")
        write(b"three")
        assert contents(out) == {name: b"three!" for name in "abc"}, "something was left behind"


def test_nothing_is_lost_where_writing_fails(tmp_path: Path) -> None:
    def fails() -> Iterator[bytes]:
        yield b"begun"
        raise ValueError("the content")

    writing.write_set(tmp_path, {"a": [b"1"], "b": [b"1"]})
    with pytest.raises(ValueError, match="the content"):
        writing.write_set(tmp_path, {"a": [b"2"], "b": fails()})
    with pytest.raises(ValueError, match="the content"):
        writing.write_parts(tmp_path / "a", fails())
    assert contents(tmp_path) == {"a": b"1", "b": b"1"}


def test_what_a_killed_process_left_goes_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / ".notes.tmp").write_text("of the user")
    (tmp_path / ".table.csv.17.tmp").write_text("of the user")
    (tmp_path / ".fastcl-.tmp").write_text("of the user")

    def killed() -> None:
        writing.write_parts(tmp_path / "table.csv", (os.kill(os.getpid(), 9) if n else b"x" for n in range(2)))

    assert ended(forked(killed)) == -9
    (left,) = (name for name in os.listdir(tmp_path) if writing.is_left(name))
    inside, go_on = threading.Event(), threading.Event()

    def slowly() -> Iterator[bytes]:
        yield b"slow"
        inside.set()
        go_on.wait(60)
        yield b"ly"

    writer = threading.Thread(target=writing.write_parts, args=(tmp_path / "slow", slowly()))
    writer.start()
    assert inside.wait(60)
    assert left not in os.listdir(tmp_path)
    writing.sweep(tmp_path)  # takes what is left, not what is being written
    writing.write_text(tmp_path / "table.csv", "whole")
    go_on.set()
    writer.join()
    names = {".notes.tmp", ".table.csv.17.tmp", ".fastcl-.tmp", "table.csv", "slow"}
    assert set(os.listdir(tmp_path)) == names
    assert (tmp_path / "slow").read_text() == "slowly"


def test_without_locks_nothing_that_may_be_in_writing_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)

    def parts() -> Iterator[bytes]:
        yield b"sl"
        writing.write_text(tmp_path / "other", "meanwhile")  # sweeps
        yield b"ow"

    writing.write_parts(tmp_path / "slow", parts())
    assert contents(tmp_path) == {"slow": b"slow", "other": b"meanwhile"}
    with lock.held(tmp_path / "run"):
        (tmp_path / "run" / "config.json").touch()


def test_links_devices_and_pipes_stay_what_they_are(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    target, link, dangling = (tmp_path / name for name in ("target", "link", "dangling"))
    target.write_text("old")
    target.chmod(0o640)
    link.symlink_to("target")
    dangling.symlink_to("made")
    for path in (link, dangling):
        writing.write_text(path, "new")
        assert path.is_symlink()
    assert (target.read_text(), (tmp_path / "made").read_text()) == ("new", "new")
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE)
    writing.write_text(pipe, "through")
    assert reader.communicate(timeout=60)[0] == b"through"
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    to_null = tmp_path / "null"
    to_null.symlink_to("/dev/null")
    writing.write_text(to_null, "away")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    print("before")
    writing.write_text(Path("/dev/stdout"), "written\n")
    print("after", flush=True)
    assert capfd.readouterr().out == "before\nwritten\nafter\n"
    with open(tmp_path / "log", "w") as log:
        number = log.fileno()
        for _ in range(2):
            writing.write_text(Path(f"/dev/fd/{number}"), "line\n")
    assert (tmp_path / "log").read_text() == "line\nline\n"


def test_errors_name_the_path_that_was_given(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "full").symlink_to("/dev/full")
    for name, words in (
        ("folder", "got a folder"),
        ("none/file", "there is no folder"),
        ("loop", "symbolic links"),
        ("full", "No space left"),
    ):
        with pytest.raises(OSError, match=words) as caught:
            writing.write_text(tmp_path / name, "x" * 100_000)
        assert caught.value.filename == str(tmp_path / name)
    # What a write left in the buffer is flushed again when the file is closed, and fails again.
    size = resource.getrlimit(resource.RLIMIT_FSIZE)
    for name, words in (("full", "No space left"), ("large", "File too large")):
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, size[1]))
            with pytest.raises(OSError, match=words) as caught:
                writing.write_parts(tmp_path / name, [b"x" * 1000] * 100)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, size)
        assert caught.value.filename == str(tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "full", "loop"]
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="out: expected a folder, got a file"):
        writing.check_folder("out", tmp_path / "file" / "below")


ITEMS = Items(tuple(f"i{n}" for n in range(9)))


def test_commands_never_replace_what_they_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, users, run = tmp_path / "log.csv", tmp_path / "users.csv", tmp_path / "run"
    rows = [f"u{user},i{(user + step) % 9},{step}" for user in range(9) for step in range(4)]
    for path in (log, users):
        path.write_text("\n".join(["user,item,time", *rows]) + "\n")
    model = SASRec(Interactions.read(log).items, seed=0, dim=4, heads=1, blocks=1)
    save(model, run, {"data": {"path": str(log)}, "split": {"how": "last-one"}})
    (tmp_path / "alias").symlink_to("log.csv")
    before = {path: path.read_bytes() for path in (log, users, *run.iterdir())}
    for out, words in (
        (users, "expected another file than"),
        (log, "than the path of the run's data"),
        (tmp_path / "alias", "than the path of the run's data"),
        (run / "config.json", "than config.json of the run"),
        (run / "model.safetensors", "than model.safetensors of the run"),
        (run, "got a folder"),
        (tmp_path / "no" / "where.csv", "no folder"),
    ):
        assert main.main(["recommend", str(run), "--users", str(users), "-o", str(out)]) == 2
        shown = capsys.readouterr().err.splitlines()
        assert words in shown[-1], shown
        assert str(out) in shown[-1]
        if out != users:
            assert main.main(["compare", str(run), "--csv", str(out)]) == 2
            assert words in capsys.readouterr().err
    more = tmp_path / "more.csv"
    more.write_bytes(log.read_bytes())
    lists = ["recommend", str(run), "--users", str(users)]
    for option, mark in (("--data", ""), ("--items", ""), ("--only", "@"), ("--without", "@")):
        assert main.main([*lists, option, f"{mark}{more}", "-o", str(more)]) == 2
        assert f"-o: expected another file than {option}, got {more}" in capsys.readouterr().err
        assert more.read_bytes() == log.read_bytes()
    more = more.rename(tmp_path / "ids.json")
    assert main.main([*lists, "--index", str(tmp_path), "-o", str(more)]) == 2
    assert f"-o: expected another file than ids.json of --index, got {more}" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in before} == before
    assert main.main([*lists, "--without", "i0", "-o", "/dev/null"]) == 0
    for command in ("export", "report"):
        assert main.main([command, str(run), "-o", str(users)]) == 2
        assert f"{users}: -o: expected a folder, got a file" in capsys.readouterr().err
    faiss = ("export", "--to", "faiss")
    for command, option, name in (
        (faiss, "--queries", "ids.json"),
        (faiss, "--queries", "vectors.npy"),
        (("report",), "--data", "index.html"),
        (("report",), "--data", "numbers.json"),
    ):
        (tmp_path / name).write_bytes(log.read_bytes())
        assert main.main([*command, str(run), option, str(tmp_path / name), "-o", str(tmp_path)]) == 2
        assert f"-o: expected another file than {option}, got {tmp_path / name}" in capsys.readouterr().err
        assert (tmp_path / name).read_bytes() == log.read_bytes()
    save(model, run, {"data": {"path": str(tmp_path / "ids.json"), "format": "csv"}, "split": {"how": "last-one"}})
    assert main.main(["export", str(run), "-o", str(tmp_path)]) == 2
    assert "-o: expected another file than the path of the run's data" in capsys.readouterr().err


def test_a_killed_export_leaves_no_mixture(tmp_path: Path, killed_at: Any) -> None:
    one, two = (SASRec(ITEMS, seed=seed, dim=4, heads=1, blocks=1) for seed in (0, 1))
    out = tmp_path / "out"
    export(one, out)
    of_one = contents(out)
    calls = killed_at(None)
    export(two, tmp_path / "two")
    of_two = contents(tmp_path / "two")
    assert of_one["vectors.npy"] != of_two["vectors.npy"]
    for left in range(calls["made"]):
        killed_at(left)
        with pytest.raises(Killed):
            export(two, out)
        found = contents(out)
        killed_at(None)
        if "export.json" in found:
            assert all(found[name] == of_one[name] for name in of_one) or all(found[n] == of_two[n] for n in of_two)
        export(one, out)
        assert contents(out) == of_one


def test_equal_tensors_make_equal_bytes_and_a_file_that_the_library_reads(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    tensors = {
        "turned": torch.randn(5, 6).T,
        "number": torch.tensor(3.0),
        "flags": torch.tensor([True, False, True]),
        "empty": torch.zeros(0, 3),
        "half": torch.randn(7).bfloat16(),
        "wide": torch.randn(2, 3).expand(4, 2, 3),
        "é": torch.arange(4),
    }
    facts = {"format": "2", "kind": "a", "model": "b"}
    tensorfile.write_tensors(tmp_path / "a", tensors, facts)
    tensorfile.write_tensors(tmp_path / "b", dict(reversed(tensors.items())), dict(reversed(facts.items())))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    found, said = tensorfile.read_tensors(tmp_path / "a")
    assert said == facts
    for read in (found, load_file(tmp_path / "a")):
        assert read.keys() == tensors.keys()
        assert all(torch.equal(read[name], tensors[name]) for name in tensors)
    with pytest.raises(TypeError, match="odd: expected a tensor of F64, .*, got torch.complex64"):
        tensorfile.write_tensors(tmp_path / "a", {"odd": torch.zeros(1, dtype=torch.complex64)}, {})


def test_saving_takes_no_second_copy_of_the_tensors(tmp_path: Path) -> None:
    """In a process of its own, whose peak is its own: 192 MiB of tensors and a model that keeps them."""
    code = (
        "import resource, sys, torch; from pathlib import Path; from fastcl.recsys.training import tensorfile as t\n"
        "tensors = {'a': torch.ones(2**25), 'b': torch.ones(2**12, 2**12).T}\n"
        f"out = Path({str(tmp_path / 'x')!r})\n"
        "t.write_tensors(out, {'warm': torch.ones(3)}, {})\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "t.write_tensors(out, tensors, {})\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    grown = int(done.stdout) / (1 if sys.platform == "darwin" else 1024)  # MiB
    assert grown < 48, f"{grown:.0f} MiB more"
