"""The training loop: Adam with a falling learning rate, validation by full-ranking NDCG@10 after every epoch, best
weights kept.

It knows models only through `batches`, `steps`, `loss` and `after_step`, and reads no data files.
"""

import json
import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch.optim.lr_scheduler import LambdaLR

from fastcl.recsys import checkpoint
from fastcl.recsys.data import Split
from fastcl.recsys.metrics import SEEN, evaluate
from fastcl.recsys.models import Model
from fastcl.recsys.options import above, at_least, one_of

T = TypeVar("T")


def fit(
    model: Model,
    split: Split,
    *,
    epochs: int,
    lr: float | None = None,
    out: str | Path | None = None,
    seed: int = 0,
    seen: str = "mask",
    force: bool = False,
    record: Mapping[str, Any] | None = None,
    progress: bool = True,
) -> list[dict[str, float]]:
    """Trains `model` on split.train and leaves it in eval mode with the weights of its best epoch on split.valid.

    Same seed, machine and thread count: the same weights bit for bit. The caller's random state is neither read nor
    moved.

    Args:
        epochs: passes over the train clicks, >= 1.
        lr: learning rate of the first step, falling linearly to 0 at the last one; None: the model's config.
        out: run folder; None: nothing is written. One that exists and is not empty is refused unless `force`.
        seed: of batch order, dropout and negatives (the initial weights have the model's own).
        seen: "mask" or "keep", how validation treats items of the history.
        record: joins config.json (the data's path and options, say).
        progress: report on stderr: a bar on a terminal, a line an epoch elsewhere.

    Returns: one dict an epoch: epoch, loss (mean over the batches), recall@10, ndcg@10 (validation), seconds
        (training alone), best (whether its weights are the best so far); the same lines as metrics.jsonl.

    Raises FloatingPointError when the loss stops being finite.

    >>> from fastcl.recsys import SASRec, bundled
    >>> split = bundled("movies").split()
    >>> fit(SASRec(split.items, seed=0), split, epochs=10, out="runs/first")  # doctest: +SKIP
    """
    at_least(1, "epochs", epochs)
    lr = model.config.lr if lr is None else lr
    above(0.0, "lr", lr)
    one_of(SEEN, "seen", seen)
    folder = None if out is None else new_folder(out, force)
    settings = {"seed": seed, "epochs": epochs, "lr": lr, "seen": seen, "threads": torch.get_num_threads()}
    best, best_state = -1.0, {}
    history: list[dict[str, float]] = []
    rng = np.random.default_rng(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # beta2 = 0.98 as in the code of both papers: rarely clicked items move too far under 0.999.
        optimizer = torch.optim.Adam(model.parameters(), lr=lr, betas=(0.9, 0.98), fused=True)
        steps = epochs * model.steps(split.train)
        falling = LambdaLR(optimizer, lambda step: 1.0 - step / max(steps, 1))
        for epoch in range(1, epochs + 1):
            started = time.perf_counter()
            loss = _epoch(model, split, falling, rng, f"{model.name} {epoch}/{epochs}" if progress else "")
            seconds = time.perf_counter() - started
            if not math.isfinite(loss):
                raise FloatingPointError(
                    f"loss: expected a finite number, got {loss} in epoch {epoch}; try a lower lr than {lr}"
                )
            valid = evaluate(model.eval(), split.valid, counts=split.counts, seen=seen)
            scores = {name: valid[name] for name in ("recall@10", "ndcg@10")}
            line = {"epoch": epoch, "loss": loss, **scores, "seconds": seconds, "best": scores["ndcg@10"] > best}
            history.append(line)
            if line["best"]:
                best = scores["ndcg@10"]
                best_state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            if folder is not None:
                if epoch == 1:
                    _start(folder, model, {**settings, **(record or {})})
                elif line["best"]:
                    checkpoint.save_weights(model, folder)
                with open(folder / "metrics.jsonl", "a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
            if progress:
                _say(model.name, epochs, line)
    model.load_state_dict(best_state)
    return history


def new_folder(out: str | Path, force: bool) -> Path:
    """`out` as a path that a run may be written to; FileExistsError where something is there already. Makes nothing."""
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder}: expected a folder for the run, got a file")
    if folder.is_dir() and any(folder.iterdir()) and not force:
        raise FileExistsError(f"{folder}: exists and is not empty; --force overwrites the run in it")
    return folder


def _start(folder: Path, model: Model, record: dict[str, Any]) -> None:
    # After an epoch, not before: a run that fails at once leaves an earlier one in the folder alone.
    (folder / "metrics.jsonl").unlink(missing_ok=True)
    checkpoint.save(model, folder, record)


def _epoch(model: Model, split: Split, falling: LambdaLR, rng: np.random.Generator, label: str) -> float:
    model.train()
    total = torch.zeros((), dtype=torch.float64)
    steps = model.steps(split.train)
    for batch in _bar(model.batches(split.train, rng), steps, label):
        loss = model.loss(batch)
        falling.optimizer.zero_grad()
        loss.backward()
        falling.optimizer.step()
        falling.step()
        model.after_step(batch)
        total += loss.detach()
    return float(total / max(steps, 1))


def _bar(batches: Iterable[T], total: int, label: str) -> Iterator[T] | Iterable[T]:
    if label and sys.stderr.isatty():
        try:
            from tqdm import tqdm
        except ImportError:
            return batches
        return tqdm(batches, total=total, desc=label, leave=False, file=sys.stderr)
    return batches


def _say(name: str, epochs: int, line: Mapping[str, float]) -> None:
    best = "  best so far" if line["best"] else ""
    print(
        f"{name} epoch {line['epoch']}/{epochs}: loss {line['loss']:.4f}, "
        f"validation recall@10 {line['recall@10']:.4f}, ndcg@10 {line['ndcg@10']:.4f}, {line['seconds']:.1f} s{best}",
        file=sys.stderr,
        flush=True,
    )
