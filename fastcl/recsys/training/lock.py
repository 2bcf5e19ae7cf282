"""A lock that allows one writer per run folder and ends with its process, however that ends. Readers need no lock.

On Windows and in file systems without locks, nothing keeps a second writer out.
"""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fastcl.recsys.training import processes
from fastcl.recsys.writing import PLAIN, try_lock

NAME = ".fastcl.lock"


class LockedError(OSError):
    """Another process is writing to the run folder."""


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Holds the lock on `folder`, which is made if missing and removed again if it stays empty.

    Of several processes that train one model, the first holds the lock for all. Raises LockedError, which names the
    process that holds it, where another process does.
    """
    if not processes.leads():
        yield
        return
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = _locked(folder)
        try:
            yield
        finally:
            if sys.platform == "win32":  # which removes no open file
                os.close(descriptor)
                (folder / NAME).unlink(missing_ok=True)
            else:
                try:
                    (folder / NAME).unlink(missing_ok=True)
                finally:
                    os.close(descriptor)
    finally:
        for place in made:
            try:
                place.rmdir()
            except OSError:
                break


def _locked(folder: Path) -> int:
    path = folder / NAME
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | PLAIN, 0o666)
        try:
            if try_lock(descriptor) is False:
                holder = os.read(descriptor, 20).decode("ascii", "replace").strip()
                who = f"process {holder}" if holder else "another process"
                advice = "wait for its end, or choose another folder"
                raise LockedError(errno.EBUSY, f"{who} is training in it; {advice}", str(folder))
            if os.fstat(descriptor).st_nlink:  # 0: the holder before removed the file on leaving, so it locks nothing
                os.truncate(descriptor, 0)
                os.write(descriptor, f"{os.getpid()}\n".encode())
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
