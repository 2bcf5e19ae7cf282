"""Checks of the arguments of public functions: one function for each kind of argument. Nothing here computes.

Every error names the argument, what was expected and what came: TypeError for types and dtypes, ValueError for shapes,
devices and values. The compiled part checks its arguments once more, with shorter messages.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# The dtypes of labels and ids, which are compared as int64.
INTEGERS = (
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
)  # fmt: skip
_STRIDED = torch.strided
# A private function that every supported torch has. Without it, code under torch.func would take the path of autograd.
functorch_active = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)
# Private too. Modes that trace see every operation, so that reading a value under them would go into the trace.
_modes_active = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)


def learns(x: Any) -> bool:
    """Whether x is a tensor that a gradient is recorded for."""
    return isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled()


def readable(t: Tensor) -> bool:
    """Whether reading a value of `t` waits for no device and breaks no graph, transform or mode."""
    return (
        t.is_cpu
        and type(t) in (Tensor, Parameter)
        and not torch.compiler.is_compiling()
        and not functorch_active()
        and _modes_active() == 0
    )


def in_memory(name: str, t: Tensor) -> None:
    """ValueError for a tensor whose memory was freed, as FSDP does with weights: kernels would read at address 0."""
    if readable(t) and t.untyped_storage().nbytes() == 0 and t.numel():
        raise ValueError(f"{name}: expected a tensor with memory behind it, got one whose storage was freed")


def packed(name: str, t: Tensor) -> Tensor:
    """A contiguous copy of `t`, whose memory is checked here. The compiled part checks that of contiguous tensors."""
    in_memory(name, t)
    return t.contiguous()


def is_tensor(name: str, t: Any, dtypes: tuple[torch.dtype, ...] = FLOATS) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(t).__name__}")
    if type(t) is not Tensor and hasattr(t, "to_local"):  # a DTensor; torch may be built without torch.distributed
        raise TypeError(
            f"{name}: expected a tensor of this process, got {type(t).__name__}; pass its to_local() or full_tensor()"
        )
    if t.dtype not in dtypes:
        wanted = "an integer dtype" if dtypes is INTEGERS else "dtype float64, float32, bfloat16 or float16"
        raise TypeError(f"{name}: expected {wanted}, got {t.dtype}")
    if t.layout is not _STRIDED or t.is_nested:
        raise TypeError(f"{name}: expected a dense tensor, got {'a nested one' if t.is_nested else t.layout}")


def on_device(name: str, t: Tensor, device: torch.device) -> None:
    if t.device != device:
        raise ValueError(f"{name}: expected device {device} (where the other inputs are), got {t.device}")


def matrix(
    name: str, t: Any, rows: int | None = None, cols: int | None = None, device: torch.device | None = None
) -> None:
    is_tensor(name, t)
    shape = t.shape  # read once, since torch makes a new object at each access
    if len(shape) != 2 or (rows is not None and shape[0] != rows) or (cols is not None and shape[1] != cols):
        wanted = f"[{'*' if rows is None else rows}, {'*' if cols is None else cols}]"
        raise ValueError(f"{name}: expected shape {wanted}, got {list(shape)}")
    if device is not None:
        on_device(name, t, device)


def vector(name: str, t: Any, length: int, device: torch.device, dtypes: tuple[torch.dtype, ...] = FLOATS) -> None:
    is_tensor(name, t, dtypes)
    if t.shape != (length,):
        raise ValueError(f"{name}: expected shape [{length}], got {list(t.shape)}")
    on_device(name, t, device)


def check_tensor(
    name: str,
    t: Any,
    shape: tuple[int | str, ...],  # a letter where any size is allowed
    device: torch.device | None = None,
    *,
    dtypes: tuple[torch.dtype, ...] = FLOATS,
    least: int = 0,  # the fewest rows
) -> None:
    """TypeError or ValueError unless `t` is a tensor of this shape with memory, on `device` if that is given."""
    is_tensor(name, t, dtypes)
    fits = t.dim() == len(shape) and all(
        isinstance(wanted, str) or size == wanted for size, wanted in zip(t.shape, shape, strict=True)
    )
    if not fits or (least and t.shape[0] < least):
        at_least = f" with {shape[0]} >= {least}" if least else ""
        raise ValueError(f"{name}: expected shape [{', '.join(map(str, shape))}]{at_least}, got {list(t.shape)}")
    if device is not None:
        on_device(name, t, device)
    in_memory(name, t)


def as_ids(name: str, t: Any, shape: tuple[int | str, ...], device: torch.device | None = None) -> Tensor:
    """Labels or ids of any integer dtype and strides as contiguous int64, which searching needs."""
    check_tensor(name, t, shape, device, dtypes=INTEGERS)
    return as_int64(t).contiguous()


def as_int64(t: Tensor) -> Tensor:
    return t if t.dtype == torch.int64 else t.to(torch.int64)  # .to() takes most of a microsecond even for int64


def as_ignored(ignore_index: Any) -> int:
    """The target of rows without a loss; None: -100, as in torch."""
    if ignore_index is None:
        return -100
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise TypeError(f"ignore_index: expected an int or None, got {type(ignore_index).__name__}")
    return ignore_index


def both_ids(
    query: Tensor,
    keys: Tensor,
    ids: Tensor | None,
    key_ids: Tensor | None,
    names: tuple[str, str] = ("ids", "negative_ids"),  # what the caller's arguments are called
) -> tuple[Tensor | None, Tensor | None]:
    """The ids of a loss over pairs as int64; ValueError for one without the other."""
    if ids is None and key_ids is None:
        return None, None
    if ids is None or key_ids is None:
        missing = names[0] if ids is None else names[1]
        raise ValueError(f"{missing}: expected both {names[0]} and {names[1]} or neither, got one of them")
    device = query.device
    return (
        as_ids(names[0], ids, (query.shape[0],), device),
        as_ids(names[1], key_ids, tuple(keys.shape[:-1]), device),
    )


def check_weight(weight: Tensor | None, n: int, device: torch.device) -> None:
    if weight is not None:
        check_tensor("weight", weight, (n,), device)


def check_scale(name: str, value: Any, n: int | None, device: torch.device) -> None:
    """Errors unless `value` is a finite number, a 0-d tensor (on the CPU or on `device`), or one value per row [n]."""
    if not isinstance(value, Tensor):
        if not (isinstance(value, float) and (torch.compiler.is_compiling() or math.isfinite(value))):
            check_constant(name, value, lambda _: True, "of any sign", "a number or a tensor")
    elif n is not None and value.dim():
        is_tensor(name, value)
        if value.shape != (n,):
            expected = f"a number or a tensor of shape [] or [{n}]"
            raise ValueError(f"{name}: expected {expected}, got shape {list(value.shape)}")
        on_device(name, value, device)
    else:
        is_tensor(name, value)
        if value.dim():
            raise ValueError(f"{name}: expected a number or a 0-d tensor, got shape {list(value.shape)}")
        if value.device != device and not value.is_cpu:
            raise ValueError(
                f"{name}: expected device {device} (where the other inputs are) or cpu, got {value.device}"
            )


def check_columns(
    n: int, m: int, device: torch.device, bias: Tensor | None, row_id: Tensor | None, col_id: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Checks bias and ids, and returns the ids, of any integer dtype, as int64."""
    if bias is not None:
        vector("bias", bias, m, device)
    if (row_id is None) != (col_id is None):
        raise ValueError(
            f"{'row_id' if row_id is None else 'col_id'}: expected both row_id and col_id or neither, got one of them"
        )
    if row_id is None or col_id is None:
        return None, None
    vector("row_id", row_id, n, device, INTEGERS)
    vector("col_id", col_id, m, device, INTEGERS)
    return as_int64(row_id), as_int64(col_id)


def check_temperature(temperature: Any, n: int, device: torch.device) -> None:
    """Values of a tensor are checked only where reading is cheap: on the CPU, outside compiled code and transforms."""
    if not isinstance(temperature, Tensor):
        # The common case first: the general check takes a microsecond.
        if type(temperature) is not float or not 0.0 < temperature < math.inf:
            positive_number("temperature", temperature)
        return
    check_scale("temperature", temperature, n, device)
    if not readable(temperature):
        return
    in_memory("temperature", temperature)
    if temperature.dim() == 0:
        low = high = temperature.detach().item()
    elif temperature.shape[0]:
        low, high = (x.item() for x in torch.aminmax(temperature.detach()))
    else:
        return
    if not (low > 0 and high < math.inf):  # NaN fails both comparisons
        raise ValueError(
            f"temperature: expected finite and above 0, got {high if low > 0 else low}; to learn one, learn its "
            "logarithm and pass log_temperature.exp()"
        )


def check_reduction(reduction: Any) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction: expected 'mean', 'sum' or 'none', got {reduction!r}")


def check_constant(
    name: str, value: Any, valid: Callable[[float], bool], expected: str, kind: str = "a number"
) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: expected {kind}, got {type(value).__name__}")
    if not (abs(value) < math.inf and valid(value)):
        raise ValueError(f"{name}: expected a finite number {expected}, got {value}")


def positive_number(name: str, value: Any) -> None:
    check_constant(name, value, lambda x: x > 0, "above 0")
