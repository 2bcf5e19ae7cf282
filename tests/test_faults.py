"""TESTLIST.md and FAULTS.md against the tests: every test that they name exists, every fault that was found has one."""

import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
# A: wrong results and crashes; B: corners that users reach; C: small faults; N: found by new users; F: files and run
# folders; L: from public reports on losses. A number that is missing here turned out to be no fault.
FAULTS = {
    *(f"A{n}" for n in range(1, 8)),
    *(f"B{n}" for n in range(1, 20)),
    *(f"C{n}" for n in range(1, 10)),
    *(f"N{n}" for n in range(1, 18)),
    *(f"F{n}" for n in (*range(1, 21), *range(22, 28), 29, 30, 32, 33, 34)),
    *(f"L{n}" for n in (*range(1, 8), *range(9, 17))),
}


def _rows() -> dict[str, set[tuple[str, str]]]:
    lines = re.findall(r"^\| ([A-Z]\d+(?:, [A-Z]\d+)*) \|.*\|(.*)\|$", (FOLDER / "FAULTS.md").read_text(), re.M)
    rows: dict[str, set[tuple[str, str]]] = {}
    for names, tests in lines:
        for name in names.split(", "):
            rows.setdefault(name, set()).update(re.findall(r"`(test_\w+)\.(test_\w+)`", tests))
    return rows


@pytest.mark.parametrize("table", ["TESTLIST.md", "FAULTS.md"])
def test_every_named_test_exists(table: str) -> None:
    sources = {file.stem: file.read_text() for file in FOLDER.rglob("test_*.py")}
    named = set(re.findall(r"`(test_\w+)\.(test_\w+)`", (FOLDER / table).read_text()))
    assert len(named) > 60
    assert [f"{file}.{test}" for file, test in sorted(named) if f"def {test}(" not in sources.get(file, "")] == []


def test_every_fault_has_a_test() -> None:
    rows = _rows()
    assert sorted(FAULTS ^ rows.keys()) == []
    assert sorted(name for name, tests in rows.items() if not tests) == []
