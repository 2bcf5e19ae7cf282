"""Is the fused loss faster than what one would write? InfoNCE forward and backward at the shapes of real models.

    python -m benchmarks.bench_contrast [--repeats 15] [--threads 2] [--shapes clrec,moco] [--json
    benchmarks/results/contrast-cpu.json]

Compared in one run, in turn: `fastcl.infonce`; eager PyTorch in its leanest form (one matrix product and cross_entropy,
no copies); the same through torch.compile; and the bare matrix products (torch.mm into preallocated outputs), the floor
of any implementation
that computes each product once: one forward, three with backward, two where the keys are frozen.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import fastcl
from benchmarks.common import alternate, machine, markdown, median_ratio, write_json

TEMPERATURE = 0.07


class Shape(NamedTuple):
    """N x M x D; `kind`: batch (keys are the batch's own), table (keys are all items), shared or frozen (negatives)."""

    n: int
    m: int
    d: int
    kind: str
    what: str


SHAPES = {
    "clrec": Shape(256, 2560, 64, "shared", "CLRec, negatives that learn"),
    "moco": Shape(256, 65536, 128, "frozen", "MoCo, frozen queue"),
    "batch": Shape(4096, 4096, 128, "batch", "in-batch"),
    "beauty": Shape(2048, 12101, 64, "table", "full softmax, Beauty"),
    "wide": Shape(4096, 4096, 512, "batch", "in-batch, wide"),
    "small": Shape(32, 1024, 64, "shared", "small"),
    "tiny": Shape(8, 64, 32, "shared", "tiny"),
}


def inputs(shape: Shape) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """query [N, D], keys [M, D], target [N] (the positive's column, if it has one), positive [N, D]; length 1."""
    torch.manual_seed(0)
    query = F.normalize(torch.randn(shape.n, shape.d), dim=1).requires_grad_()
    keys = F.normalize(torch.randn(shape.m, shape.d), dim=1).requires_grad_(shape.kind != "frozen")
    target = torch.arange(shape.n) if shape.kind == "batch" else torch.randint(shape.m, (shape.n,))
    positive = F.normalize(torch.randn(shape.n, shape.d), dim=1)
    return query, keys, target, positive


def ours(shape: Shape, query: Tensor, keys: Tensor, target: Tensor, positive: Tensor) -> Tensor:
    if shape.kind == "batch":
        return fastcl.infonce(query, keys, temperature=TEMPERATURE, normalize=False)
    if shape.kind == "table":
        ids = torch.arange(shape.m)
        return fastcl.infonce(
            query, keys[target], keys, temperature=TEMPERATURE, normalize=False, ids=target, negative_ids=ids
        )
    return fastcl.infonce(query, positive, keys, temperature=TEMPERATURE, normalize=False)


def eager(shape: Shape, query: Tensor, keys: Tensor, target: Tensor, positive: Tensor) -> Tensor:
    logits = query @ keys.T / TEMPERATURE
    if shape.kind in ("batch", "table"):
        return F.cross_entropy(logits, target)
    pos = (query * positive).sum(1) / TEMPERATURE
    return (torch.logaddexp(torch.logsumexp(logits, 1), pos) - pos).mean()


def products(shape: Shape, query: Tensor, keys: Tensor, backward: bool) -> Callable[[], None]:
    q, k = query.detach(), keys.detach()
    s, dq, dk = torch.empty(shape.n, shape.m), torch.empty_like(q), torch.empty_like(k)

    def run() -> None:
        torch.mm(q, k.T, out=s)
        if backward:
            torch.mm(s, k, out=dq)
            if keys.requires_grad:
                torch.mm(s.T, q, out=dk)

    return run


def candidates(shape: Shape, backward: bool) -> dict[str, Callable[[], None]]:
    query, keys, target, positive = inputs(shape)

    def timed(loss: Callable[..., Tensor]) -> Callable[[], None]:
        def run() -> None:
            query.grad = keys.grad = None
            if backward:
                loss(shape, query, keys, target, positive).backward()
            else:
                with torch.no_grad():
                    loss(shape, query, keys, target, positive)

        return run

    torch._dynamo.reset()
    compiled = torch.compile(eager)
    return {
        "fastcl": timed(ours),
        "eager": timed(eager),
        "compile": timed(compiled),
        "products": products(shape, query, keys, backward),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    unknown = set(args.shapes.split(",")) - set(SHAPES)
    if unknown:
        parser.error(f"--shapes: expected some of {', '.join(SHAPES)}, got {', '.join(sorted(unknown))}")
    torch.set_num_threads(args.threads)

    rows = []
    for name in args.shapes.split(","):
        shape = SHAPES[name]
        for backward in (False, True):
            seconds = alternate(candidates(shape, backward), args.repeats)
            rows.append(
                {
                    "N x M x D": f"{shape.n:,} x {shape.m:,} x {shape.d:,}",
                    "what": shape.what,
                    "pass": "forward+backward" if backward else "forward",
                    "fastcl ms": sorted(seconds["fastcl"])[args.repeats // 2] * 1e3,
                    "/ products": median_ratio(seconds, "fastcl", "products"),
                    "eager /": median_ratio(seconds, "eager", "fastcl"),
                    "compile /": median_ratio(seconds, "compile", "fastcl"),
                }
            )
            print(".", end="", flush=True)
    print()
    facts = machine()
    print(
        ", ".join(f"{key} {value}" for key, value in facts.items()),
        f"- medians of {args.repeats} alternating repetitions\n",
    )
    print(markdown(rows))
    if args.json:
        write_json(args.json, {"machine": facts, "repeats": args.repeats, "rows": rows})


if __name__ == "__main__":
    main()
