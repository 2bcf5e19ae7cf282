"""What `fastcl.maxsim` takes beside the eager einsum: time and peak memory of scores and a softmax over them.

    python -m benchmarks.bench_maxsim [--only training,reranking] [--repeats 5] [--threads 2]
        [--output benchmarks/results/maxsim]

eager: `torch.einsum("itd,jud->ijtu", query, document).max(3).values.sum(2)`, in the dtype of the tokens. The two forms
run in one process and take turns; a ratio is the median over measurements that follow each other. Memory: the peak
resident set of forward and backward, minus inputs and gradients, in a process for each form, as in bench_memory; Linux
only. Scores that differ by more than the dtype's rounding end the program.
"""

import argparse
import functools
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import fastcl
from benchmarks.bench_memory import peak_over
from benchmarks.common import alternate, chosen, hardware, median_ratio, publish, report, step

Score = Callable[[Tensor, Tensor], Tensor]


class Case(NamedTuple):
    """Queries and documents, the tokens of each, and features."""

    queries: int
    documents: int
    query_tokens: int
    document_tokens: int
    features: int
    dtype: torch.dtype = torch.float32


CASES = {
    "training": Case(64, 64, 32, 180, 128),
    "training-bfloat16": Case(64, 64, 32, 180, 128, torch.bfloat16),
    "hard-negatives": Case(16, 256, 32, 180, 128),
    "reranking": Case(1, 500, 32, 180, 128),
    "tiny": Case(2, 3, 4, 5, 8),
}


def eager(query: Tensor, document: Tensor) -> Tensor:
    return torch.einsum("itd,jud->ijtu", query, document).max(3).values.sum(2)


FORMS: dict[str, Score] = {"fastcl": fastcl.maxsim, "eager": eager}


def inputs(case: Case) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    sizes = ((case.queries, case.query_tokens), (case.documents, case.document_tokens))
    drawn = [F.normalize(torch.randn(*size, case.features), dim=2) for size in sizes]
    query, document = (x.to(case.dtype).requires_grad_() for x in drawn)
    return query, document


def loss(score: Score, query: Tensor, document: Tensor) -> Tensor:
    """The documents of the first places are the positives."""
    return F.cross_entropy(score(query, document).float() / 0.1, torch.arange(len(query)))


def extra_bytes(case: Case, score: Score) -> int:
    query, document = inputs(case)
    loss(score, *inputs(CASES["tiny"])).backward()
    taken = peak_over(lambda: loss(score, query, document).backward())
    return taken - query.nbytes - document.nbytes  # as many as the gradients have


def megabytes(name: str, form: str, threads: int) -> float:
    """In a process of its own."""
    options = ["--only", name, "--child", form, "--threads", str(threads)]
    command = [sys.executable, "-m", "benchmarks.bench_maxsim", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name}, {form}: {done.stderr}")
    return json.loads(done.stdout) / 2**20


def measured(name: str, repeats: int, threads: int) -> dict[str, Any]:
    case = CASES[name]
    learns = inputs(case)
    found = [score(*learns).float() for score in FORMS.values()]
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 5e-2}[case.dtype] * case.query_tokens
    torch.testing.assert_close(found[1], found[0], rtol=0.0, atol=tolerance)
    row: dict[str, Any] = {"what": name, "shape": list(case[:5])}
    for which, backward in (("forward", False), ("forward+backward", True)):
        runs = {form: step(functools.partial(loss, score, *learns), learns, backward) for form, score in FORMS.items()}
        seconds = alternate(runs, repeats)
        row[f"{which}, ms"] = 1e3 * statistics.median(seconds["fastcl"])
        row[f"{which}, eager / fastcl"] = median_ratio(seconds, "eager", "fastcl")
    return row | {f"{form}, MiB": megabytes(name, form, threads) for form in FORMS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(name for name in CASES if name != "tiny"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path, help="path without suffix")
    parser.add_argument("--child", choices=FORMS, help=argparse.SUPPRESS)  # the form to measure
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    names = chosen(args.only, "--only", CASES, parser)
    if args.child is not None:
        print(extra_bytes(CASES[names[0]], FORMS[args.child]))
        return
    rows = [measured(name, args.repeats, args.threads) for name in names]
    what = f"{args.threads} threads, medians of {args.repeats}"
    page = report(rows, f"queries, documents, tokens of a query, tokens of a document, features; {what}")
    publish(page, {"machine": hardware(), "what": what, "rows": rows}, args.output)


if __name__ == "__main__":
    main()
