"""One run of a study: a model trained by its plan, resumable after any epoch, then measured on test once.

Which runs there are, where results go and how they are shown is quality.py's business.
"""

import json
import math
import resource
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.protocols import PROTOCOLS, SEEN, some
from benchmarks.sources import Parts
from fastcl.recsys import checkpoint, report
from fastcl.recsys.data import Histories, Scorer, Split
from fastcl.recsys.models import MODELS, ContrastVAE, Model
from fastcl.recsys.options import at_least, one_of

# Learning rate at a share of the planned epochs, relative to the first one.
SCHEDULES: dict[str, Callable[[float], float]] = {"constant": lambda done: 1.0, "falling": lambda done: 1.0 - done}


class Plan(NamedTuple):
    """epochs: at most. patience: epochs without a better validation result before the run ends. betas: Adam's.

    valid: how many of the users validate, drawn once for all runs; 0: all.
    """

    epochs: int
    patience: int
    schedule: str = "falling"
    betas: tuple[float, float] = (0.9, 0.98)
    valid: int = 0


def measure(
    model_name: str,
    options: dict[str, Any],
    plan: Plan | None,
    seed: int,
    parts: Parts,
    folder: Path,
    protocol: str = "ranking",
) -> dict[str, Any]:
    """Trains (or goes on with) the run in `folder`, or takes a floor as it is; returns what the results file keeps.

    folder: gets state.safetensors after every epoch, and in the end the best weights as a run folder.
    protocol: of protocols.PROTOCOLS.
    """
    split = parts.split
    floors = report.floors(split, SEEN[protocol])
    if model_name in floors:
        return _tested(floors[model_name], parts, protocol)
    one_of(MODELS, "model", model_name)
    assert plan is not None, "a model needs a plan"
    at_least(1, "epochs", plan.epochs)
    one_of(SCHEDULES, "schedule", plan.schedule)
    settings = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    model = MODELS[model_name](split.items, seed=seed, **settings)
    rules = PROTOCOLS[protocol](model)
    done = train(model, plan, seed, split, folder / "state.safetensors", partial(_say, rules.watched), protocol)
    done |= _tested(model, parts, protocol)
    if isinstance(model, ContrastVAE):
        done["diagnostics"] = model.diagnostics(split.test.history)
    done["peak_rss_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    checkpoint.save(model, folder, {"seed": seed, "plan": plan._asdict()})
    return done


def _tested(scorer: Scorer, parts: Parts, protocol: str) -> dict[str, Any]:
    """On the split's own test cases; metrics on others have their name in front."""
    test = PROTOCOLS[protocol](scorer).test
    done = test(scorer, parts.split.test)
    for name, cases in parts.others.items():
        done["test"] |= {f"{name} {metric}": value for metric, value in test(scorer, cases)["test"].items()}
    return done


def train(
    model: Model,
    plan: Plan,
    seed: int,
    split: Split,
    path: Path,
    say: Callable[[dict[str, Any]], None],
    protocol: str = "ranking",
) -> dict[str, Any]:
    """Trains from the state in `path`, if there is one, leaves the model with its best weights and returns the log;
    `say` gets it after every epoch, when the state is on disk.
    """
    rules = PROTOCOLS[protocol](model)
    cases = some(split.valid, plan.valid)
    rng = np.random.default_rng(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=model.config.lr, betas=plan.betas, fused=True)
    steps = plan.epochs * model.steps(split.train)
    schedule = LambdaLR(optimizer, lambda step: SCHEDULES[plan.schedule](step / steps))
    log: dict[str, Any] = {"epochs": 0, "best_epoch": 0, "cpu_s": 0.0, "valid": None, "curve": []}
    best: dict[str, Tensor] = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if path.is_file():
            log, best = _restore(path, model, optimizer, schedule, rng)
        while log["epochs"] < plan.epochs and log["epochs"] - log["best_epoch"] < plan.patience:
            started = time.process_time()
            loss = epoch(model, split.train, optimizer, schedule, rng)
            valid = rules.validate(model.eval(), cases)
            log["epochs"] += 1
            log["cpu_s"] += time.process_time() - started
            log["curve"].append([round(loss, 4), round(valid[rules.watched], 5)])
            if log["valid"] is None or rules.better(valid, log["valid"]):
                log["valid"], log["best_epoch"] = valid, log["epochs"]
                best = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            _store(path, log, best, model, optimizer, schedule, rng)
            say(log)
    model.load_state_dict(best)
    model.eval()
    return log


def _say(watched: str, log: dict[str, Any]) -> None:
    loss, value = log["curve"][-1]
    at = f"loss {loss:.4f}, validation {watched} {value:.4f}, best {max(n for _, n in log['curve']):.4f}"
    print(f"  epoch {log['epochs']}: {at}, {log['cpu_s']:.0f} s of CPU", flush=True)


def epoch(
    model: Model, clicks: Histories, optimizer: torch.optim.Adam, schedule: LambdaLR, rng: np.random.Generator
) -> float:
    """One pass over the clicks; returns the mean loss of its steps."""
    model.train()
    total = torch.zeros((), dtype=torch.float64)
    for batch in model.batches(clicks, rng):
        loss = model.loss(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        model.after_step(batch)
        total += loss.detach()
    mean = float(total / model.steps(clicks))
    if not math.isfinite(mean):
        raise FloatingPointError(f"loss: expected a finite number, got {mean}")
    return mean


def _store(
    path: Path,
    log: dict[str, Any],
    best: dict[str, Tensor],
    model: Model,
    optimizer: torch.optim.Adam,
    schedule: LambdaLR,
    rng: np.random.Generator,
) -> None:
    tensors = {"rng": torch.get_rng_state()}
    tensors |= {f"best.{name}": tensor for name, tensor in best.items()}
    tensors |= {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for nth, state in optimizer.state_dict()["state"].items():
        tensors |= {f"adam.{nth}.{name}": tensor for name, tensor in state.items()}
    facts = {"log": log, "schedule": schedule.last_epoch, "numpy": rng.bit_generator.state}
    path.parent.mkdir(parents=True, exist_ok=True)
    # Clones: safetensors refuses memory that two tensors share.
    data = safetensors.torch.save({name: t.clone() for name, t in tensors.items()}, {"facts": json.dumps(facts)})
    checkpoint.write_bytes(path, data)


def _restore(
    path: Path, model: Model, optimizer: torch.optim.Adam, schedule: LambdaLR, rng: np.random.Generator
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    with safetensors.safe_open(path, "pt") as file:
        facts = json.loads(file.metadata()["facts"])
        # An open safetensors file has keys() but cannot be iterated over.
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118

    def part(prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}

    model.load_state_dict(part("model."))
    adam: dict[int, dict[str, Tensor]] = {}
    for name, tensor in part("adam.").items():
        nth, _, key = name.partition(".")
        adam.setdefault(int(nth), {})[key] = tensor
    # The step number first: the schedule writes the learning rate that belongs to it.
    schedule.last_epoch = facts["schedule"]
    optimizer.load_state_dict({**optimizer.state_dict(), "state": adam})
    for group, base, factor in zip(optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
        group["lr"] = base * factor(schedule.last_epoch)
    rng.bit_generator.state = facts["numpy"]
    torch.set_rng_state(tensors["rng"])
    return facts["log"], part("best.")
