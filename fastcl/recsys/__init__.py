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
from fastcl.recsys.floors import CoOccurrence, PersonalFrequency, Popularity
from fastcl.recsys.metrics import evaluate, top_k
from fastcl.recsys.models import MODELS, CLRec, CLRecConfig, ContrastVAE, ContrastVAEConfig, SASRec, SASRecConfig
from fastcl.recsys.recommend import recommend
from fastcl.recsys.train import fit

__all__ = [
    "MODELS",
    "CLRec",
    "CLRecConfig",
    "Cases",
    "CoOccurrence",
    "ContrastVAE",
    "ContrastVAEConfig",
    "Feature",
    "Histories",
    "Interactions",
    "Items",
    "PersonalFrequency",
    "Popularity",
    "SASRec",
    "SASRecConfig",
    "Scorer",
    "Split",
    "bundled",
    "evaluate",
    "fit",
    "load",
    "recommend",
    "save",
    "top_k",
]
