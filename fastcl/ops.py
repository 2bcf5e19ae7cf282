"""The op `contrast`, which all losses over pos and lse share: schemas, fake kernels, the public function. No loss
formula is here.

Its kernels, forward and backward, are in the compiled parts (CPU, CUDA) or in fallback.py (all other devices). Its
autograd is in ops_autograd.py; gradients of gradients go through the plain torch operations of the fallback.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fastcl import _cuda, fallback
from fastcl.arithmetic import compute_dtype, logaddexp
from fastcl.checks import check_columns, check_scale, functorch_active, matrix, vector
from fastcl.library import LIBRARY, fake, handed_over, implement, none_for, scale_and_factor, take_zeros

LIBRARY.define(
    "contrast_forward(Tensor query, Tensor key, Tensor positive, Tensor scale, Tensor bias, "
    "Tensor row_id, Tensor col_id, Tensor cap, float factor, bool row_grad, bool key_grad, bool bias_grad, "
    "float shift, Tensor row_shift, Tensor rest, Tensor row_weight, Tensor frozen, Tensor frozen_bias, "
    "Tensor frozen_id) "
    "-> (Tensor pos, Tensor lse, Tensor mean_key, Tensor expected, Tensor key_sum, Tensor bias_sum)"
)
LIBRARY.define(
    "contrast_backward(Tensor grad_pos, Tensor grad_lse, Tensor query, Tensor key, Tensor positive, Tensor scale, "
    "Tensor bias, Tensor row_id, Tensor col_id, Tensor cap, Tensor lse, Tensor mean_key, Tensor expected, "
    "Tensor key_sum, Tensor bias_sum, float factor, bool query_grad, bool key_grad, bool positive_grad, "
    "bool scale_grad, bool bias_grad) "
    "-> (Tensor grad_query, Tensor grad_key, Tensor grad_positive, Tensor grad_scale, Tensor grad_bias)"
)
# `contrast` with more in one call, for plain eager code on the CPU (csrc/cpu/packed_cpu.cpp). unit: see `unit_of`.
# kept: 0 if no backward pass follows, 1 if it does, 2 if it also needs the keys.
LIBRARY.define(
    "contrast_packed_forward(Tensor query, Tensor key, Tensor positive, Tensor scale, Tensor bias, "
    "Tensor row_id, Tensor col_id, Tensor cap, float factor, bool row_grad, bool key_grad, bool bias_grad, "
    "float shift, Tensor row_shift, Tensor rest, Tensor row_weight, Tensor frozen, Tensor frozen_bias, "
    "Tensor frozen_id, int unit, int kept) -> (Tensor pos, Tensor lse, Tensor saved)"
)
LIBRARY.define(
    "contrast_packed_backward(Tensor grad_pos, Tensor grad_lse, Tensor query, Tensor key, Tensor positive, "
    "Tensor scale, Tensor bias, Tensor row_id, Tensor col_id, Tensor cap, Tensor lse, Tensor saved, float factor, "
    "bool query_grad, bool key_grad, bool positive_grad, bool scale_grad, bool bias_grad, int unit, bool column_sums) "
    "-> (Tensor grad_query, Tensor grad_key, Tensor grad_positive, Tensor grad_scale, Tensor grad_bias)"
)

from fastcl import _kernels  # noqa: E402, F401  registers the CPU kernels, so it comes after torch and the schemas

_cuda.load()


implement("contrast_forward", fallback.forward)
implement("contrast_backward", fallback.backward)


@fake("contrast_forward")
def _(query: Tensor, key: Tensor, positive: Tensor, scale: Tensor, bias: Tensor, row_id: Tensor, col_id: Tensor,
      cap: Tensor, factor: float, row_grad: bool, key_grad: bool, bias_grad: bool, shift: float, row_shift: Tensor,
      rest: Tensor, row_weight: Tensor, frozen: Tensor, frozen_bias: Tensor,
      frozen_id: Tensor) -> tuple[Tensor, ...]:  # fmt: skip
    dtype = compute_dtype(query, key, positive, frozen)
    n, d = query.shape
    m = key.shape[0]
    return (
        query.new_empty(n if positive.dim() == 2 else 0, dtype=dtype),
        query.new_empty(n, dtype=dtype),
        query.new_empty((n, d) if row_grad else (0,), dtype=dtype),
        query.new_empty(n if key_grad or bias_grad else 0, dtype=dtype),
        query.new_empty((m, d) if key_grad or bias_grad else (0,), dtype=dtype),
        query.new_empty(m if bias_grad else 0, dtype=dtype),
    )


@fake("contrast_backward")
def _(grad_pos: Tensor, grad_lse: Tensor, query: Tensor, key: Tensor, positive: Tensor, scale: Tensor, bias: Tensor,
      row_id: Tensor, col_id: Tensor, cap: Tensor, lse: Tensor, mean_key: Tensor, expected: Tensor,
      key_sum: Tensor, bias_sum: Tensor, factor: float, query_grad: bool, key_grad: bool, positive_grad: bool,
      scale_grad: bool, bias_grad: bool) -> tuple[Tensor, ...]:  # fmt: skip
    def like(wanted: bool, t: Tensor, shape: tuple[Any, ...], dtype: torch.dtype) -> Tensor:
        return t.new_empty(shape if wanted else (0,), dtype=dtype if wanted else lse.dtype)

    return (
        like(query_grad, query, tuple(query.shape), query.dtype),
        like(key_grad, key, tuple(key.shape), key.dtype),
        like(positive_grad, positive, tuple(positive.shape), positive.dtype),
        like(scale_grad, lse, (query.shape[0],), lse.dtype),
        like(bias_grad, lse, (key.shape[0],), lse.dtype),
    )


@fake("contrast_packed_forward")
def _(query: Tensor, key: Tensor, positive: Tensor, scale: Tensor, bias: Tensor, row_id: Tensor, col_id: Tensor,
      cap: Tensor, factor: float, row_grad: bool, key_grad: bool, bias_grad: bool, shift: float, row_shift: Tensor,
      rest: Tensor, row_weight: Tensor, frozen: Tensor, frozen_bias: Tensor, frozen_id: Tensor, unit: int,
      kept: int) -> tuple[Tensor, ...]:  # fmt: skip
    dtype = compute_dtype(query, key, positive, frozen)
    (n, d), m, has_positive = query.shape, key.shape[0], positive.dim() == 2
    size = row_grad * n * d + (unit > 0) * (1 + has_positive) * n * (d + 1) + (unit == 2 and kept == 2) * m * (d + 1)
    size += (key_grad or bias_grad) * (n + m * d) + bias_grad * m
    shapes = n if has_positive else 0, n, size if kept else 0
    return tuple(query.new_empty(shape, dtype=dtype) for shape in shapes)


@fake("contrast_packed_backward")
def _(grad_pos: Tensor, grad_lse: Tensor, query: Tensor, key: Tensor, positive: Tensor, scale: Tensor, bias: Tensor,
      row_id: Tensor, col_id: Tensor, cap: Tensor, lse: Tensor, saved: Tensor, factor: float, query_grad: bool,
      key_grad: bool, positive_grad: bool, scale_grad: bool, bias_grad: bool, unit: int,
      column_sums: bool) -> tuple[Tensor, ...]:  # fmt: skip
    inputs = ((query_grad, query), (key_grad and unit < 3, key), (positive_grad, positive))
    rows = [t.new_empty(t.shape) if wanted else lse.new_empty(0) for wanted, t in inputs]
    return *rows, lse.new_empty(len(query) if scale_grad else 0), lse.new_empty(len(key) if bias_grad else 0)


for _name in ("contrast_packed_forward", "contrast_packed_backward"):
    take_zeros(_name)

from fastcl.ops_autograd import (  # noqa: E402  reads the ops above
    NO_FROZEN,
    NO_SUMS,
    NO_VECTORS,
    Eager,
    Functorch,
    Given,
    Packed,
    backward_op,
    forward_op,
    in_json,
    run,
    run_packed,
    unit_of,
)

__all__ = [
    "NO_FROZEN",
    "NO_SUMS",
    "PLAIN",
    "Expected",
    "Frozen",
    "backward_op",
    "contrast",
    "contrast_expecting",
    "forward_op",
]

# The names of the tensors that `contrast` passes to the op, as its caller knows them, for errors.
_NAMES = ("query", "key", "positive", "scale", "bias", "row_id", "col_id", "cap")
_ABSENT = (None, None, None)
_NO_GRADIENT = (False,) * 5
_MORE_NAMES = ("row_shift", "rest", "weight", "queue", "queue.log_q", "queue.ids")
# The arguments of the forward op without sums over columns.
PLAIN = (False, False, in_json(-math.inf), *NO_VECTORS, *NO_FROZEN)


class Expected(NamedTuple):
    """The gradient of lse that a caller expects, up to one common factor: the derivative by lse_i of

        weight_i * log(exp(pos_i + shift + row_shift_i) + exp(rest_i) + exp(lse_i))

    With it the forward pass sums the gradient of the keys while it has the weights, which saves the matrix product that
    computes the similarities again in the backward pass. Only speed depends on it: where another gradient comes than
    the expected one, the backward pass computes as it does without.
    """

    shift: float  # -inf: the positive takes no part
    row_shift: Tensor | None = None  # [N]
    rest: Tensor | None = None  # [N], the log-sum-exp of other negatives
    weight: Tensor | None = None  # [N]

    def with_positive(self, pos: Tensor) -> "Expected":
        """The expectation for a positive [N] that the kernel does not compute; it takes the place of `rest`."""
        return Expected(-math.inf, None, None if self.shift == -math.inf else pos + self.shift, self.weight)

    def beside(self, total: Tensor | None, share: float | Tensor | None) -> "Expected":
        """The expectation with other negatives [N] in `rest`, and with a factor of the gradient for each row."""
        expected = self
        if total is not None:
            expected = expected._replace(rest=total if self.rest is None else logaddexp(total, self.rest))
        if isinstance(share, Tensor) and share.dim():
            expected = expected._replace(weight=share if self.weight is None else share * self.weight)
        return expected

    def check(self, n: int, device: torch.device, has_positive: bool) -> None:
        check_shift(self.shift, has_positive)
        for name, t in zip(self._fields[1:], self[1:], strict=True):
            if t is not None:
                vector(f"expected.{name}", t, n, device)


def check_shift(shift: float, has_positive: bool) -> None:
    if isinstance(shift, bool) or not isinstance(shift, (int, float)):
        raise TypeError(f"expected.shift: expected a number, got {type(shift).__name__}")
    if shift != -math.inf and not has_positive:
        raise ValueError(f"expected.shift: expected -inf where no positive is given, got {shift}")


class Frozen(NamedTuple):
    """More columns for the rows of a call, which get no gradient: they share query, scale and cap with the others."""

    key: Tensor  # [F, D]
    bias: Tensor | None = None  # [F]
    id: Tensor | None = None  # [F]; together with row_id


# A library that was compiled before the op was written has no kernel of it: a working copy that was not built again.
_BUILT = torch._C._dispatch_has_kernel_for_dispatch_key("fastcl::contrast_packed_forward", "CPU")
_PACKED = _BUILT and not fallback.FORCED


def packs(query: Tensor) -> bool:
    """Whether one call of an op does all that is done to the rows: in plain eager code on the CPU."""
    return (
        _PACKED
        and query.is_cpu
        and not torch.compiler.is_compiling()
        and not functorch_active()
        and forward_ad._current_level < 0
    )


def takes_frozen(query: Tensor) -> bool:
    """Whether one call can sum over frozen columns beside others."""
    return query.is_cpu and not functorch_active() and forward_ad._current_level < 0


def contrast(
    query: Tensor,  # [N, D]
    key: Tensor,  # [M, D]
    positive: Tensor | None = None,  # [N, D]
    *,
    scale: float | Tensor = 1.0,  # a number, [] or [N]
    bias: Tensor | None = None,  # [M]
    row_id: Tensor | None = None,  # [N]
    col_id: Tensor | None = None,  # [M]
    cap: Tensor | None = None,  # [N]
) -> tuple[Tensor | None, Tensor]:
    """Two numbers per row, of which contrastive losses are made, without storing the N x M logits.

        pos_i = scale_i <q_i, p_i>
        lse_i = log sum over { j : row_id_i != col_id_j, x_ij <= cap_i } of exp(x_ij + bias_j)
        x_ij = scale_i <q_i, k_j>

    Args:
        query: [N, D], float64, float32, bfloat16 or float16, any strides.
        key: [M, D]; M may be 0.
        positive: [N, D]; without it `pos` is None. The positive takes no part in the sum.
        scale: 1 / temperature: a finite number of any sign, a 0-d tensor, or one value per row [N]. Tensors get a
            gradient, and their values are not checked: a value that is not finite counts as NaN.
        bias: [M], added to the logits of each column, such as minus its log sampling probability; -inf takes the column
            out.
        row_id, col_id: [N] and [M], any integer dtype, both or neither. A column whose id equals the row's is left out
            of that row's sum.
        cap: [N], floating: a column whose scaled similarity scale_i <q_i, k_j>, without its bias, exceeds cap_i is left
            out of row i's sum. It has no gradient. Similarities within rounding of the cap may be taken either way.

    Returns:
        (pos [N] or None, lse [N]), float32, or float64 if query, key or positive is. A row with an empty sum has
        lse = -inf and zero gradient. NaN inputs give NaN in the rows that they take part in.

    Infinities: a row with a logit of +inf (from an infinite input, a bias of +inf or overflow) has lse = +inf, or NaN
    if another of its logits is NaN. Columns left out by their id or the cap do not count. Since exp(logit - lse) is NaN
    where both are +inf, such a row gives NaN gradients to its query and scale and to the key and bias of every column
    whose logit is +inf; all other gradients are unaffected. A logit beyond 6e29 in absolute value (6e299 in float64)
    may count as infinite. On CUDA an infinite entry of a float32 query or key may give NaN in every logit that it takes
    part in.

    Gradients: query, key, positive, scale and bias; only those that are needed are computed. Keys without requires_grad
    cost no product in the backward pass and are not saved, so that their storage may be overwritten between forward and
    backward. Backward may run more than once. Gradients of gradients (create_graph=True, torch.func.grad twice) go
    through plain torch operations, which are slower and store the N x M weights. Outside of torch.func they need a key
    that requires grad, since other keys are not saved (RuntimeError). Forward-mode differentiation raises
    NotImplementedError.

    Autocast has no effect. Products and sums have the accuracy of float32 (float64 for float64 inputs); 16-bit rows are
    read as they are, without a wider copy in memory.

    Errors: TypeError for types and dtypes, ValueError for shapes, devices and values, each naming the argument.

    >>> import torch
    >>> q, k = torch.eye(2), torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> pos, lse = contrast(q, k, k[:2], scale=2.0)
    >>> [round(v, 4) for v in lse.tolist()]  # log(e^2 + e^0 + e^2), twice
    [2.7586, 2.7586]
    """
    return contrast_expecting(None, query, key, positive, scale=scale, bias=bias, row_id=row_id, col_id=col_id, cap=cap)


def contrast_expecting(
    expected: Expected | None,
    query: Tensor,
    key: Tensor,
    positive: Tensor | None = None,
    *,
    scale: float | Tensor = 1.0,
    bias: Tensor | None = None,
    row_id: Tensor | None = None,
    col_id: Tensor | None = None,
    cap: Tensor | None = None,
) -> tuple[Tensor | None, Tensor]:
    """`contrast` for losses that know the gradient that they will send back, which is faster (see `Expected`)."""
    matrix("query", query)
    (n, d), device = query.shape, query.device
    matrix("key", key, None, d, device)
    if positive is not None:
        matrix("positive", positive, n, d, device)
    check_scale("scale", scale, n, device)
    row_id, col_id = check_columns(n, key.shape[0], device, bias, row_id, col_id)
    if cap is not None:
        vector("cap", cap, n, device)
    if expected is not None:
        expected.check(n, device, positive is not None)
    return contrast_checked(expected, query, key, positive, scale, bias, row_id, col_id, cap)


def contrast_checked(
    expected: Expected | None,
    query: Tensor,
    key: Tensor,
    positive: Tensor | None,
    scale: float | Tensor,
    bias: Tensor | None,
    row_id: Tensor | None,
    col_id: Tensor | None,
    cap: Tensor | None = None,
    frozen: Frozen | None = None,
    unit_rows: bool = False,
    unit_key: bool = False,
) -> tuple[Tensor | None, Tensor]:
    """`contrast_expecting` for callers that have checked the arguments, under the names of their own arguments.

    `frozen` are more columns, where `takes_frozen` says that they may be; unit_rows: divide the rows of query and
    positive by their length, unit_key: those of key, both where `packs` says that it may be asked for.
    """
    none = none_for(query)
    scale_t, factor = scale_and_factor(scale, none)
    cap = None if cap is None else cap.detach()
    tensors = handed_over(_NAMES, (query, key, positive, scale_t, bias, row_id, col_id, cap), none)
    packed = unit_rows or packs(query)
    # torch.func has an answer or refuses, as forward mode does.
    if not packed and (functorch_active() or forward_ad._current_level >= 0):
        pos, lse, _ = Functorch.apply(*tensors, factor)
        return (None if positive is None else pos), lse
    q, k, p, s, b, rows, cols, most = tensors
    learns = torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or p.requires_grad or s.requires_grad or b.requires_grad
    )
    # Only the kernels for the CPU sum over columns in the forward pass.
    expecting = learns and expected is not None and query.is_cpu and not fallback.FORCED
    shift, *vectors = expected if expecting and expected is not None else (-math.inf, *_ABSENT)
    sums: tuple[Tensor, ...] = (none, none, none)
    beside = sums
    plain = vectors[0] is None and vectors[1] is None and vectors[2] is None and frozen is None
    if not (plain and packed):  # compiled code must not get one tensor several times
        more = handed_over(_MORE_NAMES, (*vectors, *(frozen or _ABSENT)), none)
        sums, beside = tuple(more[:3]), tuple(more[3:])
    unit = unit_of(unit_rows, unit_key, q, k, p)
    given = Given(rows, cols, most, factor, expecting, in_json(shift), sums, beside, unit)
    if learns:
        pos, lse = (Packed if packed else Eager).apply(q, k, p, s, b, given)
    else:
        pos, lse, *_ = (run_packed if packed else run)(q, k, p, s, b, given, _NO_GRADIENT)
    return (None if positive is None else pos), lse
