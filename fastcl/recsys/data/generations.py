"""Folders whose whole content is replaced at once: each content is a generation, a folder in the folder, and a manifest
names the one that counts. Writing to several at once, or being killed, leaves one whole generation or none.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fastcl.recsys.data.prepared import GENERATION, MANIFEST
from fastcl.recsys.writing import try_lock

_LOCK = "lock"


def check_free(out: Path, force: bool) -> None:
    """FileExistsError where `out` holds other things than data that may be replaced; NotADirectoryError for a file."""
    if out.exists() and not out.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "expected a folder, got a file", str(out))
    names = sorted(os.listdir(out)) if out.is_dir() else []
    other = [name for name in names if name != MANIFEST and not GENERATION.fullmatch(name)]
    if other:
        expected = f"expected an empty or a prepared folder, got one with {other[0]}"
        raise FileExistsError(errno.EEXIST, expected, str(out))
    if MANIFEST in names and not force:
        raise FileExistsError(errno.EEXIST, "holds prepared data; force (--force) replaces it", str(out))


@contextmanager
def generation(out: Path) -> Iterator[Path]:
    """A new folder for files in `out`. At the end that one is left which the manifest names, and what others write."""
    made = not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    place = out / f"data-{secrets.token_hex(8)}"
    place.mkdir()
    lock = open(place / _LOCK, "xb")  # noqa: SIM115  its lock lasts until it is closed
    try_lock(lock.fileno())
    _sweep(out)
    try:
        yield place
        lock.close()  # the manifest names the folder now
        (place / _LOCK).unlink()
    except BaseException:
        lock.close()  # Windows removes no open file
        shutil.rmtree(place, ignore_errors=True)
        if made:
            with suppress(OSError):
                out.rmdir()
        raise
    finally:
        lock.close()
    _sweep(out)


def _sweep(out: Path) -> None:
    """Removes the generations that nobody reads anew or writes."""
    with suppress(OSError):
        current = json.loads((out / MANIFEST).read_bytes())["folder"] if (out / MANIFEST).exists() else ""
        for name in os.listdir(out):
            if GENERATION.fullmatch(name) and name != current and not _written(out / name):
                shutil.rmtree(out / name, ignore_errors=True)


def _written(place: Path) -> bool:
    """Whether a process is writing to the generation: it holds the lock, or has not made it yet."""
    try:
        descriptor = os.open(place / _LOCK, os.O_RDWR)
    except FileNotFoundError:
        return not any(place.iterdir())
    try:
        return try_lock(descriptor) is not True
    finally:
        os.close(descriptor)
