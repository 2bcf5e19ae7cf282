"""The log of interactions: reading/ turns any source into histories in time order, splits.py parts them into train,
validation and test. This module calls both and neither parses nor draws the parts itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fastcl.recsys.data import features, prepared, splits
from fastcl.recsys.data.containers import Histories, Items, Split, by_row, with_origin
from fastcl.recsys.data.reading.collector import Log
from fastcl.recsys.data.reading.formats import Form, ItemForm, Options, check_texts, refuse_unused
from fastcl.recsys.data.reading.sources import Source, read_log
from fastcl.recsys.data.reports import DataReport, describe
from fastcl.recsys.options import at_least, between, one_of
from fastcl.recsys.showing import summary

# The options that say how item features are read, with their defaults.
OF_ITEMS: dict[str, Any] = {
    "feature_columns": None, "separator": "|", "title": None, "item_format": None, "item_delimiter": None,
    "item_columns": None, "item_encoding": None,
}  # fmt: skip

AGAIN = "repeated item of a user"


@dataclass(frozen=True, eq=False)
class Interactions:
    """A log of interactions: row u of `log` is user u (`users[u]`) in time order; equal times keep the source's order.

    report: what reading found; None for a log that was not read.
    """

    items: Items
    users: Sequence[str]
    log: Histories
    report: DataReport | None = field(default=None, repr=False)
    # Of a prepared folder, and not of the constructor: another log has none.
    recorded: tuple[prepared.Recorded, ...] = field(default=(), repr=False, init=False)
    # The files and options that `read` made the log of, "data" of a config.json; {} where a part of it was no file.
    origin: Mapping[str, Any] = field(default_factory=dict, repr=False, init=False)

    __repr__ = summary

    def __post_init__(self) -> None:
        object.__setattr__(self, "log", self.log.named(self.items, by_row(self.users)))

    @classmethod
    def read(
        cls,
        source: Source,
        *,
        user: str = "user",
        item: str = "item",
        time: str | None = "time",
        format: str | None = None,
        delimiter: str | None = None,
        columns: Sequence[str] | None = None,
        encoding: str = "utf-8",
        quote: str = '"',
        time_format: str | None = None,
        missing: Sequence[str] | None = None,
        on_error: str = "raise",
        repeats: str = "keep",
        item_features: Source | None = None,
        feature_columns: Sequence[str] | None = None,
        separator: str = "|",
        title: str | None = None,
        item_format: str | None = None,
        item_delimiter: str | None = None,
        item_columns: Sequence[str] | None = None,
        item_encoding: str | None = None,
    ) -> Interactions:
        """Reads a log. Users and items are numbered in the order in which they first appear.

        Args:
            source: a table file (.csv, .tsv, RecBole's .inter) or sequence file (.txt: `user item item ...`, oldest
                first), plain or compressed (gzip, xz, bzip2; zstd from Python 3.14 on), or a pipe; a Parquet file, or a
                folder of them, which are read in the order of their paths (needs pyarrow); a folder made by `prepare`,
                which is mapped and whose options of reading are decided; or a data frame (pandas, polars, pyarrow), or
                a mapping of column names to columns.
            user, item, time: column names; with time None or "" the order of the rows is the order in time. Where the
                table lacks a column of a default name, `read` takes the one whose name public data and other libraries
                use for it (userId, movieId, timestamp, ...: `fastcl.recsys.data.reading.names.ALIASES`) and says so in
                `report`; it refuses two such columns. Columns of an .inter file are named without their types.
            format: "csv", "tsv", "semicolon" (;), "inter", "sequence" or "parquet"; None: the file's name decides. A
                .txt file that looks like a table is refused until its format is named.
            delimiter: the separator of a table's fields, one character or several ("::", "|"); " " is any run of
                spaces and tabs. None: the format decides, or a first line `sep=;` as Excel writes it.
            columns: column names by position, for a table without a header line; "_" skips a column.
            encoding: the encoding of text files; a byte order mark is skipped.
            quote: the character around fields that hold separators or line ends; "" makes quotes plain text. Inside an
                unquoted field a quote is a character like any other. Fields of an .inter file, and fields between
                spaces or a delimiter of several characters, have no quoting.
            time_format: a strptime format ("%d.%m.%Y %H:%M"), for dates that are not ISO.
            missing: words that mean "no value" as an id or a feature. None: NA, N/A, null, None, nan, \\N, - and the
                like (`fastcl.recsys.data.reading.times.MISSING_WORDS`); (): no word does.
            on_error: "raise" refuses the first bad row; "skip" drops bad rows and counts them in `report`. A row is bad
                for a wrong number of fields, an id that is empty or a word of `missing`, a time that is missing, not
                finite or unreadable, undecodable bytes, a quote that is not closed, an id that is neither text nor a
                whole number, or an id that is a float of 2**53 or more.
            repeats: "keep" keeps all rows, "first" only the first row of each pair of user and item.
            item_features: a table with one row per item (column `item`). Every other column, or each of
                feature_columns, becomes a categorical feature; a cell may hold several values between `separator`.
            title: the column of item_features that holds titles.
            item_format, item_delimiter, item_columns, item_encoding: how item_features is written. Defaults: the format
                that its name tells, and the encoding of the log.

        Ids are text, spaces around them included: "01" and "1" are two items; 1 and 1.0 in a data frame are "1". Times
        are numbers or dates. Numbers keep their unit and value (int64 where all are whole, else float64). Dates become
        Unix seconds (UTC where no zone is given), to the microsecond; finer digits decide the order of rows and are
        counted in `report`. Equal times keep the order of the source.

        Raises ValueError for a bad option (before anything is read), an option without effect, a missing column, an
        empty source, or a bad row (as "FILE:LINE: what"); TypeError for an option or a source of a wrong type.

        >>> data = Interactions.read({"user": ["a", "a", "b"], "item": [7, 9, 7], "time": [20, 10, 5]})
        >>> data.users, data.items.ids, data.log.item.tolist()
        (('a', 'b'), ('7', '9'), [2, 1, 1])
        """
        options = Options(
            format, delimiter, columns, encoding, quote, missing, user, item, time, time_format, on_error, repeats
        )
        given = (feature_columns, separator, title, item_format, item_delimiter, item_columns, item_encoding)
        of_items = dict(zip(OF_ITEMS, given, strict=True))
        featured = with_items(options, item_features, of_items)
        if isinstance(source, str | Path) and prepared.is_prepared(source):
            _refuse_options(options, source, item_features)
            found = prepared.read(Path(source))
            data = cls(found.items, found.users, found.log, found.report)._with_splits(found.splits)
        else:
            data, _ = _ordered(read_log([source], options), repeats)
        origin = origin_of({"path": source, "item_features": item_features}, {**vars(options), **of_items})
        return with_origin(featured(data), origin)

    def with_features(
        self,
        source: Source,
        *,
        item: str = "item",
        feature_columns: Sequence[str] | None = None,
        separator: str = "|",
        title: str | None = None,
        format: str | None = None,
        delimiter: str | None = None,
        columns: Sequence[str] | None = None,
        encoding: str = "utf-8",
        quote: str = '"',
        missing: Sequence[str] | None = None,
    ) -> Interactions:
        """The same log whose items have the features of a table with one row per item; options as in `read`.

        >>> data = Interactions.read({"user": ["u", "u"], "item": ["x", "y"]}, time=None)
        >>> data = data.with_features({"item": ["y", "x"], "tags": ["new|red", ""]})
        >>> data.items.features["tags"].codes.tolist()
        [[0, 0], [0, 0], [1, 2]]
        """
        form = Form(format, delimiter, columns, encoding, quote, missing)
        check_texts("feature_columns", feature_columns)
        return self._with_features(source, form, item, feature_columns, separator, title)

    def _with_features(
        self, source: Source, form: Form, item: str, columns: Sequence[str] | None, separator: str,
        title: str | None,
    ) -> Interactions:  # fmt: skip
        items, unused = features.join(
            self.items, source, item=item, columns_of=columns, separator=separator, title=title, form=form,
        )  # fmt: skip
        found = {name: int((feature.codes[1:] > 0).any(1).sum()) for name, feature in items.features.items()}
        report = self.report
        if report is not None:
            ungrouped = {name: len(feature.values) for name, feature in items.features.items() if not feature.groups}
            titled = items.titles is not None
            report = replace(report, features=found, ungrouped=ungrouped, feature_rows_unused=unused, titled=titled)
        return replace(self, items=items, report=report)._with_splits(self.recorded)

    def _with_splits(self, recorded: tuple[prepared.Recorded, ...]) -> Interactions:
        object.__setattr__(self, "recorded", recorded)
        return self

    def split(
        self, how: str = "last-one", at: str | float | None = None, *, ties: str = "input", seed: int = 0
    ) -> Split:
        """Parts the log into train histories, validation cases and test cases; `Split.report` counts them.

        how: "last-one" (leave-one-out): a user's last interaction is the test target, the last but one the validation
                target; the history of either is all that precedes it, and the rest is train. Users with fewer than 3
                interactions only train. Train then holds interactions of other users that are later than a test
                target, which no recommender in service has: a LeakageWarning says for how many cases.
            "time" (global cut): interactions before `at` train, those at or after `at` test. Every user with both has
                one test case: the first interaction at or after `at`, with all before `at` as history. A user's last
                interaction before `at`, taken from train, is the validation target where the user has at least 2. The
                report counts what is no case: later rows of the test period, and users without a row before `at`. It
                also counts the targets that train never shows, which stay cases.
            "items": a share of the items is held out as a whole. A user's last interaction with a held-out item is the
                test target, with the user's interactions with other items before it as history; of the rest a user's
                last one of at least 3 validates. It measures what a model makes of items without a click.
            "none": every row trains, for the last training before serving. There are no validation or test cases: `fit`
                keeps the last epoch, and nothing can be evaluated.
        at: the cut of "time": a number in the unit of the times, or an ISO date where the times are seconds,
            milliseconds, microseconds or nanoseconds since 1970. The share of the items that "items" holds out, drawn
            with `seed`; None: a tenth.
        ties: the order of a user's rows at equal times: "input" keeps that of the source, "random" draws one with
            `seed`. Where ties are many, a model learns the order of the file (by item id, for example) as if it were
            behaviour.

        Raises ValueError for other options, or where no user has a test case or none has a validation case.

        >>> data = Interactions.read({"user": list("aaabbb"), "item": list("xyzxyz"), "time": [1, 2, 9, 1, 2, 3]})
        >>> split = data.split("time", at=9)
        >>> [data.users[u] for u in split.test.user], split.test.history.item.tolist(), split.test.target.tolist()
        (['a'], [1, 2], [3])
        >>> split.train.item.tolist()
        [1, 1, 2]
        """
        splits.check(how, ties, seed)
        known = next((each for each in self.recorded if each.answers(how, at, ties)), None)
        if known is not None:
            made = known.split(self.items, self.users, seed, self.report)
        else:
            made = splits.split(self.items, self.users, self.log, how, at, ties, seed)
            made = replace(made, data_report=self.report)
        splits.warn_of_leak(made.report)
        own = {"how": how, "at": at.item() if isinstance(at, np.number) else at, "ties": ties, "seed": seed}
        return with_origin(made, {"data": self.origin, "split": own} if self.origin else {})

    @classmethod
    def presplit(
        cls,
        train: Source,
        valid: Source | None,
        test: Source,
        *,
        targets: str = "first",
        hold_out: float = 0.0,
        seed: int = 0,
        item_features: Source | None = None,
        **options: Any,
    ) -> Split:
        """A split from files or tables that hold its parts; options as in `read`, and for item_features as in
        `with_features`.

        A user's validation target is the first row in `valid`, with the user's rows of `train` as history; the test
        target is the first row in `test`, with the rows of `train` and `valid` as history. `Split.report` counts what
        is no case: further rows, and users without a history. The item table holds the items of all files.

        valid: the validation rows; None: no file holds any.
        targets: "first", or "all": every row that a user has in `valid` is a target of that user's one validation case,
            and likewise in `test`. `evaluate` then gives recall@k and NDCG@k for several relevant items, as on the
            splits of LightGCN's paper.
        hold_out: without `valid`, the share (0..1) of every user's rows in `train`, rounded down and drawn at random
            with `seed`, that validates instead of training. 0: no validation; `fit` then keeps the last epoch.

        >>> split = Interactions.presplit("train.csv", "valid.csv", "test.csv", user="uid")  # doctest: +SKIP
        >>> train, test = {"user": list("aaab"), "item": list("wxyw")}, {"user": list("aab"), "item": list("zwx")}
        >>> split = Interactions.presplit(train, None, test, targets="all", time=None)
        >>> len(split.valid), split.test.target.tolist(), split.test.offsets.tolist()
        (0, [4, 1, 2], [0, 2, 3])
        """
        one_of(splits.TARGETS, "targets", targets)
        between(0.0, 1.0, "hold_out", hold_out)
        at_least(0, "seed", seed)
        if valid is not None and hold_out:
            raise ValueError(f"hold_out: expected 0 with a valid file, got {hold_out}")
        of_items = {name: options.pop(name, default) for name, default in OF_ITEMS.items()}
        checked = Options(**options)
        featured = with_items(checked, item_features, of_items)
        files = {splits.TRAIN: train, splits.VALID: valid, splits.TEST: test}
        given = [kind for kind, source in files.items() if source is not None]
        log = read_log([files[kind] for kind in given], checked)
        data, part = _ordered(replace(log, part=np.array(given, np.int8)[log.part]), checked.repeats)
        data = featured(data)
        histories = data.log
        if hold_out:
            histories, part = splits.hold_out(histories, part, hold_out, seed)
        made = splits.from_parts(
            data.items, data.users, histories, splits.per_user(part, histories), how="files", at=None, ties="input",
            seed=seed, targets=targets, validates=valid is not None or hold_out > 0,
        )  # fmt: skip
        own = {"targets": targets, "hold_out": hold_out} if hold_out or targets != "first" else {}
        files_of = {"path": train, "valid": valid, "test": test, "item_features": item_features}
        origin = origin_of(files_of, {**vars(checked), **of_items, **own})
        whole = {"data": origin, "split": {"how": "last-one", "seed": seed}} if origin else {}
        return with_origin(replace(made, data_report=data.report), whole)


def origin_of(sources: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """ "data" of a config.json for sources that are all files, by their absolute paths; else {}."""
    files = {name: source for name, source in sources.items() if source is not None}
    if not all(isinstance(source, str | Path) and str(source) != "-" for source in files.values()):
        return {}
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()}
    return {**plain, **{name: os.path.abspath(path) for name, path in files.items()}}


def with_items(
    options: Options, source: Source | None, of_items: Mapping[str, Any]
) -> Callable[[Interactions], Interactions]:
    """A function that gives a log its item features. The options in of_items are checked before it is called."""
    if source is None:
        given = {name: (of_items[name], default) for name, default in OF_ITEMS.items()}
        refuse_unused(given, "expected item_features (--item-features) with it")
        return lambda data: data
    feature_columns, separator, title, format, delimiter, columns, encoding = of_items.values()
    encoding = options.encoding if encoding is None else encoding
    check_texts("feature_columns", feature_columns)
    form = ItemForm(format, delimiter, columns, encoding, options.quote, options.missing)
    item = options.item
    return lambda data: data._with_features(source, form, item, feature_columns, separator, title)


def _refuse_options(options: Options, folder: str | Path, item_features: Any) -> None:
    """ValueError for an option of reading that was decided when the folder was prepared."""
    given = {name: (getattr(options, name), each.default) for name, each in Options.__dataclass_fields__.items()}
    for name in ("item", "encoding", "quote", "missing") if item_features is not None else ():  # these of the features
        del given[name]
    refuse_unused(given, f"{folder} is prepared and was read with its own")


def _ordered(log: Log, repeats: str) -> tuple[Interactions, np.ndarray]:
    """The log ordered by user, part and time, equal rows in the order of the source; and the part of every row."""
    order, unsorted, again = in_time(log.user, log.item, log.time, log.below, log.part, repeats)
    if again:
        log.tally.dropped[AGAIN] = again
    users, items = log.users, log.items
    counts = np.bincount(log.user[order], minlength=len(users))
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    histories = Histories(offsets, log.item[order] + 1, None if log.time is None else log.time[order])
    report = describe(
        log.tally, histories.lengths, histories.item, histories.time, users, items, unsorted, log.look_missing
    )
    return Interactions(Items(items), users, histories, report), log.part[order]


def in_time(
    user: np.ndarray, item: np.ndarray, time: np.ndarray | None, below: np.ndarray | None, part: np.ndarray,
    repeats: str,
) -> tuple[np.ndarray, int, int]:  # fmt: skip
    """The order of rows by user, part and time, all else as they come; how many stood behind a later row of their user;
    and how many are left out where `repeats` is "first".
    """
    order = np.argsort(user, kind="stable")
    unsorted = 0
    if time is not None:
        fine = np.zeros(len(time), np.int16) if below is None else below
        whose, when, which = user[order], time[order], part[order]
        later = (when[1:] < when[:-1]) | ((when[1:] == when[:-1]) & (fine[order][1:] < fine[order][:-1]))
        unsorted = int(((whose[1:] == whose[:-1]) & (which[1:] == which[:-1]) & later).sum())
        if unsorted:
            order = np.lexsort((*([] if below is None else [below]), time, part, user))
    if repeats == "keep":
        return order, unsorted, 0
    pair = user[order] * (1 + int(item.max(initial=0))) + item[order]
    first = np.sort(np.unique(pair, return_index=True)[1])
    return order[first], unsorted, len(order) - len(first)
