"""fastcl: contrastive losses that cost no more than the matrix products inside them.

`import fastcl` gives the losses, the op under them and the negative queue, and needs torch alone; the recommenders live
in `fastcl.recsys` and are imported only when asked for.
"""

from importlib.metadata import version as _version

import torch as _torch

if tuple(int(part) for part in _torch.__version__.split(".")[:2]) < (2, 11):
    raise ImportError(f"fastcl needs torch >= 2.11, found {_torch.__version__}")

from fastcl._build import config, set_isa, show_config
from fastcl.losses import dcl, infonce, infonce_plus, mine, mine_plus
from fastcl.negatives import Evicted, NegativeQueue
from fastcl.ops import contrast

__version__ = _version("fastcl")
__all__ = [
    "Evicted",
    "NegativeQueue",
    "config",
    "contrast",
    "dcl",
    "infonce",
    "infonce_plus",
    "mine",
    "mine_plus",
    "set_isa",
    "show_config",
]
