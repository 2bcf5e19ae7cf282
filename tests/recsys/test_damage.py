"""Run folders that are damaged, changed by hand, or made by somebody else: every command works or ends in one line.

Two tables of mutants: files changed behind fastcl's back, and folders that are consistent in themselves (all digests
fit), as somebody who means harm would make them.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import stopped_after

from fastcl.recsys import SASRec, fit
from fastcl.recsys.cli import main
from fastcl.recsys.cli.console import FAULT
from fastcl.recsys.data.source import Source
from fastcl.recsys.training import checkpoint, tensorfile

pytestmark = pytest.mark.usefixtures("one_thread")
FAULTY = FAULT.partition("{")[0]
STEPS = 3  # of an epoch
DEEP = "[" * 100_000 + "]" * 100_000
VALUES: list[Any] = [
    None, True, -1, 0, 3, 2**70, 0.5, -0.0, 1e300, math.nan, math.inf, "", "x", "\ud800", "\0", "1", [], [1], [[1]],
    ["a"], [None], {}, {"a": 1}, {"path": 1}, DEEP,
]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one of two epochs, with an item feature, beside its data."""
    torch.set_num_threads(1)  # a fixture of the module is made before `one_thread` of the test
    folder = tmp_path_factory.mktemp("damage")
    table, items = folder / "log.csv", folder / "items.csv"
    rows = [f"u{user},i{(user * 3 + step) % 9},{1000 * user + step}" for user in range(9) for step in range(5)]
    table.write_text("\n".join(["user,item,time", *rows]) + "\n")
    items.write_text("item,kind\n" + "".join(f"i{n},{'ab'[n % 2]}\n" for n in range(9)))
    command = ["train", table, "--item-features", items, "--model", "sasrec", "--epochs", "2", "--threads", "1"]
    settings = ["--set", "dim=4", "heads=1", "blocks=1", "max_len=4", "batch=4", "-o", folder / "run"]
    assert main.main([str(word) for word in [*command, *settings]]) == 0
    return folder / "run"


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of a JSON document; of a list, the first entry."""
    yield path
    children = (
        value.items() if isinstance(value, dict) else list(enumerate(value))[:1] if isinstance(value, list) else []
    )
    for key, child in children:
        yield from paths(child, (*path, key))


def changed(document: Any, path: tuple[Any, ...], value: Any) -> str:
    """The document with `value` at `path`, as text; DEEP is a text that is put in as it is."""
    document = json.loads(json.dumps(document))
    marker = "\N{BULLET}" if value is DEEP else value
    if not path:
        document = marker
    else:
        place = document
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = marker
    return json.dumps(document).replace('"\\u2022"', DEEP)


def without(document: Any, path: tuple[Any, ...]) -> str:
    document = json.loads(json.dumps(document))
    place = document
    for key in path[:-1]:
        place = place[key]
    del place[path[-1]]
    return json.dumps(document)


def mutants(document: Any) -> Iterator[tuple[str, str]]:
    """(what was done, the text) of every field with every value, without it, and with one more beside it."""
    for path in paths(document):
        for value in VALUES:
            yield f"{path} = {str(value)[:20]!r}", changed(document, path, value)
        if path:
            yield f"{path} gone", without(document, path)
    for path in paths(document):
        place = document
        for key in path:
            place = place[key]
        if isinstance(place, dict):
            yield f"{path} has more", changed(document, (*path, "more"), {"a": [1]})


def cut(data: bytes) -> Iterator[tuple[str, bytes]]:
    for size in sorted({0, 1, 7, 8, 9, len(data) // 2, len(data) - 1}):
        yield f"cut to {size}", data[:size]
    yield "longer", data + b"1"
    yield "zeros", b"\0" * len(data)
    yield "no UTF-8", b"\xff\xfe" + data


def commands(run: Path, out: Path) -> dict[str, list[str]]:
    return {
        "recommend": ["recommend", str(run), "--history", "i1,i2", "-k", "2"],
        "evaluate": ["evaluate", str(run)],
        "resume": ["resume", str(run)],
        "export": ["export", str(run), "-o", str(out)],
        "report": ["report", str(run), "-o", str(out)],
    }


class Tried:
    """Runs commands on mutants of a run and counts them; what is no clear refusal is kept."""

    def __init__(self, run: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.run, self.folder, self.capsys = run, folder, capsys
        self.count = 0
        self.bad: list[str] = []

    def mutant(self, what: str, names: tuple[str, ...], **files: bytes) -> None:
        copy = self.folder / "run"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(self.run, copy)
        for name, data in files.items():
            (copy / name.replace("__", ".")).write_bytes(data)
        for name in names:
            before = {path.name: path.read_bytes() for path in copy.iterdir()}
            self.count += 1
            try:
                code = main.main(commands(copy, self.folder / "out")[name])
            except BaseException as error:
                self.bad.append(f"{what}: {name}: {type(error).__name__}: {error}")
                continue
            said = self.capsys.readouterr().err.splitlines()
            faults = [line for line in said if "error:" in line]
            if code not in (0, 2) or len(faults) != (code == 2) or any(FAULTY in line for line in said):
                self.bad.append(f"{what}: {name}: code {code}: {said[-1:]}")
            if code == 2 and {path.name: path.read_bytes() for path in copy.iterdir()} != before:
                self.bad.append(f"{what}: {name}: changed the folder it refused")

    def end(self, least: int) -> None:
        print(f"{self.count} commands on mutants")
        assert not self.bad, "\n".join(self.bad)
        assert self.count >= least


ALL = ("recommend", "evaluate", "resume", "export")


def of_turn(number: int, every: int) -> tuple[str, ...]:
    """The commands of a mutant: all of them, or in the short form one after the other."""
    return ALL if every == 1 else (ALL[number % len(ALL)],)


def some(mutants: Iterator[tuple[str, Any]], every: int) -> list[tuple[str, Any]]:
    return [mutant for number, mutant in enumerate(mutants) if number % every == 0]


@pytest.mark.parametrize("every", [29, pytest.param(1, marks=pytest.mark.slow)])
def test_files_that_were_changed(every: int, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tried = Tried(run, tmp_path, capsys)
    for name in checkpoint.FILES:
        data = (run / name).read_bytes()
        for what, content in some(cut(data), 1 + every // 15):
            tried.mutant(f"{name} {what}", of_turn(tried.count, every), **{name.replace(".", "__"): content})
        if name.endswith(".json"):
            for what, text in some(mutants(json.loads(data)), every):
                tried.mutant(f"{name} {what}", of_turn(tried.count, every), **{name.replace(".", "__"): text.encode()})
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for what, text in some(mutants(lines[0]), 8 * every):
        content = f"{text}\n{json.dumps(lines[1])}\n".encode()
        tried.mutant(f"metrics.jsonl {what}", ("report",) if every == 1 else ("evaluate",), metrics__jsonl=content)
    tried.end(80 if every > 1 else 4000)


def signed(run: Path, config: str, items: str) -> dict[str, bytes]:
    """The files of a run of this config.json and items.json with tensors that say they belong to it."""
    try:
        document = json.loads(config)
        belongs = checkpoint.identity(document, items.encode())
        wanted = {name: document.get(name) for name in [*SETTINGS, "data_sha256"]}
    except (RecursionError, ValueError, TypeError, KeyError, AttributeError, UnicodeEncodeError):
        belongs, wanted = "", {}
    files = {"config__json": config.encode(), "items__json": items.encode("utf-8", "surrogatepass")}
    for name in ("model", "last"):
        tensors, facts = tensorfile.read_tensors(run / f"{name}.safetensors")
        facts["belongs"] = belongs
        if name == "last":
            facts["settings"] = json.dumps(wanted)
        files[f"{name}__safetensors"] = b"".join(tensorfile.tensor_parts(tensors, facts))
    return files


SETTINGS = (
    *("epochs", "lr", "seed", "seen", "metric", "patience", "valid_cases", "precision", "accumulate"),
    *("save_every", "device", "threads", "processes"),
)
ENDLESS = ("epochs", "blocks", "accumulate")  # large values of these are work without end, which is fair


@pytest.mark.parametrize("every", [31, pytest.param(1, marks=pytest.mark.slow)])
def test_folders_that_fit_in_themselves(
    every: int, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, items = (run / "config.json").read_text(), (run / "items.json").read_text()
    tried = Tried(run, tmp_path, capsys)
    for what, text in some(mutants(json.loads(config)), every):
        if not any(f"'{name}'" in what for name in ENDLESS) or "e+" not in what:
            tried.mutant(f"config.json {what}", of_turn(tried.count, every), **signed(run, text, items))
    for what, text in some(mutants(json.loads(items)), every // 3 + 1):
        tried.mutant(f"items.json {what}", of_turn(tried.count, every), **signed(run, config, text))
    tried.end(70 if every > 1 else 4000)


def with_tensors(run: Path, name: str, change: Any) -> dict[str, bytes]:
    """A tensor file with a right checksum after `change(tensors, facts)`."""
    tensors, facts = tensorfile.read_tensors(run / f"{name}.safetensors")
    change(tensors, facts)
    return {f"{name}__safetensors": b"".join(tensorfile.tensor_parts(tensors, facts))}


def tensor_mutants(run: Path, name: str) -> Iterator[tuple[str, dict[str, bytes]]]:
    tensors, _ = tensorfile.read_tensors(run / f"{name}.safetensors")
    others = {
        "one row": lambda x: x[:1] if x.ndim else x[None],
        "a row more": lambda x: torch.cat([x, x[:1]]) if x.ndim else x.repeat(3),
        "empty": lambda x: x.flatten()[:0],
        "a number": lambda x: x.flatten()[0] if x.ndim else x - 1,
        "whole": lambda x: x.to(torch.int64) if x.is_floating_point() else x.to(torch.int16),
        "double": lambda x: x.double(),
        "NaN": lambda x: torch.full_like(x, math.nan) if x.is_floating_point() else x - 1,
        "turned": lambda x: x.T.contiguous() if x.ndim == 2 else x[:, None] if x.ndim == 1 else x * 0,
    }
    for key in tensors:
        for what, other in others.items():
            change = lambda found, _, key=key, other=other: found.update({key: other(found[key]).contiguous()})  # noqa: E731
            yield f"{key} {what}", with_tensors(run, name, change)
        yield f"{key} gone", with_tensors(run, name, lambda found, _, key=key: found.pop(key))
    yield "one more", with_tensors(run, name, lambda found, _: found.update(odd=torch.zeros(2)))
    yield "optimizer/odd", with_tensors(run, name, lambda found, _: found.update({"optimizer/odd": torch.zeros(2)}))
    kept = [key for key in tensors if not key.startswith("optimizer/")]
    forget = lambda found, facts: (facts.update(moments="[]"), [found.pop(k) for k in list(found) if k not in kept])  # noqa: E731
    yield "no moments", with_tensors(run, name, forget)


@pytest.mark.parametrize("every", [31, pytest.param(1, marks=pytest.mark.slow)])
def test_tensors_with_a_right_checksum(
    every: int, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of an unfinished run, so that the optimiser goes on with them: the fused Adam trusts what it is given."""
    tried = Tried(unfinished(run, tmp_path), tmp_path, capsys)
    for name in ("last", "model"):
        for what, files in some(tensor_mutants(tried.run, name), every):
            tried.mutant(
                f"{name} {what}", ("resume",) if name == "last" else ("recommend", "resume", "export"), **files
            )
        _, facts = tensorfile.read_tensors(tried.run / f"{name}.safetensors")
        for fact in facts:
            document = json.loads(facts[fact]) if facts[fact][:1] in "[{" else facts[fact]
            for what, text in some(mutants(document), every):
                files = with_tensors(tried.run, name, lambda _, found, fact=fact, text=text: found.update({fact: text}))
                tried.mutant(f"{name} {fact} {what}", ("resume",), **files)
    tried.end(40 if every > 1 else 800)


def unfinished(run: Path, folder: Path) -> Path:
    """The same run stopped in the middle of its second epoch."""
    config = checkpoint.read_config(run)
    split = Source.recorded(config).split()
    model = SASRec(split.items, seed=0, **config["config"])
    record = {"data": config["data"], "split": config["split"]}
    with stopped_after(STEPS + 1):
        fit(model, split, epochs=2, save_every=0.0, out=folder / "begun", record=record, progress=False)
    progress = json.loads(tensorfile.read_facts(folder / "begun" / "last.safetensors")["progress"])
    assert (progress["step"], len(progress["history"])) == (1, 1)
    return folder / "begun"
