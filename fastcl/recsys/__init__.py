"""fastcl.recsys: sequential recommenders on top of the losses. Data in, models, training, metrics, recommendations out.

>>> from fastcl.recsys import SASRec, bundled, evaluate, fit, recommend
>>> split = bundled("movies").split()
>>> model = SASRec(split.items, dim=64, seed=0)
>>> history = fit(model, split, epochs=10, out="runs/first")  # doctest: +SKIP
>>> evaluate(model, split.test, counts=split.counts)  # doctest: +SKIP
>>> recommend(model, [["318", "296"]], k=5)  # doctest: +SKIP
"""

from fastcl.recsys.checkpoint import load, save
from fastcl.recsys.data import Cases, Feature, Histories, Interactions, Items, Scorer, Split, bundled
from fastcl.recsys.export import export
from fastcl.recsys.floors import CoOccurrence, PersonalFrequency, Popularity
from fastcl.recsys.metrics import evaluate, top_k
from fastcl.recsys.models import (
    MODELS,
    BERT4Rec,
    BERT4RecConfig,
    CLRec,
    CLRecConfig,
    Model,
    SASRec,
    SASRecConfig,
    register,
)
from fastcl.recsys.recommend import query_vectors, recommend, recommend_users
from fastcl.recsys.train import fit

__all__ = [
    "MODELS",
    "BERT4Rec",
    "BERT4RecConfig",
    "CLRec",
    "CLRecConfig",
    "Cases",
    "CoOccurrence",
    "Feature",
    "Histories",
    "Interactions",
    "Items",
    "Model",
    "PersonalFrequency",
    "Popularity",
    "SASRec",
    "SASRecConfig",
    "Scorer",
    "Split",
    "bundled",
    "evaluate",
    "export",
    "fit",
    "load",
    "query_vectors",
    "recommend",
    "recommend_users",
    "register",
    "save",
    "top_k",
]
