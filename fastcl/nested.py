"""Embeddings whose first features are embeddings too: any loss, over several lengths of its vectors.

No loss formula belongs here: the loss is called once for each length. One pass that shared the similarities would have
to store them, or to keep one sum for each length; the products that it could save are those of the shorter lengths.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from fastcl.checks import check_constant

# The arguments of fastcl's losses that are embeddings, [..., D].
_EMBEDDINGS = frozenset(
    ("query", "positive_key", "negative_keys", "key", "view1", "view2", "features", "x", "y", "input", "linear_weight",
     "anchor", "positive", "negative", "positives", "document")
)  # fmt: skip


def matryoshka(
    loss: Callable[..., Tensor], dims: Sequence[int], weights: Sequence[float] | None = None
) -> Callable[..., Tensor]:
    """`loss` of embeddings cut to each of several lengths, summed (Kusupati et al. 2022, Matryoshka, Eq. 1).

        sum_m weight_m loss(z[:, :dims_m])

    Args:
        loss: a loss of fastcl or a module of `fastcl.nn`. Losses that normalise do so after the cut.
        dims: lengths, each from 1 to D; the full one is among them only if it is named.
        weights: one for each length, finite; None: 1.

    Returns: a function of the loss's arguments. All embeddings are cut alike; what belongs to them, ids and log q for
    instance, stays. A queue is refused (ValueError), since the normalised vectors that it holds would be none when cut;
    so are `denominators`, of which each length needs its own.

    Errors: ValueError for lengths that do not fit, TypeError for what is no list of numbers.

    >>> import torch, fastcl
    >>> nested = fastcl.matryoshka(fastcl.infonce, dims=(2, 4), weights=(0.5, 1.0))
    >>> x, y = torch.randn(8, 4), torch.randn(8, 4)
    >>> torch.allclose(nested(x, y), 0.5 * fastcl.infonce(x[:, :2], y[:, :2]) + fastcl.infonce(x, y))
    True
    """
    for name, value in (("dims", dims), ("weights", weights)):
        if value is not None and not isinstance(value, Iterable):
            raise TypeError(f"{name}: expected a list of numbers, got {type(value).__name__}")
    dims = tuple(dims)
    if not dims:
        raise ValueError("dims: expected at least one length, got none")
    for dim in dims:
        if isinstance(dim, bool) or not isinstance(dim, int):
            raise TypeError(f"dims: expected ints, got {type(dim).__name__}")
    weights = (1.0,) * len(dims) if weights is None else tuple(weights)
    if len(weights) != len(dims):
        raise ValueError(f"weights: expected {len(dims)}, one for each of dims, got {len(weights)}")
    for weight in weights:
        check_constant("weights", weight, lambda _: True, "of any sign")
    called = loss.forward if isinstance(loss, nn.Module) else loss
    signature = inspect.signature(called)
    if not _EMBEDDINGS & set(signature.parameters):
        raise TypeError(f"loss: expected a loss of embeddings, such as fastcl.infonce, got {loss!r}")

    def nested(*args: Any, **options: Any) -> Tensor:
        given = signature.bind(*args, **options).arguments
        given |= given.pop("options", {})
        for name in ("queue", "denominators"):
            # A module has it as a setting, a partial function as a default.
            default = signature.parameters[name].default if name in signature.parameters else None
            if given.get(name, getattr(loss, name, default)) is not None:
                raise ValueError(f"{name}: expected none with matryoshka, got one")
        total: Tensor | None = None
        for dim, weight in zip(dims, weights, strict=True):
            part = weight * loss(**{name: _cut(name, value, dim) for name, value in given.items()})
            total = part if total is None else total + part
        assert total is not None
        return total

    return functools.wraps(called, assigned=("__module__", "__name__", "__qualname__"))(nested)


def _cut(name: str, value: Any, dim: int) -> Any:
    if name not in _EMBEDDINGS or not isinstance(value, Tensor):
        return value
    if not 1 <= dim <= value.shape[-1]:
        raise ValueError(f"dims: expected lengths from 1 to {value.shape[-1]}, the features of {name}, got {dim}")
    return value[..., :dim]
