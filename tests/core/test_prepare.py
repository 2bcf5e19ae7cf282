"""benchmarks/prepare.py makes our data files from the originals, and refuses any others.

The real originals are not here; that they give our files byte for byte is noted as checksums in the program.
"""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path

import pytest

from benchmarks import prepare
from benchmarks.prepare import Source


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize(
    ("make", "originals", "made"),
    [
        (prepare.as_it_is, {"a": b"1 2\n"}, [b"1 2\n"]),
        (prepare.as_it_is, {"a": gzip.compress(b"1,2\n")}, [b"1,2\n"]),
        (prepare.from_one, {"a": b"0 0 5\n1 9\n"}, [b"1 1 6\n2 10\n"]),
        (prepare.grouped, {"a": b"1 7\n1 9\n2 7\n"}, [b"1 7 9\n2 7\n"]),
        (
            prepare.sentence_pairs,
            {"a": b"news\tMSR\t2012\t1\t4.4\tOne.\tTwo.\nforum\tx\t2013\t2\t5\tA\tB\tmore\tcolumns\n"},
            [b"news\t4.400\tOne.\tTwo.\nforum\t5.000\tA\tB\n"],
        ),
    ],
)
def test_what_is_made_of_an_original(make: prepare.Make, originals: dict[str, bytes], made: list[bytes]) -> None:
    assert make(originals) == made


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> bytes:
    """A source of one file of two lines."""
    original = b"0 0\n1 1\n"
    source = Source(prepare.from_one, "nowhere", {"a.txt": sha(original)}, {"x/a.txt": sha(b"1 1\n2 2\n")})
    monkeypatch.setitem(prepare.SOURCES, "x/a", source)
    return original


def test_files_are_made_once_and_are_the_same_everywhere(small: bytes, tmp_path: Path) -> None:
    paths = [prepare.prepare("x/a", tmp_path / folder, lambda file: small)[0] for folder in ("one", "two")]
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert gzip.decompress(paths[0].read_bytes()) == b"1 1\n2 2\n"
    assert prepare.ready("x/a", tmp_path / "one") == tmp_path / "one"  # "nowhere" is not asked


def test_another_original_is_refused(small: bytes, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a\.txt: expected SHA-256 [0-9a-f]{64}, got [0-9a-f]{64}"):
        prepare.prepare("x/a", tmp_path, lambda file: small + b" ")
    assert list(tmp_path.iterdir()) == []


def test_another_result_is_refused(small: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(prepare.SOURCES, "x/a", prepare.SOURCES["x/a"]._replace(make=prepare.as_it_is))
    with pytest.raises(ValueError, match=r"x/a\.txt: expected SHA-256"):
        prepare.prepare("x/a", tmp_path, lambda file: small)
    assert list(tmp_path.rglob("*.gz")) == []


def test_the_files_that_tests_read_are_those_of_the_program(data_dir: Path) -> None:
    for source in prepare.SOURCES.values():
        for file, expected in source.made.items():
            assert sha(gzip.decompress((data_dir / f"{file}.gz").read_bytes())) == expected, file
