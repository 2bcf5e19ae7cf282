"""Soft targets, teachers, several positives and directions: against their twins, and what they come down to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from problems import DTYPES, F64
from torch import Tensor
from twins import assert_equals_twin

import fastcl
from fastcl.directions import DIRECTIONS

pytestmark = pytest.mark.usefixtures("one_thread")

FORMS = (fastcl.log_out, fastcl.log_in, fastcl.supcon_out, fastcl.supcon_in)


def _randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return F64 if dtype == F64 else torch.float32


def _temperature(kind: str, n: int, dtype: torch.dtype) -> dict[str, Tensor]:
    rows = (0.3 + _randn(9, n).abs()).to(_wide(dtype))
    return {} if kind == "float" else {"temperature": rows if kind == "rows" else rows[0]}


@given(
    loss=st.sampled_from(["soft_cross_entropy", "distill_kl"]),
    n=st.sampled_from([1, 9, 33]),
    c=st.sampled_from([1, 31, 65]),
    k=st.sampled_from([0, 1, 4]),  # 0: dense
    d=st.sampled_from([1, 17, 64]),
    dtype=st.sampled_from(DTYPES),
    temperature=st.sampled_from(["float", "tensor", "rows"]),
    weighted=st.booleans(),
    reduction=st.sampled_from(["mean", "sum", "none"]),
)
def test_soft_targets_equal_the_twins(
    loss: str, n: int, c: int, k: int, d: int, dtype: torch.dtype, temperature: str, weighted: bool, reduction: str
) -> None:
    table, query = _randn(1, c, d) / d**0.5, _randn(2, n, d)
    learn = {"input": query.to(dtype), "linear_weight": table.to(dtype)} | _temperature(temperature, n, dtype)
    rest: dict[str, Any] = {"reduction": reduction}
    target = _randn(3, n, k or c)
    if loss == "soft_cross_entropy":
        learn["target"] = target.softmax(1).to(dtype)
    else:
        rest |= {"teacher": target.to(dtype), "teacher_temperature": 0.7}
    if k:
        # Of a class that occurs twice the teacher would have two scores.
        rest["index"] = _randn(4, n, c).argsort(1)[:, :k] if c >= k else torch.zeros(n, k, dtype=torch.int32)
    if weighted:
        learn["row_weight"] = _randn(5, n).abs().to(_wide(dtype))
    longest = query.norm(dim=1).max().item() * table.norm(dim=1).max().item()
    assert_equals_twin(loss, learn, rest, longest / 0.3, floor=max(4.0, longest / 0.3))


@given(
    form=st.sampled_from(FORMS),
    n=st.sampled_from([1, 5, 33]),
    p=st.sampled_from([1, 7, 65]),
    d=st.sampled_from([2, 17, 64]),
    dtype=st.sampled_from(DTYPES),
    shared=st.booleans(),
    in_batch=st.booleans(),
    temperature=st.sampled_from(["float", "tensor", "rows"]),
    weighted=st.booleans(),
    reduction=st.sampled_from(["mean", "sum", "none"]),
)
def test_several_positives_equal_the_twin(
    form: Any, n: int, p: int, d: int, dtype: torch.dtype, shared: bool, in_batch: bool, temperature: str,
    weighted: bool, reduction: str,
) -> None:  # fmt: skip
    owner = torch.randint(n, (p,), generator=torch.Generator().manual_seed(6))
    query = _randn(1, n, d)
    learn = {"query": query.to(dtype), "positives": (query[owner] + 0.7 * _randn(2, p, d)).to(dtype)}
    learn |= _temperature(temperature, n, dtype)
    rest: dict[str, Any] = {"owner": owner.int(), "form": form, "reduction": reduction}
    if shared:
        learn["negative_keys"] = _randn(3, 11, d).to(dtype)
        rest["in_batch"] = in_batch
    if weighted:
        weights = {"positive_weight": 0.5 + _randn(4, p).abs(), "weight": _randn(5, n).abs()}
        learn |= {name: x.to(_wide(dtype)) for name, x in weights.items()}
    shortest = min(x.double().norm(dim=1).min().item() for x in (learn["query"], learn["positives"]))
    assert_equals_twin(
        "multi_positive", learn, rest, 10.0, floor=20.0 / min(1.0, shortest) * (n if reduction == "sum" else 1)
    )


@pytest.mark.parametrize("partition", ["joint", "per_direction"])
@pytest.mark.parametrize("directions", [DIRECTIONS, ("query_to_doc",), ("doc_to_query", "doc_to_doc")],
                         ids=len)  # fmt: skip
def test_directions_equal_the_twin(directions: tuple[str, ...], partition: str) -> None:
    for dtype in DTYPES:
        for n, normalize, ids in ((1, True, False), (33, True, True), (33, False, False)):
            query = _randn(1, n, 17) / 4
            learn = {"query": query.to(dtype), "document": (query + 0.1 * _randn(2, n, 17)).to(dtype)}
            learn |= _temperature("rows", n, dtype) | {"weight": _randn(5, n).abs().to(_wide(dtype))}
            rest = {"directions": directions, "partition": partition, "normalize": normalize}
            rest |= {"ids": torch.arange(n) // 2} if ids else {}
            shortest = min(x.double().norm(dim=1).min().item() for x in (learn["query"], learn["document"]))
            assert_equals_twin("directional_infonce", learn, rest, 10.0, floor=20.0 / min(1.0, shortest))


def test_one_direction_is_infonce_and_both_are_symmetric() -> None:
    query, document = _randn(1, 9, 6), _randn(2, 9, 6)
    one = fastcl.directional_infonce(query, document, 0.2, directions=["query_to_doc"])
    torch.testing.assert_close(one, fastcl.infonce(query, document, temperature=0.2))
    both = fastcl.directional_infonce(
        query, document, 0.2, directions=["query_to_doc", "doc_to_query"], partition="per_direction"
    )
    torch.testing.assert_close(both, fastcl.infonce(query, document, temperature=0.2, symmetric=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"directions": "query_to_doc"}, "directions.*list"),
        ({"directions": ()}, "directions"),
        ({"directions": ("query_to_doc", "query_to_doc")}, "directions.*at most once"),
        ({"directions": ("doc_to_cat",)}, "directions.*doc_to_cat"),
        ({"partition": "both"}, "partition.*both"),
        ({"document": torch.ones(2, 4)}, "document"),
    ],
)
def test_directions_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fastcl.directional_infonce(**({"query": torch.ones(3, 4), "document": torch.ones(3, 4)} | options))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_gradcheck(form: Any) -> None:
    owner, table = torch.tensor([0, 2, 0, 1, 0]), _randn(4, 6, 3).requires_grad_()
    inputs = [x.requires_grad_() for x in (_randn(1, 4, 3), _randn(2, 5, 3), _randn(3, 2, 3), 0.5 + _randn(4, 5).abs())]

    def call(query: Tensor, positives: Tensor, shared: Tensor, weight: Tensor) -> Tensor:
        options: dict[str, Any] = {"in_batch": True, "positive_weight": weight, "reduction": "none"}
        return fastcl.multi_positive(query, positives, owner, shared, 0.4, form=form, **options)

    assert torch.autograd.gradcheck(call, inputs)
    index = torch.tensor([[0, 2], [5, 1], [3, 3], [4, 0]])
    target = _randn(6, 4, 2).requires_grad_()

    def soft(query: Tensor, table: Tensor, target: Tensor) -> Tensor:
        return fastcl.soft_cross_entropy(query, table, target, index, 0.7)

    assert torch.autograd.gradcheck(soft, [inputs[0], table, target])


def test_what_they_come_down_to() -> None:
    query, key = _randn(1, 9, 6), _randn(2, 9, 6)
    for form in FORMS:  # one positive a row
        one = fastcl.multi_positive(query, key, torch.arange(9), temperature=0.2, form=form)
        torch.testing.assert_close(one, fastcl.infonce(query, key, temperature=0.2))
    labels = torch.tensor([0, 1, 0, 2, 1, 0, 3, 2, 0])
    pairs = ((labels[:, None] == labels) & ~torch.eye(9, dtype=torch.bool)).nonzero()
    others = (labels[:, None] != labels).nonzero()
    ours = fastcl.multi_positive(query, query[pairs[:, 1]], pairs[:, 0], query[:0], form=fastcl.supcon_out,
                                 temperature=0.5, reduction="none")  # fmt: skip
    # Without the negatives of other classes; with them it is SupCon, row by row.
    for row in range(9):
        mine, rest = pairs[pairs[:, 0] == row][:, 1], others[others[:, 0] == row][:, 1]
        full = fastcl.multi_positive(query[row : row + 1], query[mine], torch.zeros_like(mine), query[rest],
                                     form=fastcl.supcon_out, temperature=0.5)  # fmt: skip
        torch.testing.assert_close(full, fastcl.supcon(query, labels, 0.5, "none")[row])
        assert len(mine) == 0 or ours[row] <= full
    target = F.one_hot(labels, 9).double()
    hard = fastcl.linear_cross_entropy(query, key, labels)
    torch.testing.assert_close(fastcl.soft_cross_entropy(query, key, target), hard)
    torch.testing.assert_close(
        fastcl.soft_cross_entropy(query, key, torch.ones(9, 1, dtype=F64), labels[:, None]), hard
    )
    smooth = fastcl.linear_cross_entropy(query, key, labels, label_smoothing=0.1)
    torch.testing.assert_close(fastcl.soft_cross_entropy(query, key, 0.9 * target + 0.1 / 9), smooth)
    same = fastcl.distill_kl(query, key, query @ key.T / 0.3, temperature=0.3)
    torch.testing.assert_close(same, torch.zeros_like(same), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"owner": torch.tensor([0, 3, 1])}, ValueError, r"owner.*\[0, 3\).*3"),
        ({"owner": torch.zeros(2).long()}, ValueError, r"owner.*\[3\].*\[2\]"),
        ({"form": "log_in"}, TypeError, "form.*str"),
        ({"form": lambda rows: rows.lse.sum()}, ValueError, r"form.*\[3\]"),
        ({"in_batch": False}, ValueError, "in_batch"),
        ({"positive_weight": torch.ones(2)}, ValueError, "positive_weight"),
        ({"positive_weight": torch.tensor([1.0, -2.0, 0.0])}, ValueError, "positive_weight: .*>= 0, got -2.0"),
        ({"negative_keys": torch.ones(3, 2, 4)}, ValueError, "negative_keys"),
    ],
)
def test_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    x = torch.ones(3, 4)
    with pytest.raises(error, match=message):
        fastcl.multi_positive(**({"query": x, "positives": x, "owner": torch.arange(3)} | options))


def test_soft_targets_refused() -> None:
    x = torch.ones(3, 4)
    with pytest.raises(ValueError, match=r"target.*\[3, 3\].*\[3, 2\]"):
        fastcl.soft_cross_entropy(x, x, torch.ones(3, 2))
    with pytest.raises(ValueError, match=r"index.*\[0, 3\).*7"):
        fastcl.soft_cross_entropy(x, x, torch.ones(3, 1), torch.full((3, 1), 7))
    with pytest.raises(ValueError, match="teacher_temperature"):
        fastcl.distill_kl(x, x, x[:, :3], teacher_temperature=0.0)
    with pytest.raises(ValueError, match=r"teacher_margin.*\[3, 2\]"):
        fastcl.margin_mse(x, x, torch.ones(3, 2, 4), torch.ones(3, 1))
