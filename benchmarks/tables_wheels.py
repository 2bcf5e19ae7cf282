"""The tables of where the wheels ran (building/try_wheels.py), of the loops for 64-bit ARM (arm_loops.py), of compilers
(bench_compilers.py) and of imports (bench_import.py), from their results. Measures nothing.
"""

from collections.abc import Callable

from benchmarks import arm_loops
from benchmarks.common import markdown, results
from building.try_wheels import table


def compilers() -> str:
    """Times of each compiler's kernels, and their ratios to the first one's."""
    return markdown(results("compilers")["rows"])


def imports() -> str:
    rows = results("import")["rows"]
    return markdown([{"import": row["import"], "ms": f"{row['ms']:.0f}"} | {
        "beyond torch, ms": f"{row['beyond torch, ms']:.0f}"} for row in rows[1:]])  # fmt: skip


TABLES: dict[str, Callable[[], str]] = {
    "wheels": lambda: table(results("wheels")),
    "compilers": compilers,
    "imports": imports,
    "import target": lambda: "met" if results("import")["met"] else "not met",
    "arm loops": lambda: arm_loops.table(results("arm-loops")["rows"]),
}
