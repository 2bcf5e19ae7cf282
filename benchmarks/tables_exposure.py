"""Tables of the study on random exposures for the documentation, from exposure.json. Measures nothing."""

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from benchmarks import exposure
from benchmarks.common import markdown, results
from benchmarks.exposure_data import METRICS
from fastcl.recsys.studies.manifest import runs

Row = dict[str, Any]
MISSING = "missing"
FLOORS = ("popularity", "co-occurrence")
DIAL = tuple(f"CLRec, ids, log_q {alpha:g}" for alpha in exposure.ALPHAS)
NAMES = {
    "popularity": "floor: popularity",
    "co-occurrence": "floor: co-occurrence",
    "sampled softmax": "sampled softmax with log q",
    "IPW, popularity": "IPW, propensities from popularity",
    "IPW, learned": "IPW, learned propensities",
    DIAL[0]: "CLRec, queue of clicked ids",
    "CLRec, batch": "CLRec, negatives of the batch",
    "CLRec, vectors": "CLRec, queue of cached vectors",
    "CLRec, impressions": "CLRec, negatives drawn as items were shown",
}


def reported(feed: str) -> dict[str, Row]:
    return {row["method"]: row for row in results("exposure")["reported"] if row["feed"] == feed}


def cells(found: Row | None) -> Row:
    """The means of a method, and in brackets the difference from the full softmax with its standard error."""
    if found is None:
        return {"seeds": 0, **dict.fromkeys(METRICS, MISSING)}
    digits = {"recall@50": 4}
    shown: Row = {"seeds": "" if found["method"] in FLOORS else found["seeds"]}
    for metric in METRICS:
        value, d = found[metric], digits.get(metric, 3)
        by = f" ({value['difference']:+.{d}f} ± {value['standard error']:.{d}f})"
        shown[metric] = f"{value['mean']:.{d}f}" + ("" if found["method"] == exposure.BASE else by)
    return shown


def methods(feed: str) -> str:
    found = reported(feed)
    labels = [*FLOORS, *(label for label in exposure.METHODS if label not in DIAL[1:])]
    return markdown([{"": NAMES.get(label, label)} | cells(found.get(label)) for label in labels])


def dial() -> str:
    rows = []
    for alpha, label in zip(exposure.ALPHAS, DIAL, strict=True):
        row: Row = {"`log_q`": f"{alpha:g}"}
        for feed in exposure.FEEDS:
            found = cells(reported(feed).get(label))
            row |= {"seeds": found["seeds"]} | {f"{feed}: {metric}": found[metric] for metric in METRICS[:2]}
        rows.append(row)
    return markdown(rows)


def chosen() -> str:
    """The runs of the search: AUC and NDCG@5 among the random exposures of the choosing users."""
    done = {run["id"]: run for run in results("exposure")["runs"]}
    found = {(run["label"], run["options"]["temperature"]): done.get(run["id"]) for run in searched()}
    rows = []
    for label in exposure.METHODS:
        row: Row = {"": NAMES.get(label, label)}
        for temperature in exposure.TEMPERATURES:
            run = found.get((label, temperature))
            for metric in METRICS[:2]:
                value = MISSING if run is None else f"{run['choosing']['uniform'][metric]:.3f}"
                row[f"temperature {temperature:g}: {metric}"] = value
        rows.append(row)
    return markdown(rows)


def searched() -> Sequence[Row]:
    return list(runs({"runs": exposure.search()}))


def apart() -> str:
    """One setting changed at a time, beside the run that it is changed in."""
    done = {run["id"]: run for run in results("exposure")["runs"]}
    entries = dict(zip(exposure.APART, exposure.apart(), strict=True))
    first = exposure.TEMPERATURES[0]
    of = {"full softmax, one epoch": exposure.BASE, "CLRec, one epoch, 2560 negatives": DIAL[0]}
    kept = {name: exposure.entry(label, {"temperature": first}, exposure.EPOCHS, 0) for name, label in of.items()}
    rows = []
    for name, entry in (kept | entries).items():
        (run,) = runs({"runs": [entry]})
        row: Row = {"": name}
        for feed in exposure.FEEDS:
            for metric in METRICS[:2]:
                finished = done.get(run["id"])
                row[f"{feed}: {metric}"] = MISSING if finished is None else f"{finished['choosing'][feed][metric]:.3f}"
        rows.append(row)
    return markdown(rows)


def shifted() -> str:
    """What adding a multiple of the log share of the clicks at serving does to two trained models."""
    found = results("exposure")["shifted"]
    rows: list[Row] = []
    for label in dict.fromkeys(row["method"] for row in found):
        for feed in exposure.FEEDS:
            values = {f"{row['weight']:+g}": f"{row[feed]['AUC']:.3f}" for row in found if row["method"] == label}
            rows.append({"AUC": f"{NAMES.get(label, label)}, {feed}"} | values)
    return markdown(rows)


def tenths() -> str:
    rows = []
    for nth, row in enumerate(results("exposure")["tenths"], 1):
        shares = {f"share of the {name}": f"{row[key]:.1%}" for key, name in (("clicks", "train clicks"),
                  ("impressions", "feed's later impressions"))}  # fmt: skip
        rows.append({"tenth": nth, **shares, "click rate at random": f"{row['click rate']:.1%}"})
    return markdown(rows)


def spread() -> str:
    """The largest standard deviation over the seeds of a method's AUC among the random exposures."""
    seeds = [row["AUC"]["of seeds"] for row in reported("uniform").values()]
    return f"{max(statistics.stdev(values) for values in seeds if len(values) > 2):.4f}"


def users(feed: str) -> str:
    return f"{results('exposure')['users'][feed]['reporting']:,}"


TABLES: dict[str, Callable[[], str]] = {
    **{f"exposure {feed}": partial(methods, feed) for feed in exposure.FEEDS},
    "exposure dial": dial,
    "exposure search": chosen,
    "exposure apart": apart,
    "exposure shifted": shifted,
    "exposure tenths": tenths,
    "exposure spread": spread,
    "exposure users": partial(users, "uniform"),
}
