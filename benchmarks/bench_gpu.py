"""Times the fused losses on a GPU against its limits and other forms: shapes of roofline.py, forward and with backward.

    python -m benchmarks.bench_gpu [--only clrec,moco] [--types bf16] [--repeats 9] [--seconds 200] [--output PATH]

STATUS: this program has not run on a GPU yet. Its parts that need no GPU are tested. Columns:
    ms              fastcl's time, the median of alternating runs between two CUDA events; a run has many short calls
    floor           the least possible time by roofline.floor, with the rates measured at the start
    of floor        floor divided by fastcl's time
    expected        the time expected of such kernels (roofline.fused) divided by fastcl's; the first target is 0.5
    eager /         the time of the leanest form by hand (a product and cross_entropy) divided by fastcl's
    compile /       the same for this form under torch.compile
    torch lce /     the same for torch.nn.functional.linear_cross_entropy, if this torch has it
    memeff /        the same for memeff's Triton kernels (stable=False), if installed
    MB, eager MB    the peak memory that a call adds
    launches        kernels that one call launches, torch's included
Compilation takes most of the time. torch.compile is left out when half of --seconds are spent, shapes when all are.
"""

import argparse
import functools
import importlib
import importlib.util
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fastcl
from benchmarks import cases, peers, roofline, sass_report
from benchmarks.cases import TEMPERATURE, Case, Inputs
from benchmarks.common import RESULTS, chosen, markdown, median_ratio, step, write_json, write_text

Loss = Callable[[Case, Inputs], Tensor]
COLUMNS = ("eager", "compile", "torch lce", "memeff")
RUN_MS = 5.0  # milliseconds of a timed run, which repeats short calls


def ours(case: Case, x: Inputs) -> Tensor:
    if case.kind == "both":
        return fastcl.infonce(x.query, x.keys, temperature=TEMPERATURE, normalize=False, symmetric=True)
    return cases.fused(case, x)


def eager(case: Case, x: Inputs) -> Tensor:
    if case.kind != "both":
        return cases.lean(case, x)
    logits = (x.query @ x.keys.T).float() / TEMPERATURE
    return (F.cross_entropy(logits, x.target) + F.cross_entropy(logits.T, x.target)) / 2


def memeff(case: Case, x: Inputs) -> Tensor:
    package: Any = importlib.import_module("memeff")
    options = {"temperature": TEMPERATURE, "normalized_inputs": True, "stable": False}
    if case.kind == "both":
        return package.MemoryEfficientCLIPLoss(**options)(x.query, x.keys)
    return package.MemoryEfficientQwen3Loss(**options, margin=2.0)(x.query, x.keys)  # one direction, nothing masked


def losses(case: Case, compiling: bool) -> dict[str, Loss]:
    """fastcl's form and the available others that compute the same loss."""
    found: dict[str, Loss] = {"ours": ours, "eager": eager}
    if compiling:
        found["compile"] = torch.compile(eager)
    if peers.PEERS["torch lce"].suits(case) and peers.missing("torch lce") is None:
        found["torch lce"] = peers.torch_linear
    if case.kind in ("batch", "both") and importlib.util.find_spec("memeff"):
        found["memeff"] = memeff
    return found


def inputs(case: Case, device: str) -> Inputs:
    """The inputs of cases.py, moved to the device."""
    made = cases.inputs(replace(case, kind="batch") if case.kind == "both" else case)
    moved: dict[str, Any] = {
        name: t.detach().to(device).requires_grad_(t.requires_grad) if isinstance(t, Tensor) else t.to(device)
        for name, t in made._asdict().items()
    }
    return Inputs(**moved)


def elapsed(run: Callable[[], object], calls: int) -> float:
    """Seconds of one call on the device, the mean of `calls` calls."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3 / calls


def alternate(runs: Mapping[str, Callable[[], None]], repeats: int) -> tuple[dict[str, list[float]], dict[str, str]]:
    """(name -> seconds of each run, the forms taking turns; name -> the reason of a form that could not run)."""
    calls, failed = {}, {}
    for name, run in runs.items():
        try:
            run()
            elapsed(run, 3)
            calls[name] = max(1, round(RUN_MS * 1e-3 / elapsed(run, 1)))
        except (RuntimeError, ImportError) as error:
            failed[name] = "out of memory" if isinstance(error, torch.OutOfMemoryError) else str(error).split("\n")[0]
            torch.cuda.empty_cache()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, count in calls.items():
            seconds[name].append(elapsed(runs[name], count))
    return seconds, failed


def megabytes(run: Callable[[], None]) -> float:
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def launches(run: Callable[[], None]) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    other = ("cuda", "cuLaunch", "Mem", "Activity")
    return sum(event.count for event in profile.key_averages() if not event.key.startswith(other))


def measured_rates() -> tuple[roofline.Rates, dict[str, float]]:
    """The rates of this GPU: mma.sync and exp2 measured by ceilings.cu, copies and library products by torch."""
    nvcc = sass_report.find_nvcc()
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "ceilings"
        source = Path(__file__).with_name("ceilings.cu")
        subprocess.run([str(nvcc), "-O3", "-std=c++17", "-arch=native", str(source), "-o", str(program)], check=True)
        found = json.loads(subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout)
    big = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    found["copy"] = 2 * big.numel() / elapsed(functools.partial(torch.empty_like(big).copy_, big), 10)
    del big
    for type_, dtype in roofline.DTYPES.items():
        a, b, c = (torch.randn(8192, 8192, device="cuda").to(dtype) for _ in range(3))
        with precision(type_):
            product = functools.partial(torch.mm, a, b, out=c)
            elapsed(product, 2)
            found[f"product {type_}"] = 2 * 8192**3 / elapsed(product, 5)
    return rates(found), found


def rates(found: Mapping[str, float]) -> roofline.Rates:
    mma = {"bf16": found["mma bf16"], "tf32": found["mma tf32"], "fp32": found["mma tf32"] / 3}
    library = {name: found[f"product {name}"] for name in roofline.DTYPES}
    # The limit for any kernel: the better of the two ways to use the tensor cores.
    tensor = {name: max(mma[name], library[name]) for name in mma}
    return roofline.Rates(tensor, mma, library, found["exp"], found["copy"])


class precision:
    """Sets torch's precision of float32 products for a type, and restores the earlier setting at exit."""

    def __init__(self, type_: str) -> None:
        self.wanted = "high" if type_ == "tf32" else "highest"

    def __enter__(self) -> None:
        self.before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(self.wanted)

    def __exit__(self, *_: object) -> None:
        torch.set_float32_matmul_precision(self.before)


def row(name: str, type_: str, backward: bool, seconds: Mapping[str, Sequence[float]], failed: Mapping[str, str],
        facts: Mapping[str, float], measured: roofline.Rates) -> dict[str, Any]:  # fmt: skip
    """One row of the table."""
    case = roofline.SHAPES[name].case
    took = statistics.median(seconds["ours"])
    ratios = {
        f"{column} /": median_ratio(seconds, column, "ours") if column in seconds else failed.get(column)
        for column in COLUMNS
    }
    return {
        "shape": name,
        "N x M x D": f"{case.n:,} x {case.m:,} x {case.d:,}",
        "type": type_,
        "pass": "step" if backward else "forward",
        "ms": took * 1e3,
        "floor": roofline.shown(roofline.floor(case, type_, backward, measured)),
        "of floor": roofline.floor(case, type_, backward, measured) / took,
        "expected": roofline.fused(case, type_, backward, measured) / took,
        **ratios,
        **facts,
    }


def missed(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence for every target that a row misses."""
    found = []
    for line in rows:
        where = f"{line['shape']} {line['type']} {line['pass']}"
        if line["expected"] < 0.5:
            found.append(f"{where}: {line['expected']:.2f} of what is expected, target 0.5")
        for column, bound in (("eager /", 1.0), ("memeff /", 2.0)):
            counts = column == "eager /" or roofline.SHAPES[line["shape"]].case.d <= 512
            if counts and isinstance(line[column], float) and line[column] < bound:
                found.append(f"{where}: {column[:-2]} takes {line[column]:.2f} of our time, target {bound:.0f}")
    return found


def measure(name: str, type_: str, repeats: int, compiling: bool, measured: roofline.Rates) -> list[dict[str, Any]]:
    case = replace(roofline.SHAPES[name].case, dtype=roofline.DTYPES[type_])
    torch._dynamo.reset()
    x = inputs(case, "cuda")
    learns = [t for t in x[:3] if t.requires_grad]
    lines = []
    with precision(type_):
        candidates = losses(case, compiling)
        for backward in (False, True):
            runs = {key: step(functools.partial(loss, case, x), learns, backward) for key, loss in candidates.items()}
            seconds, failed = alternate(runs, repeats)
            if "ours" in failed:
                raise SystemExit(f"{name} {type_}: {failed['ours']}")
            facts: dict[str, Any] = {"MB": megabytes(runs["ours"])}
            facts["eager MB"] = megabytes(runs["eager"]) if "eager" in seconds else None
            facts["launches"] = launches(runs["ours"])
            lines.append(row(name, type_, backward, seconds, failed, facts, measured))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(roofline.SHAPES), help="shapes, separated by commas")
    parser.add_argument("--types", default=",".join(roofline.DTYPES), help="types, separated by commas")
    parser.add_argument("--repeats", type=int, default=9, help="runs of each form (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=200.0, help="no shape is begun later (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=RESULTS / "gpu", help="path without suffix")
    args = parser.parse_args()
    names = chosen(args.only, "--only", roofline.SHAPES, parser)
    types = chosen(args.types, "--types", roofline.DTYPES, parser)
    if not torch.cuda.is_available():
        parser.error("torch finds no CUDA device here")

    begin = time.monotonic()
    measured, ceilings = measured_rates()
    rows: list[dict[str, Any]] = []
    skipped = []
    for name in names:
        for type_ in [t for t in types if t in roofline.SHAPES[name].types]:
            spent = time.monotonic() - begin
            if spent > args.seconds:
                skipped.append(f"{name} {type_}")
                continue
            rows += measure(name, type_, args.repeats, spent < args.seconds / 2, measured)
            print(".", end="", flush=True)
    facts = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": fastcl.config()["cuda"]}
    write_json(
        args.output.with_suffix(".json"), {"machine": facts, "ceilings": ceilings, "rows": rows, "skipped": skipped}
    )
    page = ", ".join([*facts.values(), *(f"{what} {value:.3g}/s" for what, value in ceilings.items())]) + "\n\n"
    page += markdown(rows) + "\n\nTargets missed:\n\n" + "".join(f"- {line}\n" for line in missed(rows) or ["none"])
    page += f"\nNot measured, because the seconds were spent: {', '.join(skipped) or 'nothing'}\n"
    write_text(args.output.with_suffix(".md"), page)
    print(f"\n{page}")


if __name__ == "__main__":
    main()
