"""Opens a file as text in a given encoding. The first bytes, not the name, tell whether it is compressed. The file is
read once and in order, so it may be a pipe.
"""

from __future__ import annotations

import gzip
import importlib
import io
import lzma
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from fastcl.recsys.data.reading.header import say

_PACKED = {b"\x1f\x8b": ".gz", b"\xfd7zXZ\x00": ".xz", b"BZh": ".bz2", b"\x28\xb5\x2f\xfd": ".zst"}
# UTF-32 stands before UTF-16: its mark begins with that of UTF-16.
_MARKS = {
    b"\xff\xfe\x00\x00": "utf-32", b"\x00\x00\xfe\xff": "utf-32", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16",
}  # fmt: skip
_NO_TEXT = {
    b"PAR1": "a Parquet file", b"PK\x03\x04": "a zip archive or a spreadsheet", b"\x89HDF": "an HDF5 file",
    b"\x93NUM": "a NumPy file", b"SQLite f": "a database", b"ARRO": "an Arrow file", b"\x80\x04": "a pickle",
}  # fmt: skip


class _Ahead(io.RawIOBase):
    """A stream that gives its first bytes again after they were looked at, without seeking."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.start = self._left = stream.read(8)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._left[: len(buffer)] or self._stream.read1(len(buffer))
        self._left = self._left[len(data) :]
        buffer[: len(data)] = data
        return len(data)


@contextmanager
def open_text(path: Path, encoding: str) -> Iterator[tuple[Iterator[str], str]]:
    """The lines of a file with their line ends, and a note on its encoding. Undecodable bytes become U+DC80..U+DCFF."""
    packed = path.suffix.lower()
    try:
        with ExitStack() as stack:
            ahead = _Ahead(stack.enter_context(open(path, "rb")))
            packed = next((suffix for magic, suffix in _PACKED.items() if ahead.start.startswith(magic)), packed)
            stream = io.BufferedReader(ahead, 1 << 17)
            if packed in _PACKED.values():
                ahead = _Ahead(stack.enter_context(_unpacked(stream, packed, path)))
                stream = io.BufferedReader(ahead, 1 << 17)
            name = encoding.lower().replace("_", "-")
            _refuse_no_text(path, ahead.start, name)
            text = io.TextIOWrapper(stream, encoding, errors="surrogateescape", newline="")
            first = next(text, "")
            marked = first.startswith("\ufeff") or (name == "utf-8-sig" and ahead.start.startswith(b"\xef\xbb\xbf"))
            first = first.removeprefix("\ufeff")
            yield chain([first] * bool(first), text), encoding + " with a byte order mark" * marked
    except (OSError, lzma.LZMAError, zlib.error, EOFError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # an error of the system; gzip and bz2 raise errors without a number for data they cannot unpack
        raise ValueError(f"{path}: damaged or not a {packed} file ({error})") from error
    except UnicodeError as error:
        raise ValueError(f"{path}: cannot be read as {encoding} ({error})") from error


def _unpacked(stream: Any, packed: str, path: Path) -> Any:
    if packed == ".gz":
        return gzip.GzipFile(fileobj=stream)
    if packed == ".xz":
        return lzma.LZMAFile(stream)
    if packed == ".bz2":
        import bz2

        return bz2.BZ2File(stream)
    try:
        zstd: Any = importlib.import_module("compression.zstd")  # from Python 3.14 on
    except ImportError:
        message = "compressed with zstd, which Python reads from 3.14 on: unpack it (zstd -d)"
        raise ValueError(f"{path}: {message}") from None
    return zstd.ZstdFile(stream)


def _refuse_no_text(path: Path, start: bytes, encoding: str) -> None:
    """ValueError where no text in this encoding begins with these bytes."""
    for magic, what in _NO_TEXT.items():
        if start.startswith(magic):
            raise ValueError(f"{path}: looks like {what}, expected text: unpack or convert it, or pass a data frame")
    if encoding.startswith(("utf-16", "utf-32", "utf16", "utf32", "u16", "u32")):
        return
    for mark, name in _MARKS.items():
        if start.startswith(mark):
            shown = name.upper()
            raise ValueError(f"{path}: looks like {shown}, not {encoding.upper()}: name its {say('encoding', name)}")
    if start.count(0) > 1:  # a single zero byte makes only its row bad
        other = say("encoding", "utf-16-le")
        raise ValueError(f"{path}: holds zero bytes: is it no text, or of another encoding ({other}, perhaps)?")
