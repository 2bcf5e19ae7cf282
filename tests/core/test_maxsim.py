"""`fastcl.maxsim` against its textbook twin: on every instruction set, in chunked PyTorch, and as an op of torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import TOLERANCE
from hypothesis import given
from hypothesis import strategies as st
from problems import BF16, DTYPES, F16, F32, F64
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import fastcl
from fastcl import fallback, reference, tokens

pytestmark = pytest.mark.usefixtures("one_thread")

# Queries, documents, tokens of each, features: around the widths of vectors and tiles.
SHAPES = [
    (1, 1, 1, 1, 1), (3, 2, 5, 33, 7), (2, 5, 12, 6, 64), (9, 1, 33, 13, 129), (2, 3, 32, 65, 300), (1, 40, 4, 3, 16),
]  # fmt: skip


def drawn(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens and lengths; lengths of 0 and of all tokens are among the latter."""
    n, m, t, u, d = shape
    g = torch.Generator().manual_seed(seed)
    query, document = (torch.randn(*of, d, generator=g, dtype=F64).to(dtype) for of in ((n, t), (m, u)))
    lengths, query_lengths = torch.randint(u + 1, (m,), generator=g), torch.randint(t + 1, (n,), generator=g)
    lengths[:1], query_lengths[-1:] = u, t
    return query, document, lengths, query_lengths


def answers(function: Any, query: Tensor, document: Tensor, *lengths: Tensor | None) -> list[Tensor]:
    """Scores and the gradients of both inputs, from upstream gradients that differ everywhere."""
    inputs = [x.detach().requires_grad_() for x in (query, document)]
    score = function(*inputs, *lengths)
    upstream = torch.linspace(-1.0, 2.0, score.numel(), dtype=F64).view(score.shape).to(score.dtype)
    finite = torch.where(score == -torch.inf, 0.0, score)  # the gradient that comes to an infinite score is 0
    return [score.detach(), *torch.autograd.grad((finite * upstream).sum(), inputs)]


def assert_right(query: Tensor, document: Tensor, *lengths: Tensor | None) -> None:
    """As the twin on the same tokens in float64, whose maxima are those of tokens in 16 bits too."""
    ours = answers(fastcl.maxsim, query, document, *lengths)
    truth = answers(reference.maxsim, query.double(), document.double(), *lengths)
    assert ours[0].dtype == (F64 if F64 in (query.dtype, document.dtype) else F32)
    assert [x.dtype for x in ours[1:]] == [query.dtype, document.dtype]
    for x, right in zip(ours, truth, strict=True):
        finite = right[right.isfinite()]
        size = finite.abs().max().item() if finite.numel() else 1.0
        torch.testing.assert_close(x.double(), right, rtol=0.0, atol=2 * TOLERANCE[x.dtype] * max(size, 1.0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_isa_has_the_textbook(isa: str, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        query, document, lengths, query_lengths = drawn(shape, dtype)
        assert_right(query, document, lengths, query_lengths)
        assert_right(query, document)


@given(
    shape=st.tuples(*(st.integers(0, most) for most in (4, 5, 7, 40, 20))),
    dtypes=st.tuples(*[st.sampled_from((F64, F32, BF16, F16))] * 2),
    seed=st.integers(0, 99),
    given_lengths=st.tuples(st.booleans(), st.booleans()),
)
def test_any_shape_and_any_lengths(
    shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], seed: int, given_lengths: tuple[bool, bool]
) -> None:
    query, document, *lengths = drawn(shape, F64, seed)
    used = [length if is_given else None for length, is_given in zip(lengths, given_lengths, strict=True)]
    assert_right(query.to(dtypes[0]), document.to(dtypes[1]), *used)


def test_several_threads_share_documents_and_queries() -> None:
    torch.set_num_threads(2)
    for shape in ((40, 1, 16, 40, 64), (3, 7, 16, 40, 64)):
        assert_right(*drawn(shape, F32))


def test_chunked_pytorch_has_the_kernels_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fallback, "_CHUNK_ELEMENTS", 1200)  # some documents a chunk
    for shape in (*SHAPES, (3, 2, 0, 4, 5), (3, 2, 4, 0, 5), (3, 2, 4, 5, 0), (0, 2, 3, 4, 5), (3, 0, 3, 4, 5)):
        query, document, lengths, query_lengths = drawn(shape, F64)
        arguments = (query, document, query_lengths, lengths)
        plain, fused = tokens._chunked_forward(*arguments, True), tokens.forward_op(*arguments, True)
        torch.testing.assert_close(plain[0], fused[0])
        assert torch.equal(plain[1], fused[1])
        grad = torch.randn(fused[0].shape, dtype=F64)
        for needs in ((True, True), (True, False), (False, True)):
            back = (grad, query, document, fused[1], *needs)
            torch.testing.assert_close(tokens._chunked_backward(*back), tokens.backward_op(*back))


def test_the_first_of_equal_tokens_takes_the_gradient(isa: str) -> None:
    for dtype in (F32, F64, BF16):
        token = torch.ones(1, 1, 4, dtype=dtype)
        document = torch.cat([0.5 * token, token, token.expand(1, 80, 4), 2 * token], 1).requires_grad_()
        score = fastcl.maxsim(token, document, torch.tensor([82]))
        (grad,) = torch.autograd.grad(score, document)
        assert score.item() == 4.0
        assert grad[0, 1].tolist() == [1.0] * 4
        assert grad.sum() == 4.0


def test_infinities_and_nan(isa: str) -> None:
    inf, nan = torch.inf, torch.nan
    tokens_of_each = [[1.0, inf, 2.0], [1.0, nan, 2.0], [-inf, -inf, 5.0], [-1.0, 3.0, 9.0]]
    for dtype in (F32, F64, BF16):
        query = torch.ones(1, 1, 1, dtype=dtype)
        x = torch.tensor(tokens_of_each, dtype=dtype)[..., None].requires_grad_()
        score = fastcl.maxsim(query, x, torch.tensor([3, 3, 2, 2]))
        torch.testing.assert_close(score.float(), torch.tensor([[inf, nan, -inf, 3.0]]), equal_nan=True)
        (grad,) = torch.autograd.grad(score[0, 2:].sum(), x)
        assert grad[2:, :, 0].tolist() == [[0.0] * 3, [0.0, 1.0, 0.0]]


def test_a_document_without_tokens_leaves_a_softmax() -> None:
    query, document, _, _ = drawn((2, 3, 4, 5, 6), F64)
    inputs = [query.requires_grad_(), document.requires_grad_()]
    scores = fastcl.maxsim(*inputs, torch.tensor([5, 3, 0]))
    assert torch.equal(scores[:, 2], torch.full((2,), -torch.inf, dtype=F64))
    ours = F.cross_entropy(scores, torch.arange(2))
    without = F.cross_entropy(fastcl.maxsim(query, document[:2], torch.tensor([5, 3])), torch.arange(2))
    torch.testing.assert_close(ours, without)
    for a, b in zip(torch.autograd.grad(ours, inputs), torch.autograd.grad(without, inputs), strict=True):
        torch.testing.assert_close(a, b)


def test_gradients_of_any_order() -> None:
    query, document, lengths, query_lengths = drawn((2, 2, 2, 3, 2), F64)
    inputs = (query.requires_grad_(), document.requires_grad_())
    lengths.clamp_(min=1)

    def score(q: Tensor, d: Tensor) -> Tensor:
        return fastcl.maxsim(q, d, lengths, query_lengths)

    assert gradcheck(score, inputs)
    assert gradgradcheck(score, inputs)


def test_what_torch_does_with_an_op() -> None:
    query, document, lengths, query_lengths = drawn((2, 3, 4, 5, 3), F32)
    arguments = (query, document, query_lengths, lengths)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(tokens.forward_op, (*arguments, True), test_utils=checks)
    place = tokens.forward_op(*arguments, True)[1]
    needs = (torch.randn(2, 3), query, document, place, True, False)
    torch.library.opcheck(tokens.backward_op, needs, test_utils=checks)

    for x in (query, document):
        x.requires_grad_()
    right = fastcl.maxsim(query, document, lengths)
    compiled = torch.compile(fastcl.maxsim, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(query, document, lengths), right)
    each = torch.func.vmap(lambda q: fastcl.maxsim(q[None], document, lengths)[0])(query)
    torch.testing.assert_close(each, right)
    both = torch.func.grad(lambda q: fastcl.maxsim(q, document, lengths).square().sum())(query.detach())
    torch.testing.assert_close(both, torch.autograd.grad(right.square().sum(), query)[0])


def test_strides_and_types_of_lengths_do_not_matter() -> None:
    query, document, lengths, _ = drawn((3, 4, 5, 6, 7), F64)
    right = answers(reference.maxsim, query, document, lengths)
    strided = [torch.stack([x, x], -1)[..., 0] for x in (query, document)]
    for kind in (torch.int32, torch.uint8, torch.int64):
        for ours, truth in zip(answers(fastcl.maxsim, *strided, lengths.to(kind)), right, strict=True):
            torch.testing.assert_close(ours, truth)


X = torch.ones(2, 3, 4)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((X[0], X), ValueError, r"query_tokens: expected shape \[N, T, D\], got \[3, 4\]"),
        ((X, X[..., :2]), ValueError, r"document_tokens: expected shape \[M, U, 4\], got \[2, 3, 2\]"),
        ((X, X.long()), TypeError, "document_tokens.*int64"),
        ((X, [1.0]), TypeError, "document_tokens.*list"),
        ((X, X, torch.ones(2)), TypeError, "lengths: expected an integer dtype.*float32"),
        ((X, X, torch.ones(3).long()), ValueError, r"lengths: expected shape \[2\], got \[3\]"),
        ((X, X, torch.tensor([1, 4])), ValueError, "lengths: expected 0 to 3, got 4"),
        ((X, X, None, torch.tensor([-1, 3])), ValueError, "query_lengths: expected 0 to 3, got -1"),
        ((X, X.to("meta")), ValueError, "document_tokens: expected device cpu"),
    ],
)
def test_refused(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        fastcl.maxsim(*arguments)
