"""The op `maxsim`, the similarity of late interaction: schemas, autograd, fake kernels, and chunked PyTorch for devices
without compiled kernels. No loss formula belongs here.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from fastcl import fallback
from fastcl.arithmetic import compute_dtype, no_autocast
from fastcl.checks import as_ids, check_tensor, functorch_active, readable
from fastcl.library import LIBRARY, fake, handed_over, implement, none_for

# `place` says which of a document's tokens each query token chose, int32 [N, M, T], -1 for none. Absent lengths are
# passed as an empty tensor (see library.py).
LIBRARY.define(
    "maxsim_forward(Tensor query, Tensor document, Tensor query_lengths, Tensor lengths, bool places) "
    "-> (Tensor score, Tensor place)"
)
LIBRARY.define(
    "maxsim_backward(Tensor grad, Tensor query, Tensor document, Tensor place, bool query_grad, bool document_grad) "
    "-> (Tensor grad_query, Tensor grad_document)"
)


def _beyond(lengths: Tensor, tokens: int) -> Tensor:
    """Where the tokens are padding: bool [items, tokens]."""
    return torch.arange(tokens, device=lengths.device) >= lengths[:, None]


@no_autocast
def _chunked_forward(
    query: Tensor, document: Tensor, query_lengths: Tensor, lengths: Tensor, places: bool
) -> tuple[Tensor, Tensor]:
    dtype, (n, t, d), (m, u, _) = compute_dtype(query, document), query.shape, document.shape
    token = query.reshape(n * t, d).to(dtype)
    score, place = [], []
    for some in fallback.chunks(m, n * t * u):
        part = document[some].to(dtype)
        x = (token @ part.reshape(len(part) * u, d).T).view(n, t, len(part), u)
        if lengths.numel():
            x = x.masked_fill(_beyond(lengths[some], u), -torch.inf)
        best, at = x.max(3) if u else (x.new_full(x.shape[:3], -torch.inf), x.new_zeros(x.shape[:3], dtype=torch.int64))
        at = at.masked_fill(best == -torch.inf, -1)
        if query_lengths.numel():
            out = _beyond(query_lengths, t)[:, :, None]
            best, at = best.masked_fill(out, 0.0), at.masked_fill(out, -1)
        score.append(best.sum(1))
        place.append(at.transpose(1, 2).to(torch.int32))
    if not places:
        return torch.cat(score, 1), query.new_empty(0, dtype=torch.int32)
    return torch.cat(score, 1), torch.cat(place, 1).contiguous()


@no_autocast
def _chunked_backward(
    grad: Tensor, query: Tensor, document: Tensor, place: Tensor, query_grad: bool, document_grad: bool
) -> tuple[Tensor, Tensor]:
    (n, t, d), (m, u, _) = query.shape, document.shape
    q, k = query.to(grad).view(n, 1, t, d), document.to(grad).view(m * u, d)
    d_query, d_document = grad.new_empty(0), grad.new_empty(0)
    if query_grad:
        d_query = grad.new_zeros(n, t, d)
    if document_grad:
        d_document = grad.new_zeros(m * u, d)
    for some in fallback.chunks(m, n * t * d):
        chosen = place[:, some]
        weight = grad[:, some, None].where(chosen >= 0, 0.0)[..., None]
        start = u * torch.arange(m, device=place.device)[some, None]
        row = (chosen.clamp(min=0) + start).to(torch.int64).view(-1)
        if not u:
            continue
        if query_grad:
            d_query = d_query + (weight * k[row].view(*chosen.shape, d)).sum(1)
        if document_grad:
            d_document = d_document.index_add(0, row, (weight * q).reshape(len(row), d))
    return (
        d_query.to(query.dtype) if query_grad else d_query,
        d_document.view(m, u, d).to(document.dtype) if document_grad else d_document,
    )


implement("maxsim_forward", _chunked_forward)
implement("maxsim_backward", _chunked_backward)


@fake("maxsim_forward")
def _(query: Tensor, document: Tensor, query_lengths: Tensor, lengths: Tensor, places: bool) -> tuple[Tensor, Tensor]:
    n, m = query.shape[0], document.shape[0]
    score = query.new_empty((n, m), dtype=compute_dtype(query, document))
    return score, query.new_empty((n, m, query.shape[1]) if places else (0,), dtype=torch.int32)


@fake("maxsim_backward")
def _(grad: Tensor, query: Tensor, document: Tensor, place: Tensor, query_grad: bool,
      document_grad: bool) -> tuple[Tensor, Tensor]:  # fmt: skip
    return query.new_empty(query.shape if query_grad else 0), document.new_empty(document.shape if document_grad else 0)


forward_op = torch.ops.fastcl.maxsim_forward.default
backward_op = torch.ops.fastcl.maxsim_backward.default


class _Gradients(Function):
    """The gradients as a Function, which makes them differentiable: they are linear in grad and in either input."""

    generate_vmap_rule = True

    @staticmethod
    def forward(grad: Tensor, query: Tensor, document: Tensor, place: Tensor, *needs: bool) -> Any:
        return backward_op(grad, query, document, place, *needs)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, query_grad, document_grad = inputs
        ctx.needs = (query_grad, document_grad)
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        *differentiable, place = ctx.saved_tensors
        pull_back = torch.func.vjp(lambda *x: _chunked_backward(*x, place, *ctx.needs), *differentiable)[1]
        return *pull_back(grads), None, None, None


class _MaxSim(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor]:
        return forward_op(*inputs, True)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(inputs[0], inputs[1], output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:
        needs = ctx.needs_input_grad[:2]
        run = _Gradients.apply if torch.is_grad_enabled() else backward_op
        found = run(grad.contiguous(), *ctx.saved_tensors, *needs)
        return *(g if needed else None for g, needed in zip(found, needs, strict=True)), None, None


def maxsim(
    query_tokens: Tensor,  # [N, T, D]
    document_tokens: Tensor,  # [M, U, D]
    lengths: Tensor | None = None,  # [M]
    query_lengths: Tensor | None = None,  # [N]
) -> Tensor:
    """The similarity of late interaction of every query and document: each token of the query is compared with the
    most similar token of the document (ColBERT, Khattab & Zaharia 2020).

        score_ij = sum over the tokens t of query i of max over the tokens u of document j of <q_it, d_ju>

    The N x M x T x U similarities are not stored; for the backward pass, N x M x T places of maxima are.

    Args:
        query_tokens, document_tokens: [N, T, D] and [M, U, D], float64, float32, bfloat16 or float16, used as they
            are: normalise them before, where cosines are wanted.
        lengths: [M], any integer dtype: how many of a document's U tokens are real, from the first on; the rest is
            padding, which is not read. None: all are.
        query_lengths: [N], the same of the queries.

    Returns: scores [N, M], float32, or float64 if any input is. A query without tokens has scores of 0. The score of
    any other query with a document without tokens is -inf, which takes the document out of a softmax.

    Gradients: of both inputs, any number of times; a score of -inf passes none on. Among equal maxima the first token
    takes the gradient. NaN stays NaN.

    Errors: TypeError for types and dtypes, ValueError for shapes, devices and values, each naming the argument.

    >>> import torch, fastcl
    >>> import torch.nn.functional as F
    >>> query = F.normalize(torch.tensor([[[1.0, 0.0], [0.0, 1.0]], [[0.0, 1.0], [0.0, 1.0]]]), dim=2)
    >>> document = F.normalize(torch.tensor([[[1.0, 1.0], [1.0, 0.0]], [[0.0, 1.0], [9.0, 9.0]]]), dim=2)
    >>> score = fastcl.maxsim(query, document, lengths=torch.tensor([2, 1]))
    >>> score
    tensor([[1.7071, 1.0000],
            [1.4142, 2.0000]])
    >>> loss = F.cross_entropy(score / 0.1, torch.arange(2))  # a document of the same place is the positive
    """
    check_tensor("query_tokens", query_tokens, ("N", "T", "D"))
    n, t, d = query_tokens.shape
    check_tensor("document_tokens", document_tokens, ("M", "U", d), query_tokens.device)
    m, u, _ = document_tokens.shape
    given = [query_tokens, document_tokens]
    for name, value, shape in (("query_lengths", query_lengths, (n, t)), ("lengths", lengths, (m, u))):
        given.append(none_for(query_tokens) if value is None else _lengths(name, value, *shape, query_tokens.device))
    tensors = handed_over(("query_tokens", "document_tokens", "query_lengths", "lengths"), tuple(given), given[0])
    transformed = functorch_active() or forward_ad._current_level >= 0
    if not transformed and not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
        return forward_op(*tensors, False)[0]
    return _MaxSim.apply(*tensors)[0]


def _lengths(name: str, lengths: Tensor, count: int, tokens: int, device: torch.device) -> Tensor:
    lengths = as_ids(name, lengths, (count,), device)
    if readable(lengths) and count:
        low, high = (int(x) for x in torch.aminmax(lengths))
        if low < 0 or high > tokens:
            raise ValueError(f"{name}: expected 0 to {tokens}, got {low if low < 0 else high}")
    return lengths
