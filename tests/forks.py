"""Child processes that cost no import of torch: forks of the test, which run one thread only."""

from __future__ import annotations

import os
import traceback
import warnings
from collections.abc import Callable


def forked(work: Callable[[], int | None]) -> int:
    """The id of a child that does `work` and ends with what it returns (None: 0), or with 1 and a traceback."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads that sleep in the parent
        child = os.fork()
    if child:
        return child
    code = 1
    try:
        code = work() or 0
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def ended(child: int) -> int:
    """Waits for the child: its exit code, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
