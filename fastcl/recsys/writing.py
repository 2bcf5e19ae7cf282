"""Files written whole or not at all, one at a time or several that belong together, and never over what was read.

A regular file is written beside its place under a name of ours, which no user gives a file, and renamed. Whoever writes
such a file holds a lock on it, so that one without a lock is what a killed process left, and the next write into the
folder removes it. Devices and pipes are written into, links are followed.
"""

import errno
import fcntl
import os
import re
import secrets
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

_OURS = re.compile(r"\.fastcl-[0-9a-f]{16}\.tmp")
_STREAM = re.compile(r"/(?:dev/(?P<name>stdout|stderr)|(?:dev|proc/self)/fd/(?P<number>\d+))")


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    write_parts(path, [data])


def write_parts(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """The parts back to back, for content that need not fit in memory.

    Raises OSError with `path` as its file: where the folder is missing or full, where a folder or what may not be
    written is in its place. What the parts themselves raise passes through; then nothing is written.
    """
    place = _place(path)
    if _is_stream(place):
        with _naming(path):
            file = _opened(place)
        with file:
            _write(file, parts, path)
            with _naming(path):
                file.flush()
        return
    with ExitStack() as stack:
        staged = _staged(place, parts, path, stack)
        with _naming(path):
            os.replace(staged, place)


def write_set(folder: Path, files: Mapping[str, Iterable[bytes | memoryview]], without: Iterable[str] = ()) -> None:
    """Replaces several files of `folder`, made if missing, that belong together, and removes those called `without`.

    The last of `files` says that the set is whole. All of them are written before the first one is replaced: what fails
    until then leaves the earlier set as it is. Then the earlier last one goes first and the new one comes last, so that
    a set with its last file is never a mixture, whenever the process is killed.
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
    """Refuses to write to `path`, before any work, where that cannot be done or would replace one of `inputs`, which
    are named by what they are: ValueError or OSError.
    """
    _check_no_input(option, path, inputs)
    place = _place(Path(path))
    if not _is_stream(place):
        _check_place(place, path)


def check_folder(
    option: str, path: str | Path, names: Iterable[str] = (), inputs: Mapping[str, str | Path | None] | None = None
) -> None:
    """Refuses a folder to write into, before any work, where a file is in its place or in that of one above it, or
    where a file of these `names` in it is one of `inputs`, which would be replaced: OSError or ValueError.
    """
    for name in names:
        _check_no_input(option, Path(path) / name, inputs or {})
    for folder in (Path(path), *Path(path).parents):
        if folder.is_dir():
            return
        if folder.exists() or folder.is_symlink():
            raise NotADirectoryError(errno.ENOTDIR, f"{option}: expected a folder, got a file", str(folder))


def sweep(folder: Path) -> None:
    """Removes what processes that were killed while writing left in `folder`; what others are writing stays."""
    for name in os.listdir(folder):
        if is_left(name):
            _remove_if_left(folder / name)


def is_left(name: str) -> bool:
    """Whether a file of this name is one that was, or is being, written by this module under another name."""
    return _OURS.fullmatch(name) is not None


def _staged(place: Path, parts: Iterable[bytes | memoryview], path: Path, stack: ExitStack) -> Path:
    """A file beside `place` with the content, locked until it has its name or is removed, when `stack` ends."""
    _check_place(place, path)
    with _naming(path):
        sweep(place.parent)
        file, temporary = _new_file(place.parent)
    stack.callback(file.close)
    stack.callback(temporary.unlink, missing_ok=True)
    _write(file, parts, path)
    with _naming(path):
        if place.exists():
            os.fchmod(file.fileno(), stat.S_IMODE(place.stat().st_mode))
        file.flush()
        os.fsync(file.fileno())
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
        # No name any more: a sweep came before the lock.
        if try_lock(file.fileno()) is not False and os.fstat(file.fileno()).st_nlink:
            return file, temporary
        file.close()
        temporary.unlink(missing_ok=True)


def try_lock(descriptor: int) -> bool | None:
    """Whether the lock on an open file is ours; held until it is closed. None where the file system has no locks."""
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
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return  # gone meanwhile, or another user's
    try:
        # Where there are no locks, nobody knows whether its writer is still at work.
        if stat.S_ISREG(os.fstat(descriptor).st_mode) and try_lock(descriptor) is True:
            path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def _write(file: IO[bytes], parts: Iterable[bytes | memoryview], path: Path) -> None:
    for part in parts:
        with _naming(path):
            file.write(part)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Errors of the system name `path` instead of a temporary file, or of none."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _place(path: str | Path) -> Path:
    """Where `path` leads to, links followed, as far as an open stream of a process, whose links lead elsewhere."""
    text = os.path.abspath(path)
    for _ in range(40):
        if _STREAM.fullmatch(text) or text.startswith("/proc/") or not os.path.islink(text):
            return Path(text)
        text = os.path.abspath(os.path.join(os.path.realpath(os.path.dirname(text)), os.readlink(text)))
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))


def _is_stream(place: Path) -> bool:
    """Whether `place` is to be written into, as it is neither a file nor a folder."""
    other = place.exists() and not (place.is_file() or place.is_dir())
    return other or str(place).startswith("/proc/") or _STREAM.fullmatch(str(place)) is not None


def _opened(place: Path) -> IO[bytes]:
    found = _STREAM.fullmatch(str(place))
    if found is None:
        return os.fdopen(os.open(place, os.O_WRONLY), "wb")
    # Opened anew, a file that stdout leads to would be written from its start once more.
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
    except OSError:
        return False
