"""The models by name. A model is one file: config dataclass, `encode`, `item_vectors`, `loss`, `batches`."""

import dataclasses
from typing import Any, TypeVar

from fastcl.recsys.models.base import Model
from fastcl.recsys.models.bert4rec import BERT4Rec, BERT4RecConfig
from fastcl.recsys.models.clrec.config import CLRecConfig
from fastcl.recsys.models.clrec.model import CLRec
from fastcl.recsys.models.contrastvae.config import ContrastVAEConfig
from fastcl.recsys.models.contrastvae.model import ContrastVAE
from fastcl.recsys.models.lightgcn import LightGCN, LightGCNConfig
from fastcl.recsys.models.mf import MF, MFConfig
from fastcl.recsys.models.multi_clrec.config import MultiCLRecConfig
from fastcl.recsys.models.multi_clrec.model import MultiCLRec
from fastcl.recsys.models.sasrec import SASRec, SASRecConfig

# Any: a model is made as MODEL(items, seed=..., **options), and `options` are the fields of its own Config.
MODELS: dict[str, Any] = {
    model.name: model for model in (SASRec, CLRec, MultiCLRec, BERT4Rec, ContrastVAE, MF, LightGCN)
}

M = TypeVar("M", bound=type[Model])


def register(model: M) -> M:
    """Makes a model of your own known by its `name`: to `load` and, with `fastcl --use FILE`, to the commands.

    A class decorator. Training, metrics and recommendations from Python need no registration; a run folder holds no
    code, so loading one asks for it. Defining the class again (a notebook cell) replaces it.

    Raises TypeError for what is no model class with a name and a dataclass Config, ValueError for a name that is taken.

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
        raise ValueError(f"model: expected a name that is free, got {name!r}, which is {known.__qualname__}")
    MODELS[name] = model
    return model


__all__ = [
    "MF",
    "MODELS",
    "BERT4Rec",
    "BERT4RecConfig",
    "CLRec",
    "CLRecConfig",
    "ContrastVAE",
    "ContrastVAEConfig",
    "LightGCN",
    "LightGCNConfig",
    "MFConfig",
    "Model",
    "MultiCLRec",
    "MultiCLRecConfig",
    "SASRec",
    "SASRecConfig",
    "register",
]
