"""Installs the wheels of dist/ where they can run on this machine, and runs the self-test and the losses' tests there.

    python -m building.try_wheels [--torch 2.13.0] [--python NAME=COMMAND ...] [--only PLACE;PLACE]

A place is a wheel with a Python, a torch and a processor; `places` lists them. In each one the tests run from a folder
outside the repository, which holds the tests but not the sources, and nothing on PATH but the environment: no compiler.
The first places are environments made here. Each COMMAND starts another Python that has torch, pytest and hypothesis,
of another version or emulated; NAME is its row in the table. What has run is not run again for the same wheel. Results
go to benchmarks/results/wheels.json and wheels.md.
"""

import argparse
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import RESULTS, markdown, write_json, write_text
from building.wheels import ROOT, digest

# Of values and gradients of all operators and losses, in all dtypes, on all instruction sets.
LOSSES = [f"tests/core/test_{name}.py" for name in (
    "isa", "contrast", "losses", "pairwise", "normalize", "both_ways", "views", "softmax", "soft", "infinities",
    "refused", "raw_ops",
)]  # fmt: skip
# With another Python or torch the kernels are the same: what calls them is tested.
SOME = [f"tests/core/test_{name}.py" for name in ("contrast", "losses")]
# Emulated, a test takes some hundred times as long: every instruction set in all dtypes, at three shapes.
FEW = ["tests/core/test_isa.py", "-k", "agrees and 1- and (2-3-5 or 33-31-15 or 65-129-16)"]


class Place(NamedTuple):
    name: str
    wheel: str  # the end of its file's name
    python: list[str] | None  # its command; None for an environment of its own
    tests: list[str]
    limit: int  # seconds


def places(commands: list[str]) -> Iterator[Place]:
    yield Place("Linux x86_64", "x86_64.whl", None, LOSSES, 3000)
    yield Place("Linux x86_64, no kernels", "any.whl", None, ["tests/core/test_losses.py"], 1000)
    for named in commands:
        name, _, command = named.partition("=")
        python = shlex.split(command)
        code, printed = run([*python, "-c", "import platform; print(platform.machine())"], ROOT.parent, 600)
        if code != 0:
            raise SystemExit(f"--python: expected NAME=COMMAND of a Python, got {named}: {printed[-2000:]}")
        machine = printed.split()[-1]
        emulated = machine != platform.machine()
        yield Place(name, f"{machine}.whl", python, FEW if emulated else SOME, 7200 if emulated else 3000)


def run(command: list[str], folder: Path, limit: int, **env: str) -> tuple[int, str]:
    try:
        done = subprocess.run(
            command, cwd=folder, env=os.environ | env, text=True, check=False, timeout=limit,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        return done.returncode, done.stdout
    except subprocess.TimeoutExpired as late:
        text = late.stdout or b""
        return 124, text.decode() if isinstance(text, bytes) else text


def environment(folder: Path, wheel: Path, torch: str) -> list[str]:
    """The command of a fresh Python with a torch, the wheel and what tests take."""
    python = folder / "venv" / "bin" / "python"
    commands = [
        [sys.executable, "-m", "venv", str(folder / "venv")],
        [str(python), "-m", "pip", "-q", "install", "--no-compile", f"torch=={torch}"],
        [str(python), "-m", "pip", "-q", "install", str(wheel), "pytest", "hypothesis", "numpy"],
    ]
    for command in commands:
        code, printed = run(command, folder, 1200)
        if code != 0:
            raise SystemExit(f"{' '.join(command)}\n{printed[-2000:]}")
    return [str(python)]


def tried(place: Place, wheel: Path, torch: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        left_out = shutil.ignore_patterns("__pycache__", "recsys", "cuda")
        shutil.copytree(ROOT / "tests", folder / "tests", ignore=left_out)
        shutil.copy(ROOT / "pyproject.toml", folder)
        path = {"PATH": str(folder / "venv" / "bin"), "OMP_WAIT_POLICY": "passive"}
        if place.python is None:
            python = environment(folder, wheel, torch)
        else:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder / "installed")
            python, path = place.python, {"OMP_WAIT_POLICY": "passive", "PYTHONPATH": str(folder / "installed")}
        code, selftest = run([*python, "-m", "fastcl.selftest"], folder, 1200, **path)
        command = [*python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *place.tests]
        _, printed = run(command, folder, place.limit, **path)
    counts = re.findall(r"(\d+) (passed|failed|skipped|errors?)\b", printed.splitlines()[-1] if printed else "")
    return {
        "wheel": digest(wheel),
        "facts": facts(selftest),
        "selftest": selftest.splitlines()[-1].split(";")[0] if code == 0 else f"failed: {selftest[-500:]}",
        "tests": ", ".join(f"{n} {word}" for n, word in counts) or f"stopped: {printed[-500:]}",
        "failed": re.findall(r"^(?:FAILED|ERROR) (\S+)", printed, re.M),
    }


def facts(selftest: str) -> str:
    """What the self-test says of the Python, torch and the processor."""
    said = dict(re.findall(r"^(python|torch|system|isas) +(.*)$", selftest, re.M))
    if len(said) < 4:
        return "unknown"
    machine = said["system"].split(", ")[-2]
    return f"{said['python']}, torch {said['torch']}, {machine}, instruction sets: {said['isas'] or 'none'}"


def table(record: dict[str, dict[str, Any]]) -> str:
    rows = [{"place": name, "with": r["facts"], "self-test": r["selftest"], "losses' tests": r["tests"]}
            for name, r in record.items()]  # fmt: skip
    return markdown(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", default="2.13.0")
    parser.add_argument("--python", action="append", default=[], help="NAME=COMMAND of another Python that has torch")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist")
    parser.add_argument("--only", default="", help="names of places, with ; between them")
    args = parser.parse_args()
    file = RESULTS / "wheels.json"
    record = json.loads(file.read_text()) if file.exists() else {}
    for place in places(args.python):
        if args.only and place.name not in args.only.split(";"):
            continue
        found = sorted(args.dist.resolve().glob(f"fastcl-*{place.wheel}"))
        if not found:
            raise SystemExit(f"{args.dist}: expected a wheel *{place.wheel}, found none; run make wheels")
        if record.get(place.name, {}).get("wheel") == digest(found[0]):
            continue
        record[place.name] = tried(place, found[0], args.torch)
        print(place.name, record[place.name], flush=True)
        write_json(file, record)
        write_text(RESULTS / "wheels.md", f"# Where the wheels ran\n\n{table(record)}\n")


if __name__ == "__main__":
    main()
