"""The command line: fastcl demo | train | evaluate | recommend | info. Parsing, printing and exit codes only.

Options are checked before data is read; a fault of the user's is one line on stderr and exit code 2, never a traceback.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import fastcl
from fastcl.recsys import checkpoint, report
from fastcl.recsys.data import Interactions, bundled
from fastcl.recsys.demo import PLANS
from fastcl.recsys.demo import run as run_demo
from fastcl.recsys.metrics import SEEN
from fastcl.recsys.models import MODELS
from fastcl.recsys.options import at_least, parse_settings
from fastcl.recsys.recommend import recommend
from fastcl.recsys.train import fit, new_folder

BUNDLED = "bundled:"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns 0, or 2 where the user's input is at fault."""
    args = _parser().parse_args(argv)
    try:
        args.run(args)
    except (ValueError, OSError, ImportError, FloatingPointError) as error:
        print(f"fastcl {args.command}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="fastcl", description="Fused contrastive losses, and recommenders trained with them.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    demo = commands.add_parser("demo", help="train both models on a bundled data set, about two minutes")
    add = demo.add_argument
    add("--data", choices=list(PLANS), default="movies")
    add("--seed", type=int, default=0)
    add("-o", "--out", default="runs/demo", help="an earlier demo in it is overwritten (default: %(default)s)")
    demo.set_defaults(run=_demo)

    train = commands.add_parser("train", help="train a model on a file of your own")
    add = train.add_argument
    add("file", help="table (.csv, .tsv) or sequences (.txt), also .gz and .xz; or bundled:movies, bundled:purchases")
    add("--model", choices=list(MODELS), required=True)
    add("--epochs", type=int, default=20, help="(default: %(default)s)")
    add("--seed", type=int, default=0)
    fields = "; ".join(f"{name}: {', '.join(m.Config.__dataclass_fields__)}" for name, m in MODELS.items())
    add("--set", nargs="+", action="extend", default=[], metavar="key=value", help=f"model settings ({fields})")
    for column in ("user", "item", "time"):
        more = '; "" where the rows are in time order' if column == "time" else ""
        add(f"--{column}", default=column, metavar="COLUMN", help=f"its column (default: {column}{more})")
    add("--format", choices=["csv", "tsv", "sequence"], help="where the file's name does not tell")
    add("--seen", choices=SEEN, default="mask", help="never recommend items of the history, or keep them (repeats)")
    add("-o", "--out", required=True, metavar="RUN", help="run folder")
    add("--force", action="store_true", help="overwrite the run in RUN")
    train.set_defaults(run=_train)

    evaluate = commands.add_parser("evaluate", help="test metrics of a run beside the floors")
    add = evaluate.add_argument
    add("folder", metavar="RUN")
    add("--data", metavar="FILE", help="where the data is now (default: where it was in training)")
    add("--seen", choices=SEEN, help="(default: as in training)")
    add("--k", default="10", help="cut-offs, separated by commas (default: %(default)s)")
    evaluate.set_defaults(run=_evaluate)

    advise = commands.add_parser("recommend", help="the best next items for a history")
    add = advise.add_argument
    add("folder", metavar="RUN")
    add("--history", required=True, help="item ids, oldest first, separated by commas")
    add("-k", type=int, default=10, help="(default: %(default)s)")
    add("--seen", choices=SEEN, help="(default: as in training)")
    advise.set_defaults(run=_recommend)

    info = commands.add_parser("info", help="version, kernels and threads of this installation")
    info.set_defaults(run=lambda args: fastcl.show_config())
    return parser


def _demo(args: argparse.Namespace) -> None:
    print(run_demo(args.data, args.out, args.seed))


def _train(args: argparse.Namespace) -> None:
    model_class = MODELS[args.model]
    options = parse_settings(model_class.Config, args.set)
    model_class.Config(**options)
    at_least(1, "--epochs", args.epochs)
    at_least(0, "--seed", args.seed)
    new_folder(args.out, args.force)
    checkpoint.require_safetensors()
    path = args.file if args.file.startswith(BUNDLED) else str(Path(args.file).resolve())
    data = {"path": path, "user": args.user, "item": args.item, "time": args.time, "format": args.format}
    log = _read(data)
    split = log.split()
    if "time_cuts" in model_class.Config.__dataclass_fields__ and log.log.time is None:
        options.setdefault("time_cuts", ())
    model = model_class(split.items, seed=args.seed, **options)
    clicks = f"{len(split.users):,} users, {len(split.items):,} items, {len(log.log.item):,} clicks"
    print(f"{args.file}: {clicks}", file=sys.stderr)
    settings = {"out": args.out, "seed": args.seed, "seen": args.seen, "force": args.force, "record": {"data": data}}
    history = fit(model, split, epochs=args.epochs, **settings)
    best = max(history, key=lambda line: line["ndcg@10"])
    figures = f"recall@10 {best['recall@10']:.4f}, ndcg@10 {best['ndcg@10']:.4f}"
    print(f"{args.out}: best of {args.epochs} epochs is {best['epoch']}, validation {figures}")


def _evaluate(args: argparse.Namespace) -> None:
    try:
        k = tuple(int(part) for part in args.k.split(","))
    except ValueError:
        raise ValueError(f"--k: expected whole numbers separated by commas, got {args.k!r}") from None
    for cutoff in k:
        at_least(1, "--k", cutoff)
    config = checkpoint.read_config(args.folder)
    model = checkpoint.load(args.folder)
    data = config.get("data")
    if args.data is None and data is None:
        raise ValueError(f"{args.folder}: its config.json names no data; expected --data FILE")
    split = _read({**(data or {}), **({"path": args.data} if args.data else {})}).split()
    if split.items.ids != model.items.ids:
        raise ValueError(f"data: expected the {len(model.items):,} items of the run, got {len(split.items):,} others")
    seen = args.seen or config.get("seen", "mask")
    scorers = {**report.floors(split, seen), model.name: model}
    print(report.result_table({name: report.on_test(scorer, split, seen, k) for name, scorer in scorers.items()}, k))


def _recommend(args: argparse.Namespace) -> None:
    at_least(1, "-k", args.k)
    model = checkpoint.load(args.folder)
    history = [part.strip() for part in args.history.split(",") if part.strip()]
    unknown = [item for item, number in zip(history, model.items.encode(history), strict=True) if number == 0]
    seen = args.seen or checkpoint.read_config(args.folder).get("seen", "mask")
    (best,) = recommend(model, [history], args.k, seen)
    if unknown:
        print(f"skipped {len(unknown)} of {len(history)} unknown: {', '.join(unknown)}", file=sys.stderr)
    for item, score in best:
        title = model.items.label(int(model.items.encode([item])[0]))
        print(f"{score:9.4f}  {item}" + (f"  {title}" if title != item else ""))


def _read(data: dict[str, Any]) -> Interactions:
    path = data["path"]
    if path.startswith(BUNDLED):
        return bundled(path.removeprefix(BUNDLED))
    options = {name: data[name] for name in ("user", "item", "time", "format") if name in data}
    return Interactions.read(path, **options)


if __name__ == "__main__":
    sys.exit(main())
