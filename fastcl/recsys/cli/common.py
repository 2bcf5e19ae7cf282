"""What several commands share: the options that say how data is read and split, the `Source` that they make, and lists
of numbers among the options."""

import argparse
import os
from dataclasses import fields
from typing import Any

from fastcl.recsys.data.interactions import OF_ITEMS
from fastcl.recsys.data.reading.formats import FORMATS, Options
from fastcl.recsys.data.source import BUNDLED, FEATURES, FILES, READ, STDIN, Source
from fastcl.recsys.data.splits import HOW, TARGETS, TIES
from fastcl.recsys.options import at_least


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
    option("--test", metavar="FILE", help="of your own split: file is then what trains")
    option("--valid", metavar="FILE", help="with --test: the file that validates")
    option("--targets", choices=TARGETS, default="first", help="of a user's rows in --test and --valid: one, or all")
    option("--hold-out", type=float, default=0.0, metavar="SHARE", help="of each user's train rows, validates (--test)")


def source_of(args: argparse.Namespace) -> Source:
    """What the options of `add_read_options` or `add_data_options` say, with absolute paths."""
    return Source(_data_of(args), _split_of(args) if hasattr(args, "split") else {})


def _data_of(args: argparse.Namespace) -> dict[str, Any]:
    if args.file.startswith(BUNDLED):
        defaults = {field.name: field.default for field in fields(Options)}
        for name, default in {**defaults, **OF_ITEMS, "item_features": None, "valid": None, "test": None}.items():
            if getattr(args, name, default) != default:
                raise ValueError(f"--{name.replace('_', '-')}: expected none with {args.file}, which is read as it is")
        return {"path": args.file}
    data = {"path": args.file, **{name: getattr(args, name) for name in (*READ, *FEATURES)}}
    if getattr(args, "test", None):
        own = {"test": args.test, "valid": args.valid, "targets": args.targets, "hold_out": args.hold_out}
        data |= {name: value for name, value in own.items() if value not in (None, "first", 0.0)}
    # Links are not followed: those of /dev/stdin and /dev/fd lead to pipes, which have no other name.
    paths = {name: STDIN if data[name] == "-" else data[name] for name in FILES if data.get(name)}
    return data | {name: os.path.abspath(path) for name, path in paths.items()}


def _split_of(args: argparse.Namespace) -> dict[str, Any]:
    presplit = {"--valid": args.valid, "--targets": args.targets != "first", "--hold-out": args.hold_out}
    for name, given in presplit.items():
        if given and not args.test:
            raise ValueError(f"{name}: expected --test FILE with it, got none")
    if args.test and (args.split != "last-one" or args.at is not None or args.ties != "input"):
        raise ValueError("--test: expected no --split, --at or --ties beside files that are split already")
    if args.split_seed != 0 and args.ties != "random" and not args.hold_out:
        raise ValueError(f"--split-seed: expected --ties random or --hold-out with it, got {args.split_seed} alone")
    return {"how": args.split, "at": args.at, "ties": args.ties, "seed": args.split_seed}


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
