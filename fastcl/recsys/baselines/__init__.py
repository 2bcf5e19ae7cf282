"""The sequence models that the papers of ContrastVAE and CLRec compare with, one file each, on the batches, layers and
losses of the other models.

`fastcl.recsys` does not load this package; the table of models does when one of the names is asked for.

>>> from fastcl.recsys.baselines import STOSA
>>> from fastcl.recsys import MODELS
>>> MODELS["stosa"] is STOSA
True
"""

from fastcl.recsys.baselines.acvae import ACVAE, ACVAEConfig
from fastcl.recsys.baselines.caser import Caser, CaserConfig
from fastcl.recsys.baselines.cl4srec import CL4SRec, CL4SRecConfig
from fastcl.recsys.baselines.dt4sr import DT4SR, DT4SRConfig
from fastcl.recsys.baselines.gru4rec import GRU4Rec, GRU4RecConfig
from fastcl.recsys.baselines.mind import MIND, MINDConfig
from fastcl.recsys.baselines.s3rec import S3Rec, S3RecConfig
from fastcl.recsys.baselines.stosa import STOSA, STOSAConfig
from fastcl.recsys.baselines.svae import SVAE, SVAEConfig

__all__ = [
    "ACVAE",
    "DT4SR",
    "MIND",
    "STOSA",
    "SVAE",
    "ACVAEConfig",
    "CL4SRec",
    "CL4SRecConfig",
    "Caser",
    "CaserConfig",
    "DT4SRConfig",
    "GRU4Rec",
    "GRU4RecConfig",
    "MINDConfig",
    "S3Rec",
    "S3RecConfig",
    "STOSAConfig",
    "SVAEConfig",
]
