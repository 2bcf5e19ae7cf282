"""Tables of all models for the documentation: their sources, and the study of ContrastVAE's baselines.

From contrastvae.json and its manifest.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from benchmarks.common import markdown
from benchmarks.tables_studies import AMAZON, FOUR, Row, best_of_paper, study
from fastcl.recsys.reporting.tables import number
from fastcl.recsys.studies.manifest import runs
from fastcl.recsys.studies.summary import cell

ARXIV = "https://arxiv.org/abs/"


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
    "bert4rec": Source("Sun 2019", "1904.06690"),
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


TABLES: dict[str, Callable[[], str]] = {
    "models": listing,
    "models figures": figures,
    **{f"baselines {name}": partial(compared, name) for name in AMAZON},
}
