"""fastcl recommend: the best next items for a history, or for every user of a file."""

import argparse
import json
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fastcl.recsys.cli import lists
from fastcl.recsys.cli.cold import add_items_option, with_new_items
from fastcl.recsys.cli.lists import UserRow
from fastcl.recsys.cli.runs import Run, inputs_of, tell, unfinished
from fastcl.recsys.data import PAD, Interactions, Items, Scorer, fingerprints
from fastcl.recsys.data.merging import merge, of_users
from fastcl.recsys.data.source import CLICKS, Source
from fastcl.recsys.data.splits import LeakageWarning
from fastcl.recsys.evaluation.ranking import SEEN
from fastcl.recsys.models.floors import Popularity
from fastcl.recsys.options import at_least
from fastcl.recsys.serving.recommend import Row, known_histories, recommend, recommend_users
from fastcl.recsys.serving.vectors import FILES
from fastcl.recsys.training import checkpoint
from fastcl.recsys.training.threads import add_threads
from fastcl.recsys.writing import check_output, write_parts


def add(commands: Any) -> None:
    parser = commands.add_parser("recommend", help="the best next items for a history, or for every user of a file")
    option = parser.add_argument
    option("folder", metavar="RUN", help="run folder")
    who = parser.add_mutually_exclusive_group(required=True)
    who.add_argument("--history", metavar="IDS", help='item ids, oldest first, separated by commas ("a,b" is one id)')
    of_users = (
        "files of interactions, each user of which gets a list; clicks of these users in the run's data count too"
    )
    who.add_argument("--users", metavar="FILE", nargs="+", help=of_users)
    option(
        "--alone",
        action="store_true",
        help="take the files of --users for whole histories and do not read the run's data",
    )
    moved = "where the run's data is now, for --users and --fallback (default: where training found it)"
    option("--data", metavar="FILE", help=moved)
    option("--times", help="a time for each item of --history, separated by commas, in the unit of the run's data")
    option("-k", type=int, default=10, help="length of a list (default: %(default)s)")
    option(
        "--seen",
        choices=SEEN,
        help="mask: recommend no item of the history; keep: items may repeat (default: as in training)",
    )
    option("--strict", action="store_true", help="refuse items that the run does not know (default: skip, and say so)")
    add_item_options(parser)
    add_items_option(parser)
    index = "search the Faiss index that fastcl export --to faiss wrote to this folder (default: score all items)"
    option("--index", metavar="FOLDER", help=index)
    option("--fallback", choices=("popular",), help="what users without a known item get (default: no list)")
    to = (
        "write user, rank, item, score and title (where items have one) there, as Parquet to a .parquet, or a line of "
        "JSON a user to a .jsonl"
    )
    option("-o", "--out", metavar="FILE", help=f"{to} (default for --users: CSV to stdout)")
    add_threads(parser)
    option("--json", action="store_true", help="one JSON document on stdout; with -o, a summary of what was written")
    names = {"histories": "--history", "only": "--only", "format": "--users", "columns": "--users"}
    parser.set_defaults(run=run, names=names)


def add_item_options(parser: Any) -> None:
    """Adds --only and --without, for `recommend` and `similar`."""
    named = "items by id, separated by commas, or @FILE with an id a line"
    parser.add_argument("--only", metavar="IDS", type=_Ids, help=f"recommend nothing but these {named}")
    parser.add_argument("--without", metavar="IDS", type=_Ids, default=[], help=f"never recommend these {named}")


def run(args: argparse.Namespace) -> None:
    at_least(1, "-k", args.k)
    if args.times is not None and args.history is None:
        raise ValueError("--times: expected with --history; a file of --users has its own")
    if args.alone and args.users is None:
        raise ValueError("--alone: expected with --users; a --history is taken as it is")
    if args.data is not None and not args.fallback and (args.users is None or args.alone):
        raise ValueError("--data: expected with --users (without --alone) or --fallback; nothing else reads the data")
    times = None if args.times is None else [[_number(part) for part in _fields(args.times)]]
    config = checkpoint.read_config(args.folder)
    if args.out is not None:
        check_output("-o", args.out, {**_inputs(args), **inputs_of(args.folder, config)})
        lists.check(args.out)
    model = with_new_items(checkpoint.load(args.folder), config, args.items)
    seen = args.seen or config.get("seen", "mask")
    tell([note for note in [unfinished(Run(Path(args.folder), config, model))] if note])
    say_unknown(args, model.items)
    source = Source.recorded(config, args.folder)
    source = source if args.data is None else source.at(args.data)
    fallback: Scorer | None = model if model.serves_strangers else None
    if args.fallback:
        fallback = _popular(source, model.items)
    limits: dict[str, Any] = {"only": args.only, "without": args.without, "fallback": fallback, "strict": args.strict}
    limits["index"] = args.index
    rows: Iterable[UserRow]
    left_out: tuple[str, ...] = ()
    strangers = 0
    if args.users is None:
        history = _fields(args.history)
        _say_quotes("--history", history, model.items)
        found = recommend(model, [history], args.k, seen, times=times, **limits)
        rows, skipped, clicks = [(None, row) for row in found], found.skipped, len(history)
        strangers = len(found.left_out)
        if strangers:
            instead = "popular items are shown" if fallback else "there is nothing to recommend from"
            tell([f"{args.folder} knows no item of the history: {instead}"])
    else:
        data = _histories(args, source, config.get("data_sha256"))
        rows, skipped, left_out = recommend_users(model, data, args.k, seen, **limits)
        clicks = len(data.log.item)
    if skipped:
        _say(f"skipped {skipped.total():,} of {clicks:,} clicks, on unknown items", list(skipped))
    if left_out:
        what = "popular items for" if fallback else "left out"
        _say(f"{what} {len(left_out):,} users without a known item", left_out)
    tally: Counter[str] = Counter(users=0, rows=0, empty=0)
    rows = _counted(rows, tally)
    summary = {"run": args.folder, "k": args.k, "seen": seen, "skipped": skipped, "left_out": list(left_out)}
    if args.out is not None:
        write_parts(Path(args.out), lists.written(Path(args.out), rows, model.items))
        summary |= {"out": args.out, "users": tally["users"], "rows": tally["rows"]}
        if not args.json:
            print(f"{args.out}: {tally['rows']:,} rows, {tally['users']:,} users")
    elif args.json:
        summary["recommendations"] = [{"user": user, "items": lists.document(row, model.items)} for user, row in rows]
    else:
        for text in lists.csv_lines(rows, model.items) if args.users else _shown(rows, model.items):
            print(text, end="")
    if args.json:
        print(json.dumps(summary, ensure_ascii=False))
    if tally["empty"] > strangers:
        whose = "the history holds" if args.history is not None else f"{tally['empty']:,} users have clicked on"
        whose += " every item" + ("" if args.only is None and not args.without else " that --only and --without allow")
        tell([f"{whose}, so that nothing is left to recommend; --seen keep ranks seen items too"])


def _inputs(args: argparse.Namespace) -> dict[str, str | Path | None]:
    """Description -> path of the files that options name."""
    of_ids = {f"--{name}": getattr(getattr(args, name), "file", None) for name in ("only", "without")}
    of_index = {f"{name} of --index": Path(args.index) / name for name in FILES} if args.index else {}
    of_users = {file: file for file in args.users or ()}
    return {"--data": args.data, "--items": args.items, **of_ids, **of_index, **of_users}


def _histories(args: argparse.Namespace, source: Source, trained: str | None) -> Interactions:
    """The users in the files of --users, with their clicks there and, unless --alone is given, in the run's data.

    trained: the fingerprint of the run's data in training.
    """
    logs = {file: source.read_clicks(file) for file in args.users}  # once, since a pipe is gone then
    data = merge(*logs.values())
    own = [source.data[name] for name in CLICKS if source.data.get(name)]
    places = {Path(file).resolve() for file in own}
    if args.alone or places <= {Path(file).resolve() for file in args.users}:
        if not own and not args.alone:
            tell([f"{args.folder} names no data: histories are those of the files alone"])
        return data
    try:
        before = source.read_clicks()
    except FileNotFoundError as error:
        if args.data is not None:
            raise
        what = "what was clicked there is unknown and may be recommended"
        tell([f"the run's data has moved from {error.filename or own[0]}: {what}; --data FILE says where it is"])
        return data
    if _changed(before, source, trained):
        tell([f"{own[0]} has changed since the training: clicks that are no longer in it may be recommended"])
    # Without times, a part of the run's data would be taken for further clicks.
    others = [log for file, log in logs.items() if Path(file).resolve() not in places]
    whole = of_users(merge(before, merge(*others)) if others else before, data.users)
    known, clicks = set(before.users) & set(data.users), len(whole.log.item) - len(data.log.item)
    if known:
        count = f"{len(known):,} of {len(data.users):,} users are in the run's data too"
        tell([f"{count}: their clicks there, {clicks:,}, are part of their histories (--alone leaves them out)"])
    return whole


def _changed(before: Interactions, source: Source, trained: str | None) -> bool:
    """Whether the run's data is known to hold other clicks than in training. For a split from files this is not known.

    before: the run's data, read again. trained: the fingerprint of the data in training.
    """
    if trained is None or source.data.get("test"):
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LeakageWarning)
        try:
            return fingerprints.fingerprint(source.divide(before)) != trained
        except ValueError:
            return True


def _popular(source: Source, items: Items) -> Popularity:
    """The popularity scorer of a run's data, which this function reads."""
    if not source.data:
        raise ValueError(f"--fallback: expected a run that names its data, or --data FILE, got {source.folder}")
    try:
        clicks, _ = known_histories(items, source.read_clicks())
    except FileNotFoundError as error:
        where = f"--fallback: {error.filename or error}: the data of {source.folder} is not there"
        raise FileNotFoundError(f"{where}; --data FILE says where it is") from error
    return Popularity(np.bincount(clicks.item, minlength=len(items) + 1), items)


class _Ids(list[str]):
    """ "a,b" -> ["a", "b"]; "@FILE" -> the lines of the file, whose path is `file`."""

    def __init__(self, text: str) -> None:
        self.file = text[1:] if text.startswith("@") else None
        super().__init__(_fields(text) if self.file is None else _lines(self.file))


def _lines(file: str) -> list[str]:
    try:
        lines = Path(file).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"expected @FILE with an id a line, got @{file} ({error})") from error
    return [line.strip() for line in lines if line.strip()]


def _fields(text: str) -> list[str]:
    """The parts between commas, stripped of spaces unless they stand in quotes."""
    parts = re.findall(r'\s*"((?:[^"]|"")*)"\s*(?:,|$)|([^,]+)', text)
    found = [(quoted.replace('""', '"') if quoted else bare.strip()) for quoted, bare in parts]
    return [part for part in found if part]


def _number(text: str) -> float:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    raise ValueError(f"--times: expected numbers separated by commas, got {text!r}")


def say_unknown(args: argparse.Namespace, items: Items) -> None:
    """Says which ids of --only and --without the run does not know."""
    for name in ("only", "without"):
        ids = getattr(args, name) or []
        _say_quotes(f"--{name}", ids, items)
        unknown = [ids[n] for n in np.flatnonzero(items.encode(ids) == PAD)]
        if unknown:
            _say(f"--{name}: {len(unknown):,} of {len(ids):,} items are unknown", unknown)


def _say_quotes(option: str, ids: list[str], items: Items) -> None:
    """Says so where parts between commas are no ids, but together are one."""
    whole = ",".join(ids)
    if len(ids) > 1 and items.encode([whole])[0] != PAD and not items.encode(ids).any():
        tell([f"""{option}: an id that holds a comma stands in quotes: '"{whole}"'"""])


def _say(what: str, names: list[str] | tuple[str, ...]) -> None:
    print(f"{what}: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}", file=sys.stderr)


def _counted(rows: Iterable[UserRow], tally: Counter[str]) -> Iterator[UserRow]:
    for user, row in rows:
        tally.update(users=1, rows=len(row), empty=not row)
        yield user, row


def _shown(rows: Iterable[UserRow], items: Items) -> Iterator[str]:
    for _, row in rows:
        yield from lines(row, items)


def lines(row: Row, items: Items) -> Iterator[str]:
    """A list for the terminal, one item per line."""
    for item, score in row:
        title = lists.title(item, items)
        yield f"{score:9.4f}  {item}" + (f"  {title}\n" if title else "\n")
