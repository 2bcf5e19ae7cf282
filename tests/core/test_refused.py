"""What the op and the losses refuse: each error has the right type and names argument, expectation and what came.

Nothing here tests a value.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import fastcl

LOSSES = ("infonce", "dcl", "infonce_plus", "mine", "mine_plus")


def _valid() -> dict[str, Any]:
    return {"query": torch.ones(3, 4), "key": torch.ones(5, 4)}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"query": torch.ones(4)}, ValueError, r"query.*\[4\]"),
        ({"query": torch.ones(2, 3, 4)}, ValueError, r"query.*\[2, 3, 4\]"),
        ({"query": [[1.0] * 4]}, TypeError, "query.*tensor.*list"),
        ({"query": torch.ones(3, 4).long()}, TypeError, "query.*int64"),
        ({"key": torch.ones(5, 3)}, ValueError, r"key.*4.*\[5, 3\]"),
        ({"key": torch.ones(5)}, ValueError, r"key.*\[5\]"),
        ({"key": torch.ones(5, 4).int()}, TypeError, "key.*int32"),
        ({"key": torch.ones(5, 4, device="meta")}, ValueError, "key.*cpu.*meta"),
        ({"positive": torch.ones(2, 4)}, ValueError, r"positive.*3.*\[2, 4\]"),
        ({"positive": torch.ones(3, 5)}, ValueError, r"positive.*4.*\[3, 5\]"),
        ({"positive": torch.ones(3, 4, dtype=torch.complex64)}, TypeError, "positive.*complex64"),
        ({"scale": torch.ones(2)}, ValueError, r"scale.*3.*\[2\]"),
        ({"scale": torch.ones(3, 1)}, ValueError, r"scale.*\[3, 1\]"),
        ({"scale": torch.ones(3).long()}, TypeError, "scale.*int64"),
        ({"scale": "1"}, TypeError, "scale.*str"),
        ({"bias": torch.ones(3)}, ValueError, r"bias.*5.*\[3\]"),
        ({"bias": torch.ones(5).long()}, TypeError, "bias.*int64"),
        ({"bias": 1.0}, TypeError, "bias.*float"),
        ({"row_id": torch.ones(3).long()}, ValueError, "col_id.*row_id|row_id.*col_id"),
        ({"col_id": torch.ones(5).long()}, ValueError, "col_id.*row_id|row_id.*col_id"),
        ({"row_id": torch.ones(3).bool(), "col_id": torch.ones(5).long()}, TypeError, "row_id.*integer.*bool"),
        ({"scale": math.nan}, ValueError, "scale.*finite.*nan"),
        ({"scale": torch.ones(3, device="meta")}, ValueError, "scale.*cpu.*meta"),
        ({"scale": torch.ones((), device="meta")}, ValueError, "scale.*cpu.*meta"),
        ({"query": torch.ones(3, 4).to(torch.float8_e4m3fn)}, TypeError, "query.*float64.*float8_e4m3fn"),
        ({"key": torch.ones(5, 4).to_sparse()}, TypeError, "key.*dense.*sparse"),
        ({"key": torch.nested.nested_tensor([torch.ones(5, 4)])}, TypeError, "key.*dense.*nested"),
        ({"row_id": torch.ones(3).long(), "col_id": torch.ones(5)}, TypeError, "col_id.*integer.*float32"),
        ({"row_id": torch.ones(4).long(), "col_id": torch.ones(5).long()}, ValueError, r"row_id.*3.*\[4\]"),
        ({"row_id": torch.ones(3).long(), "col_id": torch.ones(4).long()}, ValueError, r"col_id.*5.*\[4\]"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_contrast_refuses(change: dict[str, Any], error: type[Exception], message: str) -> None:
    fastcl.contrast(**_valid())
    with pytest.raises(error, match=message):
        fastcl.contrast(**{**_valid(), **change})


Q = torch.ones(3, 4)


def _queue(log_q: bool = False, dim: int = 4) -> fastcl.NegativeQueue:
    queue = fastcl.NegativeQueue(5, dim)
    queue.push(torch.ones(2, dim), log_q=torch.zeros(2) if log_q else None)
    return queue


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"query": torch.ones(4)}, ValueError, r"query.*\[4\]"),
        ({"query": "q"}, TypeError, "query.*tensor.*str"),
        ({"query": Q.long()}, TypeError, "query.*int64"),
        ({"positive_key": Q.long()}, TypeError, "positive_key.*int64"),
        ({"positive_key": torch.ones(3, 5)}, ValueError, r"positive_key.*\[3, 4\].*\[3, 5\]"),
        ({"positive_key": torch.ones(2, 4)}, ValueError, r"positive_key.*\[3, 4\].*\[2, 4\]"),
        ({"positive_key": torch.ones(3, 4, device="meta")}, ValueError, "positive_key.*cpu.*meta"),
        ({"negative_keys": torch.ones(4)}, ValueError, r"negative_keys.*\[4\]"),
        ({"negative_keys": torch.ones(2, 5)}, ValueError, r"negative_keys.*4.*\[2, 5\]"),
        ({"negative_keys": torch.ones(2, 6, 4)}, ValueError, r"negative_keys.*3.*\[2, 6, 4\]"),
        ({"negative_keys": torch.ones(2, 4).int()}, TypeError, "negative_keys.*int32"),
        ({"negative_keys": torch.ones(2, 4), "negative_mode": "paired"}, ValueError, r"negative_keys.*\[2, 4\]"),
        ({"negative_keys": torch.ones(3, 2, 4), "negative_mode": "unpaired"}, ValueError,
         r"negative_keys.*\[3, 2, 4\]"),
        ({"negative_mode": "pairs"}, ValueError, "negative_mode.*paired.*pairs"),
        ({"reduction": "max"}, ValueError, "reduction.*mean.*sum.*none.*max"),
        ({"temperature": 0.0}, ValueError, "temperature.*0"),
        ({"temperature": -0.1}, ValueError, "temperature.*-0.1"),
        ({"temperature": math.nan}, ValueError, "temperature.*nan"),
        ({"temperature": "0.1"}, TypeError, "temperature.*str"),
        ({"temperature": torch.ones(2)}, ValueError, r"temperature.*3.*\[2\]"),
        ({"temperature": torch.ones(3, 1)}, ValueError, r"temperature.*\[3, 1\]"),
        ({"temperature": torch.tensor(1)}, TypeError, "temperature.*int64"),
        ({"ids": torch.ones(2).long()}, ValueError, r"ids.*3.*\[2\]"),
        ({"ids": torch.ones(3)}, TypeError, "ids.*integer.*float32"),
        ({"ids": torch.ones(3).bool()}, TypeError, "ids.*integer.*bool"),
        ({"negative_keys": 0.07}, TypeError, "negative_keys.*tensor.*float.*temperature=0.07"),
        ({"query": Q.to(torch.float8_e5m2)}, TypeError, "query.*float64.*float8_e5m2"),
        ({"negative_keys": Q.to_sparse()}, TypeError, "negative_keys.*dense.*sparse"),
        ({"temperature": torch.tensor(-0.1)}, ValueError, "temperature.*above 0.*-0.1.*log_temperature"),
        ({"temperature": torch.tensor(0.0)}, ValueError, "temperature.*above 0.*0.0"),
        ({"temperature": torch.tensor(math.nan)}, ValueError, "temperature.*above 0.*nan"),
        ({"temperature": torch.tensor(math.inf)}, ValueError, "temperature.*above 0.*inf"),
        ({"temperature": torch.tensor([0.1, -0.5, 0.2])}, ValueError, "temperature.*above 0.*-0.5"),
        ({"temperature": torch.tensor([0.1, math.nan, 0.2])}, ValueError, "temperature.*above 0.*nan"),
        ({"temperature": torch.tensor([0.1, math.inf, 0.2])}, ValueError, "temperature.*above 0.*inf"),
        ({"temperature": torch.nn.Parameter(torch.tensor(-0.1))}, ValueError, "temperature.*above 0.*-0.1"),
        ({"temperature": torch.ones((), device="meta")}, ValueError, "temperature.*cpu.*meta"),
        ({"temperature": torch.ones(3, device="meta")}, ValueError, "temperature.*cpu.*meta"),
        ({"queue": torch.ones(3, 4)}, TypeError, "queue.*NegativeQueue.*Tensor"),
        ({"queue": {"keys": Q}}, TypeError, "queue.*NegativeQueue.*dict"),
        ({"ids": [1, 2, 3]}, TypeError, "ids.*list"),
        ({"negative_ids": torch.ones(3).long()}, ValueError, "negative_ids.*negative_keys"),
        ({"negative_keys": Q, "ids": torch.ones(3).long(), "negative_ids": torch.ones(2).long()}, ValueError,
         r"negative_ids.*3.*\[2\]"),
        ({"log_q": torch.ones(2)}, ValueError, r"log_q.*3.*\[2\]"),
        ({"log_q": torch.ones(3).long()}, TypeError, "log_q.*int64"),
        ({"negative_log_q": torch.ones(3)}, ValueError, "negative_log_q.*negative_keys"),
        ({"negative_keys": Q, "log_q": torch.ones(3)}, ValueError, "log_q"),
        ({"negative_keys": Q, "negative_log_q": torch.ones(3)}, ValueError, "log_q"),
        ({"queue": _queue(), "log_q": torch.ones(3)}, ValueError, "log_q"),
        ({"queue": _queue(log_q=True)}, ValueError, "log_q"),
        ({"queue": _queue(dim=5)}, ValueError, r"queue: expected shape \[\*, 4\], got \[2, 5\]"),
        ({"symmetric": True, "queue": _queue()}, ValueError, "symmetric.*queue"),
        ({"symmetric": True, "negative_keys": Q}, ValueError, "symmetric.*negative_keys"),
        ({"symmetric": True, "temperature": torch.ones(3)}, ValueError, "symmetric.*temperature"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)  # fmt: skip
def test_losses_refuse(change: dict[str, Any], error: type[Exception], message: str) -> None:
    valid = {"query": Q, "positive_key": Q}
    for loss in LOSSES:
        getattr(fastcl, loss)(**valid)
        with pytest.raises(error, match=message):
            getattr(fastcl, loss)(**{**valid, **change})


@pytest.mark.parametrize(
    ("loss", "constants", "error", "message"),
    [
        ("infonce_plus", {"epsilon": -0.1}, ValueError, "epsilon.*-0.1"),
        ("infonce_plus", {"epsilon": math.nan}, ValueError, "epsilon.*nan"),
        ("infonce_plus", {"epsilon": "1"}, TypeError, "epsilon.*str"),
        ("infonce_plus", {"lam": math.inf}, ValueError, "lam.*inf"),
        ("mine_plus", {"lam": -1.0}, ValueError, "lam.*-1"),
        ("mine_plus", {"lam": None}, TypeError, "lam.*None"),
        ("infonce", {"lam": 1.0}, TypeError, "lam"),
        ("dcl", {"epsilon": 1.0}, TypeError, "epsilon"),
        ("mine", {"normalise": False}, TypeError, "normalise"),
    ],
)
def test_losses_refuse_constants(loss: str, constants: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        getattr(fastcl, loss)(Q, Q, **constants)
