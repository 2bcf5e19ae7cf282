"""Textbook twins of soft.py, positives.py and directions.py, with every logit stored; part of `fastcl.reference`.

The rules are those of reference.py: for tests and benchmarks only, nothing validated, none of the package's own code.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def soft_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    index: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    reduction: str = "mean",
    row_weight: Tensor | None = None,
) -> Tensor:
    """-sum_c t_ic log p_ic for p = softmax(input linear_weight^T / T): Hinton et al. 2015."""
    logits = _logits(input, linear_weight, temperature)
    shares = _dense(target.to(logits.dtype), index, logits.shape[1])
    return _reduce(-(shares * F.log_softmax(logits, 1)).sum(1), reduction, row_weight)


def distill_kl(
    input: Tensor,
    linear_weight: Tensor,
    teacher: Tensor,
    index: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    reduction: str = "mean",
    row_weight: Tensor | None = None,
    *,
    teacher_temperature: float = 1.0,
) -> Tensor:
    """sum_c t_ic (log t_ic - log p_ic) for t = softmax(teacher / its temperature): Hinton et al. 2015."""
    log_p = F.log_softmax(_logits(input, linear_weight, temperature), 1)
    if index is not None:
        log_p = log_p.gather(1, index.long())
    t = F.softmax(teacher.detach().to(log_p.dtype) / teacher_temperature, 1)
    return _reduce(F.kl_div(log_p, t, reduction="none").sum(1), reduction, row_weight)


def margin_mse(
    query: Tensor,
    positive: Tensor,
    negative: Tensor,
    teacher_margin: Tensor,
    reduction: str = "mean",
    weight: Tensor | None = None,
) -> Tensor:
    """Mean squared difference of margins: Hofstaetter et al. 2020, equation 5."""
    query, positive, negative = _wide(query), _wide(positive), _wide(negative)
    margin = (query[:, None] * (positive[:, None] - negative)).sum(2)
    rows = ((margin - teacher_margin.detach().to(margin.dtype)) ** 2).sum(1) / max(margin.shape[1], 1)
    return _reduce(rows, reduction, weight)


def multi_positive(
    query: Tensor,
    positives: Tensor,
    owner: Tensor,
    negative_keys: Tensor | None = None,
    temperature: float | Tensor = 0.1,
    reduction: str = "mean",
    *,
    form: Any = None,
    normalize: bool = True,
    in_batch: bool | None = None,
    positive_weight: Tensor | None = None,
    weight: Tensor | None = None,
) -> Tensor:
    """InfoNCE with several positives; `form` is known by its name: log_out, log_in, supcon_out or supcon_in."""
    if normalize:
        query, positives = F.normalize(_wide(query), dim=1).to(query.dtype), _unit(positives)
        negative_keys = None if negative_keys is None else _unit(negative_keys)
    own = torch.arange(len(query))[:, None] == owner  # [N, P]
    z = _logits(query, positives, temperature)
    columns = []
    if negative_keys is None or in_batch:
        columns.append(z.masked_fill(own, -torch.inf))
    if negative_keys is not None:
        columns.append(_logits(query, negative_keys, temperature))
    e_negative = torch.cat(columns, 1).exp().sum(1)
    w = torch.ones_like(z[0]) if positive_weight is None else positive_weight.to(z.dtype)
    share = own * w
    total = share.sum(1, keepdim=True)
    share = share / total.masked_fill(total == 0, 1.0)
    e = z.exp() * own
    name = "log_out" if form is None else form.__name__
    if name == "log_out":
        rows = (share * torch.log1p(e_negative[:, None] / z.exp())).sum(1)
    else:
        above = (w * e).sum(1) if name == "log_in" else e.sum(1)
        denominator = above + e_negative
        if name == "supcon_out":
            rows = (share * (denominator.log()[:, None] - z)).sum(1)
        else:
            inside = above if name == "log_in" else (share * z.exp()).sum(1)
            some = own.any(1)
            rows = denominator.masked_fill(~some, 1.0).log() - inside.masked_fill(~some, 1.0).log()
    return _reduce(rows.masked_fill(~own.any(1), 0.0), reduction, weight)


def directional_infonce(
    query: Tensor,
    document: Tensor,
    temperature: float | Tensor = 0.05,
    reduction: str = "mean",
    *,
    directions: Any = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc"),
    partition: str = "joint",
    normalize: bool = True,
    ids: Tensor | None = None,
    weight: Tensor | None = None,
) -> Tensor:
    """Cross-entropy of the pair's logit beside those of each direction: Li et al. 2023, GTE, section 3.3."""
    q, d = (_unit(query), _unit(document)) if normalize else (query, document)
    own = torch.eye(len(q), dtype=torch.bool) if ids is None else ids[:, None] == ids
    pos = _logits(q, d, temperature).diagonal()[:, None]
    blocks = {
        "query_to_doc": _logits(q, d, temperature),
        "query_to_query": _logits(q, q, temperature),
        "doc_to_query": _logits(d, q, temperature),
        "doc_to_doc": _logits(d, d, temperature),
    }
    found = [blocks[name].masked_fill(own, -torch.inf) for name in directions]
    parts = [torch.cat([pos, *found], 1)] if partition == "joint" else [torch.cat([pos, x], 1) for x in found]
    rows = [-F.log_softmax(part, 1)[:, 0] for part in parts]
    return _reduce(torch.stack(rows).mean(0), reduction, weight)


def _dense(shares: Tensor, index: Tensor | None, columns: int) -> Tensor:
    if index is None:
        return shares
    return shares.new_zeros(len(shares), columns).scatter_add(1, index.long(), shares)


def _logits(query: Tensor, key: Tensor, temperature: float | Tensor) -> Tensor:
    temperature = temperature[:, None] if isinstance(temperature, Tensor) and temperature.ndim else temperature
    return _wide(query) @ _wide(key).T / temperature


def _reduce(rows: Tensor, reduction: str, weight: Tensor | None) -> Tensor:
    rows = rows if weight is None else rows * weight.to(rows.dtype)
    if reduction == "none":
        return rows
    return rows.sum() if reduction == "sum" else rows.sum() / max(len(rows), 1)


def _unit(x: Tensor) -> Tensor:
    return F.normalize(_wide(x), dim=-1).to(x.dtype)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
