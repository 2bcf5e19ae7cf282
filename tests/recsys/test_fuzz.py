"""Mutated files: whatever is done to one, reading ends in rows, in counts or in one line that names the place.

Each input is a sample of a format with bytes flipped, lines cut, doubled or swapped, fields added, quotes, separators,
line ends, marks, odd times and odd words put in, or its packed form cut. What must hold is in `check`.
"""

from __future__ import annotations

import contextlib
import gzip
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastcl.recsys.cli import main
from fastcl.recsys.data import Interactions

Options = dict[str, Any]
DAYS = ["2017-10-01", "2017-10-01T12:30:00Z", "2017-09-30 23:59:59.25", "2017-10-02 00:00:00-05:00", "2016-02-29"]


def _rows(make: Callable[[int, int, int], str]) -> str:
    return "".join(make(k // 3, k * 5 % 4, k) for k in range(9))


# name -> the lines in front of the rows, the rows, and the options that read them.
SAMPLES: dict[str, tuple[str, str, Options]] = {
    "log.csv": ("user,item,time\n", _rows(lambda u, i, t: f"u{u},i{i},{1_500_000_000 + t}\n"), {}),
    "quoted.csv": ("user,item,time\n", _rows(lambda u, i, t: f'"u{u}","i ""{i}"", x",{t}.5\n'), {}),
    "dates.tsv": ("item\ttime\tuser\tmore\n", _rows(lambda u, i, t: f"i{i}\t{DAYS[t % 5]}\tü{u}\t\n"), {}),
    "excel.csv": ("sep=;\r\nuser;item;time\r\n", _rows(lambda u, i, t: f"{u};{i};{t}\r\n"), {}),
    "ratings.dat": (
        "", _rows(lambda u, i, t: f"{u}::{i}::4::{t}\n"), {"delimiter": "::", "columns": ["user", "item", "_", "time"]},
    ),
    "spaces.txt": (
        "", _rows(lambda u, i, t: f"{u}  {i}\t{t}\n"), {"delimiter": " ", "columns": ["user", "item", "time"]},
    ),
    "amazon.csv": ("user,item,time\n", _rows(lambda u, i, t: f"{u},{i},1{t}.05.2017\n"), {"time_format": "%d.%m.%Y"}),
    "log.inter": (
        "user_id:token\titem_id:token\ttimestamp:float\n", _rows(lambda u, i, t: f"{u}\t{i}\t{t}e3\n"), {},
    ),
    "seq.txt": ("", "u1 a b c\nu2 b\nu3 c c a b\n", {"format": "sequence"}),
    "pairs.txt": ("", "1 2\n1 3\n2 2\n2 4\n", {}),
    "wide.csv": (
        "user,item,time\n", _rows(lambda u, i, t: f"u{u},ï{i},{t}\n"), {"encoding": "utf-16"},
    ),
}  # fmt: skip
ODD = [
    "", " ", "NA", "\\N", "null", "-", "nan", "inf", "1e999", "9" * 30, "-1", "0", "2017-13-01", "1_000", "٣", "\ufeff",
    "\0", "\x1c", "\x85", "\u2028", '"', '""', '"""', "'", ",", ";", "|", "::", ":", "\t", " \t ", "\r", "\n", "\r\n",
    "\n\n", "sep=,", "2017-10-01T00:00:00+99:00", "5" * 300, "é", "x" * 5000,
]  # fmt: skip


def mutated(rng: random.Random, data: bytes) -> bytes:
    """`data` after one to four changes."""
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        lines = data.splitlines(keepends=True) or [b""]
        line = rng.randrange(len(lines))
        kind = rng.randrange(9)
        if kind == 0:  # flip bytes
            data = data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
        elif kind == 1:  # cut
            data = data[:at] + data[at + rng.randrange(12) :]
        elif kind == 2:  # the end is missing
            data = data[: max(at, len(data) // 2)]
        elif kind in (3, 4, 5):  # put something in, or in place of a field
            word = rng.choice(ODD).encode()
            fields = re.split(rb"([,;\t|]|::)", lines[line])
            fields[rng.randrange(len(fields))] = word
            data = data[:at] + word + data[at:] if kind == 3 else b"".join([*lines[:line], *fields, *lines[line + 1 :]])
        elif kind == 6:  # a line twice
            data = b"".join([*lines[: line + 1], *lines[line:]])
        elif kind == 7:  # lines in another order
            data = b"".join(rng.sample(lines, len(lines)))
        else:  # a line without its end
            data = b"".join([*lines[:line], lines[line].rstrip(b"\r\n"), *lines[line + 1 :]])
    return data


def _read(path: Path, data: bytes, options: Options) -> Interactions | ValueError:
    path.write_bytes(data)
    try:
        return Interactions.read(path, **options)
    except ValueError as error:  # of any other type it is a fault
        return error


def _triples(found: Interactions) -> list[tuple[str, str, float | None]]:
    user = np.repeat(np.arange(len(found.users)), found.log.lengths).tolist()
    clock = [None] * len(user) if found.log.time is None else [float(time) for time in found.log.time]
    return [(found.users[u], found.items.ids[i - 1], t) for u, i, t in zip(user, found.log.item, clock, strict=True)]


def check(path: Path, data: bytes, head: bytes, options: Options) -> None:
    """What must hold of any content: it is read or refused by a ValueError; every row is kept or counted; "raise"
    refuses the first row that "skip" drops; and where no quote joins lines, the whole is its lines read alone."""
    found = _read(path, data, {**options, "on_error": "skip"})
    strict = _read(path, data, options)
    if isinstance(found, ValueError):
        assert isinstance(strict, ValueError)
        return
    report = found.report
    assert report is not None
    assert report.rows + sum(report.dropped.values()) == report.rows_read
    assert isinstance(strict, ValueError) == bool(report.dropped)
    assert str(report)
    if isinstance(strict, ValueError):
        assert str(strict) == report.faults[0]
        assert re.match(re.escape(str(path)) + r":\d+: ", str(strict))
    else:
        assert _triples(strict) == _triples(found)
    marked = b"\xef\xbb\xbf" in data or "16" in options.get("encoding", "")  # a mark counts in front only
    if not data.startswith(head) or b'"' in data or marked or "other kind of time" in report.dropped:
        return
    lines = re.findall(rb"[^\r\n]*(?:\r\n|\n|\r)|[^\r\n]+$", data[len(head) :])
    # A single line of a sequence file looks like a table more often than several.
    one = {**options, "on_error": "skip", **({} if head or "delimiter" in options else {"format": "sequence"})}
    singles = [_read(path, head + line, one) for line in lines if line.strip()]
    rows = [row for single in singles if isinstance(single, Interactions) for row in _triples(single)]
    assert sorted(rows, key=repr) == sorted(_triples(found), key=repr)


def run(folder: Path, seed: int, count: int) -> None:
    rng = random.Random(seed)
    names = list(SAMPLES)
    for nth in range(count):
        name = names[nth % len(names)]
        head, rows, options = SAMPLES[name]
        encoding = options.get("encoding", "utf-8")
        if rng.random() < 0.6 and encoding == "utf-8":
            data = head.encode() + mutated(rng, rows.encode())
        else:
            data = mutated(rng, (head + rows).encode(encoding))
        try:
            check(folder / name, data, head.encode(encoding), options)
            if nth % 7 == 0:
                packed = gzip.compress(data)
                spoiled = mutated(rng, packed) if rng.random() < 0.7 else packed
                assert isinstance(_read(folder / name, spoiled, options), Interactions | ValueError)
            if nth % 5 == 0:
                table = {"user": ["u"], "item": ["1"]}
                form = {f"item_{key}": value for key, value in options.items() if key in ("delimiter", "columns")}
                features = {"item_features": folder / name, **form}
                (folder / name).write_bytes(data)
                with contextlib.suppress(ValueError):
                    Interactions.read(table, time=None, **features)
        except Exception:
            print(f"input {nth} of seed {seed}: {name} {data!r}")
            raise


def test_mutated_files_are_read_counted_or_refused(tmp_path: Path, record_property: Callable[..., None]) -> None:
    run(tmp_path, 0, 400)
    record_property("inputs", 400)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 7))
def test_many_mutated_files_are_read_counted_or_refused(
    tmp_path: Path, seed: int, record_property: Callable[..., None]
) -> None:
    record_property("inputs", 1500)
    run(tmp_path, seed, 1500)


def test_the_command_line_says_one_line_of_a_mutated_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(5)
    for nth in range(60):
        name = ("log.csv", "quoted.csv", "dates.tsv", "excel.csv", "log.inter")[nth % 5]
        head, rows, _ = SAMPLES[name]
        (tmp_path / name).write_bytes(mutated(rng, (head + rows).encode()))
        for more in ([], ["--on-error", "skip"]):
            code = main.main(["data", "check", str(tmp_path / name), *more])
            captured = capsys.readouterr()
            assert code in (0, 2)
            assert len(captured.err.splitlines()) == (code == 2)
            assert name in captured.err or code == 0
