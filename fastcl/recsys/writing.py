"""Writes files whole or not at all, one at a time or several that belong together, and never over an input.

A regular file is written beside its place under a temporary name and renamed. The writing process holds a lock on the
temporary file, so that a temporary file without a lock was left by a killed process; the next write into the folder
removes it. Where there are no locks, as on Windows, such a file stays. Devices and pipes are written into directly, and
links are followed.
"""

import errno
import os
import re
import secrets
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

if sys.platform != "win32":
    import fcntl

# For os.open: neither a link nor a pipe. Windows has neither flag.
PLAIN = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_OURS = re.compile(r"\.fastcl-[0-9a-f]{16}\.tmp")
_STREAM = re.compile(r"/(?:dev/(?P<name>stdout|stderr)|(?:dev|proc/self)/fd/(?P<number>\d+))")


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    write_parts(path, [data])


def write_parts(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Writes the parts back to back, so that the content need not fit in memory.

    Raises OSError that names `path` where its folder is missing or full, or where `path` is a folder or may not be
    written. Errors that the iterable raises pass through; nothing is written then.
    """
    place = _place(path)
    if _is_stream(place):
        with _naming(path):
            file = _opened(place)
        with _closing(file):
            _write(file, parts, path)
            with _naming(path):
                file.flush()
        return
    with ExitStack() as stack:
        staged = _staged(place, parts, path, stack)
        with _naming(path):
            os.replace(staged, place)


def write_set(folder: Path, files: Mapping[str, Iterable[bytes | memoryview]], without: Iterable[str] = ()) -> None:
    """Replaces several files of `folder` that belong together, and removes the files named in `without`. The folder is
    made if missing.

    The last of `files` marks the set as whole. All files are written under temporary names before the first is
    replaced, so that an error until then leaves the earlier set as it is. Then the earlier last file is removed first
    and the new one is put in place last: a set that has its last file is never a mixture, even after a kill.
    """
    with _naming(folder):
        folder.mkdir(parents=True, exist_ok=True)
    *_, last = files
    with ExitStack() as stack:
        places = {name: _place(folder / name) for name in files}
        staged = {name: _staged(places[name], parts, folder / name, stack) for name, parts in files.items()}
        with _naming(folder):
            for place in (places[last], *(folder / name for name in without)):
                place.unlink(missing_ok=True)
            for name, temporary in staged.items():
                os.replace(temporary, places[name])


def check_output(option: str, path: str | Path, inputs: Mapping[str, str | Path | None]) -> None:
    """OSError where `path` cannot be written, ValueError where writing would replace an input. Commands call it before
    any work. inputs: description -> path.
    """
    _check_no_input(option, path, inputs)
    place = _place(Path(path))
    if not _is_stream(place):
        _check_place(place, path)


def check_folder(
    option: str, path: str | Path, names: Iterable[str] = (), inputs: Mapping[str, str | Path | None] | None = None
) -> None:
    """OSError where `path` or a folder above it is a file, ValueError where writing `names` into the folder `path`
    would replace one of `inputs`. Commands call it before any work.
    """
    for name in names:
        _check_no_input(option, Path(path) / name, inputs or {})
    for folder in (Path(path), *Path(path).parents):
        if folder.is_dir():
            return
        if folder.exists() or folder.is_symlink():
            raise NotADirectoryError(errno.ENOTDIR, f"{option}: expected a folder, got a file", str(folder))


def sweep(folder: Path) -> None:
    """Removes temporary files that killed processes left in `folder`; files that are being written stay."""
    for name in os.listdir(folder):
        if is_left(name):
            _remove_if_left(folder / name)


def is_left(name: str) -> bool:
    """Whether `name` is the name of a temporary file of this module."""
    return _OURS.fullmatch(name) is not None


def _staged(place: Path, parts: Iterable[bytes | memoryview], path: Path, stack: ExitStack) -> Path:
    """A temporary file beside `place` with the content, locked until it is renamed or, when `stack` ends, removed."""
    _check_place(place, path)
    with _naming(path):
        sweep(place.parent)
        file, temporary = _new_file(place.parent)
    stack.callback(temporary.unlink, missing_ok=True)
    stack.enter_context(_closing(file))  # before that: Windows removes no open file
    _write(file, parts, path)
    with _naming(path):
        if place.exists():
            os.chmod(temporary, stat.S_IMODE(place.stat().st_mode))
        file.flush()
        os.fsync(file.fileno())
    if sys.platform == "win32":
        file.close()  # an open file has no other name given there
    return temporary


def _check_place(place: Path, path: str | Path) -> None:
    if place.is_dir():
        raise IsADirectoryError(errno.EISDIR, "expected a file to write, got a folder", str(path))
    if not place.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, f"there is no folder {place.parent} to write it into", str(path))
    if place.exists() and not (place.is_file() and os.access(place, os.W_OK)):
        raise PermissionError(errno.EACCES, "expected a file that may be written", str(path))


def _new_file(folder: Path) -> tuple[IO[bytes], Path]:
    while True:
        temporary = folder / f".fastcl-{secrets.token_hex(8)}.tmp"
        file = open(temporary, "xb")  # noqa: SIM115
        # st_nlink is 0 where another process's sweep removed the file before it was locked.
        if try_lock(file.fileno()) is not False and os.fstat(file.fileno()).st_nlink:
            return file, temporary
        file.close()
        temporary.unlink(missing_ok=True)


def try_lock(descriptor: int) -> bool | None:
    """Whether this process got the lock on an open file, held until the file is closed. None: no locks in the file
    system, or on Windows, which lets nobody read what is locked.
    """
    if sys.platform == "win32":
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        return None
    return True


def _remove_if_left(path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_RDWR | PLAIN)
    except OSError:
        return  # removed meanwhile, or not readable
    try:
        # Without locks one cannot know whether a process is still writing the file.
        if stat.S_ISREG(os.fstat(descriptor).st_mode) and try_lock(descriptor) is True:
            path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


@contextmanager
def _closing(file: IO[bytes]) -> Iterator[None]:
    """A block that closes `file` at its end. Closing flushes once more what an error has left in the buffer; a second
    error, which names no file, must not take the place of the first one.
    """
    try:
        yield
    except BaseException:
        with suppress(OSError):
            file.close()
        raise
    file.close()


def _write(file: IO[bytes], parts: Iterable[bytes | memoryview], path: Path) -> None:
    for part in parts:
        with _naming(path):
            file.write(part)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """A block whose system errors name `path` instead of a temporary file or no file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _place(path: str | Path) -> Path:
    """The place that `path` leads to. Links are followed, except those of a process's open streams (/dev/fd)."""
    text = os.path.abspath(path)
    for _ in range(40):
        if _STREAM.fullmatch(text) or text.startswith("/proc/") or not os.path.islink(text):
            return Path(text)
        text = os.path.abspath(os.path.join(os.path.realpath(os.path.dirname(text)), os.readlink(text)))
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))


def _is_stream(place: Path) -> bool:
    """Whether `place` is neither a file nor a folder (a pipe or device), so that it is written into directly."""
    other = place.exists() and not (place.is_file() or place.is_dir())
    return other or str(place).startswith("/proc/") or _STREAM.fullmatch(str(place)) is not None


def _opened(place: Path) -> IO[bytes]:
    found = _STREAM.fullmatch(str(place))
    if found is None:
        return os.fdopen(os.open(place, os.O_WRONLY), "wb")
    # Opening a file that is also stdout or stderr anew would overwrite it from its start.
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    return os.fdopen(os.dup(int(found["number"] or {"stdout": 1, "stderr": 2}[found["name"]])), "wb")


def _check_no_input(option: str, path: str | Path, inputs: Mapping[str, str | Path | None]) -> None:
    for what, source in inputs.items():
        if source is not None and _same(path, source):
            raise ValueError(f"{option}: expected another file than {what}, got {path}")


def _same(a: str | Path, b: str | Path) -> bool:
    try:
        return os.path.samefile(a, b) and stat.S_ISREG(os.stat(a).st_mode)
    except OSError:  # one of them does not exist
        return _place(a) == _place(b) and not _is_stream(_place(a))
