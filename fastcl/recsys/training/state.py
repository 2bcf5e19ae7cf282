"""The settings of a training run, its progress, and last.safetensors, which holds both with the tensors.

The random numbers of an epoch depend on the seed, the epoch and the process alone, so that no generator is saved
between epochs. A checkpoint within an epoch saves torch's generator; on resuming, the batches already done are drawn
again. Nothing here trains.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastcl.recsys import schema
from fastcl.recsys.evaluation.cutoffs import at_cutoffs, parted
from fastcl.recsys.evaluation.measures import OF_RANKS, WITHOUT_K
from fastcl.recsys.evaluation.ranking import SEEN
from fastcl.recsys.models import Model
from fastcl.recsys.options import above, at_least, between, one_of
from fastcl.recsys.training import checkpoint, parts, processes, tensorfile
from fastcl.recsys.training.modelstate import distinct
from fastcl.recsys.training.rowadam import RowAdam

METRICS = ("ndcg@10", "recall@10")  # validation always measures these metrics, besides the metric of the run
FALL = 0.1  # what the schedule "plateau" multiplies the learning rate by
# Schedules map the fraction of planned steps already done (0..1), and how often validation has stood still
# (`Progress.stalls`), to a multiplier of the initial learning rate.
SCHEDULES: dict[str, Callable[[float, int], float]] = {
    "linear": lambda done, stalls: 1.0 - done,
    "plateau": lambda done, stalls: FALL**stalls,
    "constant": lambda done, stalls: 1.0,
}
# A plan without a number of epochs goes on until validation stops improving, for MOST epochs at most. Its learning rate
# falls where validation stands still, since nobody knows over which steps it should fall. It waits for a better epoch
# for PATIENCE epochs, and for WAIT batches: models first learn which items are popular, and validation stands still
# until they learn more, after a number of steps. BLIND: epochs without validation cases.
MOST, PATIENCE, WAIT, BLIND = 200, 10, 200, 20
PRECISIONS = ("float32", "bfloat16")
DEVICES = ("cpu", "cuda", "mps", "xpu")
THREADS = 4096  # the most that a config.json may ask for; a damaged one must not start millions
LAST = "last.safetensors"
MOMENTS = ("exp_avg", "exp_avg_sq", "step")  # the state that Adam keeps for each parameter that had a gradient
# What runs that do not record these settings had.
EARLIER: dict[str, Any] = {"schedule": "linear", "valid_cases": None}
# Settings that may differ when a run goes on: they change nothing in the result, or only its last bits.
FREE = ("save_every", "threads", "device")


def planned(
    epochs: int | None,
    patience: int | None,
    schedule: str | None,
    *,
    validates: bool = True,
    learns: bool = True,
    batches: int = 1,
) -> dict[str, Any]:
    """The fields `epochs`, `patience` and `schedule` of `Settings`; what is None follows from the rest.

    validates: whether there are validation cases. learns: `Model.learns`; a model that counts takes one epoch.
    batches: those of an epoch.

    >>> planned(None, None, None, batches=500)
    {'epochs': 200, 'patience': 10, 'schedule': 'plateau'}
    >>> planned(30, None, None, batches=500)
    {'epochs': 30, 'patience': None, 'schedule': 'linear'}
    """
    if epochs is None and not (learns and validates):
        epochs = BLIND if learns else 1
    if schedule is None:
        schedule = "plateau" if epochs is None else "linear"
    if patience is None and validates and (epochs is None or schedule == "plateau"):
        patience = max(PATIENCE, -(-WAIT // max(1, batches)))
    return {"epochs": MOST if epochs is None else epochs, "patience": patience, "schedule": schedule}


def validation_metric(metric: str) -> str:
    """The metric that decides which epoch is the best, with its cut-off. ValueError unless it is a mean over the cases.

    >>> validation_metric("recall"), validation_metric("ndcg@20")
    ('recall@10', 'ndcg@20')
    """
    name, cutoff = parted(metric, "metric")
    known = (*OF_RANKS, *WITHOUT_K)
    if name not in known or (name in WITHOUT_K and cutoff is not None):
        raise ValueError(f"metric: expected one of {', '.join(known)}, such as ndcg@10, got {metric!r}")
    return at_cutoffs((metric,), 10, tuple(WITHOUT_K))[0]


@dataclass(frozen=True)
class Settings:
    """The resolved options of `fit`, and the properties of the machine that bit-equal repetition needs. config.json
    holds them under the same names.
    """

    epochs: int
    lr: float
    seed: int = 0
    seen: str = "mask"
    metric: str = "ndcg@10"
    patience: int | None = None
    valid_cases: int | None = None
    schedule: str = "linear"
    precision: str = "float32"
    accumulate: int = 1
    save_every: float = 600.0
    device: str = "cpu"
    threads: int = field(default_factory=torch.get_num_threads)
    processes: int = field(default_factory=processes.count)

    def __post_init__(self) -> None:
        for name in ("epochs", "accumulate", "threads", "processes"):
            at_least(1, name, getattr(self, name))
        at_least(0, "seed", self.seed)
        above(0.0, "lr", self.lr)
        one_of(SEEN, "seen", self.seen)
        if validation_metric(self.metric) != self.metric:
            raise ValueError(f"metric: expected one with its cut-off, such as ndcg@10, got {self.metric!r}")
        one_of(SCHEDULES, "schedule", self.schedule)
        if self.schedule == "plateau" and self.patience is None:
            raise ValueError("schedule: expected linear or constant without validation cases or patience, got plateau")
        one_of(PRECISIONS, "precision", self.precision)
        one_of(DEVICES, "device", self.device)
        if self.threads > THREADS:
            raise ValueError(f"threads: expected at most {THREADS}, got {self.threads}")
        between(0.0, float("inf"), "save_every", self.save_every)
        for name in ("patience", "valid_cases"):
            if getattr(self, name) is not None:
                at_least(1, name, getattr(self, name))

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics that validation measures."""
        return tuple(dict.fromkeys((*METRICS, self.metric)))

    @classmethod
    def recorded(cls, config: Mapping[str, Any]) -> "Settings":
        """The settings in the content of a config.json; ValueError where it lacks one or holds other values."""
        where = "config.json: expected the settings of a training run"
        config = {**EARLIER, **config}
        missing = [name for name in cls.__dataclass_fields__ if name not in config]
        if missing:
            raise ValueError(f"{where}, got none of {missing[0]}")
        found = {name: config[name] for name in cls.__dataclass_fields__}
        schema.keys_fit(found, cls, where)
        try:
            return cls(**found)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}, got others ({error})") from error


@dataclass
class Progress:
    """history: one line for every finished epoch. The other fields describe the epoch under way. step: optimiser steps
    done. total: the sum of their losses, one number per part; empty before the first step. seconds: time spent.
    """

    history: list[dict[str, Any]] = field(default_factory=list)
    step: int = 0
    total: list[float] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def best(self) -> dict[str, Any] | None:
        """The line of the best epoch so far."""
        return next((line for line in reversed(self.history) if line["best"]), None)

    def stalls(self, settings: Settings) -> int:
        """How often half of `patience` epochs, rounded up, have passed without a new best one."""
        if settings.patience is None:
            return 0
        late, stalls = 0, 0
        for line in self.history:
            late = 0 if line["best"] else late + 1
            stalls += late == -(-settings.patience // 2)
        return stalls

    def done(self, settings: Settings) -> bool:
        """Whether the run is complete: after the last epoch, or `patience` epochs after the best one."""
        late = len(self.history) - int(self.best["epoch"]) if self.best else 0
        return len(self.history) >= settings.epochs or (settings.patience is not None and late >= settings.patience)


class Content(NamedTuple):
    """What last.safetensors holds: tensors of the whole run, this process's rows of cut ones, and facts."""

    tensors: dict[str, Tensor]
    cut: dict[str, Tensor]
    facts: dict[str, str]


def content(
    model: Model, optimizer: RowAdam, progress: Progress, facts: Mapping[str, str] | None = None
) -> Content:
    """The content of last.safetensors and its parts. Every process calls this function; only the first gets all
    tensors.

    Learned parameters and the optimiser's state are equal in all processes. Each process has its own frozen parameters
    (an encoder that follows another), buffers (a queue) and random states, and its own rows of the row tables with the
    state of these. facts: the facts of the run (`facts_of`).
    """
    names = _learning(model, optimizer)
    kept = distinct(model)
    tensors = {f"model/{name}": tensor for name, tensor in kept.items() if name in names}
    with_moments = []
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer/{key}/{name}"] = value
        if optimizer.state.get(parameter):
            with_moments.append(name)
    tensors |= {f"rows/{name}": tensor for name, tensor in optimizer.row_state().items()}
    cut = {name: tensors.pop(name) for name in sorted(_cut(optimizer) & tensors.keys())}
    own = {f"buffer/{name}": tensor for name, tensor in kept.items() if name not in names}
    for rank, theirs in enumerate(_of_all(own | _random_states(model.device))):
        tensors |= {f"process/{rank}/{name}": tensor for name, tensor in theirs.items()}
    about = {"format": str(checkpoint.VERSION), "kind": "training", "model": model.name}
    standing = {"progress": json.dumps(vars(progress)), "moments": json.dumps(with_moments)}
    return Content(tensors, cut, {**about, **standing, **(facts or {})})


def _cut(optimizer: RowAdam) -> set[str]:
    """The names in last.safetensors of the tensors of which each process has its own rows."""
    return {f"model/{name}" for name in optimizer.cut_weights} | {f"rows/{name}" for name in optimizer.cut_state}


def facts_of(settings: Settings, data: str, belongs: str) -> dict[str, str]:
    """The facts about its run that last.safetensors holds. data: the `fingerprint` of the split; belongs: the
    `checkpoint.identity` of the model.
    """
    return {"belongs": belongs, "settings": json.dumps({**vars(settings), "data_sha256": data})}


def save(
    folder: Path,
    model: Model,
    optimizer: RowAdam,
    progress: Progress,
    facts: Mapping[str, str] | None = None,
) -> None:
    """Replaces last.safetensors and its parts, without a second copy of the tensors in memory. Every process calls this
    function.
    """
    parts.write(folder / LAST, *content(model, optimizer, progress, facts))


def restore(
    folder: Path, model: Model, optimizer: RowAdam, expected: Mapping[str, str] | None = None
) -> Progress:
    """Restores the model, the optimiser and torch's random state from last.safetensors; returns the progress. Of row
    tables each process gets its own rows, however many processes wrote them.

    Raises ValueError where the file is damaged, holds other facts than `expected`, or has tensors whose names, shapes
    or types differ from those of the model and its optimiser.
    """
    path = folder / LAST
    wanted = {"kind": "training", "model": model.name, **(expected or {})}
    optimizer.share_out()
    tensors, facts = checkpoint.read_tensors(path, wanted, _cut(optimizer), parts.own_share())
    progress = _progress(facts.get("progress", ""), f"{path}: progress")
    own = _own_state(path, tensors, progress)
    names = _learning(model, optimizer)
    checkpoint.fill(model, _below("model/", tensors) | _below("buffer/", own), path)
    if not names <= set(model.state_dict()):
        raise ValueError(f"{path}: expected parameters that are in the model's state dict, got others")
    moments = _moments(path, _below("optimizer/", tensors), facts.get("moments"), model, progress)
    optimizer.load_rows(_below("rows/", tensors), str(path))
    optimizer.load_state_dict({"state": moments, "param_groups": optimizer.state_dict()["param_groups"]})
    _restore_random(path, own, model.device)
    return progress


def progress_of(folder: Path) -> Progress:
    """The progress in last.safetensors, which may be an epoch ahead of metrics.jsonl where a process was killed."""
    path = folder / LAST
    return _progress(tensorfile.read_facts(path).get("progress", ""), f"{path}: progress")


def _learning(model: Model, optimizer: RowAdam) -> set[str]:
    rows = {f"{name}.weight" for name in optimizer.tables}
    return rows | {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def _progress(text: str, where: str) -> Progress:
    found = schema.parse(text, where)
    schema.fits(found, schema.Standing, where)
    extra = sorted(found.keys() - Progress.__dataclass_fields__.keys())
    if extra or found["step"] < 0 or found["seconds"] < 0:
        raise ValueError(f"{where}: expected history, step, total and seconds, none below 0, got others")
    schema.lines_fit(found["history"], f"{where}: history")
    return Progress(**found)


def _moments(
    path: Path, found: Mapping[str, Tensor], named: str | None, model: Model, progress: Progress
) -> dict[int, dict[str, Tensor]]:
    """Number of a parameter -> its state in the optimiser; ValueError where a state does not fit its parameter."""
    learning = dict(model.named_parameters())
    having = sorted({key.partition("/")[2] for key in found})
    if named is not None:  # runs of version 1 do not name the parameters with gradients
        having = schema.parse(named, f"{path}: moments")
        schema.fits(having, list[str], f"{path}: moments")
    expected = {f"{kind}/{name}" for name in having for kind in MOMENTS}
    odd = sorted((found.keys() ^ expected) | {name for name in having if name not in learning})
    if odd:
        raise ValueError(
            f"{path}: expected {', '.join(MOMENTS)} of the parameters that had gradients, differs in {odd[0]}"
        )
    learns = any(parameter.requires_grad for parameter in learning.values())
    if (progress.history or progress.step) and learns and not having:
        raise ValueError(f"{path}: expected the optimiser's state after {len(progress.history)} epochs, got none")
    numbers = {name: number for number, name in enumerate(learning)}
    for name in having:
        for kind in MOMENTS:
            tensor, like = found[f"{kind}/{name}"], learning[name]
            if not (tensor.is_floating_point() and bool(tensor.isfinite().all()) and bool(like.isfinite().all())):
                raise ValueError(f"{path}: {name}: expected finite weights and finite {kind}, got others")
            shape, dtype = (torch.Size(), torch.float32) if kind == "step" else (like.shape, like.dtype)
            if tensor.shape != shape or tensor.dtype != dtype:
                wanted, got = f"{dtype} {list(shape)}", f"{tensor.dtype} {list(tensor.shape)}"
                raise ValueError(f"{path}: optimizer/{kind}/{name}: expected {wanted}, got {got}")
        steps = found[f"step/{name}"].item()
        if not (steps >= 1 and steps == int(steps)):
            raise ValueError(f"{path}: optimizer/step/{name}: expected a whole number of at least 1, got {steps}")
    return {numbers[name]: {kind: found[f"{kind}/{name}"] for kind in MOMENTS} for name in having}


def _own_state(path: Path, tensors: Mapping[str, Tensor], progress: Progress) -> dict[str, Tensor]:
    """What of the processes' states this process goes on with. ValueError where each had its own and their number is
    another one.
    """
    count, saved = processes.count(), 0
    while f"process/{saved}/random" in tensors:
        saved += 1
    own = _below(f"process/{processes.rank()}/", tensors)
    if saved in (0, count):
        return own
    theirs = [_below(f"process/{rank}/buffer/", tensors) for rank in range(saved)]
    if any(_differ(theirs[0], one) for one in theirs[1:]):
        expected = f"expected the {saved} processes that trained it, each of which has its own queues"
        again = f"torchrun --nproc-per-node={saved} -m fastcl.recsys resume {path.parent}"
        raise ValueError(f"{path.parent}: {expected}, got {count}; {again}")
    torch.manual_seed(_seed(progress))
    return {f"buffer/{name}": tensor for name, tensor in theirs[0].items()} | {"random": torch.get_rng_state()}


def _differ(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() != other.keys() or any(not torch.equal(one[name], other[name]) for name in one)


def _seed(progress: Progress) -> int:
    """Of the rest of an epoch that other processes began: unlike in any of them."""
    place = (len(progress.history), progress.step, processes.rank(), processes.count())
    return int(np.random.SeedSequence(place).generate_state(1)[0])


def _restore_random(path: Path, own: Mapping[str, Tensor], device: torch.device) -> None:
    for name, now in _random_states(device).items():
        saved = own.get(name)
        if saved is None and name != "random":
            continue  # the run was begun without CUDA
        if saved is None or saved.dtype != now.dtype or saved.shape != now.shape:
            got = "none" if saved is None else f"{saved.dtype} {list(saved.shape)}"
            raise ValueError(f"{path}: {name}: expected {now.dtype} {list(now.shape)}, got {got}")
        try:
            torch.set_rng_state(saved) if name == "random" else torch.cuda.set_rng_state(saved, device)
        except RuntimeError as error:
            raise ValueError(f"{path}: {name}: expected a state of the generator, got none ({error})") from error


def _random_states(device: torch.device) -> dict[str, Tensor]:
    states = {"random": torch.get_rng_state()}
    return states | ({"random_cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def _of_all(own: Mapping[str, Tensor]) -> Iterator[Mapping[str, Tensor]]:
    """Every process's tensors, in the order of their ranks."""
    if processes.count() == 1:
        yield own
        return
    safetensors = tensorfile.require_safetensors().torch
    data = safetensors.save({name: tensor.detach().cpu().contiguous() for name, tensor in own.items()})
    yield from (safetensors.load(theirs) for theirs in processes.collect(data))


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
