"""Tables of how far the studies can be trusted: paired tests over users, what the runs cost, what was searched.

From paired.json, contrastvae.json and the manifests in studies/.
"""

import statistics
from collections.abc import Callable
from functools import partial

from benchmarks.common import markdown, results
from benchmarks.tables_studies import AMAZON, Row, study
from fastcl.recsys.evaluation.paired import stars
from fastcl.recsys.showing import number


def paired(name: str) -> str:
    """One data set: what each model has more than the one it is tested against, the best first."""
    found = results("paired").get(AMAZON[name])
    if found is None:
        return "No runs with saved weights have been tested."
    tests = {(test["label"], test["metric"]): test for test in found["tests"]}
    rows = []
    for label in sorted(found["models"], key=lambda label: -found["models"][label]["ndcg@20"]):
        of = found["models"][label]
        cells: Row = {"": label, "seeds": str(of["seeds"])}
        for metric, head in (("recall@20", "R@20"), ("ndcg@20", "N@20")):
            cells[head] = number(metric, of[metric])
            test = tests.get((label, metric))
            cells[f"{head}, difference"] = _difference(test) if test else ""
        rows.append(cells)
    said = f"{found['users']:,} users; differences from {found['against']}, ± half of their 95% interval."
    return f"{said}\n\n{markdown(rows)}"


def _difference(test: Row) -> str:
    half = (test["high"] - test["low"]) / 2
    return f"{test['difference']:+.4f} ± {half:.4f}" + stars(test["p holm"]).replace("*", r"\*")


def costs() -> str:
    """What each run of the sequence models took, by data set: epochs and CPU minutes, means over the seeds."""
    found = study("contrastvae")[1]
    rows = []
    for label in dict.fromkeys(label for _, label in found):
        cells: Row = {"": label}
        for name, data in AMAZON.items():
            group = [run for run in found.get((data, label), []) if "cpu_s" in run]
            minutes = statistics.mean(run["cpu_s"] for run in group) / 60 if group else 0.0
            cells[name] = f"{minutes:.0f} ({statistics.mean(run['epochs'] for run in group):.0f})" if group else ""
        if any(cells[name] for name in AMAZON):
            rows.append(cells)
    return markdown(rows)


def searched() -> str:
    """What was searched in each study, in the words of the manifests."""
    parts = []
    for paper, title in (("contrastvae", "ContrastVAE"), ("clrec", "CLRec"), ("mineplus", "MINE+")):
        lines = [f"- {about}: {text}" for about, text in study(paper)[0]["search"].items()]
        parts.append("\n".join([f"**{title}**", "", *lines]))
    return "\n\n".join(parts)


TABLES: dict[str, Callable[[], str]] = {
    **{f"paired {name}": partial(paired, name) for name in ("Office",)},
    "quality costs": costs,
    "quality searched": searched,
}
