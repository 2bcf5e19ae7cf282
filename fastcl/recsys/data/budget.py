"""A bound on the memory of the process, looked at while it works. Linux alone tells; elsewhere nothing is refused."""

from __future__ import annotations

import os

from fastcl.recsys.options import at_least

LEAST = 256  # megabytes


class Budget:
    """So many megabytes beside what the process has already."""

    def __init__(self, megabytes: int) -> None:
        at_least(LEAST, "memory", megabytes)
        self.bytes = megabytes << 20
        self._megabytes, self._before = megabytes, _private()

    def check(self, what: str) -> None:
        """ValueError where the process has taken more."""
        if _private() - self._before > self.bytes:
            why = f"{what}, which are in memory at once"
            raise ValueError(f"memory: expected more than {self._megabytes:,} megabytes for {why}")


def _private() -> int:
    """Bytes of the process that are in memory and not of files."""
    try:
        with open("/proc/self/statm", "rb") as file:
            _, resident, shared, *_ = map(int, file.read().split())
    except OSError:
        return 0
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")
