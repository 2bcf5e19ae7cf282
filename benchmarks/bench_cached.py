"""What `fastcl.cached` costs and saves: a step of a small Transformer under InfoNCE, whole and in chunks.

    python -m benchmarks.bench_cached [--rows 512] [--chunks 128,32,8] [--repeats 5] [--threads 2]
        [--output benchmarks/results/cached]

Memory: the high-water mark of the resident set in one forward and backward pass, minus the resident set before it; a
process for each form, as in bench_memory. Time: CPU time of the process, the median over steps that take turns. The
difference is that of a gradient from the plain step's, as a share of the gradient's largest element. Linux only.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fastcl
from benchmarks.bench_memory import peak_over
from benchmarks.common import hardware, numbers, publish, report

LAYERS, WIDTH, HEADS, LENGTH, WORDS = 4, 128, 4, 32, 1000


class Encoder(nn.Module):
    """Tokens int64 [n, LENGTH] -> [n, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.word = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)

    def forward(self, token: Tensor) -> Tensor:
        return self.layers(self.word(token)).mean(1)


def made(rows: int, chunk: int) -> tuple[Encoder, Callable[[], Tensor]]:
    """The encoder, and a step's loss; a chunk of 0 is the plain step."""
    torch.manual_seed(0)
    encoder = Encoder()
    query, key = (torch.randint(WORDS, (rows, LENGTH)) for _ in range(2))
    if not chunk:
        return encoder, lambda: fastcl.infonce(encoder(query), encoder(key))
    step = fastcl.cached(encoder, fastcl.infonce, chunk)
    return encoder, lambda: step(query, key)


def extra_bytes(rows: int, chunk: int) -> int:
    encoder, loss = made(rows, chunk)
    made(2, 1)[1]().backward()  # code, thread pool and allocator are in place
    for parameter in encoder.parameters():
        parameter.grad = torch.ones_like(parameter)  # written to, so that its pages are there
    return peak_over(lambda: loss().backward())


def measured(rows: int, chunk: int, threads: int) -> float:
    """MiB, in a process of its own."""
    options = ["--rows", str(rows), "--child", str(chunk), "--threads", str(threads)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.bench_cached", *options], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"chunk {chunk}: {done.stderr}")
    return json.loads(done.stdout) / 2**20


def seconds(steps: dict[int, Callable[[], Tensor]], repeats: int) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {chunk: [] for chunk in steps}
    for _ in range(repeats):
        for chunk, loss in steps.items():
            begin = time.process_time()
            loss().backward()
            found[chunk].append(time.process_time() - begin)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--chunks", type=numbers, default=[128, 32, 8])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path, help="path without suffix")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)  # the chunk of the form to measure
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.child is not None:
        print(extra_bytes(args.rows, args.child))
        return

    chunks = [0, *args.chunks]
    forms = {chunk: made(args.rows, chunk) for chunk in chunks}
    gradients = {chunk: torch.autograd.grad(loss(), list(of.parameters())) for chunk, (of, loss) in forms.items()}
    taken = seconds({chunk: loss for chunk, (_, loss) in forms.items()}, args.repeats)
    rows: list[dict[str, Any]] = []
    for chunk in chunks:
        pairs = list(zip(gradients[chunk], gradients[0], strict=True))
        rows.append(
            {
                "rows": args.rows,
                "step": f"chunks of {chunk}" if chunk else "plain",
                "MiB": measured(args.rows, chunk, args.threads),
                "CPU seconds": statistics.median(taken[chunk]),
                "time / plain": statistics.median(a / b for a, b in zip(taken[chunk], taken[0], strict=True)),
                "difference": max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs) if chunk else None,
            }
        )
    what = f"{LAYERS} layers of width {WIDTH}, {LENGTH} tokens a row, float32, {args.threads} threads"
    page = report(rows, f"one step of InfoNCE over a Transformer, {what}")
    publish(page, {"machine": hardware(), "what": what, "rows": rows}, args.output)


if __name__ == "__main__":
    main()
