"""InfoNCE over queries and documents in more directions than one, in one softmax or in one each.

A direction is a call of the op over rows and columns that change places; no similarity is computed here, and symmetric
losses of the two usual directions are `symmetric=True` of every loss over rows.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fastcl.arithmetic import dot, logaddexp, softplus
from fastcl.checks import as_ids, check_weight, in_memory
from fastcl.normalize import normalized_together
from fastcl.ops import contrast
from fastcl.registry import registered
from fastcl.rows import check_batch, inverse, reduced

DIRECTIONS = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
_PARTITIONS = ("joint", "per_direction")


@registered("DirectionalInfoNCE", inputs=2)
def directional_infonce(
    query: Tensor,  # [N, D]
    document: Tensor,  # [N, D]
    temperature: float | Tensor = 0.05,  # a number, [] or [N]
    reduction: str = "mean",
    *,
    directions: Sequence[str] = DIRECTIONS,
    partition: str = "joint",
    normalize: bool = True,
    ids: Tensor | None = None,  # [N]
    weight: Tensor | None = None,  # [N]
) -> Tensor:
    """InfoNCE with negatives in several directions (Li et al. 2023, GTE, section 3.3, "improved contrastive loss").

        joint:          loss_i = logaddexp(pos_i, lse_i over all directions) - pos_i,    pos_i = <q_i, d_i> / T
        per_direction:  loss_i = mean over the directions of logaddexp(pos_i, lse_i of the direction) - pos_i

    Row i's negatives are the other documents <q_i, d_j> (query_to_doc), the other queries <q_i, q_j> (query_to_query),
    those seen from its document, <d_i, q_j> (doc_to_query), and the documents beside its own, <d_i, d_j> (doc_to_doc).

    Args:
        query, document: [N, D], float64, float32, bfloat16 or float16; row i of each is a pair.
        temperature: T > 0: a number, a 0-d tensor or one value a row [N] (both may learn).
        reduction: "mean" over the N rows, "sum" or "none" ([N]).
        directions: one or more of the four names, each once; the names are those of sentence-transformers.
        partition: "joint", one softmax over the columns of all directions, or "per_direction".
        normalize: divide each row of query and document by its length.
        ids: [N], any integer dtype: pairs with the row's id are none of its negatives; None: its own alone.
        weight: [N], any floating dtype, multiplies a row's loss: mean = sum(weight * loss) / N.

    Returns: float32 (float64 for float64 inputs), [] or [N]. No N x N matrix is stored.

    Gradients: query, document, temperature and weight.

    Errors: TypeError for types and dtypes, ValueError for shapes and values, each naming the argument.

    >>> import torch, fastcl
    >>> x = torch.eye(2)
    >>> round(fastcl.directional_infonce(x, x, temperature=0.5).item(), 4)  # log(1 + 4 e^-2)
    0.4327
    >>> round(fastcl.directional_infonce(x, x, temperature=0.5, partition="per_direction").item(), 4)
    0.1269
    """
    check_batch(query, document, None, temperature, reduction, None, ("query", "document"))
    in_memory("query", query)
    in_memory("document", document)
    check_weight(weight, query.shape[0], query.device)
    if isinstance(directions, str) or not directions:
        raise ValueError(f"directions: expected a list of {', '.join(DIRECTIONS)}, got {directions!r}")
    for nth, direction in enumerate(directions):
        if direction not in DIRECTIONS or direction in directions[:nth]:
            raise ValueError(f"directions: expected each of {', '.join(DIRECTIONS)} at most once, got {direction!r}")
    if partition not in _PARTITIONS:
        raise ValueError(f"partition: expected 'joint' or 'per_direction', got {partition!r}")
    n, device = query.shape[0], query.device
    if normalize:
        query, document = normalized_together(query, document)
    scale = inverse(temperature, query, document)
    own = torch.arange(n, device=device) if ids is None else as_ids("ids", ids, (n,), device)
    sides = {"query": query, "doc": document}
    pos, found = dot(query, document) * scale, []
    for direction in directions:
        rows, _, columns = direction.partition("_to_")
        found.append(contrast(sides[rows], sides[columns], scale=scale, row_id=own, col_id=own)[1])
    if partition == "joint":
        total = found[0]
        for lse in found[1:]:
            total = logaddexp(total, lse)
        return reduced(softplus(total - pos), reduction, weight)
    return reduced(torch.stack([softplus(lse - pos) for lse in found]).mean(0), reduction, weight)
