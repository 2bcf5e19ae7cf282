"""Files in the forms that people have: public data sets as they come, separators, headers, dates, compression and
encodings; what is not read says so, and names the option that reads it."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from logs import named

from fastcl.recsys.cli import main
from fastcl.recsys.data import Interactions
from fastcl.recsys.data.reading.formats import FORMATS, Format

HEADER = "user,item,time\n"


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


FOURSQUARE = "%a %b %d %H:%M:%S %z %Y"
# Public sets, the first lines as they are published, each with the options that it takes.
PUBLIC: dict[str, tuple[str, dict[str, Any], dict[str, list[str]]]] = {
    "yoochoose-clicks.dat": (
        "1,2014-04-07T10:51:09.277Z,214536502,0\n1,2014-04-07T10:54:09.868Z,214536500,0\n2,2014-04-07T13:56:37.614Z,214662742,0\n",
        {"format": "csv", "columns": ["user", "time", "item", "_"]},
        {"1": ["214536502", "214536500"], "2": ["214662742"]},
    ),
    "u.data": (
        "196\t242\t3\t881250949\n186\t302\t3\t891717742\n196\t377\t1\t878887116\n",
        {"format": "tsv", "columns": ["user", "item", "_", "time"]},
        {"196": ["377", "242"], "186": ["302"]},
    ),
    "ratings.dat": (
        "1::1193::5::978300760\n1::661::3::978302109\n2::1357::5::978298709\n",
        {"delimiter": "::", "columns": ["user", "item", "_", "time"]},
        {"1": ["1193", "661"], "2": ["1357"]},
    ),
    "ratings_Beauty.csv": (
        "A39HTATAQ9V7YF,0205616461,5.0,1369699200\nA3JM6GV9MNOF9X,0558925278,3.0,1355443200\n",
        {"columns": ["user", "item", "", "time"]},
        {"A39HTATAQ9V7YF": ["0205616461"], "A3JM6GV9MNOF9X": ["0558925278"]},
    ),
    "userid-timestamp-artid-artname-traid-traname.tsv": (
        "user_000001\t2009-05-04T23:08:57Z\tf1b1cf71\tDeep Dish\t\tLive\n"
        "user_000001\t2009-05-04T13:54:10Z\ta7f7df4a\t坂本龍一\t\tComposition 0919\n",
        {"columns": ["user", "time", "item", "_", "_", "_"]},
        {"user_000001": ["a7f7df4a", "f1b1cf71"]},
    ),
    "user_artists.dat": (
        "userID\tartistID\tweight\n2\t51\t13883\n2\t52\t11690\n",
        {"format": "tsv", "user": "userID", "item": "artistID", "time": None},
        {"2": ["51", "52"]},
    ),
    "steam-200k.csv": (
        "151603712,\"The Elder Scrolls V Skyrim\",purchase,1.0,0\n151603712,\"Fallout 4\",purchase,1.0,0\n",
        {"columns": ["user", "item", "_", "_", "_"], "time": None},
        {"151603712": ["The Elder Scrolls V Skyrim", "Fallout 4"]},
    ),
    "dataset_TSMC2014_NYC.txt": (
        "470\t49bbd6c0f964a520f4531fe3\tArts\t40.7\t-74.0\t-240\tTue Apr 03 18:00:09 +0000 2012\n"
        "470\t4a43c0aef964a520c6a61fe3\tBridge\t40.6\t-74.0\t-240\tTue Apr 03 17:00:25 -0100 2012\n",
        {"format": "tsv", "columns": [*"ui____t"], "user": "u", "item": "i", "time": "t", "time_format": FOURSQUARE},
        {"470": ["49bbd6c0f964a520f4531fe3", "4a43c0aef964a520c6a61fe3"]},
    ),
    "behaviors.tsv": (
        "1\tU13740\t11/11/2019 9:05:58 PM\tN55189 N42782\tN55689-1\n"
        "2\tU13740\t11/11/2019 9:05:58 AM\tN31739\tN20678-0\n",
        {"columns": ["_", "user", "time", "_", "item"], "time_format": "%m/%d/%Y %I:%M:%S %p"},
        {"U13740": ["N20678-0", "N55689-1"]},
    ),
    "OnlineRetail.csv": (
        "InvoiceNo,StockCode,Quantity,InvoiceDate,CustomerID\n"
        "536365,85123A,6,12/1/2010 8:26,17850\n536366,71053,6,12/1/2010 8:06,17850\n",
        {"user": "CustomerID", "item": "StockCode", "time": "InvoiceDate", "time_format": "%m/%d/%Y %H:%M"},
        {"17850": ["71053", "85123A"]},
    ),
    "reviews.csv": (
        'user,item,time\nA1,B1,"09 13, 2009"\nA1,B2,"09 3, 2009"\n',
        {"time_format": "%m %d, %Y"},
        {"A1": ["B2", "B1"]},
    ),
    "epinions.txt": (
        "1   2 4.0  1000\n1\t3 5.0 900\n22 2 1.0 1\n22 3 2.0 2\n22 4 2.0 3\n",
        {"delimiter": " ", "columns": ["user", "item", "_", "time"]},
        {"1": ["3", "2"], "22": ["2", "3", "4"]},
    ),
    "excel.csv": (
        'sep=;\r\n"user";"item";"time"\r\na;"x;y";1\r\na;z;0\r\n',
        {},
        {"a": ["z", "x;y"]},
    ),
    "days.csv": (
        "user,item,time\na,x,20171002\na,y,20171001\n",
        {"time_format": "%Y%m%d"},
        {"a": ["y", "x"]},
    ),
}  # fmt: skip
OPTIONS = {"columns": ",".join, "time": lambda name: name or ""}


@pytest.mark.parametrize("name", PUBLIC)
def test_public_files_are_read_as_they_come(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, options, expected = PUBLIC[name]
    path = write(tmp_path / name, text)
    data = Interactions.read(path, **options)
    assert named(data) == expected
    assert data.report is not None
    assert data.report.rows_read == sum(map(len, expected.values()))
    words = [
        word
        for option, value in options.items()
        for word in (f"--{option.replace('_', '-')}", OPTIONS.get(option, str)(value))
    ]
    assert main.main(["data", "check", str(path), *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == data.report.rows
    # Without the options a header-less or foreign file is refused, never read as something else.
    if options and name != "days.csv":
        with pytest.raises(ValueError, match=r"--(columns|format|delimiter|time-format)|did you mean"):
            Interactions.read(path)


@pytest.mark.parametrize(
    "name", ["yoochoose-clicks.dat", "u.data", "ratings.dat", "ratings_Beauty.csv", "steam-200k.csv", "lastfm.tsv"]
)
def test_whoever_does_what_the_refusals_say_reads_the_file(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, options, expected = PUBLIC.get(name, PUBLIC["userid-timestamp-artid-artname-traid-traname.tsv"])
    path = write(tmp_path / name, text)
    words: list[str] = []
    while main.main(["data", "check", str(path), *words, "--json"]) != 0:
        said = capsys.readouterr().err
        new = [shlex.split(option) for option in re.findall(r"\((--[a-z-]+ (?:'[^']*'|[^ )]+))\)", said)]
        new = [option for option in new if option[0] not in words]
        assert new, said
        for option in new:
            words += option if option[0] not in words else []
    report = json.loads(capsys.readouterr().out)
    assert report["users"] == len(expected)
    assert report["items"] == len({item for items in expected.values() for item in items})
    assert report["time_unit"] == (None if "time" in options else "s")


TABLES = {
    "a header and tabs": ("SessionId\tItemId\tTime\n3\t21\t1396437466.9\n3\t22\t1396438212.3\n", "--format tsv"),
    "tabs": ("3\t21\t139643\n3\t22\t139643\n", "--format tsv"),
    "commas": ("user,item,time\na,x,1\n", "--format csv"),
    "commas and dates": ("a,x,2017-10-01 12:00\nb,y,2017-10-01 13:00\n", "--format csv"),
    "semicolons": ("a;x;1\n", "--format semicolon"),
    "bars": ("a|x|1 2\n", "--delimiter '|'"),
    "colons": ("1::1193::5 0\n1::661::3 0\n", "--delimiter ::"),
    "check-ins": ("".join(f"{k // 2}\t2010-10-{k + 10}\t30.2\t-97.7\t{k}\n" for k in range(3)), "--format tsv"),
    "ratings between spaces": ("".join(f"{k // 3} {k} {k % 5}.0\n" for k in range(6)), "--delimiter ' '"),
    "names and pairs": ("user item\n1 5\n1 6\n", "--delimiter ' '"),
    "names and pairs of words": ("user_id\titem_id\nab\tcd\nab\tef\n", "--format tsv"),
}
SEQUENCES = {
    "pairs": "1 5\n1 6\n2 5\n2 7\n3 5\n3 9\n",
    "pairs between tabs": "1\t5\n1\t6\n2\t5\n2\t7\n3\t5\n",
    "of many lengths": "u1 5 7 5\nu2  7\t9\nu1 8\n",
    "all of one length": "".join(f"u{k} {' '.join(map(str, range(k, k + 20)))}\n" for k in range(9)),
    "three of a length": "a x y\nb x z\nc y z\n",
}


@pytest.mark.parametrize("kind", TABLES)
def test_a_table_named_txt_is_refused_with_the_option_that_reads_it(kind: str, tmp_path: Path) -> None:
    text, option = TABLES[kind]
    path = write(tmp_path / "log.txt", text)
    with pytest.raises(ValueError, match=r"log\.txt: looks like a table") as refused:
        Interactions.read(path)
    assert option in str(refused.value)
    assert "--format sequence" in str(refused.value)
    if len(text.split("\n")[0].split()) > 1:
        assert Interactions.read(path, format="sequence").log.time is None


@pytest.mark.parametrize("kind", SEQUENCES)
def test_sequences_named_txt_are_read(kind: str, tmp_path: Path) -> None:
    data = Interactions.read(write(tmp_path / "log.txt", SEQUENCES[kind]))
    words = [line.split() for line in SEQUENCES[kind].splitlines()]
    assert len(data.log.item) == sum(len(line) - 1 for line in words)


@pytest.mark.parametrize(
    ("name", "text", "options", "message"),
    [
        ("a.dat", "1::2::3\n", {}, r"its first line, '1::2::3', looks like fields between '::': delimiter=\"::\" "),
        ("a.data", "1\t2\t3\n", {}, r'between .*: format="tsv" \(--format tsv\)\?'),
        ("a.dat", "word\n", {}, r'name the format, format="csv" \(--format csv\), or the delimiter'),
        ("a.csv", "a|b|c\n1|2|3\n", {}, r"other separator \(delimiter=\"\|\" \(--delimiter '\|'\)\)\?"),
        ("a.csv", "user::item\n1::2\n", {}, r"other separator \(delimiter=\"::\" \(--delimiter ::\)\)"),
        ("a.csv", "user item\n1 2\n", {}, r"other separator \(delimiter=\" \" \(--delimiter ' '\)\)"),
        ("a.csv", '"user";"item";"time"\na;b;1\n', {}, r'column names: other separator \(format="semicolon" '),
        ("a.csv", "1,2,3\n4,5,6\n", {}, r"perhaps columns=.* \(--columns user,item,_\), and .* \(--time ''\)"),
        ("a.jsonl", '{"user": 1}\n', {}, r"a line of JSON a row is not read"),
        ("a.feather", "ARROW1", {}, r"a file of Apache's columns is not read: pass it as a data frame"),
        ("a.xlsx", "PK", {}, r"a spreadsheet is not read"),
        ("a.tar.gz", "", {}, r"an archive is not read: unpack it"),
        ("a.csv", b"PAR1\x15\x04\x15", {}, r"looks like a Parquet file, expected text"),
        ("a.csv", b"PK\x03\x04\x14", {}, r"looks like a zip archive or a spreadsheet, expected text"),
        ("a.csv", HEADER.encode("utf-16-le"), {}, r"holds zero bytes: is it no text, or of another encoding"),
        ("a.csv", HEADER.encode("utf-32"), {}, r'looks like UTF-32, not UTF-8: name its encoding="utf-32" '),
        ("a.csv", HEADER.encode("utf-16"), {"encoding": "latin-1"}, r"looks like UTF-16, not LATIN-1"),
        ("a.csv.zst", b"\x28\xb5\x2f\xfd....", {}, r"zstd|zst file"),
        ("a.csv.bz2", "user,item,time\n", {}, r"a\.csv\.bz2: damaged or not a \.bz2 file"),
        ("a.csv", "a,b,1\n", {"columns": ["user", "item"]}, r"columns: .* got 2 names for 3 fields \('a,b,1'\)"),
        ("a.csv", "a;b;1\n", {"columns": ["user", "item", "time"]}, r"3 names for 1 fields .*--format semicolon"),
        ("a.csv", HEADER + "1,2,3\n", {"columns": ["user", "item", "time"]}, r"columns: expected a file without"),
        ("a.csv", HEADER + "a,b,soon\n", {}, r"of another form: name its time_format \(--time-format\)"),
        ("a.csv", HEADER + "a,b,1.5.20\n", {"time_format": "%d/%m/%Y"}, r":2: time '1\.5\.20' is not of '%d/%m/%Y'"),
    ],
)  # fmt: skip
def test_what_is_not_read_says_what_it_is(
    name: str, text: str | bytes, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        Interactions.read(write(tmp_path / name, text), **options)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"delimiter": ""}, ValueError, "delimiter: expected a text"),
        ({"delimiter": "\n"}, ValueError, "delimiter: expected a text"),
        ({"delimiter": 5}, TypeError, "delimiter: expected a text"),
        ({"delimiter": ";", "format": "tsv"}, ValueError, "delimiter: expected none beside format 'tsv', got ';'"),
        ({"delimiter": ";", "format": "sequence"}, ValueError, "delimiter: expected none beside format 'sequence'"),
        ({"columns": "user,item"}, TypeError, "columns: expected a sequence of texts"),
        ({"columns": ["user", "item"], "format": "sequence"}, ValueError, "columns: a sequence file has no columns"),
        ({"missing": "NA"}, TypeError, "missing: expected a sequence of texts"),
        ({"missing": {"NA"}}, TypeError, "missing: expected a sequence of texts, got {'NA'}"),
        ({"columns": {"user": 0}.keys()}, TypeError, "columns: expected a sequence of texts, got dict_keys"),
        ({"time_format": "%H:%M"}, ValueError, "time_format: expected a strptime format with year, month and day"),
        ({"time_format": "%Q"}, ValueError, "time_format: expected a strptime format"),
        ({"time_format": 3}, TypeError, "time_format: expected a strptime format"),
        ({"time_format": "%Y-%m-%d", "time": None}, ValueError, "time_format: expected a time column with it"),
        ({"time_format": "%Y-%m-%d", "format": "sequence"}, ValueError, "time_format: a sequence file has no times"),
        ({"quote": "'", "format": "inter"}, ValueError, "quote: fields of this form .* are never quoted"),
        ({"quote": "'", "delimiter": "::"}, ValueError, "quote: fields of this form .* are never quoted"),
        ({"title": "name"}, ValueError, r"title: expected item_features \(--item-features\) with it, got 'name'"),
        ({"feature_columns": ["x"]}, ValueError, "feature_columns: expected item_features"),
        ({"separator": ""}, ValueError, "separator: expected item_features"),
        ({"item_format": "csv"}, ValueError, "item_format: expected item_features"),
        ({"item_delimiter": "|"}, ValueError, "item_delimiter: expected item_features"),
        ({"item_columns": ["x"]}, ValueError, "item_columns: expected item_features"),
        ({"item_encoding": "latin-1"}, ValueError, "item_encoding: expected item_features"),
        ({"item_features": "i", "item_encoding": "/"}, ValueError, "^item_encoding: expected a text encoding"),
        ({"item_features": "i", "item_encoding": ""}, ValueError, "^item_encoding: expected a text encoding"),
        ({"item_features": "i", "item_delimiter": '"'}, ValueError, "^item_delimiter: expected a text"),
        ({"item_features": "i", "item_delimiter": ""}, ValueError, "^item_delimiter: expected a text"),
        ({"item_features": "i", "item_columns": "a,b"}, TypeError, "^item_columns: expected a sequence of texts"),
        ({"item_features": "i", "feature_columns": "ab"}, TypeError, "^feature_columns: expected a sequence of texts"),
        ({"item_features": "i", "feature_columns": {"a"}}, TypeError, "^feature_columns: expected a sequence of texts"),
        ({"item_features": "i", "feature_columns": 7}, TypeError, "^feature_columns: expected a sequence of texts"),
    ],
)  # fmt: skip
def test_options_that_contradict_or_mean_nothing_are_refused_before_the_file_is_opened(
    options: dict[str, Any], error: type[Exception], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(error, match=message):
        Interactions.read(tmp_path / "missing.csv", **options)
    if error is ValueError and all(isinstance(value, str) and value for value in options.values()):
        words = [word for option, value in options.items() for word in (f"--{option.replace('_', '-')}", value)]
        assert main.main(["data", "check", str(tmp_path / "missing.csv"), *words]) == 2
        first = f"error: --{message.removeprefix('^').partition(':')[0].replace('_', '-')}: "
        assert first in capsys.readouterr().err


def test_a_format_is_one_entry_of_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/contribute/adding-a-format.md promises it."""
    monkeypatch.setitem(FORMATS, "bars", Format("|"))
    path = write(tmp_path / "log.dat", HEADER.replace(",", "|") + "a|x|1\na|y|2\n")
    assert named(Interactions.read(path, format="bars")) == {"a": ["x", "y"]}
    assert main.main(["data", "check", str(path), "--format", "bars"]) == 0
    with pytest.raises(ValueError, match="delimiter: expected none beside format 'bars', got ';'"):
        Interactions.read(path, format="bars", delimiter=";")


def test_options_that_mean_nothing_to_a_table_in_memory_are_refused() -> None:
    table = {"user": ["u"], "item": ["x"], "time": [1]}
    for name, value in {"delimiter": ";", "columns": ["user"], "encoding": "latin-1", "quote": ""}.items():
        with pytest.raises(ValueError, match=f"{name}: a table in memory has none"):
            Interactions.read(table, **{name: value})
    with pytest.raises(ValueError, match="time_format: expected a column of texts, got one of int64"):
        Interactions.read({**table, "time": pytest.importorskip("numpy").array([1])}, time_format="%Y%m%d")
    with pytest.raises(ValueError, match="title: expected item_features"):
        Interactions.presplit(table, table, table, title="name")


PACKERS = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress}


@pytest.mark.parametrize("packed", PACKERS)
@pytest.mark.parametrize("name", ["log.csv", "LOG.CSV", "log.csv.gz", "log.csv.GZ", "log.Csv.Xz", "log.csv.bz2"])
def test_the_content_says_how_a_file_is_compressed(name: str, packed: str, tmp_path: Path) -> None:
    text = (HEADER + "a,x,1\nb,y,2\n").encode()
    path = write(tmp_path / name, PACKERS[packed](text))
    if not packed and name.lower() != "log.csv":
        with pytest.raises(ValueError, match="damaged or not a"):
            Interactions.read(path)
    else:
        assert named(Interactions.read(path)) == {"a": ["x"], "b": ["y"]}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32", "utf-32-be", "cp1252"])
@pytest.mark.parametrize("marked", [False, True])
def test_encodings_with_and_without_their_mark(encoding: str, marked: bool, tmp_path: Path) -> None:
    mark = "\ufeff" if marked and encoding not in ("utf-8-sig", "utf-16", "utf-32", "cp1252") else ""
    path = write(tmp_path / "log.csv", (mark + HEADER + "é,café,1\n").encode(encoding))
    assert named(Interactions.read(path, encoding=encoding)) == {"é": ["café"]}


@pytest.mark.parametrize("delimiter", ["::", "||"])
def test_a_delimiter_of_several_characters_is_found_within_a_line_alone(delimiter: str, tmp_path: Path) -> None:
    """A line that ends with the delimiter's first characters keeps them, also where the next one begins with others."""
    edge = delimiter[0]
    fields = [("1", "10", "1", f"note{edge}"), ("2", "11", "2", "x"), (f"{edge}1", "12", "3", f"y{edge}")]
    lines = [delimiter.join(row) for row in fields]
    options: dict[str, Any] = {"delimiter": delimiter, "columns": ["user", "item", "time", "_"]}
    for end in ("\n", "\r\n"):
        for last in (end, ""):
            data = Interactions.read(write(tmp_path / "log.dat", end.join(lines) + last), **options)
            assert named(data) == {"1": ["10"], "2": ["11"], f"{edge}1": ["12"]}
        bad = [*lines, "short", *lines]
        with pytest.raises(ValueError, match=r"log\.dat:4: expected 4 fields, got 1"):
            Interactions.read(write(tmp_path / "log.dat", end.join(bad)), **options)
    table = write(tmp_path / "items.dat", "".join(f"{delimiter.join(row[1::2])}\n" for row in fields))
    with_kinds = data.with_features(table, columns=["item", "kind"], delimiter=delimiter, separator="")
    assert with_kinds.items.features["kind"].values == (f"note{edge}", "x", f"y{edge}")


# One table of formats serves the log and the item features.
ITEMS = {
    "movies.dat": ("1::Toy Story (1995)::Animation|Comedy\n2::Café (1996)::Drama\n", {"delimiter": "::"}),
    "u.item": ("1;Toy Story (1995);Animation|Comedy\n2;Café (1996);Drama\n", {"format": "semicolon"}),
    "movies.item": ("1;Toy Story (1995);Animation|Comedy\n2;Café (1996);Drama\n", {"delimiter": ";"}),
    "items.txt": ("1\tToy Story (1995)\tAnimation|Comedy\n2\tCafé (1996)\tDrama\n", {"format": "tsv"}),
    "items.csv.gz": ("1,Toy Story (1995),Animation|Comedy\n2,Café (1996),Drama\n", {}),
}


@pytest.mark.parametrize("name", ITEMS)
def test_item_features_of_every_format(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, form = ITEMS[name]
    path = write(tmp_path / name, PACKERS[".gz" * name.endswith(".gz")](text.encode("latin-1")))
    log = write(tmp_path / "log.csv", HEADER + "ü,2,1\nü,1,2\n")
    columns = ["item", "name", "genre"]
    written = {f"item_{option}": value for option, value in form.items()}
    data = Interactions.read(
        log, item_features=path, title="name", item_columns=columns, item_encoding="latin-1", **written
    )
    again = Interactions.read(log).with_features(path, title="name", columns=columns, encoding="latin-1", **form)
    for found in (data, again):
        assert found.items.titles == ("Café (1996)", "Toy Story (1995)")
        assert found.items.features["genre"].values == ("Animation", "Comedy", "Drama")
        assert list(found.items.features) == ["genre"]
    if form or name.endswith(".txt"):
        with pytest.raises(ValueError, match="item_(format|columns): .*item_(format|delimiter)="):
            Interactions.read(log, item_features=path, item_columns=columns, item_encoding="latin-1")
    words = [word for option, value in written.items() for word in (f"--{option.replace('_', '-')}", value)]
    words += ["--item-columns", ",".join(columns), "--item-encoding", "latin-1", "--title", "name"]
    assert main.main(["data", "check", str(log), "--item-features", str(path), *words]) == 0
    assert "feature genre: 2 of 2 items have it" in capsys.readouterr().out


def test_columns_without_a_name_or_with_one_twice_are_no_features(tmp_path: Path) -> None:
    log = {"user": ["u"], "item": ["x"]}
    frame = write(tmp_path / "a.csv", ",item,kind\n0,x,new\n1,y,old\n")  # the index of a data frame has no name
    assert list(Interactions.read(log, time=None, item_features=frame).items.features) == ["kind"]
    with pytest.raises(ValueError, match="item_features column 'kind' appears 2 times"):
        Interactions.read(log, time=None, item_features=write(tmp_path / "b.csv", "item,kind,kind\nx,1,2\n"))
