"""Short texts: the `repr` of objects that hold much data, and metrics with as many decimals as they deserve."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np
import torch

FEW = 3  # the most entries of a sequence or a table that are shown
LONG = 40  # the most characters of a text that are shown


def summary(self: Any) -> str:
    """`__repr__` of a dataclass with its fields. Arrays show type and shape, long sequences their first entries.

    >>> from fastcl.recsys import Histories
    >>> Histories.from_lists([[1, 2], [3]])
    Histories(offsets=int64[3], item=int64[3], time=None)
    """
    parts = [f"{field.name}={brief(getattr(self, field.name))}" for field in fields(self) if field.repr]
    return f"{type(self).__name__}({', '.join(parts)})"


def brief(value: Any) -> str:
    """A value as a short text.

    >>> brief(("a", "b", "c", "d")), brief(np.zeros((2, 3))), brief(1.5)
    ("('a', 'b', 'c', ... 4 in all)", 'float64[2, 3]', '1.5')
    """
    if isinstance(value, np.ndarray | torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, str):
        return repr(value if len(value) <= LONG else f"{value[: LONG - 3]}...")
    if isinstance(value, Mapping):
        shown = [f"{brief(name)}: {brief(value[name])}" for name, _ in zip(value, range(FEW), strict=False)]
        return f"{{{', '.join(shown + _more(value))}}}"
    if type(value) in (tuple, list):
        shown = [brief(part) for part in value[:FEW]] + _more(value)
        return f"({', '.join(shown)}{',' if len(shown) == 1 else ''})"
    return repr(value)


def number(column: str, value: float) -> str:
    """A metric as text: counts without decimals, clicks and bits with few, shares with four.

    >>> number("weekends diversity@10", 310.0)
    '310'
    """
    decimals = {"diversity": 0, "popularity": 1, "novelty": 2}.get(column.partition("@")[0].split()[-1], 4)
    return f"{value:.{decimals}f}"


def _more(value: Any) -> list[str]:
    return [f"... {len(value):,} in all"] if len(value) > FEW else []
