"""Run folders: weights and queue as safetensors, the rest as JSON; loading needs neither the data nor pickle.

    config.json        model, its resolved config, versions, and what the caller records about the run
    items.json         the item table: external ids, titles, features
    model.safetensors  every tensor of the state dict, with a checksum
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


def save(model: Model, folder: str | Path, record: Mapping[str, Any] | None = None) -> None:
    """Writes `model` to the run folder `folder`, made if missing; `record` joins config.json (data, seed, epochs, ...).

    Each file is replaced atomically. Needs the `recsys` extra (safetensors).

    >>> save(model, "runs/first")  # doctest: +SKIP
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "format": FORMAT,
        "model": model.name,
        "config": asdict(model.config),
        **(record or {}),
        "versions": {
            "fastcl": fastcl.__version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
    }
    write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")
    write_text(folder / "items.json", json.dumps(model.items.to_json(), ensure_ascii=False) + "\n")
    save_weights(model, folder)


def save_weights(model: Model, folder: Path) -> None:
    """Replaces model.safetensors alone."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    metadata = {"format": FORMAT, "model": model.name, "sha256": _digest(tensors)}
    write_bytes(folder / "model.safetensors", _safetensors().save(tensors, metadata))


def load(folder: str | Path) -> Model:
    """The model of a run folder, ready to score (eval mode, CPU).

    Raises FileNotFoundError where `folder` is no run folder, ValueError where a file in it is damaged or does not
    belong.

    >>> model = load("runs/first")  # doctest: +SKIP
    """
    folder = Path(folder)
    config = read_config(folder)
    try:
        items = Items.from_json(json.loads(_read(folder / "items.json")))
        options: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in config["config"].items()
        }
        model = MODELS[config["model"]](items, **options)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{folder}: config.json or items.json is damaged ({error})") from error
    path = folder / "model.safetensors"
    data = _read(path)
    try:
        tensors = _safetensors().load(data)
        # 8 bytes of length, then the JSON header: safetensors itself reads metadata from files only.
        metadata = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    except Exception as error:  # SafetensorError shares no base with the JSON and key errors
        raise ValueError(f"{path}: damaged, or not a model that fastcl saved ({error})") from error
    if (metadata.get("format"), metadata.get("model")) != (FORMAT, model.name):
        raise ValueError(f"{path}: expected the weights of a {model.name} model saved by fastcl, got {metadata}")
    if metadata.get("sha256") != _digest(tensors):
        raise ValueError(f"{path}: damaged, its content does not match its checksum")
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        raise ValueError(f"{path}: does not belong to config.json and items.json ({error})") from error
    return model.eval()


def read_config(folder: str | Path) -> dict[str, Any]:
    """config.json of a run folder, checked for being one of ours."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder}: not a run folder (no config.json)")
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


def require_safetensors() -> None:
    """Raises ImportError with the remedy where the `recsys` extra is missing."""
    _safetensors()


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError("run folders need the package safetensors: pip install 'fastcl[recsys]'") from error
    return safetensors.torch


def _read(path: Path) -> bytes:
    if not path.is_file():
        raise FileNotFoundError(f"{path.parent}: not a whole run folder (no {path.name})")
    return path.read_bytes()


def _digest(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
