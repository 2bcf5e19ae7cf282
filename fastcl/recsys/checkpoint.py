"""Run folders: weights and queue as safetensors, the rest as JSON; loading needs neither the data nor pickle.

    config.json        model, its resolved config, versions, and what the caller records about the run
    items.json         the item table: external ids, titles, features
    model.safetensors  every tensor of the best epoch's state dict, with a checksum
    last.safetensors   where training stands, for `resume` (written by state.py)
    metrics.jsonl      one line an epoch (written by train.py)

Files are replaced whole or not at all. No training and no scoring here.
"""

import hashlib
import json
import os
import platform
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fastcl
from fastcl.recsys.data import Items
from fastcl.recsys.models import MODELS, Model

FORMAT = "fastcl-run-1"
# config.json makes a folder a run: first to go, last to come.
FILES = ("config.json", "items.json", "last.safetensors", "model.safetensors", "metrics.jsonl")


def save(model: Model, folder: str | Path, record: Mapping[str, Any] | None = None) -> None:
    """Writes `model` to the run folder `folder`, made if missing; `record` joins config.json (data, seed, epochs, ...).

    Each file is replaced atomically. Needs the `recsys` extra (safetensors).

    >>> save(model, "runs/first")  # doctest: +SKIP
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_description(model, folder, record or {})
    save_weights(model.name, model.state_dict(), folder)


def save_description(model: Model, folder: Path, record: Mapping[str, Any]) -> None:
    """Replaces items.json and config.json alone."""
    config = {
        "format": FORMAT,
        "model": model.name,
        "config": asdict(model.config),
        **record,
        "versions": versions(),
    }
    write_text(folder / "items.json", json.dumps(model.items.to_json(), ensure_ascii=False) + "\n")
    write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")


def save_weights(name: str, state: Mapping[str, Tensor], folder: Path) -> None:
    """Replaces model.safetensors alone by the state dict of a model called `name`."""
    write_tensors(folder / "model.safetensors", state, {"model": name})


def versions() -> dict[str, str]:
    """What a run depends on to repeat bit for bit, beside the machine and its number of threads."""
    return {
        "fastcl": fastcl.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def load(folder: str | Path) -> Model:
    """The model of a run folder, ready to score (eval mode, CPU).

    Raises FileNotFoundError where `folder` is no run folder, ValueError where a file in it is damaged or does not
    belong.

    >>> model = load("runs/first")  # doctest: +SKIP
    """
    folder = Path(folder)
    model = build(folder)
    path = folder / "model.safetensors"
    if not path.is_file() and not (folder / "metrics.jsonl").is_file():
        raise FileNotFoundError(f"{folder}: no epoch is finished yet; fastcl resume {folder} goes on with the training")
    tensors, _ = read_tensors(path, {"model": model.name})
    fill(model, tensors, path)
    return model.eval()


def build(folder: Path) -> Model:
    """The model that config.json and items.json describe, with other weights than those of the run."""
    config = read_config(folder)
    try:
        items = Items.from_json(json.loads(_read(folder / "items.json")))
        options: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in config["config"].items()
        }
        return MODELS[config["model"]](items, **options)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{folder}: config.json or items.json is damaged ({error})") from error


def fill(model: Model, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Loads a state dict that came from `path`."""
    try:
        model.load_state_dict(tensors)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{path}: does not belong to config.json and items.json ({error})") from error


def read_config(folder: str | Path) -> dict[str, Any]:
    """config.json of a run folder, checked for being one of ours."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        several = ", ".join(run.name for run in runs_in(Path(folder)))
        raise FileNotFoundError(
            f"{folder}: holds several runs, expected one of {several}"
            if several
            else f"{folder}: not a run folder (no config.json)"
        )
    try:
        config = json.loads(_read(path))
    except ValueError as error:
        raise ValueError(f"{path}: damaged ({error})") from error
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise ValueError(f"{path}: expected a run of format {FORMAT!r}, got something else")
    if config.get("model") not in MODELS:
        known = ", ".join(MODELS)
        hint = "; a model of your own: `fastcl --use FILE ...`, or `register` it, before its run is loaded"
        raise ValueError(f"{path}: expected a model of {known}, got {config.get('model')!r}{hint}")
    return config


def runs_in(folder: Path) -> list[Path]:
    """The runs that `train --seed 1,2,3` made in `folder`; none where it is a run itself, or no folder of runs."""
    several = sorted(path.parent for path in folder.glob("seed-*/config.json"))
    return [] if (folder / "config.json").exists() else several


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """A safetensors file of our format, with a checksum over the tensors and the metadata."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    signed = {"format": FORMAT, **metadata}
    write_bytes(path, require_safetensors().save(tensors, signed | {"sha256": _digest(tensors, signed)}))


def read_tensors(path: Path, expected: Mapping[str, str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(tensors on the CPU, metadata) of a file of `write_tensors`; ValueError for another, or other than `expected`."""
    data = _read(path)
    try:
        tensors = require_safetensors().load(data)
        # 8 bytes of length, then the JSON header: safetensors itself reads metadata from files only.
        metadata = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    except Exception as error:  # SafetensorError shares no base with the JSON and key errors
        raise ValueError(f"{path}: damaged, or not a file that fastcl saved ({error})") from error
    wanted = {"format": FORMAT, **expected}
    found = {name: metadata.get(name) for name in wanted}
    if found != wanted:
        raise ValueError(f"{path}: expected {_facts(wanted)}, got {_facts(found)}")
    if metadata.pop("sha256", None) != _digest(tensors, metadata):
        raise ValueError(f"{path}: damaged, its content does not match its checksum")
    return tensors, metadata


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    write_parts(path, [data])


def write_parts(path: Path, parts: Iterable[bytes]) -> None:
    """The parts back to back, for content that need not fit in memory."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def clear(folder: Path) -> None:
    """Removes the run in `folder`, and nothing else."""
    for name in FILES:
        (folder / name).unlink(missing_ok=True)
    sweep(folder)


def sweep(folder: Path) -> None:
    """Removes what a process that was killed while writing left behind."""
    for path in folder.glob(".*.tmp"):
        path.unlink(missing_ok=True)


def require_safetensors() -> Any:
    """The module safetensors.torch; ImportError with the remedy where the `recsys` extra is missing."""
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError("run folders need the package safetensors: pip install 'fastcl[recsys]'") from error
    return safetensors.torch


def _read(path: Path) -> bytes:
    if not path.is_file():
        raise FileNotFoundError(f"{path.parent}: not a whole run folder (no {path.name})")
    return path.read_bytes()


def _facts(facts: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items())


def _digest(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    digest = hashlib.sha256()
    for name in sorted(metadata.keys() - {"format", "model"}):  # these two are compared themselves
        digest.update(f"{name} {metadata[name]}\n".encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
