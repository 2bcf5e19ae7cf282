"""The streams of a command, and the line of text for an error. Knows nothing about single commands.

A stream that cannot be written must not end a training: reports that stderr does not take are dropped, and characters
that an encoding lacks are escaped. Only stdout, which holds the results, may end a command.
"""

import codecs
import io
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

FAULT = "this is a fault of fastcl{more}; `fastcl --debug ...` shows where"


class _Stream(io.FileIO):
    """stdout or stderr. Text that stderr does not take is dropped; errors of stdout name the stream."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            if self.fileno() == 2:
                return len(data)
            error.filename = "standard output"
            raise


def _escaped(error: UnicodeError) -> tuple[str, int]:
    """Writes a character that the encoding lacks as \\uXXXX, as JSON does, with a note on stderr the first time."""
    assert isinstance(error, UnicodeEncodeError)
    units = error.object[error.start : error.end].encode("utf-16-be", "surrogatepass")
    escaped = "".join(f"\\u{high:02x}{low:02x}" for high, low in zip(units[::2], units[1::2], strict=True))
    if error.encoding not in _noted:
        _noted.add(error.encoding)
        what = f"standard output is {error.encoding}; what that lacks is written as in JSON, {escaped} for one"
        print(f"fastcl: note: {what}. PYTHONIOENCODING=utf-8 changes it, files (-o) are UTF-8", file=sys.stderr)
    return escaped, error.end


_noted: set[str] = set()


@contextmanager
def streams() -> Iterator[None]:
    """For a process that runs the command alone: stdout and stderr, either of which may be closed, become streams that
    do not end a training.
    """
    codecs.register_error("fastcl", _escaped)
    before = sys.stdout, sys.stderr
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        try:
            os.fstat(number)
        except OSError:  # closed: its number must be taken, or a file opened later would receive our reports
            null = os.open(os.devnull, os.O_WRONLY)
            if null != number:
                os.dup2(null, number)
                os.close(null)
        buffered = io.BufferedWriter(_Stream(number, "w", closefd=False))
        errors = "fastcl" if number == 1 else "backslashreplace"
        own = io.TextIOWrapper(buffered, getattr(stream, "encoding", "utf-8"), errors)
        at_once = number == 2 or buffered.isatty() or getattr(stream, "write_through", False)  # python -u
        own.reconfigure(line_buffering=at_once)
        setattr(sys, name, own)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def flush_stdout() -> None:
    """The last flush of a command. Text that cannot be written is discarded after the error has been reported, since
    Python would try to write it again at the end of the process.
    """
    if sys.stdout.closed:  # a file of --use may have closed it
        return
    try:
        sys.stdout.flush()
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


def one_line(text: str) -> str:
    return " ".join(text.split())


def explain(error: BaseException, foreign: bool = False) -> str:
    """An error as one line that says what to do. foreign: whether the user's own code (--use) was running too."""
    text = one_line(str(error)) or type(error).__name__
    # For lack of memory torch raises RuntimeError, and TypeError where a size does not fit into 64 bits.
    of_size = isinstance(error, RuntimeError | OverflowError | TypeError) and _MEMORY.search(text)
    if of_size or isinstance(error, MemoryError):
        asked = re.search(r"allocate (\d+) bytes", text)
        size = f" ({int(asked[1]) / 2**30:,.1f} GiB at once)" if asked else ""
        return f"out of memory{size}; try a smaller dim or batch, a shorter max_len, or fewer --threads"
    # The text of a system error begins with its number, so the line is made of its parts.
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, ValueError | OSError | ImportError | FloatingPointError):
        return text
    if isinstance(error, TypeError) and re.match(r".*: expected .*, got ", text):
        return text
    fault = FAULT.format(more=" or of the file of --use" if foreign else "")
    return f"{type(error).__name__}: {text}: {fault}"


_MEMORY = re.compile(r"can't allocate|not enough memory|out of memory|bad_alloc|overflow", re.IGNORECASE)
