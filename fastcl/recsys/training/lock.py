"""One writer a run folder: a lock that ends with its process, however that ends. Readers need none."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fastcl.recsys.training import processes
from fastcl.recsys.writing import try_lock

NAME = ".fastcl.lock"


class LockedError(OSError):
    """Another process is writing to the run folder."""


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """The lock on `folder`, which is made if missing and removed again where nothing was put into it.

    Of several processes that train one model, the first holds it for all. Raises LockedError where another process
    has it, naming that process.
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
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        try:
            if try_lock(descriptor) is False:
                holder = os.read(descriptor, 20).decode("ascii", "replace").strip()
                who = f"process {holder}" if holder else "another process"
                advice = "wait for its end, or choose another folder"
                raise LockedError(errno.EBUSY, f"{who} is training in it; {advice}", str(folder))
            if os.fstat(descriptor).st_nlink:  # else its holder removed it on leaving, before the lock was ours
                os.truncate(descriptor, 0)
                os.write(descriptor, f"{os.getpid()}\n".encode())
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
