"""Trackers of experiments as functions for `on_epoch`: TensorBoard, MLflow and Weights & Biases.

Each sends the lines of metrics.jsonl that it has not sent yet, so that a resumed run goes on in the same log, and an
epoch that a tracker missed is sent with the next one. log.json in the run folder holds what was sent and where. The
packages are imported when they are used. Nothing here trains.
"""

import json
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from fastcl.recsys import schema, writing
from fastcl.recsys.options import one_of
from fastcl.recsys.training import checkpoint
from fastcl.recsys.training.checkpoint import LOG
from fastcl.recsys.training.hooks import Epoch, OnEpoch, epoch_of

Kept = dict[str, Any]
Send = Callable[[Epoch], None]


def log_to(tracker: str, run: str | Path) -> "Log":
    """A function for `on_epoch` that sends each epoch of the run folder `run` to a tracker: the loss and its parts, the
    validation metrics and the seconds, at the epoch's number as the step, and once the content of config.json.

    tracker:
        "tensorboard" writes event files into the run folder: `tensorboard --logdir runs` shows all runs below runs/.
        "mlflow" begins a run in the store and the experiment that MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME
            name (default experiment: fastcl). "@" in a name of a metric becomes "_at_", since MLflow allows no "@".
        "wandb" begins a run of the project that WANDB_PROJECT names (default: fastcl).

    `resume(run, on_epoch=log_to(tracker, run))` goes on in the same log. Raises ValueError for another tracker,
    ImportError where its package is missing.

    >>> from fastcl.recsys import SASRec, bundled, fit
    >>> split = bundled("purchases").split()
    >>> model = SASRec(split.items, seed=0)
    >>> fit(model, split, epochs=9, out="runs/a", on_epoch=log_to("tensorboard", "runs/a"))  # doctest: +SKIP
    """
    one_of(TRACKERS, "tracker", tracker)
    package = TRACKERS[tracker][0]
    try:
        import_module(package)
    except ImportError as error:
        needed = f"tracker: {tracker} needs the package {tracker}: pip install 'fastcl[{tracker}]'"
        raise ImportError(needed) from error
    return Log(tracker, Path(run))


def all_of(trackers: Sequence[str], run: Path) -> OnEpoch | None:
    """One function for `on_epoch` that sends each epoch to every one of `trackers`; None for no tracker."""
    return Logs([log_to(tracker, run) for tracker in dict.fromkeys(trackers)]) if trackers else None


class Logs:
    """What `all_of` returns. An error of one tracker keeps no epoch from the others."""

    def __init__(self, logs: Sequence["Log"]) -> None:
        self._logs = logs

    def __call__(self, epoch: Epoch) -> None:
        errors = []
        for log in self._logs:
            try:
                log(epoch)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]


class Log:
    """What `log_to` returns; called with an `Epoch`."""

    def __init__(self, tracker: str, folder: Path) -> None:
        self._tracker, self._folder = tracker, folder
        self._send: Send | None = None

    def __call__(self, epoch: Epoch) -> None:
        config = checkpoint.read_config(self._folder)
        lines = checkpoint.read_metrics(self._folder)
        logs = _logs(self._folder)
        kept = logs.setdefault(self._tracker, {"sent": 0})
        if not lines[kept["sent"] :]:
            return
        if self._send is None:
            self._send = TRACKERS[self._tracker][1](self._folder, config, kept)
        for line in lines[kept["sent"] :]:
            self._send(epoch_of(line, config["epochs"], epoch.last and line is lines[-1]))
            kept["sent"] = line["epoch"]
            writing.write_text(self._folder / LOG, json.dumps(logs) + "\n")


def _logs(folder: Path) -> dict[str, Kept]:
    path = folder / LOG
    if not path.is_file():
        return {}
    found = schema.parse(path.read_bytes(), str(path))
    schema.fits(found, dict[str, dict[str, int | str]], str(path))
    for name, kept in found.items():
        if type(kept.get("sent")) is not int or kept["sent"] < 0:
            raise ValueError(f"{path}: {name}: expected the number of epochs sent, got {kept.get('sent')!r}")
    return dict(found)


def _values(epoch: Epoch) -> dict[str, float]:
    parts = {f"loss/{name}": value for name, value in epoch.loss_parts.items()}
    metrics = {f"validation/{name}": value for name, value in epoch.metrics.items()}
    return {"loss": epoch.loss, **parts, **metrics, "seconds": epoch.seconds}


def _tensorboard(folder: Path, config: Mapping[str, Any], kept: Kept) -> Send:
    summary = import_module("torch.utils.tensorboard")
    # Where a process was killed between writing an epoch and noting it, the epoch that comes again replaces it.
    writer = summary.SummaryWriter(str(folder), purge_step=kept["sent"] + 1)
    if not kept["sent"]:
        writer.add_text("config.json", "\n".join("    " + line for line in json.dumps(config, indent=1).splitlines()))

    def send(epoch: Epoch) -> None:
        for name, value in _values(epoch).items():
            writer.add_scalar(name, value, epoch.number)
        writer.flush()
        if epoch.last:
            writer.close()

    return send


def _mlflow(folder: Path, config: Mapping[str, Any], kept: Kept) -> Send:
    client = import_module("mlflow").MlflowClient()
    if "run" not in kept:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "fastcl")
        found = client.get_experiment_by_name(name)
        experiment = client.create_experiment(name) if found is None else found.experiment_id
        kept["run"] = client.create_run(experiment, run_name=str(folder)).info.run_id
        for key, value in _flat(config).items():
            client.log_param(kept["run"], key, str(value)[:500])  # the most that every store takes

    def send(epoch: Epoch) -> None:
        for name, value in _values(epoch).items():
            client.log_metric(kept["run"], name.replace("@", "_at_"), value, step=epoch.number)
        if epoch.last:
            client.set_terminated(kept["run"])

    return send


def _wandb(folder: Path, config: Mapping[str, Any], kept: Kept) -> Send:
    wandb = import_module("wandb")
    kept.setdefault("run", secrets.token_hex(4))
    project = os.environ.get("WANDB_PROJECT", "fastcl")
    run = wandb.init(project=project, id=kept["run"], resume="allow", name=str(folder), config=_flat(config))

    def send(epoch: Epoch) -> None:
        run.log(_values(epoch), step=epoch.number)
        if epoch.last:
            run.finish()

    return send


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the model and of the training; the data by its path."""
    known = {"data": config.get("data", {}).get("path", "")} if isinstance(config.get("data"), dict) else {}
    plain = {key: value for key, value in config.items() if isinstance(value, str | int | float)}
    return {**config["config"], **plain, **known}


# name -> the module that it needs and what opens its log: (run folder, config.json, what log.json keeps) -> function.
TRACKERS: dict[str, tuple[str, Callable[[Path, Mapping[str, Any], Kept], Send]]] = {
    "tensorboard": ("torch.utils.tensorboard", _tensorboard),
    "mlflow": ("mlflow", _mlflow),
    "wandb": ("wandb", _wandb),
}
