"""The cases of the benchmarks: shapes of real models, their targets, and the loss of each in fastcl and by hand.

Nothing is timed here (common.py does), and no other package is called (peers.py does). The inputs of a case are rows of
length 1, drawn from seed 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import fastcl
from fastcl import reference

TEMPERATURE = 0.07
PAIR_SCALE, PAIR_BIAS = 10.0, -10.0  # where SigLIP's paper starts


class Inputs(NamedTuple):
    """The tensors that a loss of any kind may read. All are there, even those that the case's kind does not use."""

    query: Tensor  # [N, D]; kinds views and dcl: the first view, [N / 2, D]
    positive: Tensor  # like query
    keys: Tensor  # [M, D]
    target: Tensor  # [N]: the column of the positive if it has one, otherwise the positive's id
    key_ids: Tensor  # [M]
    log_q: Tensor  # [M]
    queue: fastcl.NegativeQueue  # holds `keys` if the kind is queue


@dataclass(frozen=True)
class Case:
    """One kind of loss at N x M x D, and the ratios that it should reach.

    kind: batch (the negatives are the other rows' positives), table (the keys are all items, the positive among them),
    shared (negatives with gradient, common to all rows), frozen (the same without gradient), queue (negatives from the
    batch and frozen ones from a queue), views (NT-Xent over N / 2 pairs), dcl (the decoupled loss over N / 2 pairs),
    clip (batch, in both directions), pairs (SigLIP, each pair of a query and a key on its own), bpr and sampling (BPR
    and negative sampling, with negatives as of shared). targets: column of bench_contrast.py -> bound.
    """

    n: int
    m: int
    d: int
    kind: str
    what: str
    dtype: torch.dtype = torch.float32
    ids: bool = False
    bias: bool = False
    targets: Mapping[str, float] = field(default_factory=dict)

    @property
    def plain(self) -> "Case":
        """The same in float32, without ids and without bias."""
        return replace(self, dtype=torch.float32, ids=False, bias=False)


def targets(products: float, reference: float, compiled: float) -> dict[str, float]:
    return {"products": products, "reference": reference, "compile": compiled}


SMALL = {"reference": 1.5, "compile": 1.0}
CASES = {
    "clrec": Case(256, 2560, 64, "shared", "CLRec, negatives that learn", targets=targets(1.0, 2.5, 1.7)),
    "clrec-queue": Case(256, 2560, 64, "queue", "CLRec, batch + frozen queue", targets=targets(1.0, 2.5, 1.7)),
    "moco": Case(256, 65536, 128, "frozen", "MoCo, frozen queue", targets=targets(1.0, 4.0, 1.6)),
    "batch": Case(4096, 4096, 128, "batch", "in-batch", targets=targets(0.6, 4.0, 2.5)),
    "ntxent": Case(8192, 8192, 128, "views", "NT-Xent", targets=targets(0.6, 4.0, 2.5)),
    "beauty": Case(2048, 12101, 64, "table", "full softmax, Beauty", targets=targets(0.6, 6.0, 2.5)),
    "items": Case(4096, 54542, 64, "table", "full softmax", targets=targets(0.6, 6.0, 2.5)),
    "wide": Case(4096, 4096, 512, "batch", "in-batch, wide", targets=targets(1.1, 1.5, 1.05)),
    "small": Case(32, 1024, 64, "shared", "small", targets=SMALL),
    "tiny": Case(8, 64, 32, "shared", "tiny", targets=SMALL),
    "ntxent-small": Case(256, 256, 128, "views", "NT-Xent, small", targets=SMALL),
    "dcl": Case(4096, 4096, 128, "dcl", "DCL over two views"),
    **{
        f"clip-{n}": Case(n, n, d, "clip", "CLIP, both directions", targets={"lean": 1.0})
        for n, d in ((64, 64), (128, 128), (256, 128), (512, 256), (1024, 256), (2048, 256), (4096, 128))
    },
    "siglip": Case(4096, 4096, 128, "pairs", "SigLIP", targets={"lean": 1.0}),
    "siglip-small": Case(512, 512, 128, "pairs", "SigLIP, small", targets={"lean": 1.0}),
    "bpr": Case(256, 2560, 64, "bpr", "BPR", targets={"lean": 1.0}),
    "sampling": Case(256, 2560, 64, "sampling", "negative sampling", targets={"lean": 1.0}),
    "bf16": Case(4096, 4096, 128, "batch", "in-batch, bfloat16", dtype=torch.bfloat16, targets={"plain": 1 / 1.5}),
    "fp16": Case(4096, 4096, 128, "batch", "in-batch, float16", dtype=torch.float16, targets={"plain": 1.0}),
    "bf16-64": Case(2048, 12101, 64, "table", "table, bfloat16", dtype=torch.bfloat16, targets={"plain": 1 / 1.5}),
    "fp16-64": Case(2048, 12101, 64, "table", "table, float16", dtype=torch.float16, targets={"plain": 1.0}),
    "ids": Case(4096, 4096, 64, "shared", "exclusion by ids", ids=True, targets={"plain": 1.1}),
    "bias": Case(4096, 4096, 64, "shared", "log q of each key", bias=True, targets={"plain": 1.1}),
}


def inputs(case: Case) -> Inputs:
    torch.manual_seed(0)
    views = case.kind in ("views", "dcl")

    def rows(count: int, learn: bool) -> Tensor:
        return F.normalize(torch.randn(count, case.d), dim=1).to(case.dtype).requires_grad_(learn)

    n = case.n // 2 if views else case.n
    query = rows(n, True)
    positive = rows(n, views or case.kind in ("shared", "queue", "bpr", "sampling"))
    keys = rows(0 if views else case.m, case.kind in ("batch", "table", "shared", "clip", "pairs", "bpr", "sampling"))
    target = torch.arange(n) if case.kind in ("batch", "clip", "pairs") else torch.randint(case.m, (n,))
    key_ids = torch.arange(case.m)
    queue = fastcl.NegativeQueue(case.m, case.d, case.dtype)
    if case.kind == "queue":
        queue.push(keys)
    return Inputs(query, positive, keys, target, key_ids, torch.rand(case.m).log(), queue)


def loss_of(library: Any, case: Case, x: Inputs, normalize: bool = False) -> Tensor:
    """The mean loss of a case by `library`: fastcl, or fastcl.reference, its textbook twin of the same signatures."""
    infonce = library.infonce
    if case.kind == "views":
        return library.nt_xent(x.query, x.positive, TEMPERATURE)
    if case.kind == "dcl":
        both, partner = torch.cat([x.query, x.positive]), torch.cat([x.positive, x.query])
        ids = x.key_ids[: len(x.query)].repeat(2)
        return library.dcl(both, partner, temperature=TEMPERATURE, ids=ids)
    if case.kind == "batch":
        return infonce(x.query, x.keys, temperature=TEMPERATURE, normalize=normalize)
    if case.kind == "clip":
        return infonce(x.query, x.keys, temperature=TEMPERATURE, normalize=normalize, symmetric=True)
    if case.kind == "pairs":
        return library.siglip(x.query, x.keys, PAIR_SCALE, PAIR_BIAS)
    if case.kind in ("bpr", "sampling"):
        return (library.bpr if case.kind == "bpr" else library.negative_sampling)(x.query, x.positive, x.keys)
    if case.kind == "table":
        return library.linear_cross_entropy(x.query, x.keys, x.target, temperature=TEMPERATURE)
    if case.kind == "queue":
        return infonce(x.query, x.positive, temperature=TEMPERATURE, normalize=normalize, in_batch=True, queue=x.queue)
    row_ids = {"ids": x.target, "negative_ids": x.key_ids} if case.ids else {}
    log_q = {"log_q": x.log_q[x.target], "negative_log_q": x.log_q} if case.bias else {}
    return infonce(x.query, x.positive, x.keys, TEMPERATURE, normalize=normalize, **row_ids, **log_q)


def fused(case: Case, x: Inputs) -> Tensor:
    return loss_of(fastcl, case, x)


def textbook(case: Case, x: Inputs) -> Tensor:
    return loss_of(reference, case, x)


def prepared(case: Case, x: Inputs) -> Inputs:
    """The inputs of `lean_rows`: for losses over two views, their normalised stack is both query and keys."""
    if case.kind not in ("views", "dcl"):
        return x
    z = F.normalize(torch.cat([x.query, x.positive]), dim=1)
    return x._replace(query=z, keys=z)


def lean_rows(case: Case, x: Inputs, begin: int, end: int) -> Tensor:
    """The leanest eager form, without needless copies of the logits: the sum of the loss over rows [begin, end)."""
    query = x.query[begin:end]
    dots = (query @ (x.queue.keys if case.kind == "queue" else x.keys).T).float()
    if case.kind == "pairs":
        logits = dots * PAIR_SCALE + PAIR_BIAS
        return F.softplus(logits).sum() - logits.diagonal(begin).sum()  # softplus(-z) = softplus(z) - z
    if case.kind in ("bpr", "sampling"):
        pos = (query * x.positive[begin:end]).float().sum(1)
        return (
            F.softplus(dots - pos[:, None]).sum()
            if case.kind == "bpr"
            else (F.softplus(-pos) + F.softplus(dots).sum(1)).sum()
        )
    logits = dots / TEMPERATURE
    if case.kind in ("views", "dcl"):
        row = torch.arange(begin, end)
        partner = (row + case.n // 2) % case.n
        logits[row - begin, row] = -torch.inf
        if case.kind == "views":
            return F.cross_entropy(logits, partner, reduction="sum")
        pos = logits[row - begin, partner]
        logits[row - begin, partner] = -torch.inf
        return (torch.logsumexp(logits, 1) - pos).sum()
    target = x.target[begin:end]
    if case.kind in ("batch", "table"):
        return F.cross_entropy(logits, target, reduction="sum")
    if case.kind == "clip":
        whole = end - begin == case.n
        back = logits.T if whole else (x.keys[begin:end] @ x.query.T).float() / TEMPERATURE
        there, back = (F.cross_entropy(each, target, reduction="sum") for each in (logits, back))
        return 0.5 * (there + back)
    if case.kind == "queue":
        block = (query @ x.positive.T).float() / TEMPERATURE
        lse = torch.logaddexp(torch.logsumexp(block, 1), torch.logsumexp(logits, 1))
        return (lse - block.diagonal(begin)).sum()
    pos = (query * x.positive[begin:end]).float().sum(1) / TEMPERATURE
    if case.bias:
        logits, pos = logits - x.log_q, pos - x.log_q[target]
    if case.ids:
        logits = logits.masked_fill(target[:, None] == x.key_ids, -torch.inf)
    return (torch.logaddexp(torch.logsumexp(logits, 1), pos) - pos).sum()


def lean(case: Case, x: Inputs) -> Tensor:
    return lean_rows(case, prepared(case, x), 0, case.n) / case.n
