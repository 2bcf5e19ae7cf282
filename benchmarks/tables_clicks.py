"""Tables of the study of clicks for the documentation, from clicks.json and clicks-paired.json. Measures nothing."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.clicks.paired import BASE, WAYS
from benchmarks.common import markdown, results
from fastcl.recsys.studies.manifest import Run, runs
from fastcl.recsys.studies.summary import cell

Row = dict[str, Any]
DATA = {"Toys": "amazon/Toys_and_Games", "Tools": "amazon/Tools_and_Home_Improvement", "Beauty": "amazon/Beauty"}
MANIFEST = Path(__file__).parent / "studies" / "clicks.json"
MISSING = "missing"


def labels(data: str) -> dict[str, list[Run | None]]:
    """The rows of a data set in the manifest's order, each with its runs; None for a run that is missing."""
    done = {run["id"]: run for run in results("clicks")["runs"]}
    found: dict[str, list[Run | None]] = {}
    for run in runs(json.loads(MANIFEST.read_text())):
        if run["data"] == data:
            found.setdefault(run["label"], []).append(done.get(run["id"]))
    return found


def column(finished: list[Run], metric: str) -> str:
    """Empty where the runs have no such metric."""
    return cell("auc", [run["test"].get(metric) for run in finished], None)


def methods(data: str) -> str:
    rows = []
    for label, found in labels(data).items():
        finished = [run for run in found if run is not None]
        row: Row = {"": label, "seeds": "" if label.startswith("floor") else len(finished)}
        heads = {"AUC": "AUC, all", "AUC, share": "share: AUC, all", "AUC, popular share": "popular share: AUC, all"}
        heads |= {"log loss": "log loss", "AUC, mixed interests": "AUC, mixed interests", "AUC, late": "AUC, late"}
        rows.append(row | {head: column(finished, metric) for head, metric in heads.items()})
    return markdown(rows)


def differences(data: str) -> str:
    """AUC of a method less that of CLRec by group of rows, of the methods that have every way of scoring."""
    found = [row for row in results("clicks-paired")["rows"] if row["data"] == data]
    several = [label for label in labels(data) if {row["way"] for row in found if row["method"] == label} == set(WAYS)]
    rows = []
    for label in several:
        for way in WAYS:
            mine = [row for row in found if (row["method"], row["way"]) == (label, way)]
            cells = {row["group"]: f"{row['difference']:+.4f} ± {row['standard error']:.4f}" for row in mine}
            if not label.startswith("floor"):
                rows.append({f"less {BASE}": f"{label}, {way}", "seeds": mine[0]["seeds"]} | cells)
    return markdown(rows) if rows else MISSING


def sizes() -> str:
    found = {(row["data"], row["group"]): row["rows"] for row in results("clicks-paired")["rows"]}
    names = list(dict.fromkeys(group for _, group in found))
    return markdown([{"": name} | {g: found.get((data, g), MISSING) for g in names} for name, data in DATA.items()])


TABLES: dict[str, Callable[[], str]] = {
    **{f"clicks {name}": partial(methods, data) for name, data in DATA.items()},
    **{f"clicks differences {name}": partial(differences, data) for name, data in DATA.items()},
    "clicks sizes": sizes,
}
