"""Tables of all models for the documentation: their sources, and the study of ContrastVAE's baselines.

From contrastvae.json and its manifest; S3-Rec from its authors' weights also from s3rec-published.json.
"""

from collections.abc import Callable, Mapping
from functools import partial
from statistics import fmean
from typing import Any, NamedTuple

from benchmarks.common import markdown, results
from benchmarks.tables_studies import AMAZON, FOUR, Row, best_of_paper, short, study
from fastcl.recsys.reporting.tables import number
from fastcl.recsys.studies.manifest import runs
from fastcl.recsys.studies.summary import cell

ARXIV = "https://arxiv.org/abs/"
EPOCHS = (1, 5, 20)  # whose losses the table of S3-Rec shows
DRAWN = ("hr@10", "ndcg@10")  # among 100 uniform negatives


class Source(NamedTuple):
    """text, arxiv: the paper. row: its name in ContrastVAE's table. ours: the labels of our runs in the study: by the
    loss of that table, and under the full softmax.
    """

    text: str
    arxiv: str
    row: str = ""
    ours: tuple[str, str] = ("", "")


SOURCES: Mapping[str, Source] = {
    "sasrec": Source("Kang 2018", "1808.09781", "SASRec", ("SASRec BCE", "SASRec softmax")),
    "bert4rec": Source("Sun 2019", "1904.06690", "BERT4Rec"),
    "clrec": Source("Zhou 2021", "2005.12964"),
    "multi_clrec": Source("Zhou 2021", "2005.12964"),
    "contrastvae": Source("Wang 2022", "2209.00456", "ContrastVAE VA", ("ContrastVAE VA+DA, BCE", "ContrastVAE VA+DA")),
    "mf": Source("Rendle 2009", "1205.2618", "BPR-MF", ("BPR-MF", "")),
    "lightgcn": Source("He 2020", "2002.02126", "LightGCN", ("LightGCN BPR", "")),
    "gru4rec": Source("Hidasi 2016", "1511.06939", "", ("GRU4Rec BCE", "GRU4Rec softmax")),
    "caser": Source("Tang 2018", "1809.07426", "", ("Caser BCE", "Caser softmax")),
    "stosa": Source("Fan 2022", "2201.06035", "STOSA", ("STOSA", "STOSA softmax")),
    "dt4sr": Source("Fan 2021", "2106.06165", "DT4SR", ("DT4SR", "DT4SR softmax")),
    "cl4srec": Source("Xie 2022", "2010.14395", "CL4SRec", ("CL4SRec BCE", "CL4SRec softmax")),
    "s3rec": Source("Zhou 2020", "2008.07873", "S3Rec", ("S3Rec, 10 passes", "S3Rec softmax, 10 passes")),
    "svae": Source("Sachdeva 2019", "1811.09975", "SVAE", ("", "SVAE")),
    "acvae": Source("Xie 2021", "2103.10693", "ACVAE", ("", "ACVAE")),
    "mind": Source("Li 2019", "1904.08030", "", ("MIND BCE", "MIND softmax")),
}


def linked(source: Source) -> str:
    return f"[{source.text}]({ARXIV}{source.arxiv})"


def listing() -> str:
    """Every model with its source, in a line."""
    return ", ".join(f"`{name}` ({linked(source)})" for name, source in SOURCES.items()) + "."


def figures(data: str = AMAZON["Office"]) -> str:
    """Every model with its source and recall@20 on one set: the paper's, and ours under two losses."""
    manifest, found = study("contrastvae")
    planned = {run["label"] for run in runs(manifest) if run["data"] == data}
    rows = []
    for name, source in SOURCES.items():
        paper = manifest["paper"][data].get(source.row)
        row: Row = {"model": f"`{name}`", "source": linked(source)}
        row["ContrastVAE's paper"] = number("recall@20", paper["recall@20"]) if paper else ""
        for head, label in zip(("ours, one negative", "ours, full softmax"), source.ours, strict=True):
            tests = [run["test"]["recall@20"] for run in found.get((data, label), [])]
            row[head] = cell("recall@20", tests, None) if label in planned else ""
        rows.append(row)
    return markdown(rows)


def compared(name: str) -> str:
    """One data set: every row of the paper's table but ContrastVAE's own, and below it our finished runs, bold if above
    all rows of the paper; below the table, the runs that are missing.
    """
    data = AMAZON[name]
    manifest, found = study("contrastvae")
    labels = dict.fromkeys(run["label"] for run in runs(manifest) if run["data"] == data)
    best = best_of_paper(data, list(FOUR))
    rows, missing = [], []
    for model, source in SOURCES.items():
        if model == "contrastvae":
            continue
        paper = manifest["paper"][data].get(source.row)
        if paper:
            rows.append({"": f"paper: {source.row}"} | {head: number(c, paper[c]) for c, head in FOUR.items()})
        of_model = {run["label"] for run in runs(manifest) if (run["data"], run["model"]) == (data, model)}
        for label in (label for label in labels if label in of_model):
            tests = [run["test"] for run in found.get((data, label), [])]
            if not tests:
                missing.append(label)
                continue
            rows.append({"": label} | {head: cell(c, [t[c] for t in tests], best[c]) for c, head in FOUR.items()})
    return markdown(rows) + ("\n\nMissing: " + "; ".join(missing) + "." if missing else "")


def checks() -> str:
    """Our rows of models with one negative beside RecBoard's, with the difference in percent of its mean."""
    manifest, found = study("contrastvae")
    rows = []
    for data, models in manifest["checks"].items():
        for name, theirs in models.items():
            for label in (name, f"{name}, RecBoard's settings"):
                if (data, label) in found:
                    of_ours = [run["test"] for run in found[data, label]]
                    row: Row = {"set": short(data), "ours": label, "seeds": len(of_ours)}
                    for metric, values in theirs.items():
                        ours, mean = fmean(test[metric] for test in of_ours), fmean(values)
                        head = FOUR[metric]
                        row |= {f"RecBoard, {head}": number(metric, mean), f"ours, {head}": number(metric, ours)}
                        row[f"difference, {head}"] = f"{100 * (ours / mean - 1):+.1f}%"
                    rows.append(row)
    return markdown(rows)


def published() -> str:
    """S3-Rec on each set, without and with pre-training: the authors' logs and ours, and its row of the paper's table.
    """
    manifest, found = study("contrastvae")
    rows = []
    for of in results("s3rec-published")["runs"]:
        logs, name_of_set = of["authors"], short(of["data"])
        named = {
            "authors' log, no pre-training": logs["0"],
            "ours, no pre-training": _drawn(found.get((of["data"], "S3Rec without pre-training"), [])),
            "authors' log, 150 passes": logs["150"],
            "ours, from the authors' weights after 150 passes": _drawn([of]),
            "ours, 10 passes": _drawn(found.get((of["data"], "S3Rec, 10 passes"), [])),
        }
        for name, run in named.items():
            if run:
                row = {"": f"{name_of_set}: {name}"}
                row |= {f"loss, epoch {n}": f"{run['loss'][n - 1]:.4f}" for n in EPOCHS}
                rows.append(row | _figures(run["test"]))
        row = {"": f"{name_of_set}: in ContrastVAE's paper"} | {f"loss, epoch {n}": "" for n in EPOCHS}
        rows.append(row | _figures(manifest["paper"][of["data"]]["S3Rec"]))
    return markdown(rows)


def _figures(test: Mapping[str, float]) -> dict[str, str]:
    of_all = {FOUR[metric]: metric for metric in ("recall@20", "ndcg@20")}
    heads = {f"{metric.upper()} of 100": metric for metric in DRAWN} | of_all
    return {head: number("recall@20", test[metric]) if metric in test else "" for head, metric in heads.items()}


def _drawn(runs: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The first of the runs in the form of the authors' logs; None without one that was measured so."""
    for run in runs:
        if "uniform100 hr@10" in run["test"]:
            test = run["test"] | {metric: run["test"][f"uniform100 {metric}"] for metric in DRAWN}
            return {"loss": [loss for loss, _ in run["curve"]], "test": test}
    return None


def pretraining() -> str:
    """S3-Rec's pre-training losses by our code, with our initial weights and with the authors' after 150 passes."""
    rows = []
    for of in results("s3rec-published")["runs"]:
        for weights, losses in of["pre-training"].items():
            name = f"{short(of['data'])}: {weights}"
            rows.append({"": name} | {part.replace("_", " "): f"{loss:,.2f}" for part, loss in losses.items()})
    return markdown(rows)


TABLES: dict[str, Callable[[], str]] = {
    "baselines checks": checks,
    "s3rec published": published,
    "s3rec pretraining": pretraining,
    "models": listing,
    "models figures": figures,
    **{f"baselines {name}": partial(compared, name) for name in AMAZON},
}
