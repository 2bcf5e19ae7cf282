"""Makes a prepared folder from any source: one pass numbers the ids and puts the rows on disk, a second one puts them
into buckets of users, then each bucket is sorted. At no time is more in memory than the ids, or the rows of one bucket.
"""

from __future__ import annotations

import json
from contextlib import ExitStack, closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fastcl.recsys.data.arrayfiles import ArrayFiles, Spool
from fastcl.recsys.data.blocks import ranges
from fastcl.recsys.data.budget import Budget
from fastcl.recsys.data.containers import Cases, Histories, Items
from fastcl.recsys.data.fingerprints import cases_fingerprint, fingerprint
from fastcl.recsys.data.generations import check_free, generation
from fastcl.recsys.data.ids import digest_of
from fastcl.recsys.data.interactions import AGAIN, OF_ITEMS, Interactions, in_time, with_items
from fastcl.recsys.data.prepared import MANIFEST, VERSION, Manifest, OfFeature, OfSplit
from fastcl.recsys.data.reading.collector import Collector
from fastcl.recsys.data.reading.formats import Options
from fastcl.recsys.data.reading.sources import Source, reader
from fastcl.recsys.data.reports import describe
from fastcl.recsys.data.splits import HOW, split
from fastcl.recsys.data.views import Views
from fastcl.recsys.options import one_of
from fastcl.recsys.writing import write_text

MEMORY = 2048  # megabytes
_BUCKETS = 500  # files that are open at once
_ROW = 200  # bytes that a row takes while its bucket is sorted
_RECORD = [("user", "<i8"), ("item", "<i8"), ("time", "<i8"), ("below", "<i2")]


def prepare(
    source: Source,
    out: str | Path,
    *,
    how: str = "last-one",
    at: str | float | None = None,
    memory: int = MEMORY,
    force: bool = False,
    **options: Any,
) -> Interactions:
    """Reads a log as `Interactions.read` does and writes it to the folder `out`, from which it is then read in no time.

    `Interactions.read(out)`, and every command that takes a file, give the same log, splits and trained bits as the
    source does. Nothing of the clicks is copied then: processes share the pages of the files. What stands in `out`
    already is replaced when the new data is whole, so that a preparation that ends early leaves it as it is.

    Args:
        source, options: those of `Interactions.read`, also item_features.
        out: a folder, made if missing.
        how, at: a split as of `Interactions.split` whose train rows are laid out in the folder too. Any other split but
            "none" can be made of it, and then copies its train rows to memory.
        memory: megabytes that the preparation may take beside the program itself, at least 256.
        force: replaces a prepared folder.

    Raises what `Interactions.read` does; FileExistsError where `out` holds anything (without `force`: data); ValueError
    where the ids alone take more than `memory`.

    >>> from tempfile import TemporaryDirectory
    >>> log = {"user": list("aaabbb"), "item": list("xyzxyz"), "time": [1, 2, 3, 1, 2, 3]}
    >>> with TemporaryDirectory() as folder:
    ...     data = prepare(log, f"{folder}/prepared")
    ...     Interactions.read(f"{folder}/prepared").split().test.target.tolist()
    [3, 3]
    """
    at = at.item() if isinstance(at, np.number) else at  # JSON holds no numbers of NumPy
    one_of(HOW, "how", how)  # the train rows of whole items held out are no part of each user's rows
    budget = Budget(memory)
    features = options.pop("item_features", None)
    of_items = {name: options.pop(name, default) for name, default in OF_ITEMS.items()}
    checked = Options(**options)
    featured = with_items(checked, features, of_items)
    each = reader(source, checked)
    out = Path(out)
    check_free(out, force)
    with generation(out) as place, closing(_Log(place, each.timed, checked, budget)) as log:
        each.read(log.collector)
        data = featured(log.sorted())
        manifest = log.files.manifest(data, how, at)
        write_text(out / MANIFEST, json.dumps(asdict(manifest)) + "\n")
    return Interactions.read(out)


class _Files(ArrayFiles):
    """The files of a prepared folder."""

    def manifest(self, data: Interactions, how: str, at: str | float | None) -> Manifest:
        """Writes what is not written yet of `data`, with its splits, and tells what the folder holds."""
        for k, feature in enumerate(data.items.features.values()):
            self.add(f"feature-{k}", [feature.codes], columns=feature.codes.shape[1])
        if data.items.titles is not None:
            self.add_ids("titles", data.items.titles)
        asked = [("none", "none", None), *([] if how == "none" else [("held", how, at)])]
        return Manifest(
            format="fastcl-data",
            version=VERSION,
            folder=self.place.name,
            files=self.written,
            timed=data.log.time is not None,
            titled=data.items.titles is not None,
            items_digest=data.items.digest,
            features=[OfFeature(name, list(feature.values)) for name, feature in data.items.features.items()],
            splits=[self._split(data, *each) for each in asked],
            report=None if data.report is None else data.report.to_json(),
        )

    def _split(self, data: Interactions, name: str, how: str, at: str | float | None) -> OfSplit:
        made = split(data.items, data.users, data.log, how, at, "input", 0, pack=partial(self._pack, name))
        for part, cases in (("valid", made.valid), ("test", made.test)):
            self._cases(f"{name}-{part}", cases)
        self.add(f"{name}-counts", [made.counts])
        assert made.report is not None, "a split that was made has a report"
        digests = {"data": fingerprint(made), "test": cases_fingerprint(made)}
        return OfSplit(name, how, at, f"{name}-item.bin" in self.written, made.report.to_json(), digests)

    def _pack(self, name: str, train: Views) -> Histories:
        starts, lengths = train.places
        offsets = self.add(f"{name}-offsets", [np.zeros(1, np.int64), np.cumsum(lengths)])
        item = self.add(f"{name}-item", (part.item for part in train.blocks()))
        if train.timed is None:
            return Histories.mapped(offsets, item, None)
        times = (part.time for part in train.blocks() if part.time is not None)
        return Histories.mapped(offsets, item, self.add(f"{name}-time", times, train.timed))

    def _cases(self, name: str, cases: Cases) -> None:
        assert isinstance(cases.history, Views), "of a split with one target a case"
        starts, lengths = cases.history.places
        for what, array in (("user", cases.user), ("start", starts), ("length", lengths), ("target", cases.target)):
            self.add(f"{name}-{what}", [array])


class _Log:
    """A log on its way from a reader to the files."""

    def __init__(self, place: Path, timed: bool, options: Options, budget: Budget) -> None:
        self.files, self._options, self._budget = _Files(place), options, budget
        self._spools: list[Spool] = []
        self.collector = Collector(timed, options, self._spool)

    def close(self) -> None:
        for spool in self._spools:
            spool.close()

    def _spool(self) -> Spool:
        self._spools.append(Spool(self.files.place, self._budget))
        return self._spools[-1]

    def sorted(self) -> Interactions:
        """All rows by user and time, in the files."""
        collector = self.collector
        names = collector.names()
        counts = np.zeros(len(names[0]), np.int64)
        for user in collector.users():
            np.add.at(counts, user, 1)
        spans = list(ranges(counts, max(self._budget.bytes // _ROW, int(counts.sum()) // _BUCKETS)))
        record, look_missing = self._scatter([begin for begin, _ in spans])
        timed, tally = collector.timed, collector.tally
        users, ids = self.files.add_ids("users", names[0]), self.files.add_ids("items", names[1])
        ids.digest = digest_of(ids)
        del self.collector, collector, names  # the ids as Python has them
        item, time = self.files.open("item"), self.files.open("time", record["time"]) if timed else None
        unsorted = 0
        for k, (begin, end) in enumerate(spans):
            rows = np.fromfile(self._bucket(k), record)
            self._bucket(k).unlink()
            moment, below = (rows["time"], rows["below"]) if timed else (None, None)
            part = np.zeros(len(rows), np.int8)
            order, late, again = in_time(rows["user"], rows["item"], moment, below, part, self._options.repeats)
            unsorted += late
            if again:
                tally.dropped[AGAIN] = tally.dropped.get(AGAIN, 0) + again
            rows = rows[order]
            item.write(rows["item"] + 1)
            if time is not None:
                time.write(rows["time"])
            counts[begin:end] = np.bincount(rows["user"] - begin, minlength=end - begin)
        offsets = self.files.add("offsets", [np.zeros(1, np.int64), np.cumsum(counts)])
        log = Histories.mapped(offsets, item.close(), None if time is None else time.close())
        report = describe(tally, counts, log.item, log.time, users, ids, unsorted, look_missing)
        return Interactions(Items(ids), users, log, report)

    def _scatter(self, begins: list[int]) -> tuple[np.dtype, int]:
        """Puts the rows of users begins[k] to begins[k + 1] into bucket k, in their order. Gives the type of a row in a
        bucket, and how many have an id that looks like a missing one.
        """
        record, look_missing = np.dtype(_RECORD), 0
        with ExitStack() as stack:
            files = [stack.enter_context(open(self._bucket(k), "wb")) for k in range(len(begins))]
            for piece in self.collector.pieces():
                if piece.time is not None and piece.time.dtype != record["time"]:
                    record = np.dtype([(name, "<f8" if name == "time" else kind) for name, kind in _RECORD])
                rows = np.zeros(len(piece.user), record)
                rows["user"], rows["item"] = piece.user, piece.item
                if piece.time is not None:
                    rows["time"], rows["below"] = piece.time, piece.below
                look_missing += piece.look_missing
                where = np.searchsorted(begins, piece.user, "right") - 1
                order = np.argsort(where, kind="stable")
                rows, counts = rows[order], np.bincount(where, minlength=len(begins))
                ends = np.cumsum(counts)
                for k in np.flatnonzero(counts).tolist():
                    files[k].write(rows[ends[k] - counts[k] : ends[k]].tobytes())
        for spool in self._spools:
            spool.remove()
        return record, look_missing

    def _bucket(self, k: int) -> Path:
        return self.files.place / f"bucket-{k}"
