"""Finding hard negatives: the keys of a table or queue that are most similar to a query. Nothing has a gradient."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fastcl.arithmetic import compute_dtype, no_autocast
from fastcl.checks import as_ids, check_constant, check_tensor, matrix
from fastcl.segments import Queue, columns_of

# Similarities held at once: 16 MiB in float32.
_HELD = 1 << 22


@torch.no_grad()
def hard_negatives(
    query: Tensor,  # [N, D]
    index: Tensor | Queue,  # [M, D]
    k: int,
    *,
    ids: Tensor | None = None,  # [N]
    index_ids: Tensor | None = None,  # [M]
    cap: float | Tensor | None = None,  # a number or [N]
    skip: int = 0,
) -> tuple[Tensor, Tensor]:
    """The k keys most similar to each query, by inner product: exact, in chunks, N x M similarities never held.

    Args:
        query: [N, D], float64, float32, bfloat16 or float16, used as it is.
        index: [M, D], a table of keys, or a `NegativeQueue`, whose rows are numbered as in `queue.keys`.
        k: >= 1.
        ids, index_ids: [N] and [M], any integer dtype, both or neither: keys with the query's own id are passed over.
            A queue brings its own.
        cap: a number or one for each query [N]: keys of a greater similarity are passed over, as likely false
            negatives (`cap` of the losses).
        skip: >= 0: the so many most similar keys that remain are passed over.

    Returns: (similarities [N, k] in descending order, places in `index` [N, k], int64). Where a query has fewer than
    skip + k keys, the rest is -inf and -1. Among equal similarities at the k-th place any may be taken.

    Errors: TypeError for types and dtypes, ValueError for shapes and values, each naming the argument.

    >>> import torch, fastcl
    >>> table = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]])
    >>> similarity, place = fastcl.hard_negatives(table[:1], table, 1, ids=torch.tensor([0]), index_ids=torch.arange(3))
    >>> place  # not itself
    tensor([[1]])
    """
    matrix("query", query)
    (n, d), device = query.shape, query.device
    if isinstance(index, Tensor):
        keys = index
    else:
        try:
            columns_of(index, False)  # refuses what is no queue
        except TypeError:
            what = type(index).__name__
            raise TypeError(f"index: expected a tensor [M, D] or a queue (fastcl.NegativeQueue), got {what}") from None
        if index_ids is not None:
            raise ValueError("index_ids: expected None with a queue, which holds ids of its own, got a tensor")
        keys, index_ids = index.keys, index.ids
        ids = None if index_ids is None else ids
        index_ids = None if ids is None else index_ids
    matrix("index", keys, None, d, device)
    m = keys.shape[0]
    for name, value, least in (("k", k, 1), ("skip", skip, 0)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
        if value < least:
            raise ValueError(f"{name}: expected at least {least}, got {value}")
    if (ids is None) != (index_ids is None):
        missing = "ids" if ids is None else "index_ids"
        raise ValueError(f"{missing}: expected both ids and index_ids or neither, got one of them")
    if ids is not None:
        ids, index_ids = as_ids("ids", ids, (n,), device), as_ids("index_ids", index_ids, (m,), device)
    if isinstance(cap, Tensor):
        check_tensor("cap", cap, (n,), device)
    elif cap is not None:
        check_constant("cap", cap, lambda _: True, "of any sign", "a number or a tensor")
    wanted = min(k + skip, m)
    found = [_best(query, keys, ids, index_ids, cap, rows, wanted) for rows in _chunks(n, m)]
    score = torch.cat([s for s, _ in found])[:, skip:]
    place = torch.cat([p for _, p in found])[:, skip:]
    short = k - score.shape[1]
    if short:
        score, place = F.pad(score, (0, short), value=-torch.inf), F.pad(place, (0, short), value=-1)
    return score, place.masked_fill(score == -torch.inf, -1)


def _chunks(n: int, m: int) -> list[slice]:
    step = max(1, _HELD // max(1, m))
    return [slice(a, min(n, a + step)) for a in range(0, max(1, n), step)]


@no_autocast
def _best(
    query: Tensor,
    keys: Tensor,
    ids: Tensor | None,
    index_ids: Tensor | None,
    cap: float | Tensor | None,
    rows: slice,
    wanted: int,
) -> tuple[Tensor, Tensor]:
    dtype = compute_dtype(query, keys)
    similarity = query[rows].to(dtype) @ keys.to(dtype).T
    if ids is not None and index_ids is not None:
        similarity = similarity.masked_fill(ids[rows, None] == index_ids, -torch.inf)
    if cap is not None:
        limit = cap[rows, None].to(dtype) if isinstance(cap, Tensor) else cap
        similarity = similarity.masked_fill(similarity > limit, -torch.inf)
    return similarity.topk(wanted, dim=1)
