"""The op's two kernels in chunked PyTorch, for devices without compiled kernels; memory O(chunk * M).

They are registered for all devices; a compiled kernel takes precedence where there is one. They follow the rules of the
compiled kernels (`fastcl.ops.contrast`) and have no features of their own. Autograd can differentiate them, since
nothing is written in place and empty rows give zeros; double backward relies on that.
"""

import functools
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fastcl._library import BUILT
from fastcl.arithmetic import compute_dtype, finite_or_nan, logaddexp, logsumexp, no_autocast, softmax_weights

# The logits held at once take at most 16 MiB in float32: enough work per launch, and small against the inputs.
_CHUNK_ELEMENTS = 1 << 22


def _forced() -> bool:
    value = os.environ.get("FASTCL_FALLBACK", "")
    if value not in ("", "0", "1"):
        raise ValueError(f"FASTCL_FALLBACK: expected 0 or 1, got {value!r}")
    return value == "1"


# Whether FASTCL_FALLBACK=1 asks for these kernels on the CPU too, read once at import. Then no warning is needed.
WANTED = _forced()
# Whether these kernels run on the CPU: because of that wish, or because this installation has no others.
FORCED = WANTED or not BUILT
_announced: set[str] = {"cpu"} if WANTED else set()


def _announce(device: torch.device) -> None:
    if device.type not in _announced:
        _announced.add(device.type)
        warnings.warn(
            f"fastcl has no compiled kernel for {device.type} here; using chunked PyTorch (see fastcl.show_config())",
            stacklevel=2,
        )


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` as it is registered: it warns once per type of device that no compiled kernel runs there."""

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        _announce(args[0].device)
        return function(*args)

    return run


def _row_scale(scale: Tensor, factor: float, n: int, like: Tensor) -> Tensor:
    if scale.dim() == 1 and scale.numel() == 0 and n != 0:
        return finite_or_nan(torch.full((n,), factor, dtype=like.dtype, device=like.device))
    return finite_or_nan(scale.to(like) * factor).expand(n)


def chunks(n: int, m: int) -> Iterator[slice]:
    step = max(1, _CHUNK_ELEMENTS // max(1, m))
    return (slice(a, min(n, a + step)) for a in range(0, max(1, n), step))


def _put(x: Tensor, out: Tensor | None, value: float) -> Tensor:
    return x if out is None else x.masked_fill(out, value)


def _logits(
    q: Tensor, k: Tensor, bias: Tensor, row_id: Tensor, col_id: Tensor, cap: Tensor, rows: slice
) -> tuple[Tensor, Tensor | None]:
    """Logits, -inf where a column is left out of a row's sum, and where that is: None if nowhere."""
    x = q[rows] @ k.T
    out = None
    if row_id.numel():
        out = row_id[rows, None] == col_id
    if cap.numel():
        above = x > cap.to(x)[rows, None]
        out = above if out is None else out | above
    if bias.numel():
        x = x + bias.to(x)
    return _put(x, out, -torch.inf), out


@no_autocast
def forward(
    query: Tensor,  # [N, D]
    key: Tensor,  # [M, D]
    positive: Tensor,  # [N, D], or [0]
    scale: Tensor,  # [], [N], or [0]
    bias: Tensor,  # [M], or [0]
    row_id: Tensor,  # [N], or [0]
    col_id: Tensor,  # [M], or [0]
    cap: Tensor,  # [N], or [0]
    factor: float,
    row_grad: bool,
    *more: Any,  # the expected gradients, unused: only compiled kernels sum over columns here; then the frozen columns
) -> tuple[Tensor, ...]:
    frozen, frozen_bias, frozen_id = more[-3:] if more else (query.new_empty(0),) * 3
    dtype = compute_dtype(query, key, positive, frozen)
    n = query.shape[0]
    q = query.to(dtype)
    s = _row_scale(scale, factor, n, q)
    pos = s * (q * positive.to(dtype)).sum(1) if positive.dim() == 2 else q.new_empty(0)
    scaled = q * s[:, None]

    def sums(key: Tensor, bias: Tensor, col_id: Tensor) -> tuple[Tensor, Tensor]:
        k, lse, mean_key = key.to(dtype), [], []
        ids = row_id if col_id.numel() else col_id
        for rows in chunks(n, k.shape[0]):
            x, out = _logits(scaled, k, bias, ids, col_id, cap, rows)
            lse.append(logsumexp(x))
            if row_grad:
                mean_key.append(_put(softmax_weights(x, lse[-1]), out, 0.0) @ k)
        return torch.cat(lse), torch.cat(mean_key) if row_grad else q.new_empty(0)

    lse, mean_key = sums(key, bias, col_id)
    if frozen.dim() == 2:
        (own, own_mean), (other, other_mean) = (lse, mean_key), sums(frozen, frozen_bias, frozen_id)
        lse = logaddexp(own, other)
        if row_grad:
            mean_key = softmax_weights(own[:, None], lse) * own_mean + softmax_weights(other[:, None], lse) * other_mean
    nothing = (q.new_empty(0) for _ in range(3))  # three tensors, since the results of an op must not share memory
    return pos, lse, mean_key, *nothing


@no_autocast
def backward(
    grad_pos: Tensor,
    grad_lse: Tensor,
    query: Tensor,
    key: Tensor,
    positive: Tensor,
    scale: Tensor,
    bias: Tensor,
    row_id: Tensor,
    col_id: Tensor,
    cap: Tensor,
    lse: Tensor,
    mean_key: Tensor,
    expected: Tensor,
    key_sum: Tensor,
    bias_sum: Tensor,
    factor: float,
    query_grad: bool,
    key_grad: bool,
    positive_grad: bool,
    scale_grad: bool,
    bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    q = query.to(lse.dtype)
    # A row with an empty sum has zero gradient, whatever gradient the loss sends into its lse.
    empty = lse == -torch.inf
    grad_lse = grad_lse.masked_fill(empty, 0.0)
    s = _row_scale(scale, factor, q.shape[0], q)
    # Gradients that are not wanted are separate empty tensors, since the results of an op must not share memory.
    d_query, d_key, d_positive, d_scale, d_bias = (q.new_empty(0) for _ in range(5))
    if query_grad or scale_grad:
        row = grad_lse[:, None] * mean_key.masked_fill(empty[:, None], 0.0)
        if positive.dim() == 2:
            row = row + grad_pos[:, None] * positive.to(q)
        if query_grad:
            d_query = (s[:, None] * row).to(query.dtype)
        if scale_grad:
            d_scale = factor * (q * row).sum(1)
    if positive_grad:
        d_positive = ((s * grad_pos)[:, None] * q).to(positive.dtype)
    if key_grad or bias_grad:
        k = key.to(q)
        if key_grad:
            d_key = torch.zeros_like(k)
        if bias_grad:
            d_bias = k.new_zeros(k.shape[0])
        scaled = q * s[:, None]
        for rows in chunks(q.shape[0], k.shape[0]):
            x, out = _logits(scaled, k, bias, row_id, col_id, cap, rows)
            w = _put(softmax_weights(x, lse[rows]), out, 0.0) * grad_lse[rows, None]
            if key_grad:
                d_key = torch.addmm(d_key, w.T, scaled[rows])
            if bias_grad:
                d_bias = d_bias + w.sum(0)
        if key_grad:
            d_key = d_key.to(key.dtype)
    return d_query, d_key, d_positive, d_scale, d_bias
