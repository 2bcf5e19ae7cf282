"""What the tests of the op and the losses share: problems, the float64 truth, error budgets, instruction sets, data.

Only inputs and comparisons live here. Nothing may call the code under test, except to choose its instruction set.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor

import fastcl

# The `isa` fixture is meant to stay for all examples of a test. `pytest --hypothesis-profile=thorough` looks further.
_CHECKS = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
settings.register_profile("quick", derandomize=True, deadline=None, max_examples=60, suppress_health_check=_CHECKS)
settings.register_profile("thorough", deadline=None, max_examples=1000, suppress_health_check=_CHECKS)
settings.load_profile("quick")

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
DTYPES = (F64, F32, BF16, F16)
INPUTS = ("query", "key", "positive", "bias", "scale")

# Error allowed relative to the size of a result, before that of the logits: sums of some hundred terms in float32, or
# one rounding to 16 bits of the weights and one of each of the few gradients that are added up.
TOLERANCE = {F64: 1e-12, F32: 1e-5, BF16: 1e-2, F16: 1.5e-3}


def tolerance(dtype: torch.dtype, largest_logit: float) -> float:
    """A logit's rounding, relative to its own size, becomes a relative error of its weight and an absolute one of lse."""
    return TOLERANCE[dtype] + 8 * largest_logit * (2.0**-53 if dtype == F64 else 2.0**-24)


@pytest.fixture(params=fastcl.config()["isas"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test once per instruction set this machine can use."""
    before = fastcl.set_isa(request.param)
    yield request.param
    fastcl.set_isa(before)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For modules of many tiny problems: waking threads for each would take longer than everything else."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of the large data sets, which do not ship with the package; skips where there is none."""
    folder = Path(os.environ.get("FASTCL_DATA", Path(__file__).parents[2] / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"needs the large data sets: {folder.name} folder not found; set FASTCL_DATA to where they are")
    return folder


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
        needs=frozenset(draw(st.sets(st.sampled_from(present), min_size=1))),
        seed=draw(st.integers(0, 1000)),
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


def leaves(tensors: Mapping[str, Tensor], needs: frozenset[str], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Detached copies that share layout, requiring grad where named; in `dtype` if given."""
    out = {}
    for name, x in tensors.items():
        y = x.detach() if dtype is None else x.detach().to(dtype)
        out[name] = y.requires_grad_(name in needs)
    return out


def gradients(outputs: list[Tensor], upstream: list[Tensor], inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gradient of each input that requires one, by name; zeros where the graph does not reach it."""
    wanted = [name for name, x in inputs.items() if x.requires_grad]
    pairs = [(o, u) for o, u in zip(outputs, upstream, strict=True) if o.requires_grad]
    if not pairs:
        return {name: torch.zeros_like(inputs[name]) for name in wanted}
    grads = torch.autograd.grad(
        [o for o, _ in pairs], [inputs[name] for name in wanted], [u for _, u in pairs], allow_unused=True
    )
    return {n: torch.zeros_like(inputs[n]) if g is None else g for n, g in zip(wanted, grads, strict=True)}


def assert_budget(
    name: str,
    ours: Tensor,
    plain: Tensor,
    truth: Tensor,
    tol: float,
    floor: float | Tensor = 0.0,  # a number, or one for each row
    factor: float = 2.0,
) -> None:
    """|ours - truth| <= factor |plain torch - truth| + tol (size + floor), by row for matrices; same infinities and NaN.

    The size of a row is its largest true entry, plus 1% of the whole tensor's; `floor` is the size of what cancels in it.
    """
    assert ours.shape == truth.shape, f"{name}: shape {tuple(ours.shape)}, expected {tuple(truth.shape)}"
    ours, plain, truth = ours.detach().double(), plain.detach().double(), truth.detach().double()
    special = ~truth.isfinite()
    assert torch.equal(ours.isnan(), truth.isnan()), f"{name}: NaN in other places than the truth"
    assert torch.equal(ours[special & ~truth.isnan()], truth[special & ~truth.isnan()]), f"{name}: infinities differ"
    assert ours[~special].isfinite().all(), f"{name}: not finite where the truth is"
    if truth.numel() == 0:
        return
    zero = torch.zeros_like(truth)
    error = torch.where(special, zero, ours - truth).abs()
    allowance = torch.where(special | ~plain.isfinite(), zero, plain - truth).abs()
    size = torch.where(special, zero, truth).abs()
    whole = size.max()
    if truth.ndim > 1:
        error, allowance, size = (x.flatten(1).amax(1) for x in (error, allowance, size))
    else:
        allowance, size = allowance.max(), whole
    excess = error - (factor * allowance + tol * (size + 0.01 * whole + floor))
    assert excess.max() <= 0, (
        f"{name}: error {error.max():.3e}, over the limit by {excess.max():.3e}; "
        f"plain torch {allowance.max():.3e}, size {whole:.3e}, relative tolerance {tol:.1e}"
    )


def assert_peaked(query: Tensor, key: Tensor, scale: float) -> None:
    """The truth must not be a flat softmax, which a kernel that ignored its input would also get nearly right."""
    weights = torch.softmax(scale * query.double() @ key.double().T, 1)
    assert weights.amax(1).median() > 3.0 / key.shape[0], "the problem is flat: a wrong kernel could pass"
