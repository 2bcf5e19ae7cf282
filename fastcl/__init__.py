"""fastcl: fused contrastive losses that never store the logits.

`import fastcl` gives the losses, the op below them and the negative queue, and needs torch alone. The recommenders are
in `fastcl.recsys`, which is not imported with it.
"""

from importlib.metadata import version as _version

import fastcl._start  # noqa: F401  # isort: skip  before torch is loaded
import torch as _torch

if tuple(int(part) for part in _torch.__version__.split(".")[:2]) < (2, 11):
    raise ImportError(f"fastcl needs torch >= 2.11, found {_torch.__version__}")

from fastcl import nn as nn
from fastcl._build import config, set_isa, show_config
from fastcl.adjust import arcface, cosface
from fastcl.chunked import cached, token_chunks
from fastcl.cosines import psl_atan, psl_relu, psl_tanh
from fastcl.denominators import Denominators
from fastcl.family import over_rows
from fastcl.losses import mises_fisher_weights
from fastcl.mining import hard_negatives
from fastcl.momentum import momentum_update
from fastcl.negatives import Evicted, NegativeQueue
from fastcl.nested import matryoshka
from fastcl.ops import contrast
from fastcl.ops_pairwise import softplus_sum
from fastcl.positives import log_in, log_out, supcon_in, supcon_out
from fastcl.registry import LOSSES as _LOSSES
from fastcl.tokens import maxsim

# __init__.pyi writes out all public names for type checkers and editors.
globals().update({name: loss.function for name, loss in _LOSSES.items()})
__version__ = _version("fastcl")
__all__ = [
    "Denominators",
    "Evicted",
    "NegativeQueue",
    "arcface",
    "cached",
    "config",
    "contrast",
    "cosface",
    "hard_negatives",
    "log_in",
    "log_out",
    "matryoshka",
    "maxsim",
    "mises_fisher_weights",
    "momentum_update",
    "over_rows",
    "psl_atan",
    "psl_relu",
    "psl_tanh",
    "set_isa",
    "show_config",
    "softplus_sum",
    "supcon_in",
    "supcon_out",
    "token_chunks",
    *_LOSSES,
]
__all__.sort()
