"""Calls of the op (`Problem`) and of the losses (`Batch`) as plain facts that hypothesis can draw, shrink and print.

Seeded inputs only: nothing here calls what is under test, but for the queue that a loss reads from.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

import fastcl

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
DTYPES = (F64, F32, BF16, F16)
INPUTS = ("query", "key", "positive", "bias", "scale")


@dataclass(frozen=True)
class Problem:
    """One call of `contrast`, as plain facts: hypothesis can draw, shrink and print it; `build` makes the tensors."""

    n: int = 5
    m: int = 7
    d: int = 3
    query_dtype: torch.dtype = F64
    key_dtype: torch.dtype = F64
    layout: str = "contiguous"  # of query and key: contiguous, transposed, sliced, offset, expanded
    with_positive: bool = True
    scale: str = "float"  # float, zero, negative, tensor, zero_tensor, negative_tensor, rows, mixed_rows
    bias: str = "none"  # none, finite, some_inf, all_inf
    ids: str = "none"  # none, few (many collisions, rows may end empty), many, all_equal
    cap: str = "none"  # none, some (below about a third of the columns), mixed (all, none and some)
    needs: frozenset[str] = field(default_factory=lambda: frozenset(INPUTS))
    seed: int = 0

    def build(self) -> tuple[dict[str, Tensor], dict[str, object]]:
        """(tensors that may need grad, by argument name; the other arguments)."""
        g = torch.Generator().manual_seed(self.seed)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g, dtype=F64)

        wide = F64 if F64 in (self.query_dtype, self.key_dtype) else F32
        # Peaked, not flat: keys lie near queries, and lengths differ from row to row; logits have a spread of about 3.
        query = randn(self.n, self.d) * (0.5 + torch.rand(self.n, 1, generator=g, dtype=F64))
        nearest = torch.randint(self.n, (self.m,), generator=g)
        key = query[nearest] + 0.5 * randn(self.m, self.d)
        size = (3.0 / self.d**0.5) ** 0.5
        tensors = {
            "query": lay_out((query * size).to(self.query_dtype), self.layout),
            "key": lay_out((key * size).to(self.key_dtype), self.layout),
        }
        if self.with_positive:
            positive = (query + 0.3 * randn(self.n, self.d)) * size
            tensors["positive"] = lay_out(positive.to(self.query_dtype), self.layout)
        rest: dict[str, object] = {}
        if self.scale in ("float", "zero", "negative"):
            rest["scale"] = {"float": 1.3, "zero": 0.0, "negative": -0.7}[self.scale]
        elif self.scale in ("rows", "mixed_rows"):
            rows = 0.5 + torch.rand(self.n, generator=g, dtype=F64)
            if self.scale == "mixed_rows":
                rows = rows * torch.tensor([1.0, 0.0, -1.0], dtype=F64)[torch.arange(self.n) % 3]
            tensors["scale"] = rows.to(wide)
        else:
            value = {"tensor": 1.3, "zero_tensor": 0.0, "negative_tensor": -0.7}[self.scale]
            tensors["scale"] = torch.tensor(value, dtype=wide)
        if self.bias != "none":
            bias = randn(self.m)
            if self.bias == "some_inf":
                bias[torch.rand(self.m, generator=g) < 0.4] = -torch.inf
            elif self.bias == "all_inf":
                bias.fill_(-torch.inf)
            tensors["bias"] = bias.to(wide)
        if self.ids != "none":
            kinds = {"few": 3, "many": 1000, "all_equal": 1}[self.ids]
            rest["row_id"] = torch.randint(kinds, (self.n,), generator=g) - 1
            rest["col_id"] = torch.randint(kinds, (self.m,), generator=g) - 1
        if self.cap != "none":
            scale = tensors.get("scale", torch.tensor(rest.get("scale", 1.0))).double()
            logits = tensors["query"].double() @ tensors["key"].double().T * (scale[:, None] if scale.dim() else scale)
            cap = between(logits)
            if self.cap == "mixed":
                kind = torch.arange(self.n) % 3
                cap = torch.where(kind == 0, -torch.inf, torch.where(kind == 1, torch.inf, cap))
            rest["cap"] = cap.to(wide)
        return tensors, rest

    def largest_logit(self) -> float:
        tensors, rest = self.build()
        lengths = [tensors[name].double().norm(dim=1).max().item() if self.m else 0.0 for name in ("query", "key")]
        scale = tensors.get("scale", torch.tensor(rest.get("scale", 1.0))).abs().max().item()
        return lengths[0] * lengths[1] * scale

    def upstream(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Random gradients of pos and lse."""
        g = torch.Generator().manual_seed(self.seed + 1)
        return torch.randn(self.n, generator=g).to(dtype), torch.randn(self.n, generator=g).to(dtype)


@st.composite
def problems(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...] = DTYPES) -> Problem:
    """Small problems over everything `contrast` accepts; sizes sit around the edges of tiles and vectors."""
    sizes = st.sampled_from([1, 2, 31, 32, 33, 47, 63, 64, 65])
    query_dtype = draw(st.sampled_from(dtypes))
    # 16-bit rows with float32 keys and the reverse; float64 stays with float64.
    mixed = query_dtype != F64 and draw(st.integers(0, 2)) == 0
    key_dtype = draw(st.sampled_from([F32, BF16, F16] if mixed else [query_dtype]))
    with_positive = draw(st.booleans())
    scale = draw(
        st.sampled_from(
            ["float", "zero", "negative", "tensor", "zero_tensor", "negative_tensor", "rows", "mixed_rows"],
        )
    )
    bias = draw(st.sampled_from(["none", "finite", "some_inf", "all_inf"]))
    present = ["query", "key"] + ["positive"] * with_positive + ["bias"] * (bias != "none")
    present += ["scale"] * ("tensor" in scale or "rows" in scale)
    return Problem(
        n=draw(sizes),
        m=draw(st.one_of(sizes, st.just(0))),
        d=draw(st.one_of(st.sampled_from([1, 2, 7, 8, 15, 16, 17, 64, 100, 128, 199, 200]), st.integers(1, 200))),
        query_dtype=query_dtype,
        key_dtype=key_dtype,
        layout=draw(st.sampled_from(["contiguous", "transposed", "sliced", "offset", "expanded"])),
        with_positive=with_positive,
        scale=scale,
        bias=bias,
        ids=draw(st.sampled_from(["none", "few", "many", "all_equal"])),
        cap=draw(st.sampled_from(["none", "none", "some", "mixed"])),
        needs=frozenset(draw(st.sets(st.sampled_from(present), min_size=1))),
        seed=draw(st.integers(0, 1000)),
    )


def between(logits: Tensor) -> Tensor:
    """For each row a number that no logit is near: the middle of the widest gap of the upper half, or infinity."""
    n, m = logits.shape
    if m < 2:
        return torch.full((n,), torch.inf, dtype=logits.dtype)
    upper = logits.sort(1).values[:, m // 2 - 1 :]
    gap, at = upper.diff(dim=1).max(1)
    middle = upper.gather(1, at[:, None])[:, 0] + gap / 2
    return middle.masked_fill(gap < 1e-3 * (1 + upper.abs().amax(1)), torch.inf)


# Rows with nothing in their sum: no columns, or all of them out by id or bias.
WITH_EMPTY_ROWS = (
    Problem(3, 0, 4, scale="tensor"),
    Problem(3, 0, 4, F32, F32, bias="finite", ids="few"),
    Problem(4, 6, 5, F32, F32, bias="all_inf", scale="rows"),
    Problem(4, 6, 5, BF16, BF16, ids="all_equal", scale="tensor"),
    Problem(40, 2, 5, F32, F32, ids="few", bias="some_inf", scale="mixed_rows"),
    Problem(1, 1, 1, F32, F32, ids="all_equal"),
    Problem(33, 40, 5, F32, F32, cap="mixed", bias="some_inf", ids="few"),
)


def lay_out(x: Tensor, layout: str) -> Tensor:
    """The same values with other strides; "expanded" repeats the first row without storing it again."""
    if layout == "transposed":
        return x.T.contiguous().T
    if layout == "sliced":
        padded = x.new_full((2 * x.shape[0] + 1, 2 * x.shape[1] + 3), 77.0)
        view = padded[1::2, 3::2][: x.shape[0], : x.shape[1]]
        return view.copy_(x)
    if layout == "offset":  # contiguous rows at a storage offset that no vector load is aligned to
        return x.new_full((x.numel() + 1,), 77.0)[1:].view_as(x).copy_(x)
    if layout == "expanded":
        return x[:1].expand(x.shape)
    return x


@dataclass(frozen=True)
class Batch:
    """One call of a loss, as plain facts; `build` makes the tensors."""

    n: int = 9
    d: int = 6
    dtype: torch.dtype = F64
    negatives: str = "none"  # none, shared, private
    in_batch: bool | None = None
    queue: str = "none"  # none, empty, partial, full
    ids: bool = False
    log_q: bool = False
    temperature: str = "float"  # float, tensor, rows
    normalize: bool = True
    symmetric: bool = False
    reduction: str = "mean"
    seed: int = 0

    def build(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """(tensors that learn, by argument name; the other arguments)."""
        g = torch.Generator().manual_seed(self.seed)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g, dtype=F64)

        def log_q(*shape: int) -> Tensor:
            return (randn(*shape) - 3.0).to(F64 if self.dtype == F64 else F32)

        query = randn(self.n, self.d)
        learn = {"query": query, "positive_key": query + 0.7 * randn(self.n, self.d)}
        rest: dict[str, Any] = {"in_batch": self.in_batch, "normalize": self.normalize, "symmetric": self.symmetric}
        shape = {"none": (), "shared": (7,), "private": (self.n, 3)}[self.negatives]
        if shape:
            near = query[:7].repeat(7, 1)[:7] if self.negatives == "shared" else query[:, None]
            learn["negative_keys"] = near + randn(*shape, self.d)
        if self.queue != "none":
            rest["queue"] = fastcl.NegativeQueue(8, self.d, self.dtype)
            count = {"empty": 0, "partial": 5, "full": 11}[self.queue]
            keys = F.normalize(query[torch.arange(count) % self.n] + randn(count, self.d), dim=1)
            ids = torch.randint(6, (count,), generator=g) if self.ids else None
            rest["queue"].push(keys, ids, log_q(count) if self.log_q else None)
        if self.ids:
            rest["ids"] = torch.randint(6, (self.n,), generator=g)
            if shape:
                rest["negative_ids"] = torch.randint(6, shape, generator=g)
        learn = {name: x.to(self.dtype) for name, x in learn.items()}
        if self.log_q:
            learn["log_q"] = log_q(self.n)
            if shape:
                learn["negative_log_q"] = log_q(*shape)
        wide = F64 if self.dtype == F64 else F32
        if self.temperature == "float":
            rest["temperature"] = 0.2
        else:
            rows = 0.1 + 0.2 * torch.rand(self.n, generator=g, dtype=F64)
            learn["temperature"] = (rows if self.temperature == "rows" else rows[0]).to(wide)
        rest["reduction"] = self.reduction
        return learn, rest


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    symmetric = draw(st.integers(0, 4)) == 0
    negatives = "none" if symmetric else draw(st.sampled_from(["none", "shared", "private"]))
    queue = "none" if symmetric else draw(st.sampled_from(["none", "none", "empty", "partial", "full"]))
    # Something must be contrasted with: in_batch may be switched off only where other negatives are given.
    in_batch = draw(st.sampled_from([None, True, False] if negatives != "none" or queue != "none" else [None, True]))
    return Batch(
        n=draw(st.sampled_from([1, 2, 9, 33])),
        d=draw(st.sampled_from([1, 6, 17, 64])),
        dtype=draw(st.sampled_from(DTYPES)),
        negatives=negatives,
        in_batch=in_batch,
        queue=queue,
        ids=draw(st.booleans()),
        log_q=draw(st.booleans()) and not symmetric,
        temperature=draw(st.sampled_from(["float", "tensor"] if symmetric else ["float", "tensor", "rows"])),
        normalize=draw(st.booleans()),
        symmetric=symmetric,
        reduction=draw(st.sampled_from(["mean", "sum", "none"])),
        seed=draw(st.integers(0, 1000)),
    )
