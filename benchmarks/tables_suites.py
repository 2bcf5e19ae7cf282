"""The tables of other packages' own tests with the adapters in the losses' place (peer_suites.py). Measures nothing."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from benchmarks.common import markdown, results
from benchmarks.peer_suites import DIFFERENCES


class Failed(NamedTuple):
    name: str  # a key of DIFFERENCES
    package: str
    test: str
    own: str  # how it ends with the package's own classes


def _failed() -> Iterator[Failed]:
    for name, row in results("peer-suites").items():
        for file in row["files"].values():
            yield from (Failed(name, row["package"], test, own) for test, own in file["failed"].items())


def counts() -> str:
    rows: list[dict[str, Any]] = []
    for name, row in results("peer-suites").items():
        passed, skipped = (sum(file[word] for file in row["files"].values()) for word in ("passed", "skipped"))
        own = [each.own for each in _failed() if each.name == name]
        rows.append({
            "package": f"{row['package']} {row['version']}, commit {row['commit']}", "torch": row["torch"],
            "tests": ", ".join(f"`{file}`" for file in row["files"]), "pass": passed,
            "fail with the adapters alone": len(own) - own.count("failed"),
            "fail with the own classes, too": own.count("failed"), "skipped": skipped,
        })  # fmt: skip
    return markdown(rows)


def differences() -> str:
    """The tests that only the adapters fail, by reason."""
    by_reason: dict[tuple[str, str], list[str]] = {}
    for name, package, test, own in _failed():
        if own != "failed":
            by_reason.setdefault((package, DIFFERENCES[name][test.partition("[")[0]]), []).append(f"`{test}`")
    rows = [{"package": package, "test": ", ".join(tests), "why": why} for (package, why), tests in by_reason.items()]
    return markdown(rows)


def failures() -> str:
    """The tests that the package's own classes fail, too."""
    return ", ".join(f"`{each.test}` of {each.package}" for each in _failed() if each.own == "failed") or "none"


TABLES: dict[str, Callable[[], str]] = {
    "suites": counts,
    "suite differences": differences,
    "suite failures": failures,
}
