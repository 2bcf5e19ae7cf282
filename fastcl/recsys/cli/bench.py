"""fastcl bench: the fused loss against plain PyTorch on this machine."""

import argparse
import json
from typing import Any

import fastcl
from fastcl.recsys.options import at_least
from fastcl.recsys.reporting import tables
from fastcl.recsys.reporting.cost import Shape, agreement, measure
from fastcl.recsys.training.threads import add_threads

# Loss calls as the models make them: full softmax on small and large item tables, CLRec's batch and queue.
SHAPES = {
    "full softmax, 1,000 items": Shape("softmax", 512, 1_000, 64),
    "full softmax, 12,000 items": Shape("softmax", 1024, 12_000, 64),
    "full softmax, 50,000 items": Shape("softmax", 512, 50_000, 64),
    "batch and queue of 2,304": Shape("queue", 256, 2_304, 64),
}


def add(commands: Any) -> None:
    parser = commands.add_parser("bench", help="check and time the fused loss against plain PyTorch, half a minute")
    option = parser.add_argument
    option(
        "--repetitions",
        type=int,
        default=15,
        help="number of alternating runs that the medians are of (default: %(default)s)",
    )
    add_threads(parser)
    option("--json", action="store_true", help="one JSON document on stdout")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    at_least(1, "--repetitions", args.repetitions)
    results = {
        name: shape._asdict() | measure(shape, args.repetitions) | {"difference": agreement(shape)}
        for name, shape in SHAPES.items()
    }
    facts = fastcl.config()
    if args.json:
        print(json.dumps({"config": facts, "results": results}))
        return
    header = ["forward + backward", "fastcl ms", "PyTorch ms", "faster", "fastcl MiB", "PyTorch MiB", "difference"]
    rows = [
        [
            name,
            *(f"{cost[f'{who}_ms']:.2f}" for who in ("fused", "plain")),
            f"{cost['plain_ms'] / cost['fused_ms']:.2f}x",
            *(f"{cost[f'{who}_bytes'] / 2**20:.1f}" for who in ("fused", "plain")),
            f"{cost['difference']:.0e}",
        ]
        for name, cost in results.items()
    ]
    print(f"fastcl {facts['version']}, torch {facts['torch']}, {facts['isa']}, threads {facts['threads']}")
    print(tables.table(header, rows))
    print("(MiB: extra peak memory; difference: largest of loss and gradients, relative to plain PyTorch's largest)")
