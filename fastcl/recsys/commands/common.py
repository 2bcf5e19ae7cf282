"""What several commands share: the options that say how data is read and split, the data and split that config.json
describes, and lists of numbers among the options."""

import argparse
import os
import stat
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from fastcl.recsys import schema
from fastcl.recsys.data import Interactions, Split, bundled
from fastcl.recsys.formats import FORMATS, Options, named_format
from fastcl.recsys.interactions import OF_ITEMS
from fastcl.recsys.merging import merge
from fastcl.recsys.options import at_least
from fastcl.recsys.splits import HOW, TIES

BUNDLED = "bundled:"
PIPE = "pipe:"  # in front of a path that was read and cannot be read again
_READ = tuple(field.name for field in fields(Options))
_FEATURES = ("item_features", *OF_ITEMS)
_STDIN = "/dev/stdin"
FILES = ("path", "valid", "test", "item_features")


def add_read_options(parser: argparse.ArgumentParser) -> None:
    """The file and how to read it: what `Interactions.read` takes."""
    option = parser.add_argument
    option(
        "file",
        help="table (.csv, .tsv, .inter) or sequences (.txt), also .gz, .xz, .bz2; - is a pipe on stdin; or "
        "bundled:movies, bundled:purchases",
    )
    for column in ("user", "item", "time"):
        more = '; "" where the rows are in time order' if column == "time" else ""
        option(f"--{column}", default=column, metavar="COLUMN", help=f"its column (default: {column}{more})")
    option("--format", choices=FORMATS, help="where the file's name does not tell")
    option("--delimiter", metavar="TEXT", type=_delimiter, help="between fields: '::', '|', '\\t', ' ' (any spaces)")
    option("--columns", metavar="NAMES", type=_words, help="of a file without a line of names: user,item,_,time")
    option("--encoding", default="utf-8", help="of the file, such as latin-1 (default: %(default)s)")
    option("--quote", default='"', metavar="CHAR", help='around fields; "" where quotes mean nothing (default: ")')
    option("--time-format", metavar="FORMAT", help="of dates that are not ISO, as of strptime: '%%d.%%m.%%Y %%H:%%M'")
    option("--missing", metavar="WORDS", type=_words, help='that are no ids: NA,0; or "" (default: NA, null and more)')
    option("--on-error", choices=("raise", "skip"), default="raise", help="refuse a bad row, or drop and count it")
    option("--repeats", choices=("keep", "first"), default="keep", help="of an item of a user: all, or the first row")
    option("--item-features", metavar="FILE", help="table with one row an item: its other columns become features")
    option("--feature-columns", nargs="+", metavar="COLUMN", help="which of them (default: all)")
    option("--separator", default="|", metavar="CHAR", help="between several values of a feature (default: |)")
    option("--title", metavar="COLUMN", help="column of the item features that holds titles")
    option("--item-format", choices=FORMATS, help="of the item features, where their file's name does not tell")
    option("--item-delimiter", metavar="TEXT", type=_delimiter, help="as --delimiter")
    option("--item-columns", metavar="NAMES", type=_words, help="as --columns")
    option("--item-encoding", metavar="NAME", help="(default: as --encoding)")


def _words(text: str) -> list[str]:
    return text.split(",") if text else []


def _delimiter(text: str) -> str:
    return text.replace("\\t", "\t")


def add_data_options(parser: argparse.ArgumentParser) -> None:
    """The file, how to read it, and how to split it."""
    add_read_options(parser)
    option = parser.add_argument
    option("--split", choices=tuple(HOW), default="last-one", help="hold out each user's last, all from --at, or none")
    option("--at", metavar="TIME", help="where --split time cuts: a number in the unit of the times, or 2017-10-01")
    option("--ties", choices=TIES, default="input", help="rows at equal times in the file's order, or a random one")
    option("--split-seed", type=int, default=0, help="of random ties (default: %(default)s)")
    option("--valid", metavar="FILE", help="with --test, files of your own split beside the train file")
    option("--test", metavar="FILE", help="with --valid")


def data_of(args: argparse.Namespace) -> dict[str, Any]:
    """config.json's "data" of the options, with absolute paths."""
    if args.file.startswith(BUNDLED):
        defaults = {field.name: field.default for field in fields(Options)}
        for name, default in {**defaults, **OF_ITEMS, "item_features": None, "valid": None, "test": None}.items():
            if getattr(args, name, default) != default:
                raise ValueError(f"--{name.replace('_', '-')}: expected none with {args.file}, which is read as it is")
        return {"path": args.file}
    data = {"path": args.file, **{name: getattr(args, name) for name in (*_READ, *_FEATURES)}}
    data |= {name: getattr(args, name) for name in ("valid", "test") if getattr(args, name, None)}
    # Links are not followed: those of /dev/stdin and /dev/fd lead to pipes, which have no other name.
    paths = {name: _STDIN if data[name] == "-" else data[name] for name in FILES if data.get(name)}
    return data | {name: os.path.abspath(path) for name, path in paths.items()}


def lasting(data: Mapping[str, Any]) -> dict[str, Any]:
    """The same "data" for a config.json: what was a pipe is marked, since it cannot be read again."""
    return {**data, **{name: f"{PIPE}{data[name]}" for name in FILES if data.get(name) and _is_pipe(data[name])}}


def _is_pipe(path: str) -> bool:
    try:
        mode = os.stat(path).st_mode
    except OSError:  # bundled:NAME, or a file that is gone by now
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _refuse_pipes(data: Mapping[str, Any]) -> None:
    for name in FILES:
        path = data.get(name) or ""
        if path.startswith(PIPE):
            what = "data" if name == "path" else name
            hint = "expected a file that holds the same: --data FILE" if name == "path" else "expected a file"
            raise FileNotFoundError(f"{what}: was read from the pipe {path.removeprefix(PIPE)}, which is gone; {hint}")


def split_of(args: argparse.Namespace) -> dict[str, Any]:
    """config.json's "split" of the options."""
    if bool(args.valid) != bool(args.test):
        raise ValueError("--valid, --test: expected both or none, got one")
    if args.valid and (args.split != "last-one" or args.at is not None or args.ties != "input"):
        raise ValueError("--valid, --test: expected no --split, --at or --ties beside files that are split already")
    if args.split_seed != 0 and args.ties != "random":
        raise ValueError(f"--split-seed: expected --ties random with it, got {args.split_seed} and --ties {args.ties}")
    return {"how": args.split, "at": args.at, "ties": args.ties, "seed": args.split_seed}


def read_data(data: dict[str, Any]) -> Interactions:
    """The log that config.json's "data" describes: its path (or bundled:NAME) and how to read it."""
    path = checked_data(data)["path"]
    _refuse_pipes(data)
    if path.startswith(BUNDLED):
        try:
            return bundled(path.removeprefix(BUNDLED))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
    return Interactions.read(path, **_options(data))


def read_clicks(config: Mapping[str, Any], *paths: str) -> Interactions:
    """The logs at `paths` (none: the run's own, with the files that it validates and tests on) as one, read as the
    run's was; without its item features, which may have moved: the model has them.
    """
    whole = checked_data(config["data"]) if config.get("data") else {}
    data = {name: value for name, value in whole.items() if name not in _FEATURES}
    own = [data[name] for name in ("path", "valid", "test") if data.get(name)]
    return merge(*(read_data(at(data, path)) for path in paths or own))


def at(data: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The same "data" with its clicks at another path, whose format is that of the first one where its name, as that of
    a pipe, tells none."""
    told = data.get("format") or data.get("delimiter") or named_format(Path(path))
    alike = {} if told else {"format": named_format(Path(data.get("path", "")))}
    return {**data, "path": path, **alike}


def read_split(config: Mapping[str, Any]) -> Split:
    """The split that config.json describes: its "data", read as recorded and split as its "split" says."""
    if config.get("data") is None:
        raise ValueError("split: expected the data of the run, which its config.json does not name, got None")
    data = checked_data(config["data"])
    _refuse_pipes(data)
    if data.get("valid"):
        return Interactions.presplit(data["path"], data["valid"], data["test"], **_options(data))
    return read_data(data).split(**split_options(config))


def split_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json's "split", with the types that splitting expects; ValueError otherwise."""
    how = {} if config.get("split") is None else config["split"]
    schema.fits(how, dict[str, Any], "config.json: split")
    schema.keys_fit(how, Interactions.split, "config.json: split", skip=("self",))
    return dict(how)


def checked_data(data: Any) -> dict[str, Any]:
    """config.json's "data", with the types that reading expects; ValueError otherwise."""
    where = "config.json: data"
    schema.fits(data, dict[str, Any], where)
    if not data.get("path"):
        raise ValueError(f"{where}: expected a path, got none")
    given = {name: data[name] for name in (*_READ, *OF_ITEMS) if name in data}
    schema.keys_fit(given, Interactions.read, where, skip=("cls", "source"))
    for name in FILES:
        schema.fits(data.get(name), str | None, f"{where}: {name}")
    return {**data, "path": _STDIN if data["path"] == "-" else data["path"]}


def _options(data: dict[str, Any]) -> dict[str, Any]:
    return {name: data[name] for name in (*_READ, *_FEATURES) if name in data}


def cutoffs(option: str, text: str) -> tuple[int, ...]:
    """ "10,50" -> (10, 50)."""
    return whole_numbers(option, text, low=1)


def whole_numbers(option: str, text: str, low: int) -> tuple[int, ...]:
    """ "1,2,3" -> (1, 2, 3), none below `low`."""
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{option}: expected whole numbers separated by commas, got {text!r}") from None
    for number in numbers:
        at_least(low, option, number)
        if number >= 2**63:
            raise ValueError(f"{option}: expected whole numbers of at most 64 bits, got {number}")
    return numbers
