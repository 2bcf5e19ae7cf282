"""Tables of the models' quality for the documentation: the studies of ContrastVAE, CLRec and MINE+, and the simulation.

From contrastvae.json, clrec.json and mineplus.json with their manifests in studies/, from contrastvae-analyses/ and
from debias.json; and what defaults reach, from defaults.json.
"""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import product
from typing import Any

from benchmarks import analyses, bench_debias, defaults
from benchmarks.common import RESULTS, markdown, results
from benchmarks.quality import HERE
from fastcl.recsys import MODELS
from fastcl.recsys.showing import number
from fastcl.recsys.studies.manifest import columns_of, runs
from fastcl.recsys.studies.summary import cell as seeds_cell

Row = dict[str, Any]

AMAZON = {
    "Beauty": "amazon/Beauty",
    "Office": "amazon/Office_Products",
    "Toys": "amazon/Toys_and_Games",
    "Tools": "amazon/Tools_and_Home_Improvement",
}
MEASURED = AMAZON | {"Sports": "amazon/Sports_and_Outdoors"}  # the paper has no figures for Sports
FOUR = {"recall@20": "R@20", "recall@40": "R@40", "ndcg@20": "N@20", "ndcg@40": "N@40"}
NO_KL, BEST = "ContrastVAE VA+DA, no KL", "ContrastVAE VA+DA, no KL, normalized"
BAR = "BSARec, by RecBoard"
OURS = ("ContrastVAE VA+DA", NO_KL, BEST, f"{BEST}, 80 epochs", "SASRec softmax", "SASRec softmax, normalized")
SHOWN = (
    *(label for label in OURS if label.startswith("ContrastVAE")),
    "ContrastVAE AVAE",
    *(label for label in OURS if label.startswith("SASRec")),
    "SASRec softmax, dropout 0.1, lr 0.002, 60 epochs",
    "SASRec BCE",
    "SASRec BCE, RecBoard's settings",
    "co-occurrence",
    "popularity",
)
CHANGED = {
    "ContrastVAE VA+DA": "ContrastVAE VA+DA",
    "ContrastVAE VA+DA, BCE": "binary cross-entropy in place of the full softmax",
    "ContrastVAE VA+DA, no contrast": "no contrast between the views",
    "ContrastVAE VA+DA, no KL": "no KL",
    "ContrastVAE AVAE": "one view (AVAE)",
}
# Data set -> (the row of the paper, the labels of our runs by the authors' rules).
RULES = {
    "Office": ("ContrastVAE VA", ("paper-code VA", "paper-code VA, 20 clicks (KL a fifth), patience 200")),
    "Beauty": ("ContrastVAE MA", ("paper-code MA, 120 epochs",)),
    "Toys": ("ContrastVAE AVAE", ("paper-code AVAE", "paper-code AVAE, 20 clicks (KL a fifth), 100 epochs")),
}


@cache
def study(paper: str) -> tuple[Row, dict[tuple[str, str], list[Row]]]:
    """The manifest, and (data, label) -> its finished runs, in the order of their seeds."""
    manifest = json.loads((HERE / "studies" / f"{paper}.json").read_text())
    done = {run["id"]: run for run in results(paper)["runs"]}
    found: dict[tuple[str, str], list[Row]] = {}
    for run in runs(manifest):
        if run["id"] in done:
            found.setdefault((run["data"], run["label"]), []).append(done[run["id"]])
    return manifest, found


def short(data: str) -> str:
    """amazon/Toys_and_Games -> Toys."""
    return data.split("/")[1].partition("_")[0]


def best_of_paper(data: str, columns: Sequence[str]) -> dict[str, float | None]:
    rows = study("contrastvae")[0]["paper"][data].values()
    return {name: max((row[name] for row in rows if name in row), default=None) for name in columns}


def contrastvae(name: str) -> str:
    """One data set: the best figures of the paper, the bar of another program, and means over our finished seeds; in
    bold if higher than the paper's.
    """
    data = MEASURED[name]
    best = best_of_paper(data, list(FOUR))
    head: Row = {"": "best of the paper's columns", "seeds": ""}
    published = {FOUR[c]: number(c, value) for c, value in best.items() if value is not None}
    rows = [head | published] if published else []
    bar = study("contrastvae")[0]["bars"].get(data)
    if bar:
        cells = {head: seeds_cell(c, bar[c], best[c]) if c in bar else "" for c, head in FOUR.items()}
        rows.append({"": BAR, "seeds": str(len(bar["ndcg@20"]))} | cells)
    return markdown(rows + _shown(data, FOUR, best))


def contrastvae_dense() -> str:
    """MovieLens: each published figure, and means over our finished seeds, in bold above all published ones."""
    data = "movielens/ml-1m"
    manifest = study("contrastvae")[0]
    columns = {name: f"{name[0].upper()}@{name.partition('@')[2]}" for name in columns_of(manifest, data)}
    rows = []
    for label, of in manifest["paper"][data].items():
        cells = {head: number(c, of[c]) if c in of else "" for c, head in columns.items()}
        rows.append({"": label, "seeds": ""} | cells)
    return markdown(rows + _shown(data, columns, best_of_paper(data, list(columns))))


def _shown(data: str, columns: Mapping[str, str], best: Mapping[str, float | None]) -> list[Row]:
    """Our rows of one data set. columns: metric -> head."""
    rows = []
    for label in SHOWN:
        found = study("contrastvae")[1].get((data, label))
        if found:
            cells = {head: seeds_cell(c, [run["test"][c] for run in found], best[c]) for c, head in columns.items()}
            rows.append({"": label, "seeds": str(len(found))} | cells)
    return rows


def contrastvae_bars() -> str:
    """Our runs above or below the bar of each set: differences of means over seeds, in percent of the bar, with the
    standard error of both means where there are several seeds.
    """
    manifest, found = study("contrastvae")
    rows = []
    for data, bar in manifest["bars"].items():
        ours = {label: found[data, label] for label in OURS if (data, label) in found}
        for label, group in (ours or {"not run": []}).items():
            row: Row = {"set": short(data), "ours": label, "seeds": len(group)}
            rows.append(row | {FOUR[c]: _apart([run["test"][c] for run in group], values) for c, values in bar.items()})
    return markdown(rows)


def _apart(ours: Sequence[float], bar: Sequence[float]) -> str:
    if not ours:
        return ""
    unit = statistics.mean(bar) / 100
    text = f"{(statistics.mean(ours) / unit - 100):+.1f}%"
    if len(ours) == 1:
        return text
    error = sum(statistics.variance(values) / len(values) for values in (ours, bar)) ** 0.5
    return f"{text} (standard error {error / unit:.1f}%)"


def contrastvae_changes() -> str:
    """ContrastVAE with one change at a time, seed 0."""
    rows = []
    for label, text in CHANGED.items():
        cells: Row = {"": text}
        for name in ("Office", "Beauty"):
            run = first(AMAZON[name], label)
            cells |= {f"{name} {head}": number(c, run["test"][c]) for c, head in FOUR.items()}
        rows.append(cells)
    return markdown(rows)


def first(data: str, label: str) -> Row:
    return study("contrastvae")[1][data, label][0]


def contrastvae_rules() -> str:
    """Our runs by the authors' rules, each below the paper's row."""
    rows = []
    for name, (theirs, ours) in RULES.items():
        paper = study("contrastvae")[0]["paper"][AMAZON[name]][theirs]
        head: Row = {"": f"{name}: paper, {theirs.removeprefix('ContrastVAE ')}"}
        head |= dict.fromkeys(("epochs", "best epoch", "CPU minutes"))
        rows.append(head | {FOUR[c]: number(c, paper[c]) for c in FOUR})
        for label in ours:
            run = first(AMAZON[name], label)
            cells = {"": f"{name}: ours, {label.removeprefix('paper-code ')}", "epochs": run["epochs"]}
            cells |= {"best epoch": run["best_epoch"], "CPU minutes": f"{run['cpu_s'] / 60:.0f}"}
            rows.append(cells | {head: number(c, run["test"][c]) for c, head in FOUR.items()})
    return markdown(rows)


def contrastvae_curves(every: int = 10, last: int = 120) -> str:
    """Validation NDCG@20 of the runs by the authors' rules: means over every other ten epochs."""
    rows = []
    for name, (_, labels) in RULES.items():
        for label in labels:
            curve = [value for _, value in first(AMAZON[name], label)["curve"]]
            parts = {f"{at + 1} to {at + every}": curve[at : at + every] for at in range(0, last, 2 * every)}
            cells: Row = {"run": f"{name}: {label.removeprefix('paper-code ')}"}
            rows.append(cells | {head: f"{statistics.mean(p):.4f}" if p else None for head, p in parts.items()})
    return markdown(rows)


def contrastvae_cost() -> str:
    """Epochs, CPU minutes and memory of the runs of VA+DA."""
    rows = []
    for name, data in AMAZON.items():
        found = study("contrastvae")[1][data, SHOWN[0]]
        minutes = [f"{run['cpu_s'] / 60:.0f}" for run in found]
        memory = max(run["peak_rss_mib"] for run in found)
        rows.append({"set": name, "epochs": found[0]["epochs"], "CPU minutes, each seed": ", ".join(minutes)})
        rows[-1] |= {"peak memory, MiB": memory}
    return markdown(rows)


def analysis(folder: str, nth: int | None) -> str:
    """Table `nth` of the analyses: 0 and 1 by group, 2 corruption, 3 posterior, 4 weight of the contrast; None: all."""
    numbers = json.loads((RESULTS / "contrastvae-analyses" / folder / "numbers.json").read_text())
    parts = analyses.tables(numbers).strip().split("\n\n")[1:]
    return "\n\n".join(parts) if nth is None else parts[nth]


def clrec(data: str) -> str:
    """One data set: the paper's rows, then ours, in bold if higher than the paper's CLRec."""
    manifest, found = study("clrec")
    columns = columns_of(manifest, data)
    paper = manifest["paper"][data]
    limit = paper.get("CLRec", {})
    rows = [
        {"": f"paper: {name}", "seeds": ""} | {c: number(c, row[c]) if c in row else "" for c in columns}
        for name, row in paper.items()
    ]
    for (where, label), group in found.items():
        if where == data:
            cells = {c: seeds_cell(c, [run["test"][c] for run in group], limit.get(c)) for c in columns}
            rows.append({"": label, "seeds": str(len(group))} | cells)
    return markdown([{head.replace("pop100 ", "pop100<br>"): text for head, text in row.items()} for row in rows])


def mineplus(data: str) -> str:
    """One data set: published rows, then ours: "missing" if no run has finished, bold if above all published ones. Runs
    on less than all of train are `curve`'s."""
    manifest, found = study("mineplus")
    columns = columns_of(manifest, data)
    paper = manifest["paper"][data]
    best = {c: max((row[c] for row in paper.values() if c in row), default=None) for c in columns}
    rows = [
        {"": f"published: {name}", "seeds": ""} | {c: number(c, row[c]) if c in row else "" for c in columns}
        for name, row in paper.items()
    ]
    labels = dict.fromkeys(run["label"] for run in runs(manifest) if run["data"] == data and run["split"] == "given")
    for label in labels:
        group = found.get((data, label), [])
        cells = {c: seeds_cell(c, [run["test"].get(c) for run in group], best[c]) for c in columns}
        rows.append({"": label, "seeds": str(len(group))} | cells)
    return markdown(rows)


def curve(data: str) -> str:
    """The runs that hold validation items out, by temperature, lam and, where one has it, decay: figures of validation
    and of test.
    """
    manifest, found = study("mineplus")
    held = {run["label"]: run for run in runs(manifest) if run["data"] == data and run["split"] == "held-out"}
    settings = ["temperature", "lam"] + ["decay"] * any("decay" in run["options"] for run in held.values())
    rows = []
    for run in sorted(held.values(), key=lambda run: [run["options"].get(name, 0.0) for name in settings]):
        parts = {"validation": "valid", "test": "test"}
        done = found.get((data, run["label"]), [])
        cells = {
            f"{part} {short}": seeds_cell(metric, [run[place][metric] for run in done], None)
            for part, place in parts.items()
            for short, metric in (("R@20", "recall@20"), ("N@20", "ndcg@20"))
        }
        rows.append({name: f"{run['options'].get(name, 0.0):g}" for name in settings} | cells)
    return markdown(rows)


def strangers() -> str:
    """Recall and NDCG of the test users with the vectors of training and as strangers, and the share that is left."""
    rows = []
    for row in results("strangers")["rows"]:
        for metric in ("recall@20", "ndcg@20"):
            known, folded = row["known"][metric], row["folded in"][metric]
            cells = {"in training": number(metric, known), "folded in": number(metric, folded)}
            rows.append({"": f"{row['label']}, {row['data']}: {metric}"} | cells | {"share": f"{folded / known:.0%}"})
    return markdown(rows)


def simulated(policy: str, names: Mapping[str, str]) -> str:
    """The table of bench_debias with the trained methods only, under clearer names."""
    made = bench_debias.table([r for r in results("debias")["measured"] if r["method"] in names], policy)
    head, rule, *lines = made.split("\n")
    cells = [line.removeprefix("| ").partition(" | ") for line in lines]
    return "\n".join([head, rule, *(f"| {names[label]} | {rest}" for label, _, rest in cells)])


METHODS = {
    "full softmax": "full softmax",
    "sampled softmax": "sampled softmax with log q",
    "IPW, known": "IPW, true propensities",
    "IPW, popularity": "IPW, propensities from popularity",
    "IPW, learned": "IPW, learned propensities",
    "CLRec, impressions": "CLRec, negatives drawn as items were shown",
    "CLRec, batch": "CLRec, negatives of the batch",
    "CLRec, queue of ids": "CLRec, queue of clicked ids",
    "CLRec, queue of vectors": "CLRec, queue of cached vectors",
    "Multi-CLRec": "Multi-CLRec",
    "Multi-CLRec, own clicks": "Multi-CLRec, intents with their own clicks alone",
}


def optima(policy: str) -> str:
    rows = [row for row in results("debias")["measured"] if row["policy"] == policy]
    return "\n".join(
        line
        for line in bench_debias.table(rows, policy).replace("| optimum: ", "| ").split("\n")
        if line.partition(" | ")[0].removeprefix("| ") not in METHODS
    )


def loop() -> str:
    return bench_debias.loop_table(results("debias")["looped"])


def by_default() -> str:
    """The test NDCG@10 of models with nothing set, of other settings and of the floors."""
    report = results("defaults")
    found = {(row["set"], row["model"], row["which"]): row for row in report["rows"]}
    others = {(name, model): row["test"]["ndcg@10"] for (name, model, which), row in found.items() if which == "tuned"}
    for model, label in (("sasrec", "SASRec softmax"), ("contrastvae", "ContrastVAE VA+DA")):
        others["Toys", model] = first(AMAZON["Toys"], label)["test"]["ndcg@10"]
    rows = []
    for name, model in product(defaults.SETS, defaults.SHOWN):
        row, other = found.get((name, model, "default")), others.get((name, model))
        known = report["floors"].get(name) or {each: first(AMAZON[name], each)["test"] for each in defaults.FLOORS}
        own = None if row is None else row["test"]["ndcg@10"]
        values = {each: known[each]["ndcg@10"] for each in defaults.FLOORS}
        constant = found.get((name, model, "constant rate"))
        values |= {"defaults": own, "at a constant rate": constant and constant["test"]["ndcg@10"]}
        values["other settings"] = other
        rows.append(
            {"data": name, "model": model}
            | {head: "not run" if value is None else number("ndcg@10", value) for head, value in values.items()}
            | {"defaults / other": f"{own / other:.2f}" if own and other else ""}
            | {"epochs": row["epochs"] if row else "", "best epoch": row["best epoch"] if row else ""}
        )
    return markdown(rows)


def by_default_all() -> str:
    """The test NDCG@10 of every model that was run with nothing set, and the epochs it took, on the small sets."""
    report = results("defaults")
    found = {(row["set"], row["model"]): row for row in report["rows"] if row["which"] == "default"}
    rows = []
    learning = [name for name, each in MODELS.items() if each.learns]
    run = [name for name in learning if any((data, name) in found for data in defaults.SMALL)]
    for model in run:
        cells = {data: found.get((data, model)) for data in defaults.SMALL}
        values = {data: number("ndcg@10", row["test"]["ndcg@10"]) if row else "not run" for data, row in cells.items()}
        epochs = {f"{data}, epochs": row["epochs"] if row else "" for data, row in cells.items()}
        rows.append({"model": model} | values | epochs)
    for name in defaults.FLOORS:
        values = {data: number("ndcg@10", report["floors"][data][name]["ndcg@10"]) for data in defaults.SMALL}
        rows.append({"model": name} | values | {f"{data}, epochs": "" for data in defaults.SMALL})
    missing = ", ".join(f"`{name}`" for name in learning if name not in run)
    return markdown(rows) + (f"\n\nNot run: {missing}." if missing else "")


TABLES: dict[str, Callable[[], str]] = {
    "defaults": by_default,
    "defaults of all": by_default_all,
    **{f"contrastvae {name}": partial(contrastvae, name) for name in MEASURED},
    "contrastvae ML-1M": contrastvae_dense,
    "contrastvae bars": contrastvae_bars,
    "contrastvae changes": contrastvae_changes,
    "contrastvae rules": contrastvae_rules,
    "contrastvae curves": contrastvae_curves,
    "contrastvae cost": contrastvae_cost,
    **{
        f"analysis {folder} {name}": partial(analysis, folder, nth)
        for folder, count in (("Office_Products", 5), ("Toys_and_Games", 4))
        for nth, name in enumerate(("frequency", "length", "robustness", "posterior", "weight")[:count])
    },
    "clrec Beauty": partial(clrec, "amazon/Beauty_bert4rec"),
    "clrec ML-1M": partial(clrec, "movielens/ml-1m"),
    "clrec purchases": partial(clrec, "bundled:purchases"),
    "clrec Toys": partial(clrec, "amazon/Toys_and_Games"),
    "mineplus strangers": strangers,
    "mineplus Gowalla": partial(mineplus, "gowalla"),
    "mineplus Yelp2018": partial(mineplus, "yelp2018"),
    "mineplus curve Gowalla": partial(curve, "gowalla"),
    "mineplus curve Yelp2018": partial(curve, "yelp2018"),
    **{f"debias {policy}": partial(simulated, policy, METHODS) for policy in ("popularity", "intents")},
    **{f"debias optima {policy}": partial(optima, policy) for policy in ("popularity", "intents")},
    "debias loop": loop,
}
