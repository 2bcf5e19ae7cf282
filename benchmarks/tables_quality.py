"""Tables of how far the studies can be trusted: paired tests over users, what the runs cost, what was searched;
and what single ideas gave.

From paired.json, contrastvae.json, ideas.json and the manifests in studies/.
"""

import statistics
from collections.abc import Callable
from functools import partial

from benchmarks.common import markdown, results
from benchmarks.tables_studies import AMAZON, Row, study
from fastcl.recsys.evaluation.paired import stars
from fastcl.recsys.showing import number
from fastcl.recsys.studies.summary import cell as seeds_cell


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


def ideas(name: str) -> str:
    """One data set: validation figures of the best epoch, means over seeds with the standard deviation, the training as
    it is first and then the ideas by NDCG@20. The difference is that from the training as it is with the same seeds, in
    standard deviations of its seeds too.
    """
    found: dict[str, dict[int, Row]] = {}
    for row in results("ideas")["rows"]:
        if row["set"] == name:
            found.setdefault(row["idea"], {})[row["seed"]] = row
    base = {seed: row["valid"]["ndcg@20"] for seed, row in found["as it is"].items()}
    rows = []
    for idea, group in found.items():
        cells: Row = {"": idea, "seeds": str(len(group))}
        for metric, head in (("recall@20", "R@20"), ("ndcg@20", "N@20")):
            cells[head] = seeds_cell(metric, [row["valid"][metric] for row in group.values()], None)
        more = statistics.mean(row["valid"]["ndcg@20"] - base[seed] for seed, row in group.items())
        share = more / statistics.mean(base[seed] for seed in group)
        own = idea == "as it is"
        cells["N@20, difference"] = "" if own else f"{more:+.4f} ({share:+.1%})"
        cells["in standard deviations"] = "" if own else f"{more / statistics.stdev(base.values()):+.1f}"
        rows.append((not own, -more, cells))
    (epochs,) = {row["epochs planned"] for group in found.values() for row in group.values()}
    ordered = [cells for *_, cells in sorted(rows, key=lambda row: row[:2])]
    return f"{name}, {epochs} epochs:\n\n{markdown(ordered)}"


TABLES: dict[str, Callable[[], str]] = {
    **{f"paired {name}": partial(paired, name) for name in ("Office",)},
    "ideas Office": partial(ideas, "Office"),
    "quality costs": costs,
    "quality searched": searched,
}
