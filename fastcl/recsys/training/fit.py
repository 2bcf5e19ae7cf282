"""Trains a model (`fit`) or goes on with an interrupted run (`resume`): it validates after every epoch and keeps the
weights of the best one.

loop.py holds the steps of an epoch, state.py what a run is and how it is saved. Only `resume` reads data files, and
only where it is given no split.
"""

import errno
import json
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor

from fastcl.recsys import schema, writing
from fastcl.recsys.data import Split, fingerprints
from fastcl.recsys.data.source import Source
from fastcl.recsys.models import Model
from fastcl.recsys.options import at_least
from fastcl.recsys.training import checkpoint, hooks, lock, loop, parts, processes, state, validation, warm
from fastcl.recsys.training.hooks import OnEpoch
from fastcl.recsys.training.loop import Run
from fastcl.recsys.training.modelstate import distinct, with_aliases
from fastcl.recsys.training.starting import (
    alike_facts,
    begin,
    check_unchanged,
    enough_memory,
    extend,
    own_random_state,
    reserve,
)
from fastcl.recsys.training.state import Settings


def fit(
    model: Model,
    split: Split,
    *,
    epochs: int | None = None,
    lr: float | None = None,
    out: str | Path | None = None,
    seed: int = 0,
    seen: str = "mask",
    metric: str = "ndcg@10",
    patience: int | None = None,
    valid_cases: int | None = None,
    schedule: str | None = None,
    precision: str = "float32",
    accumulate: int = 1,
    save_every: float = 600.0,
    force: bool = False,
    init: str | Path | None = None,
    record: Mapping[str, Any] | None = None,
    on_epoch: OnEpoch | None = None,
    progress: bool = True,
) -> list[dict[str, Any]]:
    """Trains `model` on split.train and leaves it in eval mode, with the weights of its best epoch on split.valid, or
    of its last epoch where split.valid has no case (the split "none").

    The same seed, machine and number of threads give the same weights bit for bit, whether the training is interrupted
    (see `resume`) or not. The caller's random state is neither read nor changed. With torch.distributed initialised,
    every process calls `fit` with the same arguments; each batch is divided among the processes, and only the first
    process writes and reports.

    Args:
        epochs: passes over the train clicks, >= 1; None: until validation stops improving, at most 200, or 20 for a
            split without validation cases.
        lr: learning rate of the first step; None: that of the model's config.
        out: run folder, written before the first step; None: nothing is written. A folder that is not empty is refused
            unless `force`.
        seed: seed of batch order, dropout and negatives, >= 0; the initial weights come from the model's own seed.
        seen: "mask" or "keep", how validation treats items of the history.
        metric: the metric on split.valid, with all items ranked, that decides which epoch is the best: "recall", "hr",
            "ndcg", "mrr" or "map" at any cut-off ("recall@20"; default cut-off 10), or "auc".
        patience: stop after so many epochs without a new best, >= 1; None: never with `epochs`; without, after
            10 and at least 200 batches.
        valid_cases: how many cases of split.valid are measured after each epoch, >= 1: a random sample, the same for
            every `seed`. None: all of them, up to 10^10 scores (cases times items), which take about five minutes of
            one core; where there are more, as many cases as make so many scores, and at least 1,000.
        schedule: "linear": the learning rate falls to 0 over the steps of all `epochs`. "plateau": it falls to a tenth
            each time half of `patience` epochs, rounded up, have passed without a new best; `patience` then has its
            default with `epochs` too. "constant": it stays. None: linear with `epochs` and for a split without
            validation cases, plateau otherwise.
        precision: "float32", or "bfloat16": the loss runs under torch.autocast; weights, optimiser and validation stay
            float32.
        accumulate: batches per step, >= 1. For a loss over targets (SASRec) a step equals that of one batch
            `accumulate` times as large. A loss with in-batch negatives (CLRec) is averaged over the batches, each with
            its own negatives, so that only `batch` changes the number of negatives.
        save_every: seconds between two checkpoints within an epoch, >= 0.
        init: run folder of an earlier training of the same kind of model, whose weights this one begins with: rows of
            items, users and feature values by their names, all others as they are. New items begin with the mean of the
            rows of earlier items that share a feature value, or as they were drawn. Queues and the optimiser's moments
            begin empty. config.json records the run and the SHA-256 of its weights.
        record: further fields of config.json. Where it has neither "data" nor "split", these are recorded of a split
            whose log `Interactions.read` made of files, so that commands on the run can read them again.
        on_epoch: a function that gets an `Epoch` after each epoch, when the run folder holds it. The model has the
            weights of that epoch then. Where the function returns True, the training ends as after a last epoch, and
            `resume` can go on from there. An error of the function is a RuntimeWarning, and the training goes on. Of
            several processes only the first one calls it. `log_to` makes such functions for three trackers.
        progress: whether to report on stderr, with a bar on a terminal and a line per epoch elsewhere.

    Returns: one dict per epoch, as in metrics.jsonl: epoch, loss (mean over the steps), loss_parts (each term, where
        the model's loss has several), recall@10, ndcg@10 and `metric` (of validation, if any), seconds (of training
        alone), best (whether the epoch is the best so far).

    Raises what `load` raises for `init`, and ValueError where that run is of another model, differs in a setting that
    gives weights their meaning (`fastcl.recsys.models.carrying.MAY_DIFFER` lists the others) or in the features;
    FloatingPointError when the loss stops being finite; ValueError for a bad option, a split with other items
    than the model's, or one in which no user has two train clicks, so that there is no target to train on.

    >>> from fastcl.recsys import SASRec, bundled
    >>> split = bundled("purchases").split()
    >>> fit(SASRec(split.items, seed=0), split, out="runs/first")  # doctest: +SKIP
    """
    hooks.check(on_epoch)
    with ExitStack() as stack, enough_memory():
        with processes.together():
            settings = Settings(
                lr=model.learning_rate(model.config, lr),
                seed=seed,
                seen=seen,
                metric=state.validation_metric(metric),
                valid_cases=valid_cases,
                **state.planned(
                    epochs,
                    patience,
                    schedule,
                    validates=len(split.valid) > 0,
                    learns=model.learns,
                    batches=model.usual_steps(split.train),
                ),
                precision=precision,
                accumulate=accumulate,
                save_every=save_every,
                device=model.device.type,
            )
            loop.check(model, split, settings)
            if split.origin and not {"data", "split"} & {*(record or {})}:
                record = {**Source(split.origin["data"], split.origin["split"]).to_json(), **(record or {})}
            if init is not None:
                record = {**(record or {}), "init": warm.start(model, init)}
                if progress and processes.leads():
                    print(f"{model.name} {warm.told(record['init'])}", file=sys.stderr)
            settings = validation.with_sample(settings, split)
            alike = alike_facts(model, split, settings)
            if out is not None:
                reserve(stack, Path(out), force)
        processes.agree({**alike, "out": "a folder" if out is not None else "none"})
        processes.same_start(model)
        run = loop.new_run(model, split, settings)
        if out is not None:
            run.folder, run.facts = Path(out), begin(model, split, settings, Path(out), force, record)
        return _train(run, progress, on_epoch)


def resume(
    folder: str | Path,
    split: Split | None = None,
    progress: bool = True,
    *,
    data: str | Path | None = None,
    epochs: int | None = None,
    on_epoch: OnEpoch | None = None,
) -> list[dict[str, Any]]:
    """Goes on with the run in `folder` from its last checkpoint; `load(folder)` then gives its best model.

    On the same machine with the same versions and as many processes the result equals that of an uninterrupted run bit
    for bit; the number of threads is taken from the run. Another number of processes may go on: sums are then rounded
    in another order, and each process draws its own dropout. A complete run is left as it is; its folder need not be
    writable.

    Args:
        split: the data of the run; None: read from where config.json says.
        progress: whether to report on stderr.
        data: without `split`, the path of the data; None: the path in config.json.
        epochs: extends the run, complete or not, to `epochs` in all; None: the number it was begun with. With the
            schedules "plateau" and "constant" the result equals that of a run begun with `epochs`, bit for bit. With
            "linear" it does not: finished epochs had the learning rates of the shorter run, and later epochs have those
            of the longer run, which begin higher. config.json ("extended") and a note on stderr say so. A run that
            `patience` has ended stays ended, as it would with more epochs from the start.
        on_epoch: as in `fit`; called after the epochs that this call trains.

    Returns: all lines of metrics.jsonl, as `fit` does. Raises FileNotFoundError where there is no run or no data;
        ValueError where a file of the run is damaged or was changed, the data differs from the run's, the processes
        that began it have queues of their own and are not as many as these, or `epochs` is less than the run has;
        OSError where another process is training in the folder.

    >>> resume("runs/first")  # doctest: +SKIP
    """
    hooks.check(on_epoch)
    folder = Path(folder)
    with processes.together():
        threads, device = (getattr(Settings.recorded(checkpoint.read_config(folder)), n) for n in ("threads", "device"))
    with processes.threads(threads), processes.processes(device), ExitStack() as stack:
        unwritable: OSError | None = None
        with processes.together():
            checkpoint.read_config(folder)  # first, so that no lock is put into a folder that is no run
            try:
                stack.enter_context(lock.held(folder))
                writing.sweep(folder)
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                    raise
                unwritable = error
        return go_on(folder, split, progress, data, unwritable, epochs, on_epoch)


def go_on(
    folder: Path,
    split: Split | None,
    progress: bool = True,
    data: str | Path | None = None,
    unwritable: OSError | None = None,
    epochs: int | None = None,
    on_epoch: OnEpoch | None = None,
) -> list[dict[str, Any]]:
    """What `resume` does once the folder is locked. unwritable: the error of a folder that cannot be written, raised
    unless the run is complete.
    """
    with processes.together(), enough_memory():
        config = checkpoint.read_config(folder)
        settings = Settings.recorded(config)
        if epochs is not None:
            at_least(settings.epochs, "epochs", epochs)
        if split is None:
            split = Source.of_run(folder, config, data).split()
        if config.get("data_sha256") != fingerprints.fingerprint(split):
            raise ValueError(f"data: expected the clicks that {folder} was begun with, got others; --data names a file")
        device = processes.device_of(settings.device)
        run = loop.new_run(checkpoint.build(folder).to(device), split, settings, folder)
        belongs = checkpoint.identity_of(folder)
        run.facts = state.facts_of(settings, config["data_sha256"], belongs)
        expected = {"belongs": belongs}
        check_unchanged(folder, run.facts, epochs)
    with own_random_state(device), enough_memory():
        with processes.together():
            run.progress = state.restore(folder, run.model, run.optimizer, expected)
            needed = ("seconds", *(settings.metrics if len(split.valid) else ()))
            schema.lines_fit(run.progress.history, f"{folder / state.LAST}: history", needed)
            parts = len(run.model.part_names)
            if len(run.progress.total) not in (0, parts) or run.progress.step >= max(run.steps, 1):
                raise ValueError(f"{folder / state.LAST}: expected a step of an epoch of {run.steps}, and {parts} sums")
            longer = epochs is not None and epochs != settings.epochs
            if longer and unwritable is not None:
                raise unwritable
        if epochs is not None and longer:
            config = extend(run, config, epochs)
        complete = run.progress.done(run.settings) and _published(run)
        if progress and processes.leads():
            _announce(folder, config, run)
        if processes.decided(complete):
            return run.progress.history
        with processes.together():
            if unwritable is not None:
                raise unwritable
        return _train(run, progress, on_epoch)


def _train(run: Run, progress: bool, on_epoch: OnEpoch | None) -> list[dict[str, Any]]:
    model, settings = run.model, run.settings
    report = progress and processes.leads()
    model.share = (processes.rank(), processes.count())
    run.optimizer.share_out()
    _bring_up_to_date(run)
    best: dict[str, Tensor] = {}
    of_sample = validation.note(settings, len(run.split.valid))
    if report and of_sample:
        print(f"{model.name}: {of_sample}", file=sys.stderr, flush=True)
    with own_random_state(model.device):
        while not run.progress.done(settings):
            epoch = len(run.progress.history) + 1
            label = f"{model.name} {epoch}/{settings.epochs}" if report else ""
            parts = loop.epoch(run, lambda: _save(run), label)
            scores = validation.validate(run)
            found = run.progress.best
            line: dict[str, Any] = {
                "epoch": epoch,
                "loss": sum(parts.values()),
                **({"loss_parts": parts} if len(parts) > 1 else {}),
                **scores,
                "seconds": run.progress.seconds,
                "best": found is None or not scores or scores[settings.metric] > found[settings.metric],
            }
            run.progress = state.Progress([*run.progress.history, line])
            if line["best"] and run.folder is None:
                best = {name: tensor.clone() for name, tensor in distinct(model).items()}
            _save(run)
            if report:
                _say(model.name, settings, line)
            if on_epoch is not None:
                with run.optimizer.whole():  # the function may score with the model
                    if hooks.stops(on_epoch, run.progress, settings):
                        break
    model.load_state_dict(with_aliases(model, best if run.folder is None else _best_weights(run)))
    run.optimizer.join()
    model.eval()
    return run.progress.history


def _bring_up_to_date(run: Run) -> None:
    """Brings the other files of a run that goes on up to last.safetensors, which is written first."""
    if run.folder is None or run.progress.best is None:
        return
    if run.progress.step or not run.progress.history[-1]["best"]:
        _best_weights(run)  # raises where they are not those of the best epoch
    _publish(run)


def _best_weights(run: Run) -> dict[str, Tensor]:
    """The best epoch's weights in the run folder, of tables this process's rows. ValueError in all processes where
    model.safetensors holds others.
    """
    assert run.folder is not None, "only a run with a folder has its best weights there"
    path = run.folder / "model.safetensors"
    wanted = {"model": run.model.name, "belongs": run.facts["belongs"]}
    with processes.together():
        tensors, facts = checkpoint.read_tensors(path, wanted, run.optimizer.cut_weights, parts.own_share())
        checkpoint.check_tensors(run.model, tensors, path)
        if facts.get("epoch", best_epoch(run)) != best_epoch(run):
            raise ValueError(f"{path}: expected the weights of epoch {best_epoch(run)}, got those of {facts['epoch']}")
    return tensors


def best_epoch(run: Run) -> str:
    return str(run.progress.best["epoch"]) if run.progress.best else ""


def _save(run: Run) -> None:
    if run.folder is not None:
        state.save(run.folder, run.model, run.optimizer, run.progress, run.facts)
        _publish(run)


def _metrics(run: Run) -> str:
    return "".join(json.dumps(line) + "\n" for line in run.progress.history)


def _publish(run: Run) -> None:
    """Writes model.safetensors and metrics.jsonl as of the last finished epoch."""
    history = run.progress.history
    if run.folder is None or not history:
        return
    if run.progress.step == 0 and history[-1]["best"]:
        belongs, cut = run.facts["belongs"], run.optimizer.cut_weights
        checkpoint.save_weights(run.model, run.folder, belongs, history[-1]["epoch"], cut)
    with processes.together():
        if processes.leads():
            writing.write_text(run.folder / "metrics.jsonl", _metrics(run))


def _published(run: Run) -> bool:
    """Whether model.safetensors and metrics.jsonl are as of the last finished epoch, in all processes."""
    assert run.folder is not None, "a run that goes on has a folder"
    try:
        _best_weights(run)
        with processes.together():
            whole = checkpoint.read(run.folder / "metrics.jsonl") == _metrics(run).encode()
    except (ValueError, OSError):
        return False
    return whole


def _announce(folder: Path, config: Mapping[str, Any], run: Run) -> None:
    now = checkpoint.versions()
    for name, version in config.get("versions", {}).items():
        if now.get(name) != version:
            text = f"begun with {name} {version}, goes on with {now.get(name)}: the result may differ in its last bits"
            print(f"{folder}: {text}", file=sys.stderr)
    if not run.progress.history and not run.progress.step:
        return
    begun, count = run.settings.processes, processes.count()
    if begun != count:
        text = f"begun with {begun} processes, goes on with {count}"
        why = "sums are rounded in another order, and each process draws its own dropout"
        print(f"{folder}: {text}: the result differs, for {why}", file=sys.stderr)
    finished = f"{len(run.progress.history)} of {run.settings.epochs} epochs are finished"
    print(f"{folder}: {finished}{', the run is complete' if run.progress.done(run.settings) else ''}", file=sys.stderr)


def _say(name: str, settings: Settings, line: Mapping[str, Any]) -> None:
    found = ", ".join(f"{metric} {line[metric]:.4f}" for metric in reversed(settings.metrics) if metric in line)
    shown = f"validation {found}" if found else "no validation"
    best = "  best so far" if found and line["best"] else ""
    epoch = f"{name} epoch {line['epoch']}/{settings.epochs}"
    text = f"{epoch}: loss {line['loss']:.4f}, {shown}, {line['seconds']:.1f} s{best}"
    print(text, file=sys.stderr, flush=True)
