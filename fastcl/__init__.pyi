# Written by tests/stubs.py (make stubs) from the registry of the losses.

import collections.abc

import torch

import fastcl.segments
from fastcl import nn as nn
from fastcl._build import config as config
from fastcl._build import set_isa as set_isa
from fastcl._build import show_config as show_config
from fastcl.adjust import arcface as arcface
from fastcl.adjust import cosface as cosface
from fastcl.buckets import sce as sce
from fastcl.chunked import cached as cached
from fastcl.chunked import token_chunks as token_chunks
from fastcl.cosines import ccl as ccl
from fastcl.cosines import psl as psl
from fastcl.cosines import psl_atan as psl_atan
from fastcl.cosines import psl_relu as psl_relu
from fastcl.cosines import psl_tanh as psl_tanh
from fastcl.denominators import Denominators as Denominators
from fastcl.denominators import sogclr as sogclr
from fastcl.directions import directional_infonce as directional_infonce
from fastcl.family import over_rows as over_rows
from fastcl.losses import mises_fisher_weights as mises_fisher_weights
from fastcl.mining import hard_negatives as hard_negatives
from fastcl.momentum import momentum_update as momentum_update
from fastcl.negatives import Evicted as Evicted
from fastcl.negatives import NegativeQueue as NegativeQueue
from fastcl.nested import matryoshka as matryoshka
from fastcl.ops import contrast as contrast
from fastcl.ops_pairwise import softplus_sum as softplus_sum
from fastcl.pairwise import bpr as bpr
from fastcl.pairwise import gbce as gbce
from fastcl.pairwise import jensen_shannon as jensen_shannon
from fastcl.pairwise import negative_sampling as negative_sampling
from fastcl.pairwise import siglip as siglip
from fastcl.pairwise import triplet as triplet
from fastcl.positives import log_in as log_in
from fastcl.positives import log_out as log_out
from fastcl.positives import multi_positive as multi_positive
from fastcl.positives import supcon_in as supcon_in
from fastcl.positives import supcon_out as supcon_out
from fastcl.soft import distill_kl as distill_kl
from fastcl.soft import margin_mse as margin_mse
from fastcl.soft import soft_cross_entropy as soft_cross_entropy
from fastcl.softmax import linear_cross_entropy as linear_cross_entropy
from fastcl.softmax import sampled_softmax as sampled_softmax
from fastcl.tokens import maxsim as maxsim
from fastcl.views import alignment as alignment
from fastcl.views import directau as directau
from fastcl.views import nt_xent as nt_xent
from fastcl.views import supcon as supcon
from fastcl.views import uniformity as uniformity

__version__: str
__all__ = [
    "Denominators",
    "Evicted",
    "NegativeQueue",
    "alignment",
    "arcface",
    "bpr",
    "bsl",
    "cached",
    "ccl",
    "config",
    "contrast",
    "cosface",
    "dcl",
    "dclw",
    "debiased_infonce",
    "directau",
    "directional_infonce",
    "distill_kl",
    "gbce",
    "hard_negatives",
    "infonce",
    "infonce_plus",
    "jensen_shannon",
    "linear_cross_entropy",
    "log_in",
    "log_out",
    "margin_mse",
    "matryoshka",
    "maxsim",
    "mine",
    "mine_plus",
    "mises_fisher_weights",
    "momentum_update",
    "multi_positive",
    "negative_sampling",
    "nt_xent",
    "over_rows",
    "psl",
    "psl_atan",
    "psl_relu",
    "psl_tanh",
    "sampled_softmax",
    "sce",
    "set_isa",
    "show_config",
    "siglip",
    "sl_at_k",
    "soft_cross_entropy",
    "softplus_sum",
    "sogclr",
    "supcon",
    "supcon_in",
    "supcon_out",
    "token_chunks",
    "triplet",
    "uniformity",
]

def bsl(
    query: torch.Tensor,
    positive_key: torch.Tensor,
    negative_keys: torch.Tensor | None = None,
    temperature: float | torch.Tensor = 0.1,
    reduction: str = 'mean',
    negative_mode: str | None = None,
    *,
    normalize: bool = True,
    in_batch: bool | None = None,
    queue: fastcl.segments.Queue | None = None,
    ids: torch.Tensor | None = None,
    negative_ids: torch.Tensor | None = None,
    log_q: torch.Tensor | None = None,
    negative_log_q: torch.Tensor | None = None,
    symmetric: bool = False,
    weight: torch.Tensor | None = None,
    hardness: float | collections.abc.Mapping[str, float] | None = None,
    margin: collections.abc.Callable[[torch.Tensor], torch.Tensor] | None = None,
    cap: float | torch.Tensor | collections.abc.Callable[[torch.Tensor], torch.Tensor] | None = None,
    positive_temperature: float | None = None,
    group: torch.Tensor | None = None,
) -> torch.Tensor: ...

def dcl(
    query: torch.Tensor,
    positive_key: torch.Tensor,
    negative_keys: torch.Tensor | None = None,
    temperature: float | torch.Tensor = 0.1,
    reduction: str = 'mean',
    negative_mode: str | None = None,
    *,
    normalize: bool = True,
    in_batch: bool | None = None,
    queue: fastcl.segments.Queue | None = None,
    ids: torch.Tensor | None = None,
    negative_ids: torch.Tensor | None = None,
    log_q: torch.Tensor | None = None,
    negative_log_q: torch.Tensor | None = None,
    symmetric: bool = False,
    weight: torch.Tensor | None = None,
    hardness: float | collections.abc.Mapping[str, float] | None = None,
    margin: collections.abc.Callable[[torch.Tensor], torch.Tensor] | None = None,
    cap: float | torch.Tensor | collections.abc.Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor: ...

def dclw(
    query: torch.Tensor,
    positive_key: torch.Tensor,
    negative_keys: torch.Tensor | None = None,
    temperature: float | torch.Tensor = 0.1,
    reduction: str = 'mean',
    negative_mode: str | None = None,
    *,
    normalize: bool = True,
    in_batch: bool | None = None,
    queue: fastcl.segments.Queue | None = None,
    ids: torch.Tensor | None = None,
    negative_ids: torch.Tensor | None = None,
    log_q: torch.Tensor | None = None,
    negative_log_q: torch.Tensor | None = None,
    symmetric: bool = False,
    weight: torch.Tensor | None = None,
    hardness: float | collections.abc.Mapping[str, float] | None = None,
    margin: collections.abc.Callable[[torch.Tensor], torch.Tensor] | None = None,
    cap: float | torch.Tensor | collections.abc.Callable[[torch.Tensor], torch.Tensor] | None = None,
    weight_fn: collections.abc.Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = ...,
) -> torch.Tensor: ...

def debiased_infonce(
    query: torch.Tensor,
    positive_key: torch.Tensor,
    negative_keys: torch.Tensor | None = None,
    temperature: float | torch.Tensor = 0.1,
    reduction: str = 'mean',
    negative_mode: str | None = None,
    *,
    normalize: bool = True,
    in_batch: bool | None = None,
    queue: fastcl.segments.Queue | None = None,
    ids: torch.Tensor | None = None,
    negative_ids: torch.Tensor | None = None,
    log_q: torch.Tensor | None = None,
    negative_log_q: torch.Tensor | None = None,
    symmetric: bool = False,
    weight: torch.Tensor | None = None,
    hardness: float | collections.abc.Mapping[str, float] | None = None,
    margin: collections.abc.Callable[[torch.Tensor], torch.Tensor] | None = None,
    cap: float | torch.Tensor | collections.abc.Callable[[torch.Tensor], torch.Tensor] | None = None,
    tau_plus: float = 0.1,
    beta: float = 0.0,
) -> torch.Tensor: ...

def infonce(
    query: torch.Tensor,
    positive_key: torch.Tensor,
    negative_keys: torch.Tensor | None = None,
    temperature: float | torch.Tensor = 0.1,
    reduction: str = 'mean',
    negative_mode: str | None = None,
    *,
    normalize: bool = True,
    in_batch: bool | None = None,
    queue: fastcl.segments.Queue | None = None,
    ids: torch.Tensor | None = None,
    negative_ids: torch.Tensor | None = None,
    log_q: torch.Tensor | None = None,
    negative_log_q: torch.Tensor | None = None,
    symmetric: bool = False,
    weight: torch.Tensor | None = None,
    hardness: float | collections.abc.Mapping[str, float] | None = None,
    margin: collections.abc.Callable[[torch.Tensor], torch.Tensor] | None = None,
    cap: float | torch.Tensor | collections.abc.Callable[[torch.Tensor], torch.Tensor] | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> torch.Tensor: ...

def infonce_plus(
    query: torch.Tensor,
    positive_key: torch.Tensor,
    negative_keys: torch.Tensor | None = None,
    temperature: float | torch.Tensor = 0.1,
    reduction: str = 'mean',
    negative_mode: str | None = None,
    *,
    normalize: bool = True,
    in_batch: bool | None = None,
    queue: fastcl.segments.Queue | None = None,
    ids: torch.Tensor | None = None,
    negative_ids: torch.Tensor | None = None,
    log_q: torch.Tensor | None = None,
    negative_log_q: torch.Tensor | None = None,
    symmetric: bool = False,
    weight: torch.Tensor | None = None,
    hardness: float | collections.abc.Mapping[str, float] | None = None,
    margin: collections.abc.Callable[[torch.Tensor], torch.Tensor] | None = None,
    cap: float | torch.Tensor | collections.abc.Callable[[torch.Tensor], torch.Tensor] | None = None,
    epsilon: float = 0.0,
    lam: float = 1.1,
) -> torch.Tensor: ...

def mine(
    query: torch.Tensor,
    positive_key: torch.Tensor,
    negative_keys: torch.Tensor | None = None,
    temperature: float | torch.Tensor = 0.1,
    reduction: str = 'mean',
    negative_mode: str | None = None,
    *,
    normalize: bool = True,
    in_batch: bool | None = None,
    queue: fastcl.segments.Queue | None = None,
    ids: torch.Tensor | None = None,
    negative_ids: torch.Tensor | None = None,
    log_q: torch.Tensor | None = None,
    negative_log_q: torch.Tensor | None = None,
    symmetric: bool = False,
    weight: torch.Tensor | None = None,
    hardness: float | collections.abc.Mapping[str, float] | None = None,
    margin: collections.abc.Callable[[torch.Tensor], torch.Tensor] | None = None,
    cap: float | torch.Tensor | collections.abc.Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor: ...

def mine_plus(
    query: torch.Tensor,
    positive_key: torch.Tensor,
    negative_keys: torch.Tensor | None = None,
    temperature: float | torch.Tensor = 0.1,
    reduction: str = 'mean',
    negative_mode: str | None = None,
    *,
    normalize: bool = True,
    in_batch: bool | None = None,
    queue: fastcl.segments.Queue | None = None,
    ids: torch.Tensor | None = None,
    negative_ids: torch.Tensor | None = None,
    log_q: torch.Tensor | None = None,
    negative_log_q: torch.Tensor | None = None,
    symmetric: bool = False,
    weight: torch.Tensor | None = None,
    hardness: float | collections.abc.Mapping[str, float] | None = None,
    margin: collections.abc.Callable[[torch.Tensor], torch.Tensor] | None = None,
    cap: float | torch.Tensor | collections.abc.Callable[[torch.Tensor], torch.Tensor] | None = None,
    lam: float = 1.1,
) -> torch.Tensor: ...

def sl_at_k(
    query: torch.Tensor,
    positive_key: torch.Tensor,
    negative_keys: torch.Tensor | None = None,
    temperature: float | torch.Tensor = 0.1,
    reduction: str = 'mean',
    negative_mode: str | None = None,
    *,
    normalize: bool = True,
    in_batch: bool | None = None,
    queue: fastcl.segments.Queue | None = None,
    ids: torch.Tensor | None = None,
    negative_ids: torch.Tensor | None = None,
    log_q: torch.Tensor | None = None,
    negative_log_q: torch.Tensor | None = None,
    symmetric: bool = False,
    weight: torch.Tensor | None = None,
    hardness: float | collections.abc.Mapping[str, float] | None = None,
    margin: collections.abc.Callable[[torch.Tensor], torch.Tensor] | None = None,
    cap: float | torch.Tensor | collections.abc.Callable[[torch.Tensor], torch.Tensor] | None = None,
    threshold: float | torch.Tensor = 0.0,
    weight_temperature: float = 1.0,
) -> torch.Tensor: ...
