"""What several commands share: the options that say how data is read and split, the `Source` that is made of them, and
options that are lists of numbers."""

import argparse
import os
from dataclasses import fields
from typing import Any

from fastcl.recsys.data.interactions import OF_ITEMS
from fastcl.recsys.data.reading.formats import FORMATS, Options
from fastcl.recsys.data.source import BUNDLED, FEATURES, FILES, READ, STDIN, Source
from fastcl.recsys.data.splits import ITEMS, TARGETS, TIES, WAYS
from fastcl.recsys.options import at_least


def add_read_options(parser: argparse.ArgumentParser) -> None:
    """Adds FILE and the options that say how to read it, which are the arguments of `Interactions.read`."""
    option = parser.add_argument
    known = {"user": "userId", "item": "movieId", "time": "timestamp"}
    option(
        "file",
        help="the interactions: a table (.csv, .tsv, .inter) or sequences (.txt), plain or packed (.gz, .xz, .bz2); a "
        ".parquet file or a folder of them; - reads a pipe on stdin; bundled:purchases and bundled:movies name the "
        "bundled data",
    )
    for column in ("user", "item", "time"):
        more = ' ("" if the rows are in time order)' if column == "time" else ""
        text = f"column of the {column}s{more} (default: {column}, or what public data call it: {known[column]}, ...)"
        option(f"--{column}", default=column, metavar="COLUMN", help=text)
    option("--format", choices=FORMATS, help="how the file is written (default: by its name)")
    text = "what stands between two fields: '::', '|', '\\t', or ' ' for any spaces (default: by the format)"
    option("--delimiter", metavar="TEXT", type=_delimiter, help=text)
    text = "column names of a file that has no line of names, _ for one to skip: user,item,_,time"
    option("--columns", metavar="NAMES", type=_words, help=text)
    option("--encoding", default="utf-8", help="text encoding of the file, such as latin-1 (default: %(default)s)")
    text = 'character around fields that hold a delimiter; "" takes quotes as plain text (default: ")'
    option("--quote", default='"', metavar="CHAR", help=text)
    text = "how dates that are not ISO are written, in the letters of strptime: '%%d.%%m.%%Y %%H:%%M'"
    option("--time-format", metavar="FORMAT", help=text)
    text = 'words that stand for a missing id or value: NA,0; "" for none (default: NA, null and the like)'
    option("--missing", metavar="WORDS", type=_words, help=text)
    text = "refuse a file with a bad row, or skip bad rows and count them (default: %(default)s)"
    option("--on-error", choices=("raise", "skip"), default="raise", help=text)
    text = "what to do with further rows of the same user and item: keep all, or the first one (default: %(default)s)"
    option("--repeats", choices=("keep", "first"), default="keep", help=text)
    text = "table with one row for each item, whose other columns become item features"
    option("--item-features", metavar="FILE", help=text)
    text = "columns of the item features to read (default: all)"
    option("--feature-columns", nargs="+", metavar="COLUMN", help=text)
    text = "what stands between several values of a feature (default: |)"
    option("--separator", default="|", metavar="CHAR", help=text)
    option("--title", metavar="COLUMN", help="column of the item features that holds the items' titles")
    option("--item-format", choices=FORMATS, help="how the file of item features is written (default: by its name)")
    text = "what stands between two fields of the item features, as --delimiter"
    option("--item-delimiter", metavar="TEXT", type=_delimiter, help=text)
    text = "column names of item features that have no line of names, as --columns"
    option("--item-columns", metavar="NAMES", type=_words, help=text)
    option("--item-encoding", metavar="NAME", help="text encoding of the item features (default: that of --encoding)")


def _words(text: str) -> list[str]:
    return text.split(",") if text else []


def _delimiter(text: str) -> str:
    return text.replace("\\t", "\t")


def add_data_options(parser: argparse.ArgumentParser) -> None:
    """Adds FILE and the options that say how to read and how to split it."""
    add_read_options(parser)
    option = parser.add_argument
    text = (
        "what is held out for validation and test: each user's last two rows, all rows from --at on, whole items, or "
        "nothing (default: %(default)s)"
    )
    option("--split", choices=WAYS, default="last-one", help=text)
    text = (
        "time from which --split time holds out: a number in the unit of the data's times, or a date: 2017-10-01; "
        "share of the items that --split items holds out (default: 0.1)"
    )
    option("--at", metavar="TIME", help=text)
    text = "order of a user's rows at equal times: that of the file, or a random one (default: %(default)s)"
    option("--ties", choices=TIES, default="input", help=text)
    option("--split-seed", type=int, default=0, help="seed of --ties random (default: %(default)s)")
    text = "test rows of a split made elsewhere; the file of interactions then holds the train rows"
    option("--test", metavar="FILE", help=text)
    option("--valid", metavar="FILE", help="validation rows of a split made elsewhere, beside --test")
    text = "targets of a user in --test and --valid: the first row, or all rows (default: %(default)s)"
    option("--targets", choices=TARGETS, default="first", help=text)
    text = "share of each user's train rows that validates, beside --test (default: none)"
    option("--hold-out", type=float, default=0.0, metavar="SHARE", help=text)


def source_of(args: argparse.Namespace) -> Source:
    """The source that the options of `add_read_options` or `add_data_options` name, with absolute paths."""
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
    # Links are not followed: /dev/stdin and the links in /dev/fd lead to pipes, which have no other name.
    paths = {name: STDIN if data[name] == "-" else data[name] for name in FILES if data.get(name)}
    return data | {name: os.path.abspath(path) for name, path in paths.items()}


def _split_of(args: argparse.Namespace) -> dict[str, Any]:
    presplit = {"--valid": args.valid, "--targets": args.targets != "first", "--hold-out": args.hold_out}
    for name, given in presplit.items():
        if given and not args.test:
            raise ValueError(f"{name}: expected --test FILE with it, got none")
    if args.test and (args.split != "last-one" or args.at is not None or args.ties != "input"):
        raise ValueError("--test: expected no --split, --at or --ties beside files that are split already")
    if args.split_seed != 0 and args.ties != "random" and args.split != ITEMS and not args.hold_out:
        what = "--ties random, --split items or --hold-out"
        raise ValueError(f"--split-seed: expected {what} with it, got {args.split_seed} alone")
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
