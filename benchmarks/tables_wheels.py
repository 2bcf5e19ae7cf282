"""The table of where the wheels ran, from the results of building/try_wheels.py. Measures nothing."""

from collections.abc import Callable

from benchmarks.common import results
from building.try_wheels import table

TABLES: dict[str, Callable[[], str]] = {"wheels": lambda: table(results("wheels"))}
