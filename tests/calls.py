"""Every public function of fastcl that takes tensors, with all its tensor arguments: a table for tests to walk through.

A call knows the shapes of its arguments by letters, so that one table serves any sizes: N rows, M columns, K private
columns, D features, V classes. Nothing here is under test.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fastcl
from fastcl import reference

SIZES = {"N": 6, "M": 5, "K": 3, "D": 4, "V": 7}


class Argument(NamedTuple):
    """`kind`: rows of features, the same without a gradient ("fixed"), a positive number, any number, the log of a
    probability, an id, a class below V, or the number of a row."""

    shape: str  # letters of SIZES; "2N" for both views; "" for a 0-d tensor
    kind: str = "rows"

    def make(self, sizes: Mapping[str, int], g: torch.Generator, dtype: torch.dtype = torch.float32) -> Tensor:
        shape = [2 * sizes["N"]] if self.shape == "2N" else [sizes[letter] for letter in self.shape]
        if self.kind in ("id", "class", "row"):
            below = {"id": 3, "class": sizes["V"], "row": sizes["N"]}[self.kind]
            return torch.randint(max(1, below), shape, generator=g)
        x = torch.randn(shape, generator=g, dtype=torch.float64)
        x = {"rows": x, "fixed": x, "number": x, "positive": 0.3 + x.abs(), "log_q": -1.0 - x.abs()}[self.kind]
        return x.to(dtype)


class Call(NamedTuple):
    function: str
    arguments: dict[str, Argument]
    options: dict[str, Any] = {}

    @property
    def learning(self) -> list[str]:
        return [name for name, a in self.arguments.items() if a.kind not in ("id", "class", "row", "fixed")]

    def make(
        self, sizes: Mapping[str, int] = SIZES, dtype: torch.dtype = torch.float32, seed: int = 0
    ) -> dict[str, Tensor]:
        g = torch.Generator().manual_seed(seed)
        return {name: a.make(sizes, g, dtype) for name, a in self.arguments.items()}

    def __call__(self, arguments: Mapping[str, Any], **options: Any) -> Any:
        return self._run(getattr(fastcl, self.function), arguments, options)

    def reference(self, arguments: Mapping[str, Any], **options: Any) -> Any:
        return self._run(getattr(reference, self.function), arguments, options)

    def _run(self, function: Callable[..., Any], arguments: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
        arguments = dict(arguments)
        queue = {n.removeprefix("queue."): arguments.pop(n) for n in list(arguments) if n.startswith("queue.")}
        if queue:
            arguments["queue"] = Queue(**queue)
        if "denominators.log_average" in arguments:
            arguments["denominators"] = Averages(arguments.pop("denominators.log_average"))
        return function(**arguments, **self.options, **options)


class Queue(NamedTuple):
    """What a loss reads of a queue."""

    keys: Any
    ids: Any = None
    log_q: Any = None


class Averages(NamedTuple):
    """Averages that a loss only reads."""

    log_average: Any
    training: bool = False
    averaged = fastcl.Denominators.averaged


ROWS = {"query": Argument("ND"), "positive_key": Argument("ND")}
WEIGHT = {"weight": Argument("N", "positive")}
SHARED = {"negative_keys": Argument("MD")}
PRIVATE = {"negative_keys": Argument("NKD")}
IDS = {"ids": Argument("N", "id")}
ONE_T = {"temperature": Argument("", "positive")}
ROW_T = {"temperature": Argument("N", "positive")}
LOG_Q = {"log_q": Argument("N", "log_q")}
QUEUE = {"queue.keys": Argument("MD"), "queue.ids": Argument("M", "id"), "queue.log_q": Argument("M", "log_q")}
COLUMNS = {"bias": Argument("M", "number"), "row_id": Argument("N", "id"), "col_id": Argument("M", "id")}
PAIR = {"query": Argument("ND"), "key": Argument("MD")}
PAIRWISE = {
    f"{name}, {kind}": Call(name, ROWS | keys | WEIGHT)
    for name in ("bpr", "negative_sampling", "jensen_shannon")
    for kind, keys in (("shared", SHARED), ("private", PRIVATE))
}
# The losses over `pos` and `lse`, one row each: the settings that the loss is tested with, besides its defaults. The
# loss's module is tested with the last of them.
FAMILY: dict[str, list[dict[str, Any]]] = {
    "infonce": [{}],
    "dcl": [{}],
    "dclw": [{}],
    "debiased_infonce": [{}, {"tau_plus": 0.02, "beta": 0.3}],
    "infonce_plus": [{}, {"epsilon": 0.3, "lam": 1.2}],
    "mine": [{}],
    "mine_plus": [{}, {"lam": 1.3}],
    "bsl": [{}, {"positive_temperature": 0.3}],
    "sl_at_k": [{}, {"threshold": 0.4, "weight_temperature": 0.3}],
}
# The first loss of the family in all its forms; all other losses share its code and have one form each.
CALLS: dict[str, Call] = {
    **{name: Call(name, ROWS | ONE_T | WEIGHT) for name in FAMILY},
    "contrast": Call("contrast", {**PAIR, "positive": Argument("ND"), "scale": Argument("", "positive"), **COLUMNS}),
    "contrast, a scale a row": Call("contrast", {**PAIR, "scale": Argument("N", "positive")}),
    "softplus_sum": Call(
        "softplus_sum", {**PAIR, "scale": Argument("", "positive"), "offset": Argument("N", "number"), **COLUMNS}
    ),
    "softplus_sum, a scale a row": Call("softplus_sum", {**PAIR, "scale": Argument("N", "positive")}),
    "infonce, as it is": Call("infonce", ROWS | ONE_T, {"normalize": False}),
    "infonce, symmetric": Call("infonce", ROWS | ONE_T | IDS, {"symmetric": True}),
    "infonce, shared": Call(
        "infonce", ROWS | SHARED | ROW_T | IDS | {"negative_ids": Argument("M", "id")}, {"normalize": False}
    ),
    "infonce, private": Call(
        "infonce", ROWS | PRIVATE | IDS | {"negative_ids": Argument("NK", "id")}, {"normalize": False}
    ),
    "infonce, queue": Call("infonce", ROWS | ROW_T | IDS | LOG_Q | QUEUE),
    "infonce_plus": Call("infonce_plus", ROWS | SHARED | ONE_T | WEIGHT, {"epsilon": 0.5}),
    "mine": Call("mine", ROWS | ONE_T | WEIGHT | IDS),
    "mine_plus": Call("mine_plus", ROWS | SHARED | ROW_T | WEIGHT, {"in_batch": True}),
    "sampled_softmax": Call(
        "sampled_softmax", ROWS | SHARED | ONE_T | LOG_Q | {"negative_log_q": Argument("M", "log_q")}
    ),
    "sampled_softmax, private": Call(
        "sampled_softmax", ROWS | PRIVATE | LOG_Q | {"negative_log_q": Argument("NK", "log_q")}
    ),
    "linear_cross_entropy": Call(
        "linear_cross_entropy",
        {"input": Argument("ND"), "linear_weight": Argument("VD"), "target": Argument("N", "class"),
         "linear_bias": Argument("V", "number"), **ONE_T, "row_weight": Argument("N", "positive")},
        {"label_smoothing": 0.1},
    ),
    "bsl": Call("bsl", ROWS | ONE_T | {"group": Argument("N", "id")}, {"positive_temperature": 0.4}),
    "sl_at_k": Call("sl_at_k", ROWS | ROW_T | {"threshold": Argument("N", "fixed")}),
    "ccl, shared": Call(
        "ccl", ROWS | SHARED | WEIGHT | IDS | {"negative_ids": Argument("M", "id")}, {"margin": 0.1}
    ),
    "ccl, private": Call("ccl", ROWS | PRIVATE | WEIGHT, {"margin": -0.2, "negative_weight": 2.0}),
    "psl, shared": Call("psl", ROWS | SHARED | ROW_T | WEIGHT | IDS | {"negative_ids": Argument("M", "id")}),
    "psl, private": Call("psl", ROWS | PRIVATE | ONE_T, {"surrogate": fastcl.psl_atan}),
    "directau": Call("directau", {"query": Argument("ND"), "positive_key": Argument("ND")}),
    "sogclr": Call(
        "sogclr",
        ROWS | SHARED | ROW_T | WEIGHT | IDS | {"index": Argument("N", "class"),
                                                "denominators.log_average": Argument("V", "fixed"),
                                                "negative_ids": Argument("M", "id")},
        {"in_batch": True},
    ),
    "sce": Call(
        "sce",
        {"input": Argument("ND"), "linear_weight": Argument("VD"), "target": Argument("N", "class"),
         "linear_bias": Argument("V", "number"), **ONE_T, "row_weight": Argument("N", "positive"),
         "buckets": Argument("KD", "fixed")},
        {"bucket_rows": 64, "bucket_classes": 64},  # all, so that ties among zeros change nothing
    ),
    "gbce, shared": Call(
        "gbce",
        ROWS | SHARED | WEIGHT | IDS | {"negative_ids": Argument("M", "id"), "positive_bias": Argument("N", "number"),
                                        "negative_bias": Argument("M", "number")},
        {"catalogue": 11},
    ),
    "gbce, private": Call(
        "gbce",
        ROWS | PRIVATE | WEIGHT | IDS | {"negative_ids": Argument("NK", "id"),
                                         "positive_bias": Argument("N", "number"),
                                         "negative_bias": Argument("NK", "number")},
        {"catalogue": 11, "calibration": 0.3},
    ),
    "soft_cross_entropy": Call(
        "soft_cross_entropy",
        {"input": Argument("ND"), "linear_weight": Argument("VD"), "target": Argument("NV", "positive"), **ONE_T,
         "row_weight": Argument("N", "positive")},
    ),
    "soft_cross_entropy, sparse": Call(
        "soft_cross_entropy",
        {"input": Argument("ND"), "linear_weight": Argument("VD"), "target": Argument("NK", "number"),
         "index": Argument("NK", "class"), **ROW_T},
    ),
    "distill_kl": Call(
        "distill_kl",
        {"input": Argument("ND"), "linear_weight": Argument("VD"), "teacher": Argument("NK", "number"),
         "index": Argument("NK", "class"), **ONE_T, "row_weight": Argument("N", "positive")},
        {"teacher_temperature": 0.7},
    ),
    "margin_mse": Call("margin_mse", {"query": Argument("ND"), "positive": Argument("ND"), "negative": Argument("NKD"),
                                      "teacher_margin": Argument("NK", "number"), **WEIGHT}),
    "directional_infonce": Call(
        "directional_infonce", {"query": Argument("ND"), "document": Argument("ND"), **ONE_T, **IDS, **WEIGHT}
    ),
    "directional_infonce, each": Call(
        "directional_infonce",
        {"query": Argument("ND"), "document": Argument("ND"), **ROW_T},
        {"partition": "per_direction", "directions": ("query_to_doc", "doc_to_doc"), "normalize": False},
    ),
    "multi_positive": Call(
        "multi_positive",
        {"query": Argument("ND"), "positives": Argument("ND"), "owner": Argument("N", "row"), **SHARED, **ROW_T,
         "positive_weight": Argument("N", "positive"), **WEIGHT},
        {"in_batch": True},
    ),
    "nt_xent": Call(
        "nt_xent", {"view1": Argument("ND"), "view2": Argument("ND"), **ONE_T, "weight": Argument("2N", "positive")}
    ),
    "supcon": Call("supcon", {"features": Argument("ND"), "labels": Argument("N", "id"), **ROW_T, **WEIGHT}),
    "alignment": Call("alignment", {"x": Argument("ND"), "y": Argument("ND"), **WEIGHT}),
    "uniformity": Call("uniformity", {"x": Argument("ND")}),
    **PAIRWISE,
    "siglip": Call(
        "siglip",
        {"query": Argument("ND"), "key": Argument("ND"), "logit_scale": Argument("", "positive"),
         "logit_bias": Argument("", "number"), **WEIGHT},
    ),
    "triplet": Call(
        "triplet", {"anchor": Argument("ND"), "positive": Argument("ND"), "negative": Argument("ND"), **WEIGHT}
    ),
}  # fmt: skip
# The functions that reduce over rows: all but the two ops, uniformity and directau, which are one number for the batch.
LOSSES = {
    name: c for name, c in CALLS.items() if c.function not in ("contrast", "softplus_sum", "uniformity", "directau")
}
