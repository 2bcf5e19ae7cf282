"""Installs the wheels of dist/ where they can run on this machine, and uses and tests them there.

    python -m building.try_wheels [--torch 2.13.0] [--python NAME=COMMAND ...] [--emulated NAME=COMMAND ...]
                                  [--only PLACE;PLACE] [--dist dist]

A place is a wheel with a Python, a torch and a processor; `places` lists them. In each one pip installs the wheel, and
then run the self-test, the README's first snippet, the first epoch of a demo on some households, and the losses' tests.
They run from a folder outside the repository, which holds the tests but not the sources, and nothing on PATH but the
environment: no compiler. The first places are environments made here. Each COMMAND starts another Python that has pip,
torch, pytest, hypothesis and safetensors: of another version or system, or emulated, where a test takes some hundred
times as long. NAME is its row. What has passed is not run again for a wheel.
Results go to benchmarks/results/wheels.json and wheels.md, after each step.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import RESULTS, markdown, write_json, write_text
from building.wheels import ROOT, SUMS, digest

# Of values and gradients of all operators and losses, in all dtypes, on all instruction sets.
LOSSES = {name: [f"tests/core/test_{name}.py"] for name in (
    "isa", "contrast", "losses", "pairwise", "normalize", "both_ways", "views", "softmax", "soft", "infinities",
    "refused", "raw_ops", "recommender_losses", "weights", "negatives", "maxsim", "packed", "numerics", "corners",
)}  # fmt: skip
# With another Python or torch the kernels are the same: what calls them is tested.
SOME = {name: LOSSES[name] for name in ("contrast", "losses", "pairwise", "softmax", "recommender_losses")}
# Another system has a build of its own of every kernel, and catches what a kernel throws in its own way.
OTHER_SYSTEM = {**{name: LOSSES[name] for name in ("isa", "raw_ops")}, **SOME}
# Emulated, every instruction set in all dtypes at three shapes, and every loss, with few examples of each property.
FEW = {
    "isa": [*LOSSES["isa"], "-k", "agrees and 1- and (2-3-5 or 33-31-15 or 65-129-16)"],
    "losses": [*LOSSES["losses"], "-k", "equals_the_textbook and not every_isa or every_isa and everything"],
    "pairwise": [*LOSSES["pairwise"], "-k", "every_isa and few or truth or twins or siglip_agrees or hand_computed"],
    "softmax": [*LOSSES["softmax"], "-k", "equals_the_twin or is_torchs"],
    "recommender_losses": [*LOSSES["recommender_losses"], "-k", "equal_their_twins or equals_its_twin"],
}
PROPERTY_TESTS = "--hypothesis-profile=few"
SYSTEMS = {"Linux": "manylinux_2_28_{}.whl", "Windows": "win_{}.whl", "Darwin": "macosx_11_0_{}.whl"}

NO_KERNELS = "any.whl"

RECORD = RESULTS / "wheels.json"


class Place(NamedTuple):
    name: str
    wheel: str  # the end of its file's name
    python: list[str] | None = None  # its command; None for an environment of its own
    tests: dict[str, list[str]] = LOSSES
    households: int = 400  # of the demo's epoch, of 2,345
    limit: int = 3000  # seconds that a step may take


def places(commands: list[str], emulated: list[str]) -> Iterator[Place]:
    yield Place("Linux x86_64", "x86_64.whl")
    yield Place("Linux x86_64, no kernels", NO_KERNELS, tests={"losses": LOSSES["losses"]}, households=50)
    for named in [*commands, *emulated]:
        name, _, command = named.partition("=")
        python = shlex.split(command)
        asked = "import platform as p; print(p.system(), p.machine().lower())"
        code, printed = run([*python, "-c", asked], ROOT.parent, 600)
        if code != 0:
            raise SystemExit(f"--python: expected NAME=COMMAND of a Python, got {named}: {printed[-2000:]}")
        system, machine = printed.split()[-2:]
        wheel = SYSTEMS[system].format(machine)
        if named in emulated:
            yield Place(name, wheel, python, FEW, 50, 7200)
        else:
            yield Place(name, wheel, python, SOME if system == "Linux" else OTHER_SYSTEM)


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


def installed(place: Place, folder: Path, wheel: Path, torch: str) -> tuple[list[str], dict[str, str]]:
    """The command of a Python with the wheel, installed by its pip, and the environment variables that it takes."""
    if place.python is None:
        python = [str(folder / "venv" / "bin" / "python")]
        more = ["pytest", "hypothesis", "numpy", "safetensors", "tqdm"]
        commands = [
            [sys.executable, "-m", "venv", str(folder / "venv")],
            [*python, "-m", "pip", "-q", "install", "--no-compile", f"torch=={torch}"],
            [*python, "-m", "pip", "-q", "install", str(wheel), *more],
        ]
        env = {"PATH": str(folder / "venv" / "bin"), "PYTHONPATH": ""}
    else:
        python = place.python
        shutil.copy(wheel, folder)
        into = ["--no-deps", "--no-index", "--no-compile", "--target", "installed"]
        commands = [[*python, "-m", "pip", "-q", "install", *into, wheel.name]]
        env = {"PYTHONPATH": str(folder / "installed")}
    for command in commands:
        code, printed = run(command, folder, 3000, **env)
        if code != 0:
            raise SystemExit(f"{' '.join(command)}\n{printed[-2000:]}")
    return python, env | {"OMP_WAIT_POLICY": "passive"}


def snippet() -> str:
    """The README's first code, with a check that it did what it says."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[:1]
    check = f"assert loss.isfinite() and query.grad.abs().sum() > 0 and not fastcl.__file__.startswith({str(ROOT)!r})"
    return f"{code}\n{check}\nprint('ran')"


def steps(place: Place) -> dict[str, list[str]]:
    """What runs in a place: arguments of Python, by name."""
    tested = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *([PROPERTY_TESTS] if place.tests is FEW else [])]
    if place.wheel == NO_KERNELS:
        tested += ["-W", "ignore:fastcl has no compiled kernel"]  # which is so, and the tests take warnings for errors
    return {
        "self-test": ["-m", "fastcl.selftest"],
        "snippet": ["-c", snippet()],
        "epoch": ["first_epoch.py", str(place.households)],
        **{f"tests of {name}": [*tested, *chosen] for name, chosen in place.tests.items()},
    }


def tried(place: Place, wheel: Path, torch: str, done: dict[str, Any]) -> Iterator[str]:
    """Runs the steps that have not passed by `done`, the record of the place, and gives the name of each that it runs
    once its result is in there."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        left_out = shutil.ignore_patterns("__pycache__", "recsys", "cuda")
        shutil.copytree(ROOT / "tests", folder / "tests", ignore=left_out)
        for file in ("pyproject.toml", "building/first_epoch.py"):
            shutil.copy(ROOT / file, folder)
        python, env = installed(place, folder, wheel, torch)
        for name, arguments in steps(place).items():
            if passed(name, done):
                continue
            code, printed = run([*python, *arguments], folder, place.limit, **env)
            if name == "self-test":
                done["facts"] = facts(printed)
            said = (printed.strip().splitlines() or [""])[-1]
            if code != 0:
                failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", printed, re.M)
                said = ", ".join(["failed", *failed]) if failed else f"failed: {' '.join(printed[-500:].split())}"
            done["steps"][name] = {"good": code == 0, "said": re.sub(r"\x1b\[\d+m", "", said)} | counts(printed)
            yield name


def passed(step: str, done: dict[str, Any]) -> bool:
    return bool(done["steps"].get(step, {}).get("good"))


def commit_of(dist: Path) -> str:
    """The commit of the wheels in a folder, as SHA256SUMS says."""
    sums = dist / SUMS
    found = re.match(r"# commit (\S+)\n", sums.read_text()) if sums.exists() else None
    return found[1] if found else "unknown"


def counts(printed: str) -> dict[str, dict[str, int]]:
    """How many tests passed, failed and were skipped, as pytest's last line says."""
    last = (printed.strip().splitlines() or [""])[-1]
    found = re.findall(r"(\d+) (passed|failed|skipped|errors?)\b", last)
    return {"counts": {word: int(n) for n, word in found}} if found else {}


def facts(selftest: str) -> str:
    """What the self-test says of the Python, torch and the processor."""
    said = dict(re.findall(r"^(python|torch|system|isas) +(.*?)\s*$", selftest, re.M))
    if len(said) < 4:
        return "unknown"
    machine = said["system"].split(", ")[-2]
    return f"{said['python']}, torch {said['torch']}, {machine}, instruction sets: {said['isas'] or 'none'}"


def row(name: str, place: dict[str, Any]) -> dict[str, str]:
    steps = place["steps"]

    def said(step: str) -> str:
        return steps[step]["said"].split(";")[0] if step in steps else "not run"

    tests = [step for text, step in steps.items() if text.startswith("tests of")]
    words = ("passed", "failed", "error", "errors", "skipped")
    total = {word: sum(step.get("counts", {}).get(word, 0) for step in tests) for word in words}
    ended = [text.removeprefix("tests of ") for text, step in steps.items() if "tests" in text and "counts" not in step]
    stopped = [f"ended without a result: {', '.join(ended)}"] if ended else []
    missing = [step.removeprefix("tests of ") for step in place["planned"] if step not in steps and "tests" in step]
    not_run = [f"not run: {', '.join(missing)}"] if missing else []
    summary = [f"{n:,} {word}" for word, n in total.items() if n] + stopped + not_run
    return {
        "place": name, "commit": place.get("commit", "unknown"), "with": place["facts"], "self-test": said("self-test"),
        "README": said("snippet"), "one epoch": said("epoch"), "losses' tests": ", ".join(summary),
    }  # fmt: skip


def table(record: dict[str, dict[str, Any]]) -> str:
    return markdown([row(name, place) for name, place in record.items()])


def recorded() -> dict[str, dict[str, Any]]:
    """What has run so far, by place."""
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", default="2.13.0")
    parser.add_argument("--python", action="append", default=[], help="NAME=COMMAND of another Python")
    parser.add_argument("--emulated", action="append", default=[], help="NAME=COMMAND of one on an emulated processor")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist")
    parser.add_argument("--only", default="", help="names of places, with ; between them")
    args = parser.parse_args()
    for place in places(args.python, args.emulated):
        if args.only and place.name not in args.only.split(";"):
            continue
        found = sorted(args.dist.resolve().glob(f"fastcl-*{place.wheel}"))
        if not found:
            raise SystemExit(f"{args.dist}: expected a wheel *{place.wheel}, found none; run make wheels")
        done = recorded().get(place.name, {})
        if done.get("wheel") != digest(found[0]):
            done = {"wheel": digest(found[0]), "commit": commit_of(args.dist), "facts": "unknown", "steps": {}}
        done["planned"] = list(steps(place))
        if all(passed(name, done) for name in steps(place)):
            continue
        for step in tried(place, found[0], args.torch, done):
            record = recorded() | {place.name: done}  # other places may run at the same time
            write_json(RECORD, record)
            write_text(RECORD.with_suffix(".md"), f"# Where the wheels ran\n\n{table(record)}\n")
            print(place.name, step, done["steps"][step], flush=True)


if __name__ == "__main__":
    main()
