"""Makes a module of each loss of the registry: the constructor takes the settings, forward takes a batch.

The functions keep the formulas and the checks of tensors. `fastcl.nn` holds the classes that are made here.
"""

import inspect
from typing import Any

from torch import Tensor, nn

from fastcl.checks import check_reduction, positive_number
from fastcl.registry import Loss


class LossModule(nn.Module):
    """The settings of a loss as attributes: parameters and modules are registered, other tensors are buffers."""

    settings: tuple[str, ...] = ()  # the names of all settings of the loss

    def __init__(self, *positional: Any, **named: Any) -> None:
        super().__init__()
        signature = inspect.signature(type(self))
        for name in named.keys() - signature.parameters.keys():
            known = ", ".join(signature.parameters)
            raise TypeError(f"{name}: expected one of {known}, got an unknown option")
        given = signature.bind(*positional, **named)
        given.apply_defaults()
        check_reduction(given.arguments.get("reduction", "mean"))
        temperature = given.arguments.get("temperature")
        if temperature is not None and not isinstance(temperature, Tensor):
            positive_number("temperature", temperature)
        self.settings = tuple(given.arguments)
        for name in self.settings:
            value = given.arguments[name]
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def extra_repr(self) -> str:
        values = [(name, getattr(self, name)) for name in self.settings]
        shown = [(name, value) for name, value in values if value is not None and not isinstance(value, nn.Module)]
        return ", ".join(f"{name}={_shown(value)}" for name, value in shown)


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        kind = "Parameter" if isinstance(value, nn.Parameter) else "Tensor"
        return f"{kind}({value.item():.4g})" if value.numel() == 1 and not value.is_meta else f"{kind}{[*value.shape]}"
    return getattr(value, "__name__", repr(value))


def signatures(loss: Loss) -> tuple[inspect.Signature, inspect.Signature]:
    """The signatures of the constructor and of forward. forward takes the inputs and, by name, all settings."""
    whole = inspect.signature(loss.function)
    parameters = list(whole.parameters.values())
    inputs, settings = parameters[: loss.inputs], parameters[loss.inputs :]
    this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    # A setting without a default has the constructor's value in forward.
    given = [
        parameter.replace(default=...) if parameter.default is parameter.empty else parameter for parameter in settings
    ]
    named = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in given]
    return whole.replace(parameters=settings, return_annotation=None), whole.replace(parameters=[this, *inputs, *named])


def module_of(loss: Loss, home: str) -> type[LossModule]:
    """The module class of a loss. home: the name of the module in which the class appears to be written."""
    function = loss.function

    def forward(self: LossModule, *inputs: Tensor, **options: Any) -> Tensor:
        fixed = {name: getattr(self, name) for name in self.settings}
        return function(*inputs, **(fixed | options))

    constructor, call = signatures(loss)
    forward.__qualname__ = f"{loss.module}.forward"
    # inspect reads this attribute of any function; types do not know it.
    forward.__signature__ = call  # type: ignore[attr-defined]
    inputs = list(inspect.signature(function).parameters)[: loss.inputs]
    doc = f"""`fastcl.{function.__name__}` as a module.

    The constructor takes the settings. forward takes {", ".join(inputs)}, and by name whatever else the function
    takes: in that call it has precedence over the constructor's.
    """
    body = {"__module__": home, "__doc__": doc, "__signature__": constructor, "forward": forward}
    return type(loss.module, (LossModule,), body)
