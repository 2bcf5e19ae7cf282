"""The table of models by name. A model is a config dataclass and a class with `encode`, `item_vectors`, `loss` and
`batches`.
"""

import dataclasses
import importlib
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, TypeVar

from fastcl.recsys.models.base import Model
from fastcl.recsys.models.bert4rec import BERT4Rec, BERT4RecConfig
from fastcl.recsys.models.clrec.config import CLRecConfig
from fastcl.recsys.models.clrec.model import CLRec
from fastcl.recsys.models.contrastvae.config import ContrastVAEConfig
from fastcl.recsys.models.contrastvae.model import ContrastVAE
from fastcl.recsys.models.counted import (
    CoOccurring,
    CoOccurringConfig,
    Frequent,
    FrequentConfig,
    Popular,
    PopularConfig,
)
from fastcl.recsys.models.lightgcn import LightGCN, LightGCNConfig
from fastcl.recsys.models.mf import MF, MFConfig
from fastcl.recsys.models.multi_clrec.config import MultiCLRecConfig
from fastcl.recsys.models.multi_clrec.model import MultiCLRec
from fastcl.recsys.models.sasrec import SASRec, SASRecConfig

# Models that are loaded when they are first asked for: name -> class, in BASELINES.
BASELINES = "fastcl.recsys.baselines"
LATER = {
    "gru4rec": "GRU4Rec",
    "caser": "Caser",
    "stosa": "STOSA",
    "dt4sr": "DT4SR",
    "cl4srec": "CL4SRec",
    "s3rec": "S3Rec",
    "svae": "SVAE",
    "acvae": "ACVAE",
    "mind": "MIND",
}


class Table(MutableMapping[str, Any]):
    """Models by name. Asking for a model of `LATER` imports it; asking for names does not."""

    def __init__(self, known: Mapping[str, Any]) -> None:
        self._known = dict(known)

    def __getitem__(self, name: str) -> Any:
        found = self._known[name]
        if isinstance(found, str):
            found = self._known[name] = getattr(importlib.import_module(BASELINES), found)
        return found

    def __setitem__(self, name: str, model: Any) -> None:
        self._known[name] = model

    def __delitem__(self, name: str) -> None:
        del self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, name: object) -> bool:
        return name in self._known


# The type is Any because MODEL(items, seed=..., **options) takes the fields of that model's own Config as options.
MODELS: MutableMapping[str, Any] = Table(
    {model.name: model for model in (SASRec, CLRec, MultiCLRec, BERT4Rec, ContrastVAE, MF, LightGCN)}
    | {model.name: model for model in (Popular, CoOccurring, Frequent)}
    | LATER
)

M = TypeVar("M", bound=type[Model])


def register(model: M) -> M:
    """A class decorator that makes a model of your own known by its `name` to `load` and, with `fastcl --use FILE`, to
    the commands.

    A run folder holds no code, so that loading one needs the registration; training, metrics and recommendations from
    Python do not. Defining the class again, as in a notebook cell, replaces it.

    Raises TypeError unless `model` is a subclass of Model with a name and a dataclass Config, ValueError for a name
    that another model has.

    >>> from fastcl.recsys import SASRec, register
    >>> @register
    ... class Shallow(SASRec):
    ...     name = "shallow"
    >>> MODELS.pop("shallow") is Shallow
    True
    """
    if not (isinstance(model, type) and issubclass(model, Model)):
        raise TypeError(f"model: expected a subclass of Model, got {model!r}")
    name, config = getattr(model, "name", None), getattr(model, "Config", None)
    if not (isinstance(name, str) and name and isinstance(config, type) and dataclasses.is_dataclass(config)):
        raise TypeError(f"model: expected a name and a dataclass Config in {model.__name__}, got {name!r}, {config!r}")
    known = MODELS.get(name, model)
    if (known.__module__, known.__qualname__) != (model.__module__, model.__qualname__):
        raise ValueError(f"model: expected a name that is free, got {name!r}, the name of {known.__qualname__}")
    MODELS[name] = model
    return model


__all__ = [
    "MF",
    "MODELS",
    "BERT4Rec",
    "BERT4RecConfig",
    "CLRec",
    "CLRecConfig",
    "CoOccurring",
    "CoOccurringConfig",
    "ContrastVAE",
    "ContrastVAEConfig",
    "Frequent",
    "FrequentConfig",
    "LightGCN",
    "LightGCNConfig",
    "MFConfig",
    "Model",
    "MultiCLRec",
    "MultiCLRecConfig",
    "Popular",
    "PopularConfig",
    "SASRec",
    "SASRecConfig",
    "register",
]
