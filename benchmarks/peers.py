"""The same losses by other hands: torch's chunked linear_cross_entropy, a chunked loop, and packages where installed.

A peer stands only beside the cases where it computes the same numbers (tests/test_benchmarks.py compares them). The
packages come with `pip install 'fastcl[compat]'`.
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

# Rows a time in the chunked loop; at 16,384 columns that is 32 MB of logits.
CHUNK = 512

Loss = Callable[[Case, Inputs], Tensor]


class Peer(NamedTuple):
    package: str  # what has to be importable
    suits: Callable[[Case], bool]
    loss: Loss
    ours: Loss = fused  # what it is compared with


def chunked(case: Case, x: Inputs) -> Tensor:
    """What one writes against running out of memory: a block of rows a time, computed again in backward."""
    x = prepared(case, x)
    total = torch.zeros(())
    for begin in range(0, case.n, CHUNK):
        end = min(begin + CHUNK, case.n)
        total = total + checkpoint(lean_rows, case, x, begin, end, use_reentrant=False, preserve_rng_state=False)
    return total / case.n


def torch_linear(case: Case, x: Inputs) -> Tensor:
    # New in torch 2.13: type checkers that see an older one do not know them.
    # Unknown to the type stubs of torch before 2.13, which this package supports too.
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
        # A torchvision for another build of torch. All that lightly's import asks of it are two schemas, and its losses
        # use none of it.
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _kept.append(library)
    return importlib.import_module("lightly.loss")


_kept: list[torch.library.Library] = []  # a library takes its definitions along when it goes


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
    # It holds a number for each pair of a positive pair and a negative pair: N^3 of them.
    "metric-learning": Peer(
        "pytorch_metric_learning", lambda case: case.kind == "views" and case.n <= 256, metric_learning
    ),
}


def missing(name: str) -> str | None:
    """Why a peer cannot be run here, or None."""
    if name == "torch lce" and not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        return "needs torch 2.13"
    return None if importlib.util.find_spec(PEERS[name].package) else "not installed"
