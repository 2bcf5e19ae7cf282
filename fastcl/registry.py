"""The registry of the losses, which the package, `fastcl.nn`, the tests and the documentation read.

`registered` enters a loss; `over_rows` in family.py enters a formula over `pos` and `lse`. No loss is written here.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., Tensor])


class Loss(NamedTuple):
    function: Callable[..., Tensor]  # fastcl.NAME
    module: str  # its class is fastcl.nn.MODULE; "" for a loss of the user's own, which has none there
    inputs: int  # the number of leading arguments that are a batch; the rest are settings of the module
    formula: Callable[..., Tensor] | None = None  # the formula over `fastcl.rows.Rows`, for a loss that is one


LOSSES: dict[str, Loss] = {}  # by the name of the function


def registered(
    module: str, inputs: int, formula: Callable[..., Tensor] | None = None
) -> Callable[[Function], Function]:
    """Enters the decorated function into `LOSSES` and leaves it as it is. ValueError for the name of another loss."""

    def enter(function: Function) -> Function:
        other = LOSSES[function.__name__].function if function.__name__ in LOSSES else function
        if (other.__module__, other.__qualname__) != (function.__module__, function.__qualname__):
            theirs = f"that of {other.__module__}.{other.__qualname__}"
            raise ValueError(f"formula: expected a name that is free, got {function.__name__!r}, {theirs}")
        LOSSES[function.__name__] = Loss(function, module, inputs, formula)
        return function

    return enter


def formula_of(function: Any) -> Callable[..., Tensor] | None:
    """The formula over rows behind a public loss, or None."""
    return next((loss.formula for loss in LOSSES.values() if loss.function is function), None)
