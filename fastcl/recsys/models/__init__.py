"""The models by name. A model is one file: config dataclass, `encode`, `scores`, `loss`, `batches`."""

from fastcl.recsys.models.base import Model
from fastcl.recsys.models.clrec import CLRec, CLRecConfig
from fastcl.recsys.models.contrastvae import ContrastVAE, ContrastVAEConfig
from fastcl.recsys.models.sasrec import SASRec, SASRecConfig

MODELS: dict[str, type[SASRec] | type[CLRec] | type[ContrastVAE]] = {
    model.name: model for model in (SASRec, CLRec, ContrastVAE)
}

__all__ = ["MODELS", "CLRec", "CLRecConfig", "ContrastVAE", "ContrastVAEConfig", "Model", "SASRec", "SASRecConfig"]
