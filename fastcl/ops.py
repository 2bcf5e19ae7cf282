"""The op `contrast`, which all losses over pos and lse share: schemas, fake kernels, autograd. No loss formula is here.

Its kernels, forward and backward, are in the compiled parts (CPU, CUDA) or in fallback.py (all other devices).
Gradients of gradients go through the plain torch operations of the fallback.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from fastcl import _cuda, fallback
from fastcl.arithmetic import compute_dtype, logaddexp
from fastcl.checks import check_columns, check_scale, functorch_active, matrix, vector
from fastcl.library import LIBRARY, NONE, handed_over, implement, none_for, scale_and_factor

LIBRARY.define(
    "contrast_forward(Tensor query, Tensor key, Tensor positive, Tensor scale, Tensor bias, "
    "Tensor row_id, Tensor col_id, Tensor cap, float factor, bool row_grad, bool key_grad, bool bias_grad, "
    "float shift, Tensor row_shift, Tensor rest, Tensor row_weight) "
    "-> (Tensor pos, Tensor lse, Tensor mean_key, Tensor expected, Tensor key_sum, Tensor bias_sum)"
)
LIBRARY.define(
    "contrast_backward(Tensor grad_pos, Tensor grad_lse, Tensor query, Tensor key, Tensor positive, Tensor scale, "
    "Tensor bias, Tensor row_id, Tensor col_id, Tensor cap, Tensor lse, Tensor mean_key, Tensor expected, "
    "Tensor key_sum, Tensor bias_sum, float factor, bool query_grad, bool key_grad, bool positive_grad, "
    "bool scale_grad, bool bias_grad) "
    "-> (Tensor grad_query, Tensor grad_key, Tensor grad_positive, Tensor grad_scale, Tensor grad_bias)"
)

from fastcl import _kernels  # noqa: E402, F401  registers the CPU kernels, so it comes after torch and the schemas

_cuda.load()


implement("contrast_forward", fallback.forward)
implement("contrast_backward", fallback.backward)


@torch.library.register_fake("fastcl::contrast_forward", lib=LIBRARY)
def _(query: Tensor, key: Tensor, positive: Tensor, scale: Tensor, bias: Tensor, row_id: Tensor, col_id: Tensor,
      cap: Tensor, factor: float, row_grad: bool, key_grad: bool, bias_grad: bool, shift: float, row_shift: Tensor,
      rest: Tensor, row_weight: Tensor) -> tuple[Tensor, ...]:  # fmt: skip
    dtype = compute_dtype(query, key, positive)
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


@torch.library.register_fake("fastcl::contrast_backward", lib=LIBRARY)
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


forward_op = torch.ops.fastcl.contrast_forward.default
backward_op = torch.ops.fastcl.contrast_backward.default


# The names of the tensors that `contrast` passes to the op, as its caller knows them, for errors.
_NAMES = ("query", "key", "positive", "scale", "bias", "row_id", "col_id", "cap", "row_shift", "rest", "weight")
# The arguments of the forward op without sums over columns, and the empty sums for the backward op.
PLAIN = (False, False, -math.inf, NONE, NONE, NONE)
NO_SUMS = (NONE, NONE, NONE)


def _in_json(shift: float) -> float:
    """`shift`, with the lowest double in place of -inf, which the op treats alike: AOTInductor writes an op's arguments
    as JSON, which has no infinity.
    """
    # The number is a literal, since under torch.compile(dynamic=True) a variable would be an input of the graph.
    return max(shift, -1.7976931348623157e308)


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


class _Backward(Function):
    """The backward op as a Function, which makes gradients differentiable, by plain torch with N x M numbers in memory.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        return backward_op(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:12])
        ctx.factor, *ctx.wanted = inputs[15:]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        row_id, col_id, cap, lse, mean_key = ctx.saved_tensors[7:]
        differentiable = ctx.saved_tensors[:7]
        query_grad, key_grad, positive_grad, scale_grad, bias_grad = ctx.wanted
        sums = query_grad or key_grad or scale_grad or bias_grad
        if sums and differentiable[3].dim() != 2:
            raise RuntimeError(
                "fastcl.contrast: double backward needs the key, which is not saved unless it requires grad (a queue "
                "may overwrite it); pass a key that requires grad"
            )

        def first_order(grad_pos: Tensor, grad_lse: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
            again = fallback.forward(*inputs, row_id, col_id, cap, ctx.factor, True)[1:3] if sums else (lse, mean_key)
            saved = (row_id, col_id, cap, *again, *NO_SUMS)
            return fallback.backward(grad_pos, grad_lse, *inputs, *saved, ctx.factor, *ctx.wanted)

        pull_back = torch.func.vjp(first_order, *differentiable)[1]
        found = (*pull_back(grads), *(None,) * 14)
        return tuple(g if needed else None for g, needed in zip(found, ctx.needs_input_grad, strict=True))


def _grads(ctx: Any, grad_pos: Tensor, grad_lse: Tensor) -> tuple[Any, ...]:
    saved = ctx.saved_tensors  # unpacked once; checkpointing refuses to do so twice
    scale, bias = saved[3:5]
    needs = ctx.needs_input_grad[:5]
    # Grad mode is on in a backward pass with create_graph=True, whose results may be differentiated.
    run = _Backward.apply if torch.is_grad_enabled() else backward_op
    d_query, d_key, d_positive, d_scale, d_bias = run(
        grad_pos.contiguous(), grad_lse.contiguous(), *saved, ctx.factor, *needs
    )
    if needs[3]:
        d_scale = (d_scale.sum() if scale.dim() == 0 else d_scale).to(scale.dtype)
    if needs[4]:
        d_bias = d_bias.to(bias.dtype)
    grads = (d_query, d_key, d_positive, d_scale, d_bias)
    return tuple(g if wanted else None for g, wanted in zip(grads, needs, strict=True))


class _Eager(Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, positive: Tensor, scale: Tensor, bias: Tensor, row_id: Tensor,
                col_id: Tensor, cap: Tensor, row_shift: Tensor, rest: Tensor, row_weight: Tensor, factor: float,
                shift: float, expecting: bool) -> Any:  # fmt: skip
        needs = ctx.needs_input_grad
        pos, lse, *rows = forward_op(
            query, key, positive, scale, bias, row_id, col_id, cap, factor, needs[0] or needs[3],
            expecting and needs[1], expecting and needs[4], shift, row_shift, rest, row_weight,
        )  # fmt: skip
        ctx.factor = factor
        if not (needs[1] or needs[4]):
            # Frozen columns take no part in the backward pass. They are not saved, so that a queue may be overwritten
            # between forward and backward.
            key = bias = col_id = cap = none_for(query)
        ctx.save_for_backward(query, key, positive, scale, bias, row_id, col_id, cap, lse, *rows)
        return pos, lse

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return *_grads(ctx, *grads), *(None,) * 9


class _Functorch(Function):
    """`_Eager` for torch.func, which needs `setup_context`. That costs 16 us per call, which plain autograd avoids."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Any) -> Any:
        return forward_op(*inputs, True, False, False, _in_json(-math.inf), *PLAIN[3:])[:3]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, lse, mean_key = output
        ctx.mark_non_differentiable(mean_key)
        *tensors, ctx.factor = inputs
        # Frozen keys are saved too: torch.func often takes second derivatives, and its functions overwrite no tensors.
        ctx.save_for_backward(*tensors, lse, mean_key, *NO_SUMS)

    @staticmethod
    def backward(ctx: Any, grad_pos: Tensor, grad_lse: Tensor, _: Any) -> Any:
        return *_grads(ctx, grad_pos, grad_lse), *(None,) * 4


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
) -> tuple[Tensor | None, Tensor]:
    """`contrast_expecting` for callers that have checked the arguments, under the names of their own arguments."""
    none = none_for(query)
    scale_t, factor = scale_and_factor(scale, none)
    # Only the kernels for the CPU sum over columns in the forward pass.
    expecting = expected is not None and query.is_cpu and not fallback.FORCED
    shift, *vectors = expected if expected is not None and expecting else (-math.inf, None, None, None)
    shift = _in_json(shift)
    cap = None if cap is None else cap.detach()
    given = (query, key, positive, scale_t, bias, row_id, col_id, cap, *vectors)
    tensors = handed_over(_NAMES, given, none)
    if functorch_active() or forward_ad._current_level >= 0:  # which has an answer or refuses, as forward mode
        pos, lse, _ = _Functorch.apply(*tensors[:8], factor)
    elif torch.is_grad_enabled() and any([t.requires_grad for t in tensors[:5]]):
        pos, lse = _Eager.apply(*tensors, factor, shift, expecting)
    else:
        pos, lse, *_ = forward_op(*tensors[:8], factor, False, False, False, shift, none, none, none)
    return (None if positive is None else pos), lse
