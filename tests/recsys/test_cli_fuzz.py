"""Every option of every command with values that nobody should give, found by looking at the parser: the exit code is 0
or 2, a refusal is one line that names an option of that command, and nothing is a traceback."""

import argparse
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from fastcl.recsys.cli import main
from fastcl.recsys.cli.console import FAULT

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = ["--epochs", "1", "--set", "dim=8", "batch=8"]
BASE = {
    "data check": ["log.csv"],
    "data prepare": ["log.csv", "-o", "new"],
    "train": ["log.csv", "--model", "sasrec", *SMALL, "max_len=5", "-o", "new"],
    "resume": ["sasrec"],
    "tune": ["log.csv", "--model", "sasrec", *SMALL, "max_len=5", "-o", "new"],
    "study": ["study.json", "--run"],
    "evaluate": ["sasrec"],
    "compare": ["sasrec", "multi_clrec"],
    "report": ["sasrec", "-o", "new"],
    "intents": ["multi_clrec"],
    "recommend": ["sasrec", "--history", "i1,i2"],
    "similar": ["sasrec", "i1"],
    "export": ["sasrec", "-o", "new"],
    "models": [],
    "bench": [],
    "demo": [],
    "info": [],
}
WHOLE = ["-1", "0", "x", "1.5", "", "9" * 20]
NUMBER = ["nan", "-1", "inf", "x", "0", "", "1e400"]
TEXT = [
    *("", "é", ",", "no/thing", "-1", "/", " ", "x", "a" * 300, "-", "/dev/null", "0", "1,", "1,1", "nan", "1e400"),
    *("\udcff", "log.csv", "sasrec", "2020-13-45", "9" * 30),
]
# What works in these takes seconds; in the others every command is a tenth of one.
SLOW = {"bench", "demo", "report"}


def test_every_command_is_tried() -> None:
    leaves = {leaf.prog.removeprefix("fastcl ") for leaf in main.leaves(main.build_parser())}
    assert leaves == set(BASE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A log of 20 users and two runs, in the current folder; leaves that again."""
    place, before = tmp_path_factory.mktemp("fuzz"), Path.cwd()
    os.chdir(place)
    rows = [f"u{user},i{(user * 7 + step * step) % 20},{step}" for user in range(20) for step in range(6)]
    Path("log.csv").write_text("user,item,time\n" + "\n".join(rows) + "\n")
    Path("items.csv").write_text("item,genre\n" + "".join(f"i{n},{'ab'[n % 2]}\n" for n in range(20)))
    floor = {"label": "floor", "data": "log", "model": "popular"}
    study = {"data": {"log": {"path": "log.csv"}}, "columns": ["recall@10"], "runs": [floor]}
    Path("study.json").write_text(json.dumps(study))
    for model, more in (("sasrec", ["max_len=5"]), ("multi_clrec", ["main=16", "secondary=16"])):
        words = ["train", "log.csv", "--item-features", "items.csv", "--model", model, *SMALL, *more, "-o", model]
        assert main.main(words) == 0
    yield place
    os.chdir(before)


def values(action: argparse.Action) -> list[str]:
    if action.choices:
        return ["nothing", "", *map(str, action.choices)]
    if action.dest == "threads" or action.type is int:
        return WHOLE
    return NUMBER if action.type is float else TEXT


Input = tuple[argparse.ArgumentParser, argparse.Action, list[str]]


def inputs() -> list[Input]:
    """(command, option, words) for every value of every option, the other words being such that they work."""
    found = []
    for leaf in main.leaves(main.build_parser()):
        command = leaf.prog.removeprefix("fastcl ")
        for action in leaf._actions:
            flags = action.option_strings
            for value in values(action) if action.nargs != 0 else []:
                works = value in ("0", "9" * 20, *map(str, action.choices or ())) or action.dest == "out"
                if command in SLOW and works:
                    continue
                given = [f"{flags[-1]}={value}"] if flags and flags[-1].startswith("--") else [*flags[-1:], value]
                base = BASE[command]
                words = [*base, *given] if flags else [value, *base[1:]]
                found.append((leaf, action, [*command.split(), *words]))
    return found


def complaint(leaf: argparse.ArgumentParser, words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What is wrong with how the command took the words; "" for nothing."""
    shutil.rmtree("new", ignore_errors=True)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # as that of a process writes an argument that is no UTF-8
    try:
        code = main.main(words)
    except SystemExit as stop:
        code = int(stop.code or 0)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    lines = capsys.readouterr().err.splitlines()
    if code == 0:
        return ""
    if code != 2:
        return f"exit code {code}"
    errors = [line for line in lines if ": error: " in line]
    if len(errors) != 1 or lines[-1] != errors[0] or "Traceback" in "".join(lines):
        return f"not one line at the end: {lines[-3:]}"
    text = errors[0].partition(": error: ")[2]
    if FAULT.partition("{")[0] in text:
        return text
    # It begins with an option of this command, a word of the command line (a file), or is argparse's own.
    options = [action.option_strings or [str(action.metavar or action.dest)] for action in leaf._actions]
    begins = re.split("[:,/ ]", text.removeprefix("argument "))[0]
    written = [word.encode(errors="backslashreplace").decode() for word in words]
    given = [part for word in written for part in (word, word.partition("=")[2]) if part]
    known = begins in itertools.chain(*options) or text.startswith(("the following", "unrecognized", *given))
    known = known or Path(re.split(r":(?:\d+:)? ", text)[0]).name in {Path(part).name for part in given}
    return "" if known else text


def check(chosen: Sequence[Input], capsys: pytest.CaptureFixture[str]) -> None:
    wrong = [f"{words}: {found}" for leaf, _, words in chosen if (found := complaint(leaf, words, capsys))]
    print(f"{len(chosen)} commands tried")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("command", BASE)
def test_a_bad_value_of_any_option_is_one_line(command: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    of_command = [entry for entry in inputs() if entry[0].prog == f"fastcl {command}"]
    few = {"data check": 3, "train": 3, "recommend": 3, "report": 1, "tune": 1}.get(command, 2)
    chosen = [entry for _, group in itertools.groupby(of_command, lambda e: e[1]) for entry in list(group)[:few]]
    assert chosen or command == "info"
    check(chosen, capsys)


@pytest.mark.slow
def test_every_value_of_every_option_is_taken_or_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(inputs(), capsys)


@pytest.mark.slow
def test_two_bad_values_at_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draw = random.Random(0)
    entries = [entry for entry in inputs() if entry[1].option_strings and entry[2][0] not in SLOW]
    chosen = []
    for _ in range(600):
        leaf, action, words = draw.choice(entries)
        others = [other for other in entries if other[0].prog == leaf.prog and other[1].dest != action.dest]
        if others:
            base = len(leaf.prog.split()) - 1 + len(BASE[leaf.prog.removeprefix("fastcl ")])
            chosen.append((leaf, action, words + draw.choice(others)[2][base:]))
    check(chosen, capsys)


@pytest.mark.slow
def test_killed_and_resumed_at_random_moments_ends_alike(folder: Path) -> None:
    words = [
        "--model",
        "sasrec",
        "--epochs",
        "40",
        "--save-every",
        "0",
        "--set",
        "dim=8",
        "batch=4",
        "max_len=5",
        "--threads",
        "1",
    ]
    program = [sys.executable, "-m", "fastcl.recsys"]
    subprocess.run([*program, "train", "log.csv", *words, "-o", "whole"], check=True, capture_output=True)
    draw, kills = random.Random(0), 0
    command = [*program, "train", "log.csv", *words, "-o", "killed"]
    for _ in range(12):
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            code = child.wait(draw.uniform(1.5, 4.0))
        except subprocess.TimeoutExpired:
            child.send_signal(draw.choice([signal.SIGKILL, signal.SIGINT, signal.SIGTERM]))
            child.wait()
            kills += 1
        else:
            assert code == 0, child.stderr.read() if child.stderr else ""
            command = [*program, "resume", "killed"]
            break
        if (Path("killed") / "config.json").exists():
            command = [*program, "resume", "killed"]
    assert kills >= 1
    subprocess.run(command, check=True, capture_output=True)  # to the end, whatever the machine's load was
    ends = [Path(run, "metrics.jsonl").read_text().count("\n") for run in ("whole", "killed")]
    assert ends == [40, 40]
    print(f"{kills} kills")
    weights = [Path(run, "model.safetensors").read_bytes() for run in ("whole", "killed")]
    from safetensors.torch import load

    (whole, killed) = map(load, weights)
    assert all(whole[name].equal(killed[name]) for name in whole)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["evaluate", " "], "argument RUN: expected a path, got ' '"),
        (
            ["data", "check", "log.csv", "--encoding=\udcff"],
            r"argument --encoding: expected text in UTF-8, got '\udcff'",
        ),
        (["compare", "sasrec", ""], "argument RUN: expected a path, got ['sasrec', '']"),
        (["evaluate", "sasrec", "--data", ""], "argument --data: expected a path, got ''"),
        (
            [*["train", *BASE["train"]], f"--epochs={'9' * 20}"],
            "argument --epochs: expected a whole number of at most 64",
        ),
        (
            [*["train", *BASE["train"]], f"--split-seed={'9' * 20}"],
            "argument --split-seed: expected a whole number of at",
        ),
    ],
)
def test_what_no_option_can_mean_is_refused_at_once(
    words: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main.main(words)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
