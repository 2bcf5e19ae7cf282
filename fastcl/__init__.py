"""fastcl: fused contrastive losses that never store the logits.

`import fastcl` gives the losses, the op under them and the negative queue, and needs torch alone; the recommenders live
in `fastcl.recsys` and are imported only when asked for.
"""

from importlib.metadata import version as _version

import fastcl._start  # noqa: F401  # isort: skip  before torch is loaded
import torch as _torch

if tuple(int(part) for part in _torch.__version__.split(".")[:2]) < (2, 11):
    raise ImportError(f"fastcl needs torch >= 2.11, found {_torch.__version__}")

from fastcl._build import config, set_isa, show_config
from fastcl.losses import (
    dcl,
    dclw,
    debiased_infonce,
    infonce,
    infonce_plus,
    mine,
    mine_plus,
    mises_fisher_weights,
)
from fastcl.momentum import momentum_update
from fastcl.negatives import Evicted, NegativeQueue
from fastcl.ops import contrast
from fastcl.ops_pairwise import softplus_sum
from fastcl.pairwise import bpr, jensen_shannon, negative_sampling, siglip, triplet
from fastcl.softmax import linear_cross_entropy, sampled_softmax
from fastcl.views import alignment, nt_xent, supcon, uniformity

__version__ = _version("fastcl")
__all__ = [
    "Evicted",
    "NegativeQueue",
    "alignment",
    "bpr",
    "config",
    "contrast",
    "dcl",
    "dclw",
    "debiased_infonce",
    "infonce",
    "infonce_plus",
    "jensen_shannon",
    "linear_cross_entropy",
    "mine",
    "mine_plus",
    "mises_fisher_weights",
    "momentum_update",
    "negative_sampling",
    "nt_xent",
    "sampled_softmax",
    "set_isa",
    "show_config",
    "siglip",
    "softplus_sum",
    "supcon",
    "triplet",
    "uniformity",
]
