"""Run folders: tensors as safetensors, the rest as JSON. Loading a run needs neither its data nor pickle.

    config.json        the model's name and resolved config, versions, and what the caller records about the run
    items.json         the item table (external ids, titles, features), and the users of a model that has them
    model.safetensors  every tensor of the best epoch's state dict, with a checksum
    last.safetensors   the state of the training, for `resume` (written by state.py)
    metrics.jsonl      one line per epoch (written by fit.py)
    log.json           what was sent to trackers, where there are some (written by trackers.py)
    model-*, last-*    the rows of each process, where several processes share out a table's rows (written by parts.py)

Files are replaced whole or not at all. The tensor files name the settings and the item table that they belong to.
schema.py declares the content of the JSON files, tensorfile.py writes and reads tensors. Nothing here trains or scores.
"""

import hashlib
import json
import platform
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import fastcl
from fastcl.recsys import schema, writing
from fastcl.recsys.data import Items
from fastcl.recsys.models import MODELS, Model
from fastcl.recsys.models.base import UserModel
from fastcl.recsys.training import lock, parts, tensorfile
from fastcl.recsys.training.modelstate import distinct, with_aliases
from fastcl.recsys.training.tensorfile import require_safetensors as require_safetensors

FORMAT = "fastcl-run"
VERSION = 2
# version of a run -> the function that turns its config.json into one of the next version.
UPGRADES: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {
    1: lambda config: {**config, "format": FORMAT, "version": 2},
}
# A folder is a run as long as it holds config.json, so that file is removed first and written last.
FILES = ("config.json", "items.json", "last.safetensors", "model.safetensors", "metrics.jsonl")
LOG = "log.json"  # no file of the run itself: a run that replaces another begins logs of its own


class Description(NamedTuple):
    """items.json and config.json of a run, and the digest of what its weights depend on (`identity`)."""

    items: str
    config: str
    identity: str


def save(model: Model, folder: str | Path, record: Mapping[str, Any] | None = None) -> None:
    """Writes `model` to the run folder `folder`, which is made if missing. config.json also gets the fields of `record`
    (data, seed, epochs, ...).

    A run that the folder holds is replaced as a whole: a process killed meanwhile leaves the old run, the new run, or
    none. Raises FileExistsError where the folder holds a config.json of something else, ValueError for a record that
    JSON cannot hold or that names a field which `save` writes itself. Needs the `recsys` extra (safetensors).

    >>> save(model, "runs/first")  # doctest: +SKIP
    """
    folder = Path(folder)
    text = describe(model, record or {})
    weights = tensorfile.tensor_parts(distinct(model), weights_facts(model, text.identity))
    with lock.held(folder):
        check_ours(folder)
        earlier = ["last.safetensors", "metrics.jsonl", LOG] if (folder / "config.json").exists() else []
        files = {"model.safetensors": weights, **text_files(text)}
        writing.write_set(folder, files, without=[*earlier, *(part.name for part in parts.found_in(folder))])


def describe(model: Model, record: Mapping[str, Any]) -> Description:
    own = {"format": FORMAT, "version": VERSION, "model": model.name, "config": asdict(model.config)}
    taken = [name for name in record if name in own or name == "versions"]
    if taken:
        raise ValueError(f"record: expected other names than {', '.join(taken)}, which config.json has already")
    try:
        config = json.dumps({**own, **record, "versions": versions()}, indent=2) + "\n"
        users = {"users": list(model.users)} if isinstance(model, UserModel) else {}
        items = json.dumps({**model.items.to_json(), **users}, ensure_ascii=False) + "\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"record: expected what JSON can hold, got something else ({error})") from error
    read_back = schema.parse(config, "record")
    _check_config(read_back, "record")
    return Description(items, config, identity(read_back, items.encode()))


def text_files(text: Description) -> dict[str, list[bytes]]:
    return {"items.json": [text.items.encode()], "config.json": [text.config.encode()]}


def identity(config: Mapping[str, Any], items: bytes) -> str:
    """A digest of a model's name, its settings and its item table. Weights with another identity are not loaded."""
    named = json.dumps([config["model"], config["config"], hashlib.sha256(items).hexdigest()], sort_keys=True)
    return hashlib.sha256(named.encode()).hexdigest()


def identity_of(folder: Path) -> str:
    """The `identity` of the model in a run folder."""
    return identity(read_config(folder), read(folder / "items.json"))


def weights_facts(model: Model, belongs: str = "", epoch: int | None = None) -> dict[str, str]:
    """The facts in the header of model.safetensors. belongs: the `identity`; epoch: the epoch of the weights."""
    facts = {
        "format": str(VERSION),
        "model": model.name,
        "belongs": belongs,
        "epoch": "" if epoch is None else str(epoch),
    }
    return {name: value for name, value in facts.items() if value}


def save_weights(
    model: Model, folder: Path, belongs: str = "", epoch: int | None = None, cut: Collection[str] = ()
) -> None:
    """Replaces model.safetensors and its parts alone. Every process calls this function. cut: the names of the tensors
    of which each process has its own rows.
    """
    kept = distinct(model)
    alike = {name: tensor for name, tensor in kept.items() if name not in cut}
    rows = {name: tensor for name, tensor in kept.items() if name in cut}
    parts.write(folder / "model.safetensors", alike, rows, weights_facts(model, belongs, epoch))


def versions() -> dict[str, str]:
    """The versions that a run needs to repeat bit for bit, besides the same machine and number of threads."""
    return {
        "fastcl": fastcl.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def load(folder: str | Path) -> Model:
    """The model of a run folder, ready to score (eval mode, CPU).

    Raises FileNotFoundError where `folder` is no run folder, ValueError where one of its files is damaged or belongs to
    another run.

    >>> model = load("runs/first")  # doctest: +SKIP
    """
    folder = Path(folder)
    config = read_config(folder)
    path = folder / "model.safetensors"
    if not path.is_file() and not (folder / "metrics.jsonl").is_file():
        raise FileNotFoundError(f"{folder}: no epoch is finished yet; fastcl resume {folder} goes on with the training")
    expect(path, tensorfile.read_facts(path), expected_of(folder, config))  # before the model, which may be large
    model = build(folder)
    tensors, _ = read_tensors(path, expected_of(folder, config))
    fill(model, tensors, path)
    return model.eval()


def settings_in(config: Mapping[str, Any]) -> dict[str, Any]:
    """The model's settings in the content of a config.json, with those that runs of its time did not record."""
    recorded = {key: tuple(value) if isinstance(value, list) else value for key, value in config["config"].items()}
    return {**getattr(MODELS[config["model"]].Config, "EARLIER", {}), **recorded}


def build(folder: Path) -> Model:
    """The model that config.json and items.json describe, with initial weights instead of the run's."""
    config = read_config(folder)
    path = folder / "items.json"
    table = schema.parse(read(path), str(path))
    schema.fits(table, schema.ItemTable, str(path))
    try:
        items = Items.from_json(table)
    except ValueError as error:
        raise ValueError(f"{path}: damaged ({error})") from error
    kind = MODELS[config["model"]]
    options = settings_in(config)
    if issubclass(kind, UserModel):
        options["users"] = tuple(table.get("users") or ())
    try:
        return kind(items, **options)
    except Exception as error:  # a user's own model may raise any error, and so may torch for an excessive size
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ValueError(f"{folder / 'config.json'}: config: {config['model']} refuses it ({reason})") from error


def fill(model: Model, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Loads tensors read from `path`, where tied weights stand once; ValueError where a tensor does not fit the model.
    """
    check_tensors(model, tensors, path)
    try:
        model.load_state_dict(with_aliases(model, tensors))
    except (RuntimeError, ValueError, TypeError) as error:
        raise ValueError(f"{path}: does not belong to config.json and items.json ({error})") from error


def check_tensors(model: Model, tensors: Mapping[str, Tensor], path: Path) -> None:
    """ValueError where `tensors` differ from the model's in names, shapes, or integers against floating point.

    Modules that load their own state (a queue) are left out: they accept other forms of it and check these themselves.
    """
    own = tuple(
        f"{name}."
        for name, module in model.named_modules()
        if type(module)._load_from_state_dict is not nn.Module._load_from_state_dict
    )
    wanted = {name: tensor for name, tensor in distinct(model).items() if not name.startswith(own)}
    found = {name: tensor for name, tensor in tensors.items() if not name.startswith(own)}
    odd = sorted(wanted.keys() ^ found.keys())
    if odd:
        what = "no tensor" if odd[0] in wanted else "a tensor too many:"
        raise ValueError(f"{path}: does not belong to config.json and items.json ({what} {odd[0]})")
    for name, tensor in wanted.items():
        other = found[name]
        alike = other.dtype == tensor.dtype or (other.is_floating_point() and tensor.is_floating_point())
        if (other.shape != tensor.shape or not alike) and not name.endswith("_extra_state"):
            shapes = f"expected {tensor.dtype} {list(tensor.shape)}, got {other.dtype} {list(other.shape)}"
            raise ValueError(f"{path}: does not belong to config.json and items.json ({name}: {shapes})")


def read_config(folder: str | Path) -> dict[str, Any]:
    """config.json of a run folder in the form of the present version; errors where the folder holds no run of fastcl.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        several = ", ".join(run.name for run in runs_in(Path(folder)))
        raise FileNotFoundError(
            f"{folder}: holds several runs, expected one of {several}"
            if several
            else f"{folder}: not a run folder (no config.json)"
        )
    config = schema.parse(path.read_bytes(), str(path))
    version = _version(config)
    if version is None:
        found = f"a table of format {schema.short(config.get('format'))}" if isinstance(config, dict) else "no table"
        raise ValueError(f"{path}: expected a run of fastcl, got {found}")
    if version > VERSION:
        by = (
            f"fastcl {schema.short((config.get('versions') or {}).get('fastcl'))}"
            if _has_versions(config)
            else "a newer"
        )
        raise ValueError(f"{path}: expected a run of version 1 to {VERSION}, got version {version}, made by {by}")
    while version in UPGRADES:
        config = UPGRADES[version](config)
        version = config["version"]
    _check_config(config, str(path))
    name = config["model"]
    if name not in MODELS:
        known = ", ".join(MODELS)
        hint = "; for a model of your own: `fastcl --use FILE ...`, or `register` it before its run is loaded"
        raise ValueError(f"{path}: expected a model of {known}, got {schema.short(name)}{hint}")
    schema.keys_fit(config["config"], MODELS[name].Config, f"{path}: config")
    return config


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The checked lines of metrics.jsonl; [] where no epoch is finished or `fit` did not train the model."""
    path = folder / "metrics.jsonl"
    if not path.is_file():
        return []
    try:
        text = path.read_text(encoding="utf-8")
    except ValueError as error:
        raise ValueError(f"{path}: damaged ({error})") from error
    return schema.lines_fit([schema.parse(line, str(path)) for line in text.splitlines()], str(path))


def runs_in(folder: Path) -> list[Path]:
    """The runs that `train --seed 1,2,3` made in `folder`; [] where it is a run itself, or no folder of runs."""
    several = sorted(path.parent for path in folder.glob("seed-*/config.json"))
    return [] if (folder / "config.json").exists() else several


def read_tensors(
    path: Path,
    expected: Mapping[str, str],
    cut: Collection[str] = (),
    share: parts.Share = parts.ALL,
    every: bool = False,
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(tensors on the CPU, facts) of a tensor file of a run, read by `parts.read`; ValueError for another file, or for
    other facts than `expected`.
    """
    tensors, facts = parts.read(path, cut, share, every)
    expect(path, facts, expected)
    return tensors, facts


def expect(path: Path, facts: Mapping[str, str], expected: Mapping[str, str]) -> None:
    """ValueError where the facts of the tensor file at `path` tell another kind of file or another model."""
    if facts.get("format") not in ("fastcl-run-1", str(VERSION)):
        known = f"a tensor file of version 1 to {VERSION}"
        raise ValueError(f"{path}: expected {known}, got format {schema.short(facts.get('format'))}")
    wanted = {name: value for name, value in expected.items() if name != "belongs"}
    found = {name: facts.get(name) for name in wanted}
    if found != wanted:
        raise ValueError(f"{path}: expected {_facts(wanted)}, got {_facts(found)}")
    if "belongs" in facts and facts["belongs"] != expected.get("belongs", facts["belongs"]):
        raise ValueError(f"{path}: does not belong to config.json and items.json, one of which was changed")


def expected_of(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    return {"model": config["model"], "belongs": identity(config, read(folder / "items.json"))}


def read(path: Path) -> bytes:
    if not path.is_file():
        raise FileNotFoundError(f"{path.parent}: not a whole run folder (no {path.name})")
    return path.read_bytes()


def check_free(folder: Path, force: bool) -> None:
    """FileExistsError where a run cannot be written to `folder`, or only with `force`. Changes nothing."""
    if (folder.exists() or folder.is_symlink()) and not folder.is_dir():
        raise FileExistsError(f"{folder}: expected a folder for the run, got a file")
    if not folder.exists():
        return
    names = {path.name for path in folder.iterdir() if path.name != lock.NAME and not writing.is_left(path.name)}
    # Files without config.json remain of a run that was killed while it was being written; they may be overwritten.
    left = set() if "config.json" in names else {name for name in names if _is_ours(folder / name)}
    if names - left and not (force or runs_in(folder)):
        how = "--force overwrites the run in it (force=True in Python)"
        raise FileExistsError(f"{folder}: exists and is not empty; {how}")
    check_ours(folder)


def check_ours(folder: Path) -> None:
    """FileExistsError where a run would overwrite a file that no run of fastcl wrote, or would hide runs in `folder`:
    the folders in a run folder are not searched for runs.
    """
    several = ", ".join(run.name for run in runs_in(folder))
    if several:
        raise FileExistsError(f"{folder}: holds the runs {several}; expected another folder, or one of theirs")
    for name in FILES:
        path = folder / name
        if (path.exists() or path.is_symlink()) and not _is_ours(path):
            raise FileExistsError(f"{path}: not a file of a run of fastcl; expected another folder, or remove it")
        if name == "config.json" and path.exists():
            return  # the rest of the run may be damaged


def _is_ours(path: Path) -> bool:
    if not path.is_file():
        return False  # reading a pipe would block
    try:
        if path.name == "config.json":
            return _version(schema.parse(path.read_bytes(), "")) is not None
        if path.name == "items.json":
            return set(schema.parse(path.read_bytes(), "")) - {"users"} == {"ids", "titles", "features"}
        if path.name == "metrics.jsonl":
            return bool(read_metrics(path.parent))
        known = ("fastcl-run-1", str(VERSION))
        known_name = path.name in FILES or parts.is_part(path.name)
        return known_name and tensorfile.read_facts(path).get("format") in known
    except (ValueError, TypeError, OSError):
        return False


def _version(config: Any) -> int | None:
    """The version in the content of a config.json; None where it is not of a run of fastcl."""
    if not isinstance(config, dict):
        return None
    if config.get("format") == "fastcl-run-1":
        return 1
    version = config.get("version")
    return version if config.get("format") == FORMAT and type(version) is int and version >= 1 else None


def _has_versions(config: Mapping[str, Any]) -> bool:
    return isinstance(config.get("versions"), dict) and "fastcl" in config["versions"]


def _check_config(config: Any, where: str) -> None:
    for part in (schema.Config, schema.Recorded):
        schema.fits(config, part, where)


def _facts(facts: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items())
