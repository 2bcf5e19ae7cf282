"""docs/contribute/adding-a-model.md: its code is taken out and run as a user would, from Python and from the shell."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from tiny_runs import stopped_after

from fastcl.recsys import MODELS, Interactions, SASRec, evaluate, fit, load, register, resume
from fastcl.recsys.cli import main

pytestmark = pytest.mark.usefixtures("one_thread")
PAGE = Path(__file__).parents[2] / "docs" / "contribute" / "adding-a-model.md"
MODEL, USE = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
COMMANDS = re.findall(r"^    fastcl (--use .*)$", PAGE.read_text(), re.M)
START = PAGE.parents[1] / "start" / "recommender.md"
LOG = next(block for block in re.findall(r"```python\n(.*?)```", START.read_text(), re.S) if 'open("log.csv"' in block)


@pytest.fixture
def pooled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """pooled.py in the current folder; what it registers is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("pooled.py").write_text(MODEL)
    yield Path("pooled.py")
    MODELS.pop("pooled", None)
    sys.modules.pop("pooled", None)


def table(path: Path) -> None:
    """40 users who walk along a ring of 30 items."""
    lines = ["user,item,time"]
    for user, start in enumerate(np.random.default_rng(0).integers(0, 30, 40)):
        lines += [f"u{user},i{(start + step) % 30},{step}" for step in range(8)]
    path.write_text("\n".join(lines) + "\n")


def test_the_page_trains_evaluates_loads_and_recommends(pooled: Path) -> None:
    exec(compile(USE, PAGE.name, "exec"), {})
    assert load("runs/pooled").name == "pooled"
    # And it learns: a ring is easy.
    table(Path("log.csv"))
    split = Interactions.read("log.csv").split()
    model = MODELS["pooled"](split.items, batch=32, seed=0)
    fit(model, split, epochs=20, lr=1e-2, progress=False)
    assert evaluate(model, split.test, counts=split.counts)["recall@10"] > 0.8  # chance: 10 of 23


def test_the_commands_of_the_page_run_behind_its_program(pooled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(USE, PAGE.name, "exec"), {})
    exec(LOG, {})
    assert len(COMMANDS) == 2
    for command in COMMANDS:
        MODELS.pop("pooled", None)  # each is a process of its own
        capsys.readouterr()
        assert main.main(shlex.split(command)) == 0, command
    assert len(capsys.readouterr().out.splitlines()) == 10


TIED = """
import torch
from torch import nn
from fastcl.recsys import MODELS, register
from pooled import Pooled

@register
class Tied(Pooled):
    name = "tied"

    def __init__(self, items, *, seed=0, **options):
        super().__init__(items, seed=seed, **options)
        self.out = nn.Linear(self.config.dim, len(items) + 1, bias=False)
        self.out.weight = self.item.weight
        self.register_buffer("frozen", torch.ones(3))
        self.register_buffer("again", self.frozen)
        self.overlap()

    def overlap(self):
        pass
"""


def test_tied_weights_are_trained_saved_loaded_and_resumed(pooled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("tied.py").write_text(TIED)
    made = __import__("tied").Tied
    table(Path("log.csv"))
    split = Interactions.read("log.csv").split()
    options = {"dim": 8, "batch": 64, "seed": 0}
    model = made(split.items, **options)
    fit(model, split, epochs=3, out="whole", progress=False)
    with stopped_after(2):
        fit(made(split.items, **options), split, epochs=3, out="stopped", progress=False)
    resume("stopped", split, progress=False)
    assert Path("stopped/model.safetensors").read_bytes() == Path("whole/model.safetensors").read_bytes()
    loaded = load("stopped")
    assert loaded.out.weight is loaded.item.weight
    assert torch.equal(loaded.item.weight, model.item.weight)
    with safe_open("whole/model.safetensors", "pt") as file:
        assert sorted(file.keys()) == ["frozen", "item.weight"]
    # What shares a part of its memory has no such first name.
    monkeypatch.setattr(made, "overlap", lambda self: self.register_buffer("part", self.item.weight.detach()[2:]))
    with pytest.raises(ValueError, match="two names; part overlaps item.weight"):
        fit(made(split.items, **options), split, epochs=1, out="part", progress=False)
    assert not Path("part").exists()
    for odd, error, words in (
        (torch.ones(1).expand(5), ValueError, "elements of part share theirs"),
        (torch.eye(3).to_sparse(), TypeError, "expected dense tensors in its state dict, got .*sparse_coo for part"),
    ):
        monkeypatch.setattr(made, "overlap", lambda self, odd=odd: self.register_buffer("part", odd))
        with pytest.raises(error, match=words):
            fit(made(split.items, **options), split, epochs=1, progress=False)
    MODELS.pop("tied")
    sys.modules.pop("tied")


def test_the_command_line_uses_a_file_of_the_user(pooled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table(Path("log.csv"))
    train = ["train", "log.csv", "--model", "pooled", "--set", "dim=8", "batch=16", "--epochs", "3", "-o", "run"]
    with pytest.raises(SystemExit):
        main.main(train)
    assert main.main(["--use", "pooled.py", *train]) == 0
    assert main.main(["recommend", "run", "--history", "i3,i4", "-k", "3"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_a_run_folder_executes_nothing(pooled: Path) -> None:
    """In a process of its own, where the model is unknown and its file lies in reach."""
    table(Path("log.csv"))
    command = ["train", "log.csv", "--model", "pooled", "--set", "dim=8", "batch=16", "--epochs", "1", "-o", "run"]
    assert main.main(["--use", "pooled.py", *command]) == 0
    Path("pooled.py").write_text("raise SystemExit('ran')")
    alone = [sys.executable, "-m", "fastcl.recsys", "recommend", "run", "--history", "i3"]
    done = subprocess.run(alone, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 2
    assert "got 'pooled'; for a model of your own: `fastcl --use FILE ...`" in done.stderr
    assert "ran" not in done.stderr.split()


def test_a_file_that_fails_is_one_line(pooled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("broken.py").write_text("1 / 0")
    for file, reason in (("broken.py", "ZeroDivisionError"), ("nowhere.py", "FileNotFoundError"), ("log.csv", "got")):
        assert main.main(["--use", file, "info"]) == 2
        error = capsys.readouterr().err
        assert reason in error
        assert len(error.splitlines()) == 1


def test_what_cannot_be_registered_is_refused() -> None:
    with pytest.raises(TypeError, match="model: expected a subclass of Model, got <class 'int'>"):
        register(int)
    with pytest.raises(TypeError, match="expected a name and a dataclass Config in Nameless"):
        register(type("Nameless", (SASRec,), {"name": ""}))
    with pytest.raises(ValueError, match="expected a name that is free, got 'sasrec', the name of SASRec"):
        register(type("Other", (SASRec,), {}))
