"""The cost of training CLRec by where its negatives come from, against sampled softmax: speed and memory.

    python -m benchmarks.bench_negatives [--repeats 30] [--threads 1] [--only ids,categories,text]
        [--items 50000] [--users 4000] [--output benchmarks/results/negatives]

Negatives come from the batch (a), from a queue of ids that are encoded again (b), from a queue of vectors (c), or are
drawn and encoded (sampled softmax). The claim to check is in Table 5 of Zhou et al. (2021): if items have features, (c)
trains 280 / 130 = 2.15 times as many samples a second as sampled softmax.

A step has the loss, the backward pass, Adam and the queue. Batches have 256 samples and 2,560 negatives, D = 64. Clicks
are synthetic (items by Zipf's law with exponent 0.7), histories have at most 20. Steps of all variants take turns. A
figure is the median number of samples, which are (history, next click) pairs, per CPU second. Peak memory is that of a
process that trains one variant, minus the memory it held before the model was made (Linux only).

Feature encoders: "ids" has no features. "categories" has the paper's six categorical features, with an embedding lookup
for each. "text" has a vector of 768 numbers for each item, as from a language model, and encodes it by an MLP of
768-1536-64 units.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.bench_memory import resident
from benchmarks.common import chosen, hardware, median_ratio, numbers, publish, report
from fastcl.recsys import CLRec, Feature, Histories, Items

MEAN_LENGTH, TEXT, HIDDEN = 8, 768, 1536
CATEGORIES = {"category": 100, "subcategory": 3_000, "seller": 10_000, "seller_type": 100, "brand": 5_000, "gender": 3}
TARGET = 2.15
AGAINST = "sampled softmax"
VARIANTS: dict[str, dict[str, Any]] = {
    AGAINST: {"objective": "sampled_softmax"},
    "CLRec, vectors (c)": {"negatives_from": "vectors"},
    "CLRec, ids (b)": {"negatives_from": "ids"},
    "CLRec, batch (a)": {"negatives_from": "batch"},
    "sampled softmax, negatives without features": {"objective": "sampled_softmax", "features": "clicks"},
    "CLRec, vectors (c), negatives without features": {"negatives_from": "vectors", "features": "clicks"},
}


class TextItems(nn.Module):
    """Replaces ItemEncoder: an embedding of the id plus an MLP of a fixed vector."""

    def __init__(self, count: int, dim: int) -> None:
        super().__init__()
        self.id = nn.Embedding(count + 1, dim)
        self.text: Tensor
        self.register_buffer("text", torch.randn(count + 1, TEXT), persistent=False)
        self.mlp = nn.Sequential(nn.Linear(TEXT, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, dim))

    def forward(self, item: Tensor) -> Tensor:
        return self.id(item) + self.described(item)

    def described(self, item: Tensor) -> Tensor:
        return self.mlp(self.text[item])


def items(count: int, categories: bool) -> Items:
    rng = np.random.default_rng(0)
    features = {}
    for name, values in CATEGORIES.items() if categories else ():
        codes = rng.integers(1, values + 1, (count + 1, 1))
        codes[0] = 0
        features[name] = Feature(tuple(map(str, range(values))), codes)
    return Items(tuple(map(str, range(count))), None, features)


def histories(count: int, users: int) -> Histories:
    rng = np.random.default_rng(1)
    upto = np.cumsum(np.arange(1, count + 1) ** -0.7)
    lengths = 2 + rng.geometric(1 / (MEAN_LENGTH - 1), users).clip(max=40)
    clicked = np.searchsorted(upto[:-1], rng.random(lengths.sum()) * upto[-1], side="right")
    return Histories(np.concatenate([[0], np.cumsum(lengths)]), 1 + rng.permutation(count)[clicked])


def plain(count: int, options: dict[str, Any]) -> CLRec:
    return CLRec(items(count, categories=False), time_cuts=(), **options)


def with_categories(count: int, options: dict[str, Any]) -> CLRec:
    return CLRec(items(count, categories=True), time_cuts=(), **options)


def with_text(count: int, options: dict[str, Any]) -> CLRec:
    model = plain(count, options)
    # TextItems can be called like an ItemEncoder but is no subclass.
    model.item = TextItems(count, model.config.dim)  # type: ignore[assignment]
    return model


ENCODERS = {"ids": plain, "categories": with_categories, "text": with_text}


def stepper(encoder: str, variant: str, size: tuple[int, int], steps: int) -> Callable[[], int]:
    """A function that trains on the next batch and returns its number of samples. The queue is filled beforehand."""
    torch.manual_seed(0)
    model = ENCODERS[encoder](size[0], VARIANTS[variant]).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.98), fused=True)
    found = model.batches(histories(*size), np.random.default_rng(0))
    batches = itertools.cycle(list(itertools.islice(found, steps)))

    def run() -> int:
        batch = next(batches)
        optimizer.zero_grad()
        model.loss(batch).backward()
        optimizer.step()
        model.after_step(batch)
        return len(batch.target)

    while model.queue is not None and len(model.queue) < model.queue.capacity:
        run()
    return run


def speeds(encoder: str, size: tuple[int, int], repeats: int) -> dict[str, list[float]]:
    """Samples per CPU second of each variant and step; the n-th steps of all variants have the same histories."""
    # The variants that leave features out need an encoder with features.
    names = [name for name, options in VARIANTS.items() if encoder != "ids" or "features" not in options]
    runs = {name: stepper(encoder, name, size, repeats) for name in names}
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            begun = time.process_time()
            samples = run()
            found[name].append(samples / (time.process_time() - begun))
    return found


def peak(encoder: str, variant: str, size: tuple[int, int]) -> float:
    """Peak memory in MiB, measured in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.bench_negatives", "--only", encoder, "--child", variant]
    sizes = ["--items", str(size[0]), "--users", str(size[1])]
    done = subprocess.run([*command, *sizes], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{encoder}, {variant}: {done.stderr}")
    return json.loads(done.stdout) / 2**20


def peak_here(encoder: str, variant: str, size: tuple[int, int]) -> int:
    torch.set_num_threads(1)
    torch.zeros(64, 64, requires_grad=True).matmul(torch.zeros(64, 64)).sum().backward()
    before = resident("VmRSS")
    run = stepper(encoder, variant, size, 12)
    for _ in range(12):
        run()
    return resident("VmHWM") - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("--repeats", type=int, default=30)
    option("--threads", type=numbers, default=[1])
    option("--only", default=",".join(ENCODERS))
    option("--items", type=int, default=50_000)
    option("--users", type=int, default=4_000)
    option("--output", type=Path, help="path without suffix")
    option("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    encoders, size = chosen(args.only, "--only", ENCODERS, parser), (args.items, args.users)
    if args.child:
        print(peak_here(encoders[0], args.child, size))
        return
    rows: list[dict[str, Any]] = []
    for encoder, threads in itertools.product(encoders, args.threads):
        torch.set_num_threads(threads)
        found = speeds(encoder, size, args.repeats)
        for name in found:
            row: dict[str, Any] = {"features": encoder, "negatives": name, "threads": threads}
            row["samples per CPU-s"] = round(statistics.median(found[name]))
            row["of sampled softmax"] = median_ratio(found, name, AGAINST)
            rows.append({**row, "peak MB": round(peak(encoder, name, size))})
        print(".", end="", flush=True)
    print()
    note = f"{size[0]:,} items, batch 256, 2,560 negatives, D 64; target with features {TARGET} of sampled softmax"
    page = report(rows, note)
    publish(page, {"machine": hardware(), "note": note, "rows": rows}, args.output)


if __name__ == "__main__":
    main()
