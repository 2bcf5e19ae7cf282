"""fastcl train: trains a model on the user's own file and writes a run folder, or one for each of several seeds."""

import argparse
import json
import shlex
import sys
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

from fastcl.recsys.cli.common import add_data_options, source_of, whole_numbers
from fastcl.recsys.cli.runs import repeats, suited, tell
from fastcl.recsys.evaluation.measures import WITHOUT_K
from fastcl.recsys.evaluation.ranking import SEEN
from fastcl.recsys.models import MODELS
from fastcl.recsys.models.base import make
from fastcl.recsys.options import parse_settings
from fastcl.recsys.training import checkpoint, lock, processes, trackers, validation, warm
from fastcl.recsys.training.fit import go_on
from fastcl.recsys.training.starting import begin, enough_memory, reserve
from fastcl.recsys.training.state import (
    BLIND,
    METRICS,
    MOST,
    PATIENCE,
    PRECISIONS,
    SCHEDULES,
    WAIT,
    Settings,
    planned,
    validation_metric,
)
from fastcl.recsys.training.threads import add_threads
from fastcl.recsys.training.trackers import TRACKERS


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "train",
        help="train a model on a file of your own",
        epilog="Several processes: torchrun --nproc-per-node=2 -m fastcl.recsys train ...; they share out each batch.",
    )
    option = parser.add_argument
    add_data_options(parser)
    of_models = "the model; fastcl models tells what each is (default: that of --init)"
    option("--model", choices=list(MODELS), help=of_models)
    text = "earlier run whose weights this one begins with, by ids; its model and settings are the defaults"
    option("--init", metavar="RUN", help=text)
    option("--lr", type=float, help="learning rate of the first step (default: the model's)")
    seeds = "seed of weights and training; several (1,2,3) make a run each, RUN/seed-1 and so on (default: %(default)s)"
    option("--seed", default="0", help=seeds)
    settings = "settings of the model, which `fastcl models NAME` lists with their defaults and meanings"
    option("--set", nargs="+", action="extend", default=[], metavar="key=value", help=settings)
    seen = "mask: rank no item of the history; keep: rank them too, for data with repeats (default: as --init, or mask)"
    option("--seen", choices=SEEN, help=seen)
    cases = "validate on a random sample of N cases (default: all, or fewer where that is more than 10^10 scores)"
    option("--valid-cases", type=int, metavar="N", help=cases)
    until = f"until validation stops improving, at most {MOST}; {BLIND} without validation; 1 for a model that counts"
    waits = f"never with --epochs; without, {PATIENCE} and at least {WAIT} batches"
    add_training_options(parser, until, waits, "linear with --epochs, plateau without")
    log = "also send each epoch to this tracker, for which fastcl has an extra of the same name; may be repeated"
    option("--log", choices=list(TRACKERS), action="append", default=[], help=log)
    option("-o", "--out", required=True, metavar="RUN", help="run folder to write")
    option("--force", action="store_true", help="overwrite a run that is in RUN")
    option("--json", action="store_true", help="print the result as JSON, one document a run")
    names = {"how": "--split", "split": "--split", "seed": "--split-seed", "tracker": "--log"}
    parser.set_defaults(run=run, names=names)


def add_training_options(parser: argparse.ArgumentParser, epochs: str, patience: str, schedule: str) -> None:
    """Adds the options of a training that `tune` has too. epochs, patience, schedule: what these are by default."""
    option = parser.add_argument
    option("--epochs", type=int, help=f"passes over the train rows, at most (default: {epochs})")
    option("--patience", type=int, metavar="N", help=f"stop after N epochs without a better one (default: {patience})")
    metric = "validation metric that decides which epoch is the best, such as recall@20 or auc (default: %(default)s)"
    option("--metric", default="ndcg@10", help=metric)
    falls = "falls to 0 over all epochs, to a tenth after half of --patience epochs without a better one, or not at all"
    rates = f"learning rate: {falls} (default: {schedule})"
    option("--schedule", choices=list(SCHEDULES), help=rates)
    option("--precision", choices=PRECISIONS, default="float32", help="type of the loss (default: %(default)s)")
    option("--accumulate", type=int, default=1, metavar="N", help="batches in an optimiser step (default: %(default)s)")
    option("--device", choices=["cpu", "cuda"], default="cpu", help="where to train (default: %(default)s)")
    add_threads(parser)
    saved = "seconds between two checkpoints within an epoch (default: %(default)g)"
    option("--save-every", type=float, default=600.0, metavar="SECONDS", help=saved)


def run(args: argparse.Namespace) -> None:
    earlier = None if args.init is None else _earlier(args.init)
    if args.model is None and earlier is None:
        raise ValueError(f"--model: expected one of {', '.join(MODELS)}, or --init RUN, got neither")
    args.model = args.model or (earlier or {})["model"]
    args.seen = args.seen or (earlier or {}).get("seen", "mask")
    model_class = MODELS[args.model]
    chosen = parse_settings(model_class.Config, args.set)
    if args.lr is not None and "lr" in chosen:
        raise ValueError(f"--lr: expected none beside --set lr, got {args.lr:g}")
    options = _settings_of(earlier, args.model) | chosen
    seeds = whole_numbers("--seed", args.seed, low=0)
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"--seed: expected different seeds, got {args.seed}")
    names = ("seen", "metric", "valid_cases", "precision", "accumulate", "save_every", "device", "threads")
    checkpoint.require_safetensors()
    trackers.all_of(args.log, Path(args.out))  # for the error of a package that is missing, before anything is read
    source = source_of(args)
    out = Path(args.out)
    folders = [out] if len(seeds) == 1 else [out / f"seed-{seed}" for seed in seeds]
    # The first of several runs is written before the weights are read for the second.
    if args.init is not None and len(folders) > 1 and Path(args.init).resolve() in [each.resolve() for each in folders]:
        raise ValueError(f"--init: expected a run that is none of those of --seed {args.seed} in -o, got {args.init}")
    with processes.processes(args.device) as device, ExitStack() as stack:
        with processes.together():
            plan = {name: getattr(args, name) for name in names} | {"metric": validation_metric(args.metric)}

            def settings(seed: int, **facts: Any) -> Settings:
                lr = model_class.learning_rate(model_class.Config(**options), args.lr)
                asked = planned(args.epochs, args.patience, args.schedule, learns=model_class.learns, **facts)
                return Settings(lr=lr, seed=seed, **plan, **asked)

            for seed in seeds:
                settings(seed)  # for errors, before anything is read
            _check_free(out, folders, args.force)
            split = source.split()
            for seed in seeds:
                validation.with_sample(settings(seed), split)  # for errors, before anything is written
            record = {**source.to_json(), "command": shlex.join(sys.argv)}
            record |= {"log": args.log} if args.log else {}
        options = suited(model_class, split, {*options, *([] if args.lr is None else ["lr"])}) | options
        if processes.leads():
            print(f"{split.data_report}\n{split.report}", file=sys.stderr)
            tell([note for note in [repeats(split) if args.seen == "mask" else None] if note])
        # All run folders are written before any training, so that an interrupted command can be resumed as a whole.
        # The folder of several runs is locked meanwhile, so that no other process makes it a run itself.
        with processes.together(), lock.held(out) if len(seeds) > 1 else nullcontext():
            _check_free(out, folders, args.force)
            for folder in folders:
                reserve(stack, folder, args.force)
        for folder, seed in zip(folders, seeds, strict=True):
            with processes.together(), enough_memory():
                model = make(model_class, split, seed=seed, **options).to(device)
                each = settings(seed, validates=len(split.valid) > 0, batches=model.usual_steps(split.train))
                each = validation.with_sample(each, split)
                origin = {} if args.init is None else {"init": warm.start(model, args.init)}
                if origin and processes.leads():
                    tell([f"{folder} {warm.told(origin['init'])}"])
            begin(model, split, each, folder, args.force, record | origin)
        for folder in folders:
            print_result(folder, go_on(folder, split, on_epoch=trackers.all_of(args.log, folder)), args.json)


def _settings_of(config: dict[str, Any] | None, model: str) -> dict[str, Any]:
    """The settings in an earlier run's config.json; none where it is of another model, which `warm.start` refuses."""
    if config is None or config["model"] != model:
        return {}
    return checkpoint.settings_in(config)


def _check_free(out: Path, folders: list[Path], force: bool) -> None:
    """OSError unless the run folders may be written. It is called before the data is read, which may take long, and
    again before anything is written.
    """
    if not processes.leads():
        return
    if folders != [out] and (out / "config.json").exists():
        raise FileExistsError(f"{out}: is a run itself; expected a folder for several of them")
    for folder in folders:
        checkpoint.check_free(folder, force)
        if folder.is_dir():
            with lock.held(folder):
                pass


def _earlier(folder: str) -> dict[str, Any]:
    try:
        return checkpoint.read_config(folder)
    except (FileNotFoundError, ValueError) as error:
        raise ValueError(f"--init: {error}") from error


def print_result(folder: Path, history: list[dict[str, Any]], as_json: bool) -> None:
    """Prints a finished run on stdout, as one line of text or of JSON."""
    if not processes.leads():
        return
    best = [line for line in history if line["best"]][-1]
    if as_json:
        print(json.dumps({"run": str(folder), "epochs": len(history), "best": best}))
    elif METRICS[0] not in best:
        count = f"{len(history)} epochs" if len(history) > 1 else "1 epoch"
        print(f"{folder}: trained without validation, {count}; the last one counts")
    else:
        measured = sorted((name for name in best if "@" in name or name in WITHOUT_K), key=lambda n: n != "recall@10")
        figures = ", ".join(f"{name} {best[name]:.4f}" for name in measured)
        cases = checkpoint.read_config(folder).get("valid_cases")
        figures += f" ({cases:,} sampled cases)" if cases else ""
        which = f"best of {len(history)} epochs is {best['epoch']:.0f}" if len(history) > 1 else "1 epoch"
        print(f"{folder}: {which}, validation {figures}")
