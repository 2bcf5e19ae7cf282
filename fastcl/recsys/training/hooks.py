"""What a training tells a function of the caller after each epoch, and how it takes the answer.

The state of the run is on disk before the function is called, so that nothing it does can lose the run. trackers.py has
such functions for three trackers. Nothing here trains or touches files.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastcl.recsys.training import processes
from fastcl.recsys.training.state import Progress, Settings

# The fields of a line of metrics.jsonl that are no metrics.
_NO_METRICS = ("epoch", "loss", "loss_parts", "seconds", "best")


@dataclass(frozen=True)
class Epoch:
    """A finished epoch, as `fit` and `resume` tell it to `on_epoch`.

    number: 1 for the first epoch of the run. planned: the number of epochs that the run may have. loss: the mean over
    the steps. loss_parts: each term of the loss; empty where it has one. metrics: name -> mean over the validation
    cases; empty without such cases. seconds: time of the training alone, without validation. best: whether the epoch is
    the best so far. last: whether the run is complete after this epoch, by its number of epochs or by its patience.
    """

    number: int
    planned: int
    loss: float
    loss_parts: Mapping[str, float]
    metrics: Mapping[str, float]
    seconds: float
    best: bool
    last: bool


OnEpoch = Callable[[Epoch], Any]


def epoch_of(line: Mapping[str, Any], planned: int, last: bool) -> Epoch:
    """The epoch of a line of metrics.jsonl."""
    metrics = {name: value for name, value in line.items() if name not in _NO_METRICS}
    parts = dict(line.get("loss_parts", {}))
    seconds = line.get("seconds", 0.0)  # which lines of format 1 lack
    return Epoch(line["epoch"], planned, line["loss"], parts, metrics, seconds, line["best"], last)


def check(on_epoch: OnEpoch | None) -> None:
    """TypeError where `on_epoch` cannot be called."""
    if on_epoch is not None and not callable(on_epoch):
        raise TypeError(f"on_epoch: expected a function of an Epoch, got {type(on_epoch).__name__}")


def stops(on_epoch: OnEpoch | None, progress: Progress, settings: Settings) -> bool:
    """Tells the newest epoch to `on_epoch`, in the first process only; returns, in every process, whether it answered
    True. An error of the function, and any answer but True, False and None, is a RuntimeWarning.
    """
    if on_epoch is None:
        return False
    answer = None
    with processes.together():  # for warnings that are errors
        if processes.leads():
            try:
                answer = on_epoch(epoch_of(progress.history[-1], settings.epochs, progress.done(settings)))
                if not isinstance(answer, bool | np.bool_ | None):
                    raise TypeError(f"expected True, False or None from it, got {type(answer).__name__}")
            except Exception as error:
                answer = None
                text = f"{type(error).__name__}: {error}"
                told = f"on_epoch failed after epoch {len(progress.history)}, training goes on: {text}"
                warnings.warn(told, RuntimeWarning, 2)
    return processes.decided(bool(answer))
