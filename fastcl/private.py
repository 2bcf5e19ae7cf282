"""Inner products that are stored, by torch's products with gradients outside of autocast."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fastcl.arithmetic import compute_dtype, no_autocast


def stored_similarity(query: Tensor, keys: Tensor) -> Tensor:
    """Inner products of query [N, D] with keys [M, D] of all rows, [N, M], or [N, K, D] of each row, [N, K]."""
    if keys.dim() == 3:
        return private_similarity(query, keys)
    dtype = compute_dtype(query, keys)
    return product(query.to(dtype), keys.to(dtype).T)


def private_similarity(query: Tensor, keys: Tensor) -> Tensor:
    """[N, K], inner products of query [N, D] with the keys [N, K, D] of each row."""
    dtype = compute_dtype(query, keys)
    # torch.compile traces the backward pass here, outside of autocast, and Dynamo refuses a Function with a jvp.
    products = _products if torch.compiler.is_compiling() else _RowProducts.apply
    return products(query.to(dtype), keys.to(dtype))


@no_autocast
def _products(query: Tensor, keys: Tensor) -> Tensor:
    return torch.einsum("nd,nkd->nk", query, keys)


class _RowProducts(Function):
    """`_products` whose gradients are computed outside of autocast, even where backward is called under autocast."""

    generate_vmap_rule = True

    @staticmethod
    def forward(query: Tensor, keys: Tensor) -> Tensor:
        return _products(query, keys)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        query, keys = ctx.saved_tensors
        d_query = _combined(grad, keys) if ctx.needs_input_grad[0] else None
        return d_query, grad[..., None] * query[:, None] if ctx.needs_input_grad[1] else None

    @staticmethod
    def jvp(ctx: Any, d_query: Tensor, d_keys: Tensor) -> Tensor:
        query, keys = ctx.saved_tensors
        return _products(d_query, keys) + _products(query, d_keys)


@no_autocast
def _combined(weights: Tensor, keys: Tensor) -> Tensor:
    return torch.bmm(weights[:, None], keys)[:, 0]


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, with gradients computed outside of autocast, even where backward is called under autocast."""
    # torch.compile traces the backward pass here, outside of autocast, and Dynamo refuses a Function with a jvp.
    return _matmul(a, b) if torch.compiler.is_compiling() else _Product.apply(a, b)


@no_autocast
def _matmul(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


class _Product(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        return _matmul(a, b)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        a, b = ctx.saved_tensors
        d_a = product(grad, b.T) if ctx.needs_input_grad[0] else None
        return d_a, product(a.T, grad) if ctx.needs_input_grad[1] else None

    @staticmethod
    def jvp(ctx: Any, d_a: Tensor, d_b: Tensor) -> Tensor:
        a, b = ctx.saved_tensors
        return _matmul(d_a, b) + _matmul(a, d_b)
