"""What a training run is (Settings), how far it has come (Progress), and last.safetensors, which holds all of it.

The random numbers of an epoch depend on the seed, the epoch and the process alone, so between epochs there is no
generator to keep; within one, torch's is kept and the batches already done are drawn again. No training here.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastcl.recsys import checkpoint, launch
from fastcl.recsys.data import Split
from fastcl.recsys.metrics import SEEN
from fastcl.recsys.models import Model
from fastcl.recsys.options import above, at_least, between, one_of

METRICS = ("ndcg@10", "recall@10")
PRECISIONS = ("float32", "bfloat16")
LAST = "last.safetensors"


@dataclass(frozen=True)
class Settings:
    """The options of `fit`, resolved, and what bit-equal repetition asks of the machine; in config.json as they are."""

    epochs: int
    lr: float
    seed: int = 0
    seen: str = "mask"
    metric: str = "ndcg@10"
    patience: int | None = None
    precision: str = "float32"
    accumulate: int = 1
    save_every: float = 600.0
    device: str = "cpu"
    threads: int = field(default_factory=torch.get_num_threads)
    processes: int = field(default_factory=launch.count)

    def __post_init__(self) -> None:
        for name in ("epochs", "accumulate", "threads", "processes"):
            at_least(1, name, getattr(self, name))
        at_least(0, "seed", self.seed)
        above(0.0, "lr", self.lr)
        one_of(SEEN, "seen", self.seen)
        one_of(METRICS, "metric", self.metric)
        one_of(PRECISIONS, "precision", self.precision)
        between(0.0, float("inf"), "save_every", self.save_every)
        if self.patience is not None:
            at_least(1, "patience", self.patience)

    @classmethod
    def recorded(cls, config: Mapping[str, Any]) -> "Settings":
        """From the content of a config.json; ValueError where it holds no such settings."""
        try:
            return cls(**{name: config[name] for name in cls.__dataclass_fields__})
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"config.json: expected the settings of a training run, got others ({error})") from error


@dataclass
class Progress:
    """history: one line for every finished epoch. The rest is of the epoch under way: optimiser steps done, the sum
    of their losses (a number for each part, none before the first step), seconds spent.
    """

    history: list[dict[str, Any]] = field(default_factory=list)
    step: int = 0
    total: list[float] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def best(self) -> dict[str, Any] | None:
        """The line of the best epoch so far."""
        return next((line for line in reversed(self.history) if line["best"]), None)

    def done(self, settings: Settings) -> bool:
        """After the last epoch, or `patience` epochs after the best one."""
        late = len(self.history) - int(self.best["epoch"]) if self.best else 0
        return len(self.history) >= settings.epochs or (settings.patience is not None and late >= settings.patience)


def save(folder: Path, model: Model, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
    """Replaces last.safetensors; every process calls it, the first one writes.

    What learns and the optimiser are alike in all processes; frozen parameters (an encoder that follows another),
    buffers (a queue) and random states are each one's own.
    """
    safetensors = checkpoint.require_safetensors()
    names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    tensors = {f"model/{name}": tensor for name, tensor in model.state_dict().items() if name in names}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer/{key}/{name}"] = value
    own = {f"buffer/{name}": tensor for name, tensor in model.state_dict().items() if name not in names}
    own = {name: tensor.detach().cpu().contiguous() for name, tensor in own.items()} | _random_states(model.device)
    for rank, data in enumerate(launch.collect(safetensors.save(own), model.device)):
        tensors |= {f"process/{rank}/{name}": tensor for name, tensor in safetensors.load(data).items()}
    if launch.leads():
        about = {"kind": "training", "model": model.name, "progress": json.dumps(vars(progress))}
        checkpoint.write_tensors(folder / LAST, tensors, about)


def restore(folder: Path, model: Model, optimizer: torch.optim.Adam) -> Progress:
    """Puts model, optimiser and torch's random state back to where `save` was called."""
    path = folder / LAST
    tensors, metadata = checkpoint.read_tensors(path, {"kind": "training", "model": model.name})
    own = _below(f"process/{launch.rank()}/", tensors)
    checkpoint.fill(model, _below("model/", tensors) | _below("buffer/", own), path)
    saved: dict[int, dict[str, Tensor]] = {}
    for number, (name, _) in enumerate(model.named_parameters()):
        keys = [key for key in tensors if key.startswith("optimizer/") and key.split("/", 2)[2] == name]
        if keys:
            saved[number] = {key.split("/")[1]: tensors[key] for key in keys}
    optimizer.load_state_dict({"state": saved, "param_groups": optimizer.state_dict()["param_groups"]})
    torch.set_rng_state(own["random"])
    if "random_cuda" in own:
        torch.cuda.set_rng_state(own["random_cuda"], model.device)
    return Progress(**json.loads(metadata["progress"]))


def fingerprint(split: Split) -> str:
    """Of the clicks that training sees and the cases that validation asks: the same data gives the same one."""
    digest = hashlib.sha256()
    train, valid = split.train, split.valid
    for array in (train.offsets, train.item, train.time, valid.history.offsets, valid.history.item, valid.target):
        digest.update(b"none" if array is None else np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _random_states(device: torch.device) -> dict[str, Tensor]:
    states = {"random": torch.get_rng_state()}
    return states | ({"random_cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
