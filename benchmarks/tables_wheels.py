"""The tables of where the wheels ran (building/try_wheels.py) and of the loops for 64-bit ARM (arm_loops.py), from
their results. Measures nothing.
"""

from collections.abc import Callable

from benchmarks import arm_loops
from benchmarks.common import results
from building.try_wheels import table

TABLES: dict[str, Callable[[], str]] = {
    "wheels": lambda: table(results("wheels")),
    "arm loops": lambda: arm_loops.table(results("arm-loops")["rows"]),
}
