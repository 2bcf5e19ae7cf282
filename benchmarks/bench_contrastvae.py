"""What an epoch of ContrastVAE costs, by fastcl's own rules and by the authors', and how much memory training takes.

    python -m benchmarks.bench_contrastvae FOLDER [--only Beauty] [--output benchmarks/results/contrastvae-cost]

FOLDER holds the data sets. One thread. A figure is the CPU seconds of batches, loss, backward pass and optimiser over
an epoch, without validation. All modes have the authors' width, depth, batch size and augmentation (those of their
command for Beauty: MA). The modes take turns, so that the machine's load affects all alike. Every step of the clean
modes is measured. Steps by the authors' rules cost more and are all alike: every eighth is measured.

"the authors' arithmetic" is that of their program, padding included, but with fastcl's fused contrast. Their own
contrast compares 2B x 2B vectors in a block of 2B x 2B x D numbers; the row "the same with the block" adds its measured
cost. "paper-code" computes the same results but decodes real clicks only. Their program itself was not run.

Memory is the peak resident set of a process that trains two epochs with the study's settings and ranks the test cases.
On processors where MKL chooses AVX2 by itself, results/contrastvae-cost-mkl-avx512 has the same figures with AVX-512 in
MKL (quality.py tells how).
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.bench_memory import resident
from benchmarks.common import chosen, machine, publish, report
from fastcl.recsys import ContrastVAE, Interactions, Split, fit
from fastcl.recsys.evaluation.ranking import evaluate
from fastcl.recsys.models.batching import Packed
from fastcl.recsys.models.contrastvae.rules import causal_and_real, left_padded

FILES = {"Beauty": "amazon/Beauty", "Office": "amazon/Office_Products"}
AUTHORS: dict[str, Any] = {"dim": 128, "heads": 4, "max_len": 50, "batch": 256, "dropout": 0.3, "augment": ("dropout",)}
THEIRS: dict[str, Any] = {"reconstruction": "bce", "contrast": "nt_xent", "contrast_weight": 0.6, "temperature": 0.5}
AUTHORS_RULES: dict[str, Any] = {**AUTHORS, "compat": "paper-code", "contrast_weight": 0.6, "sigma_dropout": 0.1}
PADDED, BLOCK = "the authors' arithmetic", "the same with the block"
MODES: dict[str, dict[str, Any]] = {
    PADDED: AUTHORS_RULES,
    "paper-code": AUTHORS_RULES,
    "clean, the authors' losses": {**AUTHORS, **THEIRS},
    "clean, sampled softmax (512)": {**AUTHORS, "reconstruction": "sampled"},
    "clean, full softmax": AUTHORS,
}
EVERY = 8  # one of so many steps by the authors' rules is measured
STUDY: dict[str, Any] = {"debias": 0.15}
BATCH = {"Beauty": 256, "Office": 128}
AT_MOST_MB = 1500


class AsAuthors(ContrastVAE):
    """ContrastVAE that decodes padding too, as the authors' program does."""

    def decode(self, z: Tensor, clicks: Packed) -> Tensor:
        laid = left_padded(clicks.length.numpy(), self.config.max_len, self.device)
        real = torch.from_numpy(laid.source >= 0)
        wide = z.new_zeros(len(real), z.shape[1]).index_put((real,), z)
        masks = causal_and_real(laid, real.long())
        for block in self.decoder:
            wide = block(wide, laid, masks)
        return wide[real]


def read(folder: Path, name: str) -> Split:
    return Interactions.read(folder / f"{FILES[name]}.txt.gz", format="sequence").split()


def epochs(split: Split) -> dict[str, float]:
    """CPU seconds of an epoch of each mode."""
    turns = {
        name: _steps((AsAuthors if name == PADDED else ContrastVAE)(split.items, seed=0, **options), split)
        for name, options in MODES.items()
    }
    for step in turns.values():
        step()  # warm-up
    steps = ContrastVAE(split.items, **AUTHORS).steps(split.train)
    seconds: dict[str, list[float]] = {name: [] for name in (*MODES, BLOCK)}
    for nth in range(steps - 1):
        for name, step in turns.items():
            if "compat" not in MODES[name] or nth % EVERY == 0:
                seconds[name].append(_timed(step))
            if name == PADDED and nth % EVERY == 0:
                seconds[BLOCK].append(seconds[name][-1] + _timed(_block))
    return {name: sum(taken) / len(taken) * steps for name, taken in seconds.items()}


def _steps(model: ContrastVAE, split: Split) -> Callable[[], None]:
    """One optimiser step a call."""
    optimizer = torch.optim.Adam(model.train().parameters(), lr=model.config.lr, fused=True)
    batches = model.batches(split.train, np.random.default_rng(0))

    def step() -> None:
        batch = next(batches)
        loss = model.loss(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.after_update()

    return step


def _block() -> None:
    """Cosines of all pairs of the two views' vectors, forward and backward, through a block of 2B x 2B x D."""
    z = torch.randn(2 * AUTHORS["batch"], AUTHORS["dim"], requires_grad=True)
    F.cosine_similarity(z[:, None], z[None], dim=2).logsumexp(1).mean().backward()


def _timed(run: Callable[[], None]) -> float:
    begun = time.process_time()
    run()
    return time.process_time() - begun


def peak(split: Split, name: str) -> float:
    """The peak resident set of this process in MiB, after training and ranking."""
    model = ContrastVAE(split.items, seed=0, batch=BATCH[name], **STUDY)
    fit(model, split, epochs=2, progress=False)
    evaluate(model, split.test, k=(20, 40))
    return resident("VmHWM") / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--only", default=",".join(FILES))
    parser.add_argument("--output", type=Path, help="path without suffix")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    names = chosen(args.only, "--only", FILES, parser)
    torch.set_num_threads(1)
    if args.child:
        print(peak(read(args.folder, names[0]), names[0]))
        return
    memory = []
    for name in names:
        command = [sys.executable, "-m", "benchmarks.bench_contrastvae", str(args.folder), "--only", name, "--child"]
        megabytes = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
        bound = {f"<= {AT_MOST_MB} MB": "met" if megabytes <= AT_MOST_MB else "not met"}
        memory.append({"training and evaluation": name, "peak MB": round(megabytes), **bound})
    seconds = epochs(read(args.folder, names[0]))
    rows = [
        {
            "an epoch": name,
            "CPU s": taken,
            **{f"{other} over it": seconds[other] / taken for other in (PADDED, BLOCK)},
        }
        for name, taken in sorted(seconds.items(), key=lambda entry: -entry[1])
    ]
    settings = ", ".join(f"{key} {value}" for key, value in AUTHORS.items())
    page = report(rows, f"{names[0]}, {settings}, blocks 1, one thread") + "\n" + report(memory, "peak resident set")
    found = {"machine": machine(), "settings": AUTHORS, "epoch": rows, "memory": memory}
    publish(page, found, args.output)


if __name__ == "__main__":
    main()
