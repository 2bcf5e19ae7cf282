"""Other implementations of the same losses: torch's linear_cross_entropy, a chunked loop, and installed packages.

A peer is compared only in cases where it computes the same numbers, which tests/test_benchmarks.py checks. The packages
come with `pip install 'fastcl[compat]'`.
"""

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fastcl
from benchmarks.cases import TEMPERATURE, Case, Inputs, fused, lean_rows, loss_of, prepared

# Rows of one block of the chunked loop; at 16,384 columns its logits take 32 MiB.
CHUNK = 512

Loss = Callable[[Case, Inputs], Tensor]


class Peer(NamedTuple):
    package: str  # the module that must be importable
    suits: Callable[[Case], bool]  # whether the peer computes the loss of a case
    loss: Loss
    ours: Loss = fused  # fastcl's form that it is compared with


def chunked(case: Case, x: Inputs) -> Tensor:
    """A loop over blocks of rows, which backward computes again: the usual remedy when memory runs out."""
    x = prepared(case, x)
    total = torch.zeros(())
    for begin in range(0, case.n, CHUNK):
        end = min(begin + CHUNK, case.n)
        total = total + checkpoint(lean_rows, case, x, begin, end, use_reentrant=False, preserve_rng_state=False)
    return total / case.n


def torch_linear(case: Case, x: Inputs) -> Tensor:
    # The type stubs of torch before 2.13, which fastcl supports too, do not have these names.
    options = torch.nn.LinearCrossEntropyOptions()  # type: ignore[attr-defined, unused-ignore]
    return F.linear_cross_entropy(x.query / TEMPERATURE, x.keys, x.target, options=options)  # type: ignore[attr-defined, unused-ignore]


def info_nce(case: Case, x: Inputs) -> Tensor:
    package: Any = importlib.import_module("info_nce")
    if case.kind == "batch":
        return package.info_nce(x.query, x.keys, temperature=TEMPERATURE)
    return package.info_nce(x.query, x.positive, x.keys, temperature=TEMPERATURE)


def normalized_infonce(case: Case, x: Inputs) -> Tensor:
    return loss_of(fastcl, case, x, normalize=True)


@functools.cache
def _lightly_losses() -> Any:
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        # torchvision is here for another build of torch. Importing lightly needs only two schemas of it, and lightly's
        # losses use nothing of it.
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _kept.append(library)
    return importlib.import_module("lightly.loss")


_kept: list[torch.library.Library] = []  # when a library is deleted, its definitions go too


def lightly(case: Case, x: Inputs) -> Tensor:
    package = _lightly_losses()
    criterion = {"views": package.NTXentLoss, "dcl": package.DCLLoss}[case.kind]
    return criterion(temperature=TEMPERATURE)(x.query, x.positive)


def metric_learning(case: Case, x: Inputs) -> Tensor:
    package: Any = importlib.import_module("pytorch_metric_learning.losses")
    labels = torch.arange(len(x.query)).repeat(2)
    return package.NTXentLoss(temperature=TEMPERATURE)(torch.cat([x.query, x.positive]), labels)


def _plain_float32(case: Case) -> bool:
    return case == case.plain


PEERS = {
    "chunked": Peer("torch", lambda case: True, chunked),
    "torch lce": Peer("torch", lambda case: case.kind in ("batch", "table"), torch_linear),
    "info-nce": Peer(
        "info_nce",
        lambda case: _plain_float32(case) and case.kind in ("batch", "shared", "frozen"),
        info_nce,
        normalized_infonce,
    ),
    "lightly": Peer("lightly", lambda case: case.kind in ("views", "dcl"), lightly),
    # Its memory grows as N^3: one number for each combination of a positive and a negative pair.
    "metric-learning": Peer(
        "pytorch_metric_learning", lambda case: case.kind == "views" and case.n <= 256, metric_learning
    ),
}


def missing(name: str) -> str | None:
    """Why a peer cannot be run here, or None."""
    if name == "torch lce" and not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        return "needs torch 2.13"
    return None if importlib.util.find_spec(PEERS[name].package) else "not installed"
