"""fastcl.recsys: sequential recommenders on top of the losses. Data in, models, training, metrics, recommendations out.

>>> from fastcl.recsys import SASRec, bundled, evaluate, fit, recommend
>>> split = bundled("purchases").split()
>>> model = SASRec(split.items, dim=64, seed=0)
>>> history = fit(model, split, epochs=10, out="runs/first")  # doctest: +SKIP
>>> evaluate(model, split.test, counts=split.counts)  # doctest: +SKIP
>>> recommend(model, [["BANANAS", "FLUID MILK WHITE ONLY"]], k=5)  # doctest: +SKIP
"""

from fastcl.recsys.checkpoint import load, save
from fastcl.recsys.compare import compare
from fastcl.recsys.data import (
    Cases,
    DataReport,
    Feature,
    Histories,
    Interactions,
    Items,
    LeakageWarning,
    Scorer,
    Split,
    SplitReport,
    bundled,
)
from fastcl.recsys.export import export, nearest
from fastcl.recsys.floors import CoOccurrence, PersonalFrequency, Popularity
from fastcl.recsys.groups import by_group
from fastcl.recsys.intents import intents
from fastcl.recsys.merging import merge
from fastcl.recsys.metrics import evaluate, rank_cases, top_k
from fastcl.recsys.models import (
    MODELS,
    BERT4Rec,
    BERT4RecConfig,
    CLRec,
    CLRecConfig,
    ContrastVAE,
    ContrastVAEConfig,
    Model,
    MultiCLRec,
    MultiCLRecConfig,
    SASRec,
    SASRecConfig,
    register,
)
from fastcl.recsys.plot import plot
from fastcl.recsys.recommend import query_vectors, recommend, recommend_users
from fastcl.recsys.robustness import robustness
from fastcl.recsys.scoring import frozen
from fastcl.recsys.train import fit, resume

__all__ = [
    "MODELS",
    "BERT4Rec",
    "BERT4RecConfig",
    "CLRec",
    "CLRecConfig",
    "Cases",
    "CoOccurrence",
    "ContrastVAE",
    "ContrastVAEConfig",
    "DataReport",
    "Feature",
    "Histories",
    "Interactions",
    "Items",
    "LeakageWarning",
    "Model",
    "MultiCLRec",
    "MultiCLRecConfig",
    "PersonalFrequency",
    "Popularity",
    "SASRec",
    "SASRecConfig",
    "Scorer",
    "Split",
    "SplitReport",
    "bundled",
    "by_group",
    "compare",
    "evaluate",
    "export",
    "fit",
    "frozen",
    "intents",
    "load",
    "merge",
    "nearest",
    "plot",
    "query_vectors",
    "rank_cases",
    "recommend",
    "recommend_users",
    "register",
    "resume",
    "robustness",
    "save",
    "top_k",
]
