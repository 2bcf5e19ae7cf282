"""fastcl.recsys: sequential recommenders on top of the losses. Data in, models, training, metrics, recommendations out.

>>> from fastcl.recsys import SASRec, bundled, evaluate, fit, recommend
>>> split = bundled("purchases").split()
>>> model = SASRec(split.items, dim=64, seed=0)
>>> history = fit(model, split, epochs=10, out="runs/first")  # doctest: +SKIP
>>> evaluate(model, split.test, counts=split.counts)  # doctest: +SKIP
>>> recommend(model, [["BANANAS", "FLUID MILK WHITE ONLY"]], k=5)  # doctest: +SKIP
"""

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
from fastcl.recsys.data.growing import grown
from fastcl.recsys.data.later import Later, LaterReport, later
from fastcl.recsys.data.merging import merge
from fastcl.recsys.data.padded import Padded
from fastcl.recsys.data.preparing import prepare
from fastcl.recsys.data.scoring import frozen
from fastcl.recsys.evaluation.comparison import compare
from fastcl.recsys.evaluation.groups import by_group
from fastcl.recsys.evaluation.ranking import evaluate, rank_cases, top_k
from fastcl.recsys.evaluation.robustness import robustness
from fastcl.recsys.models import (
    MF,
    MODELS,
    BERT4Rec,
    BERT4RecConfig,
    CLRec,
    CLRecConfig,
    ContrastVAE,
    ContrastVAEConfig,
    CoOccurring,
    CoOccurringConfig,
    Frequent,
    FrequentConfig,
    LightGCN,
    LightGCNConfig,
    MFConfig,
    Model,
    MultiCLRec,
    MultiCLRecConfig,
    Popular,
    PopularConfig,
    SASRec,
    SASRecConfig,
    register,
)
from fastcl.recsys.models.carrying import with_items
from fastcl.recsys.models.floors import CoOccurrence, PersonalFrequency, Popularity
from fastcl.recsys.reporting.intents import intents
from fastcl.recsys.reporting.report import report
from fastcl.recsys.serving.batcher import Batcher
from fastcl.recsys.serving.index import ItemIndex, open_index
from fastcl.recsys.serving.recommend import query_vectors, recommend, recommend_users, similar
from fastcl.recsys.serving.vectors import export, nearest
from fastcl.recsys.studies.study import study
from fastcl.recsys.studies.tune import tune
from fastcl.recsys.training.checkpoint import load, save
from fastcl.recsys.training.fit import fit, resume
from fastcl.recsys.training.hooks import Epoch
from fastcl.recsys.training.trackers import log_to

__all__ = [
    "MF",
    "MODELS",
    "BERT4Rec",
    "BERT4RecConfig",
    "Batcher",
    "CLRec",
    "CLRecConfig",
    "Cases",
    "CoOccurrence",
    "CoOccurring",
    "CoOccurringConfig",
    "ContrastVAE",
    "ContrastVAEConfig",
    "DataReport",
    "Epoch",
    "Feature",
    "Frequent",
    "FrequentConfig",
    "Histories",
    "Interactions",
    "ItemIndex",
    "Items",
    "Later",
    "LaterReport",
    "LeakageWarning",
    "LightGCN",
    "LightGCNConfig",
    "MFConfig",
    "Model",
    "MultiCLRec",
    "MultiCLRecConfig",
    "Padded",
    "PersonalFrequency",
    "Popular",
    "PopularConfig",
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
    "grown",
    "intents",
    "later",
    "load",
    "log_to",
    "merge",
    "nearest",
    "open_index",
    "prepare",
    "query_vectors",
    "rank_cases",
    "recommend",
    "recommend_users",
    "register",
    "report",
    "resume",
    "robustness",
    "save",
    "similar",
    "study",
    "top_k",
    "tune",
    "with_items",
]
